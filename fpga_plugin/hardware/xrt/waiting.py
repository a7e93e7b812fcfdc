"""Waiting for what a card's drivers do by themselves, and tell nobody: somebody has to look."""

import time
from collections.abc import Callable

POLL_SECONDS = 0.05


def holds(condition: Callable[[], bool]) -> bool:
    """Whether something is so; what cannot be read now is not: in a reset attributes vanish."""
    try:
        return condition()
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Look until something is so, or the time is up; returns whether it is."""
    ends = time.monotonic() + seconds
    while not (found := holds(condition)) and time.monotonic() < ends:
        time.sleep(POLL_SECONDS)
    return found
