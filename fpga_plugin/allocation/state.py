"""The ledger's state, the one way to change it, and the questions that it answers.

A step collects a `Change` (`commit`). The part that takes trust away holds in memory at once,
written or not. The part that gives trust holds once both are written. So memory is never less
strict than what a restart would read. Indexes by card and by device node keep the cost of a
question independent of the number of allocations.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal.journal import JournalWriter
from fpga_plugin.allocation.journal.records import (
    CLEAN,
    AliasBinding,
    Allocation,
    CardMode,
    Change,
    ClaimOwner,
    Condition,
    DebugHold,
    Fact,
    Ownership,
    RegionRecord,
    Tenancy,
    TenancyKey,
    TenantImage,
)
from fpga_plugin.allocation.journal.trust import parted
from fpga_plugin.allocation.lease import Lease
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.tenancies import Tenancies
from fpga_plugin.hardware.faults import Fault
from fpga_plugin.hardware.grant import DeviceNumber, Grant
from fpga_plugin.hardware.model import Card, CardProblem, Region
from fpga_plugin.ids import AfuId, Alias, CardId, DeviceId, InterfaceId, RegionId, aliased_name
from fpga_plugin.kubernetes.names import ClaimUid, PodUid, ResourceName

_K = TypeVar("_K")
_V = TypeVar("_V")


class State:
    """Allocations, conditions, cards; see the module."""

    def __init__(self, journal: JournalWriter) -> None:
        self._journal = journal
        self._unwritten = Change()  # takes trust away; not written yet
        self._listeners: list[Callable[[CardId | None], None]] = []
        self.clock = time.time  # only for display: no decision depends on it
        # What the journal holds.
        self.allocations: dict[DeviceId, Allocation] = {}
        self.regions: dict[RegionId, RegionRecord] = {}
        self.memory_clear_pending: set[CardId] = set()
        self.drained: set[CardId] = set()
        self.rebinding: set[CardId] = set()
        self.unreconciled: set[CardId] = set()
        self.tenancies = Tenancies()
        self.resources: set[ResourceName] = set()
        self.pending_poststops: dict[DeviceId, int] = {}
        self.claim_owners: dict[ClaimUid, ClaimOwner] = {}
        self.images: dict[RegionId, set[AfuId | None]] = {}  # of owners, since the last blank
        self.debug_holds: dict[RegionId, DebugHold] = {}
        self.alias_bindings: dict[ResourceName, AliasBinding] = {}
        # What an earlier journal lost; this kubelet instance; the one that sent an environment.
        self.lost = self.kubelet_instance = self.env_instance = ""
        # Why ResourceClaims may have devices that the journal lacks; empty: they have none such.
        self.resource_claims_unknown = ""
        # What this process sees.
        self.cards: dict[CardId, Card] = {}
        self.problems: dict[CardId, CardProblem] = {}  # why cards that are there are not served
        self.functions: dict[RegionId, AfuId] = {}  # what is on each present region, as last seen
        self.failing: dict[RegionId, Fault] = {}
        self.foreign: dict[CardId, str] = {}
        self.returns: Counter[CardId] = Counter()  # how often each card went, or got other nodes
        self.ends: Counter[str] = Counter()  # allocations that ended, by cause, since the start
        self.activity: Counter[DeviceId] = Counter()  # Allocates and PreStarts of each device
        # Derived.
        self.aliases: dict[InterfaceId, Alias] = {}  # what `alias_bindings` says of the present
        self.inherited: set[DeviceId] = set()  # allocated in an earlier run of the plugin
        self._last_number = 0
        self._by_card: defaultdict[CardId, dict[DeviceId, Allocation]] = defaultdict(dict)
        self._claim_owner_of: dict[DeviceId, ClaimOwner] = {}
        # Cards that are open this way (`Tenancy.ways`).
        self._shown_by: defaultdict[str, set[CardId]] = defaultdict(set)

    # ---------------------------------------------------------------- changes

    def subscribe(self, listener: Callable[[CardId | None], None]) -> Callable[[], None]:
        """Call `listener` after each change with the card concerned; returns how to stop."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def notify(self, cards: Iterable[CardId | None]) -> None:
        """Call the listeners: these cards changed, or (None) something that is no card's."""
        for card in cards:
            for listener in tuple(self._listeners):
                listener(card)

    def commit(self, change: Change, seen: Iterable[CardId] = ()) -> None:
        """Make a change, in memory and in the journal; an empty one writes what is still unwritten.

        Earlier changes that could not be written are written with it, in one transaction. No change
        that gives trust, no work on hardware and no hand-over goes ahead of them. `seen`: cards of
        which this process sees something new that no journal has.

        Raises:
            JournalError: nothing was written; the part that takes trust away holds all the same.
        """
        self.doubt(change)
        change.debug_holds |= debug_holds.ended_by(self, change)
        taking, giving = parted(change, self)
        concerned = self.apply(taking)
        self._unwritten |= taking
        try:
            if told := self._unwritten | giving:
                self._journal.write(told)
                self._unwritten = Change()
                concerned |= self.apply(giving)
        finally:
            self.notify(concerned.union(seen))

    def doubt(self, change: Change) -> None:
        """Newly recorded regions may hold images that only the lost journal knew.

        This covers every first record, even of an allocation that ends before its card appears.
        """
        if self.lost:
            new = change.regions.keys() - self.regions.keys()
            change.images |= {TenantImage(region, None): True for region in new}

    def apply(self, change: Change) -> set[CardId | None]:
        """Apply a change in memory; returns the cards to list again (None: new resources)."""
        of_cards = (
            *(change.allocations, change.regions, change.debug_holds),
            *(change.memory_clear_pending, change.drained, change.rebinding, change.unreconciled),
        )
        cards: set[CardId | None] = {card_of(each) for kind in of_cards for each in kind}
        for flags, told in (
            (self.memory_clear_pending, change.memory_clear_pending),
            (self.drained, change.drained),
            (self.rebinding, change.rebinding),
            (self.unreconciled, change.unreconciled),
        ):
            flags |= {card for card, on in told.items() if on}
            flags -= {card for card, on in told.items() if not on}
        cards |= self._apply_claim_owners(change) | self._rename(change)
        for device, allocation in change.allocations.items():
            self._set_allocation(device, allocation)
        for region, record in change.regions.items():
            self.regions[region] = record
            if record.afu_id is not None:
                self.functions[region] = record.afu_id
        _put(self.debug_holds, change.debug_holds)
        for image, on in change.images.items():
            of_region = self.images.setdefault(image.region, set())
            (of_region.add if on else of_region.discard)(image.afu_id)
            cards.add(card_of(image.region))
        for key, tenancy in change.tenancies.items():
            cards.add(card_of(key.region))
            self._last_number = max(self._last_number, key.allocation)
            for way in self.tenancies.change(key, tenancy):
                cards |= self._shown_by.get(way, set())
        _put(self.pending_poststops, change.pending_poststops)
        if change.resources.keys() - self.resources:
            self.resources |= change.resources.keys()
            cards.add(None)
        self.kubelet_instance = change.facts.get(Fact.KUBELET, self.kubelet_instance)
        self.env_instance = change.facts.get(Fact.ENVIRONMENT, self.env_instance)
        self.lost = change.facts.get(Fact.LOST, self.lost)
        if Fact.RESOURCE_CLAIMS in change.facts:
            self.resource_claims_unknown = change.facts[Fact.RESOURCE_CLAIMS]
            cards.add(None)
        return cards

    def _set_allocation(self, device: DeviceId, allocation: Allocation | None) -> None:
        before = self.allocations.get(device)
        if before is None or allocation is None or allocation.number != before.number:
            self.inherited.discard(device)
        if allocation is not None:
            self._last_number = max(self._last_number, allocation.number)
        _put(self.allocations, {device: allocation})
        _put(self._by_card[card_of(device)], {device: allocation})

    def _rename(self, change: Change) -> set[CardId]:
        """Apply alias bindings; returns the cards whose devices may be listed otherwise."""
        if not change.alias_bindings:
            return set()
        _put(self.alias_bindings, change.alias_bindings)
        self.aliases = {
            meaning.interface_id: parts.alias
            for name, meaning in self.alias_bindings.items()
            if meaning.current and (parts := aliased_name(name)) is not None and parts.alias
        }
        return set(self.cards)

    def _apply_claim_owners(self, change: Change) -> set[CardId]:
        """Apply owners of ResourceClaims; returns the cards whose owners changed."""
        if not change.claim_owners:
            return set()
        changed = [self.claim_owners.get(uid) for uid in change.claim_owners]
        changed += change.claim_owners.values()
        _put(self.claim_owners, change.claim_owners)
        in_force = [owner for owner in self.claim_owners.values() if not owner.ended]
        self._claim_owner_of = {device: one for one in in_force for device in one.devices}
        return {card_of(device) for one in changed if one is not None for device in one.devices}

    def reconciled(self, cards: Iterable[CardId]) -> None:
        """Every owner of these cards that kubelet's records name is adopted.

        Raises:
            JournalError: that could not be written; the next run of the plugin would not know it.
        """
        known = self.unreconciled.intersection(cards)
        if known:
            self.commit(Change(unreconciled=dict.fromkeys(known, False)))

    def keep_back(self, cards: Iterable[CardId]) -> None:
        """These cards' owners are unknown: kubelet's records name a pod that is no owner.

        Raises:
            JournalError: it could not be written; it holds all the same.
        """
        new = set(cards) - self.unreconciled
        if new:
            self.commit(Change(unreconciled=dict.fromkeys(new, True)))

    def show(self, card: Card) -> None:
        """Record a present card as it is now."""
        self.hide(card.id)
        self.cards[card.id] = card
        for way in _ways(card):
            self._shown_by[way].add(card.id)

    def hide(self, card_id: CardId) -> None:
        """Record that a card is gone."""
        card = self.cards.pop(card_id, None)
        for way in () if card is None else _ways(card):
            self._shown_by[way].discard(card_id)

    # ---------------------------------------------------------------- questions

    def claim_owner_of(self, device: DeviceId) -> ClaimOwner | None:
        """The ResourceClaim that has a device."""
        return self._claim_owner_of.get(device)

    def pod_allocations(self, devices: Iterable[DeviceId] | None = None) -> list[Allocation]:
        """Allocations, of these devices or all, by the device plugin API: not of ResourceClaims."""
        found = self.allocations.values() if devices is None else self.allocations_of(devices)
        return [one for one in found if self.claim_owner_of(one.device) is None]

    def region_allocation(self, region: RegionId) -> Allocation | None:
        """The allocation that covers a region: its own, or its card's."""
        card = DeviceId(card_of(region))
        return self.allocations.get(DeviceId(region)) or self.allocations.get(card)

    def allocations_on(self, card: CardId) -> list[Allocation]:
        """Allocations on the card or on any of its regions."""
        return list(self._by_card.get(card, {}).values())

    def allocations_of(self, devices: Iterable[DeviceId]) -> tuple[Allocation, ...]:
        """The allocations of those devices that have one."""
        return tuple(self.allocations[each] for each in devices if each in self.allocations)

    def lease(self, devices: Iterable[DeviceId]) -> Lease:
        """A lease on the present allocations of these devices."""
        allocations = self.allocations_of(devices)
        numbers = frozenset((allocation.device, allocation.number) for allocation in allocations)
        return Lease(numbers, allocations, self.allocations)

    def mode(self, card: CardId) -> CardMode:
        """How the card is used."""
        if DeviceId(card) in self.allocations:
            return CardMode.WHOLE
        return CardMode.PARTITIONED if self.allocations_on(card) else CardMode.FREE

    def ownership(self, region: RegionId) -> Ownership:
        """Who has a region."""
        allocation = self.region_allocation(region)
        return Ownership.FREE if allocation is None else allocation.ownership

    def record(self, region: RegionId) -> RegionRecord:
        """A region's condition; DIRTY if none is recorded."""
        return self.regions.get(region) or RegionRecord(region, Condition.DIRTY, "not known")

    def region(self, region: RegionId) -> Region | None:
        """The region as it is now; None while its card is gone."""
        card = self.cards.get(card_of(region))
        if card is None:
            return None
        return next((r for r in card.regions if r.id == region), None)

    def left_to_owner(self, region: RegionId) -> bool:
        """Whether the owner of a region that was handed over blank may load what it brings."""
        card, allocation = self.cards.get(card_of(region)), self.region_allocation(region)
        return (
            card is not None
            and card.owner_loads
            and allocation is not None
            and self.record(region).condition is Condition.BLANK
        )

    def left_on(self, card: CardId, *, but: Iterable[RegionId] = ()) -> list[Tenancy]:
        """Tenancies of a card's regions that are over by kubelet's word, `but` of these.

        Those by a present node of such a region are among them.
        """
        mine, present = set(but), self.cards.get(card)
        on = [one for one in self.tenancies.values() if card_of(one.region) == card]
        found = [one for one in on if one.region not in mine]
        for region in present.regions if present is not None else ():
            if region.id not in mine:
                found += self.strangers(region)
        return [one for one in found if one.left]

    def strangers(self, region: Region) -> list[Tenancy]:
        """Tenancies with a present node of this region, given for another region (invariant 10).

        They match by path or by a device number that their node had. Tenancies with a number that
        the card's own nodes have now match for any region.
        """
        region = self.region(region.id) or region
        card, by = self.cards.get(region.card), self.tenancies.by
        found = [one for way in _ways_to(region) for one in by(way) if one.region != region.id]
        found += [one for number in (card.guarded if card else ()) for one in by(number)]
        return list(dict.fromkeys(found))

    def numbers_of(self, grant: Grant) -> Iterator[DeviceNumber]:
        """The numbers that a grant's nodes have now, where a present card shows them."""
        for node in grant.nodes:
            for card in self._shown_by.get(node, ()):
                for region in self.cards[card].regions:
                    if node in region.numbers:
                        yield region.numbers[node]

    def pods_of(self, devices: Iterable[DeviceId]) -> frozenset[PodUid]:
        """Known pods that use devices by their present allocations."""
        users = (one for each in self.allocations_of(devices) for one in self.tenancies.users(each))
        return frozenset(one.pod for one in users if one.pod is not None and not one.left)

    def allocation_of(self, key: TenancyKey) -> Allocation | None:
        """The allocation of a tenancy; None: it ended."""
        allocation = self.region_allocation(key.region)
        return None if allocation is None or allocation.number != key.allocation else allocation

    def reached(self, tenancy: Tenancy) -> set[RegionId]:
        """Other regions that its nodes lead to now; all regions of a card whose own node it has."""
        ways = set(tenancy.ways)
        cards = {card for way in ways for card in self._shown_by.get(way, ())}
        return {
            region.id
            for card in map(self.cards.__getitem__, cards)
            for region in card.regions
            if not ways.isdisjoint(card.guarded)
            or (region.id != tenancy.region and not ways.isdisjoint(_ways_to(region)))
        }

    def others_owned(self, card: CardId, regions: Iterable[RegionId]) -> bool:
        """Whether any region of the card but `regions` has or may have an owner, or a debug hold.

        Before kubelet's records are read, other owners on the card are unknown.
        """
        mine = set(regions)
        if card in self.unreconciled or debug_holds.on(self, card, but=mine):
            return True
        return any(not mine.issuperset(one.grants) for one in self.allocations_on(card))

    def others_clean(self, card: Card, regions: Iterable[RegionId]) -> bool:
        """Whether no region of the card but `regions` can still write its memory."""
        mine = set(regions)
        return card.complete and all(
            region.id in mine or self.record(region.id).condition in CLEAN
            for region in card.regions
        )

    def next_number(self) -> int:
        """A number for a new allocation, unique in this journal for good."""
        self._last_number += 1
        return self._last_number

    def countable(self, allocation: Allocation) -> bool:
        """Whether the plugin saw a PreStart for every container of the allocation."""
        return allocation.instance == self.kubelet_instance and not allocation.missed_prestart


def _put(known: dict[_K, _V], told: Mapping[_K, _V | None]) -> None:
    """Update `known`; None and 0 delete."""
    for key, value in told.items():
        known.pop(key, None)
        if value:
            known[key] = value


def _ways(card: Card) -> Iterator[str]:
    yield from card.guarded
    for region in card.regions:
        yield from _ways_to(region)


def _ways_to(region: Region) -> tuple[str, ...]:
    return (*region.grant.nodes, *region.numbers.values())
