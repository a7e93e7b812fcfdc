"""All of the plugin's resources towards kubelet, behind one object (`allocation.link.Link`).

It is made before what serves kubelet's calls, which uses it, and gets that when it starts.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from fpga_plugin.deviceplugin.registration import Registration, ResourceStatus, Timing
from fpga_plugin.deviceplugin.service import DevicePlugin
from fpga_plugin.deviceplugin.sockets import remove_stale_sockets
from fpga_plugin.deviceplugin.watch import KubeletDirectory
from fpga_plugin.host.instruments import Labels
from fpga_plugin.kubernetes.names import ResourceName

ANNOUNCE_LIMIT = 2.0
"""Seconds that kubelet gets to read its lists."""

ANNOUNCE_POLL = 0.005
"""Seconds between two looks whether it has."""


class KubeletLink:
    """Serves and registers every resource, each in a task of its own.

    Args:
        kubelet_dir: kubelet's device plugin directory. While it is missing or cannot be written the
            service waits for it and says so in `status`.
        timing: limits and delays.
    """

    def __init__(self, *, kubelet_dir: str, timing: Timing | None = None) -> None:
        self._timing = timing or Timing()
        self._directory = KubeletDirectory(kubelet_dir, recheck=self._timing.recheck)
        self._api: DevicePlugin | None = None
        self._registrations: dict[ResourceName, Registration] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._unsubscribe: Callable[[], None] | None = None

    @property
    def status(self) -> Mapping[ResourceName, ResourceStatus]:
        """Each resource's state at kubelet."""
        return {name: one.status for name, one in self._registrations.items()}

    @property
    def opened(self) -> Iterable[tuple[Labels, int]]:
        """How often the stream of each resource was opened."""
        return [((name,), one.opened) for name, one in self._registrations.items() if one.opened]

    async def start(self, api: DevicePlugin) -> None:
        """Begin to serve; returns before kubelet has heard of it."""
        remove_stale_sockets(self._directory.path)
        await self._directory.start()
        self._api = api
        add = partial(self._add_resources, api)
        self._unsubscribe = api.lists.subscribe(add)
        add()

    async def stop(self) -> None:
        """End every stream, connection and socket; kubelet then shows the devices as Unhealthy."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        self._directory.stop()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks.clear()
        self._registrations.clear()

    def resend(self) -> None:
        """Send every list again: kubelet rewrites its checkpoint for each list that it gets."""
        for registration in self._registrations.values():
            registration.resend()

    def sent(self) -> Mapping[ResourceName, frozenset[str]]:
        """The healthy devices of each list that kubelet holds a stream for and has been sent."""
        if (api := self._api) is None:
            return {}
        return {
            name: frozenset(device.id for device in api.lists.devices(name) if device.healthy)
            for name, one in self._registrations.items()
            if one.status.registered and one.status.streaming and not one.behind
        }

    def reregister(self, resource: ResourceName) -> None:
        """Register a resource again, on another socket."""
        if (registration := self._registrations.get(resource)) is not None:
            registration.renew("kubelet has lost its devices")

    async def announced(self) -> None:
        """Wait until every present list has been sent to kubelet, or `ANNOUNCE_LIMIT`.

        A kubelet that is away gets them with its next connection.
        """
        deadline = asyncio.get_running_loop().time() + ANNOUNCE_LIMIT
        while any(registration.behind for registration in self._registrations.values()):
            if asyncio.get_running_loop().time() >= deadline:
                return
            await asyncio.sleep(ANNOUNCE_POLL)

    def _add_resources(self, api: DevicePlugin) -> None:
        for resource in api.lists.resources():
            if resource in self._registrations:
                continue
            registration = self._registrations[resource] = Registration(
                resource, api, self._directory, self._timing
            )
            self._tasks.append(asyncio.create_task(registration.run(), name=f"kubelet {resource}"))
