"""Malformed bitstream files, made by code: one a way in which a file can be wrong.

`FILES` has their bytes by a name that says what is wrong; `test_kinds_malformed` has the message of
each.
"""

import gzip
import json
import struct
from copy import deepcopy
from typing import Any

from doubles.bitstreams import AFU, DOCUMENT, GBS, HASH, IMAGE, aocx, elf

from fpga_plugin.bitstreams.gbs import GUID

TEXT = json.dumps(DOCUMENT)
PACKED = gzip.compress(GBS, mtime=0)
NAME = (".acl.rand_hash", HASH.encode())


def gbs(text: str | bytes, image: bytes = IMAGE) -> bytes:
    """A GBS file of any metadata."""
    raw = text.encode() if isinstance(text, str) else text
    return GUID + struct.pack("<I", len(raw)) + raw + image


def with_field(path: str, value: object) -> bytes:
    """A GBS file one of whose fields is another; `...`: is missing."""
    document: Any = deepcopy(DOCUMENT)
    *above, last = (int(part) if part.isdigit() else part for part in path.split("/"))
    target = document
    for part in above:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return gbs(json.dumps(document))


def with_literal(name: str, literal: str) -> bytes:
    """A GBS file in whose `afu-image` a name has a JSON text as it stands."""
    return gbs(TEXT.replace('"magic-no"', f'"{name}": {literal}, "magic-no"'))


def with_length(length: int) -> bytes:
    """A GBS file that gives its metadata another length."""
    return GUID + struct.pack("<I", length) + TEXT.encode() + IMAGE


def patched(data: bytes, at: int, put: bytes) -> bytes:
    """A file of which some bytes are others."""
    return data[:at] + put + data[at + len(put) :]


def inner(*parts: tuple[str, bytes]) -> bytes:
    """An AOCX file whose inner ELF file has these sections."""
    return elf(NAME, (".acl.fpga.bin", elf(*parts)))


def section(number: int, field: int, put: bytes) -> bytes:
    """An AOCX file with a field of a section's header set."""
    data = aocx()
    (table,) = struct.unpack_from("<Q", data, 40)
    return patched(data, table + 64 * number + field, put)


IMAGE_AT = "afu-image"
CLUSTER = f"{IMAGE_AT}/accelerator-clusters/0"
UUID = f"{CLUSTER}/accelerator-type-uuid"
DASHED = "18b79ffa-2ee5-4aa0-96ef-4230dafacb5f"
BOMB = gzip.compress(bytes(8 << 20), mtime=0)

_CONTAINER = {
    "nothing": b"",
    "one byte": b"X",
    "guid alone": GUID,
    "header cut by a byte": GUID + b"\1\0\0",
    "guid with a flipped bit": patched(GBS, 8, b"\xb6"),
    "guid in lower case": GUID.lower() + GBS[16:],
    "guid after a line break": b"\n" + GBS,
    "guid backwards": GUID[::-1] + GBS[16:],
    "raw image": bytes(range(64)),
    "web page": b"<!DOCTYPE html><html><body>404</body></html>",
    "pointer of git lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "gzipped gbs": PACKED,
    "zip": b"PK\3\4" + bytes(40),
    "legacy": b"\x80\x86\x1f\x1d" + bytes(16) + IMAGE,
    "pacsign": b"\x19\xfd\xea\xb6" + bytes(1020) + GBS,
    "xclbin": b"xclbin2\0" + bytes(500),
    "xclbin cut in its magic": b"xclbin2",
    "metadata of no bytes": with_length(0),
    "metadata of one byte too many": gbs(TEXT + " " * (8192 - len(TEXT))),
    "metadata of 4 GiB": with_length(0xFFFFFFFF),
    "length in big endian": GUID + struct.pack(">I", len(TEXT)) + TEXT.encode() + IMAGE,
    "metadata beyond the end": with_length(8000),
    "length one short": with_length(len(TEXT) - 1),
    "length one long": with_length(len(TEXT) + 1),
    "cut in the metadata": GBS[:100],
    "cut before the image": gbs(TEXT, b""),
    "image is a gbs": gbs(TEXT, GBS),
    "image is pacsign": gbs(TEXT, b"\x19\xfd\xea\xb6" + bytes(1020)),
    "image is a legacy gbs": gbs(TEXT, b"\x80\x86\x1f\x1d" + bytes(16)),
    "image is an xclbin": gbs(TEXT, b"xclbin2\0"),
    "image is an elf": gbs(TEXT, b"\x7fELF\2\1"),
}

_JSON = {
    "comma at the end": gbs('{"version": 1,}'),
    "text behind": gbs(TEXT + " {}"),
    "array": gbs("[]"),
    "blanks only": gbs(" " * 9),
    "nul": gbs(b'{"a": \0}'),
    "bom": gbs("\N{ZERO WIDTH NO-BREAK SPACE}" + TEXT),
    "utf-16": gbs(TEXT.encode("utf-16-le")),
    "latin-1": gbs('{"name": "Caf\u00e9"}'.encode("latin-1")),
    "surrogate in utf-8": gbs(b'{"a": "\xed\xa0\x80"}'),
    "overlong utf-8": gbs(b'{"a": "\xc0\xaf"}'),
    "nan": gbs('{"a": NaN}'),
    "twice at the top": gbs(TEXT[:-1] + ', "version": 1}'),
    "twice inside": gbs(TEXT.replace('"magic-no"', '"interface-uuid": "x", "magic-no"')),
    "twice by an escape": gbs(TEXT[:-1] + ', "v\\u0065rsion ": 1, "version ": 2}'),
    "nested deeply": gbs('{"a":' + "[" * 4000 + "]" * 4000 + "}"),
    "long number": gbs('{"a": ' + "9" * 5000 + "}"),
    "single quotes": gbs(TEXT.replace('"', "'")),
    "comment": gbs("/* x */" + TEXT),
    "line break in a string": gbs(TEXT.replace('"afu"', '"a\nfu"')),
    "string that does not end": gbs('{"version": "1'),
    "lone surrogate": with_literal("x", '"\\ud800"'),
    "number of 400 digits of power": with_literal("power", "1e999"),
}

_SCHEMA = {
    "no version": with_field("version", ...),
    "version as text": with_field("version", "1"),
    "version as truth": with_field("version", True),
    "version with a point": with_field("version", 1.0),
    "version 0": with_field("version", 0),
    "version 2": with_field("version", 2),
    "version of 30 digits": with_field("version", 10**29),
    "platform as number": with_field("platform-name", 7),
    "no image": with_field(IMAGE_AT, ...),
    "image as list": with_field(IMAGE_AT, []),
    "image null": with_field(IMAGE_AT, None),
    "no magic": with_field(f"{IMAGE_AT}/magic-no", ...),
    "magic as text": with_field(f"{IMAGE_AT}/magic-no", "488605312"),
    "magic one more": with_field(f"{IMAGE_AT}/magic-no", 488605313),
    "magic negative": with_field(f"{IMAGE_AT}/magic-no", -488605312),
    "no interface": with_field(f"{IMAGE_AT}/interface-uuid", ...),
    "interface null": with_field(f"{IMAGE_AT}/interface-uuid", None),
    "interface empty": with_field(f"{IMAGE_AT}/interface-uuid", ""),
    "interface a path": with_field(f"{IMAGE_AT}/interface-uuid", "../../etc/passwd"),
    "interface a hash": with_field(f"{IMAGE_AT}/interface-uuid", "ab" * 20),
    "interface all ones": with_field(f"{IMAGE_AT}/interface-uuid", "F" * 32),
    "no accelerators": with_field(f"{IMAGE_AT}/accelerator-clusters", ...),
    "empty list of accelerators": with_field(f"{IMAGE_AT}/accelerator-clusters", []),
    "accelerators as object": with_field(f"{IMAGE_AT}/accelerator-clusters", {}),
    "accelerator as text": with_field(f"{IMAGE_AT}/accelerator-clusters", ["x"]),
    "second accelerator bad": with_field(
        f"{IMAGE_AT}/accelerator-clusters",
        [
            {"accelerator-type-uuid": DASHED, "name": "a", "total-contexts": 1},
            {"accelerator-type-uuid": "b", "name": "b", "total-contexts": 1},
        ],
    ),
    "no accelerator id": with_field(UUID, ...),
    "accelerator id as number": with_field(UUID, 18),
    "accelerator id one short": with_field(UUID, AFU[:-1]),
    "accelerator id one long": with_field(UUID, AFU + "0"),
    "accelerator id of dashes elsewhere": with_field(UUID, "18b7-9ffa2ee5-4aa0-96ef-4230dafacb5f"),
    "accelerator id in braces": with_field(UUID, "{" + DASHED + "}"),
    "accelerator id as urn": with_field(UUID, f"urn:uuid:{DASHED}"),
    "accelerator id with 0x": with_field(UUID, f"0x{AFU[2:]}"),
    "accelerator id after a blank": with_field(UUID, f" {DASHED}"),
    "accelerator id before a line break": with_field(UUID, f"{AFU}\n"),
    "accelerator id with nul": with_field(UUID, f"{AFU[:31]}\0"),
    "accelerator id of arabic digits": with_field(UUID, "\u0661" * 32),
    "accelerator id of wide digits": with_field(UUID, "\uff11" * 32),
    "accelerator id of 5000 characters": with_field(UUID, "a" * 5000),
    "accelerator id with terminal codes": with_field(UUID, "\x1b[31m"),
    "accelerator id all ones": with_field(UUID, "ffffffff-ffff-ffff-ffff-ffffffffffff"),
    "no name": with_field(f"{CLUSTER}/name", ...),
    "name as list": with_field(f"{CLUSTER}/name", ["a"]),
    "no contexts": with_field(f"{CLUSTER}/total-contexts", ...),
    "contexts negative": with_field(f"{CLUSTER}/total-contexts", -1),
    "contexts half": with_field(f"{CLUSTER}/total-contexts", 0.5),
    "power negative": with_field(f"{IMAGE_AT}/power", -1),
    "power as text": with_field(f"{IMAGE_AT}/power", "50"),
    "clock in words": with_field(f"{IMAGE_AT}/clock-frequency-high", "fast"),
    "clock of points": with_field(f"{IMAGE_AT}/clock-frequency-high", "auto-...."),
    "clock negative": with_field(f"{IMAGE_AT}/clock-frequency-low", -0.5),
    "clock as list": with_field(f"{IMAGE_AT}/clock-frequency-low", [1]),
    "top interface as text": with_field(f"{IMAGE_AT}/afu-top-interface", "ccip"),
    "top interface of a number": with_field(f"{IMAGE_AT}/afu-top-interface", {"class": 1}),
}

_ELF = {
    "elf magic alone": b"\x7fELF",
    "elf header cut": aocx()[:60],
    "elf table cut": aocx()[:-1],
    "elf class 0": patched(aocx(), 4, b"\0"),
    "elf in big endian": patched(aocx(), 5, b"\2"),
    "elf table at the end of memory": patched(aocx(), 40, b"\xff" * 8),
    "elf table just behind the end": patched(aocx(), 40, struct.pack("<Q", len(aocx()))),
    "elf of no sections": patched(aocx(), 60, b"\0\0"),
    "elf of 65535 sections": patched(aocx(), 60, b"\xff\xff"),
    "elf headers of 32 bits": patched(aocx(), 58, b"\x28\0"),
    "elf names in no section": patched(aocx(), 62, b"\x09\0"),
    "elf section beyond the end": section(1, 32, b"\xff\xff\xff\x7f"),
    "elf section at the end of memory": section(2, 24, b"\xff" * 8),
    "elf name beyond the names": section(1, 0, b"\xff\xff\0\0"),
    "elf name without an end": aocx(more=(("n" * 200, b""),)),
    "elf name with a terminal code": aocx(more=(("\x1b[31m", b""),)),
    "elf name of other letters": aocx(more=(("\u00e9", b""),)),
    "elf section compressed by elf": section(2, 8, struct.pack("<Q", 0x800)),
    "elf section twice": aocx(more=(NAME,)),
    "elf section without bytes": section(1, 4, struct.pack("<I", 8)),
    "an executable": elf((".text", b"\x90" * 16), (".data", b"x")),
    "emulator build": elf(NAME, (".acl.board", b"EmulatorDevice")),
    "hash of 39 digits": aocx(name=HASH[:-1].encode()),
    "hash of 41 digits": aocx(name=HASH.encode() + b"0"),
    "hash a path": aocx(name=b"../" * 13 + b"x"),
    "hash of nul": aocx(name=b"\0" * 40),
    "hash with nul inside": aocx(name=HASH[:39].encode() + b"\0\0a"),
    "hash of arabic digits": aocx(name="\u0661".encode() * 20),
    "binary that is no elf": elf(NAME, (".acl.fpga.bin", b"x" * 99)),
    "binary of no bytes": elf(NAME, (".acl.fpga.bin", b"")),
    "binary cut": elf(NAME, (".acl.fpga.bin", elf((".acl.gbs.gz", PACKED))[:-1])),
    "binary without gbs": inner((".acl.other", b"x")),
    "gbs not zipped": aocx(GBS),
    "gbs of no bytes": aocx(b""),
    "gbs in zlib's own format": aocx(b"\x78\x9c" + PACKED[10:]),
    "gbs cut in the middle": aocx(PACKED[: len(PACKED) // 2]),
    "gbs with another checksum": aocx(PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:]),
    "gbs with a flipped bit": aocx(patched(PACKED, 10, b"\xff")),
    "gbs zipped in two members": aocx(PACKED + PACKED),
    "gbs with bytes behind": aocx(PACKED + PACKED[-4:]),
    "gbs that says 4 GiB": aocx(PACKED[:-4] + b"\xff\xff\xff\xff"),
    "gbs that says one byte": aocx(PACKED[:-4] + b"\1\0\0\0"),
    "bomb that lies": aocx(BOMB[:-4] + struct.pack("<I", 1000)),
    "bomb of zeros": aocx(BOMB),
    "gbs zipped twice": aocx(gzip.compress(PACKED, mtime=0)),
    "aocx in an aocx": aocx(gzip.compress(aocx(), mtime=0)),
    "pacsign in an aocx": aocx(gzip.compress(b"\x19\xfd\xea\xb6" + bytes(1020), mtime=0)),
    "gbs without an image in an aocx": aocx(gzip.compress(gbs(TEXT, b""), mtime=0)),
    "gbs with bad metadata in an aocx": aocx(gzip.compress(gbs("[]"), mtime=0)),
}

FILES: dict[str, bytes] = {**_CONTAINER, **_JSON, **_SCHEMA, **_ELF}
