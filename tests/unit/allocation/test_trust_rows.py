"""Which rows of a change take trust away, so that they hold before they are written.

What a journal that cannot be written then leaves in memory is in test_state_unwritten.py.
"""

from dataclasses import replace

import pytest
from doubles.cards import AFU, REGIONS, device, make_card
from ledger_support import make_ledger
from test_dra_steps import LATER, POD, A, owner

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
from fpga_plugin.allocation.journal.trust import parted
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.hardware.grant import Grant

CARD = make_card(1, nodes=(0, 1))
P0, P1 = device(CARD, 0), device(CARD, 1)
R0, R1 = (region.id for region in CARD.regions)
HAD = Allocation(
    P0,
    REGIONS,
    {R0: Grant(("/dev/dfl-port.0",))},
    started=True,
    prestart_seen=True,
    missed_prestart=False,
    pod=POD,
    prestarts=3,
    poststops=1,
    number=7,
)
MINE = Tenancy(TenancyKey(R0, 7, POD), ("/dev/dfl-port.0",))


def takes(change: Change, ledger: Ledger | None = None) -> bool:
    """Whether all of a change takes trust away; else all of it gives some."""
    taking, giving = parted(change, ledger or make_ledger(CARD)[0])
    assert (taking == change) is not (giving == change), "one row of a change goes with the other"
    return taking == change


def having(**rows: object) -> Ledger:
    """A ledger in which these rows are in force."""
    ledger, _ = make_ledger(CARD)
    ledger.apply(Change(**rows))  # type: ignore[arg-type]
    return ledger


@pytest.mark.parametrize(
    ("fact", "value", "taken"),
    [
        (Fact.KUBELET, "another", True),
        (Fact.LOST, "all of it", True),
        (Fact.RESOURCE_CLAIMS, "the journal was lost", True),
        (Fact.RESOURCE_CLAIMS, "", False),
        (Fact.ENVIRONMENT, "this", False),
        (Fact.BOOT, "another", False),
    ],
)
def test_a_kubelet_that_is_new_and_what_is_lost_take_trust(
    fact: Fact, value: str, *, taken: bool
) -> None:
    """That kubelet's record of claims was read, gives some: nothing is expected any more."""
    assert takes(Change(facts={fact: value})) is taken


@pytest.mark.parametrize("condition", Condition)
def test_a_dirty_or_faulted_region_takes_trust(condition: Condition) -> None:
    taken = condition in {Condition.DIRTY, Condition.FAULTED}
    record = RegionRecord(R0, condition, "", AFU)
    assert takes(Change(regions={R0: record})) is taken


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("kind", ["memory_clear_pending", "drained"])
def test_a_card_that_is_out_of_service_takes_trust_and_one_that_is_back_gives_it(
    kind: str, *, on: bool
) -> None:
    assert takes(Change(**{kind: {CARD.id: on}})) is on


def test_a_rebind_is_work_that_begins_once_it_is_written() -> None:
    assert not takes(Change(rebinding={CARD.id: True}))


# ------------------------------------------------------------------ allocations


@pytest.mark.parametrize("missed", [False, True])
def test_an_allocation_that_kubelets_records_show_takes_its_device_from_others(
    *, missed: bool
) -> None:
    """A granted one gives the device, and its answer waits."""
    assert takes(Change(allocations={P0: replace(HAD, missed_prestart=missed)})) is missed


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"prestarts": 4}, True),
        ({"missed_prestart": True}, True),
        ({"missed_prestart": True, "prestart_seen": False}, True),
        ({"started": False}, True),
        ({"number": 8}, False),
        ({"poststops": 2}, False),
        ({"prestarts": 2}, False),
        ({"prestart_seen": False}, False),
        ({"pod": LATER}, False),
        ({"pod": None}, False),
    ],
)
def test_an_allocation_in_force_is_only_ever_used_more(
    changed: dict[str, object], *, taken: bool
) -> None:
    ledger = having(allocations={P0: HAD})
    assert takes(Change(allocations={P0: replace(HAD, **changed)}), ledger) is taken


@pytest.mark.parametrize(
    ("before", "changed", "taken"),
    [
        ({"started": False}, {"started": True}, False),
        ({"pod": None}, {"pod": POD}, True),
        ({"missed_prestart": True}, {"missed_prestart": False}, False),
    ],
)
def test_a_start_gives_and_a_pod_that_becomes_known_takes(
    before: dict[str, object], changed: dict[str, object], *, taken: bool
) -> None:
    was = replace(HAD, **before)
    ledger = having(allocations={P0: was})
    assert takes(Change(allocations={P0: replace(was, **changed)}), ledger) is taken


def test_the_end_of_an_allocation_gives_its_device() -> None:
    assert not takes(Change(allocations={P0: None}), having(allocations={P0: HAD}))


# ------------------------------------------------------------------ tenancies


@pytest.mark.parametrize(
    ("before", "now", "taken"),
    [
        ((False, False), (True, False), True),
        ((True, False), (False, False), False),
        ((True, False), (True, True), False),
        ((True, True), (True, False), True),
        ((False, True), (True, True), True),
    ],
)
@pytest.mark.parametrize("in_force", [False, True])
def test_a_tenancy_that_may_have_used_the_region_takes_and_one_that_left_gives(
    before: tuple[bool, bool], now: tuple[bool, bool], *, taken: bool, in_force: bool
) -> None:
    """Whether its allocation is still in force or not."""
    used, left = before
    ledger = having(
        tenancies={MINE.key: replace(MINE, used=used, left=left)},
        **({"allocations": {P0: HAD}} if in_force else {}),
    )
    used, left = now
    change = Change(tenancies={MINE.key: replace(MINE, used=used, left=left)})
    assert takes(change, ledger) is taken


def test_a_tenancy_begins_with_its_allocation() -> None:
    """With one in force, or with one that takes its device; with a granted one it waits for it."""
    begins = Change(tenancies={MINE.key: MINE})
    assert takes(begins, having(allocations={P0: HAD}))
    assert not takes(begins)
    shown = Change(allocations={P0: replace(HAD, missed_prestart=True)}) | begins
    assert takes(shown)
    assert not takes(Change(allocations={P0: HAD}) | begins)


def test_a_pod_that_is_gone_gives_its_region() -> None:
    assert not takes(Change(tenancies={MINE.key: None}), having(tenancies={MINE.key: MINE}))


# ------------------------------------------------------------------ owners by DRA

SHOWN = {d: replace(HAD, device=d, missed_prestart=True) for d in (P0, P1)}
CLAIM = owner(A, P0, P1)


@pytest.mark.parametrize(
    ("before", "now", "taken"),
    [
        ({"boot": "boot"}, {}, True),
        ({"boot": "boot"}, {"boot": "boot"}, False),
        ({"boot": "boot"}, {"ended": True}, False),
        ({"boot": "boot"}, {"file": "/another"}, False),
        ({}, {"boot": "boot"}, False),
    ],
)
def test_a_claim_that_is_prepared_no_more_takes_trust(
    before: dict[str, str], now: dict[str, str], *, taken: bool
) -> None:
    ledger = having(claim_owners={A: replace(CLAIM, **before)})
    assert takes(Change(claim_owners={A: replace(CLAIM, **now)}), ledger) is taken


@pytest.mark.parametrize("before", [None, replace(CLAIM, ended=True)])
@pytest.mark.parametrize(
    ("shown", "now", "taken"),
    [
        ([P0, P1], {}, True),
        ([P0], {}, False),
        ([], {}, False),
        ([P0, P1], {"boot": "boot"}, False),
        ([P0, P1], {"ended": True}, False),
    ],
)
def test_a_claim_that_kubelets_record_shows_takes_its_devices_all_of_them(
    before: ClaimOwner | None, shown: list, now: dict[str, str], *, taken: bool
) -> None:
    ledger = having() if before is None else having(claim_owners={A: before})
    claim = replace(CLAIM, **now)
    change = Change(allocations={d: SHOWN[d] for d in shown}, claim_owners={A: claim})
    taking, giving = parted(change, ledger)
    assert (claim in taking.claim_owners.values()) is taken
    assert (claim in giving.claim_owners.values()) is not taken
