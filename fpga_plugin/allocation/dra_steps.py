"""ResourceClaims that have devices (DRA).

A device's owner is then a ResourceClaim, by its uid, together with the pods that use it. The ledger
keeps an `Allocation` for each device, as with the device plugin API, and a `ClaimOwner` for each
claim. The two change in one transaction.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from fpga_plugin.allocation.journal.records import (
    CLEAN,
    Allocation,
    Change,
    ClaimOwner,
    Condition,
    Fact,
    Prepared,
    Tenancy,
)
from fpga_plugin.allocation.names import card_of, is_card
from fpga_plugin.allocation.naming import Naming
from fpga_plugin.allocation.obstacles import Obstacles, Stops
from fpga_plugin.allocation.state import State
from fpga_plugin.allocation.step import Step
from fpga_plugin.errors import NotFinishedError, RefusedError, UnknownDeviceError
from fpga_plugin.ids import CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import ClaimUid, PodUid


class DeviceOwnedError(NotFinishedError):
    """Another claim still has a device; the caller waits for its end.

    Attributes:
        owner: the other claim; None: the device plugin API allocated it.
    """

    def __init__(self, message: str, *, owner: ClaimUid | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.owner = owner


class DraSteps:
    """The ledger's steps for ResourceClaims."""

    def __init__(self, state: State, obstacles: Obstacles, naming: Naming, *, boot_id: str) -> None:
        self._state = state
        self._obstacles = obstacles
        self._naming = naming
        self._boot_id = boot_id

    def is_prepared(self, owner: ClaimOwner) -> bool:
        """Whether its devices were prepared as it asks, in this boot."""
        return not owner.ended and bool(owner.boot) and owner.boot == self._boot_id

    def grant_error(self, owner: ClaimOwner) -> str:
        """Why its nodes do not lead to its regions, and to its regions alone; empty: they do.

        Invariant 10, for all devices of a claim.
        """
        for device in owner.devices:
            if (allocation := self._state.allocations.get(device)) is None:
                return f"it does not have {device}"
            try:
                self._obstacles.check_grants(allocation)
            except RefusedError as error:
                return error.message
        return ""

    def preparation_error(self, owner: ClaimOwner) -> str:
        """Why a claim's preparation no longer holds; empty: it holds, and for this claim alone.

        Failing hardware does not count: it may recover.
        """
        if not self.is_prepared(owner):
            return "it is not prepared"
        for allocation in self._state.allocations_of(owner.devices):
            for region in allocation.grants:
                record = self._state.record(region)
                if record.condition not in CLEAN | {Condition.PROGRAMMED}:
                    return f"region {region} is {record.condition}: {record.reason}"
        return self.grant_error(owner)

    def take(self, owner: ClaimOwner, pods: Collection[PodUid]) -> tuple[Allocation, ...]:
        """Give a claim its devices, all of them or none, before any work on them.

        `pods`: use the claim too, besides those already known.

        Allocations of an earlier preparation of the claim end.

        Raises:
            UnknownDeviceError: no such device.
            DeviceOwnedError: another claim has one, or a device of the same card in the other mode.
            RefusedError: an obstacle stands against one of them.
            JournalError: nothing was given.
        """
        before = self.in_force(owner.uid)
        users = {*pods, *(() if before is None else self._state.pods_of(before.devices))}
        step = Step(
            self._state, Change(claim_owners={owner.uid: replace(owner, boot="", ended=False)})
        )
        allocations: list[Allocation] = []
        for device in owner.devices:
            # Not the earlier resource: its card may have another interface id by now.
            resource = self._naming.present_resource(device)
            if resource is None:
                raise unknown_device(device)
            self._check_others(owner, device)
            present = self._state.allocations.get(device)
            self._obstacles.check(device, Stops.CLAIM if present is None else Stops.PREPARE)
            if present is not None:
                step.release(present, "prepared again")
            grants = self._obstacles.grants_of(device)
            allocations.append(step.grant(device, resource, grants, users))
        if before is not None:  # it had others before: kubelet named another allocation
            self._leave(step, before, owner.devices)
        step.commit()
        return tuple(allocations)

    def left_behind(self, uid: ClaimUid, devices: Collection[DeviceId]) -> tuple[DeviceId, ...]:
        """The devices that a claim in force has beyond those that it is allocated now."""
        owner = self.in_force(uid)
        return tuple(d for d in (owner.devices if owner else ()) if d not in devices)

    def in_force(self, uid: ClaimUid) -> ClaimOwner | None:
        """The owner's row of a claim that has not ended; None: there is none."""
        owner = self._state.claim_owners.get(uid)
        return None if owner is None or owner.ended else owner

    def leave(self, uid: ClaimUid, devices: Collection[DeviceId]) -> tuple[CardId, ...]:
        """Release all devices of a claim but these: the others may be allocated elsewhere by now.

        The claim need not have these devices yet. A claim without any device loses its row. Returns
        the cards of the released devices, which are scrubbed in the background.
        """
        if not (left := self.left_behind(uid, devices)):
            return ()
        owner = self._state.claim_owners[uid]
        kept = tuple(device for device in owner.devices if device in devices)
        requests = {each: names for each, names in owner.requests.items() if each in kept}
        now = replace(owner, devices=kept, requests=requests, boot="") if kept else None
        step = Step(self._state, Change(claim_owners={uid: now}))
        self._leave(step, owner, kept)
        step.commit()
        return tuple(dict.fromkeys(map(card_of, left)))

    def _leave(self, step: Step, owner: ClaimOwner, kept: Collection[DeviceId] = ()) -> None:
        for allocation in self._state.allocations_of(owner.devices):
            if allocation.device not in kept:
                step.release(allocation)

    def _check_others(self, owner: ClaimOwner, device: DeviceId) -> None:
        """Invariant 1, among claims.

        Raises:
            DeviceOwnedError: another claim has the device, its card or a region of it.
        """
        card, whole = card_of(device), is_card(device)
        for allocation in self._state.allocations_on(card):
            if allocation.device != device and is_card(allocation.device) == whole:
                continue  # a neighbour
            other = self._state.claim_owner_of(allocation.device)
            if other is not None and other.uid == owner.uid:
                continue  # its own earlier allocation, which ends with this
            who = "a pod of the device plugin" if other is None else f"claim {other.uid}"
            raise DeviceOwnedError(
                f"{allocation.device} is still held by {who}",
                owner=None if other is None else other.uid,
                hint="it is tried again when kubelet retries; see why that claim does not end",
            )
        both = [d for d in owner.devices if card_of(d) == card and is_card(d) != whole]
        if both:
            raise RefusedError(
                f"the claim has card {card} as a whole and by region at the same time",
                hint="the scheduler must know the counters of the node's ResourceSlices",
            )

    def prepared(self, uid: ClaimUid, what: Mapping[RegionId, Prepared]) -> None:
        """A claim is prepared and verified; the answer to kubelet follows."""
        owner = self._state.claim_owners[uid]
        now = replace(owner, boot=self._boot_id, prepared=what)
        step = Step(self._state, Change(claim_owners={uid: now}))
        for device in owner.devices:
            step.start(self._state.allocations[device])
        step.commit()

    def unprepared(self, uid: ClaimUid) -> None:
        """A claim's preparation no longer matches what it asks for."""
        self._state.commit(
            Change(claim_owners={uid: replace(self._state.claim_owners[uid], boot="")})
        )

    def adopt_claim(self, owner: ClaimOwner, pods: Collection[PodUid]) -> tuple[Allocation, ...]:
        """Adopt a claim that kubelet's record shows and the journal lacks: pods may run with it.

        If the ledger has the claim, only those of its devices that it lacks are adopted. Further
        pods may start with all of them, as the claim's file stays.

        Raises:
            FpgaPluginError: it conflicts with what the ledger knows.
        """
        step = Step(
            self._state, Change(claim_owners={owner.uid: replace(owner, boot="", ended=False)})
        )
        allocations = []
        for device in owner.devices:
            other = self._state.claim_owner_of(device)
            present = self._state.allocations.get(device)
            if present is not None and other is not None and other.uid == owner.uid:
                step.change.allocations[device] = replace(present, missed_prestart=True)
                continue
            resource = self._naming.device_resource(device)
            if resource is None:
                raise unknown_device(device)
            self._check_others(owner, device)
            grants = self._obstacles.grants_of(device)
            allocation = step.grant(device, resource, grants, pods, used=True)
            allocations.append(allocation)
            for region in allocation.grants:
                step.spoil(region, "a pod may have used it")
        step.commit()
        return tuple(allocations)

    def claims_read(self) -> None:
        """Kubelet's record of claims was read: the ledger now has every claimed device."""
        if self._state.resource_claims_unknown:
            self._state.commit(Change(facts={Fact.RESOURCE_CLAIMS: ""}))

    def join(self, pods: Mapping[ClaimUid, Collection[PodUid]]) -> None:
        """Add pods that use claims in force, besides those already known.

        Their containers start only with a prepared claim. Whether an adopted claim was prepared is
        unknown.
        """
        step = Step(self._state)
        for uid, of_claim in pods.items():
            for allocation in self._allocations_of(uid):
                users = self._state.tenancies.users(allocation)
                there = {one.pod for one in users if not one.left}
                used = allocation.missed_prestart or self.is_prepared(self._state.claim_owners[uid])
                step.begin(allocation, [pod for pod in of_claim if pod not in there], used=used)
                # A pod that returns had it before, prepared or not.
                again = (step.change.tenancies.get(one.key) for one in users if one.used)
                step.use([one for one in again if one is not None])
        step.commit()

    def left_by(self, devices: Collection[DeviceId], pods: Collection[PodUid]) -> None:
        """Note that pods may run with devices of a claim that ends and was never adopted.

        Raises:
            JournalError: nothing is noted.
        """
        step = Step(self._state)
        for device in devices:
            for region in self._obstacles.present_regions(device):
                known = {one.pod for one in self._state.tenancies.of(region.id)}
                if new := {*pods} - known:
                    step.left_by(region, new)
        step.commit()

    def part(self, uid: ClaimUid, pods: Collection[PodUid]) -> None:
        """Keep only these pods of a claim: kubelet's record names no others."""
        self._state.commit(
            Change(
                tenancies={
                    one.key: replace(one, left=True)
                    for one in self.tenancies_of_claim(uid)
                    if one.pod not in pods and not one.left
                }
            )
        )

    def tenancies_of_claim(self, uid: ClaimUid) -> list[Tenancy]:
        """Tenancies of the pods that use a claim, or used its present allocation."""
        return [
            one
            for allocation in self._allocations_of(uid)
            for one in self._state.tenancies.users(allocation)
        ]

    def _allocations_of(self, uid: ClaimUid) -> tuple[Allocation, ...]:
        """The allocations of a claim in force."""
        owner = self.in_force(uid)
        return self._state.allocations_of(owner.devices if owner else ())

    def end_claim(self, uid: ClaimUid) -> tuple[CardId, ...]:
        """End a claim; its regions are scrubbed in the background.

        The owner's row stays, as ended, until they are (`forget_claim`). Returns the cards.
        """
        if (owner := self.in_force(uid)) is None:
            return ()
        step = Step(self._state, Change(claim_owners={uid: replace(owner, ended=True, boot="")}))
        self._leave(step, owner)
        step.commit()
        return tuple(dict.fromkeys(map(card_of, owner.devices)))

    def forget_claim(self, uid: ClaimUid) -> None:
        """Remove an ended claim: its devices are clean, or kept back for good."""
        if uid in self._state.claim_owners and self._state.claim_owners[uid].ended:
            self._state.commit(Change(claim_owners={uid: None}))


def unknown_device(device: DeviceId) -> UnknownDeviceError:
    """The error for a claim whose device does not exist."""
    return UnknownDeviceError(
        f"this node has no device {device}",
        hint="its card was removed after the claim was allocated: delete the pod",
    )
