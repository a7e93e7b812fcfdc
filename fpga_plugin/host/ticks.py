"""Looks at what no event reports, all at the same instants: an idle process is woken once for all.

A part that looks every 30 s at its own instant wakes the process at that instant. So all parts
count from the same instant, the start of the process: of looks every 30 s, each second one
coincides with a look that is due every 60 s.
"""

import asyncio
import math
import weakref
from typing import Final

_began: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, float]] = (
    weakref.WeakKeyDictionary()
)
"""The instant that all of a loop's ticks count from, in its time."""


def next_tick(seconds: float) -> float:
    """When it is time next, in the running loop's time: after at most `seconds`, never now."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    began = _began.setdefault(loop, now)
    due = began + (math.floor((now - began) / seconds) + 1) * seconds if seconds > 0 else now
    # Rounded, it may be now, or up to the clock's resolution later, which is now to the loop.
    return due if due > now + seconds / 1000 else due + seconds


async def tick(seconds: float) -> None:
    """Wait until it is time next: for at most as long as that."""
    loop = asyncio.get_running_loop()
    reached = asyncio.Event()
    timer = loop.call_at(next_tick(seconds), reached.set)
    try:
        await reached.wait()
    finally:
        timer.cancel()
