"""A store as an OCI artifact: one layer a file, whose title is its path in the store.

    oras push <host>/<repository>:<tag> manifest.json manifest.json.sig <interface id>/<id>.gbs ...

makes one (the annotation org.opencontainers.image.title is what `oras` and others write). The
manifest is foreign: nothing in it is a path before it was matched here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from fpga_plugin.bitstream.files import MAX_FILE_BYTES
from fpga_plugin.bitstream.manifest import BITSTREAM_PATH, MANIFEST, MAX_MANIFEST_BYTES
from fpga_plugin.bitstream.signatures import ENDING
from fpga_plugin.bitstream.trust import MAX_SIGNATURE_BYTES
from fpga_plugin.errors import BitstreamError, quote

TITLE: Final = "org.opencontainers.image.title"

MAX_FILES: Final = 20_000
"""As many as a manifest.json can name."""

_HINT: Final = (
    "an artifact of a store has one layer a file, titled <interface id>/<bitstream id>.gbs (or"
    " .aocx, blank.gbs, each with .sig), manifest.json or manifest.json.sig: push them with oras"
    " from within the store"
)


class _Layer(msgspec.Struct, frozen=True):
    digest: Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
    size: Annotated[int, msgspec.Meta(ge=0)]
    annotations: dict[str, str] = {}


class _Manifest(msgspec.Struct, frozen=True):
    schemaVersion: int  # noqa: N815  # the specification's name
    layers: list[_Layer] | None = None


_DECODER: Final = msgspec.json.Decoder(_Manifest)


@dataclass(frozen=True, slots=True)
class ArtifactFile:
    """What an artifact says of one file.

    Attributes:
        digest: `sha256:` and 64 digits.
        size: in bytes.
    """

    digest: str
    size: int


def files_of(data: bytes, *, where: str) -> Mapping[str, ArtifactFile]:
    """The files of a store's artifact, by path in the store.

    Raises:
        BitstreamError: it is none; the message says what is wrong with it.
    """
    try:
        manifest = _DECODER.decode(data)
    except (ValueError, RecursionError) as error:
        raise BitstreamError(f"{where}: no manifest of an artifact: {error}") from None
    if manifest.layers is None:
        raise BitstreamError(
            f"{where}: a list of images, not an artifact", hint="name the one that is meant"
        )
    files: dict[str, ArtifactFile] = {}
    for layer in manifest.layers:
        title = layer.annotations.get(TITLE, "")
        limit = _limit(title)
        if limit is None:
            raise BitstreamError(f"{where}: {quote(title)} is no file of a store", hint=_HINT)
        if layer.size > limit:
            raise BitstreamError(
                f"{where}: {title} has {layer.size} bytes; at most {limit} are read"
            )
        if title in files:
            raise BitstreamError(f"{where}: {title} is there twice")
        files[title] = ArtifactFile(layer.digest, layer.size)
    if not files or len(files) > MAX_FILES:
        raise BitstreamError(
            f"{where}: {len(files)} files; a store has 1 to {MAX_FILES}", hint=_HINT
        )
    return files


def _limit(title: str) -> int | None:
    """The most bytes that a file of this name may have; None: a store has no such file."""
    if title == MANIFEST:
        return MAX_MANIFEST_BYTES
    named = title.removesuffix(ENDING)
    if named != title:
        known = named == MANIFEST or re.fullmatch(BITSTREAM_PATH, named)
        return MAX_SIGNATURE_BYTES if known else None
    return MAX_FILE_BYTES if re.fullmatch(BITSTREAM_PATH, title) else None
