"""Where a container's environment comes from when kubelet does not send it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from fpga_plugin.ids import DeviceId
from fpga_plugin.pods.identity import Identity


class EnvSource(Protocol):
    """Knows what a container asks for. Belongs to the event loop."""

    async def ask(
        self, identity: Identity, devices: Sequence[DeviceId], *, fresh: bool
    ) -> tuple[Identity, Mapping[str, str]]:
        """What the container asks for that starts now.

        Args:
            identity: who holds the devices.
            devices: of the PreStart.
            fresh: no container has started, or may have, since these devices were allocated.

        Returns:
            Who asks, with the container where those that hold the devices ask for different things,
            and the container's FPGA_* variables: those of requests, and those that mean nothing.

        Raises:
            NoSourceError: it cannot be told, or not yet.
            InvalidRequestError: a request variable cannot be known outside the container.
        """

    def started(self, identity: Identity, devices: Sequence[DeviceId]) -> None:
        """A PreStart is answered with OK; `identity` is what `ask` told."""

    def refused(self, identity: Identity, devices: Sequence[DeviceId], words: str) -> None:
        """A PreStart is refused in these words."""
