"""Files that others may read at any time: replaced whole, never half written."""

import contextlib
import os
from collections.abc import Iterable


def replace_file(
    path: str,
    pieces: Iterable[bytes | memoryview],
    *,
    mode: int = 0o600,
    durable: bool = False,
    several_writers: bool = False,
) -> None:
    """Put content at a path by rename: a reader finds the old content or all of the new.

    Args:
        path: of the file. What is written first has its name with `.` before it and `.tmp` behind.
        pieces: the content, in order.
        mode: of the file, whatever the umask is.
        durable: it has to survive a power cut, not only the death of the process.
        several_writers: other processes may write the same file now. Each has a temporary file of
            its own then, which nobody removes if its process is killed.

    Raises:
        OSError: the directory is gone, full or not writable; the old file is then untouched.
    """
    directory, name = os.path.split(os.path.abspath(path))
    own = f"{os.getpid()}." if several_writers else ""
    temporary = os.path.join(directory, f".{name}.{own}tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # of an earlier process that was killed
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if durable:
                os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(directory)


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
