"""The ledger's steps for hardware: cards that come, go, fail, recover and change."""

from collections.abc import Mapping
from dataclasses import replace

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal.records import CLEAN, Change, Condition, RegionRecord
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.naming import Naming
from fpga_plugin.allocation.state import State
from fpga_plugin.allocation.step import Step
from fpga_plugin.hardware.faults import Fault
from fpga_plugin.hardware.grant import DeviceNumber, Path
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import AfuId, CardId, RegionId

_UNREAD = "what is on it could not be read"


class HardwareSteps:
    """The ledger's steps for hardware."""

    def __init__(self, state: State, naming: Naming) -> None:
        self._state = state
        self._naming = naming
        self._seen: set[RegionId] = set()

    def card_found(
        self,
        card: Card,
        observed: Mapping[RegionId, AfuId | None],
        blank: AfuId | None,
    ) -> frozenset[RegionId]:
        """Record a card that appeared or changed; returns its regions that are new ones.

        Args:
            card: as it is now.
            observed: AFU id of each region; None where it could not be read (poisoned).
            blank: AFU id of the blank bitstream for its interface id, None without one.

        A region that went and came back is a new one; its instance shows it, even if the plugin
        missed its absence. A journalled condition holds if the hardware agrees, or if the region is
        its owner's (`_is_owners`); every other region is DIRTY.
        """
        step = Step(self._state)
        change = step.change
        before = self._state.cards.get(card.id)
        self._state.show(card)
        if card.reprogrammable and not self._naming.serves_functions:
            self._naming.name_card(change, card)
        self._new_to_journal(change, card)
        known = {region.id: region for region in (before.regions if before else ())}
        present = {region.id: region for region in card.regions}
        went = frozenset(
            r for r, region in known.items() if _is_another(card, region, present.get(r))
        )
        if went:
            self._state.returns[card.id] += 1
        for region_id in went:
            self._went(step, region_id)
        same = before is not None and before.interface_id == card.interface_id
        stayed = known.keys() - went if same else set[RegionId]()
        for region in card.regions:
            record = self._state.regions.get(region.id)
            if record is None:
                new = RegionRecord(region.id, Condition.DIRTY, "its history is not known")
            elif region.id in stayed:
                continue  # nothing new about it
            elif region.id not in self._seen:
                new = self._first_sight(record, observed.get(region.id), blank)
            else:
                new = RegionRecord(region.id, Condition.DIRTY, "the card went and came back")
            if new != record:
                change.regions[region.id] = new
        self._note_numbers(change, card)
        self._state.doubt(change)
        self._see(change, observed)
        self._seen.update(present)
        step.commit([card.id])
        return went & present.keys()

    def numbered(self, numbers: Mapping[RegionId, Mapping[Path, DeviceNumber]]) -> None:
        """Record the device numbers that the nodes of present regions have now.

        A pod that has a node, and may yet start a container with it, has its number too.

        Raises:
            JournalError: they could not be written.
        """
        state, change = self._state, Change()
        changed: set[CardId] = set()
        for card in [state.cards[c] for c in set(map(card_of, numbers)) if c in state.cards]:
            regions = [replace(r, numbers=numbers.get(r.id, r.numbers)) for r in card.regions]
            if [r.numbers for r in regions] != [r.numbers for r in card.regions]:
                now = replace(card, regions=tuple(regions))
                state.show(now)
                self._note_numbers(change, now)
                changed.add(card.id)
        state.commit(change, changed)

    def _note_numbers(self, change: Change, card: Card) -> None:
        """Fill in numbers that an older journal lacks: the present ones are the best guess."""
        for node, number in (each for r in card.regions for each in r.numbers.items()):
            for one in self._state.tenancies.by(node):
                known = (change.tenancies.get(one.key) or one).numbers or ()
                if number not in known and not (one.left and one.numbers):
                    now = tuple(sorted({*known, number}))
                    change.tenancies[one.key] = replace(one, numbers=now)

    def _see(self, change: Change, observed: Mapping[RegionId, AfuId | None]) -> None:
        """Record what is on the regions of a present card."""
        for region, afu_id in observed.items():
            if afu_id is not None:
                self._state.functions[region] = afu_id
                self._naming.name_function(change, region, afu_id)

    def _new_to_journal(self, change: Change, card: Card) -> None:
        """A card new to the journal: kubelet's records know its owners; its memory is uncleared."""
        if any(region.id not in self._state.regions for region in card.regions):
            change.unreconciled[card.id] = True
        if card.clears_memory and all(
            region.id not in self._state.regions for region in card.regions
        ):
            change.memory_clear_pending[card.id] = True

    def _first_sight(  # noqa: PLR0911  # a table: one return a row
        self, record: RegionRecord, observed: AfuId | None, blank: AfuId | None
    ) -> RegionRecord:
        dirty = replace(record, condition=Condition.DIRTY, afu_id=None)
        owned = self._state.region_allocation(record.region) is not None
        left = observed is not None and observed == record.afu_id
        keeps = self._naming.keeps(record.region)
        # A store that does not answer is no reason to withdraw what an owner has.
        theirs = owned and blank is None and not keeps
        match record.condition:
            case Condition.BLANK | Condition.UNBLANKED | Condition.PROGRAMMED if (
                record.afu_id is not None and self._is_owners(record.region, observed)
            ):
                return record
            case Condition.BLANK if left and (observed == blank or theirs):
                return record
            case Condition.UNBLANKED if left:
                if blank is None or keeps:
                    return record
                return replace(dirty, reason="it can be blanked now")
            case Condition.PROGRAMMED if owned and observed is not None:
                if observed == record.afu_id:
                    return record
                return replace(dirty, reason="another process programmed it")
            case Condition.PROGRAMMED if not owned:
                return replace(dirty, reason="it was programmed, and nobody has it")
            case Condition.FAULTED if observed is None:
                return record
            case Condition.DIRTY:
                return record
            case _:
                return replace(dirty, reason="its AFU id differs from the journal's")

    def card_gone(self, card: CardId) -> None:
        """Record that a card is gone. Allocations on it stay until kubelet ends them."""
        gone = self._state.cards.get(card)
        if gone is None:
            return
        self._state.hide(card)
        self._state.returns[card] += 1
        step = Step(self._state)
        for region in gone.regions:
            self._went(step, region.id)
        if gone.clears_memory:
            step.change.memory_clear_pending[card] = True
        step.commit([card])

    def _went(self, step: Step, region: RegionId) -> None:
        self._state.failing.pop(region, None)
        self._state.functions.pop(region, None)
        step.change.debug_holds |= debug_holds.ended(self._state, [region])
        if self._state.record(region).condition is not Condition.DIRTY:
            step.mark([region], Condition.DIRTY, "the hardware went")

    def set_failing(self, card: CardId, failing: Mapping[RegionId, Fault]) -> None:
        """Record the card's health signals; a region that recovers is DIRTY unless owned."""
        present = self._state.cards.get(card)
        if present is None:
            return
        step = Step(self._state)
        had = dict(self._state.failing)
        for region in present.regions:
            fault, before = failing.get(region.id), had.get(region.id)
            self._state.failing.pop(region.id, None)
            if fault is not None:
                self._state.failing[region.id] = fault
            if before is None or (fault is not None and not fault.lifts(before)):
                continue
            record = self._state.record(region.id)
            free = self._state.region_allocation(region.id) is None
            # A poisoned port that answers again was rebound: worth another scrub.
            unsure = free and record.condition in CLEAN and before.stops_work
            if record.condition is Condition.FAULTED or unsure:
                step.spoil(region.id, "the hardware failed in between", but=())
        step.commit([card] if self._state.failing != had else ())

    def as_left(self, region: RegionId, observed: AfuId | None) -> bool:
        """Whether a region still reads as the plugin left it, or is its owner's (`_is_owners`)."""
        record = self._state.record(region)
        if record.condition not in CLEAN | {Condition.PROGRAMMED} or record.afu_id == observed:
            return True
        return self._is_owners(region, observed)

    def _is_owners(self, region: RegionId, observed: AfuId | None) -> bool:
        """Whether a region counts as its owner's, although it does not read as it was left.

        It cannot be read (None), which its health signals report, or its owner may have loaded what
        it shows. The owner's containers may restart without a call. The next hand-over verifies the
        region first.
        """
        allocation = self._state.region_allocation(region)
        if allocation is None or not allocation.used:
            return False
        return observed is None or self._state.left_to_owner(region)

    def verify(
        self, card: CardId, observed: Mapping[RegionId, AfuId | None]
    ) -> dict[RegionId, RegionRecord]:
        """Mark regions DIRTY that no longer read as they were left; returns their former records.

        Another program may have changed the card, owned or not. An owned region's owner loses
        nothing: it stays on the list, and is scrubbed before its next container starts.
        """
        step = Step(self._state)
        found: dict[RegionId, RegionRecord] = {}
        for region, afu_id in observed.items():
            if card_of(region) == card and not self.as_left(region, afu_id):
                if afu_id is not None:
                    self._state.functions[region] = afu_id
                found[region] = self._state.record(region)
                why = _UNREAD if afu_id is None else "another process changed it"
                step.mark([region], Condition.DIRTY, why)
        step.commit()
        return found

    def set_drained(self, card: CardId, *, drained: bool) -> None:
        """Take a card out of service, or put it back: a drained card gets no new owner.

        It holds over restarts, and for an absent card too. What an operator programmed is DIRTY
        when its card is in service again.

        Raises:
            JournalError: it cannot be written. A drain holds all the same, at least until the
                plugin ends; a card does not return to service.
        """
        step = Step(self._state)
        if (card in self._state.drained) != drained:
            step.change.drained[card] = drained
        for region, record in self._state.regions.items():
            by_hand = record.condition is Condition.PROGRAMMED and not drained
            if by_hand and card_of(region) == card and not self._state.region_allocation(region):
                step.spoil(region, "an operator programmed it")
        step.commit()

    def set_rebinding(self, card: CardId, *, rebinding: bool) -> None:
        """Record that a card's driver is being rebound, or no longer: it is Unhealthy meanwhile.

        If the plugin dies in between, its next start finds the card without a driver here.
        """
        if (card in self._state.rebinding) != rebinding:
            self._state.commit(Change(rebinding={card: rebinding}))

    def set_foreign(self, foreign: Mapping[CardId, str]) -> None:
        """Record cards that another plugin's pods still hold, with the reason to show."""
        before, self._state.foreign = self._state.foreign, dict(foreign)
        self._state.notify(before.keys() ^ self._state.foreign.keys())


def _is_another(card: Card, before: Region, now: Region | None) -> bool:
    """Whether a region went, even if it came back.

    When a card is reset as a whole, its node may come back under another number. The region is the
    same one, and no container with the former node starts on it (invariant 10).
    """
    return now is None or now.handle != before.handle or (now != before and not card.resets)
