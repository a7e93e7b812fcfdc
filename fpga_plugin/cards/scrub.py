"""Scrubs regions that are no longer used; a free one then comes back to the list.

A region may already have a new owner that has not begun. It is scrubbed too, since kubelet, after
its restart, may start the new owner's container without PreStart.

The scrubber is the worker of the queue of cards (`queue`). A region waits if its earlier tenant
still runs or a process has its port open; everything else goes on. When kubelet restarts, the work
stops between two regions.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import structlog

from fpga_plugin.allocation.journal.records import CLEAN, Condition, Tenancy
from fpga_plugin.allocation.obstacles import PROCESSES, Stops
from fpga_plugin.allocation.queue import CardQueue, Outcome
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.cards.recovery import Recovery
from fpga_plugin.cards.reports import Report
from fpga_plugin.errors import (
    CardGoneError,
    FpgaPluginError,
    NotFinishedError,
    PortInUseError,
    RefusedError,
)
from fpga_plugin.hardware.backend import Port
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import CardId, InterfaceId, RegionId
from fpga_plugin.kubernetes.names import PodUid

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class _Blank:
    """The blank bitstream for a region's scrub; None under best-effort."""

    image: Bitstream | None = None


_KEEP = _Blank()
"""No blank bitstream: the function stays (`Naming.keeps`)."""


class Scrubber:
    """The worker of the queue of cards (`CardWorker`).

    Args:
        operations: what is done to a card.
        recovery: of poisoned ports of cards without an owner.
        queue: where cards that may have work are added.
    """

    def __init__(self, operations: CardOperations, recovery: Recovery, queue: CardQueue) -> None:
        self._operations = operations
        self._recovery = recovery
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

    def has_work(self, card_id: CardId) -> bool:
        """Whether a card has work, now or once a tenant is gone."""
        card = self._operations.ledger.cards.get(card_id)
        return card is not None and bool(
            self._due(card)
            or self._memory_due(card)
            or self._tenants_elsewhere(card)
            or self._bound_by_plugin(card)
            or self._recovery.due(card)
            or self._recovery.left_over(card)
        )

    def _tenants_elsewhere(self, card: Card) -> list[Tenancy]:
        """Tenancies of other regions, without an allocation, that lead to a node of the card."""
        strangers = map(self._operations.ledger.strangers, card.regions)
        return [one for of_region in strangers for one in of_region if one.left]

    def _bound_by_plugin(self, card: Card) -> list[Region]:
        """Clean regions without an owner for which the plugin bound drivers."""
        ledger = self._operations.ledger
        return [
            region
            for region in card.regions
            if self._operations.backend.bound_by_plugin(region)
            and ledger.record(region.id).condition in CLEAN
            and ledger.region_allocation(region.id) is None
            and self._may_work(region)
        ]

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
            card = operations.ledger.cards.get(card_id)
            if card is None or not self._queue.open:
                return Outcome.NOTHING
            if self._recovery.left_over(card):
                self._recovery.finish(card)
            if self._recovery.due(card):
                back = await self._recovery.rebind(card, owner=frozenset())
                return Outcome.DONE if back else Outcome.NOTHING
            tenants = await self._end_tenancies_elsewhere(card)
            if not self._due(card):
                if self._memory_due(card):
                    return await self._clear_memory(card)
                await self._give_back(card)
                return Outcome.WAIT if tenants else Outcome.NOTHING
            blanks = await self._blanks(card)
            if not blanks:
                return Outcome.NOTHING  # the store's change adds the card again
            return await self._scrub_due(card, blanks)

    async def _scrub_due(self, card: Card, blanks: Mapping[RegionId, _Blank]) -> Outcome:
        """Scrub a card's due regions; a card that `resets` is reset first after an owner."""
        operations = self._operations
        reports: dict[RegionId, Report] = {}
        if ended := self._ended(card, blanks):
            reset = await self._reset(card, ended, reports)
            if reset is None:
                return Outcome.WAIT
            card = reset
        try:
            async with AsyncExitStack() as stack:
                instance = self._queue.instance
                held = await self._take(card, blanks, stack)
                for region in held:
                    reports.setdefault(region.id, self._begin_report(region.id))
                scrubbed = await self._scrub(card, blanks, held, reports, instance)
            # Closed first: once a region is reported clean, its port is free.
            self._clean(card, scrubbed, reports, blanks, ended)
        finally:
            operations.settle(reports)
            for report in reports.values():
                operations.report(report)
        await self._give_back(card)
        clean = [operations.ledger.record(region).condition in CLEAN for region in reports]
        return Outcome.DONE if clean and all(clean) else Outcome.WAIT

    async def _blanks(self, card: Card) -> dict[RegionId, _Blank]:
        """The blank for each due region; regions that cannot be scrubbed are left out.

        Decided once for the whole scrub: owners may come and go meanwhile.
        """
        ledger = self._operations.ledger
        blank: _Blank | None = None
        reason = ""
        if not all(ledger.naming.keeps(region.id) for region in self._due(card)):
            try:
                blank = _Blank(await self._operations.blanks.load(card))
            except RefusedError as error:
                reason = error.message
        blanks: dict[RegionId, _Blank] = {}
        for region in self._due(card):
            if ledger.naming.keeps(region.id):
                blanks[region.id] = _KEEP
            elif blank is not None:
                blanks[region.id] = blank
            elif reason and ledger.record(region.id).reason != reason:
                ledger.work.dirty([region.id], reason)
        return blanks

    def _ended(self, card: Card, blanks: Mapping[RegionId, _Blank]) -> frozenset[RegionId]:
        """Regions of a card that is reset between owners, whose last owner's allocation ended.

        Between two containers of one allocation only the image is replaced, without a reset.
        """
        ledger = self._operations.ledger
        return frozenset(
            region.id
            for region in self._due(card)
            if card.resets
            and region.id in blanks
            and (
                (allocation := ledger.region_allocation(region.id)) is None
                or not allocation.used
                or ledger.tenancies.left(region.id)
            )
        )

    async def _reset(
        self, card: Card, ended: frozenset[RegionId], reports: dict[RegionId, Report]
    ) -> Card | None:
        """Reset the card and return it; None: the reset has to wait, or failed."""
        operations = self._operations
        regions = [region for region in self._due(card) if region.id in ended]
        for region in regions:
            if not await self._is_unused(region):
                return None
        if not self._queue.synced or any(region not in self._due(card) for region in regions):
            return None  # a container may have begun while we looked
        operations.begin(card, ended)
        operations.ledger.work.working(ended)
        reports |= {region: self._begin_report(region) for region in ended}
        first = reports[regions[0].id]
        first.scrubbed = True
        try:
            back = await self._recovery.reset(card, first)
        except FpgaPluginError as error:
            for region in regions:
                self._wait_for(region.id, error.message, error.hint)
            operations.report(first)
            return None
        else:
            operations.ledger.work.dirty(ended, "its card was reset, and it is not blank yet")
            return back
        finally:
            operations.settle(ended)

    async def _give_back(self, card: Card) -> None:
        """Unbind drivers that were bound for a region once it has no owner."""
        operations = self._operations
        for region in self._bound_by_plugin(card):
            try:
                await operations.workers.run(
                    card.id, partial(operations.backend.give_back, card, region)
                )
            except FpgaPluginError as error:
                # Nothing depends on it: the next owner finds them bound.
                log.warning("drivers not given back", region=region.id, error=str(error))

    async def _end_tenancies_elsewhere(self, card: Card) -> bool:
        """Whether a pod whose allocation ended may still open a node of the card."""
        gone: list[Tenancy] = []
        living: set[PodUid] = set()
        for one in self._tenants_elsewhere(card):
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
        self, card: Card, blanks: Mapping[RegionId, _Blank], stack: AsyncExitStack
    ) -> dict[Region, Port]:
        """Hold the ports of those regions that are not in use."""
        operations = self._operations
        held: dict[Region, Port] = {}
        for region in self._due(card):
            if region.id not in blanks:
                continue
            if not await self._is_unused(region):
                continue
            if not self._queue.synced or region not in self._due(card):
                continue  # a container may have begun while we looked
            try:
                ports = await stack.enter_async_context(operations.ports(card, [region]))
            except (PortInUseError, CardGoneError, NotFinishedError) as error:
                self._wait_for(region.id, error.message, error.hint)
                continue
            if why := operations.ledger.obstacles.first(region.id, Stops.SCRUB):
                # Its device number shows only now.
                self._wait_for(region.id, why.message, why.operator)
                continue
            held[region] = ports[region.id]
            self._waits.pop(region.id, None)
        return held

    async def _is_unused(self, region: Region) -> bool:
        """Whether neither a former owner nor the present one runs; if not, the scrub waits."""
        operations = self._operations
        left = operations.ledger.tenancies.left(region.id)
        if (one := await operations.living(left)) is not None:
            self._wait_for(region.id, f"pod {one.pod}, its last owner, still runs", PROCESSES)
            return False
        if (uid := await self._running_owner(region)) is not None:
            self._wait_for(region.id, f"pod {uid}, its owner, runs containers")
            return False
        return True

    async def _running_owner(self, region: Region) -> PodUid | None:
        """The owner whose containers ended as often as they began, and which runs some.

        Kubelet may report the end of one container twice, while its successor runs.
        """
        allocation = self._operations.ledger.region_allocation(region.id)
        if allocation is None or allocation.pod is None or not allocation.used:
            return None
        runs = await asyncio.to_thread(self._operations.cgroups.may_run_containers, allocation.pod)
        return allocation.pod if runs else None

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

    async def _scrub(
        self,
        card: Card,
        blanks: Mapping[RegionId, _Blank],
        held: Mapping[Region, Port],
        reports: Mapping[RegionId, Report],
        instance: int,
    ) -> list[RegionId]:
        """Scrub regions; returns those that were scrubbed, with the card's memory.

        `instance`: the kubelet instance in which they were unused. The next one may start an
        owner's containers without PreStart; its records since then do not show them.
        """
        operations, ledger = self._operations, self._operations.ledger
        if not held:
            return []
        ledger.work.working(reports)
        if card.clears_memory:
            ledger.work.set_memory_clear_pending(card.id, open_=True)
        done: dict[RegionId, Report] = {}
        for region, port in held.items():
            if not self._nobody_began(instance):
                break
            blank, report = blanks[region.id], reports[region.id]
            try:
                await operations.scrub(card, region, port, blank.image, report, keep=blank is _KEEP)
            except FpgaPluginError:
                continue  # the ledger knows; the card's other regions go on
            done[region.id] = reports[region.id]
        if not self._nobody_began(instance):
            return []
        if done:
            try:
                await operations.clear_memory(card, done)
            except FpgaPluginError as error:
                log.warning("scrub failed", card=card.id, error=str(error))
                return []
        return list(done)

    def _nobody_began(self, instance: int) -> bool:
        return self._queue.synced and self._queue.instance == instance

    def _clean(
        self,
        card: Card,
        regions: Iterable[RegionId],
        reports: Mapping[RegionId, Report],
        blanks: Mapping[RegionId, _Blank],
        ended: Collection[RegionId],
    ) -> None:
        ledger = self._operations.ledger
        for region in regions:
            # Else its card went in the meantime, and what is there now is another one.
            if ledger.record(region).condition is Condition.SCRUBBING:
                blanked = blanks[region].image is not None
                whole = not card.resets or region in ended
                ledger.work.clean(region, reports[region].afu_id, blank=blanked, ended=whole)

    async def _clear_memory(self, card: Card) -> Outcome:
        """Clear the memory of a card whose regions are all clean and free."""
        reports = {region.id: Report(region.id) for region in card.regions}
        self._operations.begin(card, reports)
        try:
            await self._operations.clear_memory(card, reports)
        except FpgaPluginError as error:
            log.warning("memory not cleared", card=card.id, error=str(error))
            return Outcome.NOTHING
        return (
            Outcome.WAIT
            if card.id in self._operations.ledger.memory_clear_pending
            else Outcome.DONE
        )
