"""How long to wait before another try."""

import random

from fpga_plugin.errors import FpgaPluginError


class Backoff:
    """Exponential, with jitter, so that tries and nodes do not fall into step.

    Args:
        first: seconds after the first failure; they double with each further one.
        last: seconds after many.
    """

    def __init__(self, first: float = 0.5, last: float = 60.0) -> None:
        self._first, self._last = first, last
        self._next = first

    def reset(self) -> None:
        """It went well."""
        self._next = self._first

    def delay(self, error: Exception | None = None) -> float:
        """Seconds until the next try, a quarter more or less; no less than the server asks."""
        delay = self._next
        self._next = min(2 * delay, self._last)
        asked = error.retry_after if isinstance(error, FpgaPluginError) else 0.0
        return max(delay * random.uniform(0.75, 1.25), asked)  # noqa: S311  # no secret
