#!/usr/bin/env python3
"""Builds the sample store again from its sources.

    .venv/bin/python bitstreams/sources/build.py [STORE]

A sample's image is what simulated cards need of one and nothing else: the AFU id, which such a card
shows after programming as its first 16 bytes, then the description beside the metadata, then a
counter up to the size of an image. The same sources give the same bytes.

A source whose name has 40 digits becomes an AOCX file: that is the hash which names it, and the GBS
file is packed as the OpenCL compiler would (`fpga_plugin/bitstreams/aocx.py` has the layout). The
plugin only reads bitstreams, so what writes them is here. For a real card, OPAE's `packager` writes
GBS files.

A source with a uuid becomes an xclbin file, whose image is the same. XRT's own drivers load it on a
fake card. Its maker is the tests' (`tests/doubles/xclbins.py`); for a real card, `v++` writes them.
"""

import json
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fpga_plugin.bitstreams.aocx import BINARY_SECTION, GBS_SECTION, HASH_SECTION
from fpga_plugin.bitstreams.gbs import GUID
from fpga_plugin.commands.main import main
from fpga_plugin.ids import parse_afu_id

SOURCES = Path(__file__).resolve().parent
IMAGE_BYTES = 4096
HASH_DIGITS = 40

_ELF = "<4sBBBB8xHHIQQQIHHHHHH"
"""Elf64_Ehdr (elf.h)."""
_SECTION = "<IIQQQQIIQQ"
"""Elf64_Shdr."""


def image(description: bytes, afu_id: str) -> bytes:
    """The raw image of a sample."""
    start = bytes.fromhex(afu_id) + description
    counter = bytes(n % 256 for n in range(IMAGE_BYTES))
    return start + counter[len(start) :]


def gbs(metadata: object, image: bytes) -> bytes:
    """The GBS file of an image; `fpga_plugin/bitstreams/gbs.py` has the layout."""
    text = json.dumps(metadata, separators=(",", ":")).encode()
    return GUID + len(text).to_bytes(4, "little") + text + image


def elf(*parts: tuple[str, bytes]) -> bytes:
    """An ELF file with these sections: 64 bits, little endian, nothing to execute."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _ in parts) + b".shstrtab\0"
    start, entry = struct.calcsize(_ELF), struct.calcsize(_SECTION)
    body, table, at = b"", [bytes(entry)], 1
    for name, content in (*parts, (".shstrtab", names)):
        place = start + len(body), len(content)
        table.append(struct.pack(_SECTION, at, 1, 0, 0, *place, 0, 0, 1, 0))
        at += len(name) + 1
        body += content
    header = struct.pack(
        _ELF,
        *(b"\x7fELF", 2, 1, 1, 0),
        *(0, 0, 1, 0, 0, start + len(body), 0),
        *(start, 0, 0, entry, len(table), len(table) - 1),
    )
    return header + body + b"".join(table)


def gzipped(data: bytes) -> bytes:
    """A gzip member with one stored block (RFC 1951, 3.2.4): the same bytes with every zlib."""
    size = struct.pack("<HH", len(data), len(data) ^ 0xFFFF)
    trailer = struct.pack("<II", zlib.crc32(data), len(data))
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff\1" + size + data + trailer


def aocx(gbs_file: bytes, name: str) -> bytes:
    """The AOCX file of a GBS file."""
    binary = elf((GBS_SECTION, gzipped(gbs_file)))
    return elf((HASH_SECTION, name.encode()), (BINARY_SECTION, binary))


def xclbin(source: Mapping[str, Any], image: bytes, interface_id: str) -> bytes:
    """The xclbin file of an image."""
    sys.path.append(str(SOURCES.parents[1] / "tests"))
    from doubles import xclbins

    kernels, layout = [], []
    for one in source["kernels"]:
        kernels.append(xclbins.kernel(one["name"], one["arguments"], instances=one["instances"]))
        control = 0x100 if one["dataflow"] else 0  # AP_CTRL_CHAIN, AP_CTRL_HS
        for n in range(one["instances"]):
            base = 0x10000 * (len(layout) + 1)
            layout.append((xclbins.KERNEL, control, base, f"{one['name']}:{one['name']}_{n}"))
    banks = [
        (bank["type"], bank["used"], bank["kibibytes"], int(bank["base"], 16), bank["tag"])
        for bank in source["memory"]
    ]
    sections = xclbins.parts(
        image=image,
        xml=xclbins.metadata(*kernels, name=source["name"]),
        interface=xclbins.partition(interface_id),
        banks=xclbins.memory(*banks),
        layout=xclbins.units(*layout),
    )
    return xclbins.axlf(sections.values(), source["uuid"], platform=source["platform"])


def samples(source: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a source: each one's path in the store, and what is in it."""
    metadata, description = json.loads(source.read_text()), source.with_suffix(".txt").read_bytes()
    if "uuid" in metadata:
        logic = image(description, metadata["uuid"])
        for interface_id in (source.parent.name, *metadata.get("also_for", ())):
            data = xclbin(metadata, logic, interface_id)
            yield f"{interface_id}/{source.stem}.xclbin", data
        return
    cluster = metadata["afu-image"]["accelerator-clusters"][0]
    afu_id = parse_afu_id(cluster["accelerator-type-uuid"])
    data = gbs(metadata, image(description, afu_id))
    if len(source.stem) == HASH_DIGITS:
        yield f"{source.parent.name}/{source.stem}.aocx", aocx(data, source.stem)
        return
    yield f"{source.parent.name}/{source.stem}.gbs", data


def build(store: Path) -> int:
    """Build every sample into a store; returns the exit code."""
    for source in sorted(SOURCES.glob("*/*.json")):
        for path, data in samples(source):
            (store / path).parent.mkdir(parents=True, exist_ok=True)
            (store / path).write_bytes(data)
    # The same sources give the same bytes: a new manifest's version would be the time.
    (store / "manifest.json").unlink(missing_ok=True)
    command = ["sign", "--manifest", "--manifest-version", "1", "--dir", str(store)]
    return main(["bitstream", *command])


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES.parent))
