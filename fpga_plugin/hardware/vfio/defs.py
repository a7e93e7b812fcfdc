"""Numbers of VFIO's user interface (include/uapi/linux/vfio.h) and of a DFL feature header."""

import struct

CONTAINER = "/dev/vfio/vfio"
"""Each open descriptor of this node is an IOMMU domain of its own; every group needs it."""

DRIVER = "vfio-pci"

NO_IOMMU_GROUP = "vfio-noiommu"
"""The name of a group that VFIO made up, where nothing translates (drivers/vfio/group.c)."""

GET_API_VERSION = 0x3B64
"""VFIO_GET_API_VERSION: 0."""

SET_IOMMU = 0x3B66
"""VFIO_SET_IOMMU: takes the type; EPERM where the IOMMU does not remap interrupts."""

TYPE1V2_IOMMU = 3

GROUP_GET_STATUS = 0x3B67
"""VFIO_GROUP_GET_STATUS: fills `GROUP_STATUS`."""

GROUP_STATUS = struct.Struct("<II")
"""struct vfio_group_status: argsz, flags."""

GROUP_VIABLE = 1
"""No member of the group has a driver of the host's."""

GROUP_SET_CONTAINER, GROUP_UNSET_CONTAINER = 0x3B68, 0x3B69

CONTAINER_FD = struct.Struct("<i")
"""What SET_CONTAINER takes."""

GROUP_GET_DEVICE_FD = 0x3B6A
"""VFIO_GROUP_GET_DEVICE_FD: takes the PCI address as text; returns a descriptor. The kernel resets
the function where it can, and once more when the descriptor is closed."""

DEVICE_GET_REGION_INFO = 0x3B6C
"""VFIO_DEVICE_GET_REGION_INFO: fills `REGION_INFO`."""

REGION_INFO = struct.Struct("<IIIIQQ")
"""struct vfio_region_info: argsz, flags, index, cap_offset, size, offset."""

REGION_READ, REGION_MMAP = 1, 4

BAR0 = 0

DFH_AFU = 1
"""Bits 63:60 of a device feature header: an AFU begins here (drivers/fpga/dfl.h, DFH_TYPE_AFU)."""

HEADER_WORDS = 3
"""DFH, and the lower and upper half of the AFU's GUID (opae_vfio.c, vfio_walk)."""

ALL_ONES = 2**64 - 1
"""What a function reads as that does not answer, or sleeps in D3."""
