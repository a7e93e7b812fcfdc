"""An answer that is slow to get and that many want: one caller at a time fetches it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Fresh(Generic[T]):
    """The last answer.

    Args:
        first: what there is before the first answer.
        seconds: how long an answer is used before it is fetched again.
        wait: how long a caller waits for a newer one; None: until it is there.
    """

    def __init__(self, first: T, *, seconds: float, wait: float | None = None) -> None:
        self.last = first
        self._seconds, self._wait = seconds, wait
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def get(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, new or `seconds` old; a caller that leaves ends no other's wait."""
        if self._asking is None and time.monotonic() - self._asked_at >= self._seconds:
            self._asking = asyncio.create_task(self._ask(ask))
        if (asking := self._asking) is not None:
            await asyncio.wait({asking}, timeout=self._wait)
            if asking.done():
                asking.result()  # raises what went wrong
        return self.last

    async def _ask(self, ask: Callable[[], Awaitable[T]]) -> None:
        try:
            self.last = await ask()
        finally:
            self._asked_at = time.monotonic()
            self._asking = None
