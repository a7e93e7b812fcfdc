"""Names that the whole of allocation shares: of resources, of cards, and the usual advice."""

import functools
import re
from collections.abc import Mapping

from fpga_plugin.hardware.grant import Grant
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import (
    CardId,
    DeviceId,
    RegionId,
    ResourceName,
    device_order,
    device_variable,
    region_id,
)

DELETE_THE_POD = "delete the pod, so that its controller makes a new one"


def resource_names(prefix: str, card: Card) -> tuple[ResourceName, ResourceName]:
    """The resources of a card: its regions, and the card as a whole."""
    return (
        ResourceName(f"{prefix}/region-{card.interface_id}"),
        ResourceName(f"{prefix}/fpga-{card.interface_id}"),
    )


def names_kind_of(resource: ResourceName, device: DeviceId) -> bool:
    """Whether a resource is of cards where the device is a card, of regions where it is a region.

    The interface id is not compared: a card may have got another static part since.
    """
    kind = "fpga" if is_card(device) else "region"
    return bool(re.fullmatch(rf".+/{kind}-[0-9a-f]{{32}}", resource, re.ASCII))


def grants_among(device: DeviceId, env: Mapping[str, str]) -> dict[RegionId, Grant]:
    """A device's regions with what a pod was given of each, as far as `FPGA_DEVICE_` tells."""
    if not is_card(device):
        nodes = env.get(device_variable(RegionId(device)))
        return {} if nodes is None else {RegionId(device): Grant.parse(nodes)}
    stem = device_variable(RegionId(f"{device}-p"))
    ports = (
        (int(name.removeprefix(stem)), nodes)
        for name, nodes in env.items()
        if re.fullmatch(rf"{stem}(0|[1-9][0-9]{{0,4}})", name, re.ASCII)
    )
    return {region_id(card_of(device), port): Grant.parse(nodes) for port, nodes in sorted(ports)}


def is_card(device: DeviceId) -> bool:
    """Whether a device is a whole card."""
    return device == DeviceId(card_of(device))


@functools.lru_cache(maxsize=8192)
def card_of(device: DeviceId | RegionId | CardId) -> CardId:
    """The card of a device."""
    address, _ = device_order(DeviceId(device))
    return address.card_id
