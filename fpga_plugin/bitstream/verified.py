"""Copies of verified bitstreams, named by their digest: what the driver gets.

A file of the store is read once, into a temporary file of our own that is hashed as it is written.
What is judged is that copy; only when it is found good is it renamed to `<sha256>`. From then on
nobody needs the original, and whoever replaces it replaces nothing that is programmed.

The copies are a cache of one boot. Writing them waits for no disk: the death of the process loses
nothing that was written, and after a power cut, which could, the boot is another one and all of
them are made anew. The directory is the plugin's alone (mode 0700); root can do everything anyway.
"""

import contextlib
import mmap
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from fpga_plugin.bitstream.trust import Content
from fpga_plugin.originals import Original

if TYPE_CHECKING:
    from cryptography.utils import Buffer

log = structlog.get_logger()

COPY_MODE = 0o400

_DIGITS = 64
"""Of a SHA-256 in hex, which is what the name of a copy is."""

_PIECE = 1 << 20
"""Bytes read at a time: large enough that hashing dominates, small beside the plugin's memory."""

Progress = Callable[[int], None]
"""Is told of the bytes done so far."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A private copy of a file, not judged yet.

    Attributes:
        content: what is in it.
        path: the temporary file; None where it is in memory.
        data: what was read, where there was no room on the disk.
    """

    content: Content
    path: str | None = None
    data: bytes | None = None


class Copies:
    """The directory of copies. Thread-safe; all of it blocks."""

    def __init__(self, directory: str, limit: int) -> None:
        """Create the directory, and remove what a killed process left half made.

        Args:
            directory: below the state directory.
            limit: bytes that all copies may have together; 0: none is kept.
        """
        self.directory = directory
        self._limit = limit
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
            self._no_room(error)

    def take(self, original: Original, progress: Progress | None = None) -> Taken:
        """Copy a file and hash it, in one pass.

        Where the disk takes no copy, the bytes are kept in memory: the plugin goes on serving.

        Raises:
            BitstreamError: the file changed meanwhile.
        """
        path = self._temporary()
        try:
            descriptor = self._create(path)
        except OSError as error:
            self._no_room(error)
            return _into_memory(original, progress)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as copy:
                digest, failed = _copy(original, copy.write, progress)
        except BaseException:
            _unlink(path)
            raise
        if failed is not None:
            _unlink(path)
            self._no_room(failed)
            return _into_memory(original, progress)
        self._full = False
        return Taken(Content(digest, original.size, lambda: _mapped(path)), path=path)

    def _create(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags, COPY_MODE)
        except FileNotFoundError:  # somebody removed the directory
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            return os.open(path, flags, COPY_MODE)

    def keep(self, taken: Taken, *, make_room: bool) -> bool:
        """Take a copy that was found good into the cache; returns whether it is there.

        Args:
            taken: by `take`.
            make_room: remove those that were not used for longest, if there is no room.
        """
        if taken.path is None:
            return False
        with self._lock:
            final = self.path(taken.content.sha256)
            if taken.content.size > self._limit:
                return False
            others = {name: size for name, size, _ in self._oldest_first() if name != final}
            excess = sum(others.values()) + taken.content.size - self._limit
            if excess > 0 and not make_room:
                return False
            for path, size in others.items():
                if excess <= 0:
                    break
                _unlink(path)
                excess -= size
            try:
                os.rename(taken.path, final)
            except OSError as error:
                self._no_room(error)
                return False
        return True

    def drop(self, taken: Taken) -> None:
        """Remove a copy that was not kept; whoever has it open may go on reading it."""
        if taken.path is not None:
            _unlink(taken.path)

    def find(self, sha256: str, size: int) -> Content | None:
        """A copy, which now counts as used last; None where it is not there any more."""
        path = self.path(sha256)
        try:
            found = os.lstat(path)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                return None
            if found.st_uid != os.geteuid() or found.st_mode & 0o377:
                return None
            os.utime(path)
        except OSError:
            return None
        return Content(sha256, size, lambda: _mapped(path))

    def path(self, sha256: str) -> str:
        """Where the copy with this digest is."""
        return os.path.join(self.directory, sha256)

    def only(self, digests: Collection[str]) -> None:
        """Remove all copies but these: of files that are not in the store any more."""
        with self._lock:
            for path, _, _ in self._oldest_first():
                if os.path.basename(path) not in digests:
                    _unlink(path)

    def _oldest_first(self) -> list[tuple[str, int, int]]:
        found = []
        with contextlib.suppress(OSError), os.scandir(self.directory) as entries:
            for entry in entries:
                if len(entry.name) == _DIGITS:
                    with contextlib.suppress(OSError):
                        known = entry.stat(follow_symlinks=False)
                        found.append((entry.path, known.st_size, known.st_mtime_ns))
        return sorted(found, key=lambda item: item[2])

    def _temporary(self) -> str:
        with self._lock:
            self._number += 1
            return os.path.join(self.directory, f".{os.getpid()}.{self._number}")

    def _no_room(self, error: OSError) -> None:
        if not self._full:
            self._full = True
            log.warning(
                "verified copies cannot be kept: bitstreams are hashed whenever they are used",
                directory=self.directory,
                error=error.strerror,
                hint="make room in FPGA_PLUGIN_STATE_DIR, or make it writable",
            )


def _copy(
    original: Original, write: Callable[[memoryview], int | None], progress: Progress | None
) -> tuple[str, OSError | None]:
    """Hash a file and hand its bytes on; returns the digest, and what the writing failed with."""
    import hashlib  # libcrypto comes with it, 4 MiB: not where all verdicts are known

    digest = hashlib.sha256()
    done = 0
    buffer = memoryview(bytearray(min(_PIECE, original.size + 1)))
    while count := original.file.readinto(buffer):
        piece = buffer[:count]
        digest.update(piece)
        try:
            while piece:
                piece = piece[write(piece) or 0 :]
        except OSError as error:
            return "", error
        done += count
        if done > original.size:
            break
        if progress is not None:
            progress(done)
    original.check_read(done)
    return digest.hexdigest(), None


def _into_memory(original: Original, progress: Progress | None) -> Taken:
    original.file.seek(0)
    data = bytearray()

    def write(piece: memoryview) -> int:
        data.extend(piece)
        return len(piece)

    digest, _ = _copy(original, write, progress)
    return in_memory(bytes(data), digest)


def in_memory(data: bytes, digest: str | None = None) -> Taken:
    """Bytes that are private already."""
    if digest is None:
        import hashlib  # as above

        digest = hashlib.sha256(data).hexdigest()
    content = Content(digest, len(data), lambda: contextlib.nullcontext(data))
    return Taken(content, data=data)


@contextlib.contextmanager
def _mapped(path: str) -> Iterator["Buffer"]:
    """A copy's bytes without reading them all into memory; nobody writes to a copy."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        memoryview(mapped) as view,
    ):
        yield view


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
