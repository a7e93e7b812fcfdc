"""Writes the history of regions, a moment later and outside the calls.

It listens to the ledger for allocations, and to the status context for work and refusals. Nothing
waits for it, and its errors affect nothing else.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import structlog

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal.history import WORDS, Entry, HistoryEvent, HistoryKind
from fpga_plugin.allocation.journal.journal import Journal
from fpga_plugin.allocation.journal.records import Allocation
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of
from fpga_plugin.cards.reports import Report
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import PodName, PodUid
from fpga_plugin.observability.device_owners import Use, by_device

log = structlog.get_logger()

DELAY: Final = 1.0
"""Seconds from an event to its row: kubelet's records name the pod by then, and rows share a
transaction."""

AT_ONCE: Final = 64
"""Rows of one transaction."""

MOST_WAITING: Final = 4096
"""Events that wait to be written; beyond that the oldest are lost."""

Named = Callable[[PodUid | None], PodName | None]
"""What a pod is called, where that is known."""


class HistoryWriter:
    """Writes the history of regions in the background.

    Args:
        ledger: whose allocations are written down.
        named: what pods are called.
        journal: where to.
        clock: Unix time.
    """

    def __init__(
        self,
        ledger: Ledger,
        named: Named,
        journal: Journal,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger, self._named, self._journal, self._clock = ledger, named, journal, clock
        self._waiting: deque[tuple[RegionId, HistoryKind, HistoryEvent, Allocation | None]] = deque(
            maxlen=MOST_WAITING
        )
        self._something = asyncio.Event()
        self._allocations: dict[CardId, dict[DeviceId, Allocation]] = {}
        self._owners: dict[CardId, dict[DeviceId, Use]] = {}
        self._refused: dict[RegionId, str] = {}
        self._kept = {one.region for one in debug_holds.all_in_force(ledger)}
        claims = by_device(ledger)
        for allocation in ledger.allocations.values():
            self._allocations.setdefault(card_of(allocation.device), {})[allocation.device] = (
                allocation
            )
            if (owner := claims.get(allocation.device)) is not None:
                self._owners.setdefault(card_of(allocation.device), {})[allocation.device] = owner
        ledger.subscribe(self._changed)

    def _note(
        self,
        region: RegionId,
        kind: HistoryKind,
        event: HistoryEvent,
        allocation: Allocation | None = None,
    ) -> None:
        if kind is not HistoryKind.REFUSED:
            self._refused.pop(region, None)
        self._waiting.append((region, kind, event, allocation))
        self._something.set()

    def _changed(self, card: CardId | None) -> None:
        """Allocations of a card may have begun or ended."""
        if card is None:
            return
        now = self._clock()
        before = self._allocations.get(card, {})
        present = {claim.device: claim for claim in self._ledger.allocations_on(card)}
        claims = {
            device: Use(owner, self._ledger.pods_of([device]))
            for device in present
            if (owner := self._ledger.claim_owner_of(device)) is not None
        }
        # The end of a claim over several cards is reported card by card, and its owner goes at
        # once.
        had = self._owners.get(card, {})
        for device in before.keys() | present.keys():
            old, new = before.get(device), present.get(device)
            same = old is not None and new is not None and old.number == new.number
            if old is not None and not same:
                held = max(now - old.since, 0.0) if old.since else None
                pod, name = _owner(old.pod, had.get(device))
                event = HistoryEvent(at=now, seconds=held, pod=pod, claim=name)
                for region in old.grants:
                    self._note(region, HistoryKind.RELEASED, event)
            if new is not None and not same:
                pod, name = _owner(None, claims.get(device))
                for region in new.grants:
                    self._note(
                        region, HistoryKind.CLAIMED, HistoryEvent(at=now, pod=pod, claim=name), new
                    )
        if present:
            self._allocations[card] = present
            self._owners[card] = claims
        else:
            self._allocations.pop(card, None)
            self._owners.pop(card, None)
        self._changed_kept(now)

    def _changed_kept(self, now: float) -> None:
        """Regions may be kept for debugging, or no longer."""
        kept = debug_holds.all_in_force(self._ledger)
        for one in kept:
            if one.region not in self._kept:
                event = HistoryEvent(at=now, pod=one.pod, words=one.failure[:WORDS])
                self._note(one.region, HistoryKind.KEPT, event)
        self._kept = {one.region for one in kept}

    def reported(self, report: Report) -> None:
        """A region was scrubbed or prepared."""
        now = self._clock()
        programmed = [step.seconds for step in report.steps if step.name == "program"]
        cleaned = [step.seconds for step in report.steps if step.name != "program"]
        words = report.error[:WORDS]
        if report.scrubbed:
            former = min(report.former, default=None)
            _, claim = _owner(former, self._ended(report.region))
            self._note(
                report.region,
                HistoryKind.SCRUBBED,
                HistoryEvent(
                    at=now,
                    seconds=sum(cleaned),
                    pod=former,
                    claim=claim,
                    words="" if programmed else words,
                    afu_id=None if programmed else report.afu_id,
                ),
            )
        if programmed:
            held = self._ledger.region_allocation(report.region)
            owner = None if held is None else self._ledger.claim_owner_of(held.device)
            users = frozenset[PodUid]() if held is None else self._ledger.pods_of([held.device])
            pod, claim = _owner(report.pod, None if owner is None else Use(owner, users))
            self._note(
                report.region,
                HistoryKind.PROGRAMMED,
                HistoryEvent(
                    at=now,
                    seconds=sum(programmed),
                    pod=pod,
                    claim=claim,
                    words=words,
                    afu_id=report.afu_id,
                ),
            )

    def _ended(self, region: RegionId) -> Use | None:
        """The ResourceClaim whose end a region's scrub belongs to."""
        card = card_of(DeviceId(region))
        return next(
            (
                Use(one)
                for one in self._ledger.claim_owners.values()
                if one.ended and {DeviceId(region), DeviceId(card)} & {*one.devices}
            ),
            None,
        )

    def refused(
        self, pod: PodUid | None, devices: Sequence[DeviceId], message: str, claim: str = ""
    ) -> None:
        """A call was refused; of several alike in a row, the first is written down."""
        named = set(devices)  # perhaps of no card, and then of no form either
        key = f"{pod} {claim}: {message}"
        for card in self._ledger.cards.values():
            for region in (each.id for each in card.regions):
                if named.isdisjoint({card.id, region}) or self._refused.get(region) == key:
                    continue
                self._refused[region] = key
                event = HistoryEvent(
                    at=self._clock(), pod=pod, words=message[:WORDS], claim=claim[:512]
                )
                self._note(region, HistoryKind.REFUSED, event)

    async def run(self) -> None:
        """Write, for as long as the plugin serves."""
        while True:
            await self._something.wait()
            await asyncio.sleep(DELAY)
            self._something.clear()
            while self._waiting:
                self._write()
                await asyncio.sleep(0)  # kubelet's calls go first

    def close(self) -> None:
        """Write what still waits."""
        while self._waiting:
            self._write()

    def _write(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
        try:
            self._journal.remember([self._entry(*each) for each in batch])
        except FpgaPluginError as error:
            log.warning("history not written", events=len(batch), error=error.message)

    def _entry(
        self,
        region: RegionId,
        kind: HistoryKind,
        event: HistoryEvent,
        allocation: Allocation | None,
    ) -> Entry:
        pod = event.pod
        if allocation is not None:
            now = self._ledger.allocations.get(allocation.device)
            same = now is not None and now.number == allocation.number
            pod = (now.pod if now is not None and same else allocation.pod) or event.pod
        name = self._named(pod)
        return Entry(
            region, kind, replace(event, pod=pod, name="" if name is None else str(name)[:512])
        )


def _owner(pod: PodUid | None, use: Use | None) -> tuple[PodUid | None, str]:
    """A pod, and the ResourceClaim by which it has the device, if there is one."""
    if use is None:
        return pod, ""
    return pod or use.only_pod, use.claim.full_name[:512]
