"""Kubelet's record of which container holds which device, and the file that it keeps of it.

The file's shape is that of kubelet 1.20 and later (pkg/kubelet/cm/devicemanager/checkpoint):
`DeviceIDs` is a map from NUMA node to ids, -1 where the node is not known. The checksum is not
kubelet's: only kubelet can check it.
"""

import base64
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fpga_plugin.host.atomic_file import replace_file
from fpga_plugin.kubernetes.messages.v1beta1 import ContainerAllocateResponse
from fpga_plugin.kubernetes.names import PodUid, ResourceName

FILE_NAME = "kubelet_internal_checkpoint"

UNKNOWN_NODE = -1
"""The key of devices whose NUMA node is not known (kubelet's nodeWithoutTopology)."""


@dataclass(frozen=True, slots=True)
class HeldDevices:
    """What one container holds of one resource.

    Attributes:
        pod: whose.
        container: which of its containers.
        resource: whose devices they are.
        devices: ids by NUMA node.
        response: the plugin's answer to Allocate, which kubelet repeats at every start.
    """

    pod: PodUid
    container: str
    resource: ResourceName
    devices: Mapping[int, tuple[str, ...]]
    response: ContainerAllocateResponse

    @property
    def ids(self) -> tuple[str, ...]:
        """All of the ids."""
        return tuple(device for of_node in self.devices.values() for device in of_node)


def write_checkpoint(
    directory: str,
    held: Iterable[HeldDevices],
    registered: Mapping[ResourceName, Iterable[str]],
) -> None:
    """Replace the checkpoint by rename, as kubelet does.

    Args:
        directory: kubelet's device plugin directory.
        held: one entry each.
        registered: the healthy devices of every resource.
    """
    data = {
        "PodDeviceEntries": [
            {
                "PodUID": entry.pod,
                "ContainerName": entry.container,
                "ResourceName": entry.resource,
                "DeviceIDs": {str(node): list(ids) for node, ids in entry.devices.items()},
                "AllocResp": base64.b64encode(bytes(entry.response)).decode(),
            }
            for entry in held
        ]
        or None,  # Go writes an empty slice that was never made as null
        "RegisteredDevices": {name: sorted(ids) for name, ids in registered.items()},
    }
    checksum = zlib.crc32(json.dumps(data).encode())
    content = json.dumps({"Data": data, "Checksum": checksum})
    replace_file(os.path.join(directory, FILE_NAME), [content.encode()])
