"""Attributes of cards and regions: claims select devices by them, and containers read them."""

from typing import Final, TypeAlias

from fpga_plugin.allocation.names import card_of, is_card
from fpga_plugin.dra.names import device_name
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import DeviceId, InterfaceId

STANDARD: Final = "resource.kubernetes.io"
"""Domain of the attributes that mean the same with every driver."""

PCI_BUS_ID: Final = f"{STANDARD}/pciBusID"

Value: TypeAlias = bool | int | str


def attributes(
    device: DeviceId, interface: InterfaceId | None, card: Card | None
) -> dict[str, Value]:
    """The attributes of a card or a region; names without a domain are the driver's.

    Args:
        device: card or region.
        interface: of its card; None: unknown.
        card: its card; None: it is gone.
    """
    told: dict[str, Value | None] = {
        "type": "card" if is_card(device) else "region",
        "card": device_name(DeviceId(card_of(device))),
        "interfaceID": interface,
    }
    if card is not None:
        told |= {
            "vendor": card.vendor,
            "family": card.family,
            "model": card.model,
            "serialNumber": card.serial,
            "firmware": card.firmware,
            PCI_BUS_ID: str(card.address),
            f"{STANDARD}/pcieRoot": card.pcie_root,
            f"{STANDARD}/numaNode": card.numa_node,
        }
    return {name: value for name, value in told.items() if value is not None and value != ""}


def as_json(value: Value) -> dict[str, Value]:
    """A value as resource.k8s.io/v1 has it (DeviceAttribute)."""
    if isinstance(value, bool):
        return {"bool": value}
    return {"int" if isinstance(value, int) else "string": value}
