"""What a container asks for: its FPGA_* environment variables, and which region gets what.

`FPGA_REGION_<n>` with `FPGA_BITSTREAM_ID_<n>` (the name in the resource-configuration KEP) or
`FPGA_AFU_<n>` (the Intel plugin's name) is one request; `FPGA_DRIVER_PARAMS_<n>` belongs to it.
docs/requests.md has the rules.

Names and values are the tenant's: any characters, any length. They leave this module only as typed
values, and messages quote at most 64 characters of them. Numbers are compared as text, because
`int` takes signs, blanks, underscores and foreign digits, and refuses more than 4300 digits.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fpga_plugin.errors import MAX_QUOTED, InvalidRequestError, RefusedError, quote
from fpga_plugin.hardware.backend import ClockLimits, DriverSettings
from fpga_plugin.ids import (
    Alias,
    BitstreamId,
    DeviceId,
    InterfaceId,
    RegionId,
    parse_alias,
    parse_bitstream_id,
    parse_interface_id,
)

_REGION: Final = "FPGA_REGION_"
_BITSTREAM: Final = "FPGA_BITSTREAM_ID_"
_AFU: Final = "FPGA_AFU_"
_PARAMS: Final = "FPGA_DRIVER_PARAMS_"
REQUEST_PREFIXES: Final = (_REGION, _BITSTREAM, _AFU, _PARAMS)
"""What the names of request variables begin with; the rest of such a name may be wrong.

None is the beginning of another, so each variable is of one kind at most.
"""

_SUFFIX: Final = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
_DIGITS: Final = re.compile(r"[0-9]+", re.ASCII)

_SETTINGS: Final = {
    "clock": (
        re.compile(r"0*([0-9]{1,9})", re.ASCII),
        "a whole number of MHz, of at most 9 digits",
    ),
    "debug": (re.compile(r"([01])"), "0 or 1"),
}
"""The driver parameters: what a value looks like, in the number of its group, and in words."""

_PARAMS_RULE: Final = "write name=value, separated by commas, without blanks: clock=400,debug=1"


@dataclass(frozen=True, slots=True)
class NamedBitstream:
    """A bitstream that is asked for by what people call it.

    Attributes:
        alias: what they call it; which it is, the store's manifest says (`cards.targets`).
        variable: by which it is asked for, cut to what a message may quote.
    """

    alias: Alias
    variable: str = field(compare=False)

    def __str__(self) -> str:
        return self.alias


@dataclass(frozen=True, slots=True, kw_only=True)
class FpgaRequest:
    """One programmed region that a container asks for.

    Attributes:
        suffix: what its variables' names end with; letters, digits, `_`; of any length.
        interface_id: the card that the bitstream is built for.
        bitstream_id: which file of the store, or what people call it.
        settings: driver parameters that override the defaults.
    """

    suffix: str
    interface_id: InterfaceId
    bitstream_id: BitstreamId | NamedBitstream
    settings: DriverSettings = field(default_factory=DriverSettings)

    @property
    def file_id(self) -> BitstreamId:
        """Which file of the store.

        Raises:
            InvalidRequestError: nobody has looked up what it is called.
        """
        if isinstance(self.bitstream_id, NamedBitstream):
            raise no_such_name(self.bitstream_id, self.interface_id)
        return self.bitstream_id

    @property
    def region_variable(self) -> str:
        """`FPGA_REGION_<n>`, cut to what a message may quote."""
        return _shown(_REGION + self.suffix)

    @property
    def params_variable(self) -> str:
        """`FPGA_DRIVER_PARAMS_<n>`, cut to what a message may quote."""
        return _shown(_PARAMS + self.suffix)


def parse_requests(env: Mapping[str, str]) -> tuple[FpgaRequest, ...]:
    """All requests of a container's environment, in order of suffix.

    Numbers come before other suffixes and in order of value, equal values in order of text. Each
    variable's syntax is checked before any is held against another. Variables of other names,
    `FPGA_DEVICE_...` among them, are ignored.

    Raises:
        InvalidRequestError: a name, a value or a combination is wrong; names the variable.
    """
    found = [
        (kind, name[len(kind) :], value)
        for name, value in env.items()
        for kind in REQUEST_PREFIXES
        if name.startswith(kind)
    ]
    variables: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for kind, suffix, value in sorted(found, key=lambda v: (_suffix_order(v[1]), v[0])):
        if not _SUFFIX.fullmatch(suffix):
            raise InvalidRequestError(
                f"the variable {quote(kind + suffix)} has a wrong name",
                hint=f"after {kind} write a number or a name of A-Z, a-z, 0-9 and _",
            )
        variables[suffix][kind] = _parse_value(kind, suffix, value)
    return tuple(_pair(suffix, of_suffix) for suffix, of_suffix in variables.items())


def assign(
    requests: Sequence[FpgaRequest], regions: Mapping[RegionId, InterfaceId]
) -> Mapping[RegionId, FpgaRequest | None]:
    """Which request each region of a call gets; None: it is handed over blank.

    `regions` are those of the call's devices, in order of (PCI address, port id), with their
    interface ids; a whole card counts as its regions. Each request, in order, goes to the first
    region of its interface id that has none yet. Kubelet calls once a resource: requests for
    another interface id belong to another call as long as one is for this one.

    Returns:
        One entry a region, in the order of `regions`.

    Raises:
        InvalidRequestError: there are requests, and none is for these devices' interface id.
        RefusedError: there are more requests for this interface id than regions.
    """
    result: dict[RegionId, FpgaRequest | None] = dict.fromkeys(regions)
    fitting = [request for request in requests if request.interface_id in regions.values()]
    if requests and not fitting:
        asked = _ids(request.interface_id for request in requests)
        raise InvalidRequestError(
            f"{requests[0].region_variable} asks for interface id {asked}, but the"
            f" allocated devices have {_ids(regions.values())}",
            hint="request the resource and the bitstream of the same interface id",
        )
    for request in fitting:
        same = [region for region, one in regions.items() if one == request.interface_id]
        free = next((region for region in same if result[region] is None), None)
        if free is None:
            wanted = sum(r.interface_id == request.interface_id for r in fitting)
            raise RefusedError(
                f"{request.region_variable}: the container asks for {wanted} programmed regions of"
                f" interface id {request.interface_id} and was given {len(same)}",
                hint="raise the resource's limit, or remove requests",
            )
        result[free] = request
    return result


def check_limits(
    request: FpgaRequest, limits: ClockLimits | None, device: DeviceId | RegionId
) -> None:
    """Hold a request's driver parameters against what the device can do.

    Raises:
        RefusedError: it sets the clock of a card that has no documented way to set it.
        InvalidRequestError: the clock is outside the card's limits.
    """
    clock = request.settings.clock
    if clock is None:
        return
    if limits is None:
        raise RefusedError(
            f"{request.params_variable} sets clock, but {device} has no documented way to set its"
            " user clock",
            hint="remove clock: the bitstream's default applies",
        )
    if not limits.low <= clock <= limits.high:
        raise InvalidRequestError(
            f"{request.params_variable}: clock={clock} is outside the limits of {device}",
            hint=f"use {limits.low} to {limits.high} (MHz)",
        )


def _suffix_order(suffix: str) -> tuple[int, int, str, str]:
    """Sort key that compares numbers of any length by value, without making numbers of them."""
    if not _DIGITS.fullmatch(suffix):
        return 1, 0, "", suffix
    digits = suffix.lstrip("0")
    return 0, len(digits), digits, suffix


def _parse_value(kind: str, suffix: str, value: str) -> object:
    variable = _shown(kind + suffix)
    if not value:
        raise InvalidRequestError(f"{variable} is empty", hint="set it, or remove it")
    try:
        if kind == _PARAMS:
            return _parse_settings(value)
        if kind == _REGION:
            return parse_interface_id(value)
        return _parse_bitstream(value, variable)
    except ValueError as error:
        raise InvalidRequestError(
            f"{variable}={quote(value)}: {error}",
            hint=_PARAMS_RULE if kind == _PARAMS else "",
            asked=value[:MAX_QUOTED] if kind in {_BITSTREAM, _AFU} else "",
        ) from None


def _parse_bitstream(value: str, variable: str) -> BitstreamId | NamedBitstream:
    try:
        return parse_bitstream_id(value)
    except ValueError as error:
        try:
            return NamedBitstream(parse_alias(value), variable)
        except ValueError as other:
            msg = f"{error}; and {other}"
            raise ValueError(msg) from None


def no_such_name(named: NamedBitstream, interface_id: InterfaceId) -> InvalidRequestError:
    """What is said of a name that the store's manifest does not give."""
    return InvalidRequestError(
        f"{named.variable}={quote(named.alias)}: neither a bitstream's id nor a name that the"
        f" store's manifest gives to one of interface id {interface_id}",
        hint="ask for it by its id: `fpga-plugin bitstream list` shows ids and names, and titles in"
        " quotes, by which nothing can be asked for",
        asked=named.alias,
    )


def _parse_settings(value: str) -> DriverSettings:
    """Read `clock=400,debug=1`.

    Raises:
        ValueError: an element, a name or a value is wrong; quotes the element, not all of `value`.
    """
    found: dict[str, int] = {}
    for element in value.split(","):
        name, _, setting = element.partition("=")
        if not name or not setting:
            msg = f"{quote(element)} is not of the form name=value"
        elif name in found:
            msg = f"{quote(name)} is there twice"
        elif name not in _SETTINGS:
            msg = f"{quote(name)} is no driver parameter (clock, debug)"
        else:
            form, allowed = _SETTINGS[name]
            if match := form.fullmatch(setting):
                found[name] = int(match[1])
                continue
            msg = f"{name} is {quote(setting)}, not {allowed}"
        raise ValueError(msg)
    return DriverSettings(clock=found.get("clock"), debug=bool(found.get("debug")))


def _pair(suffix: str, values: Mapping[str, Any]) -> FpgaRequest:
    """Make one request of the parsed values of a suffix's variables, by their kind.

    Raises:
        InvalidRequestError: one is missing, or two contradict each other.
    """
    region, bitstream, afu, params = (_shown(kind + suffix) for kind in REQUEST_PREFIXES)
    named = {kind: values[kind] for kind in (_BITSTREAM, _AFU) if kind in values}
    if _REGION not in values:
        there = bitstream if _BITSTREAM in named else afu if named else params
        raise InvalidRequestError(
            f"{there} is set, but {region} is not",
            hint=f"set {region} to the interface id of the device",
        )
    if not named:
        raise InvalidRequestError(
            f"{region} is set, but neither {bitstream} nor {afu} is",
            hint="set one of them to the id of the bitstream",
        )
    if len(set(named.values())) > 1:
        raise InvalidRequestError(
            f"{bitstream}={named[_BITSTREAM]} and {afu}={named[_AFU]} differ",
            hint="remove one of them",
        )
    return FpgaRequest(
        suffix=suffix,
        interface_id=values[_REGION],
        bitstream_id=named.get(_BITSTREAM) or named[_AFU],
        settings=values.get(_PARAMS, DriverSettings()),
    )


def _shown(variable: str) -> str:
    """A variable's name, whose characters were checked, cut to what a message may quote."""
    return variable if len(variable) <= MAX_QUOTED else f"{variable[:MAX_QUOTED]}..."


def _ids(interfaces: Iterable[InterfaceId], most: int = 3) -> str:
    """The distinct interface ids, as many as a message has room for."""
    ids = list(dict.fromkeys(interfaces))
    return ", ".join(ids[:most]) + (", ..." if len(ids) > most else "") if ids else "none"
