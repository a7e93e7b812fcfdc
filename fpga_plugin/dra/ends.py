"""Ends claims, by kubelet's calls and by its record, and knows what an end still waits for.

The row of an ended claim stays until kubelet's record lacks the claim: without the row, the
record's claim would count as one that the journal lost.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import structlog

from fpga_plugin.allocation.journal.records import CLEAN
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.obstacles import ObstacleKind
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.cards.blanks import NO_BLANK, Blanks
from fpga_plugin.dra.claim import ClaimRef
from fpga_plugin.dra.files import ClaimFiles
from fpga_plugin.dra.names import devices_of
from fpga_plugin.errors import NotFinishedError
from fpga_plugin.ids import RegionId
from fpga_plugin.kubernetes.kubelet.dra_record import RecordedClaim
from fpga_plugin.kubernetes.names import ClaimUid

log = structlog.get_logger()


class ClaimEnds:
    """Ends claims by kubelet's calls and its record.

    Args:
        ledger: knows the claims.
        blanks: tell for which cards there is none.
        queue: where cards that have to be scrubbed are added.
        files: for the container runtime.

    Attributes:
        recorded: kubelet's record at the last read.
        over: claims that kubelet has ended, though its record may name them until it is written.
        calls: how often kubelet asked to prepare each claim: its record, if it was read before,
            says nothing of the pods for which it asked.
        ending: is called first with each claim that ends.
        doubted: is called with a claim of which kubelet's record has to be read again.
    """

    def __init__(self, ledger: Ledger, blanks: Blanks, queue: CardQueue, files: ClaimFiles) -> None:
        self._ledger = ledger
        self._blanks = blanks
        self._queue = queue
        self._files = files
        self.recorded: Mapping[ClaimUid, RecordedClaim] = {}
        self.over: set[ClaimUid] = set()
        self.calls: Counter[ClaimUid] = Counter()
        self.ending: Callable[[ClaimUid], None] = lambda _: None
        self.doubted: Callable[[ClaimUid], None] = lambda _: None

    async def end(self, uid: ClaimUid) -> None:
        """End a claim: no container starts with it any more, and its regions await a scrub.

        Raises:
            FpgaPluginError: the journal cannot be written, the claim's file not be removed,
                kubelet's record not be read, or kubelet prepares it again.
        """
        self.ending(uid)
        if (owner := self._ledger.dra.in_force(uid)) is not None:
            await self._files.withhold(owner)
            self.ending(uid)  # what began in the meantime, too
        else:  # in the same order
            calls = self.calls[uid]
            await self._files.remove(uid, self._ledger.claim_owners.get(uid))
            await self._files.learn(uid)
            if self.calls[uid] != calls:
                raise NotFinishedError(
                    f"claim {uid}: kubelet prepares it again", hint="the next end is another one"
                )
        self.over.add(uid)
        owner = self._ledger.claim_owners.get(uid)
        if owner is None:
            if uid in self.recorded:
                self.doubted(uid)
        elif not owner.ended:
            ref, pods = ClaimRef.of(owner), sorted(self._ledger.pods_of(owner.devices))
            for card in self._ledger.dra.end_claim(uid):
                self._queue.add(card)
            log.info("claim ended", **ref.logged, devices=owner.devices, pods=pods)
        await self._files.remove(uid, owner)

    async def forget(self, uid: ClaimUid) -> bool:
        """Remove an ended claim that kubelet's record lacks, if its regions are clean.

        Raises:
            FpgaPluginError: the claim's file cannot be removed, or the journal not be written.
        """
        await self._files.remove(uid, self._ledger.claim_owners.get(uid))
        if any(map(self.to_scrub, self.regions(uid))):
            return False
        self._ledger.dra.forget_claim(uid)
        self.calls.pop(uid, None)
        return True

    def regions(self, uid: ClaimUid) -> list[RegionId]:
        """The regions of an ended claim, on present cards."""
        owner, recorded = self._ledger.claim_owners.get(uid), self.recorded.get(uid)
        if owner is not None:
            devices = owner.devices if owner.ended else ()
        else:
            devices = () if recorded is None else tuple(devices_of(recorded.devices))
        present = self._ledger.obstacles.present_regions
        return [region.id for device in devices for region in present(device)]

    def to_scrub(self, region: RegionId) -> bool:
        """Whether a region is not clean and may yet be; what cannot be is kept back (a taint)."""
        record = self._ledger.record(region)
        if record.condition in CLEAN or self._ledger.region_allocation(region) is not None:
            return False  # or it has a new owner by now, for whom it is scrubbed
        lasting = {
            ObstacleKind.KEPT,
            ObstacleKind.FAULTED,
            ObstacleKind.FAILING,
            ObstacleKind.STRANGER,
        }
        if any(one.kind in lasting for one in self._ledger.obstacles.of(region)):
            return False
        if not record.reason.startswith(NO_BLANK):
            return True
        # That may be an earlier life's reason, which had no blank, or could not read it.
        card = self._ledger.cards.get(card_of(region))
        return card is None or not self._blanks.missing(card)
