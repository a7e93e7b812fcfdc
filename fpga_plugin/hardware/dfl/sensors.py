"""A card's temperature, power and error registers, as numbers to watch.

`health` judges what they mean for the card. A running PR holds the FME's lock, and
reading fme_errors, first_error, next_error, pcie*_errors or inject_errors waits for it. Only other
attributes are read here, so this may be called at any time.
"""

from collections.abc import Iterable
from functools import partial

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware import hwmon
from fpga_plugin.hardware.dfl.bmc import board
from fpga_plugin.hardware.dfl.handles import fme_of, port_of
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card, Readings
from fpga_plugin.hardware.sysfs import children, number, optional

_SCALE = {"temp": 1e-3, "power": 1e-6}


def readings(kernel: Kernel, card: Card) -> Readings:
    """Read a card's sensors; what is not there, or cannot be read now, is left out."""
    found: dict[str, dict[str, float]] = {"temp": {}, "power": {}}
    listed = partial(_listed, kernel)
    for devices in (hwmon.own, board):
        for device in devices(listed, fme_of(card).sysfs):
            _add(kernel, hwmon.channels(listed, device), found)
    errors: dict[str, int] = {}
    for register in ("catfatal_errors", "nonfatal_errors"):
        value = _value(kernel, f"{fme_of(card).sysfs}/errors/{register}")
        if value is not None:
            errors[register] = value
    for region in card.regions:
        value = _value(kernel, f"{port_of(region).sysfs}/errors/errors")
        if value is not None:
            errors[f"port{region.port_id}_errors"] = value
    return Readings(found["temp"], found["power"], errors)


def _add(kernel: Kernel, channels: Iterable[str], found: dict[str, dict[str, float]]) -> None:
    """A device's channels, up to one that does not answer: each further one might time out."""
    try:
        for channel in channels:
            value = hwmon.value(kernel, channel)
            if value is not None:
                kind = hwmon.kind(channel)
                found[kind][hwmon.name(kernel, channel)] = round(value * _SCALE[kind], 6)
    except (HardwareError, OSError):
        pass


def _listed(kernel: Kernel, directory: str, pattern: str) -> list[str]:
    try:
        return list(children(kernel, directory, pattern))
    except OSError:
        return []


def _value(kernel: Kernel, path: str) -> int | None:
    try:
        text = optional(kernel, path)
        return None if text is None else number(path, text)
    except (OSError, HardwareError):
        return None
