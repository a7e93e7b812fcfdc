"""Answers that any client on the network may ask for, each rendered at most once a second.

Metrics and status of a large node cost the event loop some 60 ms, and kubelet's calls wait for it.
Without this, 120 connections that ask again and again stretch Allocate to seconds.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from fpga_plugin.observability.http import Response

FRESH: Final = 1.0
"""Seconds for which an answer is given again, and until another one is rendered."""


class Rendered:
    """The last answer of one kind.

    Args:
        seconds: how long it is given again.
    """

    def __init__(self, seconds: float = FRESH) -> None:
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._began = float("-inf")
        self._kept: tuple[str, Response] | None = None

    async def get(self, words: str, render: Callable[[], Awaitable[Response]]) -> Response:
        """The answer to a question; another one than the last waits for its second.

        Args:
            words: what distinguishes the question from others of its kind.
            render: makes the answer.
        """
        async with self._turn:  # who asks meanwhile waits, and gets the same
            left = self._began + self._seconds - time.monotonic()
            if left > 0 and self._kept is not None and self._kept[0] == words:
                return self._kept[1]
            if left > 0:
                await asyncio.sleep(left)
            self._kept = None
            self._began = time.monotonic()  # counts even if the client goes away now
            response = await render()
            self._began = time.monotonic()
            self._kept = words, response
            return response
