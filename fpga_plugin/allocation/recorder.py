"""Records Events about pods and about the node.

A pod's Event says that its FPGA was not programmed, and why. The node's Event says that a card
failed, went or recovered. None of kubelet's calls carries a pod's name. The name comes from earlier
questions of the same call, else from PodResources in the background.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from grpclib.const import Status

from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.errors import FpgaPluginError, NotFinishedError
from fpga_plugin.ids import CardId, DeviceId
from fpga_plugin.kubernetes.events.broadcaster import Event, EventBroadcaster, Subject
from fpga_plugin.kubernetes.names import PodName, PodUid

MAX_LOOKUPS = 16
"""Concurrent look-ups of a refused pod's name; a refusal beyond them makes no Event."""

_FAILURES = {Status.INTERNAL, Status.UNKNOWN}


class PodObserver(Protocol):
    """Sees what pods' Events say. Must not raise."""

    def refused(
        self, identity: Identity, devices: Sequence[DeviceId], error: FpgaPluginError
    ) -> None:
        """A PreStart was refused, or failed."""

    def served(self, devices: Sequence[DeviceId], claim: str) -> None:
        """A ResourceClaim, by namespace and name, was prepared with these devices, or ended."""

    def warned(self, identity: Identity, devices: Sequence[DeviceId], message: str) -> None:
        """A container is served, and may not be what its author means."""


class EventRecorder:
    """Records Events about pods and about the node.

    Args:
        events: posts them; None: no Events are posted.
        node_name: without it there are no Events about the node.
        pods: finds the names of pods.
        observer: sees refusals, warnings and successes.
    """

    def __init__(
        self,
        events: EventBroadcaster | None,
        *,
        node_name: str | None,
        pods: PodDirectory,
        observer: PodObserver,
    ) -> None:
        self._observer = observer
        self._events = events
        self._node = None if node_name is None else Subject("Node", node_name, "", node_name)
        self._pods = pods
        self._lookups: set[asyncio.Task[None]] = set()

    def refused(
        self, identity: Identity, devices: Sequence[DeviceId], error: FpgaPluginError
    ) -> None:
        """Record that a PreStart was refused, or failed. Work that goes on makes no Event."""
        self._observer.refused(identity, devices, error)
        if isinstance(error, NotFinishedError):
            return
        failed = error.status in _FAILURES
        reason = "FpgaProgrammingFailed" if failed else "FpgaProgrammingRefused"
        self._tell(identity, devices, reason, str(error.for_tenant()))

    def served(self, devices: Sequence[DeviceId], claim: str) -> None:
        """A ResourceClaim was prepared, or ended: its earlier refusals are over."""
        self._observer.served(devices, claim)

    def named(self, names: Mapping[PodUid, PodName]) -> None:
        """Remember the names of a ResourceClaim's pods."""
        for uid, name in names.items():
            self._pods.learn(uid, name)

    def warned(
        self,
        identity: Identity,
        devices: Sequence[DeviceId],
        message: str,
        *,
        reason: str = "FpgaVariableUnknown",
    ) -> None:
        """A container is served, and may not be what its author means."""
        self._observer.warned(identity, devices, message)
        self._tell(identity, devices, reason, message)

    def not_evicted(self, identity: Identity, devices: Sequence[DeviceId], message: str) -> None:
        """A pod uses a failed device, and the cluster does not evict it."""
        self._tell(identity, devices, "FpgaPodNotEvicted", message)

    def _tell(
        self, identity: Identity, devices: Sequence[DeviceId], reason: str, note: str
    ) -> None:
        """Make the pod's Event, once its name is known."""
        if self._events is None or identity.pod is None:
            return  # no name is looked up for nothing
        name = identity.name or self._pods.known(identity.pod)
        if name is not None:
            self.about_pod(identity.pod, name, reason, note)
        elif len(self._lookups) < MAX_LOOKUPS:
            task = asyncio.create_task(self._look_up(identity.pod, devices, reason, note))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)

    async def _look_up(
        self, pod: PodUid, devices: Sequence[DeviceId], reason: str, note: str
    ) -> None:
        """Find the name by the devices; if kubelet does not know it, the log has to do."""
        try:
            name = await self._pods.holder(devices)
        except FpgaPluginError:
            return
        self.about_pod(pod, name, reason, note)

    def about_pod(self, pod: PodUid, name: PodName, reason: str, note: str) -> None:
        """Something happened to a pod's FPGA."""
        if self._events is not None:
            subject = Subject("Pod", name.name, name.namespace, pod)
            self._events.record(Event(subject, reason, "Programming", note, warning=True))

    def card_failed(self, card: CardId, reason: str) -> None:
        """A card, or a region of it, must not be used."""
        self._about_node(f"card {card}: {reason}", "FpgaCardFailed", warning=True)

    def card_recovered(self, card: CardId, what: str) -> None:
        """A card, or a region of it, may be used again."""
        self._about_node(f"card {card}: {what}", "FpgaCardRecovered", warning=False)

    def node_unsuited(self, what: str) -> None:
        """Kubelet or the container runtime may lack what pods with FPGAs need."""
        self._about_node(what, "FpgaNodeUnsuited", warning=True)

    def foreign_slices(self, what: str) -> None:
        """Others write into the node's pool of devices."""
        self._about_node(what, "FpgaForeignSlices", warning=True)

    def _about_node(self, note: str, reason: str, *, warning: bool) -> None:
        if self._events is not None and self._node is not None:
            self._events.record(Event(self._node, reason, "HealthCheck", note, warning=warning))

    async def close(self) -> None:
        """Look up no more, post no more."""
        for task in self._lookups:
            task.cancel()
        if self._lookups:
            await asyncio.wait(self._lookups)
        if self._events is not None:
            await self._events.close()
