"""Which part of a change takes trust away, and which gives it: chosen here, and nowhere else.

What takes trust away only ever makes the ledger refuse more: a region is DIRTY or FAULTED, an
allocation may have been used, a pod uses a region, an image is on it, memory is to be cleared, a
card is out of service. It holds in memory at once, written or not. All else gives some: a region is
clean or programmed, a device has an owner or none, a pod is gone. So do the first step of work on
hardware and a hand-over: they hold, and go on, only once they are written (`State.commit`).
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Final, Protocol

from fpga_plugin.allocation.journal.records import (
    Allocation,
    Change,
    ClaimOwner,
    Condition,
    Fact,
    RegionRecord,
    Tenancy,
    TenancyKey,
)
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import ClaimUid


class Known(Protocol):
    """What holds before the change."""

    allocations: dict[DeviceId, Allocation]
    claim_owners: dict[ClaimUid, ClaimOwner]

    @property
    def tenancies(self) -> Mapping[TenancyKey, Tenancy]:
        """All that are in force."""

    def allocation_of(self, key: TenancyKey) -> Allocation | None:
        """The allocation of a tenancy; None: it ended, or is not made yet."""


def parted(change: Change, known: Known) -> tuple[Change, Change]:
    """What of a change takes trust away, and the rest, which gives some."""
    taking, giving = Change(), Change()
    for kind in fields(Change):
        takes = _TAKES[kind.name]
        for key, value in getattr(change, kind.name).items():
            part = taking if takes(known, taking, key, value) else giving
            getattr(part, kind.name)[key] = value
    return taking, giving


def _fact(_known: Known, _taking: Change, fact: Fact, told: str) -> bool:
    return fact in {Fact.KUBELET, Fact.LOST} or (fact is Fact.RESOURCE_CLAIMS and bool(told))


def _allocation(
    known: Known, _taking: Change, device: DeviceId, allocation: Allocation | None
) -> bool:
    """One that kubelet's records show takes its device from others; one in force is used more."""
    if allocation is None:
        return False
    before = known.allocations.get(device)
    if before is None:
        return allocation.missed_prestart
    return (
        allocation.number == before.number
        and allocation.poststops == before.poststops
        and allocation.prestarts >= before.prestarts
        and (allocation.missed_prestart, allocation.prestart_seen)
        >= (before.missed_prestart, before.prestart_seen)
        and allocation.started <= before.started
        and before.pod in {None, allocation.pod}
    )


def _region(_known: Known, _taking: Change, _region: object, record: RegionRecord) -> bool:
    """A DIRTY region is not given out before work on it, whose begin is written.

    So FAULTED that becomes DIRTY gives nothing either.
    """
    return record.condition in {Condition.DIRTY, Condition.FAULTED}


def _tenancy(known: Known, taking: Change, key: TenancyKey, tenancy: Tenancy | None) -> bool:
    """It begins, or its pod may have used the region; that of an allocation belongs to it."""
    if tenancy is None:
        return False
    before = known.tenancies.get(key)
    if before is not None:
        return tenancy.used >= before.used and tenancy.left <= before.left
    made = (
        allocation.number for allocation in taking.allocations.values() if allocation is not None
    )
    return known.allocation_of(key) is not None or key.allocation in made


def _claim_owner(known: Known, taking: Change, uid: ClaimUid, owner: ClaimOwner | None) -> bool:
    """It is not prepared any more, or kubelet's record shows it with devices that are adopted."""
    if owner is None or owner.boot or owner.ended:
        return False
    before = known.claim_owners.get(uid)
    if before is not None and not before.ended:
        return owner == replace(before, boot="")
    return all(device in taking.allocations for device in owner.devices)


def _flag(_known: Known, _taking: Change, _key: object, on: object) -> bool:
    return bool(on)


def _no(_known: Known, _taking: Change, _key: object, _value: object) -> bool:
    return False


_TAKES: Final[Mapping[str, Callable[[Known, Change, Any, Any], bool]]] = {
    "facts": _fact,
    "allocations": _allocation,
    "regions": _region,
    "memory_clear_pending": _flag,
    "drained": _flag,
    "rebinding": _no,  # the step is the rebind
    "tenancies": _tenancy,
    "resources": _flag,
    "pending_poststops": _no,
    "claim_owners": _claim_owner,
    "images": _flag,
    "debug_holds": _no,
    "alias_bindings": _no,
}
"""By the field of `Change`, in its order: an allocation's tenancies and owner come after it."""
