"""Keeps the ledger's view of the hardware: cards that come, go, fail and recover.

It scans everything at the start and when events were lost, and one card at every other event. There
is no periodic rescan. Health signals are read with the card's lock held, since they mislead while a
PR runs. The scan itself needs no lock, so that it sees a pulled card while one of its regions is
being programmed.
"""

import asyncio
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import structlog

from fpga_plugin.allocation.journal.records import CLEAN, Condition
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.cards.functions import FunctionNews
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.cards.port_error_log import PortErrorLog
from fpga_plugin.cards.reads import SILENT, CardReads, SilentCardError, afu_ids
from fpga_plugin.cards.workers import STUCK, STUCK_HINT
from fpga_plugin.errors import FpgaPluginError, HardwareError, NotFinishedError
from fpga_plugin.hardware.backend import BIND_DRIVERS
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.model import (
    Card,
    CardHealth,
    CardProblem,
    Iommu,
)
from fpga_plugin.host.ticks import tick
from fpga_plugin.ids import AfuId, CardId, PciAddress, RegionId
from fpga_plugin.settings.values import CardSelection

log = structlog.get_logger()

_SETTLING = 1.0
"""Seconds until a card that comes and goes is looked at again."""

_Observed = dict[RegionId, AfuId | None]
_Signals = tuple[CardHealth, _Observed]


_REACH = {
    Iommu.SHARED: "other devices that are in its IOMMU group",
    Iommu.IDENTITY: "all of the node's memory",
    Iommu.NONE: "all of the node's memory",
    Iommu.UNKNOWN: "perhaps all of the node's memory",
}
"""What a card's DMA reaches if nothing limits it."""


class Inventory:
    """Keeps the ledger's view of the hardware.

    Args:
        operations: has ledger, backend, blanks and the cards' locks.
        queue: where each card that may have work is added.
        news: learns of cards that fail and recover.
        reads: of cards that may not answer.
        cards: the cards that the operator lets the plugin touch.
        interval: seconds between two looks at all cards' health. For as long a signal of trouble
            has to be gone before its region counts as recovered: a card at the edge of its
            temperature limit must not come and go.
    """

    def __init__(
        self,
        operations: CardOperations,
        queue: CardQueue,
        *,
        recorder: EventRecorder,
        reads: CardReads,
        cards: CardSelection,
        interval: float,
    ) -> None:
        self._ledger = operations.ledger
        self._backend = operations.backend
        self._workers = operations.workers
        self._cards = cards
        self._queue = queue
        self._operations = operations
        self._port_errors = PortErrorLog(operations, reads)
        self._recorder = recorder
        self._reads = reads
        self._interval = interval
        self._well_since: dict[RegionId, float] = {}
        self._scans: dict[CardId, asyncio.Lock] = {}
        self._again: set[CardId | None] = set()  # what `changed` has begun to scan
        # Signals at the last look that are worth showing and make nothing Unhealthy.
        self.degraded: dict[CardId, tuple[str, ...]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._functions = FunctionNews(operations.ledger)
        self._closing = False
        self.problems = operations.ledger.problems  # why such cards are refused

    async def scan(self) -> None:
        """Scan everything again; health signals only of cards on which no work runs."""
        self._again.discard(None)
        present = frozenset(await asyncio.to_thread(self._backend.card_ids))
        known = self._ledger.cards.keys() | self.problems.keys()
        await asyncio.gather(*map(self._scan_idle, sorted(present | known)))

    async def _scan_idle(self, card_id: CardId) -> None:
        await self.look(card_id)
        if not self._workers.locked(card_id):
            await self.check(card_id)

    def changed(self, card: CardId | None) -> None:
        """A card may have changed; None: any card (`EventSource`)."""
        if self._closing or card in self._again:
            return
        self._again.add(card)
        if card is None:
            log.info("events were lost, scanning all cards")
            self._spawn(self.scan())
        else:
            self._spawn(self.rescan(card))

    def _look_later(self, card: CardId) -> None:
        """A card has changed since a moment ago, so it comes and goes: look again later."""
        asyncio.get_running_loop().call_later(_SETTLING, self.changed, card)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except FpgaPluginError as error:
            log.warning("scan failed", error=str(error))
        except Exception:
            log.exception("scan failed")

    async def rescan(self, card_id: CardId) -> None:
        """Scan one card again, with its health signals; takes the card's lock for these."""
        await self.look(card_id)
        if card_id in self._ledger.cards:  # else no look need wait for work that does not end
            await self.check(card_id)

    async def look(self, card_id: CardId) -> None:
        """Scan one card again, without its health signals."""
        if not self.selects(card_id):
            return
        async with self._scans.setdefault(card_id, asyncio.Lock()):
            self._again.discard(card_id)
            try:
                found, observed = await self._reads.run(card_id, lambda: self._see(card_id))
            except HardwareError as error:
                self._no_answer(card_id, error)
                return
            if isinstance(found, CardProblem):
                self._problem(found)
                self._gone(card_id)
                return
            self.problems.pop(card_id, None)
            if found is None or observed is None:
                self._gone(card_id)
                if found is not None:  # it went while it was looked at
                    self._look_later(card_id)
                return
            blank = await self._blank(found)
            exposed = self._operations.blanks.exposed(found, observed.values(), blank)
            self._found(exposed, observed, blank)

    def _see(self, card_id: CardId) -> tuple[Card | CardProblem | None, _Observed | None]:
        """What is in a card's place, and its regions' AFU ids; None: it went meanwhile."""
        found = self._backend.scan_card(card_id)
        return found, afu_ids(self._backend, found.regions) if isinstance(found, Card) else None

    async def _blank(self, card: Card) -> AfuId | None:
        """AFU id of the blank for a card's free regions; None: they are not blanked."""
        if self._ledger.naming.serves_functions or not card.reprogrammable:
            return None
        return await self._operations.blanks.afu_id(card)

    def _found(self, card: Card, observed: _Observed, blank: AfuId | None) -> None:
        if self._ledger.cards.get(card.id) != card:
            log.info(
                "card found",
                card=card.id,
                interface_id=card.interface_id,
                regions=len(card.regions),
                ports=card.ports,
                numa_node=card.numa_node,
            )
            self._say_what_is_exposed(card)
        replaced = self._ledger.hardware.card_found(card, observed, blank)
        if replaced:
            log.warning(
                "card went and came back",
                card=card.id,
                regions=sorted(replaced),
                **self._owners(card.id),
            )
            self._recorder.card_failed(card.id, "it went and came back")
            self._backend.accept_errors(card.id)  # errors from before are not counted against it
        self._functions.found(card)
        # A reset looks at its card itself, and its caller continues with it.
        if card.id not in self._ledger.rebinding:
            self._queue.add(card.id)

    def _say_what_is_exposed(self, card: Card) -> None:
        """Log what a scrub does not undo, and no setting of the plugin's mends."""
        before = self._ledger.cards.get(card.id)
        given = self._ledger.obstacles.exposure.note(card) or None
        if card.never_cleared and (before is None or not before.never_cleared):
            log.warning(
                "a card's memory is never cleared",
                card=card.id,
                given=given,
                hint="a pod may read what the last one left there; FPGA_PLUGIN_UNCLEARED_MEMORY"
                " says who gets such a card (docs/security.md)",
            )
        exposed = card.iommu is not Iommu.TRANSLATE
        if exposed and (before is None or before.iommu is not card.iommu):
            log.warning(
                "a card's DMA is not limited by an IOMMU",
                card=card.id,
                iommu=card.iommu.value,
                given=given,
                hint=f"an accelerator on it can read and write {_REACH[card.iommu]};"
                " FPGA_PLUGIN_UNTRANSLATED_DMA says who gets such a card (docs/security.md)",
            )

    def _gone(self, card_id: CardId) -> None:
        if card_id in self._ledger.cards:
            log.warning("card gone", card=card_id, **self._owners(card_id))
            self._recorder.card_failed(card_id, "gone")
            self._ledger.hardware.card_gone(card_id)
            self.degraded.pop(card_id, None)

    def _owners(self, card_id: CardId) -> dict[str, Collection[str]]:
        """The owners of a card's devices, as values of a log line."""
        allocations = self._ledger.allocations_on(card_id)
        return {
            "owned": [allocation.device for allocation in allocations],
            "pods": frozenset(
                allocation.pod for allocation in allocations if allocation.pod is not None
            ),
        }

    def _problem(self, problem: CardProblem) -> None:
        card_id = problem.address.card_id
        if self.problems.get(card_id) != problem:
            self.problems[card_id] = problem
            log.warning("card skipped", card=card_id, error=problem.message, hint=problem.hint)

    def say_what_is_missing(self, sysfs_root: str) -> None:
        """Log missing cards after the first scan: a wrong setting looks like a node without any."""
        wanted = self._cards.only or frozenset()
        for card in sorted(wanted - self._ledger.cards.keys() - self.problems.keys()):
            log.warning(
                "a card that FPGA_PLUGIN_CARDS names is not there",
                card=card,
                hint="`fpga-plugin card list` lists those that are; it is served once it comes",
            )
        if not wanted and not self._ledger.cards and not self.problems:
            log.warning(
                "no FPGA cards on this node",
                hint=f"{BIND_DRIVERS}. And the node's /sys has to be mounted at {sysfs_root}"
                " (FPGA_PLUGIN_SYSFS_ROOT); a card is served once it comes",
            )

    def selects(self, card_id: CardId) -> bool:
        """Whether the operator lets the plugin touch a card."""
        return self._cards.selects(card_id)

    async def run(self) -> None:
        """Look for signals that no event reports, until cancelled."""
        while True:
            await tick(self._interval)
            try:
                await self.check_all()
            except NotFinishedError as error:  # no thread
                log.warning("cards not looked at", error=str(error))

    async def check_all(self) -> None:
        """Read the health signals of all cards.

        First it reads all idle cards in one turn of a thread, which is all that an idle node costs.
        It then looks at each card that has changed with that card's lock held, in a task of its
        own. A card at work is left to its work and to a later look, and no other card waits for it:
        work may take minutes. If it never ends, nobody may get the card (`WORK_SECONDS`).
        """
        idle = {c.id: c for c in self._ledger.cards.values() if not self._workers.locked(c.id)}
        for card_id in [c for c, problem in self.problems.items() if problem.passing]:
            self.changed(card_id)
        signals, silent = await self._reads.each(idle, lambda card_id: self._signals(idle[card_id]))
        same = {
            card_id
            for card_id, seen in signals.items()
            if seen is not None
            and self._ledger.cards.get(card_id) == idle[card_id]
            and self._as_before(idle[card_id], *seen)
        }
        for card_id, card in tuple(self._ledger.cards.items()):
            if card_id in same:
                self._queue.add(card_id)
                continue
            if self._workers.locked(card_id):  # also if it is since its signals were read
                if not self._workers.stuck(card_id):
                    continue
                trouble = _failed(card, STUCK, STUCK_HINT)
            elif card_id in silent:
                trouble = _failed(card, SILENT)
            else:
                self._spawn(self.check(card_id))
                continue
            try:
                self._judged(card, trouble)
            except FpgaPluginError as error:  # such as a journal that cannot be written
                log.warning("scan failed", card=card_id, error=str(error))

    def _as_before(
        self, card: Card, health: CardHealth, observed: Mapping[RegionId, AfuId | None]
    ) -> bool:
        """Whether `check` would change nothing."""
        ledger = self._ledger
        regions = [region.id for region in card.regions]
        return (
            {r: ledger.failing[r] for r in regions if r in ledger.failing} == health.failed
            and not any(r in self._well_since for r in health.failed)
            and self.degraded.get(card.id, ()) == health.degraded
            and not self._lacks_guard(card, health)
            and self._operations.port_errors_logged.isdisjoint(regions)
            and all(ledger.hardware.as_left(r, observed[r]) for r in regions)
        )

    async def check(self, card_id: CardId) -> None:
        """Read a card's health signals, when no work runs on it."""
        async with self._workers.lock(card_id):
            card = self._ledger.cards.get(card_id)
            if card is None or self._closing:
                return
            # One thread's turn for both: on an idle node nothing else wakes the process.
            try:
                signals = await self._reads.run(card_id, lambda: self._signals(card))
            except SilentCardError:
                if self._ledger.cards.get(card_id) == card:
                    self._judged(card, _failed(card, SILENT))
                return
            await self._port_errors.look(card, {} if signals is None else signals[1])
            if self._ledger.cards.get(card_id) != card:
                return  # the scan that finds that looks at its health next
            if signals is None:
                self._look_later(card_id)
                return
            health, observed = signals
            self._verify(card, observed)
            if self._lacks_guard(card, health):
                health = await self._guard(card, health)
            self._judged(card, health)

    def _lacks_guard(self, card: Card, health: CardHealth) -> bool:
        """Whether other processes may change what the plugin, or an owner, has on a card."""
        ledger, made = self._ledger, CLEAN | {Condition.PROGRAMMED}
        return bool(health.unguarded) and any(
            ledger.record(region.id).condition in made
            # A card that went and came back, as with xclmgmt: its owner runs on what it holds.
            or ledger.region_allocation(region.id) is not None
            for region in card.regions
        )

    async def _guard(self, card: Card, health: CardHealth) -> CardHealth:
        """Restore the guard at once, owned or not; if that fails, the card gets no new owner."""
        try:
            left = any(self._ledger.left_to_owner(region.id) for region in card.regions)
            missing = await self._workers.run(card.id, self._backend.guard, card, left=left)
        except FpgaPluginError as error:
            fault = Fault(FaultKind.TRANSIENT, f"unguarded: {error.message}", error.hint)
            failed = {region.id: fault for region in card.regions}
            return replace(health, failed={**failed, **health.failed})
        if missing:
            log.error(
                "card was not guarded",
                card=card.id,
                missing=missing,
                hint="somebody could program it, or bound its driver anew; it is guarded again",
                **self._owners(card.id),
            )
            self._recorder.card_failed(card.id, f"{missing}; it is set again")
        return health

    def _verify(self, card: Card, observed: Mapping[RegionId, AfuId | None]) -> None:
        for region, record in self._ledger.hardware.verify(card.id, observed).items():
            if observed[region] is None:
                continue  # no change is known; the card's health says why it cannot be read
            log.error(
                "region changed by another process",
                region=region,
                afu_id=observed[region],
                expected=record.afu_id,
                **self._operations.owner(region),
            )
            shows = f"shows AFU {observed[region]} where {record.afu_id} was left"
            self._recorder.card_failed(card.id, f"region {region} {shows}")

    def _signals(self, card: Card) -> _Signals | None:
        """The card's health and AFU ids; None: it went, or another one has come in its place."""
        try:
            health = self._backend.health(card)
        except HardwareError as error:
            health = _failed(card, error.message, error.hint)
        observed = afu_ids(self._backend, card.regions)
        return None if observed is None else (health, observed)

    def _no_answer(self, card_id: CardId, error: HardwareError) -> None:
        """A card, known or not, could not be looked at."""
        words = SILENT if isinstance(error, SilentCardError) else error.message
        if (card := self._ledger.cards.get(card_id)) is not None:
            self._judged(card, _failed(card, words, error.hint))
        else:
            address = PciAddress.parse(card_id)
            self._problem(CardProblem(address, words, error.hint, passing=True))

    def hasten(self, card_id: CardId) -> None:
        """At the next look, count as recovered whatever is well, however short it has been well.

        Errors that were only counted no longer count.
        """
        self._backend.accept_errors(card_id)
        for region in self._ledger.failing:
            if card_of(region) == card_id:
                self._well_since[region] = float("-inf")

    def _not_yet(self, card: Card, health: CardHealth) -> dict[RegionId, Fault]:
        """Regions that look well, but not for long enough, with what was wrong."""
        now = asyncio.get_running_loop().time()
        waiting: dict[RegionId, Fault] = {}
        for region in (r.id for r in card.regions):
            fault = self._ledger.failing.get(region)
            if fault is None or region in health.failed:
                self._well_since.pop(region, None)
            elif fault.kind in {FaultKind.POISONED, FaultKind.CURABLE}:
                continue  # a rebind, or an image that answers: that passes by no limit
            elif region not in self._well_since and self._interval:
                self._well_since[region] = now
                waiting[region] = fault
                asyncio.get_running_loop().call_later(self._interval, self.changed, card.id)
            elif now - self._well_since.get(region, now) < self._interval:
                waiting[region] = fault
        return waiting

    def _judged(self, card: Card, health: CardHealth) -> None:
        if waiting := self._not_yet(card, health):
            health = replace(health, failed={**waiting, **health.failed})
        for failed, fault in health.failed.items():
            if self._ledger.failing.get(failed) != fault:
                reason = fault.told
                log.error(
                    "region unhealthy",
                    region=failed,
                    reason=reason,
                    **self._operations.owner(failed),
                )
                self._recorder.card_failed(card.id, f"region {failed}: {reason}")
        for region in card.regions:
            if region.id in self._ledger.failing and region.id not in health.failed:
                log.info("region recovered", region=region.id, **self._operations.owner(region.id))
                self._recorder.card_recovered(card.id, f"region {region.id} is well again")
        if self.degraded.get(card.id, ()) != health.degraded:
            self.degraded[card.id] = health.degraded
            if health.degraded:
                log.warning("card degraded", card=card.id, signals=health.degraded)
        self._ledger.hardware.set_failing(card.id, health.failed)
        self._queue.add(card.id)

    async def close(self) -> None:
        """Take no more events, and wait for the scans that run."""
        self._closing = True
        if self._tasks:
            await asyncio.wait(self._tasks)


def _failed(card: Card, message: str, hint: str = "") -> CardHealth:
    """The health of a card with a problem as a whole that may pass."""
    fault = Fault(FaultKind.TRANSIENT, message, hint)
    return CardHealth({region.id: fault for region in card.regions})
