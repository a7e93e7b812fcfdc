"""The user clock that an image gets: set, checked, or said to be neither.

An image meets its timing only at or below the frequency that it was built for. Above that frequency
results are wrong, and no error is reported. Neither kernel nor FIM compares them, and the clock
survives a PR. So this module plans the clock before each PR of a tenant's image. If the card has a
documented way, the clock is set. Else it is measured, and an image that is too slow for it is
refused.
"""

import enum
from dataclasses import dataclass, replace

from fpga_plugin.bitstreams.gbs_metadata import Frequency
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.errors import RefusedError
from fpga_plugin.hardware.backend import Backend, DriverSettings
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import AfuId, RegionId

TOLERANCE = 1.005
"""How much faster than built for a measured clock may read.

The counter's own time base is the PCIe reference clock: up to 0.27 % slow where its spectrum is
spread, so that a clock reads as much too fast; and it counts in steps of 10 kHz.
"""


class ClockState(enum.StrEnum):
    """How an image's clock was set or checked."""

    SET = "set"
    """To what the image was built for, or to what its container asked for."""

    CHECKED = "checked"
    """It cannot be set, and was measured: it is not above what the image was built for."""

    NOT_CHECKED = "not checked"
    """It can neither be set nor measured."""

    NOT_STATED = "not stated"
    """The image does not say what it was built for."""


@dataclass(frozen=True, slots=True)
class ClockPlan:
    """The plan for an image's clock.

    Attributes:
        state: how it is set or checked.
        detail: the same with the frequencies, for people.
        settings: of the driver, with the clock that is to be set; None in it: the default stays.
    """

    state: ClockState
    detail: str
    settings: DriverSettings


def built_for(bitstream: Bitstream) -> float | None:
    """The user clock in MHz that an image was built for; None: it does not say."""
    high = _stated(bitstream.clock_frequency_high)
    low = _stated(bitstream.clock_frequency_low)
    limits = [high, None if low is None else 2 * low]  # the half-rate clock follows the other one
    return min((limit for limit in limits if limit is not None), default=None)


def _stated(frequency: Frequency) -> float | None:
    """`auto` is what a build was told, not what it came to; 0 is no clock."""
    return float(frequency) if isinstance(frequency, int | float) and frequency > 0 else None


def check_asked(region: RegionId, clock: int | None, bitstream: Bitstream) -> None:
    """Compare the clock that a container asks for with the one its image was built for.

    Raises:
        RefusedError: it is above that.
    """
    built = built_for(bitstream)
    if clock is not None and built is not None and clock > built:
        raise RefusedError(
            f"region {region} would run bitstream {bitstream.bitstream_id} at {clock} MHz, and it"
            f" was built for {built:g} MHz",
            hint="ask for a `clock` that is not above that in FPGA_DRIVER_PARAMS, or for none",
        )


def plan_clock(
    backend: Backend, card: Card, region: Region, image: Bitstream | AfuId, asked: DriverSettings
) -> ClockPlan:
    """Plan an image's clock; blocks, and changes nothing but a counter.

    The frequency of a preprogrammed function (an AFU id) is unknown, so its clock stays.

    Raises:
        RefusedError: the image would run faster than it was built for.
        HardwareError: the card's values for its clock make no sense.
    """
    bitstream = image if isinstance(image, Bitstream) else None
    if bitstream is not None:
        check_asked(region.id, asked.clock, bitstream)
    if asked.clock is not None:
        return ClockPlan(ClockState.SET, f"set to {asked.clock} MHz, as asked", asked)
    if bitstream is None or (built := built_for(bitstream)) is None:
        what = "a preprogrammed function" if bitstream is None else "the bitstream"
        says = f"{what} does not say what it was built for"
        return ClockPlan(ClockState.NOT_STATED, says, asked)
    if (limits := backend.clock_limits(card, region)) is not None:
        if built < limits.low:
            raise _too_fast(region, bitstream, f"the clock goes no lower than {limits.low} MHz")
        clock = min(int(built), limits.high)
        says = f"set to {clock} MHz; the bitstream was built for {built:g} MHz"
        return ClockPlan(ClockState.SET, says, replace(asked, clock=clock))
    now = backend.user_clock(region)
    if now.high is None:
        says = f"not known ({now.source}); the bitstream was built for {built:g} MHz"
        return ClockPlan(ClockState.NOT_CHECKED, says, asked)
    low = _stated(bitstream.clock_frequency_low)
    if now.high > built * TOLERANCE:
        raise _too_fast(region, bitstream, f"the user clock runs at {now.high:g} MHz")
    if low is not None and now.low is not None and now.low > low * TOLERANCE:
        raise _too_fast(region, bitstream, f"the half-rate user clock runs at {now.low:g} MHz")
    says = f"{now.high:g} MHz, {now.source}; the bitstream was built for {built:g} MHz"
    return ClockPlan(ClockState.CHECKED, says, asked)


def _too_fast(region: Region, bitstream: Bitstream, now: str) -> RefusedError:
    low = _stated(bitstream.clock_frequency_low)
    half = "" if low is None else f" (half-rate: {low:g} MHz)"
    return RefusedError(
        f"region {region.id}: {now}, and bitstream {bitstream.bitstream_id} was built for"
        f" {built_for(bitstream):g} MHz{half}",
        hint="it would compute wrongly; the operator lowers the card's clock by the vendor's tools"
        " (`userclk`), or builds the bitstream for the card's clock",
    )
