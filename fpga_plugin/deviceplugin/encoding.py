"""From the plugin's values to bytes for kubelet, quickly for long device lists.

betterproto2 takes some 40 us to encode one device, which for a thousand devices would hold the
event loop for longer than an Allocate may take. Two facts of the wire format help. A list's
encoding is the concatenation of its devices' records (a repeated field is a sequence of records).
And a device's is that of its fields: all that differs between most devices is the id, so that
betterproto2 encodes what comes behind it only once for each state of health and NUMA node.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fpga_plugin.api.messages.v1beta1 import (
    Device,
    ListAndWatchResponse,
    NumaNode,
    TopologyInfo,
)
from fpga_plugin.ids import DeviceId
from fpga_plugin.ledger.devices import AdvertisedDevice
from fpga_plugin.serving.codec import Codec

_ID, _DEVICE = b"\n", b"\n"
"""Tags: field 1 of a Device, and of a ListAndWatchResponse, both with a length behind."""

_ONE_BYTE = 0x80
"""Lengths below it are one byte. Ids have at most 63 bytes, what follows an id at most 26."""


@dataclass(frozen=True, slots=True)
class EncodedList:
    """A ListAndWatchResponse as it goes over the wire."""

    data: bytes


def encode_list(devices: Iterable[AdvertisedDevice]) -> EncodedList:
    """The message that makes `devices` the resource's whole list."""
    return EncodedList(b"".join(map(_encode_device, devices)))


def _encode_device(device: AdvertisedDevice) -> bytes:
    name = device.id.encode()
    rest = _encode_rest(device.healthy, device.numa_node)
    size = len(name) + len(rest) + 2
    assert size < _ONE_BYTE, "an id is longer than device ids are"
    return b"".join((_DEVICE, bytes((size,)), _ID, bytes((len(name),)), name, rest))


@lru_cache(maxsize=256)
def _encode_rest(healthy: bool, numa_node: int | None) -> bytes:  # noqa: FBT001  # a cache's key
    """A device without its id: an empty string is not encoded."""
    return bytes(device_message(AdvertisedDevice(DeviceId(""), healthy, numa_node)))


def device_message(device: AdvertisedDevice) -> Device:
    """One device as kubelet's message; node 0 is a node like any other, None is no topology."""
    topology = None
    if device.numa_node is not None:
        topology = TopologyInfo(nodes=[NumaNode(id=device.numa_node)])
    return Device(
        id=device.id,
        health="Healthy" if device.healthy else "Unhealthy",
        topology=topology,
    )


class ListCodec(Codec):
    """Also takes lists which are encoded already."""

    def encode(self, message: Any, message_type: Any) -> bytes:
        """The message's bytes."""
        if isinstance(message, EncodedList) and message_type is ListAndWatchResponse:
            return message.data
        return super().encode(message, message_type)
