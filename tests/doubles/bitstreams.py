"""Bitstream files as vendors' tools write them, made by code."""

import gzip
import json
import struct
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from doubles.cards import INTERFACE
from fpga_plugin.bitstreams.gbs import GUID
from fpga_plugin.ids import parse_afu_id

AFU = parse_afu_id("18b79ffa2ee54aa096ef4230dafacb5f")
HASH = "0123456789abcdef0123456789abcdef01234567"
IMAGE = bytes.fromhex(AFU) + b" an OpenCL kernel"


def document(
    afu: str = AFU,
    *,
    interface: str = INTERFACE,
    high: float | None = None,
    low: float | None = None,
) -> dict[str, Any]:
    """The metadata of a GBS file, as OPAE's packager writes it; the clocks in MHz."""
    clocks = {"clock-frequency-high": high, "clock-frequency-low": low}
    cluster = {"accelerator-type-uuid": str(UUID(afu)), "name": "afu", "total-contexts": 1}
    image = {
        "interface-uuid": str(UUID(interface)),
        "magic-no": 488605312,
        **{name: value for name, value in clocks.items() if value is not None},
        "accelerator-clusters": [cluster],
    }
    return {"version": 1, "afu-image": image}


def packed(metadata: dict[str, Any], image: bytes) -> bytes:
    """A GBS file of its parts, whatever they are."""
    text = json.dumps(metadata, separators=(",", ":")).encode()
    return GUID + len(text).to_bytes(4, "little") + text + image


def gbs(image: bytes | None = None, afu: str = AFU, *, interface: str = INTERFACE) -> bytes:
    """A GBS file; without an image, of one that a simulated card shows as the AFU."""
    return packed(
        document(afu, interface=interface), bytes.fromhex(afu) if image is None else image
    )


DOCUMENT = document()
GBS = gbs(IMAGE)


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
    gzipped: bytes | None = None,
    *,
    name: bytes = HASH.encode(),
    bits: int = 64,
    more: Iterable[tuple[str, bytes]] = (),
) -> bytes:
    """An AOCX file around gzip of a GBS file, or around what should be that."""
    gzipped = gzip.compress(GBS, mtime=0) if gzipped is None else gzipped
    inner = elf((".acl.gbs.gz", gzipped), bits=bits)
    return elf((".acl.rand_hash", name), (".acl.fpga.bin", inner), *more, bits=bits)
