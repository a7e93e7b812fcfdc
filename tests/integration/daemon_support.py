"""The daemon as a process, and the kubelet that drives it: plain grpcio, threads, no code of ours.

`Node` is what a node is to the plugin: directories that outlive it (state, kubelet's, the store,
the simulated cards) and a kubelet. A test waits for what it means to see: a device list, a line of
the log, the content of `state.json`.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import nursery
from doubles.samples import SAMPLES, copy_samples
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

import fpga_plugin.kubernetes

T = TypeVar("T")

LIMIT = 60.0
"""Seconds after which a test gives up on what it waits for.

No test needs this long: it is what a machine needs that is many times slower, or busy.
"""

ROOT = Path(__file__).parents[2]
STORE = SAMPLES

ID = "ce48969398f05f33946d560708be108a"
OTHER_ID = "38d782e3b6125343b9342433e348ac4c"
REGIONS, CARDS = f"fpga.intel.com/region-{ID}", f"fpga.intel.com/fpga-{ID}"
OTHER_REGIONS, OTHER_CARDS = f"fpga.intel.com/region-{OTHER_ID}", f"fpga.intel.com/fpga-{OTHER_ID}"

AFU = "18b79ffa2ee54aa096ef4230dafacb5f"
AFU_2 = "850adcc26ceb4b229722d43375b61c66"
AFU_3 = "f7df405cbd7acf7222f144b0b93acd18"  # in the store for both interface ids
FACTORY = "d8424dc4a4a3c413f89e433683f9040b"  # what a simulated region holds after power-up

BLANK = "4cc434ceb4374bd69d69b7e3fdc04577"
OTHER_BLANK = "abc3e95ecbbf4f8f823b29e1b5b660a4"

CARD, CARD_2 = "0000-10-00.0", "0000-11-00.0"
P0, P1, P2 = (f"{CARD}-p{port}" for port in range(3))

HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"

NO_REQUEST = {"PATH": "/bin"}
"""The environment of a container that asks for nothing."""


def request(
    afu: str = AFU, *, interface: str = ID, n: str = "1", params: str = ""
) -> dict[str, str]:
    """The variables of one request."""
    env = {f"FPGA_REGION_{n}": interface, f"FPGA_BITSTREAM_ID_{n}": afu}
    return env | ({f"FPGA_DRIVER_PARAMS_{n}": params} if params else {})


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    api = Path(fpga_plugin.kubernetes.__file__).parent
    pool = descriptor_pool.DescriptorPool()
    protos = ["deviceplugin.proto", "pluginregistration.proto", "dra.proto", "dra_health_v1.proto"]
    with tempfile.TemporaryDirectory() as folder:
        compiled = os.path.join(folder, "set")
        arguments = ["protoc", f"-I{api}", f"--descriptor_set_out={compiled}", *protos]
        assert protoc.main(arguments) == 0
        for file in descriptor_pb2.FileDescriptorSet.FromString(Path(compiled).read_bytes()).file:
            pool.Add(file)
    return pool


@cache
def message(name: str, package: str = "v1beta1") -> Any:
    """One of Google's own message classes, of the device plugin API unless it is said."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{package}.{name}"))


def call_unary(
    channel: grpc.Channel, path: str, sent: Any, answer: Any, timeout: float | None = LIMIT
) -> Any:
    """One call; errors as grpc raises them."""
    unary = channel.unary_unary(
        path,
        request_serializer=lambda each: each.SerializeToString(),
        response_deserializer=answer.FromString,
    )
    return unary(sent, timeout=timeout)


class NotRegistered(Exception):  # noqa: N818  # what kubelet reports the plugin, not an error here
    """Kubelet refuses a plugin; what it says."""


class Registry:
    """Kubelet's plugin manager, for one life of it: finds sockets in `plugins_registry`.

    A plugin that it refused it asks again, as kubelet 1.36 does; an earlier one waits for a new
    socket (`old`).

    Args:
        directory: where it looks.
        register: is given the path of a socket and what the plugin there says of itself.
        gone: is given the path of one that is no longer there.
        old: it never asks again.
    """

    def __init__(
        self,
        directory: Path,
        register: Callable[[str, Any], None],
        gone: Callable[[str], None],
        *,
        old: bool = False,
    ) -> None:
        self._directory = directory
        self._old = old
        self._register = register
        self._gone = gone
        self._known: dict[str, tuple[int, int]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(LIMIT)

    def _run(self) -> None:
        while not self._stopped.wait(0.01):  # kubelet's is a second
            present = {}
            for path in self._directory.glob("[!.]*"):
                with contextlib.suppress(FileNotFoundError):
                    found = path.lstat()
                    present[str(path)] = (found.st_ino, found.st_ctime_ns)
            for path in [path for path, life in self._known.items() if present.get(path) != life]:
                del self._known[path]
                self._gone(path)
            for path in present.keys() - self._known.keys():
                with contextlib.suppress(grpc.RpcError):  # it is tried again
                    if self._meet(path) or self._old:
                        self._known[path] = present[path]

    def _meet(self, path: str) -> bool:
        package, service = "pluginregistration", "/pluginregistration.Registration"
        with grpc.insecure_channel(f"unix:{path}") as channel:
            info = call_unary(
                channel,
                f"{service}/GetInfo",
                message("InfoRequest", package)(),
                message("PluginInfo", package),
                timeout=5,
            )
            problem = ""
            try:
                self._register(path, info)
            except NotRegistered as error:
                problem = str(error)
            call_unary(
                channel,
                f"{service}/NotifyRegistrationStatus",
                message("RegistrationStatus", package)(
                    plugin_registered=not problem, error=problem
                ),
                message("RegistrationStatusResponse", package),
                timeout=5,
            )
            return not problem


def eventually(look: Callable[[], T], what: str = "that", *, limit: float = LIMIT) -> T:
    """For what nobody announces (a file); returns what it came to."""
    deadline = time.monotonic() + limit
    while not (found := look()):
        assert time.monotonic() < deadline, f"it did not come to {what}"
        time.sleep(0.002)
    return found


def others() -> dict[str, str]:
    """The environment of this process, without settings of the plugin."""
    return {k: v for k, v in os.environ.items() if not k.startswith("FPGA_PLUGIN_")}


def command(
    *arguments: str, settings: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command of the plugin to its end, with these settings and no others."""
    return nursery.run(arguments, others() | dict(settings or {}), str(ROOT), timeout=2 * LIMIT)


def sign_manifest(store: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """`bitstream sign --manifest`, as an operator types it."""
    return command("bitstream", "sign", "--manifest", "--dir", str(store), *options)


class Signal:
    """A condition that threads feed and a test waits on."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def tell(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def until(self, holds: Callable[[], T], what: str, *, limit: float = LIMIT) -> T:
        with self.changed:
            found = self.changed.wait_for(holds, limit)
        assert found, f"not within {limit:g} s: {what}"
        return found


class Refused(Exception):  # noqa: N818  # what kubelet hears, not an error of the test
    """A call was answered with another status than OK."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.code: str = error.code().name
        self.message: str = error.details() or ""
        super().__init__(f"{self.code}: {self.message}")


class Endpoint:
    """Kubelet's side of one registration: the connection, the stream, the present list."""

    def __init__(self, path: str, signal: Signal) -> None:
        self.channel = grpc.insecure_channel(f"unix:{path}")
        self.lists: list[dict[str, str]] = []
        self.numa: dict[str, list[int]] = {}
        self.ended = False
        self._signal = signal
        self._stream: Any = None
        self._opening = threading.Lock()  # kubelet may stop while it registers somebody
        self._closed = False
        self.thread = threading.Thread(target=self._watch)

    def call(self, method: str, sent: Any, answer: str, timeout: float | None = LIMIT) -> Any:
        path = f"/v1beta1.DevicePlugin/{method}"
        try:
            return call_unary(self.channel, path, sent, message(answer), timeout)
        except grpc.RpcError as error:
            raise Refused(error) from None

    def begin(self, method: str, sent: Any, answer: str, timeout: float | None = LIMIT) -> Any:
        """The same call as a future of grpc's, which can be cancelled."""
        unary = self.channel.unary_unary(
            f"/v1beta1.DevicePlugin/{method}",
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=message(answer).FromString,
        )
        return unary.future(sent, timeout=timeout)

    def open(self) -> None:
        with self._opening:
            if self._closed:
                return
            self._stream = self.channel.unary_stream(
                "/v1beta1.DevicePlugin/ListAndWatch",
                request_serializer=lambda each: each.SerializeToString(),
                response_deserializer=message("ListAndWatchResponse").FromString,
            )(message("Empty")())
            self.thread.start()

    def _watch(self) -> None:
        try:
            for response in self._stream:
                numa = {d.ID: [n.ID for n in d.topology.nodes] for d in response.devices}
                with self._signal.changed:
                    self.lists.append({device.ID: device.health for device in response.devices})
                    self.numa = numa
                    self._signal.changed.notify_all()
        except grpc.RpcError:
            pass
        self.ended = True
        self._signal.tell()

    def close(self) -> None:
        with self._opening:
            self._closed = True
        if self._stream is not None:
            self._stream.cancel()
            self.thread.join(LIMIT)
        self.channel.close()


class Kubelet:
    """An extended kubelet, one life at a time; no more than the plugin can see of one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.signal = Signal()
        self.endpoints: dict[str, Endpoint] = {}
        self.registrations: list[Any] = []
        self.options: dict[str, Any] = {}
        self._all: list[Endpoint] = []
        self._server: Any = None

    def start(self) -> None:
        handler = grpc.unary_unary_rpc_method_handler(
            self._register,
            request_deserializer=message("RegisterRequest").FromString,
            response_serializer=lambda each: each.SerializeToString(),
        )
        self._server = grpc.server(ThreadPoolExecutor(max_workers=4))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1beta1.Registration", {"Register": handler}),)
        )
        for path in self.directory.iterdir():  # as kubelet does at its start
            if path.is_socket():
                path.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{self.directory / 'kubelet.sock'}")
        self._server.start()

    def stop(self) -> None:
        for endpoint in self._all:
            endpoint.close()
        self._all.clear()
        self.endpoints.clear()
        if self._server is not None:
            self._server.stop(0).wait()
            (self.directory / "kubelet.sock").unlink(missing_ok=True)
            self._server = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def _register(self, sent: Any, _context: Any) -> Any:
        endpoint = Endpoint(str(self.directory / sent.endpoint), self.signal)
        options = endpoint.call("GetDevicePluginOptions", message("Empty")(), "DevicePluginOptions")
        with self.signal.changed:
            self._all.append(endpoint)
            self.registrations.append(sent)
            self.options[sent.resource_name] = options
            self.endpoints[sent.resource_name] = endpoint
        endpoint.open()
        return message("Empty")()

    # ---------------------------------------------------------------- lists

    def listed(self, resource: str = REGIONS) -> dict[str, str]:
        return self.endpoints[resource].lists[-1] if self.has_list(resource) else {}

    def until(self, resource: str, devices: Mapping[str, str], *, limit: float = LIMIT) -> None:
        """Wait until the resource's list is this one."""
        try:
            self.signal.until(lambda: self.listed(resource) == devices, "a list", limit=limit)
        except AssertionError:
            assert self.listed(resource) == devices
            raise

    def has_list(self, resource: str) -> bool:
        """Whether the resource's stream is open and has sent a list, if only an empty one."""
        endpoint = self.endpoints.get(resource)
        return endpoint is not None and not endpoint.ended and bool(endpoint.lists)

    def until_health(self, device: str, health: str | None, resource: str = REGIONS) -> None:
        """Wait until a device is listed with this health; None: until it is not listed."""
        self.signal.until(
            lambda: self.has_list(resource) and self.listed(resource).get(device) == health,
            f"{device} {health}",
        )

    # ---------------------------------------------------------------- calls

    def endpoint(self, resource: str) -> Endpoint:
        self.signal.until(lambda: resource in self.endpoints, f"a registration of {resource}")
        return self.endpoints[resource]

    def allocate(self, *devices: str, resource: str = REGIONS) -> Any:
        container = message("ContainerAllocateRequest")(devices_ids=devices)
        sent = message("AllocateRequest")(container_requests=[container])
        (answer,) = (
            self.endpoint(resource).call("Allocate", sent, "AllocateResponse").container_responses
        )
        return answer

    def prestart(
        self,
        *devices: str,
        env: Mapping[str, str],
        resource: str = REGIONS,
        timeout: float | None = LIMIT,
    ) -> None:
        sent = message("PreStartContainerRequest")(devices_ids=devices, Env=env)
        self.endpoint(resource).call(
            "PreStartContainer", sent, "PreStartContainerResponse", timeout
        )

    def begin_prestart(
        self, *devices: str, env: Mapping[str, str], resource: str = REGIONS, timeout: float = LIMIT
    ) -> Any:
        sent = message("PreStartContainerRequest")(devices_ids=devices, Env=env)
        return self.endpoint(resource).begin(
            "PreStartContainer", sent, "PreStartContainerResponse", timeout
        )

    def poststop(self, *devices: str, resource: str = REGIONS) -> None:
        sent = message("PostStopContainerRequest")(devicesIDs=devices)
        self.endpoint(resource).call("PostStopContainer", sent, "Empty")

    def deallocate(self, *devices: str, resource: str = REGIONS) -> None:
        container = message("ContainerDeallocateRequest")(devicesIDs=devices)
        sent = message("DeallocateRequest")(container_requests=[container])
        self.endpoint(resource).call("Deallocate", sent, "Empty")

    def preferred(
        self,
        available: Sequence[str],
        size: int,
        *,
        must: Sequence[str] = (),
        resource: str = REGIONS,
    ) -> list[str]:
        container = message("ContainerPreferredAllocationRequest")(
            available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
        )
        sent = message("PreferredAllocationRequest")(container_requests=[container])
        answer = self.endpoint(resource).call(
            "GetPreferredAllocation", sent, "PreferredAllocationResponse"
        )
        return list(answer.container_responses[0].deviceIDs)

    def checkpoint(self, *entries: tuple[str, str, str, Sequence[str], Any]) -> None:
        """Write kubelet's records: (pod, container, resource, devices, Allocate's answer)."""
        data = {
            "PodDeviceEntries": [
                {
                    "PodUID": pod,
                    "ContainerName": container,
                    "ResourceName": resource,
                    "DeviceIDs": {"-1": list(devices)},
                    "AllocResp": base64.b64encode(answer.SerializeToString()).decode(),
                }
                for pod, container, resource, devices, answer in entries
            ],
            "RegisteredDevices": {},
        }
        path = self.directory / "kubelet_internal_checkpoint"
        path.with_suffix(".new").write_text(json.dumps({"Data": data, "Checksum": 1}))
        path.with_suffix(".new").replace(path)


def program(wrapper: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start the daemon as a new program, its standard error a pipe."""
    return subprocess.Popen(
        [*wrapper, sys.executable, "-m", "fpga_plugin", "run"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=env,
        cwd=ROOT,
        bufsize=0,
    )


def launch(
    wrapper: Sequence[str], env: Mapping[str, str]
) -> "subprocess.Popen[bytes] | nursery.Forked":
    """Start the daemon in the cheapest way: a process of its own, its standard error a pipe."""
    return program(wrapper, env) if wrapper else nursery.launch(["run"], env, str(ROOT))


class Plugin:
    """One life of the daemon.

    A thread reads its log, so that it never waits for room in the pipe. Whoever asks for lines
    reads as well: `lines`, `raw` and `mark` have all that the daemon has written by then.

    Args:
        env: its settings.
        kill_at: SIGKILL when it logs this event for the first time.
        wrapper: a command that runs the command that follows it.
    """

    def __init__(
        self, env: Mapping[str, str], *, kill_at: str = "", wrapper: Sequence[str] = ()
    ) -> None:
        self._kill_at = kill_at
        self._lines: list[dict[str, Any]] = []
        self._raw: list[str] = []
        self._rest = b""
        self.signal = Signal()
        self.process = launch(wrapper, others() | dict(env))
        assert self.process.stderr is not None
        self._pipe = self.process.stderr
        os.set_blocking(self._pipe.fileno(), False)
        self._ended = False
        self._reader = threading.Thread(target=self._watch)
        self._reader.start()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while not self._ended:
            poll.poll(1000)  # ms; somebody else may hold the pipe when the daemon is gone
            self._read()

    def _read(self) -> None:
        """Take what is in the pipe."""
        with self.signal.changed:
            before = len(self._lines)
            while not self._ended and (data := self._pipe.read(1 << 16)) is not None:
                *lines, self._rest = (self._rest + data).split(b"\n")
                if not data:  # all who wrote to it have ended
                    self._ended = True
                    lines = [self._rest] if self._rest else []
                for line in lines:
                    self._take(line.decode(errors="replace"))
            if self._ended or len(self._lines) != before:
                self.signal.changed.notify_all()

    def _take(self, line: str) -> None:
        try:
            parsed = json.loads(line)
        except ValueError:
            parsed = {"event": "", "text": line}
        if self._kill_at and parsed["event"] == self._kill_at:
            self.process.kill()
        self._raw.append(f"{line}\n")
        self._lines.append(parsed)

    @property
    def lines(self) -> list[dict[str, Any]]:
        self._read()
        return self._lines

    @property
    def raw(self) -> list[str]:
        self._read()
        return self._raw

    def logged(self, event: str, since: int = 0, **values: Any) -> list[dict[str, Any]]:
        """Lines of an event that have these values."""
        return [
            line
            for line in self.lines[since:]
            if line["event"] == event and all(line.get(k) == v for k, v in values.items())
        ]

    def until_logged(self, event: str, since: int = 0, **values: Any) -> dict[str, Any]:
        return self.signal.until(
            lambda: self.logged(event, since, **values), f"log {event} {values}"
        )[0]

    @property
    def mark(self) -> int:
        """How many lines the daemon has written so far, for `since`."""
        return len(self.lines)

    def kill(self) -> None:
        """SIGKILL, at once."""
        self.process.kill()
        self._gone()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.exit_code()

    def exit_code(self) -> int:
        self.process.wait(LIMIT)
        return self._gone()

    def _gone(self) -> int:
        code = self.process.wait(LIMIT)
        self._reader.join(LIMIT)
        with self.signal.changed:
            self._ended = True
            self._pipe.close()
        return code

    @property
    def text(self) -> str:
        return "".join(self.raw)


PAUSE, MAIN = "a" * 64, "b" * 64
"""Containers' cgroups, as containerd names them."""


class Cgroups:
    """Pods' cgroups of version 2, in a tree of one driver."""

    def __init__(self, root: Path, tree: str = "kubepods") -> None:
        self.root = root
        self.tree = root / tree
        self.tree.mkdir(parents=True)
        (root / "cgroup.controllers").write_text("cpu pids\n")

    def pod(self, uid: str) -> Path:
        if self.tree.suffix == ".slice":
            return self.tree / f"{self.tree.stem}-pod{uid.replace('-', '_')}.slice"
        return self.tree / f"pod{uid}"

    def set(self, uid: str, *containers: str) -> None:
        """Make the pod's cgroup what it is with these containers in it, one task each."""
        pod = self.pod(uid)
        for name in (PAUSE, MAIN):
            self._write(pod / name, int(name in containers))
        (pod / "cgroup.procs").write_text("")
        self._write(pod, len(containers))

    def _write(self, path: Path, tasks: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("pids.current", f"{tasks}\n"),
            ("cgroup.events", f"populated {int(tasks > 0)}\n"),
        ):
            (path / "new").write_text(text)
            (path / "new").replace(path / name)

    def remove(self, uid: str) -> None:
        shutil.rmtree(self.pod(uid).rename(self.tree.parent / "removed"))


class Node:
    """A node: what outlives the plugin, and the plugin's present life.

    Attributes:
        has_clocks: a region's user clock can be set.
    """

    has_clocks = True

    def __init__(self, hardware: str = "1x2", **settings: str) -> None:
        # Not pytest's folder: the path of a socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="fpga-"))
        self.state_dir = self.folder / "state"
        self.simulated = self.state_dir / "simulated"
        self.store = STORE
        self.kubelet_dir = self.folder / "kubelet"
        self.kubelet_dir.mkdir()
        self.kubelet = Kubelet(self.kubelet_dir)
        self.settings = {
            "FPGA_PLUGIN_BACKEND": "simulated",
            "FPGA_PLUGIN_SIMULATED_CARDS": hardware,
            "FPGA_PLUGIN_SIMULATED_PR_SECONDS": "0.01",
            "FPGA_PLUGIN_STATE_DIR": str(self.state_dir),
            "FPGA_PLUGIN_KUBELET_DIR": str(self.kubelet_dir),
            "FPGA_PLUGIN_BITSTREAM_DIR": str(self.store),
            "FPGA_PLUGIN_PODRESOURCES_SOCKET": "",
            "FPGA_PLUGIN_PODS_SOCKET": "",
            "FPGA_PLUGIN_CGROUP_ROOT": "",
            "FPGA_PLUGIN_HTTP_ADDRESS": "",
            "FPGA_PLUGIN_HEALTH_INTERVAL": "0.2",
            "FPGA_PLUGIN_LOG_LEVEL": "debug",
        }
        self.set(**settings)
        self.wrapper: Sequence[str] = ()
        self.lives: list[Plugin] = []

    def set(self, **settings: str) -> None:
        """Settings of the next start, without their prefix and in lower case."""
        self.settings |= {f"FPGA_PLUGIN_{name.upper()}": text for name, text in settings.items()}

    def own_store(self, *, manifest: bool = False) -> Path:
        """A store that the test may change; with the samples' manifest, only if it says so."""
        self.store = self.folder / "store"
        copy_samples(self.store)
        if not manifest:
            (self.store / "manifest.json").unlink()
        self.set(bitstream_dir=str(self.store))
        return self.store

    @property
    def plugin(self) -> Plugin:
        return self.lives[-1]

    def start(self, *, kill_at: str = "") -> Plugin:
        self.lives.append(Plugin(self.settings, kill_at=kill_at, wrapper=self.wrapper))
        return self.plugin

    def up(self) -> "Node":
        """Kubelet and plugin, until every device is listed Healthy."""
        self.kubelet.start()
        self.start()
        self.settled()
        self.caught_up()
        return self

    def told(self) -> "Node":
        """Until commands find the plugin: its socket comes a moment after the registration."""

        def listens() -> bool:
            with socket.socket(socket.AF_UNIX) as client:
                return client.connect_ex(os.fspath(self.state_dir / "status.sock")) == 0

        eventually(listens, "the status socket listens")
        return self

    def settled(self) -> None:
        """Until every listed device is Healthy, and the plugin has nothing to do."""
        self.plugin.until_logged("serving")
        resources = self.plugin.logged("serving")[0]["resources"]

        def all_healthy() -> bool:
            lists = [self.kubelet.listed(resource) for resource in resources]
            return all(lists) and {health for each in lists for health in each.values()} == {
                HEALTHY
            }

        self.kubelet.signal.until(all_healthy, "all devices Healthy")

    def give_back(self, *devices: str, resource: str = REGIONS) -> None:
        """Deallocate the last claims on their cards, until those are free and Healthy."""
        kubelet = self.kubelet
        cards = tuple({device.partition("-p")[0] for device in devices})
        kinds = ("/region-", "/fpga-")
        other = resource.replace(*(kinds if kinds[0] in resource else kinds[::-1]))

        def health() -> set[str]:
            return {h for name, h in kubelet.listed(other).items() if name.startswith(cards)}

        # Lists come a little later than what they tell of.
        kubelet.signal.until(lambda: not health(), f"{other} without {cards}")
        kubelet.deallocate(*devices, resource=resource)
        kubelet.signal.until(lambda: health() == {HEALTHY}, f"{cards} Healthy again")

    def again(self) -> Plugin:
        """Kill and start again, until kubelet has the lists of every resource again."""
        self.plugin.kill()
        return self.restarted()

    def restarted(self) -> Plugin:
        """Start after an end, until kubelet has the lists of every resource and its records
        were read."""
        before = len(self.kubelet.registrations)
        plugin = self.start()
        resources = plugin.until_logged("serving")["resources"]
        self.kubelet.signal.until(
            lambda: (
                len(self.kubelet.registrations) >= before + len(resources)
                and all(self.kubelet.has_list(resource) for resource in resources)
            ),
            "registrations after the restart",
        )
        plugin.until_logged("kubelet's records read")
        return plugin

    def caught_up(self) -> None:
        """Read the log up to now: the line of a call made here comes after all others."""

        def calls() -> int:
            return len(self.plugin.logged("call", method="GetPreferredAllocation"))

        def answered() -> bool:
            try:
                self.kubelet.preferred([], 0, resource=next(iter(self.kubelet.endpoints)))
            except Refused as error:
                if error.code != "UNAVAILABLE":
                    raise
                return False  # it registers again just now, by another socket
            return True

        before = calls()
        eventually(answered, "a call that is answered")
        self.plugin.signal.until(lambda: calls() > before, "the line of a call")

    def steps(self, region: str, since: int = 0) -> list[str]:
        """What this run of the plugin did to a region so far, as its reports name it."""
        self.caught_up()
        return [
            step
            for line in self.plugin.lines[since:]
            if line.get("region") == region and "steps" in line
            for step in line["steps"]
        ]

    def scrubs(self, region: str, since: int = 0) -> int:
        """How often this run of the plugin blanked a region so far."""
        return self.steps(region, since).count("program blank")

    def state(self) -> dict[str, dict[str, Any]]:
        return json.loads((self.simulated / "state.json").read_text())["regions"]

    def afu(self, region: str) -> str:
        return str(self.state()[region]["afu_id"])

    def until_programming(self, region: str, afu: str) -> None:
        """Wait until the PR that loads this image has begun.

        Simulated cards say at its beginning what it will have loaded.
        """
        eventually(lambda: self.afu(region) == afu)

    def arm(self, region: str, word: str) -> Path:
        """Arm a fault, in one step as far as the plugin can see."""
        path = self.simulated / "faults" / region
        new = self.folder / "fault"
        new.write_text(f"{word}\n")
        new.replace(path)
        return path

    def unplug(self, card: str) -> None:
        (self.simulated / "cards" / card).unlink()

    def take_driver_off(self, card: str) -> None:
        """As dfl-pci's `unbind` leaves a card, while no plugin runs."""
        path = self.simulated / "state.json"
        state = json.loads(path.read_text())
        for region, what in state["regions"].items():
            if region.startswith(f"{card}-p"):
                what |= {"bound": False, "node": None, "fme": None}
        path.write_text(json.dumps(state))

    def die_between_unbind_and_bind(self, card: str) -> None:
        """What a plugin leaves behind that is killed while it rebinds a card."""
        self.plugin.kill()
        self.take_driver_off(card)
        with contextlib.closing(sqlite3.connect(self.state_dir / "journal.sqlite3")) as db, db:
            db.execute("INSERT INTO journal VALUES ('rebinding', ?, 'true')", (card,))

    def plug(self, card: str) -> None:
        (self.simulated / "cards" / card).touch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for life in self.lives:
            life.kill()  # those that ended by themselves too: nothing of them stays open
        self.kubelet.stop()
        for number, life in enumerate(self.lives):
            print(f"--- log of life {number} ---\n{life.text}")  # noqa: T201  # pytest shows it with a failure
        shutil.rmtree(self.folder)


def run(node: Node, cgroups: Cgroups, pod: str, device: str) -> tuple[object, ...]:
    """A pod's container on a region; returns its entry in kubelet's checkpoint."""
    cgroups.set(pod, MAIN)
    entry = (pod, "main", REGIONS, [device], node.kubelet.allocate(device))
    node.kubelet.checkpoint(entry)
    node.kubelet.prestart(device, env=request())
    return entry
