"""Which part of a change takes trust away, and which gives it: chosen here, and nowhere else.

What takes trust away only ever makes the ledger refuse more: a region is DIRTY or FAULTED, an
allocation may have been used, a pod uses a region, an image is on it, memory is to be cleared, a
card is out of service. It holds in memory at once, written or not. All else gives some: a region is
clean or programmed, a device has an owner or none, a pod is gone. So do the first step of work on
hardware and a hand-over: they hold, and go on, only once they are written (`State.commit`).
"""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from fpga_plugin.allocation.journal.records import (
    Allocation,
    Change,
    ClaimOwner,
    Condition,
    Fact,
    Tenancy,
)

if TYPE_CHECKING:
    from fpga_plugin.allocation.state import State  # parts a change as it commits it


def parted(change: Change, known: "State") -> tuple[Change, Change]:
    """What of a change takes trust away, and the rest, which gives some."""
    taking, giving = Change(), Change()
    for kind in fields(Change):  # in their order: tenancies and owners come after allocations
        for key, value in getattr(change, kind.name).items():
            part = taking if _takes(kind.name, key, value, known, taking) else giving
            getattr(part, kind.name)[key] = value
    return taking, giving


def _takes(kind: str, key: Any, value: Any, known: "State", taking: Change) -> bool:
    """Whether a row takes trust away; `taking` has the rows before it that do."""
    takes = False  # so a kind that is not named here waits until it is written
    match kind:
        # Not rebinding, which is a step.
        case "memory_clear_pending" | "drained" | "unreconciled" | "resources" | "images":
            takes = bool(value)
        case "facts":
            takes = key in {Fact.KUBELET, Fact.LOST} or (
                key is Fact.RESOURCE_CLAIMS and bool(value)
            )
        case "regions":
            # A DIRTY region is not given out before work on it, whose begin is written. So FAULTED
            # that becomes DIRTY gives nothing either.
            takes = value.condition in {Condition.DIRTY, Condition.FAULTED}
        case "allocations" if value is not None:
            takes = _allocation(known.allocations.get(key), value)
        case "tenancies" if value is not None:
            takes = _tenancy(known, taking, value)
        case "claim_owners" if value is not None:
            takes = _claim_owner(known, taking, value)
    return takes


def _allocation(before: Allocation | None, allocation: Allocation) -> bool:
    """One that kubelet's records show takes its device from others; one in force is used more."""
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


def _tenancy(known: "State", taking: Change, tenancy: Tenancy) -> bool:
    """It begins, or its pod may have used the region; that of an allocation belongs to it."""
    key = tenancy.key
    before = known.tenancies.get(key)
    if before is not None:
        return tenancy.used >= before.used and tenancy.left <= before.left
    made = {one.number for one in taking.allocations.values() if one is not None}
    return known.allocation_of(key) is not None or key.allocation in made


def _claim_owner(known: "State", taking: Change, owner: ClaimOwner) -> bool:
    """It is not prepared any more, or kubelet's record shows it with devices that are adopted."""
    if owner.boot or owner.ended:
        return False
    before = known.claim_owners.get(owner.uid)
    if before is not None and not before.ended and owner == replace(before, boot=""):
        return True
    return all(device in taking.allocations for device in owner.devices)
