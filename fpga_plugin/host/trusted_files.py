"""Files that much depends on, opened so that nothing else can be meant by them.

They are bitstreams, manifests, signatures, keys, the policy and the credentials for the API server.
A writer of bitstreams may run any image beside other tenants' memory, and a writer of the policy
decides who may. A directory may hold links, fifos, device nodes and files that are still being
copied. So a file is looked at before it is opened for reading (O_PATH: no fifo waits for its
writer, no device notices). What is read is the inode that was looked at. It must lie where it
should, be a regular file, and be writable only by root and the plugin's own user. The same must
hold for every directory in which the kernel looks up a name on the way to it, links followed: a
user who may rename there puts another file, or none, in its place. All of it blocks.
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
from fpga_plugin.host.file_identity import Version, version_of

_NO_REGULAR_FILE = "a store has regular files, and links to files in the same store"

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_MAX_LINKS = 40
"""Links in one path that the kernel follows (include/linux/namei.h, MAXSYMLINKS)."""


@dataclass(frozen=True, slots=True)
class TrustedFile:
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


@contextlib.contextmanager
def open_trusted(
    path: str, *, inside: str | None, guarded: bool, limit: int
) -> Iterator[TrustedFile]:
    """Open a regular file.

    Args:
        path: the file.
        inside: a directory that it must lie in, all links followed: a store; None: anywhere.
        guarded: refuse what others than root and this process's user may write or replace.
        limit: the most bytes that it may have.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        BitstreamError: it must not be used; the message says why.
    """
    try:
        looked = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise BitstreamError(
                f"{path}: a symbolic link that leads nowhere", hint="mend or remove it"
            ) from None
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        found = os.fstat(looked)
        if not stat.S_ISREG(found.st_mode):
            to_name = "name a file in it" if stat.S_ISDIR(found.st_mode) else ""
            raise BitstreamError(
                f"{path}: {_kind(found.st_mode)}, not a regular file",
                hint=_NO_REGULAR_FILE if inside else to_name,
            )
        real = os.readlink(f"/proc/self/fd/{looked}")
        if inside is not None:
            _check_inside(path, real, inside)
        if guarded:
            _check_owner(path, "", path, found)
            _check_mode(path, "", path, found)
            _check_way(path)
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
            yield TrustedFile(path, file, found.st_size, version_of(found))
        except OSError as error:
            raise _unreadable(path, error) from error


def read_small(path: str, *, inside: str | None, guarded: bool, limit: int) -> bytes:
    """All of a small file that trust depends on: a manifest, a signature, a key, a policy.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        BitstreamError: it must not be used, or it changed while it was read.
    """
    with open_trusted(path, inside=inside, guarded=guarded, limit=limit) as opened:
        data = b""
        while len(data) <= limit and (piece := opened.file.read(limit + 1 - len(data))):
            data += piece
        if len(data) > limit or opened.changed():
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
            hint="put the file itself into the store: `fpga-plugin bitstream install --dir STORE"
            " FILE`, then copy STORE to the node (docs/bitstreams.md)",
        )


def check_directory(path: str) -> None:
    """Refuse a directory in which, or above which, others than root and we may rename things.

    Raises:
        BitstreamError: they may, or it cannot be looked at; the message says which directory it is.
    """
    _check_way(path)


def lookups(path: str) -> Iterator[tuple[str, str]]:
    """Every (directory, name) that the kernel looks up to resolve a path, links followed.

    Ends at the first name that is not there. The directories contain no links.

    Args:
        path: absolute.
    """
    directory = "/"
    rest = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    links = 0
    while rest:
        name = rest.pop()
        if name == "..":
            directory = os.path.dirname(directory)
            continue
        yield directory, name
        found = os.path.join(directory, name)
        try:
            mode = os.lstat(found).st_mode
            target = os.readlink(found) if stat.S_ISLNK(mode) else None
        except OSError:
            return
        if target is None:
            directory = found
            continue
        links += 1
        if links > _MAX_LINKS:
            return
        if target.startswith("/"):
            directory = "/"
        rest.extend(part for part in reversed(target.split("/")) if part not in ("", "."))


def _check_way(path: str) -> None:
    """Refuse a path on whose way others may put something else.

    In a directory with the sticky bit they may rename and remove only what is theirs. Such a one
    may be anybody's to write: what is looked up in it has to be ours, as all that is on the way,
    and to have no second name, for that one could be of their making.
    """
    try:
        _check_step(path, "/", os.lstat("/"))
        for directory, name in lookups(os.path.join(os.getcwd(), path)):
            place = os.path.join(directory, name)
            found = os.lstat(place)
            _check_step(path, place, found)
            _check_names(path, directory, found)
    except OSError as error:
        raise _unreadable(path, error) from error


def _check_step(path: str, place: str, found: os.stat_result) -> None:
    """Refuse a directory or a link on the way to a path."""
    if stat.S_ISLNK(found.st_mode):  # nobody writes to a link, and its mode says nothing
        _check_owner(path, f"the link {place} ", place, found)
    elif stat.S_ISDIR(found.st_mode):
        what = "" if place == path else f"its directory {place} "
        _check_owner(path, what, place, found)
        if not found.st_mode & stat.S_ISVTX:
            _check_mode(path, what, place, found)


def _check_names(path: str, directory: str, found: os.stat_result) -> None:
    """Refuse what others may have linked there, as they may without fs.protected_hardlinks."""
    if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
        above = os.lstat(directory)
        if above.st_mode & _OTHERS_WRITE:
            raise BitstreamError(
                f"{path}: has {found.st_nlink} hard links, and others may have made this one in"
                f" {directory}",
                hint=f"`chmod go-w {directory}`, or copy the file there",
            )


def _check_owner(path: str, what: str, place: str, found: os.stat_result) -> None:
    if found.st_uid not in {0, os.geteuid()}:
        raise BitstreamError(
            f"{path}: {what}belongs to user {found.st_uid}, who may replace its content",
            hint=f"give it to root: `chown -h root {place}`",
        )


def _check_mode(path: str, what: str, place: str, found: os.stat_result) -> None:
    """The mask of a POSIX ACL shows as the group's permission."""
    if found.st_mode & _OTHERS_WRITE:
        who = "anybody" if found.st_mode & stat.S_IWOTH else f"group {found.st_gid}"
        raise BitstreamError(
            f"{path}: {what}may be written by {who}",
            hint=f"`chmod go-w {place}`; a ConfigMap's volume is like that: mount it as a projected"
            " one"
            if what
            else f"`chmod go-w {place}`",
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
