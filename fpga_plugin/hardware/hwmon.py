"""Sensors of a device, as the class hwmon shows them (Linux, hwmon/sysfs-interface.rst)."""

import errno
import re
from collections.abc import Callable, Iterable, Iterator

from fpga_plugin.errors import HardwareError, quote
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.sysfs import number, optional

Listed = Callable[[str, str], Iterable[str]]
"""The entries of a directory whose names match; none where it cannot be listed."""

HWMON = ("hwmon", r"hwmon[0-9]{1,9}")

_CHANNEL = re.compile(r"(temp|power)[0-9]{1,3}", re.ASCII)
_NAME = re.compile(r"[a-z0-9_]{1,32}", re.ASCII)
_MOST = {"temp": 1_000_000, "power": 1_000_000_000}
"""A thousand degrees, a thousand watts: beyond it is what registers of all ones come to."""


def own(listed: Listed, directory: str) -> Iterator[str]:
    """The hwmon directories of a device's own."""
    yield from found(listed, directory, HWMON)


def found(listed: Listed, directory: str, steps: Iterable[str]) -> list[str]:
    """What is reached from a directory by names that match these, one after the other."""
    places = [directory]
    for step in steps:
        places = [path for place in places for path in listed(place, step)]
    return places


def channels(listed: Listed, hwmon: str) -> Iterator[str]:
    """Temperatures and powers of such a directory, as in `…/hwmon3/temp1`."""
    for path in listed(hwmon, _CHANNEL.pattern + "_input"):
        yield path.removesuffix("_input")


def kind(channel: str) -> str:
    """`temp` or `power`."""
    return channel.rpartition("/")[2].rstrip("0123456789")


def name(kernel: Kernel, channel: str) -> str:
    """Its label as a word (`fpga_core_temperature`), else device and channel.

    Raises:
        OSError: it cannot be read.
    """
    hwmon, _, sensor = channel.rpartition("/")
    label = optional(kernel, f"{channel}_label")
    if label is not None:
        return re.sub(r"[^a-z0-9]+", "_", label[:64].lower()).strip("_") or sensor
    device = optional(kernel, f"{hwmon}/name") or ""
    return f"{device if _NAME.fullmatch(device) else 'hwmon'}_{sensor}"


def value(kernel: Kernel, channel: str, attribute: str = "input") -> int | None:
    """In thousandths of a degree, or millionths of a watt (Linux, sysfs-interface.rst).

    None where there is none.

    Raises:
        HardwareError: it is no number, or none that a board could have.
        OSError: it cannot be read.
    """
    path = f"{channel}_{attribute}"
    try:
        text = optional(kernel, path)
    except OSError as error:
        if error.errno == errno.ENODATA:
            return None
        raise
    if text is None:
        return None
    amount = number(path, text.removeprefix("-"))
    if amount > _MOST[kind(channel)]:
        raise HardwareError(f"{path} says {quote(text)}, which no board has")
    return -amount if text.startswith("-") else amount
