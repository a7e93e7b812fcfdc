"""Kubelet's end of the wire: registrations, connections to plugins, device lists, calls.

As in kubelet 1.25 and later (pkg/kubelet/cm/devicemanager/plugin): Register dials the endpoint and
asks for its options before it answers, then opens ListAndWatch; one connection carries everything;
the end of the stream is the end of the connection, its devices turn unhealthy, and only another
Register revives them. Of two registrations of one resource the later one counts.
"""

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from grpclib.client import Channel
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, StreamTerminatedError

from fpga_plugin.demo.held_devices import UNKNOWN_NODE
from fpga_plugin.deviceplugin.sockets import KUBELET_SOCKET
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.kubernetes.grpc.server import ClosingServer
from fpga_plugin.kubernetes.grpc.unix_socket import socket_path
from fpga_plugin.kubernetes.messages import v1beta1
from fpga_plugin.kubernetes.names import ResourceName

if TYPE_CHECKING:
    from grpclib._typing import IServable

CONTAINER_SECONDS = 30.0
"""Kubelet's limit of PreStartContainer, and the fork's of PostStopContainer."""

DIAL_SECONDS = 10.0


class NoEndpointError(FpgaPluginError):
    """No plugin serves the resource, or its stream has ended."""

    status = Status.UNAVAILABLE


@dataclass(frozen=True, slots=True)
class DeviceList:
    """One message of a ListAndWatch stream: the resource's whole list.

    Attributes:
        resource: whose list.
        devices: by id in the plugin's order, with their NUMA node; -1 where it is not known.
        healthy: those that kubelet may give to a pod.
    """

    resource: ResourceName
    devices: Mapping[str, int] = field(default_factory=dict)
    healthy: frozenset[str] = frozenset()

    @property
    def ids(self) -> tuple[str, ...]:
        """All ids, in the plugin's order."""
        return tuple(self.devices)


@dataclass(eq=False, slots=True)
class PluginConnection:
    """One registration's connection to a plugin."""

    resource: ResourceName
    channel: Channel
    stub: v1beta1.DevicePluginStub
    options: v1beta1.DevicePluginOptions
    stopped: bool = False

    def close(self) -> None:
        """Kubelet never uses it again."""
        self.stopped = True
        self.channel.close()


class PluginManager(v1beta1.RegistrationBase):
    """Serves `kubelet.sock` and talks to the plugins that register there.

    Attributes:
        directory: kubelet's device plugin directory.
        lists: the latest list of each resource; empty after a restart.
        requests: every Register ever received, in order.
        connections: the present connection of each resource; may have stopped.
        listeners: each is called with every list as it comes.
    """

    def __init__(self, directory: str) -> None:
        """Not yet serving; the directory is made if it is not there."""
        self.directory = directory
        self.lists: dict[ResourceName, DeviceList] = {}
        self.requests: list[v1beta1.RegisterRequest] = []
        self.connections: dict[ResourceName, PluginConnection] = {}
        self.listeners: list[Callable[[DeviceList], None]] = []
        self._serving: list[ClosingServer] = []
        self._streams: dict[PluginConnection, asyncio.Task[None]] = {}

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Wipe the sockets of before (CleanupPluginDirectory), then serve."""
        os.makedirs(self.directory, exist_ok=True)
        self._wipe()
        with socket_path(self.directory, KUBELET_SOCKET) as path:
            await self.serve(path, self)

    async def serve(self, path: str, api: "IServable") -> None:
        """Serve an API at a socket until `stop`."""
        server = ClosingServer([api])
        self._serving.append(server)
        await server.start(path=path)

    async def stop(self) -> None:
        """The process ends: connections and kubelet.sock go."""
        while self._serving:
            await self._serving.pop().close_all()
        self.connections.clear()  # first: lists that end with them are nobody's any more
        streams = list(self._streams.values())
        for connection in list(self._streams):
            connection.close()
        for stream in streams:
            stream.cancel()
        if streams:
            await asyncio.wait(streams)
        self._streams.clear()
        self.lists.clear()
        self._wipe()

    async def restart(self) -> None:
        """A new kubelet instance: a new kubelet.sock, every other socket in the directory gone."""
        await self.stop()
        await self.start()

    def _wipe(self) -> None:
        for name in os.listdir(self.directory):
            path = os.path.join(self.directory, name)
            with contextlib.suppress(FileNotFoundError):  # plugins remove their own, too
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    os.unlink(path)

    # ---------------------------------------------------------------- registration

    async def register(self, message: v1beta1.RegisterRequest) -> v1beta1.Empty:
        """`Registration/Register`."""
        self.requests.append(message)
        if message.version != "v1beta1":
            raise GRPCError(
                Status.UNKNOWN, f'requested API version "{message.version}" is not supported'
            )
        resource = ResourceName(message.resource_name)
        # Named because grpclib would look for google's packages to find one.
        with socket_path(self.directory, message.endpoint) as path:
            channel = Channel(path=path, codec=ProtoCodec())
            stub = v1beta1.DevicePluginStub(channel)
            try:
                async with asyncio.timeout(DIAL_SECONDS):
                    options = await stub.get_device_plugin_options(v1beta1.Empty())
            except BaseException as error:
                channel.close()
                if isinstance(error, OSError | StreamTerminatedError | GRPCError):
                    raise GRPCError(
                        Status.UNKNOWN, f"failed to dial device plugin: {error}"
                    ) from error
                raise
        connection = PluginConnection(resource, channel, stub, options)
        self.connections[resource] = connection
        task = asyncio.create_task(self._follow(connection), name=f"kubelet's {resource}")
        self._streams[connection] = task
        return v1beta1.Empty()

    async def _follow(self, connection: PluginConnection) -> None:
        """Read a connection's lists until its stream ends."""
        try:
            async for message in connection.stub.list_and_watch(v1beta1.Empty()):
                if self._current(connection):
                    self._received(_device_list(connection.resource, message))
        except (GRPCError, StreamTerminatedError, OSError):
            pass  # however it ends, kubelet does the same
        finally:
            self._streams.pop(connection, None)
            connection.close()
        if self._current(connection) and connection.resource in self.lists:
            last = self.lists[connection.resource]
            self._received(replace(last, healthy=frozenset()))

    def _current(self, connection: PluginConnection) -> bool:
        return self.connections.get(connection.resource) is connection

    def _received(self, devices: DeviceList) -> None:
        self.lists[devices.resource] = devices
        for listener in tuple(self.listeners):
            listener(devices)

    async def wait_for(
        self,
        resource: ResourceName,
        predicate: Callable[[DeviceList], object] = lambda _: True,
        timeout: float = 60.0,  # noqa: ASYNC109  # a test's limit, with a message of its own
    ) -> DeviceList:
        """The resource's present list if `predicate` holds for it, else the first that does.

        No list is passed over, however quickly they follow each other.

        Raises:
            TimeoutError: none came in `timeout` seconds; reports the last one.
        """
        present = self.lists.get(resource)
        if present is not None and predicate(present):
            return present
        found: asyncio.Future[DeviceList] = asyncio.get_running_loop().create_future()

        def look(devices: DeviceList) -> None:
            if devices.resource == resource and not found.done():
                try:
                    if predicate(devices):
                        found.set_result(devices)
                except Exception as error:  # noqa: BLE001  # belongs to the waiting task
                    found.set_exception(error)

        self.listeners.append(look)
        try:
            async with asyncio.timeout(timeout):
                return await found
        except TimeoutError:
            raise TimeoutError(
                f"no such list of {resource} within {timeout:g} s; the last one:"
                f" {self.lists.get(resource)}"
            ) from None
        finally:
            self.listeners.remove(look)

    # ---------------------------------------------------------------- calls

    def connection(self, resource: ResourceName) -> PluginConnection:
        """The connection to the plugin that serves a resource.

        Raises:
            NoEndpointError: there is none.
        """
        connection = self.connections.get(resource)
        if connection is None:
            raise NoEndpointError(f"no plugin has registered {resource}")
        if connection.stopped:
            raise NoEndpointError(f"the plugin that registered {resource} has been stopped")
        return connection

    async def preferred(
        self,
        resource: ResourceName,
        available: Sequence[str],
        must_include: Sequence[str] = (),
        size: int = 1,
    ) -> list[str]:
        """GetPreferredAllocation for one container."""
        response = await self.connection(resource).stub.get_preferred_allocation(
            v1beta1.PreferredAllocationRequest(
                container_requests=[
                    v1beta1.ContainerPreferredAllocationRequest(
                        available_deviceIDs=list(available),
                        must_include_deviceIDs=list(must_include),
                        allocation_size=size,
                    )
                ]
            )
        )
        return response.container_responses[0].device_i_ds if response.container_responses else []

    async def allocate(
        self, resource: ResourceName, ids: Sequence[str]
    ) -> v1beta1.ContainerAllocateResponse:
        """Allocate for one container; no limit of time, as in kubelet."""
        response = await self.connection(resource).stub.allocate(
            v1beta1.AllocateRequest(
                container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=list(ids))]
            )
        )
        if not response.container_responses:
            raise GRPCError(Status.UNKNOWN, "no containers return in allocation response")
        return response.container_responses[0]

    async def prestart(
        self, resource: ResourceName, ids: Iterable[str], env: Mapping[str, str] | None = None
    ) -> None:
        """PreStartContainer; `env` goes over the wire only on extended kubelets."""
        request = v1beta1.PreStartContainerRequest(devices_ids=list(ids), env=dict(env or {}))
        stub = self.connection(resource).stub
        await stub.pre_start_container(request, timeout=CONTAINER_SECONDS)

    async def poststop(self, resource: ResourceName, ids: Iterable[str]) -> None:
        """PostStopContainer, of extended kubelets."""
        request = v1beta1.PostStopContainerRequest(devices_i_ds=list(ids))
        stub = self.connection(resource).stub
        await stub.post_stop_container(request, timeout=CONTAINER_SECONDS)

    async def deallocate(self, resource: ResourceName, ids: Iterable[str]) -> None:
        """Deallocate, of extended kubelets; no limit of time, as in the fork."""
        await self.connection(resource).stub.deallocate(
            v1beta1.DeallocateRequest(
                container_requests=[v1beta1.ContainerDeallocateRequest(devices_i_ds=list(ids))]
            )
        )


def _device_list(resource: ResourceName, message: v1beta1.ListAndWatchResponse) -> DeviceList:
    devices = {}
    for device in message.devices:
        nodes = device.topology.nodes if device.topology is not None else []
        devices[device.id] = nodes[0].id if nodes else UNKNOWN_NODE
    healthy = frozenset(device.id for device in message.devices if device.health == "Healthy")
    return DeviceList(resource, devices, healthy)
