"""The ledger's steps for work on regions: each is written before the work begins."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from fpga_plugin.allocation.journal.records import (
    CLEAN,
    Allocation,
    Change,
    Condition,
    RegionRecord,
    Tenancy,
    TenancyKey,
    TenantImage,
)
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.naming import Naming
from fpga_plugin.allocation.state import State
from fpga_plugin.allocation.step import Step
from fpga_plugin.errors import NotFinishedError
from fpga_plugin.ids import AfuId, CardId, RegionId

LONGEST_REASON: Final = 4096
"""Characters of what a region's record says; messages are shorter, but for what they quote."""

BY_HAND = "an operator programmed it (`fpga-plugin card program`)"
"""The reason of a region that is PROGRAMMED and has no owner."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A region as it was when work on it began, to notice what changed meanwhile.

    Attributes:
        number: of the allocation that covered it; 0 without one.
        left: tenancies that were over by kubelet's word.
    """

    number: int
    left: frozenset[TenancyKey]


class WorkSteps:
    """The ledger's steps for scrubbing and programming."""

    def __init__(self, state: State, naming: Naming) -> None:
        self._state = state
        self._naming = naming
        self._begun: dict[RegionId, Begun] = {}

    def working(self, regions: Iterable[RegionId], *, image: AfuId | None = None) -> None:
        """The next step changes these regions: until it ends, their contents are unknown.

        For a region that is being worked on already, the same work goes on. `image`: the owner's
        image that is about to be programmed; remembered until a blank replaces it.
        """
        regions = tuple(regions)
        begun = {}
        for region in regions:
            record = self._state.record(region)
            if record.condition is not Condition.SCRUBBING:
                allocation = self._state.region_allocation(region)
                left = frozenset(one.key for one in self._state.tenancies.left(region))
                begun[region] = Begun(0 if allocation is None else allocation.number, left)
        step = Step(self._state)
        step.mark(begun, Condition.SCRUBBING)
        if image is not None:
            step.change.images = {TenantImage(region, image): True for region in regions}
        step.commit()
        self._begun.update(begun)

    def dirty(self, regions: Iterable[RegionId], reason: str) -> None:
        """Mark regions DIRTY, with the reason; holds even if it cannot be written."""
        self._mark(regions, Condition.DIRTY, reason)

    def faulted(self, region: RegionId, reason: str) -> None:
        """Mark a region unusable until an operator, or a rebind, mends it.

        It holds even if it cannot be written.
        """
        self._mark([region], Condition.FAULTED, reason)

    def _mark(self, regions: Iterable[RegionId], condition: Condition, reason: str) -> None:
        step = Step(self._state)
        step.mark(regions, condition, _writable(reason))
        step.commit()

    def forgive(self, card: CardId, reason: str) -> None:
        """Something was mended: failed regions without an owner get a scrub."""
        present = self._state.cards.get(card)
        self.dirty(
            [
                region.id
                for region in (present.regions if present is not None else ())
                if self._state.record(region.id).condition is Condition.FAULTED
                and ((fault := self._state.failing.get(region.id)) is None or not fault.stops_work)
                and self._state.region_allocation(region.id) is None
            ],
            reason,
        )

    def clean(
        self, region: RegionId, afu_id: AfuId | None, *, blank: bool, ended: bool = True
    ) -> None:
        """Mark a region scrubbed: BLANK, or under best-effort UNBLANKED. Earlier tenancies end.

        If it has an owner, the owner's containers ended: the next one starts with a PreStart.
        `ended`: everything due at an allocation's end is done. Else the owner counts as a user, so
        that the region is scrubbed again at the allocation's end.

        Raises:
            NotFinishedError: something came between since the work began.
        """
        record = self._state.record(region)
        scrubbed = record.condition not in CLEAN
        if scrubbed:
            self._check_undisturbed(record)
            now = self._state.region_allocation(region)
            if not ended and (now is None or not now.used):
                raise _disturbed(region, "its owner left")
        condition = Condition.BLANK if blank else Condition.UNBLANKED
        step = Step(self._state)
        step.mark([region], condition, "", afu_id)
        if scrubbed:
            allocation = self._state.region_allocation(region)
            step.end(self._done_with(region, allocation))
            # A container that began without a PreStart may have the region despite the scrub.
            if ended and allocation is not None and not allocation.missed_prestart:
                for one in self._state.tenancies.users(allocation):
                    if one.region == region and one.used and not one.left:
                        step.change.tenancies[one.key] = replace(one, used=False)
        if blank:
            there = self._state.images.get(region, ())
            step.change.images = {TenantImage(region, image): False for image in there}
        if afu_id is not None:
            self._naming.name_function(step.change, region, afu_id)
        step.commit()

    def programmed(self, region: RegionId, afu_id: AfuId, *, by_hand: bool = False) -> None:
        """Mark a region programmed: scrubbed before, and verified.

        It is for its present owner, or `by_hand` for the operator. Then it has no owner and gets
        none, as its card is drained; when the drain ends, it is DIRTY.

        Raises:
            NotFinishedError: something came between since the work began.
        """
        begun = self._check_undisturbed(self._state.record(region))
        allocation = self._state.region_allocation(region)
        if by_hand:
            if card_of(region) not in self._state.drained or allocation is not None:
                raise _disturbed(region, "its card is in service again")
        elif allocation is None or allocation.number != begun.number:
            raise _disturbed(region, "its owner left")
        step = Step(self._state)
        step.mark([region], Condition.PROGRAMMED, BY_HAND if by_hand else "", afu_id)
        step.end(self._done_with(region, allocation))
        step.commit()

    def _done_with(self, region: RegionId, allocation: Allocation | None) -> list[Tenancy]:
        """Tenancies that end with a region's scrub, as their pods are gone.

        The present owner's pod is an exception: it still has its earlier nodes. The present tenancy
        covers the nodes and numbers that it has again; the others may lead to another region by
        now.
        """
        if allocation is None or allocation.pod is None:
            return self._state.tenancies.left(region)
        users = self._state.tenancies.users(allocation)
        ways = {way for one in users if one.region == region for way in one.ways}
        return [
            one
            for one in self._state.tenancies.left(region)
            if one.pod != allocation.pod or ways.issuperset(one.ways)
        ]

    def end_tenancies(self, tenancies: Iterable[Tenancy]) -> None:
        """The processes of these tenancies are gone: none opens a region by their nodes."""
        step = Step(self._state)
        present = (self._state.tenancies.get(one.key) for one in tenancies)
        step.end([one for one in present if one is not None and one.left])
        step.commit()

    def _check_undisturbed(self, record: RegionRecord) -> Begun:
        begun = self._begun.get(record.region)
        if record.condition is not Condition.SCRUBBING or begun is None:
            raise _disturbed(record.region, record.reason)
        if any(one.key not in begun.left for one in self._state.tenancies.left(record.region)):
            raise _disturbed(record.region, "an owner left")
        return begun

    def set_memory_clear_pending(self, card: CardId, *, open_: bool) -> None:
        """Whether on-card memory may still hold an earlier tenant's data."""
        if (card in self._state.memory_clear_pending) != open_:
            self._state.commit(Change(memory_clear_pending={card: open_}))


def _writable(text: str) -> str:
    """The text, bounded, with characters replaced that UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()[:LONGEST_REASON]


def _disturbed(region: RegionId, what: str) -> NotFinishedError:
    return NotFinishedError(
        f"region {region} changed while it was worked on: {what or 'its history is not known'}",
        hint="the next try works on what is there now",
    )
