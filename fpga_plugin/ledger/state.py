"""The ledger's state and the one way to change it, and what can be asked of it.

A step collects a `Change` (`_commit`). What of it takes trust away holds in memory at once, written
or not; what gives trust holds once both are written. So memory is never less strict than what a
restart would read. Indexes by card and by device node keep every question independent of how many
claims there are.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from msgspec import UNSET

from fpga_plugin.config.settings import ScrubPolicy
from fpga_plugin.errors import RefusedError, UnknownDeviceError, quote
from fpga_plugin.hardware.faults import Fault
from fpga_plugin.hardware.grant import DeviceNumber, Grant, Path
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
    Resource,
    ResourceName,
    aliased_name,
    device_order,
    known_resource,
    parse_device_id,
)
from fpga_plugin.ledger.exposure import ExposurePolicy
from fpga_plugin.ledger.journal import JournalWriter
from fpga_plugin.ledger.lease import Lease
from fpga_plugin.ledger.names import (
    DELETE_THE_POD,
    MAY_COME_BACK,
    card_of,
    function_name,
    is_card,
    is_function,
    resource_names,
)
from fpga_plugin.ledger.records import (
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
from fpga_plugin.ledger.trust import parted

_K = TypeVar("_K")


@dataclass(frozen=True, slots=True)
class Begun:
    """How a region was when work on it began, to tell what came between.

    Attributes:
        generation: of the claim that covered it; 0 without one.
        left: tenancies that were over by kubelet's word.
    """

    generation: int
    left: frozenset[TenancyKey]


class LedgerState:
    """Claims, conditions, cards; see the module. `Ledger` adds the steps."""

    def __init__(  # noqa: PLR0915  # what the ledger is made of, a line each
        self,
        *,
        prefix: str,
        journal: JournalWriter,
        snapshot: Change,
        boot_id: str,
        scrub: ScrubPolicy = ScrubPolicy.BEST_EFFORT,
        exposure: ExposurePolicy = ExposurePolicy(),  # noqa: B008  # it is frozen
        functions: bool = False,
        aliases: bool = False,
        claims_unknown: str = "",
        owners_known: bool = False,
    ) -> None:
        """Take up what the journal knew.

        A region that was left unblanked is DIRTY where `scrub` now requires a blank, unless regions
        are served by their preprogrammed `functions`. What resources were called by `aliases` holds
        where they are wanted, until the store's manifest says otherwise.

        In another boot nothing that it says about conditions holds, and no container of before
        runs: claims stay (kubelet re-admits its pods with the devices of its checkpoint, and
        without an Allocate), but count as not started.
        """
        self.exposure = exposure
        self._prefix = prefix
        self._journal = journal
        self._unwritten = Change()  # what takes trust away, and could not be written yet
        self.serves_functions = functions
        self._generations = itertools.count(_last_number(snapshot) + 1)
        self._clock = time.time  # nothing is decided by it: it is shown
        self._listeners: list[Callable[[CardId | None], None]] = []
        self.cards: dict[CardId, Card] = {}
        self.problems: dict[CardId, CardProblem] = {}  # why cards that are there are not served
        self.claims: dict[DeviceId, Claim] = {}
        self.regions: dict[RegionId, RegionRecord] = {}
        self.debts: set[CardId] = set()
        self.drained: set[CardId] = set()
        self.rebinding: set[CardId] = set()
        self.unreconciled: set[CardId] = set()
        self.tenancies: dict[TenancyKey, Tenancy] = {}
        self.resources: set[ResourceName] = set()
        self.strays: dict[DeviceId, int] = {}
        self.holders: dict[ClaimUid, Holder] = {}
        self.boot_id = boot_id
        self.images: dict[RegionId, set[AfuId | None]] = {}  # of owners, since the last blank
        self.debugs: dict[RegionId, Debug] = {}
        self.meanings: dict[ResourceName, Meaning] = {}
        self.aliases: dict[InterfaceId, Alias] = {}  # what `meanings` says of the present
        self.renamed = 0  # how often that changed
        # What of an earlier journal was lost; kubelet's life, and that which sent an environment.
        self.lost = self.epoch = self.env_epoch = ""
        # Why ResourceClaims may have devices that the journal lacks; empty: they have none such.
        self.claims_unknown = ""
        self.functions: dict[RegionId, AfuId] = {}  # what is on each present region, as last seen
        self.failing: dict[RegionId, Fault] = {}
        self.foreign: dict[CardId, str] = {}
        self.ends: Counter[str] = Counter()  # claims that ended, by cause, since the start
        self.activity: Counter[DeviceId] = Counter()  # Allocates and PreStarts of each device
        self.lives: Counter[CardId] = Counter()  # how often each card went, or got other nodes
        self._seen: set[RegionId] = set()
        self._inherited: set[DeviceId] = set()
        self._by_card: dict[CardId, dict[DeviceId, Claim]] = {}
        self._of_region: dict[RegionId, dict[TenancyKey, Tenancy]] = {}
        self._of_way: dict[str, dict[TenancyKey, Tenancy]] = {}
        self._holder_of: dict[DeviceId, ClaimUid] = {}
        self._shown_by: dict[str, set[CardId]] = {}  # cards that are open this way (`Tenancy.ways`)
        self._begun: dict[RegionId, Begun] = {}
        self._apply(snapshot)
        # Claims of an earlier life of the plugin: PreStarts may have failed while it was away.
        self._inherited = set(self.claims)
        unblanked = functions or scrub is ScrubPolicy.BEST_EFFORT
        self._take_up(snapshot, unblanked=unblanked, aliases=aliases)
        if claims_unknown and not self.claims_unknown:
            self._commit(Change(epochs={Epoch.CLAIMS: claims_unknown}))
        # Unless this very journal served this API last, kubelet's records may name owners that it
        # lacks: nothing is given out before they were read.
        self._owners_known = owners_known and not self.claims_unknown
        if not self._owners_known:
            self.unreconciled |= {card_of(each) for each in (*self.regions, *self.claims)}

    def _take_up(self, snapshot: Change, *, unblanked: bool, aliases: bool) -> None:
        """What holds of it no more in this boot, and by these settings."""
        same_boot = snapshot.epochs.get(Epoch.BOOT, "") == self.boot_id
        change = Change(epochs={} if same_boot else {Epoch.BOOT: self.boot_id})
        for claim in self.claims.values():
            # What a ResourceClaim has nobody uses before it is prepared in this boot.
            by_claim = self.holder_of(claim.device) is not None
            taken = _claim_at_start(claim, same_boot=same_boot, exposed=not by_claim)
            if taken != claim:
                change.claims[claim.device] = taken
        change.regions = self._records_at_start(unblanked=unblanked, same_boot=same_boot)
        change.debugs = self._debugs_over(same_boot=same_boot)
        held = {claim.resource for claim in self.claims.values()}
        for name, meaning in self.meanings.items():
            if not (aliases and name.partition("/")[0] == self._prefix):
                change.meanings[name] = replace(meaning, current=False) if name in held else None
        if not same_boot:
            change.strays = dict.fromkeys(self.strays, 0)
        for key, tenancy in self.tenancies.items():
            if (now := self._tenancy_at_start(tenancy, same_boot=same_boot)) != tenancy:
                change.tenancies[key] = now
        self._commit(change)

    def _tenancy_at_start(self, tenancy: Tenancy, *, same_boot: bool) -> Tenancy | None:
        """In another boot no process of before runs; what is still allocated may be used unseen."""
        if same_boot:
            return tenancy
        if (claim := self.claim_of(tenancy.key)) is None:
            return None
        used = self.holder_of(claim.device) is None
        return replace(tenancy, used=used, left=False, cgroups=(), numbers=UNSET)

    def _records_at_start(
        self, *, unblanked: bool, same_boot: bool
    ) -> dict[RegionId, RegionRecord]:
        """Those that do not hold as they were written."""
        return {
            record.region: taken_up
            for record in self.regions.values()
            if (taken_up := _record_at_start(record, unblanked=unblanked, same_boot=same_boot))
            != record
        }

    def _debugs_over(self, *, same_boot: bool) -> dict[RegionId, Debug | None]:
        """In another boot nothing is as its container left it; and an owner has his region."""
        return {
            region: None
            for region, debug in self.debugs.items()
            if not same_boot or (debug.until and self.region_claim(region) is not None)
        }

    # ---------------------------------------------------------------- listeners, commits

    def subscribe(self, listener: Callable[[CardId | None], None]) -> Callable[[], None]:
        """Call `listener` after each change with the card concerned; returns how to stop."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _notify(self, card: CardId | None) -> None:
        for listener in tuple(self._listeners):
            listener(card)

    def _commit(self, change: Change) -> None:
        """Make a change, in memory and in the journal; of nothing, write what is not written yet.

        What could not be written before is written with it, in one transaction: nothing that gives
        trust, no work on hardware and no hand-over goes ahead of it.

        Raises:
            JournalError: nothing was written; what takes trust away holds all the same.
        """
        self._doubt(change)
        taking, giving = parted(change, self)
        concerned = self._apply(taking)
        self._unwritten |= taking
        try:
            if told := self._unwritten | giving:
                self._journal.write(told)
                self._unwritten = Change()
                concerned |= self._apply(giving)
        finally:
            for card in concerned:
                self._notify(card)

    def _doubt(self, change: Change) -> None:
        """Regions that the journal learns of may hold images of which a lost one would have told.

        Learnt by whatever comes first: a claim that ends before its card is there, too.
        """
        if self.lost:
            new = change.regions.keys() - self.regions.keys()
            change.images |= {TenantImage(region, None): True for region in new}

    def _apply(self, change: Change) -> set[CardId | None]:
        """Returns the cards whose devices may be listed otherwise now; None: resources are new."""
        cards: set[CardId | None] = set()
        cards |= self._apply_to_cards(change) | self._apply_to_holders(change)
        cards |= self._rename(change)
        for device, claim in change.claims.items():
            cards |= self._set_claim(device, claim)
        cards |= self._apply_to_regions(change)
        for image, on in change.images.items():
            of_region = self.images.setdefault(image.region, set())
            (of_region.add if on else of_region.discard)(image.afu_id)
            cards.add(card_of(image.region))
        for key, tenancy in change.tenancies.items():
            cards |= self._set_tenancy(key, tenancy)
        for device, number in change.strays.items():
            self.strays.pop(device, None)
            if number:
                self.strays[device] = number
        new_resources = change.resources.keys() - self.resources
        self.resources |= new_resources
        self.epoch = change.epochs.get(Epoch.KUBELET, self.epoch)
        self.env_epoch = change.epochs.get(Epoch.ENVIRONMENT, self.env_epoch)
        self.lost = change.epochs.get(Epoch.LOST, self.lost)
        if Epoch.CLAIMS in change.epochs:
            self.claims_unknown = change.epochs[Epoch.CLAIMS]
            self._notify(None)
        return cards | {None} if new_resources else cards

    def _apply_to_regions(self, change: Change) -> set[CardId]:
        """Of what is on regions, and for whom it is kept; returns the cards concerned."""
        for region, record in change.regions.items():
            self.regions[region] = record
            if record.afu_id is not None:
                self.functions[region] = record.afu_id
        for region, debug in change.debugs.items():
            self.debugs.pop(region, None)
            if debug is not None:
                self.debugs[region] = debug
        return {card_of(region) for region in change.regions.keys() | change.debugs.keys()}

    def _apply_to_cards(self, change: Change) -> set[CardId]:
        """Of what is known of whole cards; returns those that are concerned."""
        cards: set[CardId] = set()
        for known, told in (
            (self.debts, change.debts),
            (self.drained, change.drained),
            (self.rebinding, change.rebinding),
        ):
            known |= {card for card, on in told.items() if on}
            known -= {card for card, on in told.items() if not on}
            cards |= told.keys()
        return cards

    def _set_claim(self, device: DeviceId, claim: Claim | None) -> set[CardId]:
        """Returns the cards whose devices may be listed otherwise now."""
        card = card_of(device)
        before = self.claims.pop(device, None)
        if before is None or claim is None or claim.generation != before.generation:
            self._inherited.discard(device)
        of_card = self._by_card.setdefault(card, {})
        of_card.pop(device, None)
        if claim is not None:
            self.claims[device] = of_card[device] = claim
        if not of_card:
            del self._by_card[card]
        return {card}

    def _set_tenancy(self, key: TenancyKey, tenancy: Tenancy | None) -> set[CardId]:
        """Returns the cards whose devices may be listed otherwise now."""
        cards = {card_of(key.region)}
        before = self.tenancies.pop(key, None)
        for ways, now in (
            (before.ways if before else (), None),
            (tenancy.ways if tenancy else (), tenancy),
        ):
            for way in ways:
                _put(self._of_way, way, key, now)
                cards |= self._shown_by.get(way, set())
        _put(self._of_region, key.region, key, tenancy)
        if tenancy is not None:
            self.tenancies[key] = tenancy
        return cards

    def _rename(self, change: Change) -> set[CardId]:
        """Of resources with an alias; returns the cards whose devices may be listed otherwise."""
        if not change.meanings:
            return set()
        for name, meaning in change.meanings.items():
            self.meanings.pop(name, None)
            if meaning is not None:
                self.meanings[name] = meaning
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

    def _show(self, card: Card) -> None:
        self._hide(card.id)
        self.cards[card.id] = card
        for way in _ways(card):
            self._shown_by.setdefault(way, set()).add(card.id)

    def _hide(self, card_id: CardId) -> None:
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

    def trouble(self, region: RegionId) -> str:
        """Why a region must not be given to anybody, whatever is on it; empty if nothing is."""
        fault = self.failing.get(region)
        return self.bars_work(region) or ("" if fault is None else fault.message)

    def bars_work(self, region: RegionId) -> str:
        """Why nobody may scrub or program a region; empty if somebody may."""
        record = self.record(region)
        if record.condition is Condition.FAULTED:
            return record.reason or "faulted"
        if (fault := self.failing.get(region)) is not None and fault.stops_work:
            return fault.message
        kept = self.kept(region)
        return "" if kept is None else kept_words(kept)

    def kept(self, region: RegionId) -> Debug | None:
        """For whom a region that nobody owns is kept as it is, and given to nobody."""
        debug = self.debugs.get(region)
        if debug is None or not debug.until or self.region_claim(region) is not None:
            return None
        return debug

    def _end_debug(self, change: Change, regions: Iterable[RegionId]) -> None:
        """Nothing on these regions is as their container left it any more, or somebody has them."""
        change.debugs |= {region: None for region in regions if region in self.debugs}

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

    def keeps(self, region: RegionId) -> bool:
        """Whether what is on a region stays there: nothing is programmed, a blank neither.

        Its owner's resource tells; without an owner, how the node's cards are served. What came
        with a card's whole image stays in any case.
        """
        card = self.cards.get(card_of(region))
        if card is not None and not card.reprogrammable:
            return True
        claim = self.region_claim(region)
        return self.serves_functions if claim is None else is_function(claim.resource)

    def function(self, region: RegionId) -> AfuId | None:
        """The preprogrammed function that a region may be handed over with.

        None where nothing tells what is on it, or where it was programmed for an owner and not
        blanked since: a former owner's image is no function.
        """
        afu_id = self.functions.get(region)
        return None if self.withheld(region) else afu_id

    def withheld(self, region: RegionId) -> bool:
        """Whether what is on a region may be a former owner's image, or the present one's.

        Nobody programmed anything on a card that cannot be programmed. Elsewhere only a blank ends
        it: an image shows the id that it likes, another than its file named, or another by now.
        """
        return self._owners_image(region, self.images.get(region, ()))

    def _owners_image(self, region: RegionId, images: Collection[AfuId | None]) -> bool:
        card = self.cards.get(card_of(region))
        return bool(images) and (card is None or card.reprogrammable)

    def function_resource(self, region: RegionId) -> ResourceName | None:
        """The resource of a present region's function."""
        afu_id, card = self.function(region), self.cards.get(card_of(region))
        if afu_id is None or card is None:
            return None
        return function_name(self._prefix, card, afu_id)

    def _name_function(self, change: Change, region: RegionId, afu_id: AfuId) -> None:
        """A function that a region turned out to hold is a resource from now on."""
        card = self.cards.get(card_of(region))
        images = set(self.images.get(region, ()))
        for image, on in change.images.items():
            if image.region == region:
                (images.add if on else images.discard)(image.afu_id)
        if card is None or not self.serves_functions or self._owners_image(region, images):
            return
        if (name := function_name(self._prefix, card, afu_id)) not in self.resources:
            change.resources[name] = True

    # ---------------------------------------------------------------- tenancies

    def tenancies_of(self, region: RegionId) -> list[Tenancy]:
        """Of all that were granted the region, and whose processes may be there."""
        return list(self._of_region.get(region, {}).values())

    def left(self, region: RegionId) -> list[Tenancy]:
        """Those of a region that are over by kubelet's word; their processes may run on."""
        return [one for one in self.tenancies_of(region) if one.left]

    def left_on(self, card: CardId, *, but: Iterable[RegionId] = ()) -> list[Tenancy]:
        """The same for a card's regions, `but` these; by a present node of one of them, too."""
        mine = set(but)
        present = self.cards.get(card)
        by_node = (
            one
            for region in (() if present is None else present.regions)
            if region.id not in mine
            for one in self.strangers(region)
        )
        return [
            *(
                one
                for region, of_region in self._of_region.items()
                if card_of(region) == card and region not in mine
                for one in of_region.values()
                if one.left
            ),
            *(one for one in by_node if one.left),
        ]

    def strangers(self, region: Region) -> list[Tenancy]:
        """Who was given a present node of this region for another region (invariant 10).

        By its path, or by a device number that his node had; and whoever was given a number that
        the card's own nodes have now, for whichever region.
        """
        region = self.region(region.id) or region
        card = self.cards.get(region.card)
        found = {
            key: one
            for way in _ways_to(region)
            for key, one in self._of_way.get(way, {}).items()
            if one.region != region.id
        }
        for number in () if card is None else card.guarded:
            found |= self._of_way.get(number, {})
        return list(found.values())

    def numbered(self, numbers: Mapping[RegionId, Mapping[Path, DeviceNumber]]) -> None:
        """Device numbers that the nodes of present regions have now.

        Whoever has a node, and may yet start a container with it, has its number too from now on.

        Raises:
            JournalError: that is not written.
        """
        changed: set[CardId] = set()
        for region_id, now in numbers.items():
            region, card = self.region(region_id), self.cards.get(card_of(region_id))
            if region is None or card is None or region.numbers == now:
                continue
            others = {one.id: one for one in card.regions} | {
                region_id: replace(region, numbers=now)
            }
            self._show(replace(card, regions=tuple(others.values())))
            changed.add(card.id)
        if changed:
            change = Change()
            for card_id in changed:
                self._note_numbers(change, self.cards[card_id])
            try:
                self._commit(change)
            finally:
                for card_id in changed:
                    self._notify(card_id)

    def _note_numbers(self, change: Change, card: Card) -> None:
        """Of one whose numbers nobody noted, these are the best guess: it may be an older row."""
        for node, number in (each for r in card.regions for each in r.numbers.items()):
            for key, one in self._of_way.get(node, {}).items():
                known = (change.tenancies.get(key) or one).numbers or ()
                if number not in known and not (one.left and one.numbers):
                    now = tuple(sorted({*known, number}))
                    change.tenancies[key] = replace(one, numbers=now)

    def own_node(self, region: Region) -> bool:
        """Whether nobody was given a present node of this region for another region."""
        return not self.strangers(region)

    def users(self, claim: Claim) -> list[Tenancy]:
        """The tenancies of an allocation."""
        return [
            one
            for region in claim.grants
            for one in self.tenancies_of(region)
            if one.key.allocation == claim.generation
        ]

    def pods_of(self, devices: Iterable[DeviceId]) -> frozenset[PodUid]:
        """Pods that use devices by their present allocations, as far as they are known."""
        claims = (claim for device in devices if (claim := self.claims.get(device)) is not None)
        users = (one for claim in claims for one in self.users(claim) if not one.left)
        return frozenset(one.pod for one in users if one.pod is not None)

    def claim_of(self, key: TenancyKey) -> Claim | None:
        """The allocation of a tenancy; None: it ended."""
        claim = self.region_claim(key.region)
        return None if claim is None or claim.generation != key.allocation else claim

    def _begin(
        self, change: Change, claim: Claim, pods: Iterable[PodUid | None], *, used: bool
    ) -> None:
        """Pods, or one whose name is not known yet, get what an allocation granted."""
        for pod in pods:
            for region, grant in claim.grants.items():
                key = TenancyKey(region, claim.generation, pod)
                before = self.tenancies.get(key)  # a pod of a ResourceClaim may come again
                numbers = {*((before and before.numbers) or ()), *self._numbers_of(grant)}
                change.tenancies[key] = Tenancy(
                    key, grant.nodes, used=used, numbers=tuple(sorted(numbers)) or UNSET
                )

    def _numbers_of(self, grant: Grant) -> Iterator[DeviceNumber]:
        """The numbers that a grant's nodes have now, as far as a present card shows them."""
        for node in grant.nodes:
            for card in self._shown_by.get(node, ()):
                for region in self.cards[card].regions:
                    if node in region.numbers:
                        yield region.numbers[node]

    def _end(self, change: Change, tenancies: Iterable[Tenancy]) -> None:
        """These pods have no processes any more, or never had one with the region's nodes."""
        for one in tenancies:
            change.tenancies[one.key] = None
            for region in self._reached(one) if one.used else ():
                record = change.regions.get(region) or self.record(region)
                if record.condition in CLEAN | {Condition.PROGRAMMED}:
                    change.regions[region] = replace(
                        record,
                        condition=Condition.DIRTY,
                        reason="a pod may have used it by its node",
                    )

    def _reached(self, tenancy: Tenancy) -> set[RegionId]:
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

    def resources_of(self, card: Card) -> tuple[ResourceName, ResourceName]:
        """What a card's regions, and the card as a whole, are given out as now."""
        return resource_names(self._prefix, card, self.aliases.get(card.interface_id))

    def resource(self, name: ResourceName) -> Resource | None:
        """What a resource is a resource of; None: no name of this plugin's, or nothing tells.

        Where the journal lost what an alias stood for, a claim's card has to tell.
        """
        parts = aliased_name(name)
        if parts is None:
            return known_resource(name)
        if (meaning := self.meanings.get(name)) is not None:
            interface_id = meaning.interface_id
        else:
            cards = (card_of(c.device) for c in self.claims.values() if c.resource == name)
            card = next((self.cards[card] for card in cards if card in self.cards), None)
            if card is None:
                return None
            interface_id = card.interface_id
        return Resource(parts.domain, parts.kind, interface_id, alias=parts.alias)

    def named_resource(self, name: ResourceName) -> Resource:
        """The same, of a resource that a claim has.

        Raises:
            RefusedError: nothing tells.
        """
        if (resource := self.resource(name)) is None:
            raise RefusedError(
                f"nothing tells which interface id {name} stands for", hint=DELETE_THE_POD
            )
        return resource

    def device_resource(self, device: DeviceId) -> ResourceName | None:
        """Under which resource a device is known: its claim's, else its card's."""
        if (claim := self.claims.get(device)) is not None:
            return claim.resource
        return self.present_resource(device)

    def present_resource(self, device: DeviceId) -> ResourceName | None:
        """Under which resource a device would be given out now, whoever has it."""
        if (card := self.cards.get(card_of(device))) is None:
            return None
        present = any(DeviceId(r.id) == device for r in card.regions)
        if self.serves_functions:
            return self.function_resource(RegionId(device)) if present else None
        if not card.reprogrammable:
            return None
        of_regions, of_card = self.resources_of(card)
        if is_card(device):
            return of_card
        return of_regions if present else None

    def check_devices(self, resource: ResourceName, ids: Sequence[str]) -> tuple[DeviceId, ...]:
        """The devices of a call, in device order, each once.

        Raises:
            UnknownDeviceError: the resource has no such device.
        """
        devices: set[DeviceId] = set()
        for text in ids:
            try:
                device = parse_device_id(text)
            except ValueError:
                device = None
            if device is None or self.device_resource(device) != resource:
                raise UnknownDeviceError(
                    f"{resource} has no device {quote(text)}",
                    hint="its card was removed, or never was on this node; " + DELETE_THE_POD,
                )
            devices.add(device)
        return tuple(sorted(devices, key=device_order))

    def regions_of(self, device: DeviceId) -> tuple[Region, ...]:
        """The present regions that a device stands for.

        Raises:
            RefusedError: its card, or one of its regions, is gone, or its card is not served.
        """
        card = self.cards.get(card_of(device))
        if card is None:
            if (problem := self.problems.get(card_of(device))) is not None:
                # The remedy comes last: a command in it may be copied to the message's end.
                remedy = f", or mend the card: {problem.hint}" if problem.hint else ""
                raise RefusedError(
                    f"card {card_of(device)} is not served: {problem.message}",
                    hint=DELETE_THE_POD + remedy,
                )
            raise RefusedError(f"card {card_of(device)} is gone", hint=MAY_COME_BACK)
        if is_card(device):
            if not card.complete:
                raise RefusedError(
                    f"card {card.id} shows {len(card.regions)} of its {card.ports} regions",
                    hint="wait until its driver has bound all ports",
                )
            return card.regions
        for region in card.regions:
            if DeviceId(region.id) == device:
                return (region,)
        raise RefusedError(f"region {device} is gone from its card", hint=MAY_COME_BACK)

    def check_grants(self, claim: Claim) -> None:
        """Invariant 10: what the pod was given still leads to these regions, and to no other.

        Raises:
            RefusedError: they are not.
        """
        present = {region.id: region.grant for region in self.regions_of(claim.device)}
        for region_id, granted in claim.grants.items():
            grant = present.get(region_id)
            if grant is None or not grant.reaches(granted):
                raise RefusedError(
                    f"device numbering changed since the pod was admitted: {region_id} was"
                    f" {granted} and is {grant or 'gone'} now",
                    hint="delete the pod",
                )
        if len(present) != len(claim.grants):
            raise RefusedError(
                f"card {claim.device} has other regions than when the pod was admitted",
                hint="delete the pod",
            )
        for region in self.regions_of(claim.device):
            self._check_strangers(region)

    def _check_strangers(self, region: Region) -> None:
        if not (strangers := self.strangers(region)):
            return
        # Who still has an allocation can be deleted.
        one = min(strangers, key=lambda each: each.left)
        node = next((node for node in one.nodes if node in region.grant.nodes), "the device number")
        if not one.left:
            raise RefusedError(
                f"{node} of region {region.id} is also open to the pod that was"
                f" given {one.region} before the device numbers changed",
                hint=f"delete the pod that holds {one.region}",
            )
        raise RefusedError(
            f"{node} of region {region.id} is also open to pod {one.pod}, which"
            f" was given it as {one.region} and may still run",
            hint="see why that pod's processes do not end",
        )


def kept_words(kept: Debug) -> str:
    """Why a region that is kept is given to nobody, for people."""
    whose = f"{kept.namespace}/{kept.name}"
    return f"kept for debugging as pod {whose} left it, whose {kept.failure}"


def _last_number(snapshot: Change) -> int:
    """The highest that an allocation of the journal has."""
    of_claims = (claim.generation for claim in snapshot.claims.values() if claim is not None)
    return max(*of_claims, *(key.allocation for key in snapshot.tenancies), 0, 0)


def _put(
    index: dict[_K, dict[TenancyKey, Tenancy]], at: _K, key: TenancyKey, tenancy: Tenancy | None
) -> None:
    """Set or remove one entry of an index."""
    entries = index.setdefault(at, {})
    entries.pop(key, None)
    if tenancy is not None:
        entries[key] = tenancy
    if not entries:
        del index[at]


def _ways(card: Card) -> Iterator[str]:
    yield from card.guarded
    for region in card.regions:
        yield from _ways_to(region)


def _ways_to(region: Region) -> tuple[str, ...]:
    return (*region.grant.nodes, *region.numbers.values())


def _claim_at_start(claim: Claim, *, same_boot: bool, exposed: bool) -> Claim:
    if same_boot:
        return claim
    return replace(claim, started=False, touched=False, exposed=exposed, prestarts=0, poststops=0)


def _record_at_start(record: RegionRecord, *, unblanked: bool, same_boot: bool) -> RegionRecord:
    reason = ""
    if not same_boot:
        reason = "the node booted"
    elif record.condition is Condition.SCRUBBING:
        reason = "the plugin ended while it worked on the region"
    elif record.condition is Condition.UNBLANKED and not unblanked:
        reason = "a blank bitstream is required now"
    if not reason:
        return record
    return replace(record, condition=Condition.DIRTY, reason=reason, afu_id=None)
