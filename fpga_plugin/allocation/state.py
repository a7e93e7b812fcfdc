"""The ledger's state, the one way to change it, and what can be asked of it.

A step collects a `Change` (`commit`). What of it takes trust away holds in memory at once, written
or not; what gives trust holds once both are written. So memory is never less strict than what a
restart would read. Indexes by card and by device node keep every question independent of how many
claims there are.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from fpga_plugin.allocation.journal.journal import JournalWriter
from fpga_plugin.allocation.journal.records import (
    CLEAN,
    Change,
    Claim,
    Condition,
    Debug,
    Epoch,
    Holder,
    Meaning,
    Mode,
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
from fpga_plugin.ids import (
    AfuId,
    Alias,
    CardId,
    ClaimUid,
    DeviceId,
    InterfaceId,
    PodUid,
    RegionId,
    ResourceName,
    aliased_name,
)

_K = TypeVar("_K")
_V = TypeVar("_V")


class State:
    """Claims, conditions, cards; see the module."""

    def __init__(self, journal: JournalWriter) -> None:
        self._journal = journal
        self._unwritten = Change()  # what takes trust away, and could not be written yet
        self._listeners: list[Callable[[CardId | None], None]] = []
        self.clock = time.time  # nothing is decided by it: it is shown
        # What the journal holds.
        self.claims: dict[DeviceId, Claim] = {}
        self.regions: dict[RegionId, RegionRecord] = {}
        self.debts: set[CardId] = set()
        self.drained: set[CardId] = set()
        self.rebinding: set[CardId] = set()
        self.tenancies = Tenancies()
        self.resources: set[ResourceName] = set()
        self.strays: dict[DeviceId, int] = {}
        self.holders: dict[ClaimUid, Holder] = {}
        self.images: dict[RegionId, set[AfuId | None]] = {}  # of owners, since the last blank
        self.debugs: dict[RegionId, Debug] = {}
        self.meanings: dict[ResourceName, Meaning] = {}
        # What of an earlier journal was lost; kubelet's life, and that which sent an environment.
        self.lost = self.epoch = self.env_epoch = ""
        # Why ResourceClaims may have devices that the journal lacks; empty: they have none such.
        self.claims_unknown = ""
        # What this process sees.
        self.cards: dict[CardId, Card] = {}
        self.problems: dict[CardId, CardProblem] = {}  # why cards that are there are not served
        self.functions: dict[RegionId, AfuId] = {}  # what is on each present region, as last seen
        self.failing: dict[RegionId, Fault] = {}
        self.foreign: dict[CardId, str] = {}
        self.unreconciled: set[CardId] = set()
        self.lives: Counter[CardId] = Counter()  # how often each card went, or got other nodes
        self.ends: Counter[str] = Counter()  # claims that ended, by cause, since the start
        self.activity: Counter[DeviceId] = Counter()  # Allocates and PreStarts of each device
        # Derived.
        self.aliases: dict[InterfaceId, Alias] = {}  # what `meanings` says of the present
        self.renamed = 0  # how often that changed
        self.inherited: set[DeviceId] = set()  # whose claims an earlier life of the plugin made
        self._last_number = 0
        self._by_card: dict[CardId, dict[DeviceId, Claim]] = {}
        self._holder_of: dict[DeviceId, ClaimUid] = {}
        self._shown_by: dict[str, set[CardId]] = {}  # cards that are open this way (`Tenancy.ways`)

    # ---------------------------------------------------------------- changes

    def subscribe(self, listener: Callable[[CardId | None], None]) -> Callable[[], None]:
        """Call `listener` after each change with the card concerned; returns how to stop."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def notify(self, card: CardId | None) -> None:
        """Something about this card changed, or (None) about no card in particular."""
        for listener in tuple(self._listeners):
            listener(card)

    def commit(self, change: Change) -> None:
        """Make a change, in memory and in the journal; of nothing, write what is not written yet.

        What could not be written before is written with it, in one transaction: nothing that gives
        trust, no work on hardware and no hand-over goes ahead of it.

        Raises:
            JournalError: nothing was written; what takes trust away holds all the same.
        """
        self.doubt(change)
        taking, giving = parted(change, self)
        concerned = self.apply(taking)
        self._unwritten |= taking
        try:
            if told := self._unwritten | giving:
                self._journal.write(told)
                self._unwritten = Change()
                concerned |= self.apply(giving)
        finally:
            for card in concerned:
                self.notify(card)

    def doubt(self, change: Change) -> None:
        """Regions that the journal learns of may hold images of which a lost one would have told.

        Learnt by whatever comes first: a claim that ends before its card is there, too.
        """
        if self.lost:
            new = change.regions.keys() - self.regions.keys()
            change.images |= {TenantImage(region, None): True for region in new}

    def apply(self, change: Change) -> set[CardId | None]:
        """Returns the cards whose devices may be listed otherwise now; None: resources are new."""
        of_cards = (
            *(change.claims, change.regions, change.debugs),
            *(change.debts, change.drained, change.rebinding),
        )
        cards: set[CardId | None] = {card_of(each) for kind in of_cards for each in kind}
        for flags, told in (
            (self.debts, change.debts),
            (self.drained, change.drained),
            (self.rebinding, change.rebinding),
        ):
            flags |= {card for card, on in told.items() if on}
            flags -= {card for card, on in told.items() if not on}
        cards |= self._apply_to_holders(change) | self._rename(change)
        for device, claim in change.claims.items():
            self._set_claim(device, claim)
        for region, record in change.regions.items():
            self.regions[region] = record
            if record.afu_id is not None:
                self.functions[region] = record.afu_id
        _put(self.debugs, change.debugs)
        for image, on in change.images.items():
            of_region = self.images.setdefault(image.region, set())
            (of_region.add if on else of_region.discard)(image.afu_id)
            cards.add(card_of(image.region))
        for key, tenancy in change.tenancies.items():
            cards.add(card_of(key.region))
            self._last_number = max(self._last_number, key.allocation)
            for way in self.tenancies.set(key, tenancy):
                cards |= self._shown_by.get(way, set())
        _put(self.strays, change.strays)
        if change.resources.keys() - self.resources:
            self.resources |= change.resources.keys()
            cards.add(None)
        self.epoch = change.epochs.get(Epoch.KUBELET, self.epoch)
        self.env_epoch = change.epochs.get(Epoch.ENVIRONMENT, self.env_epoch)
        self.lost = change.epochs.get(Epoch.LOST, self.lost)
        if Epoch.CLAIMS in change.epochs:
            self.claims_unknown = change.epochs[Epoch.CLAIMS]
            cards.add(None)
        return cards

    def _set_claim(self, device: DeviceId, claim: Claim | None) -> None:
        before, card = self.claims.get(device), card_of(device)
        if before is None or claim is None or claim.generation != before.generation:
            self.inherited.discard(device)
        if claim is not None:
            self._last_number = max(self._last_number, claim.generation)
        _put(self.claims, {device: claim})
        _put(self._by_card.setdefault(card, {}), {device: claim})
        if not self._by_card[card]:
            del self._by_card[card]

    def _rename(self, change: Change) -> set[CardId]:
        """Of resources with an alias; returns the cards whose devices may be listed otherwise."""
        if not change.meanings:
            return set()
        _put(self.meanings, change.meanings)
        self.aliases = {
            meaning.interface_id: parts.alias
            for name, meaning in self.meanings.items()
            if meaning.current and (parts := aliased_name(name)) is not None
        }
        self.renamed += 1
        return set(self.cards)

    def _apply_to_holders(self, change: Change) -> set[CardId]:
        """Of ResourceClaims; returns the cards whose owners are others now."""
        cards: set[CardId] = set()
        for uid, holder in change.holders.items():
            before = self.holders.pop(uid, None)
            for device in () if before is None else before.devices:
                if self._holder_of.get(device) == uid:
                    del self._holder_of[device]
            if holder is not None:
                self.holders[uid] = holder
                if not holder.ended:
                    self._holder_of |= dict.fromkeys(holder.devices, uid)
            both = (one for one in (before, holder) if one is not None)
            cards |= {card_of(device) for one in both for device in one.devices}
        return cards

    def show(self, card: Card) -> None:
        """A card is there, and as it is now."""
        self.hide(card.id)
        self.cards[card.id] = card
        for way in _ways(card):
            self._shown_by.setdefault(way, set()).add(card.id)

    def hide(self, card_id: CardId) -> None:
        """A card is no longer there."""
        card = self.cards.pop(card_id, None)
        for way in () if card is None else _ways(card):
            holders = self._shown_by.get(way, set())
            holders.discard(card_id)
            if not holders:
                self._shown_by.pop(way, None)

    # ---------------------------------------------------------------- questions

    def holder_of(self, device: DeviceId) -> Holder | None:
        """The ResourceClaim that has a device."""
        uid = self._holder_of.get(device)
        return None if uid is None else self.holders[uid]

    def pod_claims(self) -> list[Claim]:
        """Claims by the device plugin API: of pods, and of no ResourceClaim."""
        return [one for one in self.claims.values() if self.holder_of(one.device) is None]

    def card_claim(self, card: CardId) -> Claim | None:
        """The claim on the whole card."""
        return self.claims.get(DeviceId(card))

    def region_claim(self, region: RegionId) -> Claim | None:
        """The claim that covers a region: its own, or its card's."""
        return self.claims.get(DeviceId(region)) or self.card_claim(card_of(region))

    def claims_on(self, card: CardId) -> list[Claim]:
        """Claims on the card or on any of its regions."""
        return list(self._by_card.get(card, {}).values())

    def lease(self, devices: Iterable[DeviceId]) -> Lease:
        """Of the claims on these devices, those that there are."""
        claims = tuple(claim for d in devices if (claim := self.claims.get(d)) is not None)
        generations = frozenset((claim.device, claim.generation) for claim in claims)
        return Lease(generations, claims, self.claims)

    def mode(self, card: CardId) -> Mode:
        """How the card is used."""
        if self.card_claim(card) is not None:
            return Mode.WHOLE
        return Mode.PARTITIONED if card in self._by_card else Mode.FREE

    def ownership(self, region: RegionId) -> Ownership:
        """Who has a region."""
        claim = self.region_claim(region)
        return Ownership.FREE if claim is None else claim.ownership

    def record(self, region: RegionId) -> RegionRecord:
        """A region's condition; DIRTY where nothing is known."""
        return self.regions.get(region) or RegionRecord(region, Condition.DIRTY, "not known")

    def region(self, region: RegionId) -> Region | None:
        """The region as it is now; None while its card is gone."""
        card = self.cards.get(card_of(region))
        if card is None:
            return None
        return next((r for r in card.regions if r.id == region), None)

    def kept(self, region: RegionId) -> Debug | None:
        """For whom a region that nobody owns is kept as it is, and given to nobody."""
        debug = self.debugs.get(region)
        if debug is None or not debug.until or self.region_claim(region) is not None:
            return None
        return debug

    def kept_on(self, card: CardId, *, but: Iterable[RegionId] = ()) -> list[Debug]:
        """Regions of a card that are kept, or about to be if their container failed, `but` these.

        Until that is decided, nothing that would end it is done to the card.
        """
        mine = set(but)
        return [
            debug
            for region, debug in self.debugs.items()
            if card_of(region) == card
            if region not in mine and self.region_claim(region) is None
        ]

    def left_on(self, card: CardId, *, but: Iterable[RegionId] = ()) -> list[Tenancy]:
        """Tenancies of a card's regions that are over by kubelet's word, `but` of these.

        Those by a present node of such a region are among them.
        """
        mine, present = set(but), self.cards.get(card)
        by_region = (
            one
            for one in self.tenancies.values()
            if card_of(one.region) == card and one.region not in mine
        )
        by_node = (
            one
            for region in (() if present is None else present.regions)
            if region.id not in mine
            for one in self.strangers(region)
        )
        return [one for one in (*by_region, *by_node) if one.left]

    def strangers(self, region: Region) -> list[Tenancy]:
        """Who was given a present node of this region for another region (invariant 10).

        By its path, or by a device number that his node had; and whoever was given a number that
        the card's own nodes have now, for whichever region.
        """
        region = self.region(region.id) or region
        card = self.cards.get(region.card)
        found = [one for way in _ways_to(region) for one in self.tenancies.by(way)]
        guarded = () if card is None else card.guarded
        return list(
            dict.fromkeys(
                (
                    *(one for one in found if one.region != region.id),
                    *(one for number in guarded for one in self.tenancies.by(number)),
                )
            )
        )

    def numbers_of(self, grant: Grant) -> Iterator[DeviceNumber]:
        """The numbers that a grant's nodes have now, as far as a present card shows them."""
        for node in grant.nodes:
            for card in self._shown_by.get(node, ()):
                for region in self.cards[card].regions:
                    if node in region.numbers:
                        yield region.numbers[node]

    def pods_of(self, devices: Iterable[DeviceId]) -> frozenset[PodUid]:
        """Pods that use devices by their present allocations, as far as they are known."""
        claims = (claim for device in devices if (claim := self.claims.get(device)) is not None)
        users = (one for claim in claims for one in self.tenancies.users(claim) if not one.left)
        return frozenset(one.pod for one in users if one.pod is not None)

    def claim_of(self, key: TenancyKey) -> Claim | None:
        """The allocation of a tenancy; None: it ended."""
        claim = self.region_claim(key.region)
        return None if claim is None or claim.generation != key.allocation else claim

    def reached(self, tenancy: Tenancy) -> set[RegionId]:
        """Other regions that it leads to by now, and all of a card that it leads to itself."""
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
        """Whether any region of the card but `regions` has an owner, or may have one, or is kept.

        Before kubelet's records were read nobody knows who else is on the card.
        """
        mine = set(regions)
        if card in self.unreconciled or self.kept_on(card, but=mine):
            return True
        whole = self.card_claim(card)
        for claim in self.claims_on(card):
            if claim is not whole and RegionId(claim.device) not in mine:
                return True
        if whole is None:
            return False
        return any(region not in mine for region in whole.grants)

    def others_clean(self, card: Card, regions: Iterable[RegionId]) -> bool:
        """Whether nothing on the card but `regions` can write its memory any more."""
        mine = set(regions)
        return card.complete and all(
            region.id in mine or self.record(region.id).condition in CLEAN
            for region in card.regions
        )

    def next_number(self) -> int:
        """Of an allocation: no other in this journal has it, nor ever will."""
        self._last_number += 1
        return self._last_number

    def countable(self, claim: Claim) -> bool:
        """Whether every container of the claim came with a PreStart that was seen."""
        return claim.epoch == self.epoch and not claim.exposed


def _put(known: dict[_K, _V], told: Mapping[_K, _V | None]) -> None:
    """Take over what is told; None and 0 delete."""
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
