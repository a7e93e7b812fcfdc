"""Copies of verified bitstreams, named by their digest: what the driver gets.

    <sha256>        the bytes of a file in the store
    <sha256>.gbs    the GBS file that was packed in it, where it is an AOCX file
    .<pid>.<n>      half made; removed at the next start

A file of the store is read once, into a temporary file of our own that is hashed as it is written.
What is judged is that copy; only when it is found good is it renamed to `<sha256>`. From then on
nobody needs the store's file, and whoever replaces it replaces nothing that is programmed. A copy
is never in memory as a whole, unless the disk has no room for it (`bitstream.staging`).

The copies are a cache of one boot. Writing them waits for no disk: the death of the process loses
nothing that was written, and after a power cut, which could, the boot is another one and all of
them are made anew. The directory is the plugin's alone (mode 0700); root can do everything anyway.
"""

import contextlib
import errno
import mmap
import os
import stat
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import structlog

from fpga_plugin.bitstream.byte_range import ByteRange
from fpga_plugin.bitstream.files import (
    Content,
    Progress,
    digest_of,
    no_progress,
    open_file,
)
from fpga_plugin.bitstream.gbs import HEAD_BYTES, Gbs, parse_header
from fpga_plugin.bitstream.staging import SHARE, MemoryQuota, StagedFile
from fpga_plugin.errors import StoreUnavailableError
from fpga_plugin.process.memory import lies_in_memory
from fpga_plugin.process.trusted_files import TrustedFile

log = structlog.get_logger()

UNPACKED = ".gbs"
"""Ends the name of what was packed in a file."""

SPARE = 16 << 20
"""Bytes that copies leave free on their file system: the journal lies there too."""

MEMORY_SHARE = 4
"""Where the copies' file system is in memory, they may have this part of the limit: a quarter."""

_DIGITS = 64
"""Of a SHA-256 in hex, which is what the name of a copy is."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A private copy of a file, or of what was packed in one.

    Attributes:
        size: in bytes.
        path: of the file on the disk; None where it is in memory.
        view: what is in memory.
        sha256: of its bytes, 64 hex digits; empty for what was packed in a file.
    """

    size: int
    path: str | None = None
    view: memoryview | None = None
    sha256: str = ""

    @classmethod
    def of(cls, staged: StagedFile, sha256: str = "") -> "Copy":
        """What was written whole."""
        return cls(staged.size, staged.path, staged.view, sha256)

    @contextlib.contextmanager
    def byte_range(self, where: str) -> Iterator[ByteRange]:
        """Its bytes, to be read a piece at a time.

        Raises:
            StoreUnavailableError: it cannot be read, or was removed.
        """
        if self.path is None:
            yield ByteRange.of_bytes(self.view or b"", where)
            return
        try:
            with open(self.path, "rb", buffering=0) as file:
                yield ByteRange.of_file(file.fileno(), self.size, where)
        except OSError as error:
            raise StoreUnavailableError(
                f"{where}: its private copy {self.path} cannot be read: {error.strerror}",
                hint="kubelet's next try makes another; check the disk of FPGA_PLUGIN_STATE_DIR",
            ) from error

    @property
    def content(self) -> Content:
        """The same for whoever judges it."""
        return Content(self.sha256, self.size)


class Copies:
    """The directory of copies. Thread-safe; all of it blocks."""

    def __init__(self, directory: str, limit: int, *, memory: MemoryQuota | None = None) -> None:
        """Create the directory, and remove what a killed process left half made.

        Args:
            directory: below the state directory.
            limit: bytes that all copies may have together; 0: none is kept.
            memory: for what the disk does not take.
        """
        self.directory = directory
        self.memory = memory or MemoryQuota()
        self._lock = threading.Lock()
        self._number = 0
        self._full = False
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            os.chmod(directory, 0o700)
            for name in os.listdir(directory):
                if name.startswith("."):
                    os.unlink(os.path.join(directory, name))
        except OSError as error:
            self._no_disk(error)
        self._most: int | None = None
        if lies_in_memory(directory):
            self._most = self.memory.limit * SHARE // MEMORY_SHARE
            limit = min(limit, self._most)
        self._limit = limit

    def take(
        self, opened: TrustedFile, progress: Progress = no_progress, *, make_room: bool = False
    ) -> Copy:
        """Copy a file and hash it, in one pass.

        Args:
            opened: the file.
            progress: is told how far it is.
            make_room: remove copies that were not used for longest, if the disk is full.

        Raises:
            BitstreamError: the file changed meanwhile.
            StoreUnavailableError: there is no room for it.
        """
        with self.stage(opened.size, where=opened.path, make_room=make_room) as staged:
            content = digest_of(opened, write=staged.write, progress=progress)
        return Copy.of(staged, content.sha256)

    @contextlib.contextmanager
    def stage(self, size: int, *, where: str, make_room: bool) -> Iterator[StagedFile]:
        """A new private file, which is gone again if the block fails.

        Raises:
            StoreUnavailableError: there is no room for it.
        """
        short = self._short_of(size, make_room=make_room)
        staged = StagedFile(
            short or self._temporary(),
            size,
            where=where,
            memory=self.memory,
            no_disk=self._no_disk,
        )
        try:
            yield staged
        except BaseException:
            staged.drop()
            raise
        staged.close()
        if staged.path is not None:
            self._full = False

    def _short_of(self, size: int, *, make_room: bool) -> OSError | None:
        """Why the disk is not to take so many bytes more; None: it has room."""
        if self._most is not None and size > self._most:
            return OSError(errno.EFBIG, f"its file system is in memory, and takes {self._most}")
        with self._lock:
            removable = self._oldest_first() if make_room else []
            while True:
                free = _free(self.directory)
                if free is None or free - SPARE >= size:
                    return None
                if not removable:
                    return OSError(errno.ENOSPC, f"{free} bytes are free")
                _unlink(removable.pop(0)[0])

    def keep(self, copy: Copy, name: str, *, make_room: bool) -> bool:
        """Take a copy that was found good into the cache; returns whether it is there.

        Args:
            copy: by `take` or `stage`.
            name: what it is called: its digest; with `UNPACKED`, that of the file it was in.
            make_room: remove those that were not used for longest, if there is no room.
        """
        if copy.path is None:
            return False
        with self._lock:
            final = self.path(name)
            if copy.size > self._limit:
                return False
            others = {path: size for path, size, _ in self._oldest_first() if path != final}
            excess = sum(others.values()) + copy.size - self._limit
            if excess > 0 and not make_room:
                return False
            for path, size in others.items():
                if excess <= 0:
                    break
                _unlink(path)
                excess -= size
            try:
                os.rename(copy.path, final)
            except OSError as error:
                self._no_disk(error)
                return False
        return True

    def drop(self, copy: Copy) -> None:
        """Remove a copy that was not kept; whoever has it open may go on reading it."""
        if copy.path is not None:
            _unlink(copy.path)

    def find(self, name: str, size: int) -> Copy | None:
        """A copy, which now counts as used last; None where it is not there any more."""
        path = self.path(name)
        try:
            found = os.lstat(path)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                return None
            if found.st_uid != os.geteuid() or found.st_mode & 0o377:
                return None
            os.utime(path)
        except OSError:
            return None
        return Copy(size, path, sha256="" if name.endswith(UNPACKED) else name)

    def path(self, name: str) -> str:
        """Where the copy of this name is."""
        return os.path.join(self.directory, name)

    def only(self, digests: Collection[str]) -> None:
        """Remove all copies but these: of files that are not in the store any more."""
        with self._lock:
            for path, _, _ in self._oldest_first():
                if os.path.basename(path)[:_DIGITS] not in digests:
                    _unlink(path)

    def _oldest_first(self) -> list[tuple[str, int, int]]:
        found = []
        with contextlib.suppress(OSError), os.scandir(self.directory) as entries:
            for entry in entries:
                if len(entry.name.removesuffix(UNPACKED)) == _DIGITS:
                    with contextlib.suppress(OSError):
                        known = entry.stat(follow_symlinks=False)
                        found.append((entry.path, known.st_size, known.st_mtime_ns))
        return sorted(found, key=lambda item: item[2])

    def _temporary(self) -> str:
        with self._lock:
            self._number += 1
            return os.path.join(self.directory, f".{os.getpid()}.{self._number}")

    def _no_disk(self, error: OSError) -> None:
        if not self._full:
            self._full = True
            log.warning(
                "verified copies cannot be kept: bitstreams are hashed whenever they are used",
                directory=self.directory,
                error=error.strerror,
                hint="make room in FPGA_PLUGIN_STATE_DIR, or make it writable",
            )


def map_gbs(path: str, *, memory: MemoryQuota) -> Gbs:
    """A whole GBS file that nobody ever writes to: the image is mapped, not copied.

    Copying 32 MiB would take as long as a twentieth of their reconfiguration. So the driver copies
    them from the page cache, in the ioctl and before it takes the card (dfl-fme-pr.c, fme_pr).
    What cannot be read from the disk then is the ioctl's EFAULT; here reading only begins.

    Args:
        path: the file.
        memory: for it where its file system has no mappings.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        BitstreamError: it is no GBS file that can be used.
        StoreUnavailableError: it cannot be mapped, and the memory has no room for it.
    """
    with open_file(path, inside=None) as opened:
        start = opened.file.read(min(opened.size, HEAD_BYTES))
        header = parse_header(start, size=opened.size, where=path)
        descriptor = opened.file.fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        # Writable, for ctypes gives no address of other memory; as it is private and nobody writes,
        # no page of it is ever copied.
        try:
            whole = memoryview(mmap.mmap(descriptor, opened.size, flags=mmap.MAP_PRIVATE))
        except (OSError, ValueError) as error:  # no mappings there; a file that was cut
            whole = memory.take(opened.size, path, f"it cannot be mapped: {error}")
            opened.file.seek(0)
            done = 0
            while count := opened.file.readinto(whole[done:]):
                done += count
            opened.check_read(done)
    return Gbs(metadata=header.metadata, image=whole[header.image_offset :])


def _free(directory: str) -> int | None:
    """Bytes that a file system has left for us; None where it does not tell."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
