"""Keeps the ledger's view of the hardware: cards that come, go, fail and recover.

A full scan at start and when events were lost; one card's scan for everything else. No periodic
rescan. Health signals are read with the card's lock held, since they mislead while a PR runs; the
scan itself is not, so that a pulled card is seen while another of its regions is being programmed.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import structlog

from fpga_plugin.config.values import CardSelection
from fpga_plugin.errors import CardGoneError, FpgaPluginError, HardwareError
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.model import (
    Card,
    CardHealth,
    CardProblem,
    Iommu,
    Region,
    ScanResult,
)
from fpga_plugin.ids import AfuId, CardId, PciAddress, RegionId
from fpga_plugin.ledger.ledger import card_of
from fpga_plugin.pods.recorder import EventRecorder
from fpga_plugin.process.ticks import tick
from fpga_plugin.regions.functions import FunctionNews
from fpga_plugin.regions.operations import CardOperations
from fpga_plugin.regions.queue import CardQueue
from fpga_plugin.regions.reads import SILENT, SILENT_HINT, CardReads, SilentCardError

log = structlog.get_logger()

_SETTLING = 1.0
"""Seconds until a card that comes and goes is looked at again."""

_Observed = dict[RegionId, AfuId | None]
_Signals = tuple[CardHealth, _Observed]


class Inventory:
    """Belongs to the event loop.

    Args:
        operations: has ledger, backend, blanks and the cards' locks.
        queue: where each card that may have work is added.
        news: is told of cards that fail and recover.
        reads: of cards that may not answer.
        cards: which of them the operator lets the plugin touch.
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
        self._blanks = operations.blanks
        self._workers = operations.workers
        self._cards = cards
        self._queue = queue
        self._debugged, self._clocks = operations.debugged, operations.clocks
        self._accelerators: dict[RegionId, AfuId | None] = {}
        self._recorder = recorder
        self._reads = reads
        self._interval = interval
        self._well_since: dict[RegionId, float] = {}
        self._port_errors: dict[RegionId, dict[str, int]] = {}
        self._full_scan = asyncio.Lock()
        self._scans: dict[CardId, asyncio.Lock] = {}
        self._changes: Counter[CardId] = Counter()
        self._again: set[CardId] = set()
        self._all_again = False
        self._degraded: dict[CardId, tuple[str, ...]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._functions = FunctionNews(operations.ledger)
        self._closing = False
        self.problems = operations.ledger.problems  # whoever asks for such a card is told why

    async def scan(self) -> None:
        """Everything anew; a card that changed meanwhile is left to its own scan."""
        async with self._full_scan:
            self._all_again = False
            before = self._changes.copy()
            found, observed, healths = await self._scan()

            def as_read(card: CardId) -> bool:
                return self._changes[card] == before[card]

            for card_id, problem in found.problems.items():
                if as_read(card_id):
                    self._problem(problem)
            for card_id in self.problems.keys() - found.problems.keys():
                if as_read(card_id):
                    del self.problems[card_id]
            for card_id in [*self._ledger.cards]:
                if card_id not in found.cards and as_read(card_id):
                    self._gone(card_id)
            for card in (found.cards[card_id] for card_id in observed):
                blank = await self._blank(card)
                if not self._cards.selects(card.id) or not as_read(card.id):
                    continue
                self._scanned(card, observed[card.id], healths.get(card.id), blank)

    def _scanned(
        self, card: Card, observed: _Observed, health: CardHealth | None, blank: AfuId | None
    ) -> None:
        known = card.id in self._ledger.cards
        self._found(card, observed, blank)
        if health is None:
            return
        if not known:
            self._judged(card, health)
        elif not self._as_before(card, health, observed):
            # Work may have begun on it while it was read: a PR looks like a poisoned port.
            self._spawn(self.check(card.id))

    async def _scan(
        self,
    ) -> tuple[ScanResult, dict[CardId, _Observed], dict[CardId, CardHealth]]:
        """All cards; one that does not answer stays as it was known, or is a problem."""
        present = await asyncio.to_thread(self._backend.card_ids)
        read, silent = await self._reads.each(present, self._scan_card)
        cards: dict[CardId, Card] = {}
        problems: dict[CardId, CardProblem] = {}
        for card_id, (found, _, _) in read.items():
            match found:
                case Card():
                    cards[card_id] = found
                case CardProblem():
                    problems[card_id] = found
        unread = self._ledger.cards.keys() & set(present) - read.keys()
        cards |= {card_id: self._ledger.cards[card_id] for card_id in unread}
        for card_id in silent:
            if card_id in cards:
                self._silent(cards[card_id])
            else:
                address = PciAddress.parse(card_id)
                problems[card_id] = CardProblem(address, SILENT, SILENT_HINT)
        for card_id in cards.keys() & read.keys():
            if read[card_id][1] is None and self._cards.selects(card_id):
                self._look_later(card_id)  # it went while it was looked at
        observed = {c: seen for c, (_, seen, _) in read.items() if seen is not None}
        healths = {c: health for c, (_, _, health) in read.items() if health is not None}
        return ScanResult(cards, problems), observed, healths

    def _scan_card(
        self, card_id: CardId
    ) -> tuple[Card | CardProblem | None, _Observed | None, CardHealth | None]:
        try:
            found = self._backend.scan_card(card_id)
        except HardwareError as error:
            address = PciAddress.parse(card_id)
            return CardProblem(address, error.message, error.hint), None, None
        if not isinstance(found, Card) or not self._cards.selects(card_id):
            return found, None, None
        try:
            observed = self._observe(found)
        except CardGoneError:
            return found, None, None
        health = None if self._workers.locked(card_id) else self._backend.health(found)
        return found, observed, health

    def _observe(self, card: Card) -> _Observed:
        """What the regions show; None: it cannot be read.

        Raises:
            CardGoneError: a region went, if only to be replaced.
        """
        observed: _Observed = {}
        for region in card.regions:
            try:
                observed[region.id] = self._backend.afu_id(region)
            except CardGoneError:
                raise
            except FpgaPluginError:
                observed[region.id] = None
        return observed

    def changed(self, card: CardId | None) -> None:
        """Something may have changed about a card; None: about any (`EventSource`)."""
        if self._closing:
            return
        if card is None:
            if not self._all_again:
                self._all_again = True
                log.info("events were lost, scanning all cards")
                self._spawn(self.scan())
        elif self._cards.selects(card):
            self._changes[card] += 1
            if card not in self._again:
                self._again.add(card)
                self._spawn(self.rescan(card))

    def _look_later(self, card: CardId) -> None:
        """A card is not what it was said to be a moment ago: it comes and goes."""
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
        """One card anew, with its health signals; takes the card's lock for these."""
        await self.look(card_id)
        if card_id in self._ledger.cards:
            await self.check(card_id)

    async def look(self, card_id: CardId) -> None:
        """One card anew, but for its health signals."""
        async with self._scans.setdefault(card_id, asyncio.Lock()):
            self._again.discard(card_id)
            try:
                found = await self._reads.run(card_id, lambda: self._backend.scan_card(card_id))
            except SilentCardError:
                self._no_answer(card_id)
                return
            match found:
                case None:
                    self.problems.pop(card_id, None)
                    self._gone(card_id)
                    return
                case CardProblem():
                    self._problem(found)
                    self._gone(card_id)
                    return
            self.problems.pop(card_id, None)
            try:
                observed = await self._reads.run(card_id, lambda: self._observe(found))
            except CardGoneError:
                self._gone(card_id)
                self._look_later(card_id)
                return
            except SilentCardError:
                self._no_answer(card_id)
                return
            self._found(found, observed, await self._blank(found))

    async def _blank(self, card: Card) -> AfuId | None:
        """AFU id of what a card's free regions are blanked with; None: with nothing."""
        if self._ledger.naming.serves_functions or not card.reprogrammable:
            return None
        return await self._blanks.afu_id(card.interface_id)

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
            self._backend.accept_errors(card.id)  # those that it came with are not its own failing
        self._functions.found(card)
        self._queue.add(card.id)

    def _say_what_is_exposed(self, card: Card) -> None:
        """What a scrub does not undo, and no setting of the plugin's mends."""
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
                hint="an accelerator on it can read and write all of the node's memory;"
                " FPGA_PLUGIN_UNTRANSLATED_DMA says who gets such a card (docs/security.md)",
            )

    def _gone(self, card_id: CardId) -> None:
        if card_id in self._ledger.cards:
            log.warning("card gone", card=card_id, **self._owners(card_id))
            self._recorder.card_failed(card_id, "gone")
            self._ledger.hardware.card_gone(card_id)
            self._degraded.pop(card_id, None)

    def _owners(self, card_id: CardId) -> dict[str, Collection[str]]:
        """Who has something of a card, as values of a log line."""
        claims = self._ledger.claims_on(card_id)
        return {
            "owned": [claim.device for claim in claims],
            "pods": frozenset(claim.pod for claim in claims if claim.pod is not None),
        }

    def _problem(self, problem: CardProblem) -> None:
        card_id = problem.address.card_id
        if self._cards.selects(card_id) and self.problems.get(card_id) != problem:
            self.problems[card_id] = problem
            log.warning("card skipped", card=card_id, error=problem.message, hint=problem.hint)

    def degraded(self, card_id: CardId) -> tuple[str, ...]:
        """A card's signals at the last look that are worth telling and take nothing away."""
        return self._degraded.get(card_id, ())

    def say_what_is_missing(self, sysfs_root: str) -> None:
        """After the first scan: a slip in a setting looks like a node without cards."""
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
                hint="the kernel's dfl-pci driver has to be bound to them (lspci -k -d ::1200), and"
                f" the node's /sys mounted at {sysfs_root}"
                " (FPGA_PLUGIN_SYSFS_ROOT); a card is served once it comes",
            )

    async def run(self) -> None:
        """Look for signals that no event tells of, until cancelled."""
        while True:
            await tick(self._interval)
            await self.check_all()

    async def check_all(self) -> None:
        """Read the health signals of all cards.

        First of all that are idle in one turn of a thread, which is all that an idle node costs; a
        card that does not look as it did is then looked at with its lock held.
        """
        idle = {c.id: c for c in self._ledger.cards.values() if not self._workers.locked(c.id)}
        for card_id in [c for c, problem in self.problems.items() if problem.message == SILENT]:
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
            elif card_id in silent:
                self._silent(card)
            else:
                await self.check(card_id)

    def _as_before(
        self, card: Card, health: CardHealth, observed: Mapping[RegionId, AfuId | None]
    ) -> bool:
        """Whether `check` would change nothing."""
        ledger = self._ledger
        regions = [region.id for region in card.regions]
        return (
            {r: ledger.failing[r] for r in regions if r in ledger.failing} == health.failed
            and not any(r in self._well_since for r in health.failed)
            and self._degraded.get(card.id, ()) == health.degraded
            and not any(r in self._debugged for r in regions)
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
                    self._silent(card)
                return
            await self._log_port_errors(card)
            if self._ledger.cards.get(card_id) != card:
                return  # whoever found that out looks at its health next
            if signals is None:
                self._look_later(card_id)
                return
            health, observed = signals
            self._log_accelerators(observed)
            self._verify(card, observed)
            self._judged(card, health)

    def _verify(self, card: Card, observed: Mapping[RegionId, AfuId | None]) -> None:
        for region, record in self._ledger.hardware.verify(card.id, observed).items():
            log.error(
                "region changed by another process",
                region=region,
                afu_id=observed[region],
                expected=record.afu_id,
                **self._owner(region),
            )
            shows = f"shows AFU {observed[region] or 'none'} where {record.afu_id} was left"
            self._recorder.card_failed(card.id, f"region {region} {shows}")

    def _signals(self, card: Card) -> _Signals | None:
        """The card's health and AFU ids; None: it went, or another one has come in its place."""
        try:
            health = self._backend.health(card)
        except HardwareError as error:
            health = _failed(card, str(error))
        try:
            return health, self._observe(card)
        except CardGoneError:
            return None

    async def _log_port_errors(self, card: Card) -> None:
        """Where the owner asked for `debug=1`: each new set of errors, once."""
        for region in card.regions:
            if region.id not in self._debugged:
                self._port_errors.pop(region.id, None)
                continue
            try:
                errors = dict(await self._port_errors_of(card.id, region))
            except HardwareError as error:
                log.warning(
                    "port errors cannot be read",
                    region=region.id,
                    error=str(error),
                    **self._owner(region.id),
                )
                continue
            if errors != self._port_errors.get(region.id, {}):
                self._port_errors[region.id] = errors
                shown = {name: f"{value:#x}" for name, value in errors.items()}
                log.warning("port errors", region=region.id, errors=shown, **self._owner(region.id))

    def _log_accelerators(self, observed: Mapping[RegionId, AfuId | None]) -> None:
        """What is on the regions that are debugged: at the first look, and when it changes."""
        self._accelerators = {
            r: afu for r, afu in self._accelerators.items() if r in self._debugged
        }
        for region, afu_id in observed.items():
            if region in self._debugged and self._accelerators.get(region, "") != afu_id:
                self._accelerators[region] = afu_id
                clock = self._clocks.get(region)
                log.info(
                    "accelerator of a debugged region",
                    region=region,
                    afu_id=afu_id,
                    clock=None if clock is None else clock.detail,
                    **self._owner(region),
                )

    async def _port_errors_of(self, card: CardId, region: Region) -> Mapping[str, int]:
        return await self._reads.run(card, lambda: self._backend.port_errors(region))

    def _no_answer(self, card_id: CardId) -> None:
        """A card, known or not, could not be looked at."""
        if (card := self._ledger.cards.get(card_id)) is not None:
            self._silent(card)
        else:
            self._problem(CardProblem(PciAddress.parse(card_id), SILENT, SILENT_HINT))

    def _silent(self, card: Card) -> None:
        """It does not answer: its regions are out of service until it does."""
        self._judged(card, _failed(card, SILENT))

    def _owner(self, region: RegionId) -> dict[str, str]:
        """Whose region it is, as far as it is known, as a value of a log line."""
        claim = self._ledger.region_claim(region)
        return {} if claim is None or claim.pod is None else {"pod": claim.pod}

    def hasten(self, card_id: CardId) -> None:
        """What is well at the next look is recovered then, however short it has been well.

        Errors that were only counted are no trouble any more.
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
                reason = fault.message
                log.error("region unhealthy", region=failed, reason=reason, **self._owner(failed))
                self._recorder.card_failed(card.id, f"region {failed}: {reason}")
        for region in card.regions:
            if region.id in self._ledger.failing and region.id not in health.failed:
                log.info("region recovered", region=region.id, **self._owner(region.id))
                self._recorder.card_recovered(card.id, f"region {region.id} is well again")
        if self._degraded.get(card.id, ()) != health.degraded:
            self._degraded[card.id] = health.degraded
            if health.degraded:
                log.warning("card degraded", card=card.id, signals=health.degraded)
        self._ledger.hardware.set_failing(card.id, health.failed)
        self._queue.add(card.id)

    async def close(self) -> None:
        """Take no more events, and wait for the scans that run."""
        self._closing = True
        if self._tasks:
            await asyncio.wait(self._tasks)


def _failed(card: Card, message: str) -> CardHealth:
    """Something that may pass is wrong with the card as a whole."""
    fault = Fault(FaultKind.TRANSIENT, message)
    return CardHealth({region.id: fault for region in card.regions})
