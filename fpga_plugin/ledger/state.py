"""The ledger's state and the one way to change it, and what can be asked of it.

A step collects a `Change`, writes it to the journal, and only then applies it (`_commit`). What is
learnt of the hardware, and what went wrong, holds in memory even where it cannot be written
(`_learn`): it only ever makes the ledger stricter. Indexes by card and by device node keep every
question independent of how many claims there are.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fpga_plugin.config.settings import ScrubPolicy
from fpga_plugin.errors import RefusedError, UnknownDeviceError, quote
from fpga_plugin.hardware.faults import Fault
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
from fpga_plugin.ledger.journal import JournalError, JournalWriter
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
    Loan,
    Meaning,
    Mode,
    Ownership,
    RegionRecord,
    TenantImage,
)


@dataclass(frozen=True, slots=True)
class Begun:
    """How a region was when work on it began, to tell what came between.

    Attributes:
        generation: of the claim that covered it; 0 without one.
        former: its former owners.
    """

    generation: int
    former: frozenset[PodUid]


class LedgerState:
    """Claims, conditions, cards; see the module. `Ledger` adds the steps."""

    def __init__(
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
        self.serves_functions = functions
        self._generations = itertools.count(1)
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
        self.loans: dict[str, set[Loan]] = {}  # by node
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
        self.functions: dict[RegionId, AfuId] = {}  # what is on each present region, as last seen
        self.failing: dict[RegionId, Fault] = {}
        self.foreign: dict[CardId, str] = {}
        self.ends: Counter[str] = Counter()  # claims that ended, by cause, since the start
        self._emptied: dict[RegionId, int] = {}  # by whose claim's generation: `Claims.emptied`
        self.activity: Counter[DeviceId] = Counter()  # Allocates and PreStarts of each device
        self.lives: Counter[CardId] = Counter()  # how often each card went, or got other nodes
        self._seen: set[RegionId] = set()
        self._inherited: set[DeviceId] = set()
        self._by_card: dict[CardId, dict[DeviceId, Claim]] = {}
        self._by_node: dict[str, dict[DeviceId, RegionId]] = {}
        self._shown_by: dict[str, set[CardId]] = {}  # cards whose present regions have this node
        self._begun: dict[RegionId, Begun] = {}
        self._apply(replace(snapshot, claims=self._numbered(snapshot.claims)))
        # Claims of an earlier life of the plugin: PreStarts may have failed while it was away.
        self._inherited = set(self.claims)
        unblanked = functions or scrub is ScrubPolicy.BEST_EFFORT
        self._take_up(snapshot, unblanked=unblanked, aliases=aliases)

    def _take_up(self, snapshot: Change, *, unblanked: bool, aliases: bool) -> None:
        """What holds of it no more in this boot, and by these settings."""
        same_boot = snapshot.epochs.get(Epoch.BOOT, "") == self.boot_id
        change = Change(epochs={} if same_boot else {Epoch.BOOT: self.boot_id})
        for claim in self.claims.values():
            taken = _claim_at_start(claim, same_boot=same_boot)
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
            change.loans = dict.fromkeys(snapshot.loans, False)
        self._commit(change)

    def _numbered(self, claims: Mapping[DeviceId, Claim | None]) -> dict[DeviceId, Claim | None]:
        return {
            device: claim and replace(claim, generation=next(self._generations))
            for device, claim in claims.items()
        }

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
        if change:
            self._doubt(change)
            self._journal.write(change)
            self._apply(change)

    def _doubt(self, change: Change) -> None:
        """Regions that the journal learns of may hold images of which a lost one would have told.

        Learnt by whatever comes first: a claim that ends before its card is there, too.
        """
        if self.lost:
            new = change.regions.keys() - self.regions.keys()
            change.images |= {TenantImage(region, None): True for region in new}

    def _learn(self, change: Change) -> None:
        """Like `_commit`, for what takes trust away: it holds even if it cannot be written.

        After a restart the hardware has to agree with the journal before anything is trusted.
        """
        try:
            self._commit(change)
        except JournalError:
            self._apply(change)
            raise

    def _apply(self, change: Change) -> None:
        cards = self._apply_to_cards(change) | self._apply_to_holders(change)
        cards |= self._rename(change)
        for device, claim in change.claims.items():
            cards |= self._set_claim(device, claim)
        cards |= self._apply_to_regions(change)
        for image, on in change.images.items():
            of_region = self.images.setdefault(image.region, set())
            (of_region.add if on else of_region.discard)(image.afu_id)
            cards.add(card_of(image.region))
        for loan, on in change.loans.items():
            self._set_loan(loan, on=on)
            cards |= self._shown_by.get(loan.node, set())
        for device, number in change.strays.items():
            self.strays.pop(device, None)
            if number:
                self.strays[device] = number
        new_resources = change.resources.keys() - self.resources
        self.resources |= new_resources
        self.epoch = change.epochs.get(Epoch.KUBELET, self.epoch)
        self.env_epoch = change.epochs.get(Epoch.ENVIRONMENT, self.env_epoch)
        self.lost = change.epochs.get(Epoch.LOST, self.lost)
        if new_resources:
            self._notify(None)
        for card in cards:
            self._notify(card)

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
            (self.unreconciled, change.unreconciled),
        ):
            known |= {card for card, on in told.items() if on}
            known -= {card for card, on in told.items() if not on}
            cards |= told.keys()
        return cards

    def _set_claim(self, device: DeviceId, claim: Claim | None) -> set[CardId]:
        """Returns the cards whose devices may be listed otherwise now."""
        cards = {card_of(device)}
        before = self.claims.pop(device, None)
        if before is None or claim is None or claim.generation != before.generation:
            self._inherited.discard(device)
        self._unindex(before)
        if claim is not None:
            self.claims[device] = claim
            self._index(claim)
        for holder in (before, claim):
            # A node that a claim holds keeps back the region that has it now.
            for _, node in () if holder is None else holder.nodes:
                cards |= self._shown_by.get(node, set())
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
            if holder is not None:
                self.holders[uid] = holder
            both = (one for one in (before, holder) if one is not None)
            cards |= {card_of(device) for one in both for device in one.devices}
        return cards

    def _set_loan(self, loan: Loan, *, on: bool) -> None:
        of_node = self.loans.setdefault(loan.node, set())
        (of_node.add if on else of_node.discard)(loan)
        if not of_node:
            del self.loans[loan.node]

    def _index(self, claim: Claim) -> None:
        self._by_card.setdefault(card_of(claim.device), {})[claim.device] = claim
        for region, node in claim.nodes:
            self._by_node.setdefault(node, {})[claim.device] = region

    def _show(self, card: Card) -> None:
        self._hide(card.id)
        self.cards[card.id] = card
        for node in _nodes(card):
            self._shown_by.setdefault(node, set()).add(card.id)

    def _hide(self, card_id: CardId) -> None:
        card = self.cards.pop(card_id, None)
        for node in () if card is None else _nodes(card):
            holders = self._shown_by.get(node, set())
            holders.discard(card_id)
            if not holders:
                self._shown_by.pop(node, None)

    def _unindex(self, claim: Claim | None) -> None:
        if claim is None:
            return
        of_card = self._by_card[card_of(claim.device)]
        del of_card[claim.device]
        if not of_card:
            del self._by_card[card_of(claim.device)]
        for node in {node for _, node in claim.nodes}:  # a foreign grant may name one twice
            holders = self._by_node[node]
            del holders[claim.device]
            if not holders:
                del self._by_node[node]

    # ---------------------------------------------------------------- questions

    def holder_of(self, device: DeviceId) -> Holder | None:
        """The ResourceClaim that has a device."""
        return next(
            (one for one in self.holders.values() if not one.ended and device in one.devices), None
        )

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

    def borrowed_node(self, region: Region) -> tuple[str, DeviceId] | None:
        """A present node of this region, with the device for which a claim's pod was given it.

        None where no claim has one of its nodes for another region (invariant 10).
        """
        for node in region.grant.nodes:
            for device, granted in self._by_node.get(node, {}).items():
                if granted != region.id:
                    return node, device
        return None

    def lent_node(self, region: Region) -> Loan | None:
        """A loan under which a pod without a claim may still open this region by its node."""
        of_nodes = (loan for node in region.grant.nodes for loan in self.loans.get(node, ()))
        return next((loan for loan in of_nodes if loan.region != region.id), None)

    def own_node(self, region: Region) -> bool:
        """Whether nobody was given a present node of this region for another region."""
        return self.borrowed_node(region) is None and self.lent_node(region) is None

    def _reached(self, nodes: Iterable[tuple[RegionId, str]]) -> set[RegionId]:
        """Regions that now have one of these nodes, each of which was given for another region."""
        return {
            region.id
            for granted, node in nodes
            for card in self._shown_by.get(node, ())
            for region in self.cards[card].regions
            if node in region.grant.nodes and region.id != granted
        }

    def _end_loans(self, change: Change, pods: Iterable[PodUid]) -> None:
        """These pods have no processes any more: nobody opens a region by their nodes."""
        gone = frozenset(pods)
        ended = [loan for of_node in self.loans.values() for loan in of_node if loan.pod in gone]
        change.loans.update(dict.fromkeys(ended, False))
        for region in self._reached((loan.region, loan.node) for loan in ended):
            record = change.regions.get(region) or self.record(region)
            if record.condition in CLEAN:
                change.regions[region] = replace(
                    record, condition=Condition.DIRTY, reason="a pod may have used it by its node"
                )

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

    def reconciled_cards(self) -> set[CardId]:
        """Cards whose owners are all known, whether the card is there or not."""
        return {card_of(region) for region in self.regions} - self.unreconciled

    def others_clean(self, card: Card, regions: Iterable[RegionId]) -> bool:
        """Whether nothing on the card but `regions` can write its memory any more."""
        mine = set(regions)
        return card.complete and all(
            region.id in mine or self.record(region.id).condition in CLEAN
            for region in card.regions
        )

    def former_owners(self, card: CardId, *, but: Iterable[RegionId] = ()) -> frozenset[PodUid]:
        """Pods that had a region of the card since it was last scrubbed, `but` these regions."""
        mine = set(but)
        return frozenset[PodUid]().union(
            *(
                record.former
                for record in self.regions.values()
                if card_of(record.region) == card and record.region not in mine
            )
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
            self._check_borrowed(region)

    def _check_borrowed(self, region: Region) -> None:
        if (borrowed := self.borrowed_node(region)) is not None:
            node, other = borrowed
            raise RefusedError(
                f"{node} of region {region.id} is also open to the pod that was"
                f" given {other} before the device numbers changed",
                hint=f"delete the pod that holds {other}",
            )
        if (loan := self.lent_node(region)) is not None:
            raise RefusedError(
                f"{loan.node} of region {region.id} is also open to pod {loan.pod}, which"
                f" was given it as {loan.region} and may still run",
                hint="see why that pod's processes do not end",
            )


def kept_words(kept: Debug) -> str:
    """Why a region that is kept is given to nobody, for people."""
    whose = f"{kept.namespace}/{kept.name}"
    return f"kept for debugging as pod {whose} left it, whose {kept.failure}"


def _nodes(card: Card) -> Iterable[str]:
    return (node for region in card.regions for node in region.grant.nodes)


def _claim_at_start(claim: Claim, *, same_boot: bool) -> Claim:
    if same_boot:
        return claim
    return replace(claim, started=False, touched=False, exposed=True, prestarts=0, poststops=0)


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
