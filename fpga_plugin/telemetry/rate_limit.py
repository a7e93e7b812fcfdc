"""A limit on log lines that a stranger can cause: each message at most once a minute."""

import time
from collections.abc import Callable
from typing import Final

SECONDS: Final = 60.0
"""Between two lines of one message."""


class RateLimit:
    """Says when a line is due, and how many events it stands for.

    Args:
        seconds: between two lines.
        clock: seconds that only grow.
    """

    def __init__(
        self, seconds: float = SECONDS, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._due = float("-inf")
        self._events = 0

    def happened(self) -> int:
        """Note one event: 0 while no line is due, else the number of events since the last line."""
        self._events += 1
        now = self._clock()
        if now < self._due:
            return 0
        self._due = now + self._seconds
        events, self._events = self._events, 0
        return events
