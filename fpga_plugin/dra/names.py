"""Devices' names in ResourceSlices: DNS labels, which have no dots.

Card `0000-3b-00.0` is device `0000-3b-00-0`, region `0000-3b-00.0-p0` is `0000-3b-00-0-p0`.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

from fpga_plugin.ids import DeviceId, parse_device_id

_NAME = re.compile(r"([0-9a-f]{4,8}-[0-9a-f]{2}-[0-9a-f]{2})-([0-7])((?:-p[0-9]{1,5})?)", re.ASCII)


def device_name(device: DeviceId) -> str:
    """A card's or region's name in a slice."""
    return device.replace(".", "-")


def parse_device_name(name: str) -> DeviceId:
    """The device with this name in a slice.

    Raises:
        ValueError: it is no name of this plugin's.
    """
    if not (match := _NAME.fullmatch(name)):
        msg = "not a device's name (such as 0000-3b-00-0 or 0000-3b-00-0-p0)"
        raise ValueError(msg)
    return parse_device_id(f"{match[1]}.{match[2]}{match[3]}")


def devices_of(names: Iterable[str]) -> Iterator[DeviceId]:
    """The devices of these names; others are none of ours."""
    for name in names:
        with suppress(ValueError):
            yield parse_device_name(name)
