"""Resource claims that have devices (DRA): the ledger's steps for the second door.

Under it the owner of a device is a claim, by its uid, and the pods that use the claim. What the
ledger keeps for each device is the same as under the first door (`Claim`). A holder says besides
whose these claims are. The two change in one transaction.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from fpga_plugin.errors import NotFinishedError, RefusedError, UnknownDeviceError
from fpga_plugin.ids import CardId, ClaimUid, DeviceId, PodUid, RegionId, ResourceName
from fpga_plugin.ledger.claims import Claims
from fpga_plugin.ledger.names import card_of, is_card
from fpga_plugin.ledger.records import (
    CLEAN,
    Change,
    Claim,
    Condition,
    Epoch,
    Holder,
    Prepared,
    Tenancy,
)


class HeldError(NotFinishedError):
    """Another claim still has a device; its end is waited for.

    Attributes:
        holder: which claim; None: it is none of DRA's.
    """

    def __init__(self, message: str, *, holder: ClaimUid | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.holder = holder


class Holders(Claims):
    """The ledger's steps on the side of DRA."""

    def is_prepared(self, holder: Holder) -> bool:
        """Whether its devices were brought into the state that it asks for, in this boot."""
        return not holder.ended and bool(holder.boot) and holder.boot == self.boot_id

    def misled(self, holder: Holder) -> str:
        """Why its nodes do not lead to its regions, and nobody else to these; empty: they do.

        Invariant 10, of all devices that a claim has.
        """
        for device in holder.devices:
            if (claim := self.claims.get(device)) is None:
                return f"it does not have {device}"
            try:
                self.check_grants(claim)
            except RefusedError as error:
                return error.message
        return ""

    def fallen(self, holder: Holder) -> str:
        """Why what was prepared for a claim is not there any more; empty: it is, and for it alone.

        That the hardware fails does not count: that may pass.
        """
        if not self.is_prepared(holder):
            return "it is not prepared"
        for device in holder.devices:
            for region in self.claims[device].grants if device in self.claims else ():
                record = self.record(region)
                if record.condition not in CLEAN | {Condition.PROGRAMMED}:
                    return f"region {region} is {record.condition}: {record.reason}"
        return self.misled(holder)

    def take(self, holder: Holder, pods: Collection[PodUid]) -> tuple[Claim, ...]:
        """Give a claim its devices, all of them or none, before anything is done to them.

        `pods`: that use it, besides those that are known.

        What the claim has of an earlier preparation ends with it.

        Raises:
            UnknownDeviceError: no such device.
            HeldError: another claim has one, or a device of the same card in the other mode.
            RefusedError: the card is not given out, or a node is in another pod's hands.
            JournalError: nothing was given.
        """
        before = self.holders.get(holder.uid)
        if before is not None and before.ended:
            before = None
        users = {*pods, *(() if before is None else self.pods_of(before.devices))}
        change = Change(holders={holder.uid: replace(holder, boot="", ended=False)})
        claims: list[Claim] = []
        for device in holder.devices:
            # Not what it was given under before: its card may have another interface id by now.
            resource = self.present_resource(device)
            if resource is None:
                raise unknown_device(device)
            self._check_others(holder, device)
            held = self.claims.get(device)
            self._check_in_service(card_of(device), owned=held is not None)
            if held is None:  # else it is this claim's, which keeps it
                self._check_exposure(device)
            for region in self.regions_of(device):
                self._check_strangers(region)
            if held is not None:
                self._release(change, held)
            claims.append(self._made(change, device, resource, users))
        if before is not None:  # it had others before: kubelet was told of another allocation
            self._leave(change, before, holder.devices)
        self._commit(change)
        return tuple(claims)

    def left_behind(self, uid: ClaimUid, devices: Collection[DeviceId]) -> tuple[DeviceId, ...]:
        """What a claim in force has besides the `devices` that it is allocated now."""
        holder = self.holders.get(uid)
        if holder is None or holder.ended:
            return ()
        return tuple(device for device in holder.devices if device not in devices)

    def leave(self, uid: ClaimUid, devices: Collection[DeviceId]) -> tuple[CardId, ...]:
        """A claim lets go of all but these devices: the others may be somebody else's by now.

        Whether it ever gets those that it is allocated is another matter. Of a claim that has
        nothing left no row is kept. Returns the cards of what it left, which is scrubbed in the
        background.
        """
        if not (left := self.left_behind(uid, devices)):
            return ()
        holder = self.holders[uid]
        kept = tuple(device for device in holder.devices if device in devices)
        requests = {each: names for each, names in holder.requests.items() if each in kept}
        now = replace(holder, devices=kept, requests=requests, boot="") if kept else None
        change = Change(holders={uid: now})
        self._leave(change, holder, kept)
        self._commit(change)
        self.ends["released"] += len(left)
        return tuple(dict.fromkeys(map(card_of, left)))

    def _leave(self, change: Change, holder: Holder, kept: Collection[DeviceId]) -> None:
        for device in holder.devices:
            if device not in kept and (held := self.claims.get(device)) is not None:
                self._release(change, held)
                change.claims[device] = None

    def _made(
        self,
        change: Change,
        device: DeviceId,
        resource: ResourceName,
        pods: Iterable[PodUid],
        *,
        exposed: bool = False,
    ) -> Claim:
        claim = change.claims[device] = Claim(
            device=device,
            resource=resource,
            grants={region.id: region.grant for region in self.regions_of(device)},
            touched=True,
            exposed=exposed,
            epoch=self.epoch,
            prestarts=1,  # never balanced: no PostStop comes by this door
            generation=next(self._generations),
            since=self._clock(),
        )
        change.strays[device] = 0
        self._begin(change, claim, pods, used=exposed)
        return claim

    def _check_others(self, holder: Holder, device: DeviceId) -> None:
        """Invariant 1, among claims.

        Raises:
            HeldError: another claim has the device, its card or a region of it.
        """
        card, whole = card_of(device), is_card(device)
        for claim in self.claims_on(card):
            if claim.device != device and is_card(claim.device) == whole:
                continue  # a neighbour
            other = self.holder_of(claim.device)
            if other is not None and other.uid == holder.uid:
                continue  # what it has from before, which ends with this
            who = "a pod of the device plugin" if other is None else f"claim {other.uid}"
            raise HeldError(
                f"{claim.device} is still held by {who}",
                holder=None if other is None else other.uid,
                hint="it is tried again when kubelet retries; see why that claim does not end",
            )
        both = [d for d in holder.devices if card_of(d) == card and is_card(d) != whole]
        if both:
            raise RefusedError(
                f"the claim has card {card} as a whole and by region at the same time",
                hint="the scheduler must know the counters of the node's ResourceSlices",
            )

    def prepared(self, uid: ClaimUid, what: Mapping[RegionId, Prepared]) -> None:
        """What a claim asks for is done and verified; kubelet is about to be told."""
        holder = self.holders[uid]
        change = Change(holders={uid: replace(holder, boot=self.boot_id, prepared=what)})
        for device in holder.devices:
            claim = self.claims[device]
            self._use(change, self.users(claim))
            if not claim.started:
                change.claims[device] = replace(claim, started=True)
        self._commit(change)

    def unprepared(self, uid: ClaimUid) -> None:
        """What was prepared for a claim is no longer what it asks for."""
        self._commit(Change(holders={uid: replace(self.holders[uid], boot="")}))

    def adopt_holder(self, holder: Holder, pods: Collection[PodUid]) -> tuple[Claim, ...]:
        """Make the holder that kubelet's record shows and the journal lacks: pods may run with it.

        Of one that the journal has, the devices whose claims it lost; the others stay as they are.

        Raises:
            FpgaPluginError: it conflicts with what the ledger knows.
        """
        change = Change(holders={holder.uid: replace(holder, boot="", ended=False)})
        claims = []
        for device in holder.devices:
            other = self.holder_of(device) if device in self.claims else None
            if other is not None and other.uid == holder.uid:
                continue
            resource = self.device_resource(device)
            if resource is None:
                raise UnknownDeviceError(f"this node has no device {device}")
            self._check_others(holder, device)
            claim = self._made(change, device, resource, pods, exposed=True)
            claims.append(claim)
            for region in claim.grants:
                record = self.record(region)
                if record.condition in CLEAN:
                    change.regions[region] = replace(
                        record, condition=Condition.DIRTY, reason="a pod may have used it"
                    )
        self._commit(change)
        return tuple(claims)

    def claims_read(self) -> None:
        """Kubelet's record of claims was read: none has a device that the ledger lacks."""
        if self.claims_unknown:
            self._commit(Change(epochs={Epoch.CLAIMS: ""}))

    def join(self, uid: ClaimUid, pods: Collection[PodUid]) -> None:
        """These pods use a claim, besides those that are known.

        No container of theirs starts with what is not prepared; of an adopted one nobody knows.
        """
        change = Change()
        for claim in self._claims_of(uid):
            users = self.users(claim)
            there = {one.pod for one in users if not one.left}
            used = claim.exposed or self.is_prepared(self.holders[uid])
            self._begin(change, claim, [pod for pod in pods if pod not in there], used=used)
            # Whoever comes again had it before, prepared or not.
            self._use(
                change,
                [now for one in users if one.used and (now := change.tenancies.get(one.key))],
            )
        self._commit(change)

    def part(self, uid: ClaimUid, pods: Collection[PodUid]) -> None:
        """Kubelet's record names no pods of a claim but these: the others are done with it."""
        self._commit(
            Change(
                tenancies={
                    one.key: replace(one, left=True)
                    for one in self.tenancies_of_holder(uid)
                    if one.pod not in pods and not one.left
                }
            )
        )

    def tenancies_of_holder(self, uid: ClaimUid) -> list[Tenancy]:
        """Of the pods that use a claim, or did by its present allocation."""
        return [one for claim in self._claims_of(uid) for one in self.users(claim)]

    def _claims_of(self, uid: ClaimUid) -> list[Claim]:
        """The devices that a claim in force has."""
        holder = self.holders.get(uid)
        if holder is None or holder.ended:
            return []
        return [claim for device in holder.devices if (claim := self.claims.get(device))]

    def end_holder(self, uid: ClaimUid) -> tuple[CardId, ...]:
        """The end of a claim; what it had is scrubbed in the background.

        The holder stays, as ended, until that is done (`forget_holder`). Returns the cards.
        """
        holder = self.holders.get(uid)
        if holder is None or holder.ended:
            return ()
        change = Change(holders={uid: replace(holder, ended=True, boot="")})
        for device in holder.devices:
            if (claim := self.claims.get(device)) is not None:
                self._release(change, claim)
                change.claims[device] = None
        self._commit(change)
        self.ends["released"] += len(holder.devices)
        return tuple(dict.fromkeys(map(card_of, holder.devices)))

    def forget_holder(self, uid: ClaimUid) -> None:
        """What an ended claim had is clean, or kept back for good."""
        if uid in self.holders and self.holders[uid].ended:
            self._commit(Change(holders={uid: None}))


def unknown_device(device: DeviceId) -> UnknownDeviceError:
    """What a claim hears of a device that is not there."""
    return UnknownDeviceError(
        f"this node has no device {device}",
        hint="its card was removed after the claim was allocated: delete the pod",
    )
