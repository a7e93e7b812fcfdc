"""The Go peer: Intel's FPGA plugin, built from its module and measured beside the bare stack.

It knows fixed paths, so it runs in a mount namespace of its own, as root, with a made-up `/sys`,
`/dev` and kubelet directory: four cards of one region, as the least that shows it at work. Where
it cannot be built or run, a row says why in place of figures.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from figures import Figure, Goal, percentile
from kubelet import Kubelet
from measure import BARE_STACK, BLOCK, Effort
from plugin import Plugin
from reference import Echo
from runtime import ROOT

from fpga_plugin.kubernetes.messages import v1beta1

MODULE = "github.com/intel/intel-device-plugins-for-kubernetes"
VERSION = "v0.26.0"
"""Of those that were asked for (v0.26.0, v0.28.0, v0.30.0, v0.32.0, v0.34.1), the module proxy has
this one alone; what the FPGA plugin does is the same in all of them."""

CARDS = 4
_NAME = "Go peer"
_INTERFACE = "ce48969398f05f33946d560708be108a"
_RESOURCE = f"fpga.intel.com/region-{_INTERFACE}"
_MAJOR, _FMES = 240, 100
"""Device numbers of local use (Documentation/admin-guide/devices.txt); FMEs' minors begin there."""

_RUN = """set -e
mount --bind "$1/dev" /dev
mount --bind "$1/sys" /sys
mount -t tmpfs none /var/lib
mkdir -p /var/lib/kubelet/device-plugins
mount --bind "$2" /var/lib/kubelet/device-plugins
exec "$3" -mode region
"""


class GoPeerError(Exception):
    """It cannot be built or run; says why."""


def build() -> Path:
    """The peer's program, built on the first use.

    Raises:
        GoPeerError: there is no Go, no module, or it does not compile.
    """
    folder = ROOT / ".cache" / "go-peer"
    program = folder / f"fpga_plugin-{VERSION}"
    if program.exists():
        return program
    if (go := shutil.which("go")) is None:
        msg = "no `go` on the PATH"
        raise GoPeerError(msg)
    answer = subprocess.run(
        [go, "mod", "download", "-json", f"{MODULE}@{VERSION}"],
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        told = json.loads(answer.stdout)
    except ValueError:
        told = {"Error": answer.stderr}
    if "Dir" not in told:
        reason = str(told.get("Error", "no answer")).splitlines()[-1].strip()
        msg = f"the module {VERSION} was not had: {reason[:120]}"
        raise GoPeerError(msg)
    # What a module replaces counts only where it is the main one: so a copy is built, in place.
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(told["Dir"], source)
    made = subprocess.run(
        [go, "build", "-trimpath", "-buildvcs=false", "-o", program, "./cmd/fpga_plugin"],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        msg = f"{VERSION} does not compile: {made.stderr.strip().splitlines()[-1][:120]}"
        raise GoPeerError(msg)
    return program


class Peer(Plugin):
    """The peer's process, watched as the plugin's is."""

    def __init__(self, program: Path, tree: Path, directory: Path, log: Path) -> None:
        self._log = log
        with log.open("ab") as stream:
            self.began = time.monotonic()
            # Each of them becomes the next: unshare the shell, the shell the program.
            self._process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", _RUN, "sh", tree, directory, program],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )

    def stop(self) -> float:
        """SIGTERM, at which it dies; returns the seconds until it has."""
        began = time.monotonic()
        self._process.terminate()
        self._process.wait(10)
        return time.monotonic() - began


def measure(python: Path, effort: Effort) -> list[Figure]:
    """Start, end, memory, wake-ups and Allocate of the peer."""
    try:
        return _measured(build(), python, effort)
    except (GoPeerError, OSError, TimeoutError) as error:
        return [Figure(_NAME, "not measured", 0, "", note=str(error).replace("\n", " "))]


def _measured(program: Path, python: Path, effort: Effort) -> list[Figure]:
    if os.geteuid() != 0:
        msg = "it has fixed paths, and only root can give it others"
        raise GoPeerError(msg)
    # A short path: a socket's may have 107 bytes, and the peer names its own by the resource.
    with tempfile.TemporaryDirectory() as name, Echo(python, Path(name) / "echo.sock") as echo:
        folder = Path(name)
        make_tree(folder / "tree")
        kubelet = Kubelet(folder)
        registered: list[float] = []
        cpu: list[float] = []
        ends: list[float] = []
        for _ in range(effort.starts):
            kubelet.forget()
            with Peer(program, folder / "tree", kubelet.directory, folder / "log") as peer:
                registered.append(kubelet.wait_registered(1)[0] - peer.began)
                cpu.append(peer.cpu())
                ends.append(peer.stop())
        kubelet.forget()
        with Peer(program, folder / "tree", kubelet.directory, folder / "log") as peer:
            kubelet.wait_registered(1)
            kubelet.wait_list(_RESOURCE, lambda data: data.count(b"\x12\x07Healthy") == CARDS)
            took, bare = _calls(kubelet, echo, effort)
            begun = peer.memory()[0]
            wakeups = peer.wakeups(effort.idle)
            rss, pss = peer.memory()
        kubelet.close()
    p50, bare50 = (percentile(seconds, 50) * 1000 for seconds in (took, bare))
    count = effort.starts
    note = f"{VERSION}, {CARDS} cards of one region, mode region"

    def milliseconds(name: str, values: list[float]) -> Figure:
        return Figure(_NAME, name, percentile(values, 50) * 1000, "ms", samples=count)

    return [
        Figure(
            _NAME,
            "start to registered",
            percentile(registered, 50) * 1000,
            "ms",
            samples=count,
            note=note,
        ),
        milliseconds("CPU until then", cpu),
        milliseconds("end (SIGTERM)", ends),
        Figure(_NAME, "Allocate, p50, 1 client", p50, "ms", Goal(), bare50, len(took), BARE_STACK),
        Figure(_NAME, "RSS at once", begun, "MiB", note="after these calls"),
        Figure(_NAME, f"RSS after {effort.idle:g} s", rss, "MiB"),
        Figure(_NAME, "PSS then", pss, "MiB"),
        Figure(_NAME, "idle wake-ups", wakeups, "/min"),
    ]


def _calls(kubelet: Kubelet, echo: Echo, effort: Effort) -> tuple[list[float], list[float]]:
    request = bytes(
        v1beta1.AllocateRequest(
            container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=["dfl-fme.0"])]
        )
    )
    call = kubelet.call(_RESOURCE, "Allocate")
    took: list[float] = []
    bare: list[float] = []
    for round_ in range(effort.calls // BLOCK + 1):
        for _ in range(BLOCK):
            began = time.perf_counter()
            call(request)
            if round_:  # the first one finds nothing warm
                took.append(time.perf_counter() - began)
        block = [echo.allocate() for _ in range(BLOCK)]
        bare += block if round_ else []
    return took, bare


def make_tree(tree: Path) -> None:
    """`sys` and `dev` as the DFL drivers show them, as far as the peer looks."""
    (tree / "dev" / "char").mkdir(parents=True)
    (tree / "dev" / "null").touch()
    classes = tree / "sys" / "class" / "fpga_region"
    numbers = tree / "sys" / "dev" / "char"
    for directory in (classes, numbers):
        directory.mkdir(parents=True)
    for card in range(CARDS):
        pci = tree / "sys" / "devices" / "pci0000:00" / f"0000:{0x3B + card:02x}:00.0"
        region = pci / "fpga_region" / f"region{2 * card}"
        fme, port = region / f"dfl-fme.{card}", region / f"dfl-port.{card}"
        reconfigured = fme / f"dfl-fme-region.{card}" / "fpga_region" / f"region{2 * card + 1}"
        _write(pci, vendor="0x8086", device="0x09c4", **{"class": "0x120000"})
        _write(pci, numa_node="0", local_cpulist="0-1")
        _write(fme, dev=f"{_MAJOR}:{_FMES + card}", ports_num="1", socket_id="0")
        _write(fme, bitstream_id="0x1", bitstream_metadata="0x1")
        _write(reconfigured, compat_id=_INTERFACE)
        _write(port, dev=f"{_MAJOR}:{card}", id="0", afu_id=f"{card + 1:032x}")
        (classes / region.name).symlink_to(os.path.relpath(region, classes))
        for node, minor in ((fme, _FMES + card), (port, card)):
            number = f"{_MAJOR}:{minor}"
            (numbers / number).symlink_to(os.path.relpath(node, numbers))
            os.mknod(tree / "dev" / node.name, 0o20600, os.makedev(_MAJOR, minor))
            (tree / "dev" / "char" / number).symlink_to(f"../{node.name}")


def _write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(f"{text}\n")
