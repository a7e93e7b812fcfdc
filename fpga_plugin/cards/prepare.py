"""Preparation: bring the regions of a PreStart into the state that the container asks for.

A region that was not scrubbed since its last owner is scrubbed here, whatever was missed before.
It is then programmed and verified. Else the container does not start (invariant 2).
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from fpga_plugin.allocation.journal.records import Condition, RegionRecord
from fpga_plugin.allocation.lease import Lease
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.obstacles import ObstacleKind, Stops
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards import steps
from fpga_plugin.cards.operations import CardOperations, Work
from fpga_plugin.cards.reads import CardReads, afu_ids
from fpga_plugin.cards.recovery import Recovery
from fpga_plugin.cards.reports import Report
from fpga_plugin.errors import (
    HardwareError,
    NotFinishedError,
    RefusedError,
)
from fpga_plugin.hardware.backend import DriverSettings
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import AfuId, CardId, RegionId
from fpga_plugin.kubernetes.names import PodUid


@dataclass(frozen=True, slots=True)
class Target:
    """What a container asks for in a region.

    Attributes:
        image: a bitstream to be programmed; or the AFU id of a preprogrammed function that it gets
            as it is: reset, and nothing programmed.
        settings: driver parameters that override the defaults for the time of the allocation.
    """

    image: Bitstream | AfuId
    settings: DriverSettings

    @property
    def bitstream(self) -> Bitstream | None:
        """What is programmed, if anything is."""
        return self.image if isinstance(self.image, Bitstream) else None

    @property
    def afu_id(self) -> AfuId:
        """The AFU id that the region shows then."""
        return self.image.afu_id if isinstance(self.image, Bitstream) else self.image


@dataclass(frozen=True, slots=True)
class Plan:
    """One PreStart's work.

    Attributes:
        lease: on the allocations of the call's devices, as they were when the plan was made.
        pod: their owner, if kubelet's records show it.
        targets: one for each region; None: blank.
        instance: the kubelet instance that asked. A later one may start the owner's containers
            without PreStart until the plugin has registered with it.
    """

    lease: Lease
    pod: PodUid | None
    targets: Mapping[RegionId, Target | None]
    instance: str

    @property
    def used(self) -> frozenset[RegionId]:
        """The regions that a container of their owner may have used before."""
        used = (one for one in self.lease.allocations if one.used)
        return frozenset(region for one in used for region in one.grants)


class Preparer:
    """Carries out plans, card by card; the cards of one plan work at the same time.

    Args:
        operations: what is done to a card.
        recovery: of poisoned ports; also resets cards between owners.
        reads: of cards that may not answer.
    """

    def __init__(self, operations: CardOperations, recovery: Recovery, reads: CardReads) -> None:
        self._operations = operations
        self._recovery = recovery
        self._reads = reads

    async def prepare(self, plan: Plan) -> dict[RegionId, RegionRecord]:
        """Carry out a plan; returns each region's record as its own card's work left it.

        The cards end at different times. A card may change while work on another goes on; its
        record then differs from the one returned.

        Raises:
            FpgaPluginError: not all regions are as asked; the ledger has each one's condition.
        """
        cards: dict[CardId, list[RegionId]] = {}
        for region in plan.targets:
            cards.setdefault(card_of(region), []).append(region)
        outcomes = await asyncio.gather(
            *(self._card(plan, card, regions) for card, regions in cards.items()),
            return_exceptions=True,
        )
        records: dict[RegionId, RegionRecord] = {}
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            records.update(outcome)
        return records

    async def read_back(self, plan: Plan) -> dict[RegionId, AfuId | None]:
        """The AFU ids now of those regions of the plan whose cards are there; None: unreadable.

        Raises:
            SilentCardError: a card does not answer.
        """
        cards: dict[CardId, list[Region]] = {}
        for region_id in plan.targets:
            if (region := self._operations.ledger.region(region_id)) is not None:
                cards.setdefault(region.card, []).append(region)
        found: dict[RegionId, AfuId | None] = {}
        for observed in await asyncio.gather(
            *(
                self._reads.run(card, partial(afu_ids, self._operations.backend, regions))
                for card, regions in cards.items()
            )
        ):
            found |= observed or {}
        return found

    def check_result(
        self,
        plan: Plan,
        records: Mapping[RegionId, RegionRecord],
        observed: Mapping[RegionId, AfuId | None],
    ) -> None:
        """Check that the regions are still as they were prepared and as the container asks.

        Args:
            plan: what was carried out.
            records: what `prepare` returned.
            observed: what `read_back` returned, just now.

        Raises:
            RefusedError: the plan no longer holds.
            NotFinishedError: a region is another, or changed; what changed unseen is DIRTY now.
        """
        self.check(plan)
        ledger = self._operations.ledger
        for region, target in plan.targets.items():
            record = records[region]
            asked = Condition.BLANK if target is None else Condition.PROGRAMMED
            if ledger.record(region) is not record or record.condition is not asked:
                raise NotFinishedError(
                    f"region {region} changed after it was prepared",
                    hint="kubelet's next try prepares it again",
                )
        changed = [r for r in plan.targets if observed.get(r) != records[r].afu_id]
        if changed:
            ledger.work.dirty(changed, "it changed after it was prepared")
            shows = ", ".join(f"{r} shows {observed.get(r) or 'none'}" for r in changed)
            raise NotFinishedError(
                f"the AFU ids are no longer those that were prepared: {shows}",
                hint="kubelet's next try prepares the regions again",
            )

    def check(self, plan: Plan, *, mending: bool = False) -> None:
        """Check that the plan holds: same allocations, same kubelet, same nodes, sound hardware.

        Args:
            plan: to be carried out.
            mending: a poisoned port that may be recovered counts as sound.

        Raises:
            RefusedError: it does not.
            NotFinishedError: kubelet restarted, and asks again.
        """
        ledger = self._operations.ledger
        plan.lease.check()
        if plan.instance != ledger.kubelet_instance:
            raise NotFinishedError(
                f"kubelet restarted while {', '.join(plan.targets)} was prepared",
                hint="kubelet's next try prepares it again",
            )
        for allocation in plan.lease.allocations:
            ledger.obstacles.check_grants(allocation)
        for region in plan.targets:
            card = ledger.cards.get(card_of(region))
            for obstacle in ledger.obstacles.against(Stops.START, region):
                if (
                    card is not None
                    and obstacle.kind in {ObstacleKind.FAULTED, ObstacleKind.FAILING}
                    and self._recovery.poisoned(card, plan.targets)
                ):
                    if mending and self._recovery.may(card.id):
                        continue
                    raise self._recovery.advised(card, RefusedError(obstacle.message))
                raise obstacle.refusal()

    async def _card(
        self, plan: Plan, card_id: CardId, region_ids: list[RegionId]
    ) -> dict[RegionId, RegionRecord]:
        """One card's part of a plan; returns its regions' records at the end."""
        owner = frozenset(plan.lease.devices)
        async with self._operations.workers.lock(card_id):
            self.check(plan, mending=True)
            card = self._operations.ledger.cards[card_id]
            if self._recovery.poisoned(card, plan.targets):
                await self._recovery.rebind(card, owner=owner)
            try:
                await self._attempt(plan, card_id, region_ids)
            except HardwareError as error:
                if not self._recovery.poisoned(card, plan.targets):
                    raise
                # Its ports are closed again by now.
                if not await self._recovery.rebind(card, owner=owner):
                    raise self._recovery.advised(card, error) from error
                await self._attempt(plan, card_id, region_ids)
            return {region: self._operations.ledger.record(region) for region in region_ids}

    async def _refuse_living(self, plan: Plan, region_ids: list[RegionId]) -> None:
        """Check that no earlier pod of these regions still runs.

        Raises:
            TenancyActiveError: one does.
        """
        operations = self._operations
        left = operations.ledger.tenancies.left
        await operations.check_gone(
            one for region in region_ids for one in left(region) if one.pod != plan.pod
        )

    async def _attempt(self, plan: Plan, card_id: CardId, region_ids: list[RegionId]) -> None:
        operations, ledger = self._operations, self._operations.ledger
        self.check(plan)
        card = ledger.cards[card_id]
        await self._refuse_living(plan, region_ids)
        if ended := self._recovery.due_for_reset(card, region_ids):
            await self._reset(plan, card, ended)
            card = ledger.cards[card_id]
        regions = [region for region in card.regions if region.id in region_ids]
        async with operations.work(card, regions, partial(self.check, plan), plan.pod) as work:
            await self._work(plan, work, regions)

    async def _reset(self, plan: Plan, card: Card, ended: Collection[RegionId]) -> None:
        """Reset a card between its owners; the plan holds afterwards.

        Raises:
            FpgaPluginError: it failed, an earlier process runs, or the plan no longer holds.
        """
        operations = self._operations
        # No port is opened for a reset: this alone keeps it from the owner's own earlier processes,
        # as of a static pod that came again.
        left = operations.ledger.tenancies.left
        await operations.check_gone(one for region in ended for one in left(region))
        self.check(plan)
        region = min(ended)
        report = Report(region, pod=plan.pod, former=operations.former(region))
        try:
            await self._recovery.reset(card, ended, report)
        finally:
            operations.report(report)
        self.check(plan)  # the card's nodes may be other ones

    async def _work(self, plan: Plan, work: Work, regions: list[Region]) -> None:
        operations, ledger, card = self._operations, self._operations.ledger, work.card
        used = plan.used
        dirty = [r for r in regions if self._needs_scrub(r, plan.targets[r.id], used)]
        blank: Bitstream | None = None
        keeping = {r for r, target in plan.targets.items() if target and not target.bitstream}
        if any(region.id not in keeping for region in dirty):
            blank = await operations.blanks.load(card)
            self.check(plan)
        for region in dirty:
            if blank is None and plan.targets[region.id] is None:
                raise RefusedError(
                    f"region {region.id} would still hold its last image, and the container asks"
                    " for no bitstream",
                    hint="name one in FPGA_REGION_<n> and FPGA_BITSTREAM_ID_<n>, or have the"
                    " operator install a blank bitstream",
                )
        if dirty:
            await work.scrub(dirty, blank, keeping)
        whole = len(regions) == card.ports
        if dirty or (whole and card.id in ledger.memory_clear_pending):
            self.check(plan)
            # Scrubbed regions first; the call's other regions are not a neighbour's either.
            order = sorted(work.reports.values(), key=lambda report: not report.scrubbed)
            await operations.clear_memory(card, {report.region: report for report in order})
        if whole and card.clears_memory and card.id in ledger.memory_clear_pending:
            raise NotFinishedError(
                f"the memory of card {card.id} is not cleared: who else may be on it is not known",
                hint="kubelet's next try clears it; the plugin's log says what keeps it from"
                " reading kubelet's records",
            )
        for region in regions:
            self.check(plan)  # before each step that begins work for this owner
            await self._bring(plan, work, region, used=region.id in used)

    def _needs_scrub(
        self, region: Region, target: Target | None, used: frozenset[RegionId]
    ) -> bool:
        match self._operations.ledger.record(region.id).condition:
            case Condition.BLANK:
                # Handed over blank before: a container has run on it since.
                return target is None and region.id in used
            case Condition.UNBLANKED | Condition.PROGRAMMED:
                # There may be a blank bitstream by now; or it is this owner's own image, since
                # every end of an allocation leaves DIRTY.
                return target is None
            case _:
                return True

    async def _bring(self, plan: Plan, work: Work, region: Region, *, used: bool) -> None:
        """From clean, or this owner's own, to what the container asks for."""
        operations, ledger = self._operations, self._operations.ledger
        target, report, port = (
            plan.targets[region.id],
            work.reports[region.id],
            work.ports[region.id],
        )
        record = ledger.record(region.id)
        if target is None:
            if not report.scrubbed:
                expected = record.afu_id
                assert expected is not None, "a BLANK region's AFU id is always known"
                await operations.step(
                    work.card, report, lambda: steps.verify(port, expected, report), pr=False
                )
            if work.card.owner_loads:
                await operations.step(work.card, report, port.leave, pr=False)
            ledger.work.clean(region.id, report.afu_id, blank=True)
            return
        own = not report.scrubbed and (used or record.condition is Condition.PROGRAMMED)
        await work.program(region, target.image, target.settings, quiesce=own)
        ledger.work.programmed(region.id, target.afu_id)
