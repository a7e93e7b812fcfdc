"""A private file while it is written: on the disk or, where the disk takes none, in memory.

A file on the disk has no name that anybody looks for until it is whole; what a killed process left
of one is removed at the next start (`bitstream.copies`). Memory is a share of the pod's, and no
more: each file in it is an anonymous mapping, which goes back to the system when nobody uses it.
"""

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable

from fpga_plugin.bitstream.byte_range import ByteRange
from fpga_plugin.errors import StoreUnavailableError
from fpga_plugin.process.memory import memory_limit

COPY_MODE = 0o400

_PIECE = 1 << 20

NoDisk = Callable[[OSError], None]
"""Is told why the disk took no copy."""

SHARE = 2
"""All bitstreams that are held in memory may have this part of the limit: a half."""


class MemoryQuota:
    """Gives out memory up to a limit. Thread-safe."""

    def __init__(self, limit: int | None = None) -> None:
        """Take nothing yet.

        Args:
            limit: bytes, of all together; None: by the memory limit of this process.
        """
        self._memory = memory_limit() if limit is None else limit * SHARE
        self.limit = self._memory // SHARE
        self._lock = threading.RLock()  # a garbage collection may give back while one takes
        self._held = 0

    def take(self, size: int, where: str, why: str) -> memoryview:
        """Memory of so many bytes, which is given back when the last view of it goes.

        Args:
            size: in bytes.
            where: the file that it is for, for the message.
            why: it has to be in memory, for the message.

        Raises:
            StoreUnavailableError: it would be too much.
        """
        with self._lock:
            if self._held + size > self.limit:
                held = f", and {self._held} are taken" if self._held else ""
                raise StoreUnavailableError(
                    f"{where}: its {size} bytes cannot be copied to the disk ({why}), and at most"
                    f" {self.limit} bytes are held in memory{held}: 1/{SHARE} of the limit"
                    f" of {self._memory}",
                    hint="make room in FPGA_PLUGIN_STATE_DIR, or raise the pod's memory limit",
                )
            self._held += size
        try:
            mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except BaseException:
            self._give_back(size)
            raise
        weakref.finalize(mapping, self._give_back, size)
        return memoryview(mapping)[:size]

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._held -= size


class StagedFile:
    """Takes the bytes of a file in order. Belongs to one thread at a time.

    Attributes:
        size: bytes that it is to have.
        path: the file on the disk; None: it is in memory.
        view: what is in memory; None: it is on the disk.
    """

    def __init__(
        self, path: str | OSError, size: int, *, where: str, memory: MemoryQuota, no_disk: NoDisk
    ) -> None:
        """Create the file.

        Args:
            path: a name that nothing has; or why there is to be none on the disk.
            size: bytes that it is to have.
            where: what it is a copy of, for messages.
            memory: what there is of it.
            no_disk: is told why the disk took nothing.

        Raises:
            StoreUnavailableError: neither the disk nor the memory has room for it.
        """
        self.size = size
        self.path: str | None = None
        self.view: memoryview | None = None
        self._where = where
        self._memory = memory
        self._no_disk = no_disk
        self._done = 0
        self._descriptor = -1
        if isinstance(path, OSError):
            self._to_memory(path)
            return
        try:
            self._descriptor = _create(path)
        except OSError as error:
            self._to_memory(error)
        else:
            self.path = path

    def write(self, piece: bytes | memoryview) -> None:
        """Add bytes; never more than were announced.

        Raises:
            StoreUnavailableError: the disk is full, and the memory has no room either.
        """
        rest = memoryview(piece)
        if self._done + len(rest) > self.size:
            raise ValueError(f"{self._where}: more than the {self.size} bytes that were announced")
        if self.view is None:
            try:
                while rest:
                    count = os.write(self._descriptor, rest)
                    self._done += count
                    rest = rest[count:]
            except OSError as error:
                self._to_memory(error)
        if self.view is not None:
            self.view[self._done : self._done + len(rest)] = rest
            self._done += len(rest)

    def close(self) -> None:
        """It is whole: nothing more is written."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def drop(self) -> None:
        """Remove the file; whoever has it open or mapped may go on reading it."""
        self.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def _to_memory(self, error: OSError) -> None:
        """Go on in memory, with what the disk took already."""
        self._no_disk(error)
        try:
            view = self._memory.take(self.size, self._where, error.strerror or str(error))
            if self._done:
                written = ByteRange.of_file(self._descriptor, self._done, self._where)
                at = 0
                for piece in written.pieces(_PIECE):
                    view[at : at + len(piece)] = piece
                    at += len(piece)
        finally:
            self.drop()
        self.path, self.view = None, view


def _create(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, COPY_MODE)
    except FileNotFoundError:  # somebody removed the directory
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return os.open(path, flags, COPY_MODE)
