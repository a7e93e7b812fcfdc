"""Files of Alveo cards, made by code: a shell's `partition.xsabin`, and xclbin images for it.

Nothing of AMD's is in them. They have what the drivers read (xclbin.h, xocl_fdt.c, icap.c of XRT
2.25): the header, a device tree that names the interfaces, an IP layout, a memory topology, the
kernels' description, and a bitstream whose first words after the sync word are the uuid.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

LOGIC = "8d2c3b0a1f4e4d5c9b8a7f6e5d4c3b2a"
"""The shell's id, which is in the card's ROM and names its folder of firmware."""

INTERFACE = "5b1a0d1e0c2f4a6e9d3b7c8f2e4a6b10"
OTHER_INTERFACE = "0" * 31 + "1"
VBNV = "xilinx_u55c_gen3x16_xdma_base_3"

BITSTREAM, METADATA, MEMORY, LAYOUT, PARTITION = 0, 2, 6, 8, 20
"""Kinds of sections (enum axlf_section_kind)."""

FLAT, PARTIAL = 0, 1
"""What an image's mode may be (enum XCLBIN_MODE): of a flat one the driver programs nothing."""

HBM, UNUSED, USED = 6, 0, 1
CARD_MEMORY = 32 << 20
"""Bytes that the fake card has, from address 0 on."""

SYNC = b"\xaa\x99\x55\x66"
HEADER = struct.Struct("<8si28s256xQQQQHBBHH16s64s16s16sI4x")
"""struct axlf up to its sections: magic, length of the signature, reserved (all ones), unique id,
length, time stamp, the shell's time stamp, patch, major, minor, mode, actions, interface id, name,
uuid, debug file, number of sections."""
SECTION = struct.Struct("<I16s4xQQ")

XML = b"""<?xml version="1.0" encoding="UTF-8"?>
<project name="fake">
 <platform vendor="xilinx" boardid="u55c" name="fake" featureRomTime="0">
  <device name="fpga0" fpgaDevice="xcvu47p">
   <core name="OCL_REGION_0" target="hw" type="clc_region">
    <kernel name="fake" language="c">
     <port name="S_AXI_CONTROL" mode="slave" range="0x1000" dataWidth="32"
       portType="addressable" base="0x0"/>
     <arg name="a" addressQualifier="0" id="0" port="S_AXI_CONTROL" size="0x4" offset="0x10"
       hostOffset="0x0" hostSize="0x4" type="uint"/>
     <instance name="fake_1"><addrRemap base="0x10000" range="0x10000" port="S_AXI_CONTROL"/>
     </instance>
    </kernel>
   </core>
  </device>
 </platform>
</project>"""


@dataclass(frozen=True, slots=True)
class Tree:
    """A node of a device tree."""

    name: str = ""
    properties: Mapping[str, bytes] = field(default_factory=dict)
    children: tuple["Tree", ...] = ()


def blob(tree: Tree) -> bytes:
    """A flattened device tree (Devicetree Specification 0.4, chapter 5)."""
    strings, offsets, out = bytearray(), {}, bytearray()

    def padded(content: bytes) -> bytes:
        return content + bytes(-len(content) % 4)

    def add(node: Tree) -> None:
        out.extend(struct.pack(">I", 1) + padded(node.name.encode() + b"\0"))
        for name, value in node.properties.items():
            if name not in offsets:
                offsets[name] = len(strings)
                strings.extend(name.encode() + b"\0")
            out.extend(struct.pack(">III", 3, len(value), offsets[name]) + padded(value))
        for child in node.children:
            add(child)
        out.extend(struct.pack(">I", 2))

    add(tree)
    out.extend(struct.pack(">I", 9))
    reserved = bytes(16)
    at = 40 + len(reserved)
    end = at + len(out)
    sizes = (0xD00DFEED, end + len(strings), at, end, 40, 17, 16, 0, len(strings), len(out))
    return struct.pack(">10I", *sizes) + reserved + bytes(out) + bytes(strings)


def _text(value: str) -> bytes:
    return value.encode() + b"\0"


def _endpoint(name: str, function: int, offset: int, *compatible: str, size: int = 0x1000) -> Tree:
    properties = {"compatible": b"".join(map(_text, compatible))} if compatible else {}
    properties["pcie_physical_function"] = struct.pack(">I", function)
    properties["pcie_bar_mapping"] = struct.pack(">I", 0)
    properties["reg"] = struct.pack(">QQ", offset, size)
    return Tree(name, properties)


def _interfaces(ids: Iterable[str]) -> Tree:
    nodes = [Tree(f"@{n}", {"interface_uuid": _text(each)}) for n, each in enumerate(ids)]
    return Tree("interfaces", {}, tuple(nodes))


def shell_tree(logic: str, *interfaces: str) -> bytes:
    """The device tree of a shell: where the card of fakealveo.c has its registers."""
    prefix = "xilinx.com,reg_abs-"
    mailbox = (f"{prefix}axi_mailbox-1.0", "axi_mailbox")
    endpoints = (
        _endpoint("ep_mailbox_mgmt_00", 0, 0x4000, *mailbox),
        _endpoint("ep_mailbox_user_00", 1, 0x4000, *mailbox),
        _endpoint("ep_fpga_configuration_00", 0, 0x5000, f"{prefix}axi_hwicap-1.0", "axi_hwicap"),
        _endpoint("ep_pr_isolate_ulp_00", 0, 0x6000, f"{prefix}axi_gpio-1.0", "axi_gpio"),
        _endpoint("ep_xdma_00", 1, 0x8000, f"{prefix}xdma-1.0"),
        _endpoint("ep_ddr_mem_calib_00", 0, 0x7000, f"{prefix}ddr4_mem_calib-1.0"),
    )
    parts = (_interfaces(interfaces), Tree("addressable_endpoints", {}, endpoints))
    return blob(Tree("", {"logic_uuid": _text(logic)}, parts))


def container(
    sections: Iterable[tuple[int, str, bytes]], uuid: UUID, *, mode: int = FLAT, name: str = VBNV
) -> bytes:
    """An xclbin (or xsabin) of sections: kind, name and content of each."""
    sections = list(sections)
    head = HEADER.size + SECTION.size * len(sections)
    head += -head % 8
    body, table = bytearray(), b""
    for kind, title, content in sections:
        body.extend(bytes(-len(body) % 8))
        table += SECTION.pack(kind, title.encode(), head + len(body), len(content))
        body.extend(content)
    header = HEADER.pack(
        *(b"xclbin2\0", -1, b"\xff" * 28, 1, head + len(body), 1_700_000_000, 0, 0, 2, 25, mode, 0),
        *(bytes(16), name.encode(), uuid.bytes, b"", len(sections)),
    )
    return (header + table).ljust(head, b"\0") + bytes(body)


def partition(*interfaces: str, logic: str = LOGIC) -> bytes:
    """A shell's `partition.xsabin`, which xclmgmt asks for when it finds the card."""
    tree = shell_tree(logic, *(interfaces or (INTERFACE,)))
    return container([(PARTITION, "PARTITION_METADATA", tree)], UUID(int=1))


def bit_file(words: bytes) -> bytes:
    """A .bit file: the header that the driver parses, then the words for the ICAP."""

    def named(tag: bytes, text: bytes) -> bytes:
        return tag + struct.pack(">H", len(text) + 1) + text + b"\0"

    head = struct.pack(">H", 9) + b"\x0f\xf0" * 4 + b"\0" + b"\0\x01"
    parts = ((b"a", b"ulp"), (b"b", b"xcu55c"), (b"c", b"2026/11/23"), (b"d", b"12:00:00"))
    fields = b"".join(named(tag, text) for tag, text in parts)
    return head + fields + b"e" + struct.pack(">I", len(words)) + words


def memory(*, used: int = UNUSED, kib: int = 16 << 10) -> bytes:
    """A MEM_TOPOLOGY of one bank."""
    return struct.pack("<i4x", 1) + struct.pack("<BB6xQQ16s", HBM, used, kib, 0, b"HBM[0]")


def xclbin(
    uuid: UUID,
    *interfaces: str,
    size: int = 256 * 1024,
    mode: int = PARTIAL,
    kernels: bool = True,
    topology: bytes | None = None,
    name: str = VBNV,
) -> bytes:
    """An image for the shell with these interfaces.

    Args:
        uuid: what reads back.
        interfaces: INTERFACE where there are none.
        size: of the bitstream, in bytes.
        mode: PARTIAL, unless the driver is to program nothing.
        kernels: whether there is a compute unit; a blank has none.
        topology: the section MEM_TOPOLOGY; one bank that is not used, so that the driver waits for
            no calibration of it.
        name: vendor, board, name and version of the platform.
    """
    units = [struct.pack("<IIQ64s", 1, 0, 0x10000, b"fake:fake_1")] if kernels else []
    layout = struct.pack("<i4x", len(units)) + b"".join(units)
    endpoints = Tree("addressable_endpoints", {}, (_endpoint("ep_fake_00", 1, 0x100000),))
    tree = blob(Tree("", {}, (_interfaces(interfaces or (INTERFACE,)), endpoints)))
    words = SYNC + uuid.bytes + hashlib.sha256(uuid.bytes).digest() * (size // 32)
    sections = [
        (BITSTREAM, "BITSTREAM", bit_file(words[:size])),
        *([(METADATA, "EMBEDDED_METADATA", XML)] if kernels else []),
        (LAYOUT, "IP_LAYOUT", layout),
        (MEMORY, "MEM_TOPOLOGY", memory() if topology is None else topology),
        (PARTITION, "PARTITION_METADATA", tree),
    ]
    return container(sections, uuid, mode=mode, name=name)
