"""Files of the kernel tier's Alveo cards: the shell's `partition.xsabin`, and images for it.

As `xclbins`, and with what AMD's drivers and fakealveo.c need besides: the shell's device tree says
where the card's registers are, and an image is the sync word, its own uuid, and a filling.
"""

import hashlib
import struct
from uuid import UUID

from doubles import xclbins
from fpga_plugin.ids import AfuId, InterfaceId

LOGIC = "8d2c3b0a1f4e4d5c9b8a7f6e5d4c3b2a"
"""The shell's id, which is in the card's ROM and names its folder of firmware."""

SHELL = "xilinx_u55c_gen3x16_xdma_base_3"
"""Its name, as the drivers and AMD's plugin read it."""

INTERFACE = xclbins.ALVEO
OTHER_INTERFACE = InterfaceId("0" * 31 + "1")

CARD_MEMORY = 32 << 20
"""Bytes that the fake card has, from address 0 on."""

FLAT, PARTIAL = 0, 1
"""What an image's mode may be (enum XCLBIN_MODE): of a flat one the driver programs nothing."""

UNUSED, USED = 0, 1
SYNC = b"\xaa\x99\x55\x66"


def _endpoint(name: str, function: int, offset: int, *compatible: str) -> xclbins.Tree:
    properties = {
        "compatible": b"".join(text.encode() + b"\0" for text in compatible),
        "pcie_physical_function": struct.pack(">I", function),
        "pcie_bar_mapping": struct.pack(">I", 0),
        "reg": struct.pack(">QQ", offset, 0x1000),
    }
    return name, properties, ()


def partition() -> bytes:
    """A shell's `partition.xsabin`, which xclmgmt asks for when it finds the card."""
    prefix = "xilinx.com,reg_abs-"
    mailbox = (f"{prefix}axi_mailbox-1.0", "axi_mailbox")
    endpoints = (
        _endpoint("ep_mailbox_mgmt_00", 0, 0x4000, *mailbox),
        _endpoint("ep_mailbox_user_00", 1, 0x4000, *mailbox),
        _endpoint("ep_fpga_configuration_00", 0, 0x5000, f"{prefix}axi_hwicap-1.0", "axi_hwicap"),
        _endpoint("ep_pr_isolate_ulp_00", 0, 0x6000, f"{prefix}axi_gpio-1.0", "axi_gpio"),
        _endpoint("ep_ddr_mem_calib_00", 0, 0x7000, f"{prefix}ddr4_mem_calib-1.0"),
        _endpoint("ep_xdma_00", 1, 0x8000, f"{prefix}xdma-1.0"),
    )
    parts = (xclbins.interfaces(INTERFACE), ("addressable_endpoints", {}, endpoints))
    named = {"logic_uuid": LOGIC.encode() + b"\0", "vbnv": SHELL.encode() + b"\0"}
    tree = xclbins.device_tree(("", named, parts))
    section = (xclbins.PARTITION, "PARTITION_METADATA", tree)
    return xclbins.axlf([section], UUID(int=1).hex, mode=FLAT)


def xclbin(
    uuid: UUID,
    interface: str = INTERFACE,
    *,
    size: int = 256 * 1024,
    mode: int = PARTIAL,
    kernels: bool = True,
    used: int = UNUSED,
    bank: int = 16 << 20,
) -> bytes:
    """An image.

    Args:
        uuid: what reads back.
        interface: of the shell that it is for.
        size: of the bitstream, in bytes.
        mode: PARTIAL, unless the driver is to program nothing.
        kernels: whether there is a compute unit; a blank has none.
        used: whether it reaches its bank: the driver waits for the calibration of one that it does.
        bank: bytes of that, from address 0 on.
    """
    words = SYNC + uuid.bytes + hashlib.sha256(uuid.bytes).digest() * (size // 32)
    found = xclbins.parts(
        image=words[:size],
        interface=xclbins.partition(interface),
        banks=xclbins.memory((xclbins.HBM, used, bank >> 10, 0, "HBM[0]")),
        xml=None if kernels else xclbins.metadata(),
        layout=None if kernels else xclbins.units(),
    )
    return xclbins.axlf(found.values(), AfuId(uuid.hex), mode=mode)
