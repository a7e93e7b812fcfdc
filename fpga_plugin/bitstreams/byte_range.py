"""A part of a file, read piece by piece: how large files are looked into with little memory.

A file may be larger than the memory that the plugin's pod has. It is not mapped either while it is
in the store: a writer that truncates a mapped file ends the process that reads it (SIGBUS).
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fpga_plugin.errors import BitstreamError

ReadAt = Callable[[int, int], bytes]
"""Gives so many bytes from an offset on; fewer only where there are no more."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Some bytes of a file.

    Attributes:
        read_at: reads the file.
        start: where in the file they begin.
        size: how many.
        where: the file, for messages.
    """

    read_at: ReadAt
    start: int
    size: int
    where: str

    @classmethod
    def of_bytes(cls, data: bytes | memoryview, where: str) -> "ByteRange":
        """All of what is in memory."""
        view = memoryview(data)
        return cls(lambda at, count: bytes(view[at : at + count]), 0, len(view), where)

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
            raise BitstreamError(f"{self.where}: got shorter while it was read")
        return data

    def part(self, at: int, size: int) -> "ByteRange":
        """Some of these bytes; the caller has checked that they are there."""
        return ByteRange(self.read_at, self.start + at, size, self.where)

    def pieces(self, count: int) -> Iterator[bytes]:
        """All of them in order, at most so many at a time."""
        for at in range(0, self.size, count):
            yield self.read(at, count)


def _read_at(descriptor: int, at: int, count: int) -> bytes:
    data = os.pread(descriptor, count, at)
    if len(data) == count or not data:
        return data
    parts = [data]
    got = len(data)
    while got < count and (piece := os.pread(descriptor, count - got, at + got)):
        parts.append(piece)
        got += len(piece)
    return b"".join(parts)
