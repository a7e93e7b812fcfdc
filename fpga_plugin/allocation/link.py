"""The link to kubelet, as work on cards and reconciling use it."""

from collections.abc import Mapping
from typing import Protocol

from fpga_plugin.kubernetes.names import ResourceName


class Link(Protocol):
    """Brings the device lists to kubelet. May be asked before it begins.

    `deviceplugin.link.KubeletLink` is one.
    """

    def sent(self) -> Mapping[ResourceName, frozenset[str]]:
        """The healthy devices of each list that kubelet holds a stream for and has been sent."""

    def resend(self) -> None:
        """Send every list again: kubelet rewrites its checkpoint for each list that it gets."""

    def reregister(self, resource: ResourceName) -> None:
        """Register a resource again, on another socket."""

    async def announced(self) -> None:
        """Wait until kubelet was sent every list as it is now, if not for long."""
