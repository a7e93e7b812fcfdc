"""Scrubs regions that are no longer used; a free one then comes back to the list.

A region may already have a new owner that has not begun. It is scrubbed too, since kubelet, after
its restart, may start the new owner's container without PreStart.

The scrubber is the worker of the queue of cards (`queue`). A region waits if its earlier tenant
still runs or a process has its port open. A region whose scrub fails, or whose port cannot be
opened, is judged as `CardOperations.step` says. Either way the card's other regions go on. When
kubelet restarts, the work stops between two regions.
"""

import asyncio
import contextlib
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import structlog

from fpga_plugin.allocation.journal.records import CLEAN, Condition, Tenancy
from fpga_plugin.allocation.obstacles import PROCESSES, Stops
from fpga_plugin.allocation.queue import CardQueue, Outcome
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards.inventory import Inventory
from fpga_plugin.cards.operations import CardOperations, Work
from fpga_plugin.cards.recovery import Recovery
from fpga_plugin.cards.reports import Report
from fpga_plugin.errors import (
    CardGoneError,
    FpgaPluginError,
    HardwareError,
    NotFinishedError,
    PortInUseError,
)
from fpga_plugin.hardware.backend import Port
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import CardId, InterfaceId, RegionId
from fpga_plugin.kubernetes.names import PodUid

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Due:
    """What a scrub is to do, decided once: owners may come and go meanwhile.

    Attributes:
        regions: those that can be scrubbed.
        keeping: those of them whose function stays (`Naming.keeps`).
        blank: the blank bitstream for the others; None: under best-effort, they stay as they are.
    """

    regions: frozenset[RegionId]
    keeping: frozenset[RegionId]
    blank: Bitstream | None


class Scrubber:
    """The worker of the queue of cards (`CardWorker`).

    Args:
        operations: what is done to a card.
        recovery: of poisoned ports of cards without an owner.
        inventory: looks at a card whose memory was cleared through its blank bitstream.
        queue: where cards that may have work are added.
    """

    def __init__(
        self,
        operations: CardOperations,
        recovery: Recovery,
        inventory: Inventory,
        queue: CardQueue,
    ) -> None:
        self._operations = operations
        self._recovery = recovery
        self._inventory = inventory
        self._queue = queue
        self._waits: dict[RegionId, str] = {}
        self._living_elsewhere: dict[CardId, set[PodUid]] = {}
        operations.ledger.subscribe(self._changed)

    def _changed(self, card: CardId | None) -> None:
        """An allocation's end may leave regions of other cards dirty too, whose numbers moved."""
        # Work on a card sees changes itself, and causes many of them.
        if card is not None and not self._queue.busy(card):
            self._queue.add(card)

    def blank_changed(self, interface_id: InterfaceId | None) -> None:
        """The store may have another blank bitstream for a kind of card; None: for any."""
        ledger = self._operations.ledger
        self._operations.blanks.forget(interface_id)
        for card in ledger.cards.values():
            if interface_id in {None, card.interface_id}:
                ledger.work.forgive(card.id, "the blank bitstream was replaced")
                self._queue.add(card.id)

    def waits_for(self, region: RegionId) -> str:
        """What the scrub of a DIRTY region waited for at the last look; empty: nothing."""
        return self._waits.get(region, "")

    def _may_work(self, region: Region) -> bool:
        return self._operations.ledger.obstacles.first(region.id, Stops.SCRUB) is None

    def _due(self, card: Card) -> list[Region]:
        ledger = self._operations.ledger
        return [
            region
            for region in card.regions
            if ledger.record(region.id).condition is Condition.DIRTY
            and self._nobody_runs(region)
            and self._may_work(region)
        ]

    def _nobody_runs(self, region: Region) -> bool:
        """Whether no container has the region, by kubelet's calls.

        It has no owner, or none of its owner's containers began yet, or as many ended as began.
        """
        allocation = self._operations.ledger.region_allocation(region.id)
        return (
            allocation is None
            or not allocation.used
            or self._operations.ledger.device_plugin.balanced(allocation.device)
        )

    def _memory_due(self, card: Card) -> bool:
        """Whether the memory can be cleared without a scrub."""
        ledger = self._operations.ledger
        return (
            card.clears_memory
            and card.id in ledger.memory_clear_pending
            and not ledger.allocations_on(card.id)
            and ledger.others_clean(card, ())
            and all(map(self._may_work, card.regions))
        )

    async def work(self, card_id: CardId) -> Outcome:
        """One look at a card."""
        operations = self._operations
        async with operations.workers.lock(card_id):
            if not self._queue.open:
                return Outcome.NOTHING
            if self._recovery.unfinished(card_id) and (
                self._recovery.paused(card_id) or not await self._finish_reset(card_id)
            ):
                return Outcome.NOTHING  # it is added again after a pause
            card = operations.ledger.cards.get(card_id)
            return Outcome.NOTHING if card is None else await self._work(card)

    async def _work(self, card: Card) -> Outcome:
        """Of a card that is there, with its lock held."""
        # After a rebind whose end could not be journalled, or if someone else bound its driver.
        self._operations.ledger.hardware.set_rebinding(card.id, rebinding=False)
        if self._recovery.due(card):
            back = await self._recovery.rebind(card, owner=frozenset())
            return Outcome.DONE if back else Outcome.NOTHING
        tenants = await self._end_tenancies_elsewhere(card)
        if card.memory and card.some_memory_stays:
            await self._try_another_blank(card)
        if not self._due(card):
            if self._memory_due(card):
                return await self._clear_memory(card)
            await self._give_back(card)
            return Outcome.WAIT if tenants else Outcome.NOTHING
        due = await self._scrubbable(card)
        if not due.regions:
            return Outcome.NOTHING  # the store's change adds the card again
        return await self._scrub_due(card, due)

    async def _try_another_blank(self, card: Card) -> None:
        """A free card whose blank does not reach all of its memory is due if the store has another.

        Any other clean card stays as it is until its next owner ends (invariant 9).
        """
        ledger = self._operations.ledger
        blank = await self._operations.blanks.afu_id(card)
        records = [ledger.record(r.id) for r in card.regions if not ledger.naming.keeps(r.id)]
        other = [r.region for r in records if r.condition in CLEAN and r.afu_id != blank]
        if blank is not None and other and not ledger.allocations_on(card.id):
            ledger.work.dirty(other, "the store has another blank bitstream")

    async def _scrub_due(self, card: Card, due: _Due) -> Outcome:
        """Scrub a card's due regions; a card that `resets` is reset first after an owner."""
        operations = self._operations
        reports: dict[RegionId, Report] = {}
        if ended := self._recovery.due_for_reset(card, due.regions):
            reset = await self._reset(card, ended, reports)
            if reset is None:
                return Outcome.WAIT
            card = reset
        try:
            async with AsyncExitStack() as stack:
                check = partial(self._check_instance, self._queue.instance)
                ports = await self._take(card, due, reports, stack)
                for region in ports:
                    reports.setdefault(region, self._begin_report(region))
                work = Work(operations, card, ports, reports, check)
                scrubbed = await self._scrub(work, due)
            if card.memory and scrubbed:
                # The last look judged by the store's blank, which may be another one than came on.
                await self._inventory.look(card.id)
            # Closed first: once a region is reported clean, its port is free.
            for region in scrubbed:
                # Else its card went in the meantime, and what is there now is another one.
                if operations.ledger.record(region).condition is Condition.SCRUBBING:
                    blanked = region not in due.keeping and due.blank is not None
                    whole = not card.resets or region in ended
                    afu_id = reports[region].afu_id
                    operations.ledger.work.clean(region, afu_id, blank=blanked, ended=whole)
        finally:
            operations.settle(reports)
            for report in reports.values():
                operations.report(report)
        await self._give_back(card)
        clean = [operations.ledger.record(region).condition in CLEAN for region in reports]
        return Outcome.DONE if clean and all(clean) else Outcome.WAIT

    async def _scrubbable(self, card: Card) -> _Due:
        """The due regions that can be scrubbed; of the others the ledger has the reason."""
        ledger = self._operations.ledger
        blank, reason = None, ""
        if not all(ledger.naming.keeps(region.id) for region in self._due(card)):
            try:
                blank = await self._operations.blanks.load(card)
            except FpgaPluginError as error:
                reason = error.message
        due = frozenset(region.id for region in self._due(card))
        keeping = frozenset(filter(ledger.naming.keeps, due))
        if not reason:
            return _Due(due, keeping, blank)
        for region in due - keeping:
            if ledger.record(region).reason != reason:
                ledger.work.dirty([region], reason)
        return _Due(keeping, keeping, None)

    async def _reset(
        self, card: Card, ended: frozenset[RegionId], reports: dict[RegionId, Report]
    ) -> Card | None:
        """Reset the card and return it; None: the reset has to wait, or failed."""
        operations = self._operations
        regions = [region for region in card.regions if region.id in ended]
        for region in regions:
            if not await self._is_unused(region):
                return None
        if not self._queue.synced or any(region not in self._due(card) for region in regions):
            return None  # a container may have begun while we looked
        reports |= {region: self._begin_report(region) for region in ended}
        first = reports[regions[0].id]
        try:
            return await self._recovery.reset(card, ended, first)
        except FpgaPluginError as error:
            for region in regions:
                self._wait_for(region.id, error.message, error.hint)
            operations.report(first)
            return None

    async def _finish_reset(self, card_id: CardId) -> bool:
        """Finish a reset that failed, whatever the card's health says; False: it has to wait."""
        try:
            await self._recovery.finish(card_id)
        except FpgaPluginError as error:
            card = self._operations.ledger.cards.get(card_id)
            for region in () if card is None else card.regions:
                self._wait_for(region.id, error.message, error.hint)
            return False
        return True

    async def _give_back(self, card: Card) -> None:
        """Unbind drivers that the plugin bound for a region, once it is clean without an owner."""
        backend, ledger = self._operations.backend, self._operations.ledger
        for region in card.regions:
            if not (
                backend.bound_by_plugin(region)
                and ledger.record(region.id).condition in CLEAN
                and ledger.region_allocation(region.id) is None
                and self._may_work(region)
            ):
                continue
            try:
                await self._operations.workers.run(card.id, backend.give_back, card, region)
            except FpgaPluginError as error:
                # Nothing depends on it: the next owner finds them bound.
                log.warning("drivers not given back", region=region.id, error=str(error))

    async def _end_tenancies_elsewhere(self, card: Card) -> bool:
        """Whether a pod whose allocation ended may still open a node of the card."""
        gone: list[Tenancy] = []
        living: set[PodUid] = set()
        strangers = map(self._operations.ledger.strangers, card.regions)
        for one in [one for of_region in strangers for one in of_region if one.left]:
            if await self._operations.living([one]) is None:
                gone.append(one)
            elif one.pod is not None:
                living.add(one.pod)
        self._operations.ledger.work.end_tenancies(gone)
        if living - self._living_elsewhere.get(card.id, set()):
            log.warning(
                "a card is held back: a pod that still runs may open its regions",
                card=card.id,
                pods=sorted(living),
                hint="the device numbers changed after the pod was given its node; see why its"
                " processes do not end",
            )
        self._living_elsewhere[card.id] = living
        return bool(living)

    async def _take(
        self, card: Card, due: _Due, reports: dict[RegionId, Report], stack: AsyncExitStack
    ) -> dict[RegionId, Port]:
        """Hold the ports of those regions that are not in use.

        `reports` gets those that cannot be opened: their scrubs failed, and the ledger knows.
        """
        operations = self._operations
        held: dict[RegionId, Port] = {}
        for region in self._due(card):
            if region.id not in due.regions or not await self._is_unused(region):
                continue
            if not self._queue.synced or region not in self._due(card):
                continue  # a container may have begun while we looked
            try:
                ports = await stack.enter_async_context(operations.ports(card, [region]))
            except (PortInUseError, CardGoneError, NotFinishedError) as error:
                self._wait_for(region.id, error.message, error.hint)
                continue
            except HardwareError as error:
                self._waits.pop(region.id, None)  # the ledger has the reason
                report = reports.setdefault(region.id, self._begin_report(region.id))
                report.scrubbed = True
                await operations.failed(card, report, error)
                continue
            if why := operations.ledger.obstacles.first(region.id, Stops.SCRUB):
                # Its device number shows only now.
                self._wait_for(region.id, why.message, why.operator)
                continue
            held |= ports
            self._waits.pop(region.id, None)
        return held

    async def _is_unused(self, region: Region) -> bool:
        """Whether neither a former owner nor the present one runs; if not, the scrub waits."""
        operations = self._operations
        left = operations.ledger.tenancies.left(region.id)
        if (one := await operations.living(left)) is not None:
            self._wait_for(region.id, f"pod {one.pod}, its last owner, still runs", PROCESSES)
            return False
        owner = operations.ledger.region_allocation(region.id)
        if owner is None or owner.pod is None or not owner.used:
            return True
        # Kubelet may report the end of one container twice, while its successor runs.
        if await asyncio.to_thread(operations.cgroups.may_run_containers, owner.pod):
            self._wait_for(region.id, f"pod {owner.pod}, its owner, runs containers")
            return False
        return True

    def _begin_report(self, region: RegionId) -> Report:
        # An owner that is there has its containers behind it, or still before it.
        ledger = self._operations.ledger
        allocation = ledger.region_allocation(region)
        pod = None if allocation is None else allocation.pod
        return Report(region, pod=pod, former=self._operations.former(region))

    def _wait_for(self, region: RegionId, what: str, hint: str = "") -> None:
        """Note what a scrub waits for, and what the operator can do; as `Obstacle`s are shown."""
        reason = f"{what} ({hint})" if hint else what
        if self._waits.get(region) != reason:
            self._waits[region] = reason
            about = self._begin_report(region).concerned()
            log.info("scrub waits", region=region, reason=reason, **about)

    async def _scrub(self, work: Work, due: _Due) -> list[RegionId]:
        """Scrub what is held; returns the regions that were scrubbed, with the card's memory."""
        operations, card = self._operations, work.card
        operations.ledger.work.working(work.ports)
        done: dict[RegionId, Report] = {}
        for region in card.regions:
            if region.id in work.ports:
                # If it fails, the ledger knows; the card's other regions go on.
                with contextlib.suppress(FpgaPluginError):
                    await work.scrub([region], due.blank, due.keeping)
                    done[region.id] = work.reports[region.id]
        try:
            work.check()
            if done:
                await operations.clear_memory(card, done)
        except FpgaPluginError as error:
            log.warning("scrub failed", card=card.id, error=str(error))
            return []
        return list(done)

    def _check_instance(self, instance: int) -> None:
        """Check that the kubelet instance is the one in which the regions were unused.

        The next one may start an owner's containers without PreStart; its records since then do
        not show them.

        Raises:
            NotFinishedError: it is another one.
        """
        if not (self._queue.synced and self._queue.instance == instance):
            raise NotFinishedError("kubelet restarted meanwhile", hint="its records decide")

    async def _clear_memory(self, card: Card) -> Outcome:
        """Clear the memory of a card whose regions are all clean and free."""
        reports = {region.id: Report(region.id) for region in card.regions}
        self._operations.begin(card, reports)
        try:
            await self._operations.clear_memory(card, reports)
        except FpgaPluginError as error:
            log.warning("memory not cleared", card=card.id, error=str(error))
            return Outcome.NOTHING
        return Outcome.WAIT  # an earlier tenant may have kept it from being cleared
