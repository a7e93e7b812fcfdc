"""What an operator puts there: bitstreams, manifests, keys, policies, settings, Pod manifests."""

import gzip
import json
import os
import tempfile
from contextlib import suppress
from datetime import UTC, datetime

import msgspec
from doubles import xclbins
from doubles.bitstreams import AFU, DOCUMENT, GBS, INTERFACE, aocx, elf
from target import Target, pairs

from fpga_plugin import ids
from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.device_tree import nodes
from fpga_plugin.bitstreams.elf import sections
from fpga_plugin.bitstreams.facts import inspected, lines_of
from fpga_plugin.bitstreams.files import content_of
from fpga_plugin.bitstreams.gbs_metadata import parse_metadata
from fpga_plugin.bitstreams.kinds import image_of
from fpga_plugin.bitstreams.library import Library
from fpga_plugin.bitstreams.manifest import ManifestFile, parse_manifest, write_manifest
from fpga_plugin.bitstreams.seen_manifests import SEEN, SeenManifests
from fpga_plugin.bitstreams.signatures import load_keys
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.bitstreams.xclbin import XCLBIN
from fpga_plugin.bitstreams.xclbin_kernels import read_kernels
from fpga_plugin.demo.pod_manifest import ManifestError, read_manifest
from fpga_plugin.errors import (
    BitstreamError,
    BitstreamNotFoundError,
    NotPermittedError,
    SettingsError,
)
from fpga_plugin.hardware.image import Xclbin
from fpga_plugin.policy.parse import PolicyError, parse_policy
from fpga_plugin.policy.rules import Ask
from fpga_plugin.settings.settings import TrustMode, load_settings

_SCRATCH = tempfile.TemporaryDirectory(prefix="fuzz-")


def scratch(name: str, data: bytes) -> str:
    """A file with these bytes; returns its path."""
    path = os.path.join(_SCRATCH.name, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    return path


def _bitstream(data: bytes) -> None:
    with suppress(BitstreamError):
        found, image = image_of(data, "f")
        assert image.data
        assert ids.parse_bitstream_id(found.bitstream_id) == found.bitstream_id


def _xclbin(data: bytes) -> None:
    with suppress(BitstreamError):
        found, image = image_of(data, "f")
        assert isinstance(image, Xclbin) or found.kind is not XCLBIN
        list(lines_of(found))
        msgspec.json.encode(inspected("f", found, content_of(data)))


def _kernels(data: bytes) -> None:
    with suppress(BitstreamError):
        found = read_kernels(ByteRange.of_bytes(data, "f"))
        assert 512 <= found.slot_size <= 65536
        for kernel in found.kernels:
            sizes = [argument.offset + argument.size for argument in kernel.arguments]
            assert all(0 <= size < 1 << 33 for size in sizes)


def _device_tree(data: bytes) -> None:
    with suppress(BitstreamError):
        assert [node.path for node in nodes(ByteRange.of_bytes(data, "f"))][-1] == ()


def _packed(data: bytes) -> None:
    _bitstream(aocx(data))
    _bitstream(aocx(gzip.compress(data, 1, mtime=0)))


def _elf(data: bytes) -> None:
    with suppress(BitstreamError):
        found = sections(ByteRange.of_bytes(data, "f"))
        assert all(len(content.read()) == content.size for content in found.values())


def _metadata(data: bytes) -> None:
    with suppress(BitstreamError):
        assert parse_metadata(ByteRange.of_bytes(data, "f")).accelerators


def _manifest(data: bytes) -> None:
    with suppress(BitstreamError):
        read = parse_manifest(data, where="f")
        written = write_manifest(
            read.files.values(),
            version=read.version,
            expires=read.expires,
            revoked=read.revoked,
        )
        again = parse_manifest(written, where="f")
        assert (again.files, again.revoked) == (read.files, read.revoked)
        assert again.version == read.version
        assert again.expires == (read.expires and read.expires.replace(microsecond=0))


def _seen(data: bytes) -> None:
    """What a node remembers of manifests; a record that makes no sense trusts nothing."""
    directory = os.path.dirname(scratch(f"state/{SEEN}", data))
    with suppress(NotPermittedError):
        seen = SeenManifests(directory, owner=False).get()
        assert seen.version >= 0
        assert seen.has_named("") == (seen.all_named or "" in seen.named)


def _policy(data: bytes) -> None:
    with suppress(PolicyError):
        policy = parse_policy(data[1:], as_json=data[:1] == b"{")
        for kind in ids.ResourceKind:
            ask = Ask(kind=kind, interface_id=INTERFACE, bitstream_id=ids.BitstreamId(AFU))
            assert policy.judge("team-a", ask) == policy.judge("team-a", ask)


def _settings(data: bytes) -> None:
    with suppress(SettingsError):
        load_settings({f"FPGA_PLUGIN_{k}": v for k, v in pairs(data).items()})


def _keys(data: bytes) -> None:
    keys = load_keys(os.path.dirname(scratch("keys/a.pem", data)), guarded=False)
    assert len(keys.keys) + len(keys.problems) == 1


def _index(data: bytes) -> None:
    """Verdicts of an earlier life; whatever they say, nothing is programmed by them alone."""
    directory = scratch("verified.json", data).removesuffix(".json")
    root = os.path.join(_SCRATCH.name, "store")
    os.makedirs(root, exist_ok=True)
    trust = Trust(root, TrustMode.ANY, None)
    library = Library(root, directory=directory, limit=1 << 20, trust=trust, guarded=False)
    try:
        library.load(INTERFACE, None)
    except BitstreamNotFoundError:
        return
    raise AssertionError("there is no such file")


def _pod_manifest(data: bytes) -> None:
    with suppress(ManifestError):
        assert read_manifest(scratch("pod.yaml", data), "fpga.intel.com").pod.containers


_PEM = (
    b"-----BEGIN PUBLIC KEY-----\n"
    b"MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n"
    b"-----END PUBLIC KEY-----\n"
)
_INDEX = msgspec.json.encode(
    {
        f"{INTERFACE}/blank.gbs": {
            "version": [1] * 7,
            "trust": "",
            "content": {"sha256": "1" * 64, "size": 1},
            "cached": "1" * 64,
        }
    }
)
_POD = f"""\
apiVersion: v1
kind: Pod
metadata: {{name: a}}
spec:
  initContainers: [{{name: i, image: i}}]
  containers:
  - name: c
    image: c
    resources: {{limits: {{fpga.intel.com/region-{INTERFACE}: 1}}}}
    env: [{{name: FPGA_REGION_1, value: {INTERFACE}}}, {{name: X, valueFrom: {{}}}}]
""".encode()
_METADATA = tuple(
    f'"{name}"'.encode()
    for name in (
        *("version", "platform-name", "afu-image", "magic-no", "interface-uuid", "power"),
        *("accelerator-clusters", "accelerator-type-uuid", "name", "total-contexts"),
        *("clock-frequency-high", "clock-frequency-low", "afu-top-interface", "class", "auto-1.5"),
    )
)
_SECTIONS = (b".acl.rand_hash", b".acl.fpga.bin", b".acl.gbs.gz", b"\x7fELF\2\1\1")
_WORDS_OF_POLICY = tuple(
    word.encode()
    for word in (
        *("version", "default", "rules", "name", "action", "namespaces", "interfaces"),
        *(
            "bitstreams",
            "devices",
            "allow",
            "deny",
            "region",
            "whole",
            "blank",
            "team-*",
            "&a",
            "*a",
        ),
        *("<<: ", "!!python/object", "- ", "{{", "[", AFU, INTERFACE),
    )
)
_WORDS_OF_SETTINGS = tuple(
    f"{word}=".encode()
    for word in (
        *("RESOURCE_PREFIX", "ADVERTISE", "BACKEND", "CARDS", "OBSERVE", "SYSFS_ROOT", "SCRUB"),
        *("BITSTREAM_DIR", "RECOVERY", "RECONCILE_INTERVAL", "HTTP_ADDRESS", "LOG_LEVEL", "TRUST"),
        *("SIMULATED_CARDS", "VERIFIED_SIZE", "HEALTH_INTERVAL", "KEYS_DIR", "POLICY_FILE"),
    )
)

TARGETS = {
    "bitstream": Target(_bitstream, (GBS, aocx(gzip.compress(GBS, mtime=0))), _SECTIONS),
    "xclbin": Target(
        _xclbin,
        (
            xclbins.xclbin(),
            xclbins.axlf(
                xclbins.parts(
                    image=b"",
                    xml=xclbins.metadata(xclbins.kernel("k", (), registers=None)),
                    banks=xclbins.memory((1, 1, 1, 0, "bank0"), (3, 1, 1, 0, "s")),
                    layout=xclbins.units((1, 0x100, 0, "k:k")),
                ).values()
            ),
        ),
        (b"xclbin2\0", b"\xff" * 4, b"interface_uuid\0", b"\0\0\0\x03", b"<kernel", b"HOST[0]"),
    ),
    "kernels": Target(
        _kernels,
        (
            xclbins.metadata(xclbins.kernel()),
            xclbins.metadata(
                xclbins.kernel("a", (("x", "", 0, 4), ("y", 0, 8, 4), ("z", 0, "0x4", 4))),
                xclbins.kernel("b", (), registers=None, instances=9, swReset="true"),
            ),
        ),
        tuple(
            word.encode()
            for word in (
                *("<project", "<platform", "<device", "<core", "<kernel", "<arg", "<port", "/>"),
                *("<instance", "<addrRemap", ' name="', ' mode="slave"', ' range="0x', ' id="'),
                *(' offset="', ' size="', ' base="', ' swReset="true"', "<!DOCTYPE", "<![CDATA["),
                *("<!--", "-->", "&#x41;", "&amp;", "0xFFFFFFFF", "<?xml version='1.0'?>", "]]>"),
            )
        ),
    ),
    "device-tree": Target(
        _device_tree,
        (xclbins.partition(xclbins.ALVEO), xclbins.device_tree(("", {}, ()), version=16)),
        (b"\xd0\x0d\xfe\xed", b"\0\0\0\x01", b"\0\0\0\x02", b"\0\0\0\x03", b"\0\0\0\x09"),
    ),
    "packed": Target(_packed, (GBS, gzip.compress(GBS, mtime=0)), _METADATA),
    "elf": Target(_elf, (elf((".a", b"x")),), _SECTIONS),
    "metadata": Target(_metadata, (json.dumps(DOCUMENT).encode(),), _METADATA),
    "manifest": Target(
        _manifest,
        (
            write_manifest(
                [ManifestFile(f"{INTERFACE}/blank.gbs", "1" * 64, 9)],
                expires=datetime(2027, 1, 31, tzinfo=UTC),
                revoked=[f"{INTERFACE}/{AFU}.gbs"],
            ),
            b'{"version": 1, "files": []}',
        ),
        (
            *(b'"format"', b'"version"', b'"expires"', b'"revoked"', b'"files"', b'"path"'),
            *(b'"sha256"', b'"size"', b"blank.gbs", b"../", b"+14:00"),
        ),
    ),
    "seen": Target(
        _seen,
        (b'{"format":1,"version":5,"sha256":"a","expires":1,"expired":true,"named":["a"]}', b"{}"),
        (b'"format"', b'"version"', b'"named"', b'"all_named"', b'"expires"', b"null"),
    ),
    "index": Target(_index, (_INDEX, b"{}"), (b'"content"', b'"cached"', b'"version"', b'"size"')),
    "keys": Target(_keys, (_PEM, _PEM.replace(b"PUBLIC", b"PRIVATE"))),
    "policy": Target(
        _policy,
        (
            b"-version: 1\ndefault: deny\nrules: []\n",
            b'{{"version":"1","default":"deny","rules":[]}',
            b"-version: 1\ndefault: deny\nrules:\n- {name: a, action: allow, namespaces: [team-*],"
            b" interfaces: [" + INTERFACE.encode() + b"], bitstreams: [blank], devices: [region]}",
        ),
        _WORDS_OF_POLICY,
    ),
    "settings": Target(
        _settings,
        (b"CARDS=0000:3b:00.0\0SIMULATED_CARDS=2x3\0HTTP_ADDRESS=:9102", b"SCRUB=x"),
        _WORDS_OF_SETTINGS,
    ),
    "pod-manifest": Target(_pod_manifest, (_POD,), (b"containers", b"env", b"&a", b"*a", b"<<: ")),
}
