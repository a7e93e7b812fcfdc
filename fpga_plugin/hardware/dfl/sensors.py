"""A card's temperature, power and error registers, as numbers to watch.

What they mean for the card's health is `health`'s affair. Only attributes that a running PR does
not block are read (facts: linux-fpga.md section 0), so this may be called at any time.
"""

import re

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.dfl.kernel import Kernel
from fpga_plugin.hardware.dfl.sysfs import children, number, optional
from fpga_plugin.hardware.model import Card, Readings

_SENSOR = re.compile(r"(temp|power)[0-9]{1,3}_input", re.ASCII)
_NAME = re.compile(r"[a-z0-9_]{1,32}", re.ASCII)
_SCALE = {"temp": 1e-3, "power": 1e-6}
"""hwmon counts in thousandths of a degree and millionths of a watt (Linux, sysfs-interface.rst)."""


def readings(kernel: Kernel, card: Card) -> Readings:
    """Read a card's sensors; what is not there, or cannot be read now, is left out."""
    found: dict[str, dict[str, float]] = {"temp": {}, "power": {}}
    for directory in _listed(kernel, f"{card.fme_sysfs}/hwmon", r"hwmon[0-9]{1,9}"):
        name = _name(kernel, directory)
        for path in _listed(kernel, directory, _SENSOR.pattern):
            sensor = path.rpartition("/")[2].removesuffix("_input")
            kind = sensor.rstrip("0123456789")
            value = _value(kernel, path, signed=True)
            if value is not None:
                found[kind][f"{name}_{sensor}"] = round(value * _SCALE[kind], 6)
    errors: dict[str, int] = {}
    for register in ("catfatal_errors", "nonfatal_errors"):
        value = _value(kernel, f"{card.fme_sysfs}/errors/{register}")
        if value is not None:
            errors[register] = value
    for region in card.regions:
        value = _value(kernel, f"{region.sysfs}/errors/errors")
        if value is not None:
            errors[f"port{region.port_id}_errors"] = value
    return Readings(found["temp"], found["power"], errors)


def _listed(kernel: Kernel, directory: str, pattern: str) -> list[str]:
    try:
        return list(children(kernel, directory, pattern))
    except OSError:
        return []


def _name(kernel: Kernel, directory: str) -> str:
    try:
        name = optional(kernel, f"{directory}/name") or ""
    except OSError:
        name = ""
    return name if _NAME.fullmatch(name) else "hwmon"


def _value(kernel: Kernel, path: str, *, signed: bool = False) -> int | None:
    try:
        text = optional(kernel, path)
        if text is None:
            return None
        negative = signed and text.startswith("-")
        value = number(path, text.removeprefix("-") if negative else text)
    except (OSError, HardwareError):
        return None
    return -value if negative else value
