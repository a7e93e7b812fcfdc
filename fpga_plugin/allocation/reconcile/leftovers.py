"""With DRA: what pods still have by the device plugin API.

Kubelet's checkpoint names them, and goes on naming pods that ended: it is rewritten only for a
device plugin. So an entry counts as long as its pod's cgroup is not known to be gone. What no entry
names ends, as everywhere: its processes are waited for before its region is scrubbed.

Kubelet itself counts such a pod's devices as in use, too, until somebody calls PodResources List
(pkg/kubelet/cm/devicemanager: UpdateAllocatedDevices), and keeps pods waiting that ask for the
resource by limits. So it is called once in a run of the plugin, when no such allocation is left.
"""

import asyncio

import structlog

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.reconcile.owners import Owners
from fpga_plugin.allocation.release import release
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import CardId
from fpga_plugin.kubernetes.cgroup import PodCgroups, known_gone
from fpga_plugin.kubernetes.names import PodUid

log = structlog.get_logger()


class DevicePluginLeftovers:
    """Ends what pods still have by the device plugin API, while DRA is served.

    Args:
        ledger: whose allocations end.
        cgroups: tell which pods are gone.
        owners: compares the ledger with kubelet's checkpoint.
        pods: kubelet's records.
        queue: where cards that have to be scrubbed are added.

    Attributes:
        problem: why kubelet's checkpoint cannot be read; empty while it can.
    """

    def __init__(
        self,
        ledger: Ledger,
        cgroups: PodCgroups,
        owners: Owners,
        pods: PodDirectory,
        queue: CardQueue,
    ) -> None:
        self._ledger, self._cgroups, self._owners = ledger, cgroups, owners
        self._pods, self._queue = pods, queue
        self._uncounted = pods.podresources is not None
        self._not_counting = ""
        self.problem = ""

    @property
    def settled(self) -> set[CardId]:
        """Present cards for which kubelet's checkpoint names only pods that the ledger knows."""
        return self._owners.settled

    @property
    def waits(self) -> bool:
        """Whether another look may find something."""
        unread = self.problem or self._owners.doubtful or self._owners.new_cards
        return bool(unread or self._ledger.pod_allocations() or self._uncounted)

    async def look(self) -> bool:
        """Compare the ledger with kubelet's checkpoint; returns whether that could be read."""
        try:
            checkpoint = await self._owners.read()
            allocations = self._ledger.pod_allocations()
            named = {
                c.device: {e.pod_uid for e in checkpoint.holders(c.device)} for c in allocations
            }
            pods = set[PodUid]().union(*named.values())
            gone = await asyncio.to_thread(known_gone, self._cgroups, pods)
            for allocation in allocations:
                if named[allocation.device] <= gone:
                    release(self._ledger, self._queue, allocation.resource, [allocation.device])
        except FpgaPluginError as error:
            if self.problem != str(error):
                self.problem = str(error)
                log.warning(
                    "kubelet's records cannot be read: nothing is released", error=str(error)
                )
            return False
        self.problem = ""
        if self._ledger.pod_allocations():
            self._uncounted = self._pods.podresources is not None
        elif self._uncounted:
            await self._have_kubelet_count()
        return True

    async def _have_kubelet_count(self) -> None:
        try:
            await self._pods.holders()
        except FpgaPluginError as error:
            if self._not_counting != str(error):
                self._not_counting = str(error)
                log.info("kubelet cannot be made to count its devices", error=self._not_counting)
        else:
            self._uncounted, self._not_counting = False, ""
