"""Device numbers: by them a container's processes open its nodes, whatever their paths are.

The runtime makes a container's nodes from the numbers that the host's nodes have at its start, and
its cgroup allows these numbers. The kernel gives them out again: a module that is loaded again has
another major, and an IOMMU group gets the lowest free minor each time VFIO gets its first function
(drivers/fpga/dfl.c, dfl_chardev_init; drivers/vfio/group.c, vfio_create_group).
"""

import re
from collections.abc import Iterable, Mapping

from fpga_plugin.errors import HardwareError, quote
from fpga_plugin.hardware.dfl.handles import PortDevice, SlotDevice
from fpga_plugin.hardware.grant import DeviceNumber, Path
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.sysfs import optional
from fpga_plugin.hardware.vfio.function import CLASS

_NUMBER = re.compile(r"[0-9]{1,8}:[0-9]{1,8}", re.ASCII)


def granted(kernel: Kernel, port: PortDevice) -> Mapping[Path, DeviceNumber]:
    """The numbers of a region's nodes, without those of IOMMU groups that VFIO does not have.

    Raises:
        HardwareError: the kernel's value makes no sense.
        OSError: one cannot be read.
    """
    if isinstance(port, SlotDevice):
        directories = {one.node: f"{CLASS}/{one.group}" for one in port.functions}
    else:
        directories = {port.node: port.sysfs}
    read = {node: _read(kernel, directory) for node, directory in directories.items()}
    return {node: number for node, number in read.items() if number is not None}


def guarded(kernel: Kernel, fme: str, ports: Iterable[PortDevice]) -> frozenset[DeviceNumber]:
    """The numbers of a card's nodes that no container may have: its FME, and the port of a slot.

    Raises:
        HardwareError: the kernel's value makes no sense.
        OSError: one cannot be read.
    """
    directories = [fme, *(port.sysfs for port in ports if isinstance(port, SlotDevice))]
    read = (_read(kernel, directory) for directory in directories)
    return frozenset(number for number in read if number is not None)


def _read(kernel: Kernel, directory: str) -> DeviceNumber | None:
    text = optional(kernel, f"{directory}/dev")
    if text is not None and not _NUMBER.fullmatch(text):
        raise HardwareError(f"{directory}/dev says {quote(text)}, which is no device number")
    return text
