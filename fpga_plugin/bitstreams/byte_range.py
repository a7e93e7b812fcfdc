"""A part of a file, read piece by piece: how large files are looked into with little memory.

A file may be larger than the memory that the plugin's pod has. It is not mapped either while it is
in the store: a writer that truncates a mapped file ends the process that reads it (SIGBUS).
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fpga_plugin.errors import BitstreamError

DAMAGED = "the file is cut off or damaged; copy or build it again"
"""What to do about a file whose parts do not fit together."""

ReadAt = Callable[[int, int], bytes]
"""Gives so many bytes from an offset on; fewer only where there are no more."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Some bytes of a file.

    Attributes:
        read_at: reads the file.
        start: where in the file they begin.
        size: how many.
        where: the file, and what of it these are, for messages.
    """

    read_at: ReadAt
    start: int
    size: int
    where: str

    @classmethod
    def of_bytes(
        cls, data: bytes | memoryview, where: str, *, size: int | None = None
    ) -> "ByteRange":
        """All of what is in memory; with a size, the beginning of so many bytes."""
        view = memoryview(data)
        size = len(view) if size is None else size
        return cls(lambda at, count: bytes(view[at : at + count]), 0, size, where)

    @classmethod
    def of_file(cls, descriptor: int, size: int, where: str) -> "ByteRange":
        """The first `size` bytes of an open file, which has to stay open."""
        return cls(lambda at, count: _read_at(descriptor, at, count), 0, size, where)

    def read(self, at: int = 0, count: int | None = None) -> bytes:
        """Bytes from an offset on, as many as there are up to a count.

        Raises:
            BitstreamError: the file got shorter.
        """
        left = self.size - at
        wanted = max(left if count is None else min(count, left), 0)
        data = self.read_at(self.start + at, wanted) if wanted else b""
        if len(data) != wanted:
            raise self.wrong("got shorter while it was read")
        return data

    def part(self, at: int, size: int, name: str = "") -> "ByteRange":
        """Some of these bytes; the caller has checked that they are there.

        Args:
            at: where they begin.
            size: how many.
            name: what they are, for messages.
        """
        where = f"{self.where}: {name}" if name else self.where
        return ByteRange(self.read_at, self.start + at, size, where)

    def wrong(self, what: str, hint: str = DAMAGED) -> BitstreamError:
        """The error that says what is wrong with these bytes, and what to do."""
        return BitstreamError(f"{self.where}: {what}", hint=hint)

    def pieces(self, count: int) -> Iterator[bytes]:
        """All of them in order, at most so many at a time."""
        for at in range(0, self.size, count):
            yield self.read(at, count)


def _read_at(descriptor: int, at: int, count: int) -> bytes:
    parts = []
    while count and (piece := os.pread(descriptor, count, at)):
        parts.append(piece)
        at += len(piece)
        count -= len(piece)
    return b"".join(parts)
