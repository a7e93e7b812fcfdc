"""A cache of files, each named by the digest of what is in it: what the driver reads.

    <sha256>      a whole file
    .<anything>   half written; removed at the next start

A file gets its bytes under a temporary name, and is hashed while they are written. A caller
that found them good renames it (`keep`). So whenever the process dies, a name of 64 digits is a
whole file. Each file is hashed again before its first use in each run of the plugin: what a power
cut or a failing disk made of it is never programmed. No file is in memory as a whole; the driver
reads a mapping, which outlives the file's removal.

The directory is the plugin's alone (mode 0700); root can do everything anyway. It may be removed at
any time: what is missing is made again.
"""

import contextlib
import errno
import hashlib
import io
import mmap
import os
import re
import tempfile
import threading
from collections.abc import Collection, Iterator

import structlog

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.errors import StoreUnavailableError
from fpga_plugin.host.file_identity import Version, version_of
from fpga_plugin.host.memory import lies_in_memory, memory_limit

log = structlog.get_logger()

SPARE = 16 << 20
"""Bytes that the cache leaves free on its file system: the journal lies there too."""

MEMORY_SHARE = 4
"""Where the file system is in memory, the cache may have this part of the memory limit: a quarter.
What lies there counts against the limit, and cannot be given back."""

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


class NewFile:
    """A file of the cache while it is written. Belongs to one thread.

    Attributes:
        size: bytes that it is to have.
        path: its temporary name.
    """

    def __init__(self, directory: str, size: int, *, where: str) -> None:
        """Create the file.

        Args:
            directory: of the cache.
            size: bytes that it is to have.
            where: what it is a copy of, for messages.

        Raises:
            OSError: it cannot be created.
        """
        self.size = size
        self._where = where
        self._digest = hashlib.sha256()
        self._descriptor, self.path = tempfile.mkstemp(prefix=".", dir=directory)
        os.fchmod(self._descriptor, 0o400)

    @property
    def sha256(self) -> str:
        """Of what was written until now, 64 hex digits."""
        return self._digest.hexdigest()

    @property
    def byte_range(self) -> ByteRange:
        """Its bytes, to be read a piece at a time."""
        return ByteRange.of_file(self._descriptor, self.size, self._where)

    def write(self, piece: bytes | memoryview) -> None:
        """Add bytes.

        Raises:
            StoreUnavailableError: the disk is full, or fails.
        """
        self._digest.update(piece)
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise _no_copy(self._where, self.size, error) from error

    def map(self) -> memoryview:
        """The whole file.

        Raises:
            StoreUnavailableError: it cannot be mapped.
        """
        try:
            return _mapped(self._descriptor, self.size)
        except (OSError, ValueError) as error:
            raise _no_copy(self._where, self.size, error) from error

    def close(self) -> None:
        """Remove the temporary name; what is mapped stays."""
        os.close(self._descriptor)
        _unlink(self.path)


class Cache:
    """The directory. Thread-safe; all of it blocks."""

    def __init__(self, directory: str, limit: int) -> None:
        """Create the directory, and remove what is no file of the cache.

        Args:
            directory: below the state directory.
            limit: bytes that all files may have together; 0: none is kept.
        """
        self.directory = directory
        self._limit = limit
        self._lock = threading.Lock()
        self._checked: dict[str, Version] = {}
        with contextlib.suppress(OSError):  # a later write reports the error
            os.makedirs(directory, mode=0o700, exist_ok=True)
            os.chmod(directory, 0o700)
            for name in os.listdir(directory):
                if not _DIGEST.fullmatch(name):
                    os.unlink(os.path.join(directory, name))
        self._most: int | None = None
        if lies_in_memory(directory):
            self._most = memory_limit() // MEMORY_SHARE
            self._limit = min(limit, self._most)

    @contextlib.contextmanager
    def new(self, size: int, *, where: str, evict: bool) -> Iterator[NewFile]:
        """A file to be written, which is gone after the block unless it was kept.

        Args:
            size: bytes that it will have.
            where: what it is a copy of, for messages.
            evict: remove files that were not used for longest, if the disk is full.

        Raises:
            StoreUnavailableError: the disk has no room for it.
        """
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            self._make_room(size, evict=evict)
            file = NewFile(self.directory, size, where=where)
        except OSError as error:
            raise _no_copy(where, size, error) from error
        try:
            yield file
        finally:
            file.close()

    def keep(self, file: NewFile, *, evict: bool) -> None:
        """Take a file that was found good into the cache, if the limit has room for it.

        Args:
            file: what `new` gave, whole.
            evict: remove those that were not used for longest, if there is no room.
        """
        final = self._path(file.sha256)
        with self._lock, contextlib.suppress(OSError):  # what is not kept is made again
            others = [found for found in self._oldest_first() if found[1] != final]
            excess = sum(size for _, _, size in others) + file.size - self._limit
            if file.size > self._limit or (excess > 0 and not evict):
                return
            for _, path, size in others:
                if excess <= 0:
                    break
                _unlink(path)
                excess -= size
            os.rename(file.path, final)
            self._checked[file.sha256] = version_of(os.stat(final))

    def map(self, sha256: str) -> memoryview | None:
        """A whole file, which now counts as used last; None where it is not there."""
        path = self._path(sha256)
        try:
            with open(path, "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                if self._checked.get(sha256) != version_of(found) and not _has(file, sha256):
                    log.error(
                        "a verified copy is damaged: another one is made",
                        file=path,
                        hint="check the disk of FPGA_PLUGIN_STATE_DIR",
                    )
                    _unlink(path)
                    return None
                os.utime(file.fileno())
                self._checked[sha256] = version_of(os.fstat(file.fileno()))
                return _mapped(file.fileno(), found.st_size)
        except (OSError, ValueError):
            return None

    def only(self, digests: Collection[str]) -> None:
        """Remove all files but these."""
        with self._lock:
            self._checked = {k: v for k, v in self._checked.items() if k in digests}
            for _, path, _ in self._oldest_first():
                if os.path.basename(path) not in digests:
                    _unlink(path)

    def _path(self, sha256: str) -> str:
        return os.path.join(self.directory, sha256)

    def _make_room(self, size: int, *, evict: bool) -> None:
        """Have so many bytes on the disk.

        Raises:
            OSError: it has not.
        """
        if self._most is not None and size > self._most:
            raise OSError(errno.EFBIG, f"its file system is in memory, and takes {self._most}")
        with self._lock:
            removable = self._oldest_first() if evict else []
            while (free := _free(self.directory)) is not None and free - SPARE < size:
                if not removable:
                    raise OSError(errno.ENOSPC, f"{free} bytes are free")
                _unlink(removable.pop(0)[1])

    def _oldest_first(self) -> list[tuple[int, str, int]]:
        """When it was last used, path and size of each file."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.directory) as entries:
            for entry in entries:
                if _DIGEST.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        known = entry.stat(follow_symlinks=False)
                        found.append((known.st_mtime_ns, entry.path, known.st_size))
        return sorted(found)


def _has(file: io.FileIO, sha256: str) -> bool:
    """Whether a file has this digest."""
    return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def _mapped(descriptor: int, size: int) -> memoryview:
    """A whole file that nobody ever writes to: mapped, not copied.

    Copying 32 MiB would take as long as a twentieth of their reconfiguration. So the driver copies
    them from the page cache, in the ioctl and before it takes the card (dfl-fme-pr.c, fme_pr).
    What cannot be read from the disk then is the ioctl's EFAULT; here reading only begins.
    """
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    # Writable, for ctypes gives no address of other memory; as it is private and nobody writes,
    # no page of it is ever copied.
    return memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE))


def _no_copy(where: str, size: int, error: OSError | ValueError) -> StoreUnavailableError:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return StoreUnavailableError(
        f"{where}: its {size} bytes cannot be copied to the disk: {why}",
        hint="make room in FPGA_PLUGIN_STATE_DIR: only what was copied there is programmed",
    )


def _free(directory: str) -> int | None:
    """Bytes that a file system has left for us; None where it does not say."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
