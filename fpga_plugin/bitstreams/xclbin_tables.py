"""The tables of an xclbin: its compute units (IP_LAYOUT) and the memories (MEM_TOPOLOGY).

Each is a count and entries of one size; the driver refuses a section of another length
(`sizeof_sect`). Structures: `ip_layout` and `mem_topology` in xclbin.h of Xilinx/XRT at 963c58ee.
"""

import struct
from typing import Any

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.errors import printable_ascii, quote
from fpga_plugin.hardware.image import MemoryBank

MAX_BANKS = 1024
MAX_UNITS = 4096
"""Entries that are read. Cards have some fifty memories; the driver knows 128 compute units."""

_COUNT = struct.Struct("<i4x")
_BANK = struct.Struct("<BB6xQQ16s")
_UNIT = struct.Struct("<IIQ64s")

_MEMORIES = (
    "DDR3", "DDR4", "DRAM", "STREAMING", "PREALLOCATED_GLOB", "ARE",
    "HBM", "BRAM", "URAM", "STREAMING_CONNECTION", "HOST", "PS_KERNEL",
)  # fmt: skip  # as the header has it
"""`enum MEM_TYPE`."""

_WITH_ADDRESSES = frozenset({"DDR3", "DDR4", "DRAM", "PREALLOCATED_GLOB", "HBM", "BRAM", "URAM"})
_HOST_TAG = "host"
"""How the host's memory is called, whatever its type; the driver goes by the tag, too
(xocl_xclbin.c, `convert_mem_tag`)."""

_ADDRESS_BITS = 64

_COMPUTE_UNITS = frozenset({1, 7})
"""`enum IP_TYPE`: IP_KERNEL and IP_PS_KERNEL."""

_CONTROL, _CONTROL_SHIFT, _CHAIN = 0xFF00, 8, 1
"""IP_CONTROL_MASK, and AP_CTRL_CHAIN, by which XRT's library knows dataflow (xclbin_parser.cpp,
`get_dataflow`)."""


def has_dataflow(section: ByteRange) -> bool:
    """Whether a compute unit of the section IP_LAYOUT works in dataflow mode.

    Raises:
        BitstreamError: it cannot be read.
    """
    return any(
        kind in _COMPUTE_UNITS and (properties & _CONTROL) >> _CONTROL_SHIFT == _CHAIN
        for kind, properties, _, _ in _entries(section, _UNIT, MAX_UNITS)
    )


def read_banks(section: ByteRange) -> tuple[MemoryBank, ...]:
    """The memories of the section MEM_TOPOLOGY, in its order.

    Raises:
        BitstreamError: it cannot be read.
    """
    return tuple(_bank(section, *bank) for bank in _entries(section, _BANK, MAX_BANKS))


def _bank(  # noqa: PLR0917 - as the entry has it
    section: ByteRange, kind: int, used: int, kibibytes: int, base: int, tag: bytes
) -> MemoryBank:
    type_ = _MEMORIES[kind] if kind < len(_MEMORIES) else str(kind)
    name = printable(tag)
    on_card = type_ in _WITH_ADDRESSES and not name.lower().startswith(_HOST_TAG)
    if on_card and base + (kibibytes << 10) > 1 << _ADDRESS_BITS:
        raise section.wrong(
            f"memory {quote(name)} has {kibibytes} KiB from {base:#x} on, which are no"
            f" {_ADDRESS_BITS}-bit addresses"
        )
    return MemoryBank(
        tag=name,
        type=type_,
        used=bool(used),
        on_card=on_card,
        base=base if on_card else 0,
        size=kibibytes << 10 if on_card else 0,
    )


def printable(text: bytes) -> str:
    """A field of text up to its first null byte, for people."""
    return printable_ascii(text.partition(b"\0")[0].decode("latin-1"))


def _entries(section: ByteRange, entry: struct.Struct, most: int) -> tuple[tuple[Any, ...], ...]:
    head = section.read(0, _COUNT.size)
    count = _COUNT.unpack(head)[0] if len(head) == _COUNT.size else -1
    if not 0 <= count <= most or section.size != _COUNT.size + count * entry.size:
        raise section.wrong(
            f"has {section.size} bytes and says {count} entries; an entry has {entry.size}, what is"
            f" before them {_COUNT.size}, and at most {most} are read"
        )
    return tuple(entry.iter_unpack(section.read(_COUNT.size)))
