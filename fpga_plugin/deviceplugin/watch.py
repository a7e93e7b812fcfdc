"""Kubelet's directory, watched: kubelet comes and goes as a file, and may wipe our sockets.

The state is always read from the directory itself; `host.watcher` only says when to look, every
half minute where inotify is not available. The directory is the node's own, so no thread is needed:
a node that has no threads left still finds kubelet.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from fpga_plugin.deviceplugin.sockets import KUBELET_SOCKET, OWN_SOCKET
from fpga_plugin.host.watcher import Look, Watcher, hint_for
from fpga_plugin.kubernetes.grpc.unix_socket import socket_identity

_WITHOUT_INOTIFY = 1.0
"""Seconds between looks where the node has no inotify instances or watches left."""

_SOCKETS = re.compile(f"{re.escape(KUBELET_SOCKET)}|{OWN_SOCKET.pattern}", OWN_SOCKET.flags)

_log = structlog.get_logger()


class KubeletDirectory:
    """Calls its listeners when kubelet's socket or one of ours came or went.

    Args:
        path: kubelet's device plugin directory; need not exist.
        recheck: seconds between two looks where inotify is not available.
    """

    def __init__(self, path: str, *, recheck: float) -> None:
        self.path = os.path.abspath(path)
        self._listeners: list[Callable[[], None]] = []
        self._watcher = Watcher(
            self, name="kubelet-directory", recheck=recheck, retry=_WITHOUT_INOTIFY, local=True
        )

    @property
    def instance(self) -> str | None:
        """Identifies this kubelet instance; None while it has no socket."""
        return socket_identity(self.path, KUBELET_SOCKET)

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` on the loop whenever it should look at the directory."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def start(self) -> None:
        """Watch; what happened before is not reported."""
        self._watcher.start()
        await self._watcher.ready()

    def stop(self) -> None:
        """End watching."""
        self._watcher.close()

    def look(self, look: Look) -> None:
        """What is watched (`host.watcher.Target`)."""
        resolved, names = look.inside(self.path, _SOCKETS)
        look.directory(resolved, "")
        for name in names:
            look.file(resolved, name, name)

    def changed(self, _reported: str | None) -> None:
        """Something in the directory may have changed (`host.watcher.Target`)."""
        for listener in list(self._listeners):
            listener()

    def unwatched(self, error: OSError) -> None:
        """Changes are not noticed (`host.watcher.Target`)."""
        _log.warning(
            "cannot watch kubelet's directory, looking every second instead",
            directory=self.path,
            error=error.strerror,
            hint=hint_for(error),
        )
