"""The link to kubelet, as work on cards and reconciling use it."""

from collections.abc import Mapping
from typing import Protocol

from fpga_plugin.kubernetes.names import ResourceName


class Link(Protocol):
    """Sends the device lists to kubelet. Its methods may be called before it starts.

    `deviceplugin.link.KubeletLink` is one.
    """

    def sent(self) -> Mapping[ResourceName, frozenset[str]]:
        """The healthy devices of each list as sent on a stream that kubelet still holds."""

    def resend(self) -> None:
        """Send every list again: kubelet rewrites its checkpoint for each list that it gets."""

    def reregister(self, resource: ResourceName) -> None:
        """Register a resource again, on another socket."""

    async def announced(self) -> None:
        """Wait, for a bounded time, until every present list has been sent to kubelet."""
