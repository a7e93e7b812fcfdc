"""Files of bitstreams, read and written without surprises.

A store may hold links, fifos, device nodes, files that are being written, and files of any size.
Reading opens nothing but a regular file, and of a store nothing outside it; writing shows a reader
either the old file or the whole new one. All of it blocks: call it from a thread.
"""

import contextlib
import io
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from typing import BinaryIO

from fpga_plugin.bitstream.gbs import HEAD_BYTES, Gbs, Header, parse_header
from fpga_plugin.errors import BitstreamError

MAX_FILE_BYTES = 1 << 30
"""A bitstream is read into memory; whole-device images of large FPGAs stay well below 1 GiB."""

FILE_MODE = 0o644
"""Anyone may read a bitstream, only its owner replaces it."""

Progress = Callable[[int, int], None]
"""Is told of the bytes done so far, and of all."""

_PIECE = 4 << 20
"""Bytes between two words of progress."""


def no_progress(_done: int, _size: int) -> None:
    """Tell nobody."""


def read_header(path: str, *, inside: str | None = None) -> tuple[Header, int]:
    """The header of a GBS file, and the file's size in bytes; the image is not read.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        BitstreamError: it is no GBS file that can be used.
    """
    with _opened(path, inside) as (file, size):
        return _header(file, size, path), size


def read_gbs(path: str, *, inside: str | None = None) -> Gbs:
    """A whole GBS file, in memory of our own: later changes of the file do not reach it.

    Args:
        path: the file.
        inside: a directory that the file must lie in, all links followed.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        BitstreamError: it is no GBS file that can be used, or it changed while it was read.
    """
    with _opened(path, inside) as (file, size):
        before = _version(file)
        header = _header(file, size, path)
        file.seek(header.image_offset)
        image = file.read(size - header.image_offset)
        if len(image) != size - header.image_offset or _version(file) != before:
            raise BitstreamError(
                f"{path}: changed while it was read",
                hint="put files into a store by renaming, as `fpga-plugin bitstream install` does",
            )
    return Gbs(metadata=header.metadata, image=image)


def map_gbs(path: str) -> Gbs:
    """A whole GBS file that nobody ever writes to: the image is mapped, not copied.

    Copying 32 MiB would take as long as a twentieth of their reconfiguration. So the driver copies
    them from the page cache, in the ioctl and before it takes the card (dfl-fme-pr.c, fme_pr).
    What cannot be read from the disk then is the ioctl's EFAULT; here reading only begins.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        BitstreamError: it is no GBS file that can be used.
    """
    with _opened(path, None) as (file, size):
        header = _header(file, size, path)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        # Writable, for ctypes gives no address of other memory; as it is private and nobody writes,
        # no page of it is ever copied.
        try:
            mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
        except (OSError, ValueError):  # a file system without mappings; a file that was cut
            return read_gbs(path)
    return Gbs(metadata=header.metadata, image=memoryview(mapped)[header.image_offset :])


def read_bytes(
    path: str, *, limit: int = MAX_FILE_BYTES, progress: Progress = no_progress
) -> bytes:
    """A regular file of any content.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        BitstreamError: it is no regular file, cannot be read, or has more than `limit` bytes.
    """
    with _opened(path, None, limit) as (file, size):
        data = io.BytesIO()  # gives out what it holds without another copy of it
        while piece := file.read(min(_PIECE, size - data.tell())):
            data.write(piece)
            progress(data.tell(), size)
        return data.getvalue()


def write_atomically(path: str, data: bytes, *, progress: Progress = no_progress) -> None:
    """Write a file with mode 0644; whoever opens it meets the old content or all of the new.

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
                os.fchmod(file.fileno(), FILE_MODE)
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


@contextlib.contextmanager
def _opened(
    path: str, inside: str | None, limit: int = MAX_FILE_BYTES
) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file; yields it with its size.

    The file is first opened with O_PATH, which only looks: no fifo waits for its writer, and no
    device notices. What is then checked and what is read is the same inode, by /proc/self/fd.
    """
    try:
        looked = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise BitstreamError(f"{path}: a symbolic link that leads nowhere") from None
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        found = os.fstat(looked)
        if not stat.S_ISREG(found.st_mode):
            raise BitstreamError(
                f"{path}: {_kind(found.st_mode)}, not a regular file",
                hint="a bitstream is a regular file, or a link to one in the same store",
            )
        if inside is not None:
            _check_inside(path, looked, inside)
        if found.st_size > limit:
            raise BitstreamError(f"{path}: {found.st_size} bytes; at most {limit} are read")
        try:
            file = open(f"/proc/self/fd/{looked}", "rb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise _unreadable(path, error) from error
    finally:
        os.close(looked)
    with file:
        try:
            yield file, found.st_size
        except OSError as error:
            raise _unreadable(path, error) from error


def _check_inside(path: str, descriptor: int, root: str) -> None:
    try:
        real = os.readlink(f"/proc/self/fd/{descriptor}")
        real_root = os.path.realpath(root)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not real.startswith(real_root.rstrip("/") + "/"):
        raise BitstreamError(
            f"{path}: a symbolic link leads out of the store {root}",
            hint="put the file itself into the store: `fpga-plugin bitstream install`",
        )


def _header(file: BinaryIO, size: int, path: str) -> Header:
    return parse_header(file.read(min(size, HEAD_BYTES)), size=size, where=path)


def _version(file: BinaryIO) -> tuple[int, int, int]:
    """What changes when somebody writes to the file."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _unreadable(path: str, error: OSError | ValueError) -> BitstreamError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return BitstreamError(
        f"{path}: cannot be read: {reason}",
        hint="check the permissions of the file and of the directories above it",
    )


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a fifo"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    return next((name for test, name in kinds if test(mode)), "a special file")
