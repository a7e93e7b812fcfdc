"""Daemons of the guest that die at a step on the real drivers that a test names while they run.

Like the simulated campaign's (`tests/campaign/points.py`): a daemon with DEATH in its environment
gets failure points below the code that drives the cards, before and after each call to the kernel,
and writes down what happens to the hardware, in the campaign's words. Nothing of it is in the
package. A test writes the name of a point into the file that DEATH names, such as `before pr`; or
`#n`, for the n-th point from then on.

As a program this file is what all daemons of the guest are forked from, as `nursery.py` elsewhere:
to import the plugin twice takes minutes where the processor is emulated.
"""

import ctypes
import functools
import os
import re
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

INTEGRATION = Path(__file__).resolve().parents[2] / "integration"
if str(INTEGRATION) not in sys.path:
    sys.path.append(str(INTEGRATION))

import nursery  # noqa: E402  # found by the line above

DEATH, LOG = "GUEST_KILL_AT", "GUEST_LOG"
PORT_PR = struct.Struct("<IIIIQ")
"""struct dfl_fpga_fme_port_pr (linux/fpga-dfl.h)."""

IOCTLS = {
    0xB640: "reset",  # DFL_FPGA_PORT_RESET
    0xB680: "pr",  # DFL_FPGA_FME_PORT_PR
    0x3B66: "domain",  # VFIO_SET_IOMMU
    0x3B6A: "read-back",  # VFIO_GROUP_GET_DEVICE_FD
    0xC0286454: "load",  # DRM_IOCTL_XOCL_READ_AXLF
    0xC020644F: "zero",  # DRM_IOCTL_XOCL_PWRITE_UNMGD
}
PR = 0xB680
PCI = Path("/sys/bus/pci/devices")


def _written(path: str, text: str) -> str:
    """What a write to sysfs does."""
    name = path.rpartition("/")[2]
    if name == "driver_override":
        return "override" if text.strip() else "no-override"
    if name == "config_mailbox_channel_disable":
        return "mask"
    if name == "shutdown":
        return "shutdown" if int(text) else "online"
    return {"errors": "errors"}.get(name, "clear" if name.endswith("_clear") else name)


def _opened(node: str) -> str:
    if node == "/dev/vfio/vfio":
        return "container"
    if node.startswith("/dev/dri/"):
        return "render-node"
    return "group" if node.startswith("/dev/vfio/") else re.sub(r"/dev/dfl-|\.\d+", "", node)


class Points:
    """The failure points of one daemon, and its log of the hardware."""

    def __init__(self, death: str, log: str) -> None:
        self._death = death
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._lock = threading.Lock()
        self._wish, self._seen = "", 0
        self._open: dict[int, str] = {}
        self._nodes: dict[int, str] = {}

    def note(self, *words: object) -> None:
        """One line, in one write."""
        line = " ".join(map(str, (f"{time.time() % 86400:.6f}", *words)))
        os.write(self._log, f"{line}\n".encode())

    def visit(self, name: str) -> None:
        """A failure point; does not return from the one that was asked for."""
        try:
            wish = Path(self._death).read_text()
        except FileNotFoundError:
            return
        with self._lock:
            self._seen = self._seen + 1 if wish == self._wish else 1
            self._wish = wish
            if wish not in {name, f"#{self._seen}"}:
                return
            self.note("KILL", "hardware", name.replace(" ", "-"))
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    def install(self) -> None:
        """Around the calls that change something, in this process."""
        from fpga_plugin.hardware.linux import LinuxKernel

        self._around(LinuxKernel, "write", _written)
        self._around(LinuxKernel, "open", lambda node, _flags: _opened(node))
        self._around(LinuxKernel, "ioctl", lambda _handle, request, _argument: IOCTLS.get(request))
        self._around(LinuxKernel, "close", lambda handle: f"close-{self._open.pop(handle, 'it')}")

    def _around(self, owner: Any, method: str, name: Callable[..., str | None]) -> None:
        called = getattr(owner, method)

        @functools.wraps(called)
        def wrapper(kernel: Any, *args: Any) -> Any:
            point = name(*args)
            if point is None:
                return called(kernel, *args)
            self.visit(f"before {point}")
            if method == "open":
                self._say_opened(*args)
            result = called(kernel, *args)
            if method == "open":
                self._open[result] = point
                self._nodes[result] = args[0]
            elif method == "ioctl":
                self._say_done(*args)
            elif point == "clear":
                self.note("CLEAR", _card(args[0]))
            self.visit(f"after {point}")
            return result

        setattr(owner, method, wrapper)

    def _say_opened(self, node: str, flags: int) -> None:
        """Also where it is refused: the attempt alone is what a tenant feels."""
        if flags & os.O_EXCL and "dfl-port" in node:
            self.note("OPEN", region(node))
        elif _opened(node) == "group":
            for found in slots(node):
                self.note("OPEN", found)

    def _say_done(self, handle: int, request: int, argument: Any) -> None:
        if IOCTLS.get(request) == "reset":
            self.note("RESET", region(self._nodes[handle]))
        elif request == PR:
            _, _, port, size, address = PORT_PR.unpack(argument)
            image = ctypes.string_at(address, min(size, 16)).ljust(16, b"\0")
            fme = self._nodes[handle].rpartition("/")[2]
            (found,) = PCI.glob(f"*/fpga_region/region*/{fme}")
            self.note("PR", f"{_card(str(found))}-p{port}", image.hex())


def _card(path: str) -> str:
    """The card's id that a path of sysfs leads through."""
    found = re.findall(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", os.path.realpath(path))
    return str(found[-1]).replace(":", "-")


def region(node: str) -> str:
    """The region of a port's node."""
    name = node.rpartition("/")[2]
    (found,) = PCI.glob(f"*/fpga_region/region*/{name}")
    return f"{_card(str(found))}-p{int((found / 'id').read_text(), 0)}"


def slots(node: str) -> list[str]:
    """The slot that has a function of this group; of one that is of no slot, none."""
    number = node.rpartition("/")[2]
    return [
        f"{_card(str(function / 'physfn'))}-p0"
        for function in Path("/sys/kernel/iommu_groups", number, "devices").iterdir()
        if (function / "physfn").exists()
    ]


def main(descriptor: int) -> None:
    """Fork daemons until the line ends."""
    become = nursery._become

    def become_one(stderr: int, env: Mapping[str, str], folder: str) -> None:
        become(stderr, env, folder)
        if DEATH in env:  # a command has none
            Points(env[DEATH], env[LOG]).install()

    nursery._become = become_one
    nursery._serve(descriptor)


if __name__ == "__main__":
    main(int(sys.argv[1]))
