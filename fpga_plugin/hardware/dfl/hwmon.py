"""A card's hwmon devices: the FME's own, and those of the board's management controller (BMC).

The FME's have alarms and no labels (drivers/fpga/dfl-fme-main.c). The BMC's, where a board has one,
have labels, mostly limits, and no alarms (drivers/hwmon/intel-m10-bmc-hwmon.c); what is pluggable
and not there reads ENODATA.
"""

import errno
import re
from collections.abc import Callable, Iterable, Iterator

from fpga_plugin.errors import HardwareError, quote
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.sysfs import number, optional

Listed = Callable[[str, str], Iterable[str]]
"""The entries of a directory whose names match; none where it cannot be listed."""

_HWMON = ("hwmon", r"hwmon[0-9]{1,9}")
_BMC = r"[a-z0-9]{1,16}bmc-hwmon\.[0-9]{1,9}\.auto"
_SPI = ("spi_master", r"spi[0-9]{1,9}", r"spi[0-9]{1,9}\.[0-9]{1,3}")
_WAYS = (
    (),  # N6000 (intel-m10-bmc-pmci, Linux 6.2)
    _SPI,  # D5005, N501x (spi-altera-dfl)
    (r"subdev_spi_altera\.[0-9]{1,9}\.auto", *_SPI),  # N3000 (dfl-n3000-nios)
)
"""What lies between one of the FME's devices and the controller."""

_CHANNEL = re.compile(r"(temp|power)[0-9]{1,3}", re.ASCII)
_NAME = re.compile(r"[a-z0-9_]{1,32}", re.ASCII)
_MOST = {"temp": 1_000_000, "power": 1_000_000_000}
"""A thousand degrees, a thousand watts: beyond it is what registers of all ones come to."""


def own(listed: Listed, fme_sysfs: str) -> Iterator[str]:
    """The directories of the FME's own."""
    yield from _found(listed, fme_sysfs, _HWMON)


def board(listed: Listed, fme_sysfs: str) -> Iterator[str]:
    """The directories of the management controller's."""
    for device in listed(fme_sysfs, r"dfl_dev\.[0-9]{1,9}"):
        for way in _WAYS:
            yield from _found(listed, device, (*way, _BMC, *_HWMON))


def _found(listed: Listed, directory: str, steps: Iterable[str]) -> list[str]:
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
