"""What sysfs shows of a PCI function, whichever family of cards it belongs to."""

import os
import re
from collections.abc import Iterable

from fpga_plugin.errors import CardGoneError, HardwareError, quote
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Iommu, PciFunction
from fpga_plugin.hardware.sysfs import children, optional
from fpga_plugin.hardware.vfio.defs import NO_IOMMU_GROUP
from fpga_plugin.hardware.vfio.function import GROUPS, PCI, driver, members
from fpga_plugin.ids import CardId, PciAddress

_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_INTEGER = re.compile(r"-?[0-9]{1,4}", re.ASCII)
_ROOT_COMPLEX = re.compile(r"/sys/devices/(pci[0-9a-f]{4,}:[0-9a-f]{2})/", re.ASCII)

_TYPES = {
    "DMA": Iommu.TRANSLATE,
    "DMA-FQ": Iommu.TRANSLATE,
    "unmanaged": Iommu.TRANSLATE,
    "identity": Iommu.IDENTITY,
}
"""Of an IOMMU group's default domain (drivers/iommu/iommu.c, iommu_group_show_type)."""

_WEAKEST_FIRST = (Iommu.NONE, Iommu.IDENTITY, Iommu.UNKNOWN, Iommu.SHARED, Iommu.TRANSLATE)


def numa_node(kernel: Kernel, function: str) -> int | None:
    """The NUMA node of a function; None where the kernel does not know it.

    Raises:
        HardwareError: the kernel's value makes no sense.
        OSError: it cannot be read.
    """
    path = f"{function}/numa_node"
    text = optional(kernel, path)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text):
        raise HardwareError(f"{path} says {quote(text)} where a NUMA node belongs")
    return int(text) if int(text) >= 0 else None


def root_complex(path: str) -> str:
    """The root complex in a function's real path, as Kubernetes' helper for pcieRoot finds it."""
    root = _ROOT_COMPLEX.match(path)
    return "" if root is None else root[1]


def ids(kernel: Kernel, function: str) -> tuple[str, ...]:
    """Vendor and device of a function, and of its subsystem.

    Raises:
        OSError: one cannot be read.
    """
    names = ("vendor", "device", "subsystem_vendor", "subsystem_device")
    return tuple(
        (optional(kernel, f"{function}/{name}") or "").removeprefix("0x") for name in names
    )


def iommu(kernel: Kernel, functions: Iterable[str]) -> Iommu:
    """What limits the DMA of a card whose PCI functions these are: the weakest of them counts."""
    return min((_of_function(kernel, each) for each in functions), key=_WEAKEST_FIRST.index)


def others(kernel: Kernel, function: str) -> tuple[PciAddress, ...]:
    """Who else is in a function's IOMMU group: neither a bridge nor of the same card.

    The kernel puts functions into one group that reach each other below the IOMMU, because no
    bridge between them has ACS (Linux, drivers/iommu/iommu.c, pci_device_group).

    Raises:
        HardwareError: a member is no PCI function.
        OSError: the group cannot be listed.
    """
    own = _physical(kernel, PciAddress.parse(os.path.basename(kernel.realpath(function))))
    return tuple(
        member
        for member in members(kernel, f"{function}/iommu_group")
        if not _same_device(_physical(kernel, member), own)
    )


def _physical(kernel: Kernel, function: PciAddress) -> PciAddress:
    """The physical function: the function itself, or the one that a virtual one belongs to."""
    try:
        physical = os.path.basename(kernel.realpath(f"{PCI}/{function}/physfn"))
    except FileNotFoundError:
        return function
    return _address(physical) or function


def _of_function(kernel: Kernel, function: str) -> Iommu:
    group = f"{function}/iommu_group"
    try:
        if not kernel.exists(group):
            return Iommu.NONE
        if optional(kernel, f"{group}/name") == NO_IOMMU_GROUP:
            return Iommu.NONE
        found = _TYPES.get(optional(kernel, f"{group}/type") or "", Iommu.UNKNOWN)
        if found is Iommu.TRANSLATE and others(kernel, function):
            return Iommu.SHARED
    except (OSError, HardwareError):
        return Iommu.UNKNOWN
    return found


def functions(kernel: Kernel, card: CardId) -> tuple[PciFunction, ...]:
    """The function that manages a card, its virtual ones, and the device's other physical ones.

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
