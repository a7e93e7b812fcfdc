"""The ledger: who has what, and what is on it. Pure state, no I/O but the journal's.

Every method is one step: it checks, writes the change to the journal, and only then applies it, so
that memory never knows more than a restart would. All methods belong to the event loop and take
microseconds. What is advertised is derived from the ledger by `lists`.

A claim is kept per device id. Ownership of a region follows from the claims on it and on its card;
condition is a fact of its own (DESIGN.md section 4).
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from fpga_plugin.allocation.journal import JournalWriter
from fpga_plugin.allocation.records import (
    CLEAN,
    Change,
    Claim,
    Condition,
    Mode,
    Ownership,
    RegionRecord,
    Snapshot,
    pods,
)
from fpga_plugin.errors import RefusedError, UnknownDeviceError, quote
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import (
    AfuId,
    CardId,
    DeviceId,
    PodUid,
    RegionId,
    ResourceName,
    device_order,
    device_variable,
    parse_device_id,
)

DELETE_THE_POD = "delete the pod, so that its controller makes a new one"


def resource_names(prefix: str, card: Card) -> tuple[ResourceName, ResourceName]:
    """The resources of a card: its regions, and the card as a whole."""
    return (
        ResourceName(f"{prefix}/region-{card.interface_id}"),
        ResourceName(f"{prefix}/fpga-{card.interface_id}"),
    )


class Ledger:
    """See the module."""

    def __init__(
        self, *, prefix: str, journal: JournalWriter, snapshot: Snapshot, boot_id: str
    ) -> None:
        """Take up what the journal knew.

        In another boot nothing that it says about conditions holds, and no container of before
        runs: claims stay (kubelet re-admits its pods with the devices of its checkpoint, and
        without an Allocate), but count as not started.
        """
        self._prefix = prefix
        self._journal = journal
        self._generations = itertools.count(1)
        self._listeners: list[Callable[[CardId | None], None]] = []
        same_boot = snapshot.boot_id == boot_id
        self.cards: dict[CardId, Card] = {}
        self.claims: dict[DeviceId, Claim] = {}
        self.regions: dict[RegionId, RegionRecord] = {}
        self.debts: set[CardId] = set(snapshot.debts)
        self.resources: set[ResourceName] = set(snapshot.resources)
        self.strays: dict[DeviceId, int] = dict(snapshot.strays) if same_boot else {}
        self.epoch = snapshot.epoch
        self.env_epoch = snapshot.env_epoch
        self.failing: dict[RegionId, str] = {}
        self.foreign: dict[CardId, str] = {}
        self.activity: Counter[DeviceId] = Counter()  # Allocates and PreStarts of each device
        self._seen: set[RegionId] = set()
        self._by_card: dict[CardId, dict[DeviceId, Claim]] = {}
        self._by_node: dict[str, dict[DeviceId, RegionId]] = {}
        change = Change()
        for claim in snapshot.claims:
            taken = replace(claim, generation=next(self._generations))
            if not same_boot:
                taken = replace(
                    taken, started=False, touched=False, exposed=True, prestarts=0, poststops=0
                )
                change.claims[claim.device] = taken
            self.claims[claim.device] = taken
            self._index(taken)
        for record in snapshot.regions:
            taken_record = record
            if not same_boot:
                taken_record = replace(
                    record, condition=Condition.DIRTY, reason="the node booted", afu_id=None
                )
            elif record.condition is Condition.SCRUBBING:
                taken_record = replace(
                    record,
                    condition=Condition.DIRTY,
                    afu_id=None,
                    reason="the plugin ended while it worked on the region",
                )
            if taken_record is not record:
                change.regions[record.region] = taken_record
            self.regions[record.region] = taken_record
        if change:
            journal.write(change)

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
            self._journal.write(change)
            self._apply(change)

    def _apply(self, change: Change) -> None:
        cards: set[CardId] = set(change.debts)
        for device, claim in change.claims.items():
            cards.add(card_of(device))
            self._unindex(self.claims.pop(device, None))
            if claim is not None:
                self.claims[device] = claim
                self._index(claim)
        for region, record in change.regions.items():
            cards.add(card_of(region))
            self.regions[region] = record
        self.debts |= {card for card, open_ in change.debts.items() if open_}
        self.debts -= {card for card, open_ in change.debts.items() if not open_}
        for device, number in change.strays.items():
            self.strays.pop(device, None)
            if number:
                self.strays[device] = number
        new_resources = change.resources - self.resources
        self.resources |= new_resources
        if change.epoch is not None:
            self.epoch = change.epoch
        if change.env_epoch is not None:
            self.env_epoch = change.env_epoch
        if new_resources:
            self._notify(None)
        for card in cards:
            self._notify(card)

    def _index(self, claim: Claim) -> None:
        self._by_card.setdefault(card_of(claim.device), {})[claim.device] = claim
        for region, node in claim.nodes:
            self._by_node.setdefault(node, {})[claim.device] = region

    def _unindex(self, claim: Claim | None) -> None:
        if claim is None:
            return
        of_card = self._by_card[card_of(claim.device)]
        del of_card[claim.device]
        if not of_card:
            del self._by_card[card_of(claim.device)]
        for _, node in claim.nodes:
            holders = self._by_node[node]
            holders.pop(claim.device, None)
            if not holders:
                del self._by_node[node]

    # ---------------------------------------------------------------- questions

    def card_claim(self, card: CardId) -> Claim | None:
        """The claim on the whole card."""
        return self.claims.get(DeviceId(card))

    def region_claim(self, region: RegionId) -> Claim | None:
        """The claim that covers a region: its own, or its card's."""
        return self.claims.get(DeviceId(region)) or self.card_claim(card_of(region))

    def claims_on(self, card: CardId) -> list[Claim]:
        """Claims on the card or on any of its regions."""
        return list(self._by_card.get(card, {}).values())

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
        record = self.record(region)
        if record.condition is Condition.FAULTED:
            return record.reason or "faulted"
        return self.failing.get(region, "")

    def borrowed_node(self, region: Region) -> DeviceId | None:
        """The device under whose claim this region's present node was handed out (invariant 10)."""
        for device, granted in self._by_node.get(region.node, {}).items():
            if granted != region.id:
                return device
        return None

    def others_owned(self, card: CardId, regions: Iterable[RegionId]) -> bool:
        """Whether any region of the card but `regions` has an owner."""
        mine = set(regions)
        whole = self.card_claim(card)
        for claim in self.claims_on(card):
            if claim is not whole and RegionId(claim.device) not in mine:
                return True
        if whole is None:
            return False
        return any(region not in mine for region, _ in whole.nodes)

    def device_resource(self, device: DeviceId) -> ResourceName | None:
        """Under which resource a device is known: its claim's, else its card's."""
        if (claim := self.claims.get(device)) is not None:
            return claim.resource
        if (card := self.cards.get(card_of(device))) is None:
            return None
        of_regions, of_card = resource_names(self._prefix, card)
        if is_card(device):
            return of_card
        return of_regions if any(DeviceId(r.id) == device for r in card.regions) else None

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
            RefusedError: its card, or one of its regions, is gone.
        """
        card = self.cards.get(card_of(device))
        if card is None:
            raise RefusedError(f"card {card_of(device)} is gone", hint=DELETE_THE_POD)
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
        raise RefusedError(f"region {device} is gone from its card", hint=DELETE_THE_POD)

    def check_nodes(self, claim: Claim) -> None:
        """Invariant 10: the nodes that the pod was given still are these regions' nodes.

        Raises:
            RefusedError: they are not.
        """
        present = {region.id: region.node for region in self.regions_of(claim.device)}
        for granted, node in claim.nodes:
            if present.get(granted) != node:
                raise RefusedError(
                    f"device numbering changed since the pod was admitted: {granted} was {node} and"
                    f" is {present.get(granted, 'gone')} now",
                    hint="delete the pod",
                )
        if len(present) != len(claim.nodes):
            raise RefusedError(
                f"card {claim.device} has other regions than when the pod was admitted",
                hint="delete the pod",
            )
        for region in self.regions_of(claim.device):
            self._check_borrowed(region)

    def _check_borrowed(self, region: Region) -> None:
        if (other := self.borrowed_node(region)) is not None:
            raise RefusedError(
                f"{region.node} of region {region.id} is also in the hands of the pod that was"
                f" given {other} when device numbers were others",
                hint=f"delete the pod that holds {other}",
            )

    # ---------------------------------------------------------------- inventory

    def card_found(
        self,
        card: Card,
        observed: Mapping[RegionId, AfuId | None],
        blank: AfuId | None,
    ) -> None:
        """A card is there, or changed.

        Args:
            card: as it is now.
            observed: AFU id of each region; None where it could not be read (poisoned).
            blank: AFU id of the blank bitstream for its interface id, None without one.

        What was journalled holds where the hardware agrees; everything else is DIRTY.
        """
        change = Change(resources=set(resource_names(self._prefix, card)) - self.resources)
        before = self.cards.get(card.id)
        known_nodes = {} if before is None else {r.id: r.node for r in before.regions}
        if card.clears_memory and not any(r.id in self.regions for r in card.regions):
            change.debts[card.id] = True
        for region in () if before is None else before.regions:
            if all(region.id != present.id for present in card.regions):
                self._went(change, region.id)
        for region in card.regions:
            record = self.regions.get(region.id)
            if known_nodes.get(region.id) == region.node and record is not None:
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
        self.cards[card.id] = card
        self._seen.update(region.id for region in card.regions)
        self._commit(change)
        self._notify(card.id)

    def _first_sight(  # noqa: PLR0911  # a table: one return a row
        self, record: RegionRecord, observed: AfuId | None, blank: AfuId | None
    ) -> RegionRecord:
        dirty = replace(record, condition=Condition.DIRTY, afu_id=None)
        owned = self.region_claim(record.region) is not None
        match record.condition:
            case Condition.BLANK if observed is not None and observed == blank == record.afu_id:
                return record
            case Condition.UNBLANKED if observed is not None and observed == record.afu_id:
                return record
            case Condition.PROGRAMMED if owned and observed is not None:
                if observed == record.afu_id:
                    return record
                return replace(dirty, reason="it was programmed behind the plugin's back")
            case Condition.FAULTED if observed is None:
                return record
            case Condition.DIRTY:
                return record
            case _:
                return replace(dirty, reason="it is not as the journal says")

    def card_gone(self, card: CardId) -> None:
        """A card is no longer there. Claims on it stay until kubelet ends them."""
        gone = self.cards.pop(card, None)
        if gone is None:
            return
        change = Change()
        for region in gone.regions:
            self._went(change, region.id)
        if gone.clears_memory:
            change.debts[card] = True
        self._commit(change)
        self._notify(card)

    def _went(self, change: Change, region: RegionId) -> None:
        self.failing.pop(region, None)
        record = self.record(region)
        if record.condition is not Condition.DIRTY:
            change.regions[region] = replace(
                record, condition=Condition.DIRTY, reason="the hardware went", afu_id=None
            )

    def set_failing(self, card: CardId, failing: Mapping[RegionId, str]) -> None:
        """What the card's health signals say; a region that recovers is DIRTY unless owned."""
        present = self.cards.get(card)
        if present is None:
            return
        change = Change()
        changed = False
        for region in present.regions:
            reason = failing.get(region.id, "")
            if self.failing.get(region.id, "") == reason:
                continue
            changed = True
            if reason:
                self.failing[region.id] = reason
                continue
            del self.failing[region.id]
            record = self.record(region.id)
            free = self.region_claim(region.id) is None
            # A poisoned port that answers again was rebound: worth another scrub.
            if record.condition is Condition.FAULTED or (free and record.condition in CLEAN):
                change.regions[region.id] = replace(
                    record, condition=Condition.DIRTY, reason="the hardware failed in between"
                )
        self._commit(change)
        if changed:
            self._notify(card)

    def verify_clean(self, card: CardId, observed: Mapping[RegionId, AfuId | None]) -> None:
        """A free region that no longer reads as it was left is DIRTY.

        Somebody else may program a card, and a card that was swapped or rebound between two events
        looks as if it had never gone.
        """
        change = Change()
        for region, afu_id in observed.items():
            record = self.record(region)
            if (
                record.condition in CLEAN
                and record.afu_id != afu_id
                and self.region_claim(region) is None
                and card_of(region) == card
            ):
                change.regions[region] = replace(
                    record, condition=Condition.DIRTY, reason="it changed behind the plugin's back"
                )
        self._commit(change)

    def set_foreign(self, foreign: Mapping[CardId, str]) -> None:
        """Cards that another plugin's pods still hold, with the reason to show."""
        before, self.foreign = self.foreign, dict(foreign)
        for card in before.keys() ^ self.foreign.keys():
            self._notify(card)

    def kubelet_epoch(self, epoch: str) -> bool:
        """A life of kubelet; returns whether it is another than before.

        Between its start and our registration kubelet starts containers without PreStart, so every
        claim may have been used, and PostStops of before cannot be counted any more.
        """
        if epoch == self.epoch:
            return False
        change = Change(epoch=epoch)
        for device, claim in self.claims.items():
            if not claim.exposed:
                change.claims[device] = replace(claim, exposed=True)
        self._commit(change)
        return True

    @property
    def sends_env(self) -> bool:
        """Whether this kubelet is known to send the environment in PreStart."""
        return bool(self.env_epoch) and self.env_epoch == self.epoch

    def env_seen(self) -> None:
        """This kubelet sent a non-empty environment."""
        if not self.sends_env:
            self._commit(Change(env_epoch=self.epoch))

    # ---------------------------------------------------------------- claims

    def allocate(self, resource: ResourceName, ids: Sequence[str]) -> tuple[Claim, ...]:
        """Grant devices: all of them, or none.

        Of a device that is owned under the same resource: without a PreStart since the last
        Allocate this is the same pod's next container, or the pod never started; with one it is an
        implied release of exactly this device, and PreStart sorts out the rest.

        Raises:
            UnknownDeviceError: no such device.
            RefusedError: the card is used in the other mode, the hardware failed, or a node is in
                another pod's hands.
            JournalError: nothing was granted.
        """
        devices = self.check_devices(resource, ids)
        self.activity.update(devices)
        change = Change()
        granted: list[Claim] = []
        for device in devices:
            self._check_mode(device, devices)
            regions = self.regions_of(device)
            for region in regions:
                if reason := self.trouble(region.id):
                    raise RefusedError(
                        f"region {region.id} is faulted: {reason}",
                        hint="the operator finds what to do in docs/operations.md; "
                        + DELETE_THE_POD,
                    )
                self._check_borrowed(region)
            if (why := self.foreign.get(card_of(device))) is not None:
                raise RefusedError(f"card {card_of(device)} is left alone: {why}")
            held = self.claims.get(device)
            if held is not None and not held.touched and not held.exposed:
                self.check_nodes(held)
                granted.append(held)
                continue
            if held is not None:
                self._release(change, held)
            claim = Claim(
                device=device,
                resource=resource,
                nodes=tuple((region.id, region.node) for region in regions),
                epoch=self.epoch,
                prestarts=change.strays.get(device, self.strays.get(device, 0)),
                generation=next(self._generations),
            )
            change.claims[device] = claim
            change.strays[device] = 0
            granted.append(claim)
        self._commit(change)
        return tuple(granted)

    def _check_mode(self, device: DeviceId, with_: Sequence[DeviceId]) -> None:
        card = card_of(device)
        whole = is_card(device)
        holders = [c.device for c in self.claims_on(card) if is_card(c.device) != whole]
        # A call is for one resource, so its devices are of one kind; this guards the guard.
        holders += [d for d in with_ if card_of(d) == card and is_card(d) != whole]
        if holders:
            have = f"its regions {', '.join(sorted(holders))} are" if whole else "the whole card is"
            raise RefusedError(
                f"card {card} cannot be given {'as a whole' if whole else 'by region'}: {have} in"
                " use",
                hint="kubelet's view was out of date; the pod's controller makes a new pod, which"
                " is placed anew",
            )

    def adopt(
        self,
        resource: ResourceName,
        device: DeviceId,
        pod: PodUid | None,
        granted: Mapping[str, str],
    ) -> Claim:
        """Make the claim that kubelet's records show and the ledger lacks (a lost journal).

        Args:
            resource: under which kubelet has it.
            device: which.
            pod: whose.
            granted: the nodes that the pod was given, by `FPGA_DEVICE_` variable; where kubelet
                kept none, the present ones are taken for them.

        Raises:
            RefusedError: it conflicts with what the ledger knows, or the device is gone.
        """
        self._check_mode(device, ())
        regions = self.regions_of(device)
        for region in regions:
            self._check_borrowed(region)
        claim = Claim(
            device=device,
            resource=resource,
            nodes=tuple(
                (region.id, granted.get(device_variable(region.id), region.node))
                for region in regions
            ),
            exposed=True,
            pod=pod,
            epoch=self.epoch,
            prestarts=1 + self.strays.get(device, 0),  # one was not seen: never balanced
            generation=next(self._generations),
        )
        change = Change(claims={device: claim}, strays={device: 0})
        for region in regions:
            record = self.record(region.id)
            if record.condition in CLEAN:
                change.regions[region.id] = replace(
                    record, condition=Condition.DIRTY, reason="a pod may have used it"
                )
        self._commit(change)
        return claim

    def bind_pod(self, devices: Iterable[DeviceId], pod: PodUid) -> None:
        """Kubelet's records name the pod that owns these devices.

        A claim that is known to be another pod's is released and made anew: kubelet gave the device
        to somebody else without our hearing of it.
        """
        change = Change()
        for device in devices:
            claim = self.claims.get(device)
            if claim is None or claim.pod == pod:
                continue
            if claim.pod is None:
                change.claims[device] = replace(claim, pod=pod)
                continue
            self._release(change, claim)
            change.claims[device] = Claim(
                device=device,
                resource=claim.resource,
                nodes=claim.nodes,
                exposed=True,
                pod=pod,
                epoch=self.epoch,
                prestarts=1 + change.strays.pop(device, 0),  # as in adopt
                generation=next(self._generations),
            )
        self._commit(change)

    def prestart_seen(self, devices: Iterable[DeviceId]) -> None:
        """Count a PreStart, before anything is known of its outcome."""
        change = Change()
        for device in devices:
            self.activity[device] += 1
            claim = self.claims.get(device)
            if claim is None:
                continue
            change.claims[device] = replace(claim, touched=True, prestarts=claim.prestarts + 1)
        self._commit(change)

    def poststop_seen(self, devices: Iterable[DeviceId]) -> tuple[DeviceId, ...]:
        """Count a PostStop; returns the devices for which they balance the PreStarts.

        Their regions are DIRTY then, whatever the container was given: it has run on them. A
        PostStop may come long after its claim ended, and carries nothing but device ids: those
        that are still to come of earlier claims are counted first.
        """
        change = Change()
        balanced = []
        for device in devices:
            claim = self.claims.get(device)
            if claim is None:
                if strays := self.strays.get(device, 0):
                    change.strays[device] = strays - 1
                continue
            if claim.poststops >= claim.prestarts:
                continue
            claim = replace(claim, poststops=claim.poststops + 1)
            change.claims[device] = claim
            if self._stopped(claim):
                balanced.append(device)
                for region, _ in claim.nodes:
                    record = self.record(region)
                    if record.condition not in (Condition.FAULTED, Condition.SCRUBBING):
                        change.regions[region] = replace(
                            record, condition=Condition.DIRTY, reason="its container stopped"
                        )
        self._commit(change)
        return tuple(balanced)

    def balanced(self, device: DeviceId) -> bool:
        """Whether every container that was started under the claim is known to have stopped."""
        claim = self.claims.get(device)
        return claim is not None and self._stopped(claim)

    def _stopped(self, claim: Claim) -> bool:
        return (
            claim.touched
            and not claim.exposed
            and claim.epoch == self.epoch
            and claim.prestarts == claim.poststops
        )

    def started(self, claims: Iterable[Claim]) -> None:
        """A PreStart succeeded and is about to be answered."""
        change = Change()
        for claim in claims:
            current = self.claims[claim.device]
            if not current.started:
                change.claims[claim.device] = replace(current, started=True)
        self._commit(change)

    def release(self, devices: Iterable[str]) -> tuple[DeviceId, ...]:
        """End the claims on these devices; unknown and unowned ones are passed over.

        Returns those that were owned.
        """
        change = Change()
        released = []
        for text in devices:
            claim = self.claims.get(DeviceId(text))
            if claim is not None and claim.device not in change.claims:
                self._release(change, claim)
                change.claims[claim.device] = None
                released.append(claim.device)
        self._commit(change)
        return tuple(released)

    def _release(self, change: Change, claim: Claim) -> None:
        """What the end of a claim does to its regions."""
        # Balanced PostStops are kubelet's word that every container stopped.
        stopped = self._stopped(claim)
        change.strays[claim.device] = max(claim.prestarts - claim.poststops, 0)
        former = pods([claim.pod]) if (claim.touched or claim.used) and not stopped else frozenset()
        for region, _ in claim.nodes:
            record = change.regions.get(region) or self.record(region)
            condition, reason = record.condition, record.reason
            unused = (stopped or not claim.used) and condition in CLEAN
            if condition not in (Condition.FAULTED, Condition.SCRUBBING) and not unused:
                condition = Condition.DIRTY
                reason = "its owner left" if claim.used else reason or "its owner left"
            new = replace(record, condition=condition, reason=reason, former=record.former | former)
            if new != record:
                change.regions[region] = new

    # ---------------------------------------------------------------- conditions

    def working(self, regions: Iterable[RegionId]) -> None:
        """The next step changes what is on these regions: until it is done, nothing is known."""
        self._set(regions, Condition.SCRUBBING, "")

    def dirty(self, regions: Iterable[RegionId], reason: str) -> None:
        """Somebody's image or state may be on them."""
        self._set(regions, Condition.DIRTY, reason)

    def faulted(self, region: RegionId, reason: str) -> None:
        """The region cannot be used until an operator, or a rebind, mends it."""
        self._set((region,), Condition.FAULTED, reason)

    def clean(self, region: RegionId, afu_id: AfuId | None, *, blank: bool) -> None:
        """Scrubbed: BLANK, or under best-effort UNBLANKED. Nobody of before counts any more."""
        self._set(
            (region,),
            Condition.BLANK if blank else Condition.UNBLANKED,
            "",
            afu_id=afu_id,
            forget=True,
        )

    def programmed(self, region: RegionId, afu_id: AfuId) -> None:
        """Scrubbed since its last owner, programmed, and verified."""
        self._set((region,), Condition.PROGRAMMED, "", afu_id=afu_id, forget=True)

    def forget_former(self, regions: Iterable[RegionId]) -> None:
        """The former owners are known to be gone."""
        change = Change()
        for region in regions:
            if (record := self.record(region)).former:
                change.regions[region] = replace(record, former=frozenset())
        self._commit(change)

    def _set(
        self,
        regions: Iterable[RegionId],
        condition: Condition,
        reason: str,
        *,
        afu_id: AfuId | None = None,
        forget: bool = False,
    ) -> None:
        change = Change()
        for region in regions:
            record = self.record(region)
            change.regions[region] = RegionRecord(
                region,
                condition,
                reason,
                afu_id,
                frozenset() if forget else record.former,
            )
        self._commit(change)

    def set_debt(self, card: CardId, *, open_: bool) -> None:
        """Whether on-card memory may still hold a former tenant's data."""
        if (card in self.debts) != open_:
            self._commit(Change(debts={card: open_}))


def is_card(device: DeviceId) -> bool:
    """Whether a device is a whole card."""
    return device == DeviceId(card_of(device))


@functools.lru_cache(maxsize=8192)
def card_of(device: DeviceId | RegionId | CardId) -> CardId:
    """The card of a device."""
    address, _ = device_order(DeviceId(device))
    return address.card_id
