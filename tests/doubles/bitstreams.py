"""Bitstream files as vendors' tools write them, made by code."""

import gzip
import struct
from collections.abc import Iterable

from doubles.cards import INTERFACE
from fpga_plugin.bitstream.pack import complete_document, pack_gbs
from fpga_plugin.ids import parse_afu_id

AFU = parse_afu_id("18b79ffa2ee54aa096ef4230dafacb5f")
HASH = "0123456789abcdef0123456789abcdef01234567"
IMAGE = bytes.fromhex(AFU) + b" an OpenCL kernel"
DOCUMENT = complete_document({}, where="t", interface_id=INTERFACE, afu_id=AFU)
GBS = pack_gbs(DOCUMENT, IMAGE, where="t")


def elf(*parts: tuple[str, bytes], bits: int = 64) -> bytes:
    """An ELF file of sections, as a linker lays them out."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _ in parts) + b".shstrtab\0"
    header = 64 if bits == 64 else 52
    entry = "<IIQQQQIIQQ" if bits == 64 else "<IIIIIIIIII"
    body = bytearray()
    table = [struct.pack(entry, *[0] * 10)]
    at = 1
    for name, content in (*parts, (".shstrtab", names)):
        table.append(struct.pack(entry, at, 1, 0, 0, header + len(body), len(content), 0, 0, 1, 0))
        at += len(name) + 1
        body += content
    shape = "<4sBBBB8xHHIQQQIHHHHHH" if bits == 64 else "<4sBBBB8xHHIIIIIHHHHHH"
    start = struct.pack(
        shape,
        *(b"\x7fELF", bits // 32, 1, 1, 0),
        *(1, 62, 1, 0, 0, header + len(body), 0),
        *(header, 0, 0, struct.calcsize(entry), len(table), len(table) - 1),
    )
    return start + bytes(body) + b"".join(table)


def aocx(
    packed: bytes | None = None,
    *,
    name: bytes = HASH.encode(),
    bits: int = 64,
    more: Iterable[tuple[str, bytes]] = (),
) -> bytes:
    """An AOCX file around gzip of a GBS file, or around what should be that."""
    packed = gzip.compress(GBS, mtime=0) if packed is None else packed
    inner = elf((".acl.gbs.gz", packed), bits=bits)
    return elf((".acl.rand_hash", name), (".acl.fpga.bin", inner), *more, bits=bits)
