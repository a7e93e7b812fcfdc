"""What is believed of a journal in doubt, row by row. The same with files, in test_journal.py."""

from dataclasses import replace
from typing import Any

import msgspec
from doubles.cards import AFU, BLANK, REGIONS, WHOLE, device, make_card
from test_state_unwritten import owner

from fpga_plugin.allocation.journal.doubt import doubted, of_schema_3
from fpga_plugin.allocation.journal.records import (
    Allocation,
    Change,
    Condition,
    DebugHold,
    Fact,
    RegionRecord,
    Tenancy,
    TenancyKey,
    TenantImage,
)
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.ids import DeviceId, RegionId
from fpga_plugin.kubernetes.cgroup import Cgroup
from fpga_plugin.kubernetes.names import ClaimUid, PodUid, ResourceName

CARD = make_card(1)
OTHER = make_card(2, nodes=(2, 3))
R0, R1, R2, R3 = (region.id for card in (CARD, OTHER) for region in card.regions)
FORMER, OWNER = PodUid("pod-0"), PodUid("pod-2")
UID = ClaimUid("allocation-a")


def allocation(of: DeviceId, resource: ResourceName = REGIONS, *, number: int = 1) -> Allocation:
    grants = {RegionId(of): Grant((f"/dev/{of}",))} if resource == REGIONS else {}
    return Allocation(of, resource, grants, pod=OWNER, number=number)


def tenancy(region: RegionId, number: int, pod: PodUid | None = OWNER, **how: Any) -> Tenancy:
    return Tenancy(TenancyKey(region, number, pod), (f"/dev/{region}",), **how)


def by_key(*tenancies: Tenancy) -> dict[TenancyKey, Tenancy | None]:
    return {one.key: one for one in tenancies}


def test_nothing_that_gives_trust_is_believed_and_nothing_else_is_lost() -> None:
    """Invariant 4."""
    told = Change(
        facts={Fact.BOOT: "boot"},
        regions={
            R0: RegionRecord(R0, Condition.BLANK, "", BLANK),
            R1: RegionRecord(R1, Condition.FAULTED, "so"),
            R2: RegionRecord(R2, Condition.PROGRAMMED, "", AFU),
            R3: RegionRecord(R3, Condition.DIRTY, "so"),
        },
        claim_owners={UID: replace(owner(UID, device(OTHER)), boot="boot")},
        images={TenantImage(R0, AFU): True},
        drained={CARD.id: True},
        memory_clear_pending={CARD.id: True},
        rebinding={OTHER.id: True},
        resources={REGIONS: True},
        pending_poststops={device(CARD, 0): 2},
    )
    found = doubted(told, "so")
    assert found.facts == {Fact.BOOT: "boot", Fact.LOST: "so"}
    reason = "the journal is in doubt: so"
    assert found.regions == {
        R0: RegionRecord(R0, Condition.DIRTY, reason),
        R1: told.regions[R1],
        R2: RegionRecord(R2, Condition.DIRTY, reason),
        R3: told.regions[R3],
    }
    assert found.claim_owners == {UID: owner(UID, device(OTHER))}
    unknown = {TenantImage(region, None) for region in (R0, R1, R2, R3)}
    assert found.images.keys() == {TenantImage(R0, AFU)} | unknown
    for kind in ("drained", "memory_clear_pending", "rebinding", "resources", "pending_poststops"):
        assert getattr(found, kind) == getattr(told, kind), kind


def test_a_container_of_any_allocation_may_have_started_and_every_tenancy_be_used() -> None:
    """Also one whose row was lost; what has no allocation is over, and its pod may run on."""
    told = Change(
        allocations={d: allocation(d, number=n) for n, d in enumerate(map(DeviceId, (R0, R1)), 1)},
        tenancies=by_key(tenancy(R0, 1), tenancy(R0, 9, FORMER), tenancy(R2, 1, None)),
    )
    found = doubted(told, "so")
    assert all(one is not None and one.missed_prestart for one in found.allocations.values())
    assert found.tenancies == by_key(
        tenancy(R0, 1, used=True),
        tenancy(R0, 9, FORMER, used=True, left=True),
        tenancy(R2, 1, None, used=True, left=True),
        tenancy(R1, 2, used=True),
    )


def test_what_is_true_of_the_run_that_wrote_it_alone_is_not_believed() -> None:
    """A static pod may have come again in another cgroup; device numbers are those of a boot."""
    here = Cgroup("/kubepods", "/kubepods/pod-1", 30, 7)
    hold = DebugHold(R0, FORMER, "space", "name", (), 60.0)
    told = Change(
        facts={Fact.BOOT: "boot 1"},
        tenancies=by_key(tenancy(R0, 1, FORMER, left=True, cgroups=(here,), numbers=("239:0",))),
        debug_holds={R0: hold},
    )
    found = doubted(told, "so")
    left = tenancy(R0, 1, FORMER, used=True, left=True, numbers=("239:0",))
    assert found.tenancies == by_key(left)
    assert (found.facts[Fact.BOOT], found.debug_holds) == ("boot 1", {R0: hold})
    found = doubted(told, "so", boot="boot 1")
    assert (found.facts[Fact.BOOT], found.debug_holds) == ("boot 1", {R0: hold})
    found = doubted(told, "so", boot="boot 2")
    assert (found.facts[Fact.BOOT], found.debug_holds) == ("boot 2", {})
    assert found.tenancies == by_key(tenancy(R0, 1, FORMER, used=True, left=True))
    assert doubted(Change(), "so", boot="boot 2").facts[Fact.BOOT] == "boot 2"


def test_a_pod_that_left_an_allocation_in_force_has_left_it_in_doubt_too() -> None:
    """Kubelet's word was written: only the pod's processes count."""
    told = Change(
        allocations={device(CARD, 0): allocation(device(CARD, 0))},
        tenancies=by_key(tenancy(R0, 1, FORMER, left=True)),
    )
    found = doubted(told, "so")
    assert found.tenancies == by_key(tenancy(R0, 1, FORMER, used=True, left=True))


def test_a_card_that_is_claimed_in_both_ways_loses_these_allocations_and_no_tenancy() -> None:
    """Invariant 1. Allocations of other cards take nothing from anybody: they stay."""
    both = {
        device(CARD): allocation(device(CARD), WHOLE),
        device(CARD, 0): allocation(device(CARD, 0)),
    }
    good = {device(OTHER, 0): allocation(device(OTHER, 0))}
    found = doubted(Change(allocations={**both, **good}, tenancies=by_key(tenancy(R0, 1))), "so")
    assert found.allocations.keys() == good.keys()
    assert found.tenancies[tenancy(R0, 1).key] == tenancy(R0, 1, used=True, left=True)


# ------------------------------------------------------------------ schema 3


def rows(kind: str, **of: object) -> tuple[str, str, str]:
    key = of.pop("key")
    return kind, str(key), msgspec.json.encode(of).decode()


def test_who_may_be_using_a_region_is_found_in_every_form_that_schema_3_had() -> None:
    """Its allocations' numbers began again with each life: two may have the same."""
    mine, shared = device(CARD, 1), device(OTHER, 0)
    told = Change(
        allocations={
            mine: allocation(mine, number=5),
            shared: replace(allocation(shared, number=5), pod=None),
        },
        regions={R0: RegionRecord(R0, Condition.DIRTY)},
        claim_owners={UID: owner(UID, shared)},
    )
    loan = f'{{"pod":"{FORMER}","region":"{R0}","node":"/dev/old"}}'
    damage = f'{{"pod":"{FORMER}","region":"{CARD.id}","node":"/dev/old"}}'
    found = of_schema_3(
        told,
        [
            rows("regions", key=R0, former=[FORMER, "pod-x"]),
            ("loans", loan, "true"),
            ("loans", damage, "true"),
            ("loans", "nonsense", "true"),
            (b"\0", b"\0", 7),  # type: ignore[list-item]
            rows("holders", key=UID, pods=["pod-y", "pod-z"]),
            rows("holders", key="unknown", pods=["pod-y"]),
        ],
    )
    numbers = {d: one.number for d, one in found.allocations.items() if one is not None}
    assert len(set(numbers.values())) == 2
    users = {
        (one.region, one.pod, one.nodes, one.left, key.allocation in numbers.values())
        for key, one in found.tenancies.items()
        if one is not None and one.used
    }
    assert users == {
        (R0, FORMER, ("/dev/old",), True, False),
        (R0, "pod-x", (), True, False),
        (R2, "pod-y", (f"/dev/{R2}",), False, True),
        (R2, "pod-z", (f"/dev/{R2}",), False, True),
    }
    # The owner's own is added where all are that lack.
    after = doubted(found, "so").tenancies
    assert TenancyKey(R1, numbers[mine], OWNER) in after
    assert len(after) == 5
