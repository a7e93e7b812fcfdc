"""A PCI function behind a slot, and what sysfs says of it: its driver and its IOMMU group.

Nothing here touches the hardware. The group is the unit that VFIO gives away: the holder of one
member's group excludes everybody from all of them, so a group with another device is no slot's.
"""

import errno
import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from fpga_plugin.errors import HardwareError, quote
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.sysfs import children, driver_of, optional
from fpga_plugin.hardware.vfio.defs import NO_IOMMU_GROUP
from fpga_plugin.ids import PciAddress

PCI = "/sys/bus/pci/devices"
GROUPS = "/sys/kernel/iommu_groups"
CLASS = "/sys/class/vfio"
"""Has each group that has a device node."""

_BRIDGE = "0x0604"
"""The class of PCI bridges: VFIO does not mind one in a group (pcieport's driver_managed_dma)."""

_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Function:
    """One function of a slot.

    Attributes:
        address: its PCI address.
        group: N of its IOMMU group.
        instance: distinguishes it from a later one of the same address: a virtual function that was
            removed and made again, or a card that went and came back.
    """

    address: PciAddress
    group: int
    instance: int

    @property
    def node(self) -> str:
        """The group's device node, which is there while vfio-pci has a member of the group."""
        return f"/dev/vfio/{self.group}"

    @property
    def sysfs(self) -> str:
        """Its directory."""
        return f"{PCI}/{self.address}"


def read_function(kernel: Kernel, address: PciAddress) -> Function:
    """A function as it is now.

    Raises:
        HardwareError: it is not there, or behind no IOMMU.
        OSError: sysfs cannot be read.
    """
    directory = f"{PCI}/{address}"
    try:
        instance = kernel.instance(kernel.realpath(directory))
    except FileNotFoundError as error:
        raise HardwareError(
            f"function {address} of the slot is not there",
            hint="make the card's virtual functions, or mend FPGA_PLUGIN_SLOT_FUNCTIONS",
        ) from error
    try:
        group = os.path.basename(kernel.realpath(f"{directory}/iommu_group"))
    except FileNotFoundError as error:
        raise _no_iommu(address) from error
    if not _NUMBER.fullmatch(group):
        raise HardwareError(f"function {address} is in IOMMU group {quote(group)}")
    if optional(kernel, f"{GROUPS}/{group}/name") == NO_IOMMU_GROUP:
        raise _no_iommu(address)
    return Function(address, int(group), instance)


def _no_iommu(address: PciAddress) -> HardwareError:
    return HardwareError(
        f"function {address} of the slot is behind no IOMMU: it could read all of the node's"
        " memory",
        hint="switch the IOMMU on, in the firmware (VT-d, AMD-Vi) and on the kernel's command"
        " line (intel_iommu=on)",
    )


def group_type(kernel: Kernel, function: Function) -> str:
    """`DMA`, `DMA-FQ` or `identity`: how the group's default domain translates.

    Raises:
        OSError: it cannot be read.
    """
    return optional(kernel, f"{GROUPS}/{function.group}/type") or ""


def strangers(
    kernel: Kernel, function: Function, slot: frozenset[PciAddress]
) -> tuple[PciAddress, ...]:
    """Members of a function's group that are neither the slot's nor bridges.

    Raises:
        HardwareError: a member has no PCI address.
        OSError: the group cannot be listed.
    """
    return members(kernel, f"{GROUPS}/{function.group}", but=slot)


def members(
    kernel: Kernel, group: str, *, but: Collection[PciAddress] = ()
) -> tuple[PciAddress, ...]:
    """The members of an IOMMU group, by its directory, without bridges and `but` some.

    Raises:
        HardwareError: a member has no PCI address.
        OSError: the group cannot be listed.
    """
    found = []
    for path in children(kernel, f"{group}/devices", r".+"):
        name = os.path.basename(path)
        try:
            member = PciAddress.parse(name)
        except ValueError:
            raise HardwareError(
                f"IOMMU group {os.path.basename(group)} has a member {quote(name)}, no PCI function"
            ) from None
        if member in but:
            continue
        if not (optional(kernel, f"{PCI}/{name}/class") or "").startswith(_BRIDGE):
            found.append(member)
    return tuple(found)


def driver(kernel: Kernel, address: PciAddress) -> str | None:
    """The name of a function's driver; None: it has none.

    Raises:
        OSError: it cannot be read.
    """
    return driver_of(kernel, f"{PCI}/{address}")


def is_there(kernel: Kernel, function: Function) -> bool:
    """Whether the function that was scanned is still the one of its address, in the same group."""
    try:
        directory = kernel.realpath(function.sysfs)
        group = os.path.basename(kernel.realpath(f"{directory}/iommu_group"))
        return kernel.instance(directory) == function.instance and group == str(function.group)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ENODEV}:
            return False
        raise
