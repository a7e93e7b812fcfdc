"""Recovery of poisoned ports, by rebinding the card's driver where the operator allows it.

A failed PR leaves a port that no reset mends; only taking the card's PCI driver off and putting it
on again does (`hardware/dfl/rebind`). That takes all regions of the card away for a moment, and
crashes the kernel if a port is open. So the plugin does it only if no pod has anything of the card
but the one whose PreStart waits, and only after kubelet was sent the card as Unhealthy. Allocate
refuses the card meanwhile, so no other pod can come in between.

A card that rebinding does not help must not be rebound for ever: a pause follows each attempt, and
it doubles.
"""

import asyncio
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.allocation.link import Link
from fpga_plugin.allocation.obstacles import ObstacleKind, Stops
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.cards import steps
from fpga_plugin.cards.inventory import Inventory
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.cards.reports import Report
from fpga_plugin.errors import (
    ASK_THE_OPERATOR,
    FpgaPluginError,
    NotFinishedError,
    RefusedError,
)
from fpga_plugin.hardware.faults import FaultKind
from fpga_plugin.hardware.model import Card
from fpga_plugin.host.backoff import Backoff
from fpga_plugin.ids import CardId, DeviceId, RegionId
from fpga_plugin.settings.settings import RecoveryPolicy

log = structlog.get_logger()

E = TypeVar("E", bound=FpgaPluginError)

FIRST_PAUSE = 60.0
"""Seconds from one attempt on a card to the next; doubles with each."""

LONGEST_PAUSE = 3600.0
"""Attempts are forgotten when a card has not needed another one for so long after its pause."""


@dataclass(slots=True)
class _Attempts:
    """Attempts on a card: none before `after`, in the event loop's seconds."""

    pauses: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE, LONGEST_PAUSE))
    after: float = 0.0


class Recovery:
    """`rebind` with the card's lock held and none of its ports open.

    Args:
        policy: what the operator allows.
        operations: what is done to a card.
        inventory: scans a card again and reports to the ledger.
        link: to kubelet, which has to have the lists before the driver is taken off.
        queue: where a card that may be tried again is added.
    """

    def __init__(
        self,
        policy: RecoveryPolicy,
        *,
        operations: CardOperations,
        inventory: Inventory,
        link: Link,
        queue: CardQueue,
    ) -> None:
        self._policy = policy
        self._operations, self._ledger = operations, operations.ledger
        self._inventory = inventory
        self._link = link
        self._queue = queue
        self._attempts: dict[CardId, _Attempts] = {}
        self._asked: set[CardId] = set()
        self.done = 0
        self.failed = 0

    def poisoned(self, card: Card, regions: Iterable[RegionId] | None = None) -> bool:
        """Whether a port of the card is poisoned, and nothing worse: one of `regions` if given."""
        wanted = {region.id for region in card.regions} if regions is None else set(regions)
        faults = {
            region.id: fault.kind
            for region in card.regions
            if (fault := self._ledger.failing.get(region.id)) is not None and fault.stops_work
        }
        return any(region in wanted for region in faults) and all(
            kind is FaultKind.POISONED for kind in faults.values()
        )

    def advised(self, card: Card, error: E) -> E:
        """The error of a poisoned port that is not recovered, with what helps.

        The message names the command to the pod's owner too, who can pass it on.
        """
        advice = self._operations.backend.rebind_advice(card)
        hint = (
            "the plugin rebinds the card's driver when nobody else has a region of it; or"
            f" {ASK_THE_OPERATOR}: {advice}"
            if self._policy is RecoveryPolicy.REBIND
            else f"{ASK_THE_OPERATOR}: set FPGA_PLUGIN_RECOVERY=rebind, or, {advice}"
        )
        return type(error)(error.message, hint=hint, why=error.why, tenant="")

    def may(self, card_id: CardId) -> bool:
        """Whether the operator allows it, and no pause is in force."""
        if self._policy is not RecoveryPolicy.REBIND:
            return False
        return not self.paused(card_id)

    def due(self, card: Card) -> bool:
        """Whether a card without an owner should be rebound now.

        A drained one only if the operator asks: the plugin has told him that he may pull it.
        """
        return (
            self.may(card.id)
            and (card.id in self._asked or card.id not in self._ledger.drained)
            and self.poisoned(card)
            and self._ledger.obstacles.first(card.id, Stops.REBIND) is None
        )

    def due_for_reset(self, card: Card, regions: Iterable[RegionId]) -> frozenset[RegionId]:
        """Dirty regions of a card that is reset between owners, whose last allocation ended.

        Between two containers of one allocation only the image is replaced, without a reset.
        """
        ledger = self._ledger
        return frozenset(
            region
            for region in (regions if card.resets else ())
            if ledger.record(region).condition is Condition.DIRTY
            and (
                (allocation := ledger.region_allocation(region)) is None
                or not allocation.used
                or ledger.tenancies.left(region)
            )
        )

    async def reset(self, card: Card, regions: Collection[RegionId], report: Report) -> Card | None:
        """Reset a card whose last owner is gone; with its lock held. None: it is gone afterwards.

        A reset ends every process that has a node of the card, and may move the node. The journal
        records it, like a rebind, until it has gone well: if it fails, the queue's worker finishes
        it (`unfinished`), and if the plugin dies, its next start. `regions` are `due_for_reset`,
        and DIRTY afterwards.

        Raises:
            FpgaPluginError: it failed, and the ledger knows.
        """
        ledger, operations = self._ledger, self._operations
        operations.begin(card, regions)
        doubted = operations.doubted.intersection(regions)
        ledger.work.working(regions)
        report.scrubbed = True

        def reset() -> None:
            with steps.timed(report, "reset card"):
                operations.backend.reset(card)

        try:
            ledger.hardware.set_rebinding(card.id, rebinding=True)
            await operations.step(card, report, reset, pr=True)
            # Its node may be another one by now: no container may get the former one.
            await self._inventory.look(card.id)
            ledger.hardware.set_rebinding(card.id, rebinding=False)
        finally:
            operations.settle(regions)
        # A reset that goes well says nothing of a region whose scrub failed after the last one,
        # even if it moved the nodes: else the card would be reset for it again and again.
        operations.begin(card, regions)
        operations.doubted.update(doubted)
        return ledger.cards.get(card.id)

    def ask(self, card_id: CardId) -> None:
        """The operator asks for another attempt at once, in service or not."""
        self._asked.add(card_id)
        self._attempts.pop(card_id, None)

    def unask(self, card_id: CardId) -> None:
        """What the operator asked for before says nothing of a card that he drains now."""
        self._asked.discard(card_id)

    async def rebind(self, card: Card, *, owner: AbstractSet[DeviceId]) -> bool:
        """Do it if every condition holds; returns whether the card was rebound.

        Args:
            card: with its lock held by the caller, who has closed its ports.
            owner: the devices of the PreStart that waits; empty for a card without an owner.
        """
        if not self.may(card.id):
            return False
        ledger, operations = self._ledger, self._operations
        try:
            await self.check_unused(card.id, owner)
            self._note_attempt(card.id)
            log.warning("rebinding the driver of a card", card=card.id)
            ledger.hardware.set_rebinding(card.id, rebinding=True)
            await self._link.announced()
            await self.check_unused(card.id, owner)
            try:
                await operations.workers.run(card.id, operations.backend.rebind, card)
            except (RefusedError, NotFinishedError):
                raise
            except FpgaPluginError as error:
                _say_no_driver(card.id, error)
            # What is there now is a card of unknown history, even where every number is as before.
            ledger.hardware.card_gone(card.id)
            with suppress(NotFinishedError):  # no thread: it counts as one without driver
                await self._inventory.look(card.id)
            if card.id not in ledger.cards:
                self.failed += 1
                return False  # the journal keeps that its driver is missing
            ledger.hardware.set_rebinding(card.id, rebinding=False)
        except (RefusedError, NotFinishedError) as error:  # nothing was touched
            log.warning("card not rebound", card=card.id, reason=error.message, hint=error.hint)
            ledger.hardware.set_rebinding(card.id, rebinding=False)
            return False
        except FpgaPluginError as error:  # such as a journal that cannot be written
            log.warning("card not rebound", card=card.id, reason=str(error))
            return False
        self.done += 1
        log.info("card rebound", card=card.id)
        return True

    async def check_unused(
        self, card_id: CardId, owner: AbstractSet[DeviceId] = frozenset()
    ) -> None:
        """Check that nobody but `owner` has anything of a card. Open ports are checked later.

        Raises:
            RefusedError: its driver must not be taken off now, nor what is on the card away.
        """
        ledger = self._ledger
        for one in ledger.obstacles.against(Stops.REBIND, card_id):
            # The owners of an absent card are adopted, too, although it is never compared.
            absent = one.kind is ObstacleKind.UNRECONCILED and card_id not in ledger.cards
            if one.device not in owner and not (absent and self._queue.synced):
                raise one.refusal(operator=True)
        own = {allocation.pod for allocation in ledger.allocations_on(card_id)}
        former = (one for one in ledger.left_on(card_id) if one.pod not in own)
        await self._operations.check_gone(former)

    async def resume(self) -> None:
        """Finish what an earlier run began: bind cards that it left without driver, all at once.

        A card that is found in the midst of a reset is put online whatever the journal says of it:
        the journal may be a new one, or an older one that was put back.
        """
        problems = self._ledger.problems.items()
        interrupted = {card_id for card_id, problem in problems if problem.interrupted}
        begun = filter(self._inventory.selects, sorted(self._ledger.rebinding | interrupted))
        await asyncio.gather(*map(self._resume, begun))

    async def _resume(self, card_id: CardId) -> None:
        try:
            await self.put_on(card_id)
        except FpgaPluginError as error:
            _say_no_driver(card_id, error)

    async def put_on(self, card_id: CardId) -> None:
        """Finish a rebind or a reset of a card.

        Raises:
            CardGoneError: it is no longer in its slot.
            HardwareError: it failed; the message says what helps.
            JournalError: it cannot be written down.
        """
        try:
            async with self._operations.workers.lock(card_id):
                await self.finish(card_id)
        finally:
            self._queue.add(card_id)

    def unfinished(self, card_id: CardId) -> bool:
        """Whether a reset of a card began and did not end; asked with the card's lock held.

        No event tells when a card that is missing may be put online. Of a missing driver one does:
        such a card is bound by the plugin's next start, or by the operator.
        """
        card, problem = self._ledger.cards.get(card_id), self._ledger.problems.get(card_id)
        resets = card.resets if card is not None else problem is not None and problem.passing
        return resets and card_id in self._ledger.rebinding

    def paused(self, card_id: CardId) -> bool:
        """Whether a card was tried a moment ago; the queue gets it again after that."""
        last = self._attempts.get(card_id)
        return last is not None and self._now() < last.after

    async def finish(self, card_id: CardId) -> None:
        """As `put_on`, with the card's lock held. It begins no reset, so no tenancy forbids it."""
        ledger, operations = self._ledger, self._operations
        self._note_attempt(card_id)
        # If it fails, it is tried again: also where another journal knew of the reset.
        ledger.hardware.set_rebinding(card_id, rebinding=True)
        await operations.workers.run(card_id, operations.backend.bind, card_id)
        await self._inventory.look(card_id)
        ledger.hardware.set_rebinding(card_id, rebinding=False)
        log.info("card bound again", card=card_id)

    def _note_attempt(self, card_id: CardId) -> None:
        now, last = self._now(), self._attempts.get(card_id)
        if last is None or now - last.after >= LONGEST_PAUSE:
            last = self._attempts[card_id] = _Attempts()
        pause = last.pauses.delay()
        last.after = now + pause
        self._asked.discard(card_id)
        self._queue.add_later(card_id, pause)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _say_no_driver(card_id: CardId, error: FpgaPluginError) -> None:
    log.error("card has no driver", card=card_id, error=error.message, hint=error.hint)
