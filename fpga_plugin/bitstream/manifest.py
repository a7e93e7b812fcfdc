"""`manifest.json`: what the operator says is in a store.

    {"version": 1,
     "files": [{"path": "<interface id>/<bitstream id>.gbs", "sha256": "<64 hex>", "size": 4096}]}

A file that it names must be that file, whatever the trust mode; which files need to be named is the
mode's to say (`bitstream.trust`). Strict, because a manifest that is read otherwise than it was
meant guards nothing: unknown fields, a path twice, or a path that no bitstream can have are errors.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from fpga_plugin.errors import BitstreamError, quote

MANIFEST = "manifest.json"
"""Its name, in the store's root."""

MAX_MANIFEST_BYTES = 4 << 20
"""Some 20,000 files; it is read on the way to a PreStart when it changed."""

_PATH = re.compile(r"[0-9a-f]{32}/(blank\.gbs|[0-9a-f]{32}\.gbs|[0-9a-f]{40}\.aocx)", re.ASCII)
_HINT = "write it anew with `fpga-plugin bitstream sign --manifest`"


class ManifestFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a manifest says of one file.

    Attributes:
        path: from the store's root.
        sha256: of all its bytes, 64 lower-case hex digits.
        size: in bytes.
    """

    path: Annotated[str, msgspec.Meta(max_length=128)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    size: Annotated[int, msgspec.Meta(ge=0)]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    files: list[ManifestFile]


_DOCUMENT = msgspec.json.Decoder(_Document)  # made at import: see pods/checkpoint.py


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a store should have, by path from its root."""

    files: Mapping[str, ManifestFile]


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """Read a manifest.

    Raises:
        BitstreamError: it is none; the message says what is wrong with it.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise BitstreamError(f"{where}: {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are read")
    try:
        document = _DOCUMENT.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BitstreamError(f"{where}: not a manifest: {quote(error)}", hint=_HINT) from None
    files: dict[str, ManifestFile] = {}
    for file in document.files:
        if not _PATH.fullmatch(file.path):
            raise BitstreamError(
                f"{where}: {quote(file.path)} is no bitstream's path in a store",
                hint="paths are <interface id>/<bitstream id>.gbs or .aocx, or"
                " <interface id>/blank.gbs",
            )
        if file.path in files:
            raise BitstreamError(f"{where}: names {file.path} twice", hint=_HINT)
        files[file.path] = file
    return Manifest(files)


def write_manifest(files: Iterable[ManifestFile]) -> bytes:
    """The text of a manifest: one file a line, in order of path, so that changes can be read."""
    lines = ",\n".join(
        f"    {json.dumps(msgspec.to_builtins(file))}"
        for file in sorted(files, key=lambda file: file.path)
    )
    body = f"[\n{lines}\n  ]" if lines else "[]"
    return f'{{\n  "version": 1,\n  "files": {body}\n}}\n'.encode()


def manifest_path(root: str) -> str:
    """Where a store's manifest is."""
    return os.path.join(root, MANIFEST)
