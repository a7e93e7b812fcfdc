"""What a tenant may write who maps PF1's BAR: packets for PF0's mailbox, past xocl and its checks.

xocl maps the whole BAR for anyone who has the render node (`xocl_native_mmap`, userpf/xocl_drm.c),
and PF1's half of the mailbox lies in it. Packets and requests are those of subdev/mailbox.c and
mailbox_proto.h of XRT 2.25. A mapping of the fake cards' BAR does not answer, so the registers are
reached by a file of debugfs that stands for it (fakealveo.c).
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from alveo import DEBUGFS, Alveo, until

USER_PROBE, LOAD_SLOT_KADDR = 11, 17
"""Requests of which PF0 takes an address in the kernel."""

MAILBOX = 0x4000
WRITE, READ, STATUS = MAILBOX, MAILBOX + 0x08, MAILBOX + 0x10
MAY_SEND, RECEIVED = 1 << 2, 1 << 3
PACKET = struct.Struct("<II56s")
START = struct.Struct("<QII")
"""A message's id, flags and length, in its first packet, before what it says."""

MESSAGE_START, MESSAGE_BODY, LAST = 2, 3, 1 << 31
IS_REQUEST = 1 << 1
REQUEST = struct.Struct("<Qi")
LEAST = 8
"""PF0 takes a message to be so much longer than its header and its payload (struct_size)."""

PEER = struct.Struct("<QQII")
"""What a USER_PROBE says: an address in the kernel, the physical one, the page's CRC, a version."""

PAGE = 4096


class Registers:
    """PF1's BAR 0."""

    def __init__(self, card: Alveo) -> None:
        path = DEBUGFS / f"user{card.number}"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def read(self, offset: int) -> int:
        return int.from_bytes(os.pread(self._descriptor, 4, offset), "little")

    def write(self, offset: int, value: int) -> None:
        assert os.pwrite(self._descriptor, value.to_bytes(4, "little"), offset) == 4

    def close(self) -> None:
        os.close(self._descriptor)


def send(card: Alveo, request: int, payload: bytes) -> None:
    """One request to PF0; returns when PF0 has taken all of it."""
    message = REQUEST.pack(0, request) + payload + bytes(LEAST)
    room = 56 - START.size
    first, rest = message[:room], message[room:]
    bodies = [rest[at : at + 56] for at in range(0, len(rest), 56)]
    packets = [(MESSAGE_START, START.pack(0x7E57, IS_REQUEST, len(message)) + first, len(first))]
    packets += [(MESSAGE_BODY, body, len(body)) for body in bodies]
    registers = Registers(card)
    try:
        for number, (kind, content, size) in enumerate(packets, 1):
            last = LAST if number == len(packets) else 0
            until(lambda: registers.read(STATUS) & MAY_SEND, "PF0 took the packet before")
            for (word,) in struct.iter_unpack("<I", PACKET.pack(kind | last, size, content)):
                registers.write(WRITE, word)
        until(lambda: registers.read(STATUS) & MAY_SEND, "PF0 took the request")
    finally:
        registers.close()


def probe(card: Alveo, address: int = 0, physical: int = 1) -> None:
    """Introduce ourselves to PF0; by default as one whose address it finds to be wrong."""
    send(card, USER_PROBE, PEER.pack(address, physical, 0, 1))


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the kernel's address space: a program header of /proc/kcore."""

    address: int
    size: int
    physical: int


def segments() -> list[Segment]:
    """Of memory whose physical address the kernel tells; root's knowledge, not a tenant's."""
    found = []
    with Path("/proc/kcore").open("rb") as core:
        at, size, count = struct.unpack_from("<Q14xHH", core.read(64), 32)
        core.seek(at)
        for _ in range(count):
            kind, _, _, address, physical, length = struct.unpack_from("<IIQQQQ", core.read(size))
            if kind == 1 and physical != (1 << 64) - 1:
                found.append(Segment(address, length, physical))
    return found


def kernel_address(physical: int) -> int:
    """Where the kernel has a page of memory in its map of all memory."""
    for segment in sorted(segments(), key=lambda each: -each.size):
        if 0 <= physical - segment.physical < segment.size:
            return segment.address + physical - segment.physical
    raise AssertionError(f"{physical:#x} is no memory")


def physical_address(address: int) -> int:
    """Of a page of this process that is in memory (Documentation/admin-guide/mm/pagemap.rst)."""
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(address // PAGE * 8)
        entry = int.from_bytes(pages.read(8), "little")
    assert entry >> 63, "the page is not in memory"
    return (entry & (1 << 55) - 1) * PAGE + address % PAGE
