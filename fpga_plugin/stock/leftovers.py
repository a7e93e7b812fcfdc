"""With DRA: what pods still have by the device plugin API.

Kubelet's checkpoint names them, and goes on naming pods that ended: it is rewritten only for a
device plugin. So an entry counts as long as its pod's cgroup is not known to be gone. What no entry
names ends, as everywhere: its processes are waited for before its region is scrubbed.
"""

import asyncio

import structlog

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import CardId
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.ledger.records import Claim
from fpga_plugin.pods.cgroup import PodCgroups, known_gone
from fpga_plugin.pods.checkpoint import Checkpoint
from fpga_plugin.pods.directory import PodDirectory
from fpga_plugin.regions.queue import CardQueue
from fpga_plugin.regions.release import release
from fpga_plugin.stock.adoption import Adoption

log = structlog.get_logger()


class DevicePluginLeftovers:
    """Belongs to the event loop.

    Args:
        ledger: whose claims begin and end.
        adoption: makes the claims that the checkpoint names.
        pods: read the checkpoint.
        cgroups: tell which pods are gone.
        queue: where cards that have to be scrubbed are added.

    Attributes:
        problem: why kubelet's checkpoint cannot be read; empty while it can.
    """

    def __init__(
        self,
        ledger: Ledger,
        adoption: Adoption,
        pods: PodDirectory,
        cgroups: PodCgroups,
        queue: CardQueue,
    ) -> None:
        self._ledger, self._adoption, self._pods = ledger, adoption, pods
        self._cgroups, self._queue = cgroups, queue
        self.problem = ""

    @property
    def settled(self) -> set[CardId]:
        """Present cards of which kubelet's checkpoint names nobody who is no owner."""
        return self._adoption.settled

    @property
    def waits(self) -> bool:
        """Whether another look may find something."""
        return bool(self.problem or self._adoption.doubtful or self._ledger.pod_claims())

    async def look(self) -> bool:
        """Compare the ledger with kubelet's checkpoint; returns whether that could be read."""
        before = self._adoption.before()
        try:
            checkpoint = await self._pods.checkpoint()
            await self._adoption.adopt(checkpoint, before)
            for claim in self._ledger.pod_claims():
                if not await asyncio.to_thread(self._is_named, claim, checkpoint):
                    release(self._ledger, self._queue, claim.resource, [claim.device])
        except FpgaPluginError as error:
            if self.problem != str(error):
                self.problem = str(error)
                log.warning(
                    "kubelet's records cannot be read: nothing is released", error=str(error)
                )
            return False
        self.problem = ""
        return True

    def _is_named(self, claim: Claim, checkpoint: Checkpoint) -> bool:
        pods = {entry.pod_uid for entry in checkpoint.holders(claim.device)}
        return pods > known_gone(self._cgroups, pods)
