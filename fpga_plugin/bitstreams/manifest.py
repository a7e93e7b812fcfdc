"""`manifest.json`: what the operator says is in a store.

    {"format": 2,
     "version": 1795000000000,
     "expires": "2027-01-31T00:00:00Z",
     "revoked": ["<interface id>/<bitstream id>.gbs"],
     "interfaces": [{"id": "<interface id>", "alias": "n6001-base"}],
     "files": [{"path": "<interface id>/<bitstream id>.gbs", "sha256": "<64 hex>", "size": 4096,
                "alias": "compress"}]}

A file that it names must be that file, whatever the trust mode; which files need to be named is the
mode's to say (`bitstreams.trust`). Each manifest of a store has a higher version than the one
before, so that an old one with its signature is not taken for the present one. `revoked` has what
earlier ones named and this one does not. `alias` is what pods may ask for in place of the bitstream
id; of one interface id, no two files have the same. `interfaces` says what people call interface
ids; no two have the same alias. `expires`, `revoked`, `interfaces` and `alias` may be left out.

Strict, because a manifest that is misread guards nothing: unknown fields,
a path twice, or a path that no bitstream can have are errors.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from typing import Annotated, Literal, TypeAlias

import msgspec

from fpga_plugin.bitstreams.places import Place, find_place
from fpga_plugin.errors import BitstreamError, quote
from fpga_plugin.ids import (
    Alias,
    BitstreamId,
    InterfaceId,
    parse_alias,
    parse_interface_id,
)

MANIFEST = "manifest.json"
"""Its name, in the store's root."""

MAX_MANIFEST_BYTES = 4 << 20
"""Some 20,000 files; it is read on the way to a PreStart when it changed."""

MAX_INTERFACES = 500
"""That have names: each is some resources in the journal, and kinds of cards are few."""

MAX_VERSION = (1 << 53) - 1
"""The largest number that every reader of JSON has exactly (RFC 8259, section 6)."""

_HINT = "write it again with `fpga-plugin bitstream sign --manifest`"

Aliases: TypeAlias = Mapping[tuple[InterfaceId, Alias], BitstreamId]
"""Bitstreams by the cards that they are for, and by what people call them."""

InterfaceAliases: TypeAlias = Mapping[InterfaceId, Alias]
"""What people call interface ids; no two the same."""

_Path = Annotated[str, msgspec.Meta(max_length=128)]
_Alias = Annotated[str, msgspec.Meta(max_length=31)]
_Version = Annotated[int, msgspec.Meta(ge=1, le=MAX_VERSION)]


class ManifestFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a manifest says of one file.

    Attributes:
        path: from the store's root.
        sha256: of all its bytes, 64 lower-case hex digits.
        size: in bytes.
        alias: what people call it; None: nothing.
    """

    path: _Path
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    size: Annotated[int, msgspec.Meta(ge=0)]
    alias: _Alias | None = None


class _Interface(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[str, msgspec.Meta(max_length=32)]
    alias: _Alias


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal[2]
    version: _Version
    files: list[ManifestFile]
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    revoked: list[_Path] = []
    interfaces: list[_Interface] = []


_DOCUMENT = msgspec.json.Decoder(_Document)  # made at import: see kubernetes/kubelet/checkpoint.py


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a store should have.

    Attributes:
        files: by path from its root.
        version: higher than that of every manifest before; 0: there is no manifest.
        expires: from when on it counts no more, in UTC; None: never.
        revoked: paths that earlier manifests named and this one does not.
        aliases: bitstreams by interface id and what people call them; of `files`.
        interfaces: what people call interface ids.
    """

    files: Mapping[str, ManifestFile]
    version: int = 0
    expires: datetime | None = None
    revoked: frozenset[str] = frozenset()
    aliases: Aliases = field(default_factory=dict, compare=False)
    interfaces: InterfaceAliases = field(default_factory=dict)


def manifest_path(root: str) -> str:
    """Where a store's manifest is."""
    return os.path.join(root, MANIFEST)


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """Read a manifest.

    Raises:
        BitstreamError: it is none; the message says what is wrong with it.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise BitstreamError(f"{where}: {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are read")
    try:
        return _parse(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise BitstreamError(f"{where}: not a manifest: {quote(error)}", hint=_HINT) from None
    except ValueError as error:
        raise BitstreamError(f"{where}: {error}", hint=_HINT) from None


def _parse(data: bytes) -> Manifest:
    """Raises ValueError where it could be misunderstood, and what msgspec raises."""
    document = _DOCUMENT.decode(data)
    files = _by_path(document.files)
    for path in document.revoked:
        _place(path)
        if path in files:
            raise ValueError(f"names and revokes {path}")
    return Manifest(
        files,
        document.version,
        document.expires and document.expires.astimezone(UTC),
        frozenset(document.revoked),
        _aliases(files),
        _interfaces(document.interfaces),
    )


def _by_path(listed: Iterable[ManifestFile]) -> dict[str, ManifestFile]:
    files: dict[str, ManifestFile] = {}
    for file in listed:
        _place(file.path)
        if file.path in files:
            raise ValueError(f"names {file.path} twice")
        files[file.path] = file
    return files


def _aliases(files: Mapping[str, ManifestFile]) -> Aliases:
    """What the files are called, by interface id and alias."""
    found: dict[tuple[InterfaceId, Alias], BitstreamId] = {}
    for path, file in files.items():
        if file.alias is None:
            continue
        place = _place(path)
        if place.bitstream_id is None:
            raise ValueError(f"{path}: a blank bitstream has no alias")
        key = place.interface_id, _alias(file.alias, path)
        if key in found:
            raise ValueError(f"two files of {place.interface_id} have the alias {file.alias}")
        found[key] = place.bitstream_id
    return found


def _interfaces(listed: Sequence[_Interface]) -> InterfaceAliases:
    """What interface ids are called."""
    found: dict[InterfaceId, Alias] = {}
    if len(listed) > MAX_INTERFACES:
        raise ValueError(f"names {len(listed)} interface ids, and {MAX_INTERFACES} are the most")
    for one in listed:
        alias = _alias(one.alias, f"interface id {quote(one.id)}")
        try:
            interface_id = parse_interface_id(one.id)
        except ValueError as error:
            raise ValueError(f"interface id {quote(one.id)} is {error}") from None
        if interface_id in found:
            raise ValueError(f"gives the interface id {interface_id} two aliases")
        if alias in found.values():
            raise ValueError(f"two interface ids have the alias {alias}")
        found[interface_id] = alias
    return found


def _alias(text: str, of: str) -> Alias:
    try:
        return parse_alias(text)
    except ValueError as error:
        raise ValueError(f"{of}: alias {quote(text)}: {error}") from None


def _place(path: str) -> Place:
    if (place := find_place(path)) is None:
        raise ValueError(
            f"{quote(path)} is no bitstream's path in a store, as <interface id>/<bitstream id>.gbs"
        )
    return place


def write_manifest(
    files: Iterable[ManifestFile],
    *,
    version: int = 1,
    expires: datetime | None = None,
    revoked: Iterable[str] = (),
    interfaces: InterfaceAliases | None = None,
) -> bytes:
    """The text of a manifest: one file a line, in order of path, so that changes can be read."""
    fields: dict[str, object] = {"format": 2, "version": version}
    if expires is not None:
        fields["expires"] = in_utc(expires)
    lists: dict[str, Sequence[object]] = {
        "revoked": sorted(revoked),
        "interfaces": [{"id": one, "alias": of} for one, of in sorted((interfaces or {}).items())],
        "files": sorted(files, key=attrgetter("path")),
    }
    lines = [f'  "{name}": {json.dumps(value)}' for name, value in fields.items()]
    for name, values in lists.items():
        if values or name == "files":
            lines.append(f'  "{name}": {_array(values)}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def in_utc(time: datetime) -> str:
    """A time as manifests have it and messages show it: RFC 3339, in UTC, whole seconds."""
    return f"{time.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat()}Z"


def _array(values: Iterable[object]) -> str:
    lines = [f"    {json.dumps(msgspec.to_builtins(value))}" for value in values]
    return "[\n" + ",\n".join(lines) + "\n  ]" if lines else "[]"
