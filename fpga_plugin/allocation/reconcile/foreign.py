"""Devices under this plugin's resource names that another plugin served: kubelet still knows them.

The Intel plugin names its resources alike (docs/migration.md). While one of its pods runs, the
cards of that kind are left alone: which card the pod has, its device id does not say.
"""

from collections.abc import Iterable

from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import is_device_id, known_resource
from fpga_plugin.kubernetes.kubelet.checkpoint import Checkpoint, CheckpointEntry


def foreign_entries(checkpoint: Checkpoint) -> tuple[CheckpointEntry, ...]:
    """What pods hold of devices whose ids this plugin does not write."""
    return tuple(entry for entry in checkpoint.entries if not all(map(is_device_id, entry.devices)))


def entries_of(card: Card, entries: Iterable[CheckpointEntry]) -> tuple[CheckpointEntry, ...]:
    """Those of a card's resources, whichever prefix these had when the devices were given."""
    return tuple(
        entry
        for entry in entries
        if (resource := known_resource(entry.resource))
        and resource.interface_id == card.interface_id
    )
