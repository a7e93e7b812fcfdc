"""A region's user clock, and a card's memory: the driver settings that an allocation may change.

Mainline Linux has no documented way to set a frequency: a real port's `userclk_freqcmd` takes raw
commands for the clock's PLL (dfl-afu-main.c). A port is served here that has

    userclk/frequency          kHz, read and write: the frequency now
    userclk/frequency_min      kHz
    userclk/frequency_max      kHz
    userclk/frequency_default  kHz: what the driver starts with

in its sysfs directory. The simulated cards have these four; a vendor's driver that offered them
would be served in the same way.
"""

import errno

from fpga_plugin.errors import HardwareError, RefusedError
from fpga_plugin.hardware.backend import ClockLimits
from fpga_plugin.hardware.dfl.handles import fme_of, port_of
from fpga_plugin.hardware.dfl.shared import memory_clear_knobs
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.hardware.sysfs import number, optional

_KHZ_PER_MHZ = 1000


def clock_limits(kernel: Kernel, region: Region) -> ClockLimits | None:
    """Whole MHz within the port's limits; None where there is no documented way to set the clock.

    Raises:
        HardwareError: the limits cannot be read or make no sense.
    """
    if (limits := _clock(kernel, region)) is None:
        return None
    low, high = -(-limits["frequency_min"] // _KHZ_PER_MHZ), limits["frequency_max"] // _KHZ_PER_MHZ
    if not 0 < low <= high:
        raise HardwareError(f"region {region.id} says that its clock goes from {low} to {high} MHz")
    return ClockLimits(low, high)


def set_clock(kernel: Kernel, region: Region, clock: int | None) -> None:
    """Set the user clock to a frequency in MHz, None for its default, and read it back.

    Raises:
        RefusedError: a frequency is asked for that the region does not offer.
        HardwareError: the driver refused or set something else.
    """
    now = _clock(kernel, region)
    if now is None and clock is None:
        return
    limits = clock_limits(kernel, region)
    if now is None or limits is None:
        raise RefusedError(
            f"region {region.id} has no documented way to set its clock",
            hint="leave `clock` out of FPGA_DRIVER_PARAMS",
        )
    if clock is not None and not limits.low <= clock <= limits.high:
        raise RefusedError(
            f"region {region.id} cannot be clocked with {clock} MHz",
            hint=f"{limits.low} to {limits.high} MHz are possible",
        )
    wanted = now["frequency_default"] if clock is None else clock * _KHZ_PER_MHZ
    if now["frequency"] == wanted:
        return
    path = f"{port_of(region).sysfs}/userclk/frequency"
    try:
        kernel.write(path, str(wanted))
    except OSError as error:
        raise HardwareError(
            f"the clock of region {region.id} cannot be set to {wanted} kHz ({error.strerror})",
            hint="see the kernel's log",
        ) from error
    then = _clock(kernel, region)
    # A PLL hits few frequencies exactly; a whole MHz off means that it was not set.
    if then is None or abs(then["frequency"] - wanted) >= _KHZ_PER_MHZ:
        has = f"{then['frequency']} kHz" if then else "gone"
        raise HardwareError(
            f"the clock of region {region.id} was set to {wanted} kHz, but is {has}",
            hint="see the kernel's log",
        )


def clear_memory(kernel: Kernel, card: Card) -> None:
    """Clear all banks of a card's memory; dfl-emif waits up to 5 s for each.

    Raises:
        HardwareError: a bank was not cleared, or there is no way to clear any.
    """
    try:
        banks = list(memory_clear_knobs(kernel, fme_of(card).sysfs))
    except OSError as error:
        raise HardwareError(
            f"the memory of card {card.id} cannot be looked up ({error.strerror})",
            hint="see the kernel's log",
        ) from error
    if not banks:
        raise HardwareError(
            f"card {card.id} has no documented way to clear its memory", hint="is dfl-emif loaded?"
        )
    for bank in banks:
        try:
            kernel.write(bank, "1")
        except OSError as error:
            why = "timed out" if error.errno == errno.ETIMEDOUT else f"failed ({error.strerror})"
            raise HardwareError(
                f"clearing memory bank {bank} of card {card.id} {why}",
                hint="what the last user left may still be in it; see the kernel's log",
            ) from error


def _clock(kernel: Kernel, region: Region) -> dict[str, int] | None:
    """The four attributes in kHz, None unless all are there."""
    values: dict[str, int] = {}
    for name in ("frequency", "frequency_min", "frequency_max", "frequency_default"):
        path = f"{port_of(region).sysfs}/userclk/{name}"
        try:
            text = optional(kernel, path)
        except OSError as error:
            raise HardwareError(
                f"{path} cannot be read ({error.strerror})", hint="see the kernel's log"
            ) from error
        if text is None:
            return None
        values[name] = number(path, text)
    return values
