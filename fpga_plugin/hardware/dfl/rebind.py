"""Taking a card's PCI driver off and putting it on again: what un-poisons a port.

With any process holding a port of the card open or mapped, the kernel crashes when that port is
closed (Linux 6.1, afu_release after the port's removal; seen in a virtual machine). The FME's
release uses memory that was freed where the card has interrupts (dfl-fme-main.c, fme_release). So
FME and ports are opened exclusively first, and closed again, since our own descriptors would do the
same harm.
"""

import errno
import os
from collections.abc import Callable
from typing import Protocol

from fpga_plugin.errors import CardGoneError, HardwareError, PortInUseError, RefusedError
from fpga_plugin.hardware.dfl import defs
from fpga_plugin.hardware.dfl.handles import fme_of
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.hardware.sysfs import number, optional
from fpga_plugin.ids import PciAddress


class HeldPort(Protocol):
    """A region that is held exclusively."""

    def close(self) -> None:
        """Let it go."""


def rebind(kernel: Kernel, card: Card, *, hold: Callable[[Card, Region], HeldPort]) -> None:
    """Unbind and bind the card's PCI driver, if no virtual function and no open port forbids it.

    `hold` opens a region exclusively.

    Afterwards the card has to be scanned again: its nodes may have other numbers.

    Raises:
        RefusedError: it must not be done now; nothing was touched. `PortInUseError`: a port or the
            FME is open.
        CardGoneError: the card has no driver, or a port is not there; nothing was touched.
        HardwareError: the driver is off, and could not be put on again; the message names the
            command.
    """
    device = f"/sys/bus/pci/devices/{card.address}"
    try:
        text = optional(kernel, f"{device}/sriov_numvfs")
        functions = 0 if text is None else number(f"{device}/sriov_numvfs", text)
    except (OSError, HardwareError) as error:
        raise RefusedError(
            f"card {card.id}: its virtual functions cannot be counted ({error})"
        ) from error
    if functions:
        raise RefusedError(
            f"card {card.id} has {functions} virtual functions: its driver is not rebound under"
            " them",
            hint=f"remove them (echo 0 > {device}/sriov_numvfs), then"
            f" `fpga-plugin card retry {card.id}`",
        )
    driver = _driver(kernel, card.address)
    _check_unused(kernel, card)
    for region in card.regions:
        hold(card, region).close()
    try:
        kernel.write(f"{driver}/unbind", str(card.address))
    except OSError as error:
        raise RefusedError(
            f"the driver of card {card.id} cannot be unbound ({error.strerror})",
            hint=_hint(error, card.address),
        ) from error
    bind(kernel, card.address, driver=driver)


def bind(kernel: Kernel, address: PciAddress, *, driver: str = defs.PCI_DRIVER) -> None:
    """Put the driver on a card that has none; one that has it already is left as it is.

    Raises:
        CardGoneError: there is no such card.
        HardwareError: it failed; the message names the command.
    """
    device = f"/sys/bus/pci/devices/{address}"
    try:
        if not kernel.exists(device):
            raise CardGoneError(f"card {address.card_id} is gone", hint="is it still in its slot?")
        if kernel.exists(f"{device}/driver"):
            return
        kernel.write(f"{driver}/bind", str(address))
    except OSError as error:
        raise HardwareError(
            f"card {address.card_id} has no driver now: it could not be bound again"
            f" ({error.strerror})",
            hint=_hint(error, address),
        ) from error


def _check_unused(kernel: Kernel, card: Card) -> None:
    """Refuse while the FME is open; waits for a PR that runs (dfl-fme-main.c, fme_open)."""
    node = fme_of(card).node
    try:
        kernel.close(kernel.open(node, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise PortInUseError(
                f"{node} (card {card.id}) is in use",
                hint="stop fpgad, fpgaconf and other tools that manage this card; `fuser -v"
                f" {node}` on the node names them",
            ) from error
        raise RefusedError(
            f"{node} (card {card.id}) cannot be opened ({error.strerror}), so nothing tells whether"
            " a process has it",
            hint="see the kernel's log",
        ) from error


def _driver(kernel: Kernel, address: PciAddress) -> str:
    try:
        return kernel.realpath(f"/sys/bus/pci/devices/{address}/driver")
    except OSError as error:
        raise CardGoneError(
            f"card {address.card_id} has no driver to rebind",
            hint=f"as root: echo {address} > {defs.PCI_DRIVER}/bind",
        ) from error


def _hint(error: OSError, address: PciAddress) -> str:
    if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
        return (
            "FPGA_PLUGIN_RECOVERY=rebind needs /sys/bus/pci/drivers writable; as root on the node:"
            f" {defs.rebind_command(address)}"
        )
    return f"see the kernel's log; as root on the node: {defs.rebind_command(address)}"
