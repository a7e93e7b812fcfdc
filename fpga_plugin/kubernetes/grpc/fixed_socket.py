"""Sockets under a fixed name, which kubelet dials by its path.

Kubelet's plugin manager keeps what it knows of a plugin under its socket's path, and works on one
path at a time: so a plugin that registers again does so under the same name, made again. Two names
would be worked on at once, and the end of the old one might end the new one.
"""

import os
import socket
import stat
from typing import TYPE_CHECKING

from grpclib.const import Status

from fpga_plugin.errors import FpgaPluginError, SettingsError
from fpga_plugin.host.file_identity import instance_of
from fpga_plugin.kubernetes.grpc.server import ClosingServer
from fpga_plugin.kubernetes.grpc.unix_socket import SUN_PATH, listen_on

if TYPE_CHECKING:
    from grpclib._typing import IServable

REGISTRY = "plugins_registry"
"""Below kubelet's root (pkg/kubelet/config/defaults.go, DefaultKubeletPluginsRegistrationDirName).
"""


class SocketError(FpgaPluginError):
    """A socket cannot be made where kubelet looks for it."""

    status = Status.FAILED_PRECONDITION


def check_length(path: str, setting: str) -> None:
    """Whether kubelet can dial a socket by its path.

    Raises:
        SettingsError: it is too long.
    """
    if (length := len(os.fsencode(path))) > SUN_PATH:
        raise SettingsError(
            f"the socket {path} would have a path of {length} bytes; the kernel takes {SUN_PATH}",
            hint=f"set {setting} to a shorter path",
        )


def listen_at(path: str) -> tuple[socket.socket, str]:
    """A listening socket at a path; what was left there by an earlier process goes.

    Returns the socket, and its file's identity.

    Raises:
        SocketError: it cannot be made, or something else than a socket is there.
    """
    try:
        _remove_socket(path)
        listener = listen_on(path)
        try:
            return listener, instance_of(os.stat(path, follow_symlinks=False))
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise SocketError(
            f"no socket can be made at '{path}': {error.strerror or error}",
            hint="mount the node's directory there as a hostPath, without readOnly, and run the"
            " plugin as root",
        ) from error


def remove_own(path: str, identity: str) -> None:
    """Remove a socket, if it still is the one of this identity."""
    try:
        if instance_of(os.stat(path, follow_symlinks=False)) == identity:
            os.unlink(path)
    except OSError:
        pass  # somebody else did it, or it cannot be removed: the next process does


class FixedSocket:
    """Serves under a fixed name, from binding to its end.

    Args:
        path: of the socket.
        service: what is served there.
    """

    def __init__(self, path: str, service: "IServable") -> None:
        self.path = path
        self._service = service
        self._server: ClosingServer | None = None
        self._identity = ""

    async def start(self) -> None:
        """Bind and serve; kubelet comes when it looks.

        Raises:
            SocketError: no socket can be made.
        """
        listener, self._identity = listen_at(self.path)
        try:
            server = ClosingServer([self._service])
            await server.serve(listener)
        except BaseException:
            listener.close()
            remove_own(self.path, self._identity)
            raise
        self._server = server

    async def stop(self) -> None:
        """Remove the socket, and end the calls; does nothing twice."""
        server, self._server = self._server, None
        if server is not None:
            remove_own(self.path, self._identity)
            await server.close_all()


def _remove_socket(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(path, follow_symlinks=False).st_mode):
            return
        os.unlink(path)
    except FileNotFoundError:
        pass


def registry_path(root: str, name: str) -> str:
    """The socket of a plugin of this name, below kubelet's root directory."""
    return os.path.join(root, REGISTRY, f"{name.replace('/', '_')}-reg.sock")
