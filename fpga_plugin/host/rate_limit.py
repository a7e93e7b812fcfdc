"""How often something may happen that a stranger can cause: log lines and Events."""

import time
from collections.abc import Callable
from typing import Final

SECONDS: Final = 60.0
"""Between two lines of one message."""


class TokenBucket:
    """So many at once, then one in so many seconds.

    Args:
        burst: at once.
        seconds: from one to the next, later.
        clock: seconds that only grow.
    """

    def __init__(
        self, burst: int, seconds: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._seconds, self._clock = burst, seconds, clock
        self._tokens, self._at = float(burst), clock()

    def may(self) -> bool:
        """Whether one more may happen now."""
        return self._level(self._clock()) >= 1

    def take(self) -> None:
        """One happens that `may`."""
        now = self._clock()
        self._tokens, self._at = self._level(now) - 1, now

    def _level(self, now: float) -> float:
        return min(self._burst, self._tokens + (now - self._at) / self._seconds)


class RateLimit:
    """Says when a log line is due, and how many events it stands for.

    Args:
        seconds: between two lines.
        clock: seconds that only grow.
    """

    def __init__(
        self, seconds: float = SECONDS, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lines = TokenBucket(1, seconds, clock=clock)
        self._events = 0

    def happened(self) -> int:
        """Note one event: 0 while no line is due, else the number of events since the last line."""
        self._events += 1
        if not self._lines.may():
            return 0
        self._lines.take()
        events, self._events = self._events, 0
        return events
