"""From the plugin's values to bytes for kubelet, quickly for long device lists.

betterproto2 takes about 17 us to encode one device, which for a thousand devices would hold the
event loop for longer than an Allocate may take. A list's encoding is the concatenation of the
encodings of its devices (a repeated field is a sequence of records), so each device is encoded once
and remembered.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grpclib.encoding.proto import ProtoCodec

from fpga_plugin.allocation.devices import AdvertisedDevice
from fpga_plugin.api.messages.v1beta1 import (
    Device,
    ListAndWatchResponse,
    NumaNode,
    TopologyInfo,
)
from fpga_plugin.errors import InvalidRequestError

_REMEMBERED = 16_384
"""Devices in both states of health of far more cards than a node has; about 4 MiB when full."""


@dataclass(frozen=True, slots=True)
class EncodedList:
    """A ListAndWatchResponse as it goes over the wire."""

    data: bytes


def encode_list(devices: Iterable[AdvertisedDevice]) -> EncodedList:
    """The message that makes `devices` the resource's whole list."""
    return EncodedList(b"".join(map(_encode_device, devices)))


@lru_cache(maxsize=_REMEMBERED)
def _encode_device(device: AdvertisedDevice) -> bytes:
    return bytes(ListAndWatchResponse(devices=[device_message(device)]))


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


class Codec(ProtoCodec):
    """grpclib's codec that also takes lists which are encoded already."""

    def encode(self, message: Any, message_type: Any) -> bytes:
        """The message's bytes."""
        if isinstance(message, EncodedList) and message_type is ListAndWatchResponse:
            return message.data
        return super().encode(message, message_type)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """The message in `data`.

        Raises:
            InvalidRequestError: there is none. betterproto2 raises half a dozen kinds of errors.
        """
        try:
            return super().decode(data, message_type)
        except Exception as error:
            raise InvalidRequestError(
                f"the request is no {message_type.__name__}: {type(error).__name__}"
            ) from error
