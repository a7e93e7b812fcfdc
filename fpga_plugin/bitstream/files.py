"""Files of bitstreams, read and written without surprises.

How a file is opened so that nothing else can be meant by it, `process.trusted_files` says; writing
shows a reader either the old file or the whole new one. All of it blocks: call it from a thread.
"""

import contextlib
import io
import mmap
import os
from collections.abc import Callable
from contextlib import AbstractContextManager

from fpga_plugin.bitstream.gbs import HEAD_BYTES, Gbs, parse_header
from fpga_plugin.bitstream.room import Room
from fpga_plugin.errors import BitstreamError
from fpga_plugin.process.trusted_files import Original, opened

MAX_FILE_BYTES = 1 << 30
"""Whole-device images of large FPGAs stay well below 1 GiB."""

FILE_MODE = 0o644
"""Anyone may read a bitstream, only its owner replaces it."""

Progress = Callable[[int, int], None]
"""Is told of the bytes done so far, and of all."""

_PIECE = 4 << 20
"""Bytes between two words of progress."""


def no_progress(_done: int, _size: int) -> None:
    """Tell nobody."""


def open_file(
    path: str, *, inside: str | None, guarded: bool = False, limit: int = MAX_FILE_BYTES
) -> AbstractContextManager[Original]:
    """Open a file of at most so many bytes; `trusted_files.opened` has the rest.

    `guarded` where the file is to be trusted: nobody asks who may write what is only looked at.
    """
    return opened(path, inside=inside, guarded=guarded, limit=limit)


def map_gbs(path: str, *, room: Room) -> Gbs:
    """A whole GBS file that nobody ever writes to: the image is mapped, not copied.

    Copying 32 MiB would take as long as a twentieth of their reconfiguration. So the driver copies
    them from the page cache, in the ioctl and before it takes the card (dfl-fme-pr.c, fme_pr).
    What cannot be read from the disk then is the ioctl's EFAULT; here reading only begins.

    Args:
        path: the file.
        room: memory for it where its file system has no mappings.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        BitstreamError: it is no GBS file that can be used.
        StoreUnavailableError: it cannot be mapped, and the memory has no room for it.
    """
    with open_file(path, inside=None) as original:
        start = original.file.read(min(original.size, HEAD_BYTES))
        header = parse_header(start, size=original.size, where=path)
        descriptor = original.file.fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        # Writable, for ctypes gives no address of other memory; as it is private and nobody writes,
        # no page of it is ever copied.
        try:
            whole = memoryview(mmap.mmap(descriptor, original.size, flags=mmap.MAP_PRIVATE))
        except (OSError, ValueError) as error:  # no mappings there; a file that was cut
            whole = room.take(original.size, path, f"it cannot be mapped: {error}")
            original.file.seek(0)
            done = 0
            while count := original.file.readinto(whole[done:]):
                done += count
            original.check_read(done)
    return Gbs(metadata=header.metadata, image=whole[header.image_offset :])


def read_bytes(
    path: str, *, limit: int = MAX_FILE_BYTES, progress: Progress = no_progress
) -> bytes:
    """A regular file of any content.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        BitstreamError: it is no regular file, cannot be read, or has more than `limit` bytes.
    """
    with open_file(path, inside=None, limit=limit) as original:
        data = io.BytesIO()  # gives out what it holds without another copy of it
        while piece := original.file.read(min(_PIECE, original.size - data.tell())):
            data.write(piece)
            progress(data.tell(), original.size)
        return data.getvalue()


def write_atomically(
    path: str, data: bytes, *, mode: int = FILE_MODE, progress: Progress = no_progress
) -> None:
    """Write a file; whoever opens it meets the old content or all of the new.

    Raises:
        BitstreamError: it cannot be written.
    """
    directory, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(directory, f".{name}.{os.getpid()}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # of an earlier process with our number that was killed
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                view = memoryview(data)
                for start in range(0, len(view), _PIECE):
                    file.write(view[start : start + _PIECE])
                    progress(min(start + _PIECE, len(view)), len(view))
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        sync_directory(directory)
    except OSError as error:
        raise BitstreamError(
            f"{path}: cannot be written: {error.strerror}",
            hint="check the directory's permissions, and that its file system has room",
        ) from error


def sync_directory(path: str) -> None:
    """Make a rename or a removal in a directory survive a power cut.

    Raises:
        OSError: the directory is gone, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
