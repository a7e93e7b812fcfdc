"""Copies of verified bitstreams, named by their digest: what the driver gets.

    <sha256>        the bytes of a file in the store
    <sha256>.gbs    the GBS file that was packed in it, where it is an AOCX file
    .<pid>.<n>      half made; removed at the next start

A file of the store is read once, into a temporary file of our own that is hashed as it is written.
What is judged is that copy; only when it is found good is it renamed to `<sha256>`. From then on
nobody needs the original, and whoever replaces it replaces nothing that is programmed. A copy is
never in memory as a whole, unless the disk has no room for it (`fpga_plugin.bitstream.room`).

The copies are a cache of one boot. Writing them waits for no disk: the death of the process loses
nothing that was written, and after a power cut, which could, the boot is another one and all of
them are made anew. The directory is the plugin's alone (mode 0700); root can do everything anyway.
"""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import structlog

from fpga_plugin.bitstream.draft import Draft
from fpga_plugin.bitstream.room import SHARE, Room
from fpga_plugin.bitstream.span import Span
from fpga_plugin.bitstream.trust import Content
from fpga_plugin.errors import StoreUnavailableError
from fpga_plugin.process.memory import lies_in_memory
from fpga_plugin.process.trusted_files import Original

log = structlog.get_logger()

UNPACKED = ".gbs"
"""Ends the name of what was packed in a file."""

SPARE = 16 << 20
"""Bytes that copies leave free on their file system: the journal lies there too."""

MEMORY_SHARE = 4
"""Where the copies' file system is in memory, they may have this part of the limit: a quarter."""

_DIGITS = 64
"""Of a SHA-256 in hex, which is what the name of a copy is."""

_PIECE = 1 << 20
"""Bytes read at a time: large enough that hashing dominates, small beside the plugin's memory."""

Progress = Callable[[int], None]
"""Is told of the bytes done so far."""


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

    @contextlib.contextmanager
    def span(self, where: str) -> Iterator[Span]:
        """Its bytes, to be read a piece at a time.

        Raises:
            StoreUnavailableError: it cannot be read, or was removed.
        """
        if self.path is None:
            yield Span.of_bytes(self.view or b"", where)
            return
        try:
            with open(self.path, "rb", buffering=0) as file:
                yield Span.of_file(file.fileno(), self.size, where)
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

    def __init__(self, directory: str, limit: int, *, room: Room | None = None) -> None:
        """Create the directory, and remove what a killed process left half made.

        Args:
            directory: below the state directory.
            limit: bytes that all copies may have together; 0: none is kept.
            room: for what the disk does not take.
        """
        self.directory = directory
        self.room = room or Room()
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
            self._most = self.room.limit * SHARE // MEMORY_SHARE
            limit = min(limit, self._most)
        self._limit = limit

    def take(
        self, original: Original, progress: Progress | None = None, *, make_room: bool = False
    ) -> Copy:
        """Copy a file and hash it, in one pass.

        Args:
            original: the file.
            progress: is told how far it is.
            make_room: remove copies that were not used for longest, if the disk is full.

        Raises:
            BitstreamError: the file changed meanwhile.
            StoreUnavailableError: there is no room for it.
        """
        with self.draft(original.size, where=original.path, make_room=make_room) as draft:
            digest = _copy(original, draft.write, progress)
        return Copy(draft.size, draft.path, draft.view, digest)

    @contextlib.contextmanager
    def draft(self, size: int, *, where: str, make_room: bool) -> Iterator[Draft]:
        """A new private file, which is gone again if the block fails.

        Raises:
            StoreUnavailableError: there is no room for it.
        """
        short = self._short_of(size, make_room=make_room)
        draft = Draft(
            short or self._temporary(),
            size,
            where=where,
            room=self.room,
            no_disk=self._no_disk,
        )
        try:
            yield draft
        except BaseException:
            draft.drop()
            raise
        draft.close()
        if draft.path is not None:
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
            copy: by `take` or `draft`.
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


def _copy(
    original: Original, write: Callable[[memoryview], None], progress: Progress | None
) -> str:
    """Hash a file and hand its bytes on; returns the digest."""
    import hashlib  # libcrypto comes with it, 4 MiB: not where all verdicts are known

    digest = hashlib.sha256()
    done = 0
    buffer = memoryview(bytearray(min(_PIECE, original.size + 1)))
    while count := original.file.readinto(buffer):
        done += count
        if done > original.size:
            break
        piece = buffer[:count]
        digest.update(piece)
        write(piece)
        if progress is not None:
            progress(done)
    original.check_read(done)
    return digest.hexdigest()


def in_memory(data: bytes) -> Copy:
    """Bytes that are private already."""
    import hashlib  # as above

    return Copy(len(data), view=memoryview(data), sha256=hashlib.sha256(data).hexdigest())


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
