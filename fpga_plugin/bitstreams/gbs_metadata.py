"""What a GBS file says of itself: the JSON in its header.

The text comes from any writer of the store. It is read strictly (UTF-8, one object, no name
twice, the types of the schema) and becomes values with typed ids; what does not fit is refused with
the place where it stands. The schema is that of OPAE's packager (opae-sdk).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.errors import quote
from fpga_plugin.host import strict_json
from fpga_plugin.ids import AfuId, InterfaceId, parse_afu_id, parse_interface_id

MAGIC_NO = 488605312
"""`afu-image.magic-no`: 0x1d1f8680 (OPAE, xfpga bitstream.c, FPGA_GBS_6_3_0_MAGIC)."""

Frequency = float | str | None
"""MHz; or `auto`, `auto-<MHz>` where the build left it open; None: not said."""

IdT = TypeVar("IdT", AfuId, InterfaceId)

_ALL_ONES = "f" * 32

_PACK = (
    "pack the image with OPAE's packager: version 1, 640 or 650 of its schema is read, with the"
    f" magic number {MAGIC_NO}, and clocks in MHz or as auto[-MHz]"
)
_BUILD = "build the file again"


@dataclass(frozen=True, slots=True)
class Accelerator:
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
        version: of the schema, as the file writes it; old tools wrote 640 and 650 for 1.
        platform_name: for people; foreign text.
        interface_id: the static part that the image was built for.
        accelerators: at least one.
        power: watts, as the developer declared it; not measured.
        clock_frequency_high: the user clock that the image was built for.
        clock_frequency_low: its half-rate clock.
        top_interface: class of the AFU's top interface; foreign text.
    """

    version: int
    platform_name: str | None
    interface_id: InterfaceId
    accelerators: tuple[Accelerator, ...]
    power: float | None
    clock_frequency_high: Frequency
    clock_frequency_low: Frequency
    top_interface: str | None

    @property
    def afu_id(self) -> AfuId:
        """The id that a port shows: it has room for one, the first."""
        return self.accelerators[0].afu_id

    @property
    def total_contexts(self) -> int:
        """How many clients that one serves at once."""
        return self.accelerators[0].total_contexts


_Watts = Annotated[int, msgspec.Meta(ge=0)] | Annotated[float, msgspec.Meta(ge=0)]
_Frequency = _Watts | Annotated[str, msgspec.Meta(pattern=r"^auto(-[0-9]+(\.[0-9]+)?)?\Z")]


class _Cluster(msgspec.Struct, rename="kebab"):
    accelerator_type_uuid: str
    name: str
    total_contexts: Annotated[int, msgspec.Meta(ge=0)]


class _TopInterface(msgspec.Struct, rename="kebab"):
    # The schema once called it `name`; files of both kinds are about.
    class_: str | None = msgspec.field(name="class", default=None)
    name: str | None = None


class _AfuImage(msgspec.Struct, rename="kebab"):
    magic_no: Literal[488605312]
    interface_uuid: str
    # The first names the AFU id against which programming is verified.
    accelerator_clusters: Annotated[list[_Cluster], msgspec.Meta(min_length=1)]
    power: _Watts | None = None
    clock_frequency_high: _Frequency | None = None
    clock_frequency_low: _Frequency | None = None
    afu_top_interface: _TopInterface | None = None


class _Document(msgspec.Struct, rename="kebab"):
    version: Literal[1, 640, 650]
    afu_image: _AfuImage
    platform_name: str | None = None


_DOCUMENT = msgspec.json.Decoder(_Document)  # made at import: see kubernetes/kubelet/checkpoint.py


def _read_json(raw: ByteRange) -> bytes:
    """One JSON object, strictly: UTF-8, no name twice in an object, no NaN.

    Raises:
        RecursionError: it is nested too deeply.
        BitstreamError: it is something else; the message gives the byte of the file.
    """
    data = raw.read()
    try:
        text = data.decode()
        document = strict_json.load(text)
    except UnicodeDecodeError as error:
        raise raw.wrong(
            f"the metadata is not UTF-8 at byte {raw.start + error.start}", _BUILD
        ) from None
    except json.JSONDecodeError as error:
        at = raw.start + len(text[: error.pos].encode(errors="replace"))
        raise raw.wrong(f"the metadata is not JSON at byte {at}: {error.msg}", _BUILD) from None
    except (strict_json.RepeatedNameError, strict_json.NotANumberError) as error:
        raise raw.wrong(
            f"the metadata: {error}", "readers would disagree on it; build the file again"
        ) from None
    except ValueError:  # an integer of thousands of digits (CPython's limit of int())
        raise raw.wrong("the metadata has a number that is too long", _BUILD) from None
    if not isinstance(document, dict):
        raise raw.wrong(f"the metadata is not a JSON object (byte {raw.start})", _BUILD)
    return data


def parse_metadata(raw: ByteRange) -> GbsMetadata:
    """The metadata of a GBS file, from its JSON text.

    Raises:
        BitstreamError: it is malformed; the message gives the byte or the JSON path.
    """
    try:
        document = _DOCUMENT.decode(_read_json(raw))
    except msgspec.ValidationError as error:
        # msgspec names types and the schema's own fields here, nothing of the file's text.
        raise raw.wrong(f"the metadata does not fit the schema: {error}", _PACK) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # half of a surrogate pair
        raise raw.wrong(f"the metadata is not JSON: {error}", _BUILD) from None
    except RecursionError:
        raise raw.wrong("the metadata is nested too deeply", _BUILD) from None
    image = document.afu_image
    top = image.afu_top_interface
    return GbsMetadata(
        version=document.version,
        platform_name=document.platform_name,
        interface_id=_id(parse_interface_id, image.interface_uuid, raw, "interface-uuid"),
        accelerators=tuple(
            Accelerator(
                _id(
                    parse_afu_id,
                    cluster.accelerator_type_uuid,
                    raw,
                    f"accelerator-clusters[{index}].accelerator-type-uuid",
                ),
                cluster.name,
                cluster.total_contexts,
            )
            for index, cluster in enumerate(image.accelerator_clusters)
        ),
        power=image.power,
        clock_frequency_high=image.clock_frequency_high,
        clock_frequency_low=image.clock_frequency_low,
        top_interface=(top.class_ or top.name) if top else None,
    )


def _id(parse: Callable[[str], IdT], text: str, raw: ByteRange, path: str) -> IdT:
    try:
        value = parse(text)
    except ValueError as error:
        raise raw.wrong(f"$.afu-image.{path}: {quote(text)} is {error}", _PACK) from None
    if value == _ALL_ONES:
        raise raw.wrong(
            f"$.afu-image.{path}: all ones, which is what a card answers that has failed",
            "no card has it as its interface id"
            if parse is parse_interface_id
            else "no programming with it could be verified; give the accelerator an id of its own",
        )
    return value
