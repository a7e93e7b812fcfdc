"""What hardware does to the ledger: cards that come, go, fail, recover and change."""

from collections.abc import Mapping
from dataclasses import replace

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
    """The ledger's steps on the side of hardware.

    Args:
        state: of the ledger.
        naming: of its devices.
        owners_known: kubelet's records name no owner that the journal lacks.
    """

    def __init__(self, state: State, naming: Naming, *, owners_known: bool) -> None:
        self._state = state
        self._naming = naming
        self._owners_known = owners_known
        self._seen: set[RegionId] = set()

    def card_found(
        self,
        card: Card,
        observed: Mapping[RegionId, AfuId | None],
        blank: AfuId | None,
    ) -> frozenset[RegionId]:
        """A card is there, or changed; returns the regions that are others than before.

        Args:
            card: as it is now.
            observed: AFU id of each region; None where it could not be read (poisoned).
            blank: AFU id of the blank bitstream for its interface id, None without one.

        A region that went is another one when it is back, even where nobody saw it go: its
        instance reports. What was journalled holds where the hardware agrees; everything else is
        DIRTY.
        """
        step = Step(self._state)
        change = step.change
        if card.reprogrammable and not self._naming.serves_functions:
            names = set(self._naming.resources_of(card)) - self._state.resources
            change.resources = dict.fromkeys(names, True)
        before = self._state.cards.get(card.id)
        self._new_to_journal(change, card)
        known = {} if before is None else {region.id: region for region in before.regions}
        present = {region.id: region for region in card.regions}
        went = frozenset(
            r for r, region in known.items() if _is_another(card, region, present.get(r))
        )
        if went:
            self._state.returns[card.id] += 1
        for region_id in went:
            self._went(step, region_id)
        for region in card.regions:
            record = self._state.regions.get(region.id)
            if (
                record is not None
                and before is not None
                and before.interface_id == card.interface_id
                and region.id in known
                and region.id not in went
            ):
                continue  # nothing new about it
            new = RegionRecord(region.id, Condition.DIRTY, "its history is not known")
            if record is not None and region.id not in self._seen:
                new = self._first_sight(record, observed.get(region.id), blank)
            elif record is not None:
                new = replace(
                    record,
                    condition=Condition.DIRTY,
                    afu_id=None,
                    reason="the card went and came back",
                )
            if new != record:
                change.regions[region.id] = new
        self._state.show(card)
        self._note_numbers(change, card)
        self._state.doubt(change)
        self._see(change, observed)
        self._seen.update(region.id for region in card.regions)
        try:
            self._state.commit(change)
        finally:
            self._state.notify(card.id)
        return went & present.keys()

    def numbered(self, numbers: Mapping[RegionId, Mapping[Path, DeviceNumber]]) -> None:
        """Device numbers that the nodes of present regions have now.

        Whoever has a node, and may yet start a container with it, has its number too from now on.

        Raises:
            JournalError: that is not written.
        """
        state, change = self._state, Change()
        changed: set[CardId] = set()
        for region_id, now in numbers.items():
            region, card = state.region(region_id), state.cards.get(card_of(region_id))
            if region is None or card is None or region.numbers == now:
                continue
            regions = {one.id: one for one in card.regions}
            regions[region_id] = replace(region, numbers=now)
            state.show(replace(card, regions=tuple(regions.values())))
            changed.add(card.id)
        for card_id in changed:
            self._note_numbers(change, state.cards[card_id])
        try:
            state.commit(change)
        finally:
            for card_id in changed:
                state.notify(card_id)

    def _note_numbers(self, change: Change, card: Card) -> None:
        """Of one whose numbers nobody noted, these are the best guess: it may be an older row."""
        for node, number in (each for r in card.regions for each in r.numbers.items()):
            for one in self._state.tenancies.by(node):
                known = (change.tenancies.get(one.key) or one).numbers or ()
                if number not in known and not (one.left and one.numbers):
                    now = tuple(sorted({*known, number}))
                    change.tenancies[one.key] = replace(one, numbers=now)

    def _see(self, change: Change, observed: Mapping[RegionId, AfuId | None]) -> None:
        """What is on the regions of a card that is there."""
        for region, afu_id in observed.items():
            if afu_id is not None:
                self._state.functions[region] = afu_id
                self._naming.name_function(change, region, afu_id)

    def _new_to_journal(self, change: Change, card: Card) -> None:
        """Whose owners kubelet's records tell, and whose memory nobody has cleared."""
        known = self._state.regions if self._owners_known else self._seen
        if any(region.id not in known for region in card.regions):
            self._state.unreconciled.add(card.id)
        if card.clears_memory and all(
            region.id not in self._state.regions for region in card.regions
        ):
            change.memory_clear_pending[card.id] = True

    def _first_sight(  # noqa: PLR0911  # a table: one return a row
        self, record: RegionRecord, observed: AfuId | None, blank: AfuId | None
    ) -> RegionRecord:
        dirty = replace(record, condition=Condition.DIRTY, afu_id=None)
        owned = self._state.region_allocation(record.region) is not None
        match record.condition:
            case Condition.BLANK if observed is not None and observed == blank == record.afu_id:
                return record
            case Condition.UNBLANKED if observed is not None and observed == record.afu_id:
                if blank is None or self._naming.keeps(record.region):
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
        """A card is no longer there. Allocations on it stay until kubelet ends them."""
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
        try:
            step.commit()
        finally:
            self._state.notify(card)

    def _went(self, step: Step, region: RegionId) -> None:
        self._state.failing.pop(region, None)
        self._state.functions.pop(region, None)
        step.end_debug([region])
        if self._state.record(region).condition is not Condition.DIRTY:
            step.mark([region], Condition.DIRTY, "the hardware went")

    def set_failing(self, card: CardId, failing: Mapping[RegionId, Fault]) -> None:
        """What the card's health signals say; a region that recovers is DIRTY unless owned."""
        present = self._state.cards.get(card)
        if present is None:
            return
        change = Change()
        changed = False
        for region in present.regions:
            fault = failing.get(region.id)
            before = self._state.failing.get(region.id)
            if before == fault:
                continue
            changed = True
            if fault is None:
                del self._state.failing[region.id]
            else:
                self._state.failing[region.id] = fault
            if before is None or (fault is not None and not fault.lifts(before)):
                continue
            record = self._state.record(region.id)
            free = self._state.region_allocation(region.id) is None
            # A poisoned port that answers again was rebound: worth another scrub.
            unsure = free and record.condition in CLEAN and before.stops_work
            if record.condition is Condition.FAULTED or unsure:
                change.regions[region.id] = replace(
                    record, condition=Condition.DIRTY, reason="the hardware failed in between"
                )
        try:
            self._state.commit(change)
        finally:
            if changed:
                self._state.notify(card)

    def as_left(self, region: RegionId, observed: AfuId | None) -> bool:
        """Whether a region still reads as the plugin left it, as far as that can be told.

        None of an owned region says nothing: its health signals tell why it cannot be read, and it
        is read again before a container gets it.
        """
        record, allocation = self._state.record(region), self._state.region_allocation(region)
        if record.condition not in CLEAN | {Condition.PROGRAMMED} or record.afu_id == observed:
            return True
        if allocation is not None and allocation.used and self._state.left_to_owner(region):
            return True
        return observed is None and allocation is not None

    def verify(
        self, card: CardId, observed: Mapping[RegionId, AfuId | None]
    ) -> dict[RegionId, RegionRecord]:
        """A region that no longer reads as it was left is DIRTY; returns these as they were.

        Somebody else may program a card, whoever has it. To say it of an owned region takes nothing
        from its owner: it stays on the list, and is scrubbed before its next container starts.
        """
        change = Change()
        found: dict[RegionId, RegionRecord] = {}
        for region, afu_id in observed.items():
            if card_of(region) == card and not self.as_left(region, afu_id):
                if afu_id is not None:
                    self._state.functions[region] = afu_id
                found[region] = record = self._state.record(region)
                change.regions[region] = replace(
                    record,
                    condition=Condition.DIRTY,
                    afu_id=None,
                    reason=_UNREAD if afu_id is None else "another process changed it",
                )
        self._state.commit(change)
        return found

    def set_drained(self, card: CardId, *, drained: bool) -> None:
        """Whether the operator takes a card out of service: nobody new gets it or its regions.

        Holds over restarts, and for a card that is not there, too. What an operator programmed is
        DIRTY when its card is in service again.

        Raises:
            JournalError: it cannot be written. The card is out of service all the same, until the
                plugin's end at least; it is not back in service.
        """
        change = Change()
        if (card in self._state.drained) != drained:
            change.drained[card] = drained
        for record in tuple(self._state.regions.values()):
            by_hand = record.condition is Condition.PROGRAMMED and not drained
            if (
                card_of(record.region) == card
                and by_hand
                and not self._state.region_allocation(record.region)
            ):
                change.regions[record.region] = replace(
                    record, condition=Condition.DIRTY, reason="an operator programmed it"
                )
        self._state.commit(change)

    def set_rebinding(self, card: CardId, *, rebinding: bool) -> None:
        """Whether a card's driver is being taken off and put on again: it is Unhealthy meanwhile.

        A plugin that dies in between finds here which card has no driver because of it.
        """
        if (card in self._state.rebinding) != rebinding:
            self._state.commit(Change(rebinding={card: rebinding}))

    def set_foreign(self, foreign: Mapping[CardId, str]) -> None:
        """Cards that another plugin's pods still hold, with the reason to show."""
        before, self._state.foreign = self._state.foreign, dict(foreign)
        for card in before.keys() ^ self._state.foreign.keys():
            self._state.notify(card)


def _is_another(card: Card, before: Region, now: Region | None) -> bool:
    """Whether a region went, if only to come back.

    The node of a card that is reset as a whole may come back under another number: the region is
    the same one, and who was given the former node is not started on it (invariant 10).
    """
    return now is None or now.handle != before.handle or (now != before and not card.resets)
