"""Names that the whole of allocation shares: of resources, of cards, and the usual advice."""

import functools

from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import CardId, DeviceId, RegionId, ResourceName, device_order

DELETE_THE_POD = "delete the pod, so that its controller makes a new one"


def resource_names(prefix: str, card: Card) -> tuple[ResourceName, ResourceName]:
    """The resources of a card: its regions, and the card as a whole."""
    return (
        ResourceName(f"{prefix}/region-{card.interface_id}"),
        ResourceName(f"{prefix}/fpga-{card.interface_id}"),
    )


def is_card(device: DeviceId) -> bool:
    """Whether a device is a whole card."""
    return device == DeviceId(card_of(device))


@functools.lru_cache(maxsize=8192)
def card_of(device: DeviceId | RegionId | CardId) -> CardId:
    """The card of a device."""
    address, _ = device_order(DeviceId(device))
    return address.card_id
