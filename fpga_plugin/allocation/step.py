"""A step of the ledger while it is made: its change, and what several steps share."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from msgspec import UNSET

from fpga_plugin.allocation.journal.records import (
    CLEAN,
    Allocation,
    Change,
    Condition,
    RegionRecord,
    Tenancy,
    TenancyKey,
)
from fpga_plugin.allocation.state import State
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.hardware.model import Region
from fpga_plugin.ids import AfuId, CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import PodUid, ResourceName

WORKED_ON = frozenset({Condition.FAULTED, Condition.SCRUBBING})
"""Conditions that a use of the region leaves: it is not clean, and work on it decides."""


class Step:
    """Collects one change. It reads the ledger's state, and leaves it as it is until `commit`.

    Attributes:
        change: what will be committed.
    """

    def __init__(self, state: State, change: Change | None = None) -> None:
        self._state = state
        self.change = Change() if change is None else change
        self._ends: Counter[str] = Counter()

    def commit(self, seen: Iterable[CardId] = ()) -> None:
        """Make the change; see `State.commit`. Then the allocations that it ended are counted."""
        self._state.commit(self.change, seen)
        self._state.ends += self._ends

    def record(self, region: RegionId) -> RegionRecord:
        """A region's condition, as this step leaves it."""
        return self.change.regions.get(region) or self._state.record(region)

    def mark(
        self,
        regions: Iterable[RegionId],
        condition: Condition,
        reason: str = "",
        afu_id: AfuId | None = None,
    ) -> None:
        """Put regions into this condition."""
        for region in regions:
            self.change.regions[region] = replace(
                self._state.record(region), condition=condition, reason=reason, afu_id=afu_id
            )

    def spoil(
        self,
        region: RegionId,
        reason: str,
        *,
        but: Collection[Condition] = frozenset(Condition) - CLEAN - {Condition.PROGRAMMED},
    ) -> None:
        """Mark a region DIRTY, unless it is in one of these conditions."""
        record = self.record(region)
        if record.condition not in but:
            self.change.regions[region] = replace(record, condition=Condition.DIRTY, reason=reason)

    # ---------------------------------------------------------------- tenancies

    def begin(self, allocation: Allocation, pods: Iterable[PodUid | None], *, used: bool) -> None:
        """Begin tenancies: pods, or one that is not known yet, get what an allocation granted."""
        for pod in pods:
            for region, grant in allocation.grants.items():
                self._begin(TenancyKey(region, allocation.number, pod), grant, used=used)

    def left_by(self, region: Region, pods: Iterable[PodUid]) -> None:
        """Note that pods may have used a region, by an allocation that the ledger never had.

        Kubelet is done with them.
        """
        number = self._state.next_number()
        for pod in pods:
            self._begin(TenancyKey(region.id, number, pod), region.grant, used=True, left=True)
        self.spoil(region.id, "a pod may have used it")

    def _begin(
        self, key: TenancyKey, grant: Grant, *, used: bool = False, left: bool = False
    ) -> None:
        before = self._state.tenancies.get(key)  # a pod of a ResourceClaim may come again
        known = (before.numbers if before else None) or ()
        numbers = tuple(sorted({*known, *self._state.numbers_of(grant)})) or UNSET
        tenancy = Tenancy(key, grant.nodes, used=used, left=left, numbers=numbers)
        self.change.tenancies[key] = tenancy

    def use(self, tenancies: Iterable[Tenancy]) -> None:
        """Mark tenancies as used: their containers may have the nodes from now on."""
        self.change.tenancies |= {
            one.key: replace(one, used=True) for one in tenancies if not one.used
        }

    def end(self, tenancies: Iterable[Tenancy]) -> None:
        """End tenancies whose pods have no process with the region's nodes, or never had one."""
        for one in tenancies:
            self.change.tenancies[one.key] = None
            for region in self._state.reached(one) if one.used else ():
                self.spoil(region, "a pod may have used it by its node")

    # ---------------------------------------------------------------- allocations

    def grant(
        self,
        device: DeviceId,
        resource: ResourceName,
        grants: Mapping[RegionId, Grant],
        pods: Iterable[PodUid | None],
        *,
        used: bool = False,
        pod: PodUid | None = None,
    ) -> Allocation:
        """A new allocation, with the tenancies of those that use it.

        Args:
            device: card or region.
            resource: under which it is granted.
            grants: each region's nodes and variables.
            pods: its users; None among them: a pod that is not known yet.
            used: one of their containers may have it already, after a PreStart that was not seen.
            pod: its owner, where that is one pod that is known.
        """
        state, change = self._state, self.change
        pending = change.pending_poststops.get(device, state.pending_poststops.get(device, 0))
        allocation = Allocation(
            device=device,
            resource=resource,
            grants=grants,
            missed_prestart=used,
            prestarts=pending + used,
            pod=pod,
            instance=state.kubelet_instance,
            number=state.next_number(),
            since=state.clock(),
        )
        change.allocations[device] = allocation
        change.pending_poststops[device] = 0
        self.begin(allocation, pods, used=used)
        return allocation

    def start(self, allocation: Allocation) -> None:
        """Its owner's containers may have the device from now on."""
        self.use(self._state.tenancies.users(allocation))
        if not allocation.started:
            self.change.allocations[allocation.device] = replace(allocation, started=True)

    def release(self, allocation: Allocation, cause: str = "released") -> None:
        """End an allocation, with the tenancies on its regions; used ones wait for their pods.

        `cause`: under which it is counted (`State.ends`).
        """
        state, change = self._state, self.change
        self._ends[cause] += 1
        # After the next Allocate kubelet sends no more than the PostStop that it had begun to send.
        unseen = 0 if state.countable(allocation) else 1
        change.allocations[allocation.device] = None
        change.pending_poststops[allocation.device] = max(
            allocation.prestarts - allocation.poststops, unseen
        )
        users = state.tenancies.users(allocation)
        used = {one.region for one in users if one.used}
        if allocation.used and state.claim_owner_of(allocation.device) is not None:
            # Pods of a ResourceClaim that used it may be forgotten.
            used |= allocation.grants.keys()
        # For a pod that was never known, kubelet's word has to do.
        self.end(one for one in users if not one.used or one.pod is None)
        change.tenancies |= {
            one.key: replace(one, left=True) for one in users if one.used and one.pod is not None
        }
        for region in allocation.grants:
            record = self.record(region)
            unused = region not in used and record.condition in CLEAN
            if not unused:
                reason = "its owner left" if allocation.used else record.reason or "its owner left"
                self.spoil(region, reason, but=WORKED_ON)
