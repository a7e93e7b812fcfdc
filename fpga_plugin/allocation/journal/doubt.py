"""What the plugin believes of a journal in doubt: less than it says, but every owner stays.

In doubt is one that is damaged (SQLite has no checksums, so a damaged disk may turn one row into
another), that lacks transactions, or that another run of the plugin wrote than the last one, or
another schema's: `journal` finds that out. The rule is one for all of them. What gives trust is
dropped: no region is clean or programmed, nothing is prepared, no allocation counts as unused nor
as one whose containers have all stopped, and any region may hold an owner's image. So is what is
only true of the run that wrote it: the boot, and which of a pod's cgroups is meant. What takes
trust away or something from others stays as far as it can be read: allocations and ResourceClaims,
tenancies, faults, drained cards, pending memory clears, names. Kubelet's records may name owners
that it lacks.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from msgspec import UNSET

from fpga_plugin.allocation.journal.records import (
    CLEAN,
    Allocation,
    Change,
    Condition,
    Fact,
    RegionRecord,
    Tenancy,
    TenancyKey,
    TenantImage,
    Uid,
)
from fpga_plugin.allocation.names import card_of, is_card, parse_region_id
from fpga_plugin.hardware.grant import Path
from fpga_plugin.ids import CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import PodUid


def doubted(told: Change, why: str, *, boot: str = "", claims: bool = False) -> Change:
    """What is left of a journal's content.

    Args:
        told: what it says.
        why: it is in doubt.
        boot: of the node, in which the plugin served last; empty: not known, and it may say so.
        claims: ResourceClaims may have devices that it lacks.
    """
    facts = told.facts | {Fact.LOST: why}
    holds = told.debug_holds
    if not (same_boot := boot in {"", facts.get(Fact.BOOT)}):
        # In that boot another journal was written: pods may use what this one has as unused.
        facts[Fact.BOOT], holds = boot, {}
    if claims:
        facts.setdefault(
            Fact.RESOURCE_CLAIMS, f"DRA served this node, and the journal is in doubt ({why})"
        )
    both = allocated_twice(told.allocations)
    allocations = [
        replace(allocation, missed_prestart=True)
        for device, allocation in told.allocations.items()
        if allocation is not None and card_of(device) not in both
    ]
    owners = [owner for owner in told.claim_owners.values() if owner is not None]
    return replace(
        unasked(told),
        facts=facts,
        allocations={allocation.device: allocation for allocation in allocations},
        regions={region: _doubted(record, why) for region, record in told.regions.items()},
        tenancies={
            one.key: one if same_boot else replace(one, numbers=UNSET)
            for one in _tenancies(told, allocations)
        },
        claim_owners={owner.uid: replace(owner, boot="") for owner in owners},
        images=told.images | {TenantImage(region, None): True for region in told.regions},
        debug_holds=holds,
    )


def unasked(told: Change, *, claims: bool = False) -> Change:
    """The same, where another run of the plugin, or another API, may have served since.

    No card is given out before it was compared with kubelet's records, however often the plugin
    starts until then. `claims`: it was DRA, which may have ended before it had compared a card with
    kubelet's record of claims.
    """
    cards = map(card_of, (*told.regions, *told.allocations))
    facts = told.facts
    if claims and told.unreconciled:
        why = "DRA served this node, and had not compared each card with kubelet's record of claims"
        facts = {Fact.RESOURCE_CLAIMS: why} | facts
    return replace(told, facts=facts, unreconciled=told.unreconciled | dict.fromkeys(cards, True))


def allocated_twice(devices: Collection[DeviceId]) -> set[CardId]:
    """Cards that are allocated as a whole and by region (invariant 1)."""
    whole = {card_of(device) for device in devices if is_card(device)}
    return whole & {card_of(device) for device in devices if not is_card(device)}


def _doubted(record: RegionRecord, why: str) -> RegionRecord:
    if record.condition not in CLEAN | {Condition.PROGRAMMED}:
        return record
    reason = f"the journal is in doubt: {why}"
    return replace(record, condition=Condition.DIRTY, reason=reason, afu_id=None)


def _tenancies(told: Change, allocations: Sequence[Allocation]) -> Iterator[Tenancy]:
    """Those that there are, used and where their allocation is gone left; and those that lack."""
    granted = {
        (region, allocation.number): allocation
        for allocation in allocations
        for region in allocation.grants
    }
    for key, one in told.tenancies.items():
        if one is not None:
            there = (key.region, key.allocation) in granted
            # The pod may run in other cgroups since: its uid tells.
            yield replace(one, used=True, left=one.left or not there, cgroups=())
    known = {(key.region, key.allocation) for key in told.tenancies}
    for (region, number), allocation in granted.items():
        if (region, number) not in known:
            key = TenancyKey(region, number, allocation.pod)
            yield Tenancy(key, allocation.grants[region].nodes, used=True)


# ------------------------------------------------------------------ schema 3

PRESENT_KINDS: Final = {
    "epochs": "facts",
    "claims": "allocations",
    "debts": "memory_clear_pending",
    "strays": "pending_poststops",
    "holders": "claim_owners",
    "debugs": "debug_holds",
    "meanings": "alias_bindings",
}
"""What its kinds of rows are called now. Of an allocation it called three fields otherwise, whose
defaults fit one in doubt: it counts as used, and its PreStarts and PostStops cannot be compared."""

GONE: Final = frozenset({"loans", "unreconciled"})
"""Kinds that it had besides: `of_schema_3` reads the one, and the other is asked of every card."""


class _Users(msgspec.Struct):
    """Of a row of `regions` the former pods, of one of `holders` the pods."""

    former: frozenset[Uid] = frozenset()
    pods: frozenset[Uid] = frozenset()


class _Loan(msgspec.Struct, frozen=True):
    pod: Uid
    region: str
    node: Path


def of_schema_3(told: Change, rows: Iterable[tuple[Any, Any, Any]]) -> Change:
    """The same with the tenancies that schema 3 had in other forms, and numbers of its own.

    There an allocation's number meant something in one run of the plugin only. Pods that had a
    region before were noted with its record, the nodes that they may have open as loans, and the
    pods of a ResourceClaim with the claim.

    Args:
        told: what of the rows is as it is now.
        rows: all of them.
    """
    numbers = itertools.count(1)
    allocations: dict[DeviceId, Allocation | None] = {
        device: allocation and replace(allocation, number=next(numbers))
        for device, allocation in told.allocations.items()
    }
    tenancies: dict[TenancyKey, Tenancy | None] = {}
    former: dict[tuple[RegionId, PodUid], list[Path]] = {}
    for kind, key, value in rows:
        try:
            match kind:
                case "regions" if key in told.regions:
                    for pod in _USERS.decode(value).former:
                        former.setdefault((RegionId(key), pod), [])
                case "loans":
                    loan = _LOAN.decode(key)
                    region = parse_region_id(loan.region)
                    former.setdefault((region, loan.pod), []).append(loan.node)
                case "holders" if owner := told.claim_owners.get(key):
                    of = [allocation for d in owner.devices if (allocation := allocations.get(d))]
                    for pod, allocation in itertools.product(_USERS.decode(value).pods, of):
                        for region, grant in allocation.grants.items():
                            now = TenancyKey(region, allocation.number, pod)
                            tenancies[now] = Tenancy(now, grant.nodes, used=True)
        except (ValueError, TypeError):
            continue
    for (region, pod), nodes in former.items():
        left = TenancyKey(region, next(numbers), pod)
        tenancies[left] = Tenancy(left, tuple(nodes), used=True, left=True)
    return replace(told, allocations=allocations, tenancies=tenancies)


# Made at import: see kubernetes/kubelet/checkpoint.py.
_USERS = msgspec.json.Decoder(_Users)
_LOAN = msgspec.json.Decoder(_Loan)
