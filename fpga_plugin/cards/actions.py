"""The operator's actions on a card: take it out of service, bring it back, look at it again."""

from dataclasses import dataclass

import structlog

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal.records import CLEAN, Allocation, Condition
from fpga_plugin.allocation.obstacles import Stops
from fpga_plugin.cards.inventory import Inventory
from fpga_plugin.cards.operations import CardOperations, TenancyActiveError
from fpga_plugin.cards.recovery import Recovery
from fpga_plugin.errors import (
    FpgaPluginError,
    NotFinishedError,
    PortInUseError,
    RefusedError,
    UnknownDeviceError,
    quote,
)
from fpga_plugin.hardware.model import Card, PciFunction
from fpga_plugin.ids import CardId

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CardState:
    """Whether a card may be pulled, and what it still waits for.

    Attributes:
        card: its id.
        present: whether its driver shows it.
        drained: whether it is out of service.
        owners: the allocations of its devices.
        waits_for: why it must not be pulled yet; empty: it may be pulled now.
        not_clean: regions on which an earlier tenant's image or data may be, with the condition.
    """

    card: CardId
    present: bool
    drained: bool
    owners: tuple[Allocation, ...]
    waits_for: tuple[str, ...]
    not_clean: tuple[str, ...]

    @property
    def may_be_pulled(self) -> bool:
        """Whether pulling it harms nobody."""
        return not self.waits_for


class CardActions:
    """The operator's actions on a card: drain, undrain, retry, release.

    Args:
        operations: what is done to a card.
        recovery: its pauses are lifted by `retry`; knows whether somebody has anything of a card.
        inventory: scans a card again and reports to the ledger.
    """

    def __init__(
        self,
        operations: CardOperations,
        recovery: Recovery,
        inventory: Inventory,
    ) -> None:
        self._operations, self._ledger = operations, operations.ledger
        self._recovery = recovery
        self._inventory = inventory

    async def drain(self, card: str, *, drained: bool = True) -> CardState:
        """Take a card out of service: it gets no new owner, present ones keep it; or bring it back.

        Raises:
            UnknownDeviceError: no such card.
            JournalError: it cannot be written down: a restart of the plugin would undo it.
        """
        card_id = self._known(card)
        self._ledger.hardware.set_drained(card_id, drained=drained)
        self._recovery.unask(card_id)
        log.info("card drained" if drained else "card back in service", card=card_id)
        return await self.state(card_id)

    async def retry(self, card: str) -> CardState:
        """Look at a card again now, and try again what failed: scrubs, a driver that is missing.

        A card that is not served is looked at as well, whatever its problem.

        Raises:
            UnknownDeviceError: no such card.
            FpgaPluginError: its driver cannot be put on; the message says what helps.
        """
        card_id = self._known(card)
        log.info("card tried again", card=card_id)
        self._recovery.ask(card_id)
        if card_id in self._ledger.rebinding:
            await self._recovery.put_on(card_id)
        if (present := self._ledger.cards.get(card_id)) is not None:
            workers, backend = self._operations.workers, self._operations.backend
            async with workers.lock(card_id):
                if cleared := await workers.run(card_id, backend.clear_errors, present):
                    shown = {name: f"{value:#x}" for name, value in cleared.items()}
                    log.info("card errors cleared", card=card_id, errors=shown)
        self._inventory.hasten(card_id)
        await self._inventory.rescan(card_id)
        self._ledger.work.forgive(card_id, "an operator asked to try it again")
        return await self.state(card_id)

    async def release(self, card: str) -> CardState:
        """Keep nothing of a card for debugging any more: what was kept is scrubbed now.

        Raises:
            UnknownDeviceError: no such card.
            RefusedError: nothing of it is kept.
            JournalError: it cannot be written down, so nothing has changed.
        """
        card_id = self._known(card)
        kept = [one.region for one in debug_holds.on(self._ledger, card_id)]
        if not kept:
            raise RefusedError(
                f"nothing of card {card_id} is kept for debugging",
                hint="`fpga-plugin status` shows what is",
            )
        debug_holds.end(self._ledger, kept)
        log.info("an operator ends what is kept for debugging", card=card_id, regions=kept)
        return await self.state(card_id)

    async def functions(self, card: str, *, make: bool) -> tuple[PciFunction, ...]:
        """Make or remove a card's virtual PCI functions; returns those that it has afterwards.

        Args:
            card: its id.
            make: make all that it can have; else remove all.

        Raises:
            UnknownDeviceError: no such card.
            RefusedError: it is in service, or in use.
            FpgaPluginError: the driver refused, or it cannot be read.
        """
        card_id = self._known(card)
        workers, backend = self._operations.workers, self._operations.backend
        async with workers.lock(card_id):
            await self._check_unused(card_id)
            await workers.run(card_id, backend.make_functions, card_id, make=make)
            functions = await workers.run(card_id, backend.functions, card_id)
        log.info("virtual functions made" if make else "virtual functions removed", card=card_id)
        await self._inventory.rescan(card_id)
        return tuple(functions)

    async def _check_unused(self, card_id: CardId) -> None:
        """Check that a card whose functions come or go is not in use. The lock is held.

        Raises:
            RefusedError: it is in service, or in use.
        """
        await self._recovery.check_unused(card_id)
        if (present := self._ledger.cards.get(card_id)) is None:
            # It cannot be served now, so it gets no new owner. Present owners keep their devices.
            # The backend sees any other process that has a function open.
            return
        self._operations.check_drained(card_id)
        for region in present.regions:
            async with self._operations.ports(present, [region]):
                pass  # else the kernel would wait for the process that has it open, or crash
            workers, backend = self._operations.workers, self._operations.backend
            await workers.run(card_id, backend.give_back, present, region)
            # Kubelet's records may have named an owner meanwhile.
            await self._recovery.check_unused(card_id)

    async def state(self, card: str) -> CardState:
        """Whether a card may be pulled, and what it still waits for.

        Raises:
            UnknownDeviceError: no such card.
        """
        card_id = self._known(card)
        ledger = self._ledger
        present = ledger.cards.get(card_id)
        drained = card_id in ledger.drained
        owners = tuple(ledger.allocations_on(card_id))
        waits = [f"{one.device} has an owner" for one in owners]
        problem = ledger.problems.get(card_id)
        why = "it is not served, so nobody knows who uses it"
        waits += [] if problem is None else [f"{why}: {problem.message}"]
        not_clean: list[str] = []
        if present is not None:
            if not drained:
                waits.append(f"it is in service: run `fpga-plugin card drain {card_id}` first")
            if self._operations.workers.locked(card_id):
                waits.append("work on it is under way")
            elif not owners:  # opening the port would disturb an owner (invariant 7)
                waits += await self._open_ports(present)
            if self._recovery.due(present):
                waits.append("its driver is to be rebound")
            for region in present.regions:
                record = ledger.record(region.id)
                if record.condition not in CLEAN and not owners:
                    fault = ledger.obstacles.first(region.id, Stops.SCRUB)
                    why = record.reason if fault is None else fault.told or fault.message
                    reason = f" ({why})" if why else ""
                    not_clean.append(f"{region.id} is {record.condition}{reason}")
                    if record.condition in {Condition.DIRTY, Condition.SCRUBBING}:
                        waits.append(f"{region.id} is not scrubbed yet")
        return CardState(
            card_id, present is not None, drained, owners, tuple(waits), tuple(not_clean)
        )

    async def _open_ports(self, card: Card) -> list[str]:
        """Ports that a process outside kubelet's knowledge has open, or that must not be tried.

        A port that is tried is reset, and a pod's own open of it fails meanwhile.
        """
        ledger = self._ledger
        async with self._operations.workers.lock(card.id):
            if ledger.allocations_on(card.id):
                return ["it got an owner just now"]
            waits: dict[str, None] = {}
            for region in card.regions:
                try:
                    await self._operations.check_gone(ledger.tenancies.left(region.id))
                    if (why := ledger.obstacles.first(region.id, Stops.REBIND)) is not None:
                        waits[f"not looked at: {why.message}"] = None  # a card's, once
                        continue
                    async with self._operations.ports(card, [region]):
                        pass
                except (TenancyActiveError, PortInUseError, NotFinishedError) as error:
                    waits[error.message] = None
                except FpgaPluginError as error:
                    log.info("port cannot be checked", region=region.id, reason=str(error))
            return list(waits)

    def _known(self, text: str) -> CardId:
        """The card of that id; one that cannot be served is one, too.

        Raises:
            UnknownDeviceError: there is none, and none is remembered.
        """
        ledger, card_id = self._ledger, CardId(text)
        there = card_id in ledger.cards or card_id in ledger.problems
        remembered = card_id in ledger.drained or card_id in ledger.rebinding
        if there or remembered or ledger.allocations_on(card_id):
            return card_id
        raise UnknownDeviceError(
            f"no card {quote(text)} on this node",
            hint="`fpga-plugin status` lists them; a card's id is its PCI address with dashes,"
            " such as 0000-3b-00.0",
        )
