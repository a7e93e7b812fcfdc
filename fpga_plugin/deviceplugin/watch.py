"""Kubelet's directory, watched: kubelet comes and goes as a file, and may wipe our sockets.

What the directory says is always read from the directory itself; inotify only says when to look.
So events may be lost, doubled or out of order without harm, and a slow look every half minute
covers what inotify cannot see. Where the directory is missing, the nearest folder above that exists
is watched until it appears.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from asyncinotify import Event, Inotify, Mask

from fpga_plugin.deviceplugin.sockets import KUBELET_SOCKET, OWN_SOCKET, socket_identity

_COMINGS = Mask.CREATE | Mask.MOVED_TO | Mask.DELETE | Mask.MOVED_FROM
_WATCHED = _COMINGS | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
_BROKEN = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.IGNORED | Mask.UNMOUNT | Mask.Q_OVERFLOW
"""Events after which the watch says nothing more, or has missed something."""

_WITHOUT_INOTIFY = 1.0
"""Seconds between looks where the node has no inotify instances or watches left."""

_log = structlog.get_logger()

_Target = tuple[str, int, int]


class KubeletDirectory:
    """Tells its listeners when kubelet's socket or one of ours came or went.

    Args:
        path: kubelet's device plugin directory; need not exist.
        recheck: seconds after which listeners are told although nothing seems to have happened.
    """

    def __init__(self, path: str, *, recheck: float) -> None:
        self.path = os.path.abspath(path)
        self._recheck = recheck
        self._listeners: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> str | None:
        """What tells this life of kubelet from others; None while it has no socket."""
        return socket_identity(self.path, KUBELET_SOCKET)

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` on the loop whenever it should look at the directory."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._run(), name="kubelet directory")

    async def stop(self) -> None:
        """End watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()

    async def _run(self) -> None:
        warned = False
        while True:
            try:
                await self._watch()
            except OSError as error:
                # EMFILE, ENOSPC: fs.inotify.max_user_{instances,watches} are often used up
                if not warned:
                    _log.warning(
                        "cannot watch kubelet's directory, looking every second instead",
                        directory=self.path,
                        error=error.strerror,
                        hint="raise fs.inotify.max_user_instances and max_user_watches",
                    )
                    warned = True
                self._tell()
                await asyncio.sleep(_WITHOUT_INOTIFY)

    async def _watch(self) -> None:
        """Watch what is there now until that is another directory, or the watch breaks."""
        with Inotify() as inotify:
            target = self._target()
            try:
                inotify.add_watch(target[0], _WATCHED)
            except FileNotFoundError:
                return
            # What happened while nobody watched, a change of the target included:
            self._tell()
            while target == self._target():
                try:
                    async with asyncio.timeout(self._recheck):
                        event = await inotify.get()
                except TimeoutError:
                    self._tell()
                    continue
                if event.mask & _BROKEN:
                    return
                if target[0] == self.path and _concerns_us(event):
                    self._tell()

    def _target(self) -> _Target:
        """The directory, or the nearest one above it that exists, and which one that is."""
        path = self.path
        while True:
            try:
                found = os.stat(path)
            except OSError:
                if path == (above := os.path.dirname(path)):
                    raise
                path = above
            else:
                return path, found.st_dev, found.st_ino


def _concerns_us(event: Event) -> bool:
    name = str(event.name)
    return name == KUBELET_SOCKET or OWN_SOCKET.fullmatch(name) is not None
