"""Devices under this plugin's resource names that another plugin served: kubelet still knows them.

The Intel plugin names its resources alike (docs/migration.md). While one of its pods runs, the
cards of that kind are left alone: which card the pod has, its device id does not say. AMD's plugin
has other names, and its device ids are PCI addresses of user functions.
"""

from collections.abc import Iterable
from dataclasses import replace

from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import PciAddress, is_device_id, known_resource
from fpga_plugin.kubernetes.kubelet.checkpoint import Checkpoint, CheckpointEntry


def foreign_entries(checkpoint: Checkpoint) -> tuple[CheckpointEntry, ...]:
    """What pods hold of devices whose ids this plugin does not write."""
    return tuple(entry for entry in checkpoint.entries if not all(map(is_device_id, entry.devices)))


def entries_of(card: Card, entries: Iterable[CheckpointEntry]) -> tuple[CheckpointEntry, ...]:
    """Those of a card's resources, whichever prefix these had, and of the card by its address."""
    return tuple(
        entry
        for entry in entries
        if (
            (resource := known_resource(entry.resource))
            and resource.interface_id == card.interface_id
        )
        or any(_is_function_of(card, device) for device in entry.devices)
    )


def _is_function_of(card: Card, device: str) -> bool:
    """Whether an id is the PCI address of a card's function, with a number behind it or without.

    The number is of AMD's plugin: where it shares a card it gives it out several times.
    """
    address, _, number = device.partition("-")
    if number and not number.isdecimal():
        return False
    try:
        return replace(PciAddress.parse(address), function=0) == replace(card.address, function=0)
    except ValueError:
        return False
