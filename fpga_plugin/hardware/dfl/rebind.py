"""Taking a card's PCI driver off and putting it on again: what un-poisons a port.

With any process holding a port of the card open or mapped, the kernel crashes when that port is
closed (Linux 6.1, afu_release after the port's removal; seen in a virtual machine). So every port
is opened exclusively first, and closed again, since our own descriptor would do the same harm.
"""

import errno
from collections.abc import Callable
from typing import Protocol

from fpga_plugin.errors import CardGoneError, HardwareError, RefusedError
from fpga_plugin.hardware.dfl import defs
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.hardware.sysfs import number, optional
from fpga_plugin.ids import PciAddress


class Held(Protocol):
    """A region that is held exclusively."""

    def close(self) -> None:
        """Let it go."""


def rebind(kernel: Kernel, card: Card, *, hold: Callable[[Card, Region], Held]) -> None:
    """Unbind and bind the card's PCI driver, if no virtual function and no open port forbids it.

    `hold` opens a region exclusively.

    Afterwards the card has to be scanned again: its nodes may have other numbers.

    Raises:
        RefusedError: it must not be done now; nothing was touched. `PortInUseError`: a port is
            open.
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
