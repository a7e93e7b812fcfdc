"""Runs a command where a kubelet may do as it likes: `namespace.py 1.36 command ...`.

Kubelet and containerd write to fixed places (/var/lib/kubelet, /run/containerd, /var/log, /dev). So
the command gets namespaces of its own (mounts, processes, network, host name) and a cgroup below
which kubelet keeps its pods. Being the only way out for its processes, the process namespace is
also the clean-up: when its first process ends, or is killed, everything in it is gone, and its
mounts with it. What is left then, cgroups and one folder, is removed here, or by the next run.

It refuses to start where a kubelet is running: one node is one kubelet's.
"""

import ctypes
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
USUAL = "1.36"
"""The Kubernetes version that the tests run with unless they are told another (K8S=1.37)."""

BUILT = ROOT / ".cache/kubelet"

PARTS = ("pods-api", "api-server")
"""Of the tests: they run side by side, each on a node of its own (conftest.py)."""

REMOVE_SECONDS = 10.0

NO_TESTS = 5
"""pytest's exit code where nothing was selected."""

CGROUPS = Path("/sys/fs/cgroup")
PREFIX = "fpga-kubelet-"

NEEDED = {
    "containerd": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "openssl": "openssl",
}
"""Programs, and the Debian package of each."""

BUSYBOX = Path("/bin/busybox")

PORTS = 16
"""Device nodes /dev/dfl-port.N for simulated cards."""

GROUPS = ("256", "257")
"""IOMMU groups of a simulated OFS card's functions, in /dev/vfio."""

PORT_DEVICE = os.makedev(10, 237)
"""Any character device that a container may not open unless it was given to it (loop-control)."""

ADDRESS = "10.99.0.1"
"""The node's address."""

_SIOCSIFFLAGS, _SIOCSIFADDR, _IFF_UP = 0x8914, 0x8916, 1
_PR_SET_PDEATHSIG = 1


def release(version: str) -> tuple[int, ...]:
    """A Kubernetes version, to be compared."""
    return tuple(map(int, version.split(".")))


def control_plane(kubelet: str) -> str:
    """Of which version a kubelet's API server is.

    No kubelet is newer than its API server; those of older kubelets are not worth their builds.
    """
    return max(USUAL, kubelet, key=release)


def missing() -> str:
    """Why the tests cannot run on this machine; empty if they can."""
    if os.geteuid() != 0:
        return "mounts and cgroups take root"
    absent = {package for program, package in NEEDED.items() if shutil.which(program) is None}
    if not _is_static(BUSYBOX):
        absent.add("busybox-static")
    if absent:
        return f"not installed: {', '.join(sorted(absent))} (make deps DEPS=kubelet)"
    if subprocess.run(["unshare", "-mpnf", "true"], check=False, capture_output=True).returncode:
        return "namespaces of its own are refused"
    return ""


def _is_static(program: Path) -> bool:
    """Whether an ELF program names no interpreter."""
    return program.is_file() and b"/lib64/ld-linux" not in program.read_bytes()[:4096]


def kubelets() -> list[int]:
    """Processes that call themselves kubelet."""
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/comm")
        if _text(path).strip() == "kubelet"
    ]


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _hierarchies() -> Iterator[Path]:
    """The top of each cgroup hierarchy: v2's one, or v1's many (with v2's among them or not)."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith(("cgroup ", "cgroup2 ")):
            yield Path(before.split()[4])


def _make_cgroup(name: str) -> None:
    for top in _hierarchies():
        (top / name).mkdir()
        if top == CGROUPS:
            controllers = " ".join(f"+{c}" for c in _text(top / "cgroup.controllers").split())
            for group in (top, top / name):
                (group / "cgroup.subtree_control").write_text(controllers)


def _remove_cgroup(name: str) -> None:
    """Remove it with all below; its killed processes take a moment to go."""
    deadline = time.monotonic() + REMOVE_SECONDS
    groups = [top / name for top in _hierarchies()]
    while any(group.exists() for group in groups) and time.monotonic() < deadline:
        for group in groups:
            for directory, _, _ in os.walk(group, topdown=False):
                with suppress(OSError):
                    os.rmdir(directory)
        time.sleep(0.02)


def sweep() -> None:
    """Remove what a run that was killed left behind: its name holds the process that made it."""
    left = {path.name for top in _hierarchies() for path in top.glob(f"{PREFIX}*")}
    left |= {path.name for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")}
    for name in left:
        if (found := re.fullmatch(rf"{PREFIX}(\d+)-[a-z-]+", name)) and not Path(
            "/proc", found.group(1)
        ).exists():
            _remove_cgroup(name)
            shutil.rmtree(Path(tempfile.gettempdir(), name), ignore_errors=True)


def _end_with_parent() -> None:
    """The child is killed when we are, whatever kills us."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Node:
    """The namespaces, cgroup and folder of one run of the command; `close` removes them all.

    Args:
        name: of cgroup and folder.
        version: of Kubernetes.
        part: of the tests, those that this node runs; empty: all.
        command: what runs in it.
        output: where its output goes; None: to ours.
    """

    def __init__(
        self, name: str, version: str, part: str, command: list[str], output: Path | None
    ) -> None:
        self._name = name
        # Not pytest's folder: the path of a socket has at most 107 characters.
        self._scratch = Path(tempfile.gettempdir(), name)
        self._scratch.mkdir(mode=0o700)
        _make_cgroup(name)
        environment = {
            "FPGA_KUBELET_SCRATCH": str(self._scratch),
            "FPGA_KUBELET_CGROUP": name,
            "FPGA_KUBELET_BIN": str(BUILT / version),
            "FPGA_KUBELET_CONTROL_PLANE": str(BUILT / control_plane(version)),
            "FPGA_KUBELET_VERSION": version,
            "FPGA_KUBELET_PART": part,
        }
        # The shell is there to be the first process: it reaps those whose parents have ended.
        self._process = subprocess.Popen(
            [
                *("unshare", "--mount", "--propagation", "private", "--pid", "--mount-proc"),
                *("--net", "--uts", "--ipc", "--fork", "--kill-child"),
                *("bash", "-c", '"$@"; exit $?', "bash"),
                *(sys.executable, __file__, "--inside", *command),
            ],
            env=os.environ | environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=None if output is None else output.open("w"),
            stderr=None if output is None else subprocess.STDOUT,
            preexec_fn=_end_with_parent,  # noqa: PLW1509  # no threads here
        )

    def wait(self) -> int:
        return self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        _remove_cgroup(self._name)
        shutil.rmtree(self._scratch)


def outside(version: str, command: list[str]) -> int:
    """Build, run the command in nodes side by side, one for each part, and remove everything."""
    if why := missing():
        sys.exit(f"test-kubelet: {why}")
    if running := kubelets():
        sys.exit(f"test-kubelet: a kubelet is running here (pid {running[0]}), and stays alone")
    for programs in ((version, "kubelet"), (control_plane(version), "etcd", "kube-apiserver")):
        if subprocess.run([HERE / "build", *programs], check=False).returncode != 0:
            sys.exit(f"test-kubelet: {' and '.join(programs[1:])} cannot be built")
    sweep()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, interrupted)
    outputs = [BUILT / f"{part}.log" for part in PARTS]
    began: dict[str, Path | None] = {}
    with ExitStack() as nodes:
        try:
            runs = []
            for part, output in zip(PARTS, outputs, strict=True):
                node = Node(f"{PREFIX}{os.getpid()}-{part}", version, part, command, output)
                nodes.callback(node.close)
                runs.append(node)
                began[part] = output
            codes = [node.wait() for node in runs]
        finally:
            show(began)
    # One part may have none of the tests that were asked for.
    return max((code for code in codes if code != NO_TESTS), default=NO_TESTS)


def show(outputs: Mapping[str, Path | None]) -> None:
    """What each part said: also where a signal ends us, and before the nodes are closed."""
    for part, output in outputs.items():
        if output is not None:
            print(f"--- {part} ---", output.read_text(errors="replace"), sep="\n", flush=True)  # noqa: T201  # pytest's


def interrupted(number: int, _: object) -> None:
    sys.exit(128 + number)


def inside(command: list[str]) -> None:
    """In the namespaces: make their mounts, then become the command."""
    scratch = Path(os.environ["FPGA_KUBELET_SCRATCH"])
    lib, dev = scratch / "var-lib", scratch / "dev"
    for directory in (lib / "kubelet", dev):
        directory.mkdir(parents=True)
    _mount("--bind", lib, "/var/lib")
    _mount("-t", "tmpfs", "-o", "mode=755", "run", "/run")
    _mount("-t", "tmpfs", "-o", "mode=755", "log", "/var/log")
    _make_dev(dev)
    _mount("--rbind", dev, "/dev")
    socket.sethostname("node")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
        # An address that is no loopback address: kubelet takes no other for its node's.
        address = struct.pack("16sHxx4s8x", b"lo:1", socket.AF_INET, socket.inet_aton(ADDRESS))
        fcntl.ioctl(sock, _SIOCSIFADDR, address)
    os.execvp(command[0], command)


def _make_dev(dev: Path) -> None:
    """/dev as it is, without disks and terminals, and with the nodes of the simulated cards."""
    _mount("-t", "tmpfs", "-o", "mode=755", "dev", dev)
    for path in Path("/dev").iterdir():
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            (dev / path.name).symlink_to(path.readlink())
        elif stat.S_ISCHR(status.st_mode) and not path.name.startswith(("tty", "vcs")):
            os.mknod(dev / path.name, status.st_mode, status.st_rdev)
            (dev / path.name).chmod(status.st_mode)
    for name in ("pts", "shm", "mqueue"):
        if Path("/dev", name).is_dir():
            (dev / name).mkdir()
            _mount("--rbind", Path("/dev", name), dev / name)
    for port in range(PORTS):
        os.mknod(dev / f"dfl-port.{port}", stat.S_IFCHR | 0o600, PORT_DEVICE)
    (dev / "vfio").mkdir(exist_ok=True)
    for name in ("vfio", *GROUPS):
        if not (dev / "vfio" / name).exists():
            os.mknod(dev / "vfio" / name, stat.S_IFCHR | 0o600, PORT_DEVICE)


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        inside(sys.argv[2:])
    sys.exit(outside(sys.argv[1], sys.argv[2:]))
