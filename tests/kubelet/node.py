"""One node: containerd, kubelet and the plugin as processes, in the namespaces of `namespace.py`.

Kubelet runs by itself, without an API server: its pods are files in a folder. They use the node's
network, so that none has to be made for them. What a test waits for it sees where an operator
would: in kubelet's list of pods, PodResources, the checkpoint, the plugin's log.
"""

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
from daemon_support import REGIONS, STORE, Plugin
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc
from images import write_image
from namespace import BUSYBOX

import fpga_plugin.api

T = TypeVar("T")

SCRATCH = Path(os.environ.get("FPGA_KUBELET_SCRATCH", "/nonexistent"))
CGROUP = os.environ.get("FPGA_KUBELET_CGROUP", "")
PROGRAMS = Path(os.environ.get("FPGA_KUBELET_BIN", "/nonexistent"))
VERSION = os.environ.get("FPGA_KUBELET_VERSION", "")

KUBELET_DIR = Path("/var/lib/kubelet")
CHECKPOINT = KUBELET_DIR / "device-plugins/kubelet_internal_checkpoint"
PODRESOURCES = KUBELET_DIR / "pod-resources/kubelet.sock"
PODS_API = KUBELET_DIR / "pods-api/pods-api.sock"
CONTAINERD = "/run/containerd/containerd.sock"

STAY = "trap 'exit 0' TERM; sleep 2147483 & wait"
"""A container's command that ends when it is told to, and not before."""

IMAGE, PAUSE = "localhost/busybox:1", "localhost/pause:1"

LIMIT = 60.0
"""Seconds after which a test gives up on what it waits for: kubelet retries after 10."""


INTERVAL = 0.5
"""Seconds between two looks of the plugin at kubelet's records."""


def until(look: Callable[[], T], what: str, *, limit: float = LIMIT) -> T:
    """Wait for what nobody announces; returns what it came to."""
    deadline = time.monotonic() + limit
    while not (found := look()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {limit:g} s: {what}")
        time.sleep(0.05)
    return found


class Process:
    """A program in the background, its output in a file."""

    def __init__(self, name: str, *command: str | Path) -> None:
        self.log = SCRATCH / f"{name}.log"
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.runs:
            self._process.send_signal(number)
            self._process.wait(LIMIT)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Runtime:
    """containerd, with the images of the tests in it."""

    def __init__(self) -> None:
        self._config = SCRATCH / "containerd.toml"
        self._config.write_text(f"""\
version = 2
root = "{SCRATCH}/containerd"
state = "/run/containerd"
[grpc]
address = "{CONTAINERD}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{SCRATCH}/cni"
bin_dir = "{SCRATCH}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
""")
        self.start()
        links = {f"bin/{name}": "busybox" for name in ("sh", "sleep", "test", "cat", "echo")}
        for image, command in ((IMAGE, ["sh"]), (PAUSE, ["sleep", "2147483"])):
            path = SCRATCH / "image.tar"
            write_image(path, image, {"bin/busybox": BUSYBOX}, links=links, command=command)
            self.ctr("images", "import", str(path))

    def start(self) -> None:
        self.process = Process("containerd", "containerd", "--config", self._config)
        until(self._serves, "containerd serves", limit=LIMIT)

    def _serves(self) -> bool:
        assert self.process.runs, self.process.tail()
        return subprocess.run(
            ["ctr", "--address", CONTAINERD, "version"], check=False, capture_output=True
        ).returncode == 0  # fmt: skip

    def ctr(self, *arguments: str) -> str:
        return subprocess.run(
            ["ctr", "--address", CONTAINERD, "--namespace", "k8s.io", *arguments],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def remove_pods(self) -> None:
        """Stop and remove every pod, as kubelet would, whatever it thinks of it."""
        kind = 'labels."io.cri-containerd.kind"==sandbox'
        with grpc.insecure_channel(f"unix://{CONTAINERD}") as channel:
            for sandbox in self.ctr("containers", "list", "--quiet", kind).split():
                for method in ("StopPodSandbox", "RemovePodSandbox"):
                    call = channel.unary_unary(f"/runtime.v1.RuntimeService/{method}")
                    # Both requests: field 1, a text of less than 128 bytes.
                    call(b"\n" + bytes([len(sandbox)]) + sandbox.encode(), timeout=LIMIT)

    def kill(self, container_id: str) -> None:
        """Kill a running container; the id as a pod's status has it."""
        self.ctr("tasks", "kill", "--signal", "KILL", container_id.removeprefix("containerd://"))

    def restart(self) -> None:
        self.process.end()
        self.start()


class Kubelet:
    """The real kubelet.

    Args:
        gates: feature gates.
    """

    def __init__(self, gates: Mapping[str, bool]) -> None:
        self.manifests = SCRATCH / "manifests"
        self._config = SCRATCH / "kubelet.json"
        none = dict.fromkeys(
            ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available"), "0%"
        )
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "readOnlyPort": 10255,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{CGROUP}",
            "containerRuntimeEndpoint": f"unix://{CONTAINERD}",
            "enforceNodeAllocatable": ["none"],
            "evictionHard": none,
            "failCgroupV1": False,
            "failSwapOn": False,
            "featureGates": dict(gates),
            "fileCheckFrequency": "1s",
            "imageGCHighThresholdPercent": 100,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "registerNode": False,
            "resolvConf": "",
            "staticPodPath": str(self.manifests),
            "volumePluginDir": str(SCRATCH / "volume-plugins"),
        }
        self._config.write_text(json.dumps(config))
        self._process: Process | None = None

    def start(self) -> None:
        """Until it has read its folder and serves PodResources."""
        self.manifests.mkdir(exist_ok=True)
        self._process = Process(
            "kubelet",
            PROGRAMS / "kubelet",
            *("--config", self._config, "--hostname-override", "node", "--v=4"),
        )
        until(self._serves, "kubelet serves")

    def _serves(self) -> bool:
        assert self._process is not None
        assert self._process.runs, self._process.tail()
        try:
            self.pods()
            podresources()
        except (OSError, grpc.RpcError):
            return False
        return True

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.end(number)
            self._process = None

    def restart(self) -> None:
        self.end()
        self.start()

    def pods(self) -> list[dict[str, Any]]:
        """Kubelet's pods with their status."""
        with urllib.request.urlopen("http://127.0.0.1:10255/pods", timeout=LIMIT) as answer:
            return json.load(answer)["items"] or []

    def lists(self) -> float:
        """How many Lists of PodResources it has answered."""
        with urllib.request.urlopen("http://127.0.0.1:10255/metrics", timeout=LIMIT) as answer:
            lines = answer.read().decode().splitlines()
        name = "kubelet_pod_resources_endpoint_requests_list{"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


class Pod:
    """A pod of the test, as kubelet sees it."""

    def __init__(self, node: "Node", manifest: Mapping[str, Any]) -> None:
        self._node = node
        self._path = node.kubelet.manifests / f"{manifest['metadata']['name']}.json"
        self.uid: str = manifest["metadata"]["uid"]
        self.name: str = manifest["metadata"]["name"]
        new = SCRATCH / "manifest.new"
        new.write_text(json.dumps(manifest))
        new.replace(self._path)

    def seen(self) -> dict[str, Any]:
        """What kubelet says of it; empty: it does not know it."""
        return next((p for p in self._node.kubelet.pods() if p["metadata"]["uid"] == self.uid), {})

    def phase(self) -> str:
        return self.seen().get("status", {}).get("phase", "")

    def until_phase(self, phase: str) -> dict[str, Any]:
        """Wait for a phase; returns the pod."""
        try:
            until(lambda: self.phase() == phase, f"pod {self.name} is {phase}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {json.dumps(self.seen().get('status'))}") from None
        return self.seen()

    def container(self, name: str = "main") -> dict[str, Any]:
        """A container's status; empty: none yet."""
        status = self.seen().get("status", {})
        every = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
        return next((c for c in every if c["name"] == name), {})

    def until_waiting(self, reason: str, name: str = "main") -> str:
        """Wait until a container waits for this reason; returns its message."""
        found = until(
            lambda: (
                (w := self.container(name).get("state", {}).get("waiting", {})).get("reason")
                == reason
                and w
            ),
            f"{self.name}/{name} waits for {reason}",
        )
        return str(found["message"])

    def until_running(self, name: str = "main", *, after: str = "") -> str:
        """Wait until a container runs, one that came after this one; returns its id."""

        def runs() -> str:
            status = self.container(name)
            found = status.get("containerID", "") if "running" in status.get("state", {}) else ""
            return found if found != after else ""

        try:
            return until(runs, f"{self.name}/{name} runs")
        except AssertionError as error:
            raise AssertionError(f"{error}: {json.dumps(self.seen().get('status'))}") from None

    def devices(self, name: str = "main") -> dict[str, list[str]]:
        """Device ids by resource, from PodResources."""
        return podresources().get((self.name + "-node", name), {})

    def output(self, name: str = "main") -> str:
        """What a container wrote, over all its starts."""
        logs = sorted(Path("/var/log/pods").glob(f"*_{self.uid}/{name}/*.log"))
        lines = [line for log in logs for line in log.read_text().splitlines()]
        return "\n".join(line.split(" ", 3)[3] for line in lines)

    def delete(self) -> None:
        """Begin to delete it."""
        self._path.unlink()

    def until_gone(self) -> None:
        until(lambda: not self.seen(), f"pod {self.name} is gone")


class Node:
    """A node of a test; ends what it started.

    Args:
        cards: simulated ones, as FPGA_PLUGIN_SIMULATED_CARDS has them.
        gates: kubelet's feature gates.
        settings: of the plugin, without their prefix and in lower case.
    """

    def __init__(self, runtime: Runtime, cards: str, gates: Mapping[str, bool], **settings: str):
        for directory in ("manifests", "plugin"):
            shutil.rmtree(SCRATCH / directory, ignore_errors=True)
        for path in KUBELET_DIR.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (SCRATCH / "kubelet.log").unlink(missing_ok=True)
        self.runtime = runtime
        self.kubelet = Kubelet(gates)
        self.state = SCRATCH / "plugin"
        self.settings = {
            "FPGA_PLUGIN_BACKEND": "simulated",
            "FPGA_PLUGIN_SIMULATED_CARDS": cards,
            "FPGA_PLUGIN_STATE_DIR": str(self.state),
            "FPGA_PLUGIN_BITSTREAM_DIR": str(STORE),
            "FPGA_PLUGIN_PODS_SOCKET": str(PODS_API),
            "FPGA_PLUGIN_RECONCILE_INTERVAL": str(INTERVAL),
            "FPGA_PLUGIN_HTTP_ADDRESS": "",
            "FPGA_PLUGIN_LOG_LEVEL": "debug",
        } | {f"FPGA_PLUGIN_{name.upper()}": text for name, text in settings.items()}
        self.lives: list[Plugin] = []

    def up(self) -> "Node":
        """Kubelet and plugin, until kubelet knows every device."""
        self.kubelet.start()
        self.start_plugin()
        self.until_allocatable()
        return self

    @property
    def plugin(self) -> Plugin:
        return self.lives[-1]

    def start_plugin(self) -> Plugin:
        self.lives.append(Plugin(self.settings))
        return self.plugin

    def until_allocatable(self) -> None:
        """Wait until kubelet has a sound device of each resource that the plugin serves."""
        resources = self.plugin.until_logged("serving")["resources"]
        until(lambda: all(map(allocatable().get, resources)), "kubelet knows the devices")

    def until_offered(self, resource: str, devices: Iterable[str]) -> None:
        """Wait until kubelet counts exactly these devices of a resource as sound, used or not."""
        wanted = set(devices)
        try:
            until(lambda: allocatable().get(resource, set()) == wanted, f"{wanted} offered")
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {allocatable().get(resource)}") from None

    def pod(self, name: str, *containers: Mapping[str, Any], **spec: Any) -> Pod:
        """Give kubelet a pod; its containers are from `container`."""
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": str(uuid.uuid4()),
            },
            "spec": {
                "hostNetwork": True,
                "terminationGracePeriodSeconds": 1,
                "containers": list(containers),
            }
            | spec,
        }
        return Pod(self, manifest)

    def afu(self, region: str) -> str:
        """What a simulated region holds."""
        state = json.loads((self.state / "simulated/state.json").read_text())
        return str(state["regions"][region]["afu_id"])

    def prepared(self, region: str, since: int = 0) -> list[str]:
        """What this life of the plugin programmed for containers on a region: AFU ids."""
        return [
            line["afu_id"]
            for line in self.plugin.logged("region prepared", since, region=region)
            if line["error"] is None
        ]

    def checkpoint(self) -> list[dict[str, Any]]:
        """Entries of kubelet's checkpoint."""
        return json.loads(CHECKPOINT.read_text())["Data"]["PodDeviceEntries"] or []

    def close(self) -> None:
        for life in self.lives:
            if life.process.poll() is None:
                life.kill()
        self.kubelet.end(signal.SIGKILL)
        self.runtime.remove_pods()
        for number, life in enumerate(self.lives):
            print(f"--- plugin, life {number} ---\n{life.text}")  # noqa: T201  # pytest shows it with a failure
        log = SCRATCH / "kubelet.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        lines = [line for line in text.splitlines() if "httplog.go" not in line]
        print("--- kubelet ---", *lines[-60:], sep="\n")  # noqa: T201  # the same


def container(
    name: str = "main",
    *,
    command: str = STAY,
    resources: Mapping[str, int] | None = None,
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A container of a pod; without resources: one region."""
    counts = {REGIONS: 1} if resources is None else resources
    return {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", command],
        "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
        "resources": {"limits": {resource: str(count) for resource, count in counts.items()}},
    } | more


# ---------------------------------------------------------------- PodResources


def _pool() -> descriptor_pool.DescriptorPool:
    api = Path(fpga_plugin.api.__file__).parent
    pool = descriptor_pool.DescriptorPool()
    compiled = SCRATCH / "podresources.set"
    arguments = ["protoc", f"-I{api}", f"--descriptor_set_out={compiled}", "podresources.proto"]
    assert protoc.main(arguments) == 0
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file:
        pool.Add(file)
    return pool


_known: list[descriptor_pool.DescriptorPool] = []


def _ask(method: str, request: str, answer: str) -> Any:
    if not _known:
        _known.append(_pool())
    classes = [
        message_factory.GetMessageClass(_known[0].FindMessageTypeByName(f"v1.{name}"))
        for name in (request, answer)
    ]
    with grpc.insecure_channel(f"unix://{PODRESOURCES}") as channel:
        call = channel.unary_unary(
            f"/v1.PodResourcesLister/{method}",
            request_serializer=classes[0].SerializeToString,
            response_deserializer=classes[1].FromString,
        )
        return call(classes[0](), timeout=5)


def podresources() -> dict[tuple[str, str], dict[str, list[str]]]:
    """Device ids by resource, for each pod and container."""
    answer = _ask("List", "ListPodResourcesRequest", "ListPodResourcesResponse")
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for pod in answer.pod_resources:
        for each in pod.containers:
            devices = found.setdefault((pod.name, each.name), {})
            for entry in each.devices:
                devices.setdefault(entry.resource_name, []).extend(entry.device_ids)
    return found


def allocatable() -> dict[str, set[str]]:
    """What kubelet may give out, used devices included, by resource."""
    answer = _ask("GetAllocatableResources", "AllocatableResourcesRequest",
                  "AllocatableResourcesResponse")  # fmt: skip
    found: dict[str, set[str]] = {}
    for entry in answer.devices:
        found.setdefault(entry.resource_name, set()).update(entry.device_ids)
    return found
