"""Both sides of the kubelet layer, as small as its tests allow.

`Kubelet` registers, dials back and keeps streams as the three generations of kubelet's own handler
do (`deviceplugin/registration.py` distinguishes them); `Calls` stands for the life of allocations
behind the layer.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

from doubles import LIMIT
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.server import Server

from fpga_plugin.allocation.calls import AllocateAnswer
from fpga_plugin.allocation.lists import AdvertisedDevice
from fpga_plugin.deviceplugin.link import KubeletLink
from fpga_plugin.deviceplugin.registration import Timing
from fpga_plugin.hardware.grant import Mount
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.grpc.unix_socket import socket_path
from fpga_plugin.kubernetes.messages.v1beta1 import (
    DevicePluginStub,
    Empty,
    ListAndWatchResponse,
    RegisterRequest,
    RegistrationBase,
)
from fpga_plugin.kubernetes.names import ResourceName

INTERFACE = "ce48969398f05f33946d560708be108a"
REGIONS = ResourceName(f"fpga.intel.com/region-{INTERFACE}")
CARDS = ResourceName(f"fpga.intel.com/fpga-{INTERFACE}")

# Delays so long that nothing but an event can bring a test to its end in time.
EVENTS_ONLY = Timing(first_delay=60, last_delay=60, recheck=60)
QUICK = Timing(first_delay=0.01, last_delay=0.05, recheck=60, stream=1)


def device(name: str, *, healthy: bool = True, numa: int | None = None) -> AdvertisedDevice:
    return AdvertisedDevice(DeviceId(name), healthy, numa)


REGION = device("0000-10-00.0-p0")


async def eventually(holds: Callable[[], object]) -> None:
    """For what nobody announces; for the rest there is `Changes`."""
    async with asyncio.timeout(LIMIT):
        while not holds():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.002)


class Changes:
    """Lets a test wait for a state instead of for a time."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def happened(self) -> None:
        task = asyncio.ensure_future(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._condition:
            self._condition.notify_all()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT), self._condition:
            await self._condition.wait_for(holds)


class Calls:
    """Plays `DevicePlugin` with all of its parts: notes calls, answers what the test says."""

    def __init__(self, changes: Changes) -> None:
        self.lists = self.prestarts = self.reconciler = self
        self.listed: dict[ResourceName, tuple[AdvertisedDevice, ...]] = {REGIONS: (REGION,)}
        self.subscribers: list[Callable[[], None]] = []
        self.called: list[tuple] = []
        self.facts: list[str] = []
        self.opened: list[ResourceName] = []
        self.fails: Exception | None = None
        self.news_fails = 0
        self.prestart_waits: asyncio.Event | None = None
        self.on_call: Callable[..., None] = lambda *_: None
        self._changes = changes

    def set(self, resource: ResourceName, *devices: AdvertisedDevice) -> None:
        self.listed[resource] = devices
        self.tell()

    def tell(self) -> None:
        for subscriber in list(self.subscribers):
            subscriber()

    def _note(self, *call: object) -> None:
        self.called.append(call)
        self._changes.happened()
        if self.fails is not None:
            raise self.fails

    def resources(self):
        return tuple(self.listed)

    def devices(self, resource):
        return self.listed[resource]

    def subscribe(self, changed):
        self.subscribers.append(changed)
        return lambda: self.subscribers.remove(changed)

    def allocate(self, resource, ids):
        self._note("allocate", resource, list(ids))
        return AllocateAnswer(
            envs={f"FPGA_DEVICE_{name}": f"/dev/{name}" for name in ids},
            nodes=tuple(f"/dev/{name}" for name in ids),
            mounts=(Mount("/opt/fpga", "/usr/share/fpga"),),
        )

    def preferred(self, resource, available, must_include, size):
        self._note("preferred", resource, list(available), list(must_include), size)
        return list(available)[:size]

    async def serve(self, resource, ids, env, time_left, caller):
        self._note("prestart", resource, list(ids), dict(env), time_left)
        if self.prestart_waits is not None:
            await self.prestart_waits.wait()

    def poststop(self, resource, ids):
        self._note("poststop", resource, list(ids))

    def deallocate(self, resource, ids):
        self._note("deallocate", resource, list(ids))

    def _recorder(self) -> None:
        if self.news_fails:
            self.news_fails -= 1
            raise RuntimeError

    def kubelet_found(self, instance):
        self._recorder()
        if instance not in self.facts[-1:]:  # each resource finds it
            self.facts.append(instance)
            self._changes.happened()

    def stream_opened(self, resource):
        self.opened.append(resource)
        self._changes.happened()
        self._recorder()


class Client:
    """Kubelet's connection to one endpoint, which it dials by a path that is short enough."""

    def __init__(self, path: str, short: str) -> None:
        self.path = path
        self.channel = Channel(path=short, codec=ProtoCodec())
        self.stub = DevicePluginStub(self.channel)
        self.lists: list[ListAndWatchResponse] = []
        self.ended = False

    def ids(self) -> list[str]:
        return [each.id for each in self.lists[-1].devices] if self.lists else []

    def close(self) -> None:
        self.channel.close()


class Kubelet(RegistrationBase):
    """One life of a kubelet.

    Args:
        generation: 1 (to 1.26: refuses a second path), 2 (to 1.35: the end of an old stream
            disconnects the newest), 3 (1.36: clients keyed by path).
        refusals: how many Register calls fail first.
        opens_stream: False plays a kubelet that answers OK and never calls ListAndWatch.
        hangs: plays a kubelet that never answers Register.
        wipes: whether its start removes the sockets in its directory.
    """

    def __init__(
        self,
        directory: Path,
        changes: Changes,
        *,
        generation: int = 3,
        refusals: int = 0,
        opens_stream: bool = True,
        hangs: bool = False,
        wipes: bool = True,
    ) -> None:
        self.directory = directory
        self.generation = generation
        self.refusals = refusals
        self.opens_stream = opens_stream
        self.hangs = hangs
        self.wipes = wipes
        self.requests: list[RegisterRequest] = []
        self.options: list = []
        self.clients: dict[str, Client] = {}
        self.all_clients: list[Client] = []
        self._changes = changes
        self._server: Server | None = None
        self._runs: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        for file in self.directory.iterdir():
            if file.is_socket() and (self.wipes or file.name == "kubelet.sock"):
                file.unlink()
        self._server = Server([self], codec=ProtoCodec())
        with socket_path(str(self.directory), "kubelet.sock") as path:
            await self._server.start(path=path)

    async def stop(self, *, leave_socket: bool = False) -> None:
        assert self._server is not None
        self._server.close()
        for client in self.all_clients:
            client.close()
        if self._runs:
            await asyncio.wait(self._runs)
        if not leave_socket:
            (self.directory / "kubelet.sock").unlink(missing_ok=True)
        await asyncio.sleep(0)

    def client(self, resource: ResourceName = REGIONS) -> Client:
        return self.clients[resource]

    def streams(self, resource: ResourceName = REGIONS, ids: list[str] | None = None) -> bool:
        """Whether kubelet has the list of the resource, from a stream that is open."""
        client = self.clients.get(resource)
        wanted = [REGION.id] if ids is None else ids
        return (
            client is not None
            and not client.ended
            and bool(client.lists)
            and client.ids() == wanted
        )

    async def register(self, message: RegisterRequest) -> Empty:
        self.requests.append(message)
        self._changes.happened()
        if self.hangs:
            await asyncio.Event().wait()
        if self.refusals:
            self.refusals -= 1
            raise GRPCError(Status.UNKNOWN, "not now")
        path = str(self.directory / message.endpoint)
        old = self.clients.get(message.resource_name)
        if self.generation == 1 and old is not None and not old.ended:
            if old.path == path:
                return Empty()
            raise GRPCError(Status.UNKNOWN, "already registered with a different socket path")
        with socket_path(str(self.directory), message.endpoint) as short:
            client = Client(path, short)
            self.all_clients.append(client)
            try:
                self.options.append(await client.stub.get_device_plugin_options(Empty()))
            except (OSError, StreamTerminatedError) as error:
                client.close()
                raise GRPCError(Status.UNKNOWN, f"cannot dial: {error}") from error
        self.clients[message.resource_name] = client
        if self.opens_stream:
            run = asyncio.create_task(self._run(message.resource_name, client))
            self._runs.add(run)
            run.add_done_callback(self._runs.discard)
        return Empty()

    async def _run(self, name: str, client: Client) -> None:
        try:
            async for response in client.stub.list_and_watch(Empty()):
                client.lists.append(response)
                self._changes.happened()
        except (GRPCError, StreamTerminatedError, OSError):
            pass
        client.ended = True
        client.close()
        if self.generation == 2:
            # The defect of that generation: whoever is current now is disconnected.
            current = self.clients.get(name)
            if current is not None:
                current.ended = True
                current.close()
        self._changes.happened()


@asynccontextmanager
async def plugin(directory: Path, calls: Calls, *, timing: Timing = QUICK):
    service = KubeletLink(kubelet_dir=str(directory), timing=timing)
    await service.start(calls)
    try:
        yield service
    finally:
        async with asyncio.timeout(LIMIT):
            await service.stop()


@asynccontextmanager
async def kubelet(directory: Path, changes: Changes, **how):
    one = Kubelet(directory, changes, **how)
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


@asynccontextmanager
async def connected(directory: Path, *, on_call=None, **how):
    """A plugin registered with a kubelet: yields kubelet, calls, changes and the service."""
    changes = Changes()
    calls = Calls(changes)
    calls.on_call = on_call or calls.on_call
    async with kubelet(directory, changes) as one, plugin(directory, calls, **how) as service:
        await changes.until(one.streams)
        yield one, calls, changes, service


def own_sockets(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.startswith("fpga-plugin-"))
