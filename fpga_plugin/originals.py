"""Files that much depends on, opened so that nothing else can be meant by them.

They are bitstreams, manifests, signatures, keys and the policy. Whoever may write a bitstream's
file may run what he likes beside other tenants' memory, and who may write the policy decides who
may; and a directory may hold links, fifos, device nodes and files that are still being copied. So a
file is looked at before it is opened for reading (O_PATH: no fifo waits for its writer, no device
notices), what was looked at and what is read is the same inode, and that inode must lie where it
should, be a regular file, and be writable by nobody but root and the plugin's own user. All of it
blocks.
"""

import contextlib
import errno
import fcntl
import io
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from fpga_plugin.errors import BitstreamError

Version = tuple[int, ...]
"""What differs when a name stands for another file, or for the same one with other content."""

_NO_REGULAR_FILE = "a store has regular files, and links to files in the same store"

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Original:
    """An open file.

    Attributes:
        path: its name.
        file: open for reading.
        size: in bytes, when it was opened.
        version: when it was opened.
    """

    path: str
    file: io.FileIO
    size: int
    version: Version

    def changed(self) -> bool:
        """Whether somebody wrote to it since it was opened."""
        return version_of(os.fstat(self.file.fileno())) != self.version

    def check_read(self, count: int) -> None:
        """Whether the bytes that were read, `count` from its beginning on, are the whole file.

        Raises:
            BitstreamError: there are more or fewer, or somebody wrote to it.
        """
        if count != self.size or self.changed():
            raise BitstreamError(f"{self.path}: changed while it was read", hint=RENAME)


def version_of(found: os.stat_result) -> Version:
    """The version of a file."""
    return (
        found.st_dev,
        found.st_ino,
        found.st_mode,
        found.st_uid,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )


def version_at(path: str) -> Version | None:
    """The version of what a path leads to; None where there is nothing."""
    try:
        return version_of(os.stat(path))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def opened(path: str, *, inside: str | None, guarded: bool, limit: int) -> Iterator[Original]:
    """Open a regular file.

    Args:
        path: the file.
        inside: a directory that it must lie in, all links followed: a store; None: anywhere.
        guarded: refuse what others than root and this process's user may write.
        limit: the most bytes that it may have.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        BitstreamError: it must not be used; the message says why.
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
                hint=_NO_REGULAR_FILE if inside else "",
            )
        real = os.readlink(f"/proc/self/fd/{looked}")
        if inside is not None:
            _check_inside(path, real, inside)
        if guarded:
            _check_writers(path, real, found)
        if found.st_size > limit:
            raise BitstreamError(f"{path}: {found.st_size} bytes; at most {limit} are read")
        try:
            file = io.FileIO(f"/proc/self/fd/{looked}")
        except OSError as error:
            raise _unreadable(path, error) from error
    finally:
        os.close(looked)
    with file:
        try:
            yield Original(path, file, found.st_size, version_of(found))
        except OSError as error:
            raise _unreadable(path, error) from error


def read_small(path: str, *, inside: str | None, guarded: bool, limit: int) -> bytes:
    """All of a small file that trust depends on: a manifest, a signature, a key, a policy.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        BitstreamError: it must not be used, or it changed while it was read.
    """
    with opened(path, inside=inside, guarded=guarded, limit=limit) as original:
        data = b""
        while len(data) <= limit and (piece := original.file.read(limit + 1 - len(data))):
            data += piece
        if len(data) > limit or original.changed():
            raise BitstreamError(f"{path}: changed while it was read", hint=RENAME)
        return data


RENAME = "put files into a store by renaming, as `fpga-plugin bitstream install` does"
"""What to do about files that are met half written."""


def being_written(file: io.FileIO) -> bool:
    """Whether anybody has the file open for writing.

    A read lease can be had only where nobody has (fcntl(2), F_SETLEASE). Some file systems have no
    leases, and only a file's owner or CAP_LEASE may take one: then the answer is no, and the
    inotify event of the writer's close comes in time.
    """
    descriptor = file.fileno()
    try:
        # The default signal of a broken lease, SIGIO, would end the process; SIGURG is ignored.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _check_inside(path: str, real: str, root: str) -> None:
    if not real.startswith(os.path.realpath(root).rstrip("/") + "/"):
        raise BitstreamError(
            f"{path}: a symbolic link leads out of the store {root}",
            hint="put the file itself into the store: `fpga-plugin bitstream install`",
        )


def _check_writers(path: str, real: str, found: os.stat_result) -> None:
    """Refuse what others may write, and a directory in which others may rename what is there.

    The mask of a POSIX ACL shows as the group's permission. The store's own directory may be
    anybody's, as an emptyDir's is: what others put there is theirs, and refused for that.
    """
    _check_owner(path, "", found)
    directory = os.path.dirname(real)
    above = os.stat(directory)
    if above.st_uid not in {0, os.geteuid()} or (
        above.st_mode & _OTHERS_WRITE and not above.st_mode & stat.S_ISVTX
    ):
        _check_owner(path, f"its directory {directory} ", above)


def _check_owner(path: str, what: str, found: os.stat_result) -> None:
    if found.st_uid not in {0, os.geteuid()}:
        raise BitstreamError(
            f"{path}: {what}belongs to user {found.st_uid}, who may replace what is in it",
            hint=f"give it to root: `chown root {os.path.dirname(path) if what else path}`",
        )
    if found.st_mode & _OTHERS_WRITE:
        who = "anybody" if found.st_mode & stat.S_IWOTH else f"group {found.st_gid}"
        raise BitstreamError(
            f"{path}: {what}may be written by {who}",
            hint=f"`chmod go-w {os.path.dirname(path) if what else path}`",
        )


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
