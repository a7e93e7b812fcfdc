"""What the plugin sends kubelet about a device."""

from dataclasses import dataclass

from fpga_plugin.ids import DeviceId


@dataclass(frozen=True, slots=True)
class AdvertisedDevice:
    """One entry of a resource's device list.

    Attributes:
        id: card or region.
        healthy: whether kubelet may give it to a pod.
        numa_node: None where the kernel does not know it.
    """

    id: DeviceId
    healthy: bool
    numa_node: int | None
