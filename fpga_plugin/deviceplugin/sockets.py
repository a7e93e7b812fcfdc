"""The sockets in kubelet's device plugin directory: names, binding, clearing away.

Each life of an endpoint has a socket name of its own. Kubelets confuse two lives that share a path:
some answer OK and go on talking to the old one, some disconnect the new one when the old one ends
(`registration` lists which). The process id alone does not distinguish them, because in a
container it is always 1; so the number behind it counts from a random one.
"""

import errno
import itertools
import os
import re
import socket
import stat

import structlog

from fpga_plugin.deviceplugin.errors import KubeletDirectoryError
from fpga_plugin.kubernetes.grpc.unix_socket import listen_on, socket_identity, socket_path

KUBELET_SOCKET = "kubelet.sock"
"""Where kubelet serves Registration (k8s.io/kubelet deviceplugin/v1beta1/constants.go)."""

OWN_SOCKET = re.compile(r"fpga-plugin-[0-9]+-[0-9]+\.sock", re.ASCII)
"""Whole names of the sockets that this plugin makes, and the only ones that it removes."""

_WRITABLE = "mount the hostPath without readOnly and run the plugin as root"

_log = structlog.get_logger()
_numbers = itertools.count(int.from_bytes(os.urandom(3), "big"))


def check_directory(directory: str) -> None:
    """Whether sockets can be made in kubelet's directory.

    Raises:
        KubeletDirectoryError: they cannot; says why and what to do.
    """
    mount = "mount the node's kubelet directory there as a hostPath, or set FPGA_PLUGIN_KUBELET_DIR"
    try:
        is_directory = stat.S_ISDIR(os.stat(directory).st_mode)
    except FileNotFoundError:
        problem, hint = "is not there", mount
    except OSError as error:
        problem, hint = f"cannot be read: {error.strerror}", "run the plugin as root"
    else:
        if not is_directory:
            problem, hint = "is not a directory", mount
        elif not os.access(directory, os.W_OK | os.X_OK):
            problem, hint = "cannot be written", _WRITABLE
        else:
            return
    raise KubeletDirectoryError(f"kubelet's directory '{directory}' {problem}", hint=hint)


def listen(directory: str) -> tuple[socket.socket, str]:
    """A listening socket under a name that was not there before; returns both.

    Raises:
        KubeletDirectoryError: it cannot be made.
    """
    while True:
        name = f"fpga-plugin-{os.getpid()}-{next(_numbers)}.sock"
        try:
            with socket_path(directory, name) as path:
                return listen_on(path), name
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            check_directory(directory)
            raise KubeletDirectoryError(
                f"no socket can be made in kubelet's directory '{directory}': {error.strerror}",
                hint=_WRITABLE,
            ) from error


def remove_socket(directory: str, name: str) -> None:
    """Remove a socket of ours; it may be gone already."""
    try:
        os.unlink(os.path.join(directory, name))
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("cannot remove a socket", socket=name, error=error.strerror)


def remove_stale_sockets(directory: str) -> None:
    """Remove the sockets that earlier processes of this plugin left behind."""
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        if OWN_SOCKET.fullmatch(name) and socket_identity(directory, name) is not None:
            remove_socket(directory, name)
