"""ResourceClaims that have devices (DRA).

The owner of a device is then a ResourceClaim, by its uid, and the pods that use it. What the ledger
keeps for each device is the same as with the device plugin API (`Claim`). A holder says besides
whose these claims are. The two change in one transaction.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from fpga_plugin.allocation.journal.records import (
    CLEAN,
    Change,
    Claim,
    Condition,
    Epoch,
    Holder,
    Prepared,
    Tenancy,
)
from fpga_plugin.allocation.names import card_of, is_card
from fpga_plugin.allocation.naming import Naming
from fpga_plugin.allocation.obstacles import Obstacles, Stops
from fpga_plugin.allocation.state import State
from fpga_plugin.allocation.step import Step
from fpga_plugin.errors import NotFinishedError, RefusedError, UnknownDeviceError
from fpga_plugin.ids import CardId, ClaimUid, DeviceId, PodUid, RegionId, ResourceName


class HeldError(NotFinishedError):
    """Another claim still has a device; its end is waited for.

    Attributes:
        holder: which claim; None: it is none of DRA's.
    """

    def __init__(self, message: str, *, holder: ClaimUid | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.holder = holder


class ResourceClaims:
    """The ledger's steps on the side of DRA."""

    def __init__(self, state: State, obstacles: Obstacles, naming: Naming, *, boot_id: str) -> None:
        self._state = state
        self._obstacles = obstacles
        self._naming = naming
        self._boot_id = boot_id

    def is_prepared(self, holder: Holder) -> bool:
        """Whether its devices were brought into the state that it asks for, in this boot."""
        return not holder.ended and bool(holder.boot) and holder.boot == self._boot_id

    def misled(self, holder: Holder) -> str:
        """Why its nodes do not lead to its regions, and nobody else to these; empty: they do.

        Invariant 10, of all devices that a claim has.
        """
        for device in holder.devices:
            if (claim := self._state.claims.get(device)) is None:
                return f"it does not have {device}"
            try:
                self._obstacles.check_grants(claim)
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
            for region in self._state.claims[device].grants if device in self._state.claims else ():
                record = self._state.record(region)
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
            RefusedError: an obstacle stands against one of them.
            JournalError: nothing was given.
        """
        before = self._state.holders.get(holder.uid)
        if before is not None and before.ended:
            before = None
        users = {*pods, *(() if before is None else self._state.pods_of(before.devices))}
        step = Step(
            self._state, Change(holders={holder.uid: replace(holder, boot="", ended=False)})
        )
        claims: list[Claim] = []
        for device in holder.devices:
            # Not what it was given under before: its card may have another interface id by now.
            resource = self._naming.present_resource(device)
            if resource is None:
                raise unknown_device(device)
            self._check_others(holder, device)
            held = self._state.claims.get(device)
            self._obstacles.check(device, Stops.CLAIM if held is None else Stops.PREPARE)
            if held is not None:
                step.release(held)
            claims.append(self._grant(step, device, resource, users))
        if before is not None:  # it had others before: kubelet was told of another allocation
            self._leave(step, before, holder.devices)
        step.commit()
        return tuple(claims)

    def left_behind(self, uid: ClaimUid, devices: Collection[DeviceId]) -> tuple[DeviceId, ...]:
        """What a claim in force has besides the `devices` that it is allocated now."""
        holder = self._state.holders.get(uid)
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
        holder = self._state.holders[uid]
        kept = tuple(device for device in holder.devices if device in devices)
        requests = {each: names for each, names in holder.requests.items() if each in kept}
        now = replace(holder, devices=kept, requests=requests, boot="") if kept else None
        step = Step(self._state, Change(holders={uid: now}))
        self._leave(step, holder, kept)
        step.commit()
        self._state.ends["released"] += len(left)
        return tuple(dict.fromkeys(map(card_of, left)))

    def _leave(self, step: Step, holder: Holder, kept: Collection[DeviceId] = ()) -> None:
        for device in holder.devices:
            if device not in kept and (held := self._state.claims.get(device)) is not None:
                step.release(held)

    def _grant(
        self,
        step: Step,
        device: DeviceId,
        resource: ResourceName,
        pods: Iterable[PodUid],
        *,
        used: bool = False,
    ) -> Claim:
        grants = {region.id: region.grant for region in self._obstacles.regions_of(device)}
        # Its PreStarts are never balanced: with DRA no PostStop comes.
        return step.grant(device, resource, grants, pods, used=used, touched=True, prestarts=1)

    def _check_others(self, holder: Holder, device: DeviceId) -> None:
        """Invariant 1, among claims.

        Raises:
            HeldError: another claim has the device, its card or a region of it.
        """
        card, whole = card_of(device), is_card(device)
        for claim in self._state.claims_on(card):
            if claim.device != device and is_card(claim.device) == whole:
                continue  # a neighbour
            other = self._state.holder_of(claim.device)
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
        holder = self._state.holders[uid]
        now = replace(holder, boot=self._boot_id, prepared=what)
        step = Step(self._state, Change(holders={uid: now}))
        for device in holder.devices:
            claim = self._state.claims[device]
            step.use(self._state.tenancies.users(claim))
            if not claim.started:
                step.change.claims[device] = replace(claim, started=True)
        step.commit()

    def unprepared(self, uid: ClaimUid) -> None:
        """What was prepared for a claim is no longer what it asks for."""
        self._state.commit(Change(holders={uid: replace(self._state.holders[uid], boot="")}))

    def adopt_holder(self, holder: Holder, pods: Collection[PodUid]) -> tuple[Claim, ...]:
        """Make the holder that kubelet's record shows and the journal lacks: pods may run with it.

        Of one that the journal has, the devices whose claims it lost; the others stay as they are.

        Raises:
            FpgaPluginError: it conflicts with what the ledger knows.
        """
        step = Step(
            self._state, Change(holders={holder.uid: replace(holder, boot="", ended=False)})
        )
        claims = []
        for device in holder.devices:
            other = self._state.holder_of(device) if device in self._state.claims else None
            if other is not None and other.uid == holder.uid:
                continue
            resource = self._naming.device_resource(device)
            if resource is None:
                raise UnknownDeviceError(f"this node has no device {device}")
            self._check_others(holder, device)
            claim = self._grant(step, device, resource, pods, used=True)
            claims.append(claim)
            for region in claim.grants:
                step.spoil(region, "a pod may have used it")
        step.commit()
        return tuple(claims)

    def claims_read(self) -> None:
        """Kubelet's record of claims was read: none has a device that the ledger lacks."""
        if self._state.claims_unknown:
            self._state.commit(Change(epochs={Epoch.CLAIMS: ""}))

    def join(self, uid: ClaimUid, pods: Collection[PodUid]) -> None:
        """These pods use a claim, besides those that are known.

        No container of theirs starts with what is not prepared; of an adopted one nobody knows.
        """
        step = Step(self._state)
        for claim in self._claims_of(uid):
            users = self._state.tenancies.users(claim)
            there = {one.pod for one in users if not one.left}
            used = claim.exposed or self.is_prepared(self._state.holders[uid])
            step.begin(claim, [pod for pod in pods if pod not in there], used=used)
            # Whoever comes again had it before, prepared or not.
            again = (step.change.tenancies.get(one.key) for one in users if one.used)
            step.use([one for one in again if one is not None])
        step.commit()

    def part(self, uid: ClaimUid, pods: Collection[PodUid]) -> None:
        """Kubelet's record names no pods of a claim but these: the others are done with it."""
        self._state.commit(
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
        return [one for claim in self._claims_of(uid) for one in self._state.tenancies.users(claim)]

    def _claims_of(self, uid: ClaimUid) -> list[Claim]:
        """The devices that a claim in force has."""
        holder = self._state.holders.get(uid)
        if holder is None or holder.ended:
            return []
        return [claim for device in holder.devices if (claim := self._state.claims.get(device))]

    def end_holder(self, uid: ClaimUid) -> tuple[CardId, ...]:
        """The end of a claim; what it had is scrubbed in the background.

        The holder stays, as ended, until that is done (`forget_holder`). Returns the cards.
        """
        holder = self._state.holders.get(uid)
        if holder is None or holder.ended:
            return ()
        step = Step(self._state, Change(holders={uid: replace(holder, ended=True, boot="")}))
        self._leave(step, holder)
        step.commit()
        self._state.ends["released"] += len(holder.devices)
        return tuple(dict.fromkeys(map(card_of, holder.devices)))

    def forget_holder(self, uid: ClaimUid) -> None:
        """What an ended claim had is clean, or kept back for good."""
        if uid in self._state.holders and self._state.holders[uid].ended:
            self._state.commit(Change(holders={uid: None}))


def unknown_device(device: DeviceId) -> UnknownDeviceError:
    """What a claim hears of a device that is not there."""
    return UnknownDeviceError(
        f"this node has no device {device}",
        hint="its card was removed after the claim was allocated: delete the pod",
    )
