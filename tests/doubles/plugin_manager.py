"""Kubelet's plugin manager: finds plugins by their sockets in `plugins_registry`.

As pkg/kubelet/pluginmanager does: one path at a time, GetInfo within a second, then what the kind
of plugin needs, then NotifyRegistrationStatus. A socket that goes is deregistered, one made
again is both. What a kind of plugin needs, the test says.
"""

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

from grpclib.client import Channel
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, StreamTerminatedError

from fpga_plugin.kubernetes.messages.pluginregistration import (
    InfoRequest,
    PluginInfo,
    RegistrationStatus,
    RegistrationStub,
)

LOOK_SECONDS = 0.01
"""Kubelet's is a second."""


class PluginManager:
    """One kubelet instance's.

    Args:
        directory: `plugins_registry`.
        register: makes a plugin known; an exception of it is told to the plugin.
        deregister: its socket went.
    """

    def __init__(
        self,
        directory: Path,
        register: Callable[[PluginInfo], Awaitable[None]],
        deregister: Callable[[PluginInfo], None],
    ) -> None:
        self.directory = directory
        self.asked: list[PluginInfo] = []
        self._register = register
        self._deregister = deregister
        self._known: dict[str, tuple[tuple[int, int], PluginInfo | None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            present = dict(self._sockets())
            for path, (life, info) in list(self._known.items()):
                if present.get(path) != life:
                    del self._known[path]
                    if info is not None:
                        self._deregister(info)
            for path, life in present.items():
                if path not in self._known:
                    if (info := await self._met(path)) is None:
                        continue  # kubelet tries again, too
                    self._known[path] = life, info
            await asyncio.sleep(LOOK_SECONDS)

    def _sockets(self):
        for name in sorted(os.listdir(self.directory)) if self.directory.is_dir() else ():
            path = os.path.join(self.directory, name)
            try:
                found = os.lstat(path)
            except FileNotFoundError:
                continue
            if not name.startswith(".") and stat.S_ISSOCK(found.st_mode):
                yield path, (found.st_ino, found.st_ctime_ns)

    async def _met(self, path: str) -> PluginInfo | None:
        try:
            async with asyncio.timeout(30), Channel(path=path, codec=ProtoCodec()) as channel:
                stub = RegistrationStub(channel)
                info = await stub.get_info(InfoRequest())
                self.asked.append(info)
                try:
                    await self._register(info)
                except (GRPCError, OSError, StreamTerminatedError, ValueError) as error:
                    told = RegistrationStatus(error=str(error))
                    info = None
                else:
                    told = RegistrationStatus(plugin_registered=True)
                await stub.notify_registration_status(told)
                return info
        except (GRPCError, OSError, StreamTerminatedError, TimeoutError, AttributeError):
            return None
