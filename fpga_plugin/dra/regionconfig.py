"""What claims and DeviceClasses ask for in `opaque` config: RegionConfig.

A claim names a bitstream and driver parameters for its devices. A class may pin the bitstream, or
list those among which the claim has to choose, and pin parameters. Unknown fields are refused: what
is misspelt would otherwise be passed over in silence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from fpga_plugin.errors import InvalidRequestError, NotPermittedError, quote
from fpga_plugin.hardware.backend import DriverSettings
from fpga_plugin.ids import BitstreamId, parse_bitstream_id

MAX_BYTES: Final = 10 << 10
"""Of one entry; the API server takes no more (resource.k8s.io/v1, OpaqueParametersMaxLength)."""

MAX_CHOICES: Final = 256
"""Bitstreams that one class may list."""

_CLOCK: Final = 1_000_000_000
"""More MHz are no clock of anything; the card's own limits are looked at later."""


_Choices: TypeAlias = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]


class _Params(msgspec.Struct, forbid_unknown_fields=True):
    clock: Annotated[int, msgspec.Meta(gt=0, le=_CLOCK)] | None = None
    debug: Literal[0, 1] | None = None


class _RegionConfig(msgspec.Struct, forbid_unknown_fields=True):
    apiVersion: Literal["fpga.intel.com/v1alpha1"]  # noqa: N815  # the API's own name
    kind: Literal["RegionConfig"]
    bitstream: str | None = None
    bitstreams: _Choices | None = None
    driverParams: _Params | None = None  # noqa: N815  # the API's own name


_CONFIG: Final = msgspec.json.Decoder(_RegionConfig)


@dataclass(frozen=True, slots=True)
class RegionConfig:
    """One entry, parsed.

    Attributes:
        bitstream: what to program; None: not said.
        choices: those among which a claim has to choose; None: any. Only of a class.
        clock: user clock in MHz; None: not said.
        debug: whether port errors are logged; None: not said.
    """

    bitstream: BitstreamId | None = None
    choices: frozenset[BitstreamId] | None = None
    clock: int | None = None
    debug: bool | None = None


def parse_config(raw: bytes, *, from_class: bool) -> RegionConfig:
    """An entry's parameters.

    Raises:
        InvalidRequestError: they are no RegionConfig of a version that is known, or make no sense.
    """
    where = "the DeviceClass" if from_class else "the claim"
    if len(raw) > MAX_BYTES:
        raise InvalidRequestError(f"config of {where} has more than {MAX_BYTES} bytes")
    try:
        return _parsed(_CONFIG.decode(raw), from_class=from_class)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"config of {where} is not understood: {quote(error)}",
            hint="docs/dra.md lists the fields of fpga.intel.com/v1alpha1 RegionConfig",
        ) from error


def _parsed(said: _RegionConfig, *, from_class: bool) -> RegionConfig:
    if said.bitstreams is not None:
        if not from_class:
            raise ValueError("bitstreams belongs into a DeviceClass: a claim names one bitstream")
        if said.bitstream is not None:
            raise ValueError("bitstream and bitstreams exclude each other")
    params = said.driverParams or _Params()
    return RegionConfig(
        bitstream=None if said.bitstream is None else parse_bitstream_id(said.bitstream),
        choices=(
            None
            if said.bitstreams is None
            else frozenset(parse_bitstream_id(text) for text in said.bitstreams)
        ),
        clock=params.clock,
        debug=None if params.debug is None else bool(params.debug),
    )


@dataclass(frozen=True, slots=True)
class DeviceTarget:
    """What one device is to become.

    Attributes:
        bitstream: None: blank.
        settings: driver parameters.
    """

    bitstream: BitstreamId | None = None
    settings: DriverSettings = field(default_factory=DriverSettings)


def merged(of_claim: Sequence[RegionConfig]) -> DeviceTarget:
    """What a claim asks for: of several entries the last that says something holds."""
    bitstream, clock, debug = None, None, None
    for one in of_claim:
        bitstream = bitstream if one.bitstream is None else one.bitstream
        clock = clock if one.clock is None else one.clock
        debug = debug if one.debug is None else one.debug
    return DeviceTarget(bitstream, DriverSettings(clock=clock, debug=bool(debug)))


def within(of_class: Iterable[RegionConfig], target: DeviceTarget, device: str) -> DeviceTarget:
    """A target as the class allows it, with what the class pins.

    Every entry of the class holds, whoever asks: a claim's config, or a container's variables.

    Raises:
        NotPermittedError: the class does not allow it.
    """
    bitstream, clock, debug = target.bitstream, target.settings.clock, target.settings.debug
    for one in of_class:
        if one.bitstream is not None:
            if bitstream not in {None, one.bitstream}:
                raise _not_in_class(device, bitstream, f"pins {one.bitstream}")
            bitstream = one.bitstream
        if one.clock is not None:
            if clock not in {None, one.clock}:
                raise _not_in_class(device, f"clock={clock}", f"pins clock={one.clock}")
            clock = one.clock
        if one.debug is not None:
            if debug and not one.debug:
                raise _not_in_class(device, "debug=1", "pins debug=0")
            debug = one.debug
    for one in of_class:
        if one.choices is not None and bitstream not in one.choices:
            asked = bitstream or "no bitstream"
            raise _not_in_class(device, asked, f"lists {len(one.choices)} others")
    return DeviceTarget(bitstream, DriverSettings(clock=clock, debug=debug))


def _not_in_class(device: str, asked: object, rule: str) -> NotPermittedError:
    return NotPermittedError(
        f"{device}: {asked} is asked for, and the DeviceClass {rule}",
        hint="ask for what the class allows, or use another class",
    )
