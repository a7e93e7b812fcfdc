"""What a GBS file says of itself: the JSON in its header.

The text comes from any writer of the store. It is read strictly (UTF-8, one object, no name
twice, the types of the schema) and becomes values with typed ids; what does not fit is refused with
the place where it stands. The schema is that of OPAE's packager (opae-sdk).
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from fpga_plugin.errors import BitstreamError, quote
from fpga_plugin.host import strict_json
from fpga_plugin.ids import AfuId, InterfaceId, parse_afu_id, parse_interface_id

MAGIC_NO = 488605312
"""`afu-image.magic-no`: 0x1d1f8680 (OPAE, xfpga bitstream.c, FPGA_GBS_6_3_0_MAGIC)."""

VERSIONS = (1, 640, 650)
"""Versions of the schema; 640 and 650 are what old tools wrote for the same fields as 1."""

Frequency = float | str | None
"""MHz; or `auto`, `auto-<MHz>` where the build left it open; None: not said."""

IdT = TypeVar("IdT", AfuId, InterfaceId)

_AUTO = re.compile(r"auto(-[0-9]+(\.[0-9]+)?)?", re.ASCII)
_ALL_ONES = "f" * 32


@dataclass(frozen=True, slots=True)
class Cluster:
    """One accelerator of an image.

    Attributes:
        afu_id: what the port's `afu_id` reads once the image is programmed.
        name: for people; foreign text.
        total_contexts: how many clients the accelerator serves at once.
    """

    afu_id: AfuId
    name: str
    total_contexts: int


@dataclass(frozen=True, slots=True)
class GbsMetadata:
    """What a GBS file says of its image.

    Attributes:
        version: of the schema, as the file writes it (one of `VERSIONS`).
        platform_name: for people; foreign text.
        interface_id: the static part that the image was built for.
        clusters: its accelerators; at least one.
        power: watts, as the developer declared it; not measured.
        clock_frequency_high: the user clock that the image was built for.
        clock_frequency_low: its half-rate clock.
        top_interface: class of the AFU's top interface; foreign text.
    """

    version: int
    platform_name: str | None
    interface_id: InterfaceId
    clusters: tuple[Cluster, ...]
    power: float | None
    clock_frequency_high: Frequency
    clock_frequency_low: Frequency
    top_interface: str | None

    @property
    def afu_id(self) -> AfuId:
        """The id that a port shows: it has room for one, the first."""
        return self.clusters[0].afu_id


class _Cluster(msgspec.Struct, rename="kebab"):
    accelerator_type_uuid: str
    name: str
    total_contexts: int


class _TopInterface(msgspec.Struct, rename="kebab"):
    # The schema once called it `name`; files of both kinds are about.
    class_: str | None = msgspec.field(name="class", default=None)
    name: str | None = None


class _AfuImage(msgspec.Struct, rename="kebab"):
    magic_no: int
    interface_uuid: str
    accelerator_clusters: list[_Cluster]
    power: int | float | None = None
    clock_frequency_high: int | float | str | None = None
    clock_frequency_low: int | float | str | None = None
    afu_top_interface: _TopInterface | None = None


class _Document(msgspec.Struct, rename="kebab"):
    version: int
    afu_image: _AfuImage
    platform_name: str | None = None


_DOCUMENT = msgspec.json.Decoder(_Document)  # made at import: see kubernetes/kubelet/checkpoint.py


def read_json(raw: bytes, *, where: str, offset: int = 0) -> dict[str, object]:
    """One JSON object, strictly: UTF-8, no name twice in an object, no NaN.

    Args:
        raw: the text.
        where: the file, for the message.
        offset: where `raw` begins in that file, for the message.

    Raises:
        BitstreamError: it is something else; the message gives the byte.
    """
    try:
        text = raw.decode()
        document = strict_json.load(text)
    except UnicodeDecodeError as error:
        raise BitstreamError(
            f"{where}: the metadata is not UTF-8 at byte {offset + error.start}"
        ) from None
    except json.JSONDecodeError as error:
        at = offset + len(text[: error.pos].encode(errors="replace"))
        raise BitstreamError(
            f"{where}: the metadata is not JSON at byte {at}: {error.msg}"
        ) from None
    except strict_json.RepeatedNameError as error:
        raise BitstreamError(
            f"{where}: the metadata has the name {error.name} twice in one object",
            hint="readers would disagree on which one counts; build the file again",
        ) from None
    except strict_json.NotANumberError:
        raise BitstreamError(
            f"{where}: the metadata has a NaN or an infinity, which JSON lacks"
        ) from None
    except RecursionError:
        raise BitstreamError(f"{where}: the metadata is nested too deeply") from None
    except ValueError:  # an integer of thousands of digits (CPython's limit of int())
        raise BitstreamError(f"{where}: the metadata has a number that is too long") from None
    if not isinstance(document, dict):
        raise BitstreamError(
            f"{where}: the metadata is not a JSON object (byte {offset})",
        )
    return document


def parse_metadata(raw: bytes, *, where: str, offset: int = 0) -> GbsMetadata:
    """The metadata of a GBS file.

    Args:
        raw: the JSON text.
        where: the file, for the message.
        offset: where `raw` begins in that file, for the message.

    Raises:
        BitstreamError: it is malformed; the message gives the byte or the JSON path.
    """
    read_json(raw, where=where, offset=offset)
    try:
        document = _DOCUMENT.decode(raw)
    except msgspec.ValidationError as error:
        # msgspec names types and the schema's own fields here, nothing of the file's text.
        raise BitstreamError(f"{where}: the metadata does not fit the schema: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # half of a surrogate pair
        raise BitstreamError(f"{where}: the metadata is not JSON: {error}") from None
    except RecursionError:
        raise BitstreamError(f"{where}: the metadata is nested too deeply") from None
    return _checked(document, where)


def _checked(document: _Document, where: str) -> GbsMetadata:
    """Check what types cannot say, in the order in which a reader of the file meets it."""
    image = document.afu_image
    if document.version not in VERSIONS:
        raise BitstreamError(
            f"{where}: $.version: {document.version} is unknown",
            hint=f"this version reads {', '.join(map(str, VERSIONS))}",
        )
    if image.magic_no != MAGIC_NO:
        raise BitstreamError(
            f"{where}: $.afu-image.magic-no: {image.magic_no} instead of {MAGIC_NO}",
            hint="the file was not made for these cards, or it is damaged",
        )
    if not image.accelerator_clusters:
        raise BitstreamError(
            f"{where}: $.afu-image.accelerator-clusters: none",
            hint="the first names the AFU id against which programming is verified",
        )
    top = image.afu_top_interface
    return GbsMetadata(
        version=document.version,
        platform_name=document.platform_name,
        interface_id=_id(parse_interface_id, image.interface_uuid, where, "interface-uuid"),
        clusters=tuple(
            _cluster(cluster, where, f"accelerator-clusters[{index}]")
            for index, cluster in enumerate(image.accelerator_clusters)
        ),
        power=_not_negative(image.power, where, "power"),
        clock_frequency_high=_frequency(image.clock_frequency_high, where, "clock-frequency-high"),
        clock_frequency_low=_frequency(image.clock_frequency_low, where, "clock-frequency-low"),
        top_interface=(top.class_ or top.name) if top else None,
    )


def _cluster(cluster: _Cluster, where: str, path: str) -> Cluster:
    afu_id = _id(
        parse_afu_id, cluster.accelerator_type_uuid, where, f"{path}.accelerator-type-uuid"
    )
    if cluster.total_contexts < 0:
        raise BitstreamError(f"{where}: $.afu-image.{path}.total-contexts: negative")
    return Cluster(afu_id=afu_id, name=cluster.name, total_contexts=cluster.total_contexts)


def _id(parse: Callable[[str], IdT], text: str, where: str, path: str) -> IdT:
    try:
        value = parse(text)
    except ValueError as error:
        raise BitstreamError(f"{where}: $.afu-image.{path}: {quote(text)} is {error}") from None
    if value == _ALL_ONES:
        raise BitstreamError(
            f"{where}: $.afu-image.{path}: all ones, which is what a card answers that has failed",
            hint="no card has it as its interface id"
            if parse is parse_interface_id
            else "no programming with it could be verified; give the accelerator an id of its own",
        )
    return value


def _not_negative(value: float | None, where: str, path: str) -> float | None:
    if value is not None and value < 0:
        raise BitstreamError(f"{where}: $.afu-image.{path}: negative")
    return value


def _frequency(value: Frequency, where: str, path: str) -> Frequency:
    if isinstance(value, str):
        if not _AUTO.fullmatch(value):
            raise BitstreamError(
                f"{where}: $.afu-image.{path}: {quote(value)} is neither MHz nor auto[-MHz]"
            )
        return value
    return _not_negative(value, where, path)
