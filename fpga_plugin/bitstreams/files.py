"""Files of bitstreams: opened, hashed and written without surprises.

How a file is opened so that nothing else can be meant by it, `host.trusted_files` says, and how
one is written, `host.atomic_file`. All of it blocks: call it from a thread.
"""

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fpga_plugin.errors import BitstreamError, BitstreamNotFoundError
from fpga_plugin.host.atomic_file import replace_file
from fpga_plugin.host.trusted_files import TrustedFile, open_trusted

MAX_FILE_BYTES = 1 << 30
"""Whole-device images of large FPGAs stay well below 1 GiB."""

FILE_MODE = 0o644
"""Anyone may read a bitstream, only its owner replaces it."""

Progress = Callable[[int, int], None]
"""Called with the bytes done so far, and the total."""

_PIECE = 4 << 20
"""Bytes between two words of progress."""

_HASHED_PIECE = 64 << 10
"""Bytes hashed at a time: large enough that hashing dominates, and below what glibc's malloc gives
a mapping of its own (128 KiB). The first of those that is freed raises that limit to its size, and
what is freed later stays with the process: 1 MiB pieces left it 0.8 MiB larger."""


@dataclass(frozen=True, slots=True)
class Content:
    """What the bytes of a file are known by.

    Attributes:
        sha256: of all of them, 64 hex digits.
        size: how many.
    """

    sha256: str
    size: int


def no_progress(_done: int, _size: int) -> None:
    """Report no progress."""


@contextlib.contextmanager
def open_file(
    path: str, *, inside: str | None, guarded: bool = False, limit: int = MAX_FILE_BYTES
) -> Iterator[TrustedFile]:
    """Open a file of at most so many bytes; `trusted_files.open_trusted` has the rest.

    `guarded` where the file is to be trusted: nobody asks who may write what is only looked at.

    Raises:
        BitstreamNotFoundError: there is none.
        BitstreamError: it must not be used; the message says why.
    """
    try:
        with open_trusted(path, inside=inside, guarded=guarded, limit=limit) as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise BitstreamNotFoundError(f"{path}: no such file", hint="check the path") from None


def pieces_of(file: TrustedFile, progress: Progress = no_progress) -> Iterator[memoryview]:
    """A file from its beginning to its end; each piece is overwritten by the next.

    Args:
        file: it, open.
        progress: gets how far it is.

    Raises:
        BitstreamError: it changed meanwhile.
    """
    done = 0
    buffer = memoryview(bytearray(min(_HASHED_PIECE, file.size + 1)))
    while done <= file.size and (count := file.file.readinto(buffer)):
        done += count
        if done <= file.size:
            yield buffer[:count]
            progress(done, file.size)
    file.check_read(done)


def digest_of(file: TrustedFile, *, progress: Progress = no_progress) -> Content:
    """Hash a file; raises as `pieces_of`."""
    digest = hashlib.sha256()
    for piece in pieces_of(file, progress):
        digest.update(piece)
    return Content(digest.hexdigest(), file.size)


def read_digest(
    path: str, *, inside: str | None, guarded: bool, progress: Progress = no_progress
) -> Content:
    """Open and hash a file.

    Raises:
        BitstreamNotFoundError: there is none.
        BitstreamError: it must not be used, or changed while it was read.
    """
    with open_file(path, inside=inside, guarded=guarded) as file:
        return digest_of(file, progress=progress)


def content_of(data: bytes) -> Content:
    """What bytes in memory are known by."""
    return Content(hashlib.sha256(data).hexdigest(), len(data))


def read_bytes(
    path: str, *, limit: int = MAX_FILE_BYTES, progress: Progress = no_progress
) -> bytes:
    """A regular file of any content.

    Raises:
        BitstreamNotFoundError: there is no such file.
        BitstreamError: it is no regular file, cannot be read, or has more than `limit` bytes.
    """
    data = io.BytesIO()  # gives out what it holds without another copy of it
    with open_file(path, inside=None, limit=limit) as opened:
        while piece := opened.file.read(min(_PIECE, opened.size - data.tell())):
            data.write(piece)
            progress(data.tell(), opened.size)
    return data.getvalue()


_HINTS = {
    errno.EROFS: "the plugin's pod only reads the store: write on the node, or where the store is"
    " filled from",
    errno.ENOENT: "no directory can be made there: name another one",
    errno.ENOTDIR: "a part of the path is a file: name another one",
}
"""What to do about a file or directory that cannot be written."""


def make_directory(path: str) -> None:
    """Make a directory of a store, and those above it, where they are missing.

    Raises:
        BitstreamError: one cannot be made; the message says which.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        # The one that is missing, not the last: `/proc/x` of `/proc/x/<interface id>`.
        which = error.filename or path
        raise BitstreamError(
            f"{which}: the directory cannot be made: {error.strerror}", hint=_hint(error)
        ) from error


def _hint(error: OSError) -> str:
    usual = "check the directory's permissions, and that its file system has room"
    return _HINTS.get(error.errno or 0, usual)


def write_atomically(
    path: str, data: bytes, *, mode: int = FILE_MODE, progress: Progress = no_progress
) -> None:
    """Write a file of a store, which may be another process's work too at this moment.

    Raises:
        BitstreamError: it cannot be written.
    """
    try:
        replace_file(path, _told(data, progress), mode=mode, durable=True, several_writers=True)
    except OSError as error:
        raise BitstreamError(
            f"{path}: cannot be written: {error.strerror}", hint=_hint(error)
        ) from error


def _told(data: bytes, progress: Progress) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(view), _PIECE):
        yield view[start : start + _PIECE]
        progress(min(start + _PIECE, len(view)), len(view))
