"""What is fuzzed: every reader of foreign bytes, with what it may raise and seeds made by code.

A target takes bytes and returns, or fails: any other error than the documented one, a hang, or
memory beyond the limit of the run is a finding.
"""

import gzip
import json
import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fpga_plugin import ids
from fpga_plugin.bitstream.elf import sections
from fpga_plugin.bitstream.formats import parse
from fpga_plugin.bitstream.manifest import ManifestFile, parse_manifest, write_manifest
from fpga_plugin.bitstream.metadata import parse_metadata
from fpga_plugin.bitstream.pack import complete_document, pack_gbs
from fpga_plugin.config import load_settings
from fpga_plugin.errors import BitstreamError, InvalidRequestError, SettingsError
from fpga_plugin.pods.checkpoint import CheckpointUnreadableError, read_checkpoint
from fpga_plugin.pods.requests import parse_requests
from fpga_plugin.policy.parse import PolicyError, parse_policy

INTERFACE = ids.parse_interface_id("ce48969398f05f33946d560708be108a")
AFU = ids.parse_afu_id("18b79ffa2ee54aa096ef4230dafacb5f")
DOCUMENT = complete_document({}, where="seed", interface_id=INTERFACE, afu_id=AFU)
GBS = pack_gbs(DOCUMENT, bytes.fromhex(AFU), where="seed")


class Target(NamedTuple):
    """A reader under test."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


def elf(*parts: tuple[str, bytes]) -> bytes:
    """A 64-bit ELF file of sections."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _ in parts) + b".shstrtab\0"
    body, table, at = bytearray(), [bytes(64)], 1
    for name, content in (*parts, (".shstrtab", names)):
        table.append(
            struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 64 + len(body), len(content), 0, 0, 1, 0)
        )
        at += len(name) + 1
        body += content
    start = struct.pack(
        "<4sBBBB8xHHIQQQIHHHHHH",
        *(b"\x7fELF", 2, 1, 1, 0, 1, 62, 1, 0, 0, 64 + len(body), 0),
        *(64, 0, 0, 64, len(table), len(table) - 1),
    )
    return start + bytes(body) + b"".join(table)


def aocx(packed: bytes) -> bytes:
    """An AOCX file around what should be gzip of a GBS file."""
    return elf((".acl.rand_hash", b"ab" * 20), (".acl.fpga.bin", elf((".acl.gbs.gz", packed))))


def _bitstream(data: bytes) -> None:
    with suppress(BitstreamError):
        found = parse(data, where="f")
        assert found.image
        assert ids.parse_bitstream_id(found.bitstream_id) == found.bitstream_id


def _packed(data: bytes) -> None:
    _bitstream(aocx(data))
    _bitstream(aocx(gzip.compress(data, 1, mtime=0)))


def _elf(data: bytes) -> None:
    with suppress(BitstreamError):
        assert sum(len(s.content) >= 0 for s in sections(data, where="f")) <= len(data)


def _metadata(data: bytes) -> None:
    with suppress(BitstreamError):
        assert parse_metadata(data, where="f").clusters


def _manifest(data: bytes) -> None:
    with suppress(BitstreamError):
        read = parse_manifest(data, where="f")
        again = parse_manifest(write_manifest(read.files.values()), where="f")
        assert again.files == read.files


def _policy(data: bytes) -> None:
    with suppress(PolicyError):
        parse_policy(data[1:], as_json=data[:1] == b"{")


def _pairs(data: bytes) -> dict[str, str]:
    """Names and values as os.environ has them: any bytes but NUL, decoded with surrogates."""
    lines = data.decode(errors="surrogateescape").split("\0")
    return dict((*line.split("=", 1), "")[:2] for line in lines)


def _requests(data: bytes) -> None:
    with suppress(InvalidRequestError):
        for request in parse_requests(_pairs(data)):
            assert ids.parse_interface_id(request.interface_id) == request.interface_id


def _settings(data: bytes) -> None:
    with suppress(SettingsError):
        load_settings({f"FPGA_PLUGIN_{k}": v for k, v in _pairs(data).items()})


def _ids(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    for read in (ids.parse_device_id, ids.parse_bitstream_id, ids.parse_hex128):
        with suppress(ValueError):
            value = read(text)
            assert value.isascii()
            assert not set(value) - set("0123456789abcdef-.p")


_SCRATCH = tempfile.TemporaryDirectory(prefix="fuzz-")


def _checkpoint(data: bytes) -> None:
    path = os.path.join(_SCRATCH.name, "kubelet_internal_checkpoint")
    with open(path, "wb") as file:
        file.write(data)
    with suppress(CheckpointUnreadableError):
        read_checkpoint(path, "fpga.intel.com")


_ENTRY = {
    "PodUID": "0f1e2d3c-0000-4000-8000-000000000001",
    "ContainerName": "c",
    "ResourceName": f"fpga.intel.com/region-{INTERFACE}",
    "DeviceIDs": {"-1": ["0000-10-00.0-p0"]},
    "AllocResp": "",
}

TARGETS = {
    "bitstream": Target(_bitstream, (GBS, aocx(gzip.compress(GBS, mtime=0)))),
    "packed": Target(_packed, (GBS, gzip.compress(GBS, mtime=0))),
    "elf": Target(_elf, (elf((".a", b"x")),)),
    "metadata": Target(_metadata, (json.dumps(DOCUMENT).encode(),)),
    "manifest": Target(
        _manifest, (write_manifest([ManifestFile(f"{INTERFACE}/blank.gbs", "1" * 64, 9)]),)
    ),
    "policy": Target(_policy, (b"-default: deny\nrules: []\n", b'{{"default":"deny","rules":[]}')),
    "requests": Target(
        _requests,
        (
            f"FPGA_REGION_1={INTERFACE}\0FPGA_AFU_1={AFU}\0FPGA_DRIVER_PARAMS_1=clock=200".encode(),
            f"FPGA_REGION_a={INTERFACE}\0FPGA_BITSTREAM_ID_a={'ab' * 20}".encode(),
        ),
    ),
    "settings": Target(
        _settings, (b"CARDS=0000:3b:00.0\0SIMULATED_CARDS=2x3\0HTTP_ADDRESS=:9102", b"SCRUB=x")
    ),
    "ids": Target(_ids, (b"0000-10-00.0-p0", AFU.encode(), b"ab" * 20)),
    "checkpoint": Target(
        _checkpoint,
        (json.dumps({"Data": {"PodDeviceEntries": [_ENTRY]}, "Checksum": 1}).encode(),),
    ),
}
