"""What a container asks for on a stock kubelet, which sends no environment.

The request variables are made of the pod's spec by kubelet's own rules
(`allocation.requests.environment`). Where the containers that hold the devices ask for different
things, `next_container` finds which of them starts. It is imported at the first question: extended
kubelets never cause one.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.errors import NoSourceError
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.cgroup import PodCgroups

if TYPE_CHECKING:
    from fpga_plugin.deviceplugin.next_container import NextContainer

SETTLE: Final = 2.0
"""Seconds for which a lagging status has to say the same. Kubelet sends a change within
milliseconds; what it sends late is why it has to be waited for."""


class StockEnvironment:
    """Makes a container's request variables from its pod's spec.

    Args:
        pods: reads pods.
        cgroups: show whether a pod keeps its sandbox if its status does not; None: unknown then.
        settle: see `SETTLE`.
    """

    def __init__(
        self, pods: PodDirectory, *, cgroups: PodCgroups | None = None, settle: float = SETTLE
    ) -> None:
        self._pods = pods
        self._cgroups = cgroups
        self._settle = settle
        self._next: NextContainer | None = None

    async def ask(
        self, identity: Identity, devices: Sequence[DeviceId], *, fresh: bool
    ) -> tuple[Identity, Mapping[str, str]]:
        """Find what the container that starts now asks for.

        Args:
            identity: of the devices' owner.
            devices: of the PreStart.
            fresh: no container has started, or may have, since these devices were allocated.

        Returns:
            The pod, with the container if those with the devices ask for different things, and the
            container's FPGA_* variables: those of requests, and those that mean nothing.

        Raises:
            NoSourceError: it is not known, or not yet.
            InvalidRequestError: a request variable cannot be known outside the container.
        """
        if identity.pod is None:
            raise NoSourceError(
                "kubelet sent no environment, and its checkpoint does not say which pod holds"
                f" {', '.join(devices)}",
                hint="mount kubelet's directory, and set FPGA_PLUGIN_KUBELET_DIR to it; the log has"
                " the details",
            )
        if self._next is None:
            made = await asyncio.to_thread(_open, self._pods, self._cgroups, self._settle)
            self._next = self._next or made  # another question may have been first
        known, answer = await self._pods.requests(identity.pod, identity.held)
        identity = replace(identity, name=known.name)
        holders = [one for one in known.requests or () if one.name in identity.containers]
        if len(holders) != len(identity.containers):
            raise NoSourceError(
                f"the spec of pod {known.name} lacks containers that kubelet's checkpoint has:"
                f" {', '.join(sorted(identity.containers))}"
            )
        asks, container = holders[0], ""
        if not all(asks.same(other) for other in holders):
            asks = await self._next.find(identity, devices, holders, answer, fresh=fresh)
            container = asks.name
        asks.check()
        others = {} if container else {k: v for one in holders for k, v in one.env.items()}
        return replace(identity, container=container), {**others, **asks.env}

    def started(self, identity: Identity, devices: Sequence[DeviceId]) -> None:
        """A PreStart is answered with OK; `identity` is what `ask` returned."""
        if self._next is not None:
            self._next.started(identity, devices)

    def refused(self, identity: Identity, devices: Sequence[DeviceId], words: str) -> None:
        """A PreStart is refused in these words."""
        if self._next is not None:
            self._next.refused(identity, devices, words)

    def new_kubelet(self) -> None:
        """Another kubelet instance: it starts containers without PreStart until we register."""
        self._pods.new_kubelet()
        if self._next is not None:
            self._next.new_kubelet()


def _open(pods: PodDirectory, cgroups: PodCgroups | None, settle: float) -> "NextContainer":
    from fpga_plugin.deviceplugin.next_container import (
        NextContainer,  # only where kubelet sends none
    )

    return NextContainer(pods, cgroups, settle)
