"""Names that the whole of allocation shares: of resources, of cards, and the usual advice."""

import functools
import re
from collections.abc import Mapping

from fpga_plugin.errors import quote
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.ids import (
    AfuId,
    Alias,
    CardId,
    DeviceId,
    InterfaceId,
    RegionId,
    Resource,
    ResourceKind,
    aliased_name,
    device_order,
    device_variable,
    kind_of,
    parse_device_id,
    region_id,
)
from fpga_plugin.kubernetes.names import ResourceName

DELETE_THE_POD = "delete the pod, so that its controller makes a new one"

NOT_READ = "kubelet's records were not read since it was found"
"""Why a card's owners are unknown."""

LEAVE_DRA = (
    "the operator starts the plugin with FPGA_PLUGIN_MODE=dra until the allocation's pods are gone"
    " (docs/dra.md)"
)
"""For a device that a ResourceClaim has, where the device plugin API serves."""

MAY_COME_BACK = (
    "it may come back by itself, as while its driver is bound again: kubelet tries a start again;"
    " if it stays away, " + DELETE_THE_POD
)
"""For a card or region that is gone: a rebind of a free card takes it away for a moment."""

FUNCTIONS_HINT = (
    "its accelerators are part of the card's whole image: FPGA_PLUGIN_ADVERTISE=af hands them over"
    " as they are (docs/functions.md)"
)
"""For a card that cannot be reprogrammed."""


def parse_region_id(text: str) -> RegionId:
    """A region's id.

    Raises:
        ValueError: it is none.
    """
    device = parse_device_id(text)
    if is_card(device):
        msg = f"{quote(text)} is no region"
        raise ValueError(msg)
    return RegionId(device)


@functools.lru_cache(maxsize=256)  # asked for each device of each Allocate
def resource_names(
    prefix: str, interface_id: InterfaceId, alias: Alias | None = None
) -> tuple[ResourceName, ResourceName]:
    """The resources of an interface id's regions, and of its whole cards; by its alias, if any."""
    return (
        ResourceName(Resource(prefix, ResourceKind.REGION, interface_id, alias=alias).name),
        ResourceName(Resource(prefix, ResourceKind.WHOLE, interface_id, alias=alias).name),
    )


@functools.lru_cache(maxsize=256)
def function_name(prefix: str, interface_id: InterfaceId, afu_id: AfuId) -> ResourceName:
    """The resource of those regions that hold a preprogrammed function."""
    return ResourceName(Resource(prefix, ResourceKind.AF, interface_id, afu_id).name)


def is_function(resource: ResourceName) -> bool:
    """Whether a resource's regions are handed over with what is on them."""
    return kind_of(resource) is ResourceKind.AF


def is_shells(resource: ResourceName) -> bool:
    """Whether a resource is called as AMD's plugin calls one, by its cards' shell."""
    return (parts := aliased_name(resource)) is not None and bool(parts.shell)


def names_kind_of(resource: ResourceName, device: DeviceId) -> bool:
    """Whether resource and device are of the same kind: both cards, or both regions.

    The interface id is not compared: a card may have got another static part since.
    """
    kind = kind_of(resource)
    return kind is not None and (kind is ResourceKind.WHOLE) is is_card(device)


def grants_among(device: DeviceId, env: Mapping[str, str]) -> dict[RegionId, Grant]:
    """What a pod was given of each of a device's regions, by its `FPGA_DEVICE_` variables."""
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
