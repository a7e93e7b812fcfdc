"""Unix sockets: made so that only their owner may connect, at paths of any length."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fpga_plugin.host.file_identity import instance_of

SUN_PATH: Final = 107
"""Bytes of a unix socket's path without the final zero (linux/un.h: 108 with it)."""

_BACKLOG: Final = 16


@contextmanager
def socket_path(directory: str, name: str) -> Iterator[str]:
    """A path to a socket that is short enough for the kernel, however deep the directory is.

    Raises:
        OSError: the path is too long and the directory cannot be opened.
    """
    path = os.path.join(directory, name)
    if len(os.fsencode(path)) <= SUN_PATH:
        yield path
        return
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def listen_on(path: str) -> socket.socket:
    """A listening socket at a path where nothing is yet.

    Raises:
        OSError: it cannot be made; EADDRINUSE: something is there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # The file's mode comes from the socket's (net/unix/af_unix.c, unix_bind): no window in
        # which others may connect, and no process-wide umask.
        os.fchmod(listener.fileno(), stat.S_IRUSR | stat.S_IWUSR)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def socket_identity(directory: str, name: str) -> str | None:
    """What distinguishes a socket file from a later one; None where there is no such socket."""
    try:
        found = os.stat(os.path.join(directory, name), follow_symlinks=False)
    except OSError:
        return None
    if not stat.S_ISSOCK(found.st_mode):
        return None
    return instance_of(found)
