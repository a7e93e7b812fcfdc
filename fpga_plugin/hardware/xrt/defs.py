"""Numbers and names of XRT's drivers, each with the source that defines it.

Read in XRT at 963c58ee, below src/runtime_src/core/pcie/driver/linux: `include/xocl_ioctl.h` (the
ioctls and their structures), `include/mailbox_proto.h` (requests from PF1 to PF0), `xocl/devices.h`
(PCI ids).
"""

import struct
from typing import Final

from fpga_plugin.ids import AfuId, PciAddress

VENDOR: Final = "10ee"
"""Xilinx, Inc. (devices.h)."""

MANAGEMENT_DRIVER: Final = "xclmgmt"
"""Of PF0, the management function (xocl_drv.h, XCLMGMT_MODULE_NAME)."""

USER_DRIVER: Final = "xocl"
"""Of PF1, the user function, and of its DRM node (xocl_drv.h, XOCL_MODULE_NAME)."""

PRODUCTS: Final = {
    "5000": "AMD Alveo U200",
    "5004": "AMD Alveo U250",
    "500c": "AMD Alveo U280",
    "5020": "AMD Alveo U50",
    "505c": "AMD Alveo U55C",
}
"""PCI device ids of PF0 (devices.h, XOCL_MGMT_PCI_IDS; U50's is in AMD's documents too).

One of these is a card even while it has no driver, so that the plugin can say what is missing.
"""

ON_BOARD_MEMORY: Final = {
    "5000": 64 << 30,
    "5004": 64 << 30,
    "500c": 40 << 30,
    "5020": 8 << 30,
    "505c": 16 << 30,
}
"""Bytes of DDR and HBM that a card has (AMD's data sheets DS962, DS963, DS965 and DS978)."""

UNTESTED: Final = "memory clear untested on hardware"
"""What `status` says of each card until an owner of one has tried it (docs/alveo.md)."""

OLDEST_DRIVERS: Final = (2, 15)
"""XRT 2023.1. In 2.14 and before the number of READ_AXLF is that of PWRITE_UNMGD today."""

# ---------------------------------------------------------------- ioctls of PF1's render node

DRM_VERSION: Final = 0xC0406400
"""DRM_IOCTL_VERSION (include/uapi/drm/drm.h); takes `VERSION_OF` and fills `VERSION`."""

VERSION_OF: Final = struct.Struct("<16xQQ32x")
"""struct drm_version as it is asked: room for the name, and its address."""

VERSION: Final = struct.Struct("<ii8xQ40x")
"""struct drm_version as it is answered: major, minor; the name's length."""

READ_AXLF: Final = 0xC0286454
"""DRM_IOCTL_XOCL_READ_AXLF: loads an xclbin; takes `AXLF`."""

AXLF: Final = struct.Struct("<Qi4xQIII4x")
"""struct drm_xocl_axlf: xclbin, ksize, kernels, kds_cfg (slot size, bits), flags."""

AXLF_FORCE: Final = 1
"""XOCL_AXLF_FORCE_PROGRAM: streams it even where PF1 believes that it has this uuid."""

KDS_ERT, KDS_CU_DMA, KDS_DATAFLOW = 1 << 0, 1 << 2, 1 << 5
"""struct drm_xocl_kds. XRT's library sets the first two by default (config_reader.h)."""

KERNEL_INFO: Final = struct.Struct("<64sIii")
"""struct kernel_info (include/xrt_drv.h, kernel_info): name, range, arguments, features."""

ARGUMENT_INFO: Final = struct.Struct("<64sIII")
"""struct argument_info: name, offset, size, direction."""

KERNEL_SOFTWARE_RESET: Final = 1
"""KRNL_SW_RESET."""

ARGUMENT_INPUT: Final = 1
"""What the library says of every argument (shim.cpp, xclPrepareAxlf)."""

PWRITE_UNMGD: Final = 0xC020644F
"""DRM_IOCTL_XOCL_PWRITE_UNMGD: writes on-card memory by its address; takes `UNMANAGED`."""

PREAD_UNMGD: Final = 0xC020644E
"""DRM_IOCTL_XOCL_PREAD_UNMGD: reads it."""

UNMANAGED: Final = struct.Struct("<8xQQQ")
"""struct drm_xocl_pwrite_unmgd: address space 0; address on the card, size, buffer."""

IOCTLS: Final = frozenset({DRM_VERSION, READ_AXLF, PWRITE_UNMGD, PREAD_UNMGD})
"""All that the plugin sends to a render node."""

# ---------------------------------------------------------------- the mask of mailbox requests

HOT_RESET: Final = 1 << 5
LOADS: Final = 1 << 7 | 1 << 8 | 1 << 17 | 1 << 18
"""LOAD_XCLBIN(_SLOT)_KADDR (7, 17) and LOAD(_SLOT)_XCLBIN (8, 18)."""
RECLOCK: Final = 1 << 9
PROGRAM_SHELL: Final = 1 << 14

MASK: Final = HOT_RESET | LOADS | RECLOCK | PROGRAM_SHELL
"""What nobody but the plugin may ask of a card: 0x643a0 (mailbox_proto.h, xcl_mailbox_request)."""

MASK_WHILE_LOADING: Final = MASK & ~LOADS
"""0x4220; also that of a tenant who may load his own."""

MASK_WHILE_RESETTING: Final = MASK & ~HOT_RESET

# ---------------------------------------------------------------- values

NO_IMAGE: Final = AfuId("0" * 32)
"""As which a region reads that nothing is loaded into (`xclbinuuid` empty, or zeros)."""


def reset_command(address: PciAddress) -> str:
    """What an operator types to reset a card that nobody uses."""
    return f"xrt-smi reset --force --device {str(address)[:-1]}1"
