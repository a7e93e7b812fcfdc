"""What runs beside a test in its event loop, and how a test waits for what nobody announces."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from doubles import LIMIT


@contextlib.asynccontextmanager
async def beside(run: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run it until the block ends; a failure of its own is the test's."""
    running = asyncio.create_task(run)
    try:
        yield
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def until(holds: Callable[[], object]) -> None:
    """Look until it holds."""
    async with asyncio.timeout(LIMIT):
        while not holds():  # noqa: ASYNC110  # nobody announces it
            await asyncio.sleep(0.005)
