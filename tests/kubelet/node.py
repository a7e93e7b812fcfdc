"""One node: kubelet and the plugin as processes, in the namespaces of `namespace.py`.

Kubelet runs by itself, its pods files in a folder, or with an API server. Pods use the node's
network, so that none has to be made for them. What a test waits for it sees where an operator
would: in kubelet's list of pods, PodResources, the checkpoint, the plugin's log.
"""

import json
import shutil
import signal
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc
import yaml
from control_plane import ControlPlane
from daemon_support import REGIONS, STORE, Plugin
from machine import (
    CGROUP,
    CHECKPOINT,
    CONTAINERD,
    DEVICE_PLUGINS,
    IMAGE,
    INTERVAL,
    KUBELET_DIR,
    LIMIT,
    PLUGIN_IN_A_POD,
    PODS_API,
    PROGRAMS,
    SCRATCH,
    STAY,
    Process,
    Runtime,
    until,
)
from namespace import ADDRESS, ROOT
from pod_plugin import PodPlugin
from records import allocatable, podresources


class Kubelet:
    """The real kubelet.

    Args:
        gates: feature gates.
        control_plane: None: its pods are those of its folder.
    """

    def __init__(self, gates: Mapping[str, bool], control_plane: ControlPlane | None) -> None:
        self.control_plane = control_plane
        self.manifests = SCRATCH / "manifests"
        self._config = SCRATCH / "kubelet.json"
        none = dict.fromkeys(
            ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available"), "0%"
        )
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "0.0.0.0",  # the API server comes by the node's own, for logs
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
            "registerNode": self.control_plane is not None,
            "resolvConf": "",
            "staticPodPath": str(self.manifests),
            "volumePluginDir": str(SCRATCH / "volume-plugins"),
        }
        self._config.write_text(json.dumps(config))
        self._process: Process | None = None
        self._began = 0.0

    def start(self) -> None:
        """Until it has read its folder, and serves PodResources and its own socket."""
        self.manifests.mkdir(exist_ok=True)
        arguments = ["--config", self._config, "--hostname-override", "node", "--v=4"]
        # As Node Feature Discovery labels a node that has a card: the chart's pod asks for it.
        arguments += ["--node-labels", "feature.node.kubernetes.io/fpga-dfl.present=true"]
        if self.control_plane is not None:
            arguments += ["--kubeconfig", self.control_plane.kubeconfig("kubelet")]
            arguments += ["--node-ip", ADDRESS]
        self._began = time.time()
        self._process = Process("kubelet", PROGRAMS / "kubelet", *arguments)
        until(self._serves, "kubelet serves")

    def until_its_first_second_is_over(self) -> None:
        """A second as the status of a container counts them, which has whole ones."""
        until(lambda: time.time() >= int(self._socket_born()) + 1, "kubelet's first second is over")

    def _socket_born(self) -> float:
        """When its own socket came to be; 0: not yet. Kubelet works on no pods before."""
        try:
            born = DEVICE_PLUGINS.joinpath("kubelet.sock").stat().st_ctime
        except FileNotFoundError:
            return 0.0
        return born if born >= self._began else 0.0  # else another kubelet left it behind

    def _serves(self) -> bool:
        assert self._process is not None
        assert self._process.runs, self._process.tail()
        try:
            self.pods()
            podresources()
        except (OSError, grpc.RpcError):
            return False
        return self._socket_born() > 0

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

    def forgot(self, uid: str) -> bool:
        """Whether it has removed a pod's worker: its log alone says so."""
        assert self._process is not None
        said = f'no longer known to the kubelet, remove all history" podUID="{uid}"'
        return said in self._process.log.read_text(errors="replace")

    def podresources_calls(self) -> float:
        """How many calls of PodResources it has answered."""
        with urllib.request.urlopen("http://127.0.0.1:10255/metrics", timeout=LIMIT) as answer:
            lines = answer.read().decode().splitlines()
        name = "kubelet_pod_resources_endpoint_requests_total{"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


class Pod:
    """A pod of the test, as kubelet sees it: a file, or an object of the API server.

    Args:
        node: where it runs.
        manifest: without a uid.
        static: a file even where there is an API server.
    """

    def __init__(self, node: "Node", manifest: Mapping[str, Any], *, static: bool = False) -> None:
        self._node = node
        self._control_plane = None if static else node.kubelet.control_plane
        self.name: str = manifest["metadata"]["name"]
        self._namespace: str = manifest["metadata"].get("namespace", "default")
        if self._control_plane is None:
            self.uid = str(uuid.uuid4())
            self.listed_as = f"{self.name}-node"
            self._path = node.kubelet.manifests / f"{self.name}.json"
            self._manifest = manifest | {"metadata": manifest["metadata"] | {"uid": self.uid}}
            self.put()
        else:
            self.uid = self._control_plane.create_pod(manifest)
            self.listed_as = self.name

    def put(self) -> None:
        """Make its file; again after `delete`, for another instance of the same uid."""
        new = SCRATCH / "manifest.new"
        new.write_text(json.dumps(self._manifest))
        new.replace(self._path)

    def seen(self) -> dict[str, Any]:
        """What kubelet says of it; empty: it does not know it."""
        return next((p for p in self._node.kubelet.pods() if p["metadata"]["uid"] == self.uid), {})

    def status_text(self, *words: str) -> str:
        """Which of these words its status has, the first of them; empty: none."""
        text = json.dumps(self.seen().get("status", {}))
        return next((each for each in words if each in text), "")

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

    def runs(self, name: str = "main", *, after: str = "") -> str:
        """The id of a container that runs, of one that came after this one; empty: none."""
        status = self.container(name)
        found = status.get("containerID", "") if "running" in status.get("state", {}) else ""
        return found if found != after else ""

    def until_running(self, name: str = "main", *, after: str = "") -> str:
        """Wait until a container runs, one that came after this one; returns its id."""
        try:
            return until(lambda: self.runs(name, after=after), f"{self.name}/{name} runs")
        except AssertionError as error:
            raise AssertionError(f"{error}: {json.dumps(self.seen().get('status'))}") from None

    def devices(self, name: str = "main") -> dict[str, list[str]]:
        """Device ids by resource, from PodResources."""
        return podresources().get((self.listed_as, name), {})

    def output(self, name: str = "main") -> str:
        """What a container wrote, over all its starts."""
        logs = sorted(Path("/var/log/pods").glob(f"*_{self.uid}/{name}/*.log"))
        lines = [line for log in logs for line in log.read_text().splitlines()]
        return "\n".join(line.split(" ", 3)[3] for line in lines)

    def delete(self, *, grace: int | None = None) -> None:
        """Begin to delete it; with a grace of 0 seconds by force (API server only)."""
        if self._control_plane is None:
            self._path.unlink()
        else:
            self._control_plane.delete_pod(self.name, grace, namespace=self._namespace)

    def until_gone(self) -> None:
        until(lambda: not self.seen(), f"pod {self.name} is gone")

    def until_forgotten(self) -> None:
        """Until kubelet would admit a pod of the same uid as any other.

        Its list lacks a pod for up to two seconds and more before its worker is removed (at its
        housekeeping). What comes again meanwhile is started without admission, so without
        Allocate, and its container never starts: "no devices found allocated in local cache"
        (pkg/kubelet/kubelet.go, HandlePodAdditions; pod_workers.go, removeTerminatedWorker).
        """
        until(lambda: self._node.kubelet.forgot(self.uid), f"kubelet forgot pod {self.name}")


def _unmount(directory: Path) -> None:
    """What a kubelet that was killed left mounted: the credentials of its pods."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mounted = Path(line.split()[4])
        if mounted.is_relative_to(directory):
            subprocess.run(["umount", "--lazy", mounted], check=False)


class Node:
    """A node of a test; ends what it started.

    Args:
        cards: simulated ones, as FPGA_PLUGIN_SIMULATED_CARDS has them.
        gates: kubelet's feature gates.
        control_plane: None: kubelet is by itself.
        user: as whom the plugin asks the API server.
        settings: of the plugin, without their prefix and in lower case.

    Attributes:
        chart: values of the chart's that are no settings, where the plugin is its pod.
    """

    def __init__(
        self,
        runtime: Runtime,
        cards: str,
        gates: Mapping[str, bool],
        control_plane: ControlPlane | None,
        *,
        user: str = "plugin",
        **settings: str,
    ) -> None:
        for directory in ("manifests", "plugin"):
            shutil.rmtree(SCRATCH / directory, ignore_errors=True)
        _unmount(KUBELET_DIR)
        for path in KUBELET_DIR.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (SCRATCH / "kubelet.log").unlink(missing_ok=True)
        self.runtime = runtime
        self.kubelet = Kubelet(gates, control_plane)
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
            "FPGA_PLUGIN_KUBECONFIG": ""
            if control_plane is None
            else control_plane.kubeconfig(user),
        } | {f"FPGA_PLUGIN_{name.upper()}": text for name, text in settings.items()}
        self.chart: dict[str, str] = {}
        self.lives: list[Plugin | PodPlugin] = []
        self._found_at_boot: tuple[str, ...] = ()
        self._frozen: set[Path] = set()

    def up(self) -> "Node":
        """Kubelet and plugin, until kubelet knows every device."""
        self.kubelet.start()
        if self.kubelet.control_plane is not None:
            until(self.kubelet.control_plane.has_node, "kubelet registers its node")
        self.start_plugin()
        self.until_allocatable()
        return self

    @property
    def plugin(self) -> Plugin | PodPlugin:
        return self.lives[-1]

    def start_plugin(self) -> Plugin | PodPlugin:
        self.lives.append(PodPlugin(self) if PLUGIN_IN_A_POD else Plugin(self.settings))
        self._find_cards()
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

    def polls_nothing(self) -> bool:
        """Whether PodResources are not asked for some intervals: seen by waiting only."""
        before = self.kubelet.podresources_calls()
        time.sleep(4 * INTERVAL)
        return self.kubelet.podresources_calls() == before

    def pod(
        self, name: str, *containers: Mapping[str, Any], static: bool = False, **spec: Any
    ) -> Pod:
        """Give kubelet a pod; its containers are from `container`."""
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "default",
            },
            "spec": {
                "nodeName": "node",
                "hostNetwork": True,
                "terminationGracePeriodSeconds": 1,
                "containers": list(containers),
            }
            | spec,
        }
        return Pod(self, manifest, static=static)

    def regions(self) -> dict[str, dict[str, Any]]:
        """The simulated cards' regions as they are."""
        return json.loads((self.state / "simulated/state.json").read_text())["regions"]

    def afu(self, region: str) -> str:
        """What a region holds."""
        return str(self.regions()[region]["afu_id"])

    def reboot_cards(self, *order: str) -> None:
        """Let the simulated cards have seen a reboot.

        Where an order of cards is given they are found in this one, and numbered so.
        """
        cards = self.state / "simulated/cards"
        for card in order:
            (cards / card).unlink()
        (self.state / "simulated/boot_id").write_text(f"{uuid.uuid4()}\n")
        self._found_at_boot = order

    def _find_cards(self) -> None:
        if self._found_at_boot:
            self.plugin.until_logged("serving", cards=0)
        for card in self._found_at_boot:
            (self.state / "simulated/cards" / card).touch()
            self.plugin.until_logged("card found", card=card)
        self._found_at_boot = ()

    def prepared(self, region: str, since: int = 0) -> list[str]:
        """What this run of the plugin programmed for containers on a region: AFU ids."""
        return [
            line["afu_id"]
            for line in self.plugin.logged("region prepared", since, region=region)
            if line["error"] is None
        ]

    def checkpoint(self) -> list[dict[str, Any]]:
        """Entries of kubelet's checkpoint."""
        return json.loads(CHECKPOINT.read_text())["Data"]["PodDeviceEntries"] or []

    def freeze(self, pod: Pod, *, thaw: bool = False) -> None:
        """Stop a pod's processes so that not even SIGKILL ends them (the freezer of cgroup v1).

        The whole pod's: runc thaws a container that it kills.
        """
        (group,) = Path("/sys/fs/cgroup/freezer", CGROUP).glob(f"kubepods/*/pod{pod.uid}")
        wanted = "THAWED" if thaw else "FROZEN"
        self._frozen.discard(group) if thaw else self._frozen.add(group)
        (group / "freezer.state").write_text(wanted)
        until(lambda: (group / "freezer.state").read_text().strip() == wanted, wanted)

    def close(self) -> None:
        for group in self._frozen:  # of a test that failed: nothing else ends these
            (group / "freezer.state").write_text("THAWED")
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


def kep_container(command: str) -> dict[str, Any]:
    """The container of the KEP's pod, but for its image and command, and the huge pages.

    Those the node has not.
    """
    told = yaml.safe_load((ROOT / "deploy/examples/kep-pod.yaml").read_text())
    (only,) = told["spec"]["containers"]
    del only["resources"]["limits"]["hugepages-2Mi"]
    mine = {"image": IMAGE, "imagePullPolicy": "Never", "command": ["sh", "-c", command]}
    return dict(only) | mine


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
