"""Whether kubelet still has the device lists that it was sent.

Kubelet can lose a resource while its stream is open, and says nothing: 1.27 to 1.35, for one, take
the late end of an old connection for the end of the new one (kubernetes/kubernetes issue 127803).
The node then offers no devices, and stays so. So the plugin compares what kubelet counts as sound
(GetAllocatableResources) with what it sent. A list on its way differs for a moment. A list that
differs look after look is lost, and registering the resource again mends that.

The plugin looks only after a registration or a list changed: that is when kubelet can lose one.
"""

from collections import Counter
from typing import Final

import structlog

from fpga_plugin.allocation.link import Link
from fpga_plugin.errors import quote
from fpga_plugin.kubernetes.kubelet.podresources import (
    NoListReason,
    PodResourcesClient,
    PodResourcesError,
)
from fpga_plugin.kubernetes.names import ResourceName

log = structlog.get_logger()

LASTING: Final = 3
"""Looks in a row that must see a difference; one an interval."""

QUIET: Final = 2
"""Looks in a row that must see none before the looking ends."""

GIVE_UP: Final = 10
"""Looks in a row without an answer, after which the looking ends until something changes."""

MOST_DOUBLINGS: Final = 8
"""Each time that registering again did not help, the next is twice as many looks away."""

SHOWN: Final = 4
"""Devices of a difference that the log names."""


class AllocatableCheck:
    """Compares what kubelet counts with the lists that it was sent.

    Args:
        link: knows what kubelet was sent, and registers a resource again.
        podresources: asks kubelet what it knows; None: it is not asked.
    """

    def __init__(self, link: Link, podresources: PodResourcesClient | None) -> None:
        self._link = link
        self._podresources = podresources
        self._served = podresources is not None
        self._left = 0
        self._unanswered = 0
        self._differing: Counter[ResourceName] = Counter()
        self._tries: Counter[ResourceName] = Counter()

    @property
    def due(self) -> bool:
        """Whether there is a reason to look."""
        return self._served and self._left > 0

    def new_kubelet(self) -> None:
        """Another kubelet instance, which may be another version."""
        self._served = self._podresources is not None
        self._differing.clear()
        self._tries.clear()
        self.changed()

    def changed(self) -> None:
        """A list may be another one, or goes to another stream."""
        self._left = QUIET
        self._unanswered = 0

    async def look(self) -> None:
        """Compare once, and mend what has differed for long enough."""
        if self._podresources is None or not self._served:
            return
        before = self._link.sent()
        try:
            known = await self._podresources.allocatable()
        except PodResourcesError as error:
            self._no_answer(error)
            return
        self._unanswered = 0
        now = self._link.sent()
        for resource in self._differing.keys() - now.keys():
            del self._differing[resource]  # no stream: its registration is under way already
        # A list that was sent meanwhile is another question.
        same = [resource for resource, ids in before.items() if now.get(resource) == ids]
        for resource in same:
            self._judge(resource, before[resource], known.get(resource, frozenset()))
        self._left = QUIET if self._differing else max(self._left - 1, 0)

    def _no_answer(self, error: PodResourcesError) -> None:
        """Kubelet did not answer: no conclusion. The reconciler reports it, as List fails too."""
        if error.reason is NoListReason.NOT_SERVED:
            self._served = False
            log.info("kubelet does not report allocatable devices", error=str(error))
            return
        self._unanswered += 1
        if self._unanswered >= GIVE_UP:
            self._left = 0

    def _judge(self, resource: ResourceName, sent: frozenset[str], known: frozenset[str]) -> None:
        if sent == known:
            del self._differing[resource]
            if self._tries.pop(resource, 0):
                log.info("kubelet has the resource's devices again", resource=resource)
            return
        self._differing[resource] += 1
        tries = self._tries[resource]
        if self._differing[resource] < LASTING << min(tries, MOST_DOUBLINGS):
            return
        del self._differing[resource]
        self._tries[resource] += 1
        log.warning(
            "kubelet has lost the resource's devices: registering again",
            resource=resource,
            missing=len(sent - known),
            surplus=len(known - sent),
            devices=[quote(device) for device in sorted(sent ^ known)[:SHOWN]],
            tries=tries + 1,
        )
        self._link.reregister(resource)
