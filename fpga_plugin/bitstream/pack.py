"""The packer: metadata and a raw image become a GBS file.

The metadata is a JSON document in the form of OPAE's AFU descriptions, which lack the interface id
and the magic number until they are packed. What the packer wrote it reads again with the strict
reader, so a file of ours is never one that we would refuse. The same input gives the same bytes.
"""

import json
from collections.abc import Mapping

from fpga_plugin.bitstream.gbs import (
    GUID,
    MAX_METADATA_BYTES,
    container_of,
    parse_gbs,
)
from fpga_plugin.bitstream.metadata import MAGIC_NO, Frequency
from fpga_plugin.errors import BitstreamError
from fpga_plugin.ids import AfuId, InterfaceId, parse_hex128


def dashed(text: str) -> str:
    """128 bits in the 8-4-4-4-12 form in which OPAE's tools write them.

    Raises:
        ValueError: `text` is no 128-bit id.
    """
    digits = parse_hex128(text)
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def complete_document(
    document: Mapping[str, object],
    *,
    where: str,
    interface_id: InterfaceId | None = None,
    afu_id: AfuId | None = None,
    name: str | None = None,
    platform_name: str | None = None,
    power: float | None = None,
    clock_frequency_high: Frequency = None,
    clock_frequency_low: Frequency = None,
) -> dict[str, object]:
    """An AFU description with what is given here put in, and what never varies filled in.

    Args:
        document: an AFU description, perhaps empty; it stays as it is.
        where: where it comes from, for the message.
        interface_id: what the image was built for.
        afu_id: of the accelerator.
        name: of the accelerator, for people.
        platform_name: for people.
        power: watts.
        clock_frequency_high: MHz.
        clock_frequency_low: MHz.

    Raises:
        BitstreamError: an id is missing, or the description's parts are of the wrong kind.
    """
    image = _object(document.get("afu-image", {}), where, "$.afu-image")
    clusters = image.get("accelerator-clusters", [{}])
    if not isinstance(clusters, list) or not clusters:
        raise BitstreamError(f"{where}: $.afu-image.accelerator-clusters: not a list with one")
    cluster = _object(clusters[0], where, "$.afu-image.accelerator-clusters[0]")
    _put(cluster, "accelerator-type-uuid", dashed(afu_id) if afu_id else None)
    _put(cluster, "name", name, default="afu")
    _put(cluster, "total-contexts", None, default=1)
    _put(image, "interface-uuid", dashed(interface_id) if interface_id else None)
    for target, key, option in (
        (cluster, "accelerator-type-uuid", "--afu-id"),
        (image, "interface-uuid", "--interface-id"),
    ):
        if key not in target:
            raise BitstreamError(f"{where}: has no {key}", hint=f"put it in, or give {option}")
    _put(image, "magic-no", None, default=MAGIC_NO)
    _put(image, "power", power)
    _put(image, "clock-frequency-high", clock_frequency_high)
    _put(image, "clock-frequency-low", clock_frequency_low)
    result = dict(document)
    _put(result, "version", None, default=1)
    _put(result, "platform-name", platform_name)
    return {**result, "afu-image": {**image, "accelerator-clusters": [cluster, *clusters[1:]]}}


def pack_gbs(document: Mapping[str, object], image: bytes, *, where: str) -> bytes:
    """A GBS file of a complete description and a raw image.

    Args:
        document: as `complete_document` makes it.
        image: raw image (RBF).
        where: what is packed, for the message.

    Raises:
        BitstreamError: the result would be no valid GBS file, or the image is a container already.
    """
    if container := container_of(image):
        raise BitstreamError(
            f"{where}: the image is {container}, not a raw one",
            hint="pack takes the raw image (RBF) that the FPGA tools wrote",
        )
    try:
        text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise BitstreamError(f"{where}: the metadata cannot be written as JSON") from error
    if len(text) > MAX_METADATA_BYTES:
        raise BitstreamError(
            f"{where}: the metadata has {len(text)} bytes, {MAX_METADATA_BYTES} are allowed",
            hint="leave out what the card's tools do not need",
        )
    data = b"".join((GUID, len(text).to_bytes(4, "little"), text, image))
    parse_gbs(data, where=where)
    return data


def _object(value: object, where: str, path: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise BitstreamError(f"{where}: {path}: not an object")
    return dict(value)


def _put(target: dict[str, object], name: str, value: object, *, default: object = None) -> None:
    """Set `name` to a value that is given; else to the default, unless it is there already."""
    if value is not None:
        target[name] = value
    elif default is not None:
        target.setdefault(name, default)
