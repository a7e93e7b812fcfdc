"""Numbers as the kernel's idr gives them: the lowest that is free.

FME, port and region numbers are counted over all cards and given out again when cards come and go
(dfl.c, `dfl_id_alloc`), which is why the plugin must never keep them: simulated cards do the same.
"""


class Numbers:
    """One series of numbers."""

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._lowest = 0

    def allocate(self) -> int:
        """Take the lowest free number."""
        while self._lowest in self._used:
            self._lowest += 1
        self._used.add(self._lowest)
        return self._lowest

    def take(self, number: int) -> bool:
        """Take this number; False if it is taken already."""
        if number in self._used:
            return False
        self._used.add(number)
        return True

    def free(self, number: int) -> None:
        """Give a number back."""
        self._used.discard(number)
        self._lowest = min(self._lowest, number)
