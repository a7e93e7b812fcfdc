"""What a node's processes share: where things are, how one waits, and containerd."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
from images import write_image
from namespace import BUSYBOX, USUAL, release

T = TypeVar("T")

SCRATCH = Path(os.environ.get("FPGA_KUBELET_SCRATCH", "/nonexistent"))
CGROUP = os.environ.get("FPGA_KUBELET_CGROUP", "")
PROGRAMS = Path(os.environ.get("FPGA_KUBELET_BIN", "/nonexistent"))
CONTROL_PLANE = Path(os.environ.get("FPGA_KUBELET_CONTROL_PLANE", "/nonexistent"))
RELEASE = release(os.environ.get("FPGA_KUBELET_VERSION", USUAL))
"""Kubelet's version."""

PLUGIN_IN_A_POD = os.environ.get("FPGA_KUBELET_PLUGIN") == "pod"
"""Whether the plugin is the chart's pod and not a process: `make test-image`."""

KUBELET_DIR = Path("/var/lib/kubelet")
DEVICE_PLUGINS = KUBELET_DIR / "device-plugins"
CHECKPOINT = DEVICE_PLUGINS / "kubelet_internal_checkpoint"
PODRESOURCES = KUBELET_DIR / "pod-resources/kubelet.sock"
PODS_API = KUBELET_DIR / "pods-api/pods-api.sock"
REGISTRIES = SCRATCH / "certs.d"
"""A folder a registry, with its authority; none but those of tests."""
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


def _removed(channel: grpc.Channel, sandbox: str) -> bool:
    """Stop and remove a pod's sandbox; a containerd that was killed may take a moment to see it."""
    try:
        for method in ("StopPodSandbox", "RemovePodSandbox"):
            call = channel.unary_unary(f"/runtime.v1.RuntimeService/{method}")
            # Both requests: field 1, a text of less than 128 bytes.
            call(b"\n" + bytes([len(sandbox)]) + sandbox.encode(), timeout=LIMIT)
    except grpc.RpcError:
        return False
    return True


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
        self._configure()
        self.start()
        self.add_image(IMAGE)
        self.add_image(PAUSE, "sleep", "2147483")

    def _configure(self, *, own_devices: bool = False) -> None:
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
device_ownership_from_security_context = {str(own_devices).lower()}
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{REGISTRIES}"
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{SCRATCH}/cni"
bin_dir = "{SCRATCH}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
""")

    def add_image(self, name: str, *command: str) -> None:
        """Let the runtime have an image of busybox's by this name."""
        links = {f"bin/{tool}": "busybox" for tool in ("sh", "sleep", "test", "cat", "echo")}
        path = SCRATCH / "image.tar"
        write_image(path, name, {"bin/busybox": BUSYBOX}, links=links, command=command or ["sh"])
        self.ctr("images", "import", str(path))

    def start(self) -> None:
        self.process = Process("containerd", "containerd", "--config", self._config)
        until(self._serves, "containerd serves", limit=LIMIT)

    def _serves(self) -> bool:
        assert self.process.runs, self.process.tail()
        # Its CRI part is ready later than the rest.
        with grpc.insecure_channel(f"unix://{CONTAINERD}") as channel:
            try:
                channel.unary_unary("/runtime.v1.RuntimeService/Version")(b"", timeout=LIMIT)
            except grpc.RpcError:
                return False
        return True

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
                until(lambda sandbox=sandbox: _removed(channel, sandbox), f"{sandbox} is removed")

    def kill(self, container_id: str) -> None:
        """Kill a running container; the id as a pod's status has it."""
        self.ctr("tasks", "kill", "--signal", "KILL", container_id.removeprefix("containerd://"))

    def restart(self) -> None:
        self.process.end()
        self.start()

    @contextlib.contextmanager
    def own_devices(self) -> Iterator[None]:
        """Meanwhile containers' device nodes belong to their user, as docs/devices.md says."""
        self._configure(own_devices=True)
        self.restart()
        try:
            yield
        finally:
            self._configure()
            self.restart()
