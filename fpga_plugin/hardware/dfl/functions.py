"""The PCI functions of a card: what they are, and making and removing the virtual ones."""

import errno
import os
import re

from fpga_plugin.errors import CardGoneError, HardwareError, RefusedError
from fpga_plugin.hardware.dfl.kernel import Kernel
from fpga_plugin.hardware.dfl.sysfs import children, number, optional
from fpga_plugin.hardware.model import PciFunction
from fpga_plugin.hardware.vfio.function import GROUPS, PCI, driver
from fpga_plugin.ids import CardId, PciAddress

_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)


def functions(kernel: Kernel, card: CardId) -> tuple[PciFunction, ...]:
    """The function with the FME, its virtual ones, and the device's other physical ones.

    Raises:
        CardGoneError: there is no such card.
        HardwareError: they cannot be listed.
    """
    address = PciAddress.parse(card)
    roles: dict[PciAddress, str] = {address: "card"}
    try:
        if not kernel.exists(f"{PCI}/{address}"):
            raise CardGoneError(f"there is no card {card}", hint="is it in its slot?")
        for link in children(kernel, f"{PCI}/{address}", r"virtfn[0-9]{1,5}"):
            roles[PciAddress.parse(os.path.basename(kernel.realpath(link)))] = "virtual"
        for name in kernel.listdir(PCI):
            other = _address(name)
            if other is not None and _same_device(other, address):
                virtual = kernel.exists(f"{PCI}/{name}/physfn")
                roles.setdefault(other, "virtual" if virtual else "physical")
        return tuple(_read(kernel, one, role) for one, role in sorted(roles.items()))
    except (OSError, ValueError) as error:
        raise HardwareError(
            f"the functions of card {card} cannot be listed ({error})", hint="see the kernel's log"
        ) from error


def make_functions(kernel: Kernel, card: CardId, *, make: bool) -> None:
    """Make all virtual functions that the card can have, or remove those that it has.

    Raises:
        RefusedError: it can have none, or the driver refused.
    """
    directory = f"{PCI}/{PciAddress.parse(card)}"
    try:
        total = number(directory, optional(kernel, f"{directory}/sriov_totalvfs") or "0")
        if make and not total:
            raise RefusedError(
                f"card {card} can have no virtual functions",
                hint="its slot may be in another physical function: `fpga-plugin card functions`",
            )
        if total:
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


def _read(kernel: Kernel, address: PciAddress, role: str) -> PciFunction:
    group: int | None = None
    translation = ""
    if kernel.exists(f"{PCI}/{address}/iommu_group"):
        name = os.path.basename(kernel.realpath(f"{PCI}/{address}/iommu_group"))
        if _NUMBER.fullmatch(name):
            group = int(name)
            translation = optional(kernel, f"{GROUPS}/{group}/type") or ""
    return PciFunction(address, role, driver(kernel, address) or "", group, translation[:32])


def _address(name: str) -> PciAddress | None:
    try:
        return PciAddress.parse(name)
    except ValueError:
        return None


def _same_device(one: PciAddress, other: PciAddress) -> bool:
    return (one.domain, one.bus, one.device) == (other.domain, other.bus, other.device)
