"""Making and removing the virtual functions of a card."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from fpga_plugin.errors import (
    PortInUseError,
    RefusedError,
    quote,
)
from fpga_plugin.hardware.dfl import defs
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.sysfs import children, number, optional
from fpga_plugin.hardware.vfio import defs as vfio
from fpga_plugin.hardware.vfio.function import PCI, driver, read_function
from fpga_plugin.ids import CardId, PciAddress


def make_functions(kernel: Kernel, card: CardId, *, make: bool) -> None:
    """Make all virtual functions that the card can have, or remove those that it has.

    Raises:
        RefusedError: it can have none, the driver refused, or one may be in use.
            `PortInUseError`: one is open.
        HardwareError: one cannot be inspected.
    """
    directory = f"{PCI}/{PciAddress.parse(card)}"
    try:
        total = number(directory, optional(kernel, f"{directory}/sriov_totalvfs") or "0")
        if make and not total:
            raise RefusedError(
                f"card {card} can have no virtual functions",
                hint="its slot may be in another physical function: `fpga-plugin card show`",
            )
        if not make:
            _check_unused(kernel, directory)
        if total:
            with _unprobed(kernel, directory) if make else nullcontext():
                kernel.write(f"{directory}/sriov_numvfs", str(total if make else 0))
    except OSError as error:
        hint = "see the kernel's log"
        if error.errno == errno.EINVAL:
            hint = (
                "Linux' own dfl-pci makes none while the port has its driver; the vendor's driver"
                " (linux-dfl-backport) does"
            )
        what = "made" if make else "removed"
        raise RefusedError(
            f"the virtual functions of card {card} cannot be {what} ({error.strerror})", hint=hint
        ) from error


@contextmanager
def _unprobed(kernel: Kernel, directory: str) -> Iterator[None]:
    """Virtual functions of a slot that are made meanwhile get no driver.

    dfl-pci, which makes them, would take them, and a slot's are for vfio-pci. Other cards' virtual
    functions have a port, which needs dfl-pci. The switch belongs to the node's operator.

    Raises:
        OSError: the kernel refused the switch.
    """
    switch = f"{directory}/sriov_drivers_autoprobe"
    slot = any(not kernel.exists(f"{port}/afu_id") for port in _ports(kernel, directory))
    before = optional(kernel, switch) if slot else None
    if before is None or before == "0":
        yield
        return
    kernel.write(switch, "0")
    try:
        yield
    finally:
        kernel.write(switch, before)


def _check_unused(kernel: Kernel, directory: str) -> None:
    """Refuse to remove a virtual function that is open.

    With one of vfio-pci open the kernel waits for its user for ever; with a port open it crashes
    when that is closed.

    Raises:
        RefusedError: a driver of somebody else's has one. `PortInUseError`: one is open.
        OSError: that is unknown.
    """
    nodes: dict[str, PciAddress] = {}
    for link in children(kernel, directory, r"virtfn[0-9]{1,5}"):
        function = PciAddress.parse(os.path.basename(kernel.realpath(link)))
        match driver(kernel, function):
            case None:
                continue
            case vfio.DRIVER:
                nodes[read_function(kernel, function).node] = function
            case found if found == os.path.basename(defs.PCI_DRIVER):
                for port in _ports(kernel, f"{PCI}/{function}"):
                    nodes[f"/dev/{os.path.basename(port)}"] = function
            case found:
                raise RefusedError(
                    f"virtual function {function} has the driver {quote(found)}, so something else"
                    " uses it",
                    hint="if nothing does, as root on the node: "
                    f"echo {function} > /sys/bus/pci/drivers/{found}/unbind",
                )
    for node, function in nodes.items():
        try:
            kernel.close(kernel.open(node, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise PortInUseError(
                f"{node} (virtual function {function}) is in use",
                hint="a process still has it open, such as a virtual machine or a container that"
                f" has not ended; `fuser -v {node}` on the node names it",
            ) from error


def _ports(kernel: Kernel, function: str) -> list[str]:
    """Ports below a function's directory; one without a driver has neither node nor attributes."""
    return [
        port
        for base in children(kernel, f"{function}/fpga_region", r"region[0-9]{1,9}")
        for port in children(kernel, base, r"dfl-port\.[0-9]{1,9}")
        if kernel.exists(f"{port}/driver")
    ]
