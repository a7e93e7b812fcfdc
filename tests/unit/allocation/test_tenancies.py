"""Who may be using a region, and whose hands a node is in: one fact after the other.

A tenancy is of a region, an allocation and a pod. Each of these says when it begins, what its pod's
containers may have done, and what ends it; in any order of steps: test_ledger_steps.py.
"""

from dataclasses import replace

import pytest
from doubles.cards import BLANK, REGIONS, WHOLE, device, make_card
from ledger_support import (
    MemoryJournal,
    former,
    found,
    gone,
    make_ledger,
    reopened,
    scrub,
    start,
    tenancy,
)
from test_dra_steps import LATER, POD, A, owner, prepare

from fpga_plugin.allocation.journal.doubt import doubted
from fpga_plugin.allocation.journal.records import Change, Condition, Tenancy, TenancyKey
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.kubernetes.cgroup import Cgroup
from fpga_plugin.kubernetes.names import PodUid

CARD, OTHER = make_card(1, nodes=(0, 1)), make_card(2, nodes=(2, 3))
P0, P1 = device(CARD, 0), device(CARD, 1)
R0, R1 = (region.id for region in CARD.regions)
R2 = OTHER.regions[0].id
CGROUP, NEXT = Cgroup("/t", "/t/pod", 1, 2), Cgroup("/t", "/t/pod", 1, 3)


@pytest.fixture
def ledger() -> Ledger:
    return make_ledger(CARD, OTHER)[0]


def only(ledger: Ledger) -> Tenancy:
    (one,) = ledger.tenancies.values()
    return one


def own(ledger: Ledger, device_id=P0, pod: PodUid = POD) -> None:
    """A pod runs with a region."""
    ledger.device_plugin.allocate(REGIONS, [device_id])
    ledger.device_plugin.bind_pod([device_id], pod)
    start(ledger, device_id)


# ------------------------------------------------------------------ begin and use


def test_a_tenancy_begins_nameless_gets_its_pod_and_is_used_from_its_start_on(
    ledger: Ledger,
) -> None:
    (allocation,) = ledger.device_plugin.allocate(REGIONS, [P0])
    key = TenancyKey(R0, allocation.number, None)
    assert only(ledger) == Tenancy(key, CARD.regions[0].grant.nodes)
    ledger.device_plugin.bind_pod([P0], POD)
    ledger.device_plugin.bind_pod([P0], POD, cgroups=[CGROUP])
    ledger.device_plugin.bind_pod([P0], POD, cgroups=[CGROUP, NEXT])
    named = replace(only(ledger), key=replace(key, pod=POD), cgroups=(CGROUP, NEXT))
    assert only(ledger) == named
    start(ledger, P0)
    assert only(ledger) == replace(named, used=True)
    ledger.device_plugin.release([P0])
    assert only(ledger) == replace(named, used=True, left=True)


def test_a_region_of_a_card_is_not_given_the_cgroups_of_another_one(ledger: Ledger) -> None:
    (allocation,) = ledger.device_plugin.allocate(WHOLE, [device(CARD)])
    first, _ = ledger.tenancies.users(allocation)
    ledger.commit(Change(tenancies={first.key: replace(first, cgroups=(CGROUP,))}))
    ledger.device_plugin.bind_pod([device(CARD)], POD, cgroups=[NEXT])
    users = ledger.tenancies.users(ledger.allocations[device(CARD)])
    assert {one.region: one.cgroups for one in users} == {R0: (CGROUP, NEXT), R1: (NEXT,)}


def test_a_container_that_kubelet_may_have_started_without_a_prestart_used_the_region(
    ledger: Ledger,
) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert not only(ledger).used
    ledger.device_plugin.kubelet_found("life 2")
    assert only(ledger).used


def test_an_instance_of_a_static_pod_that_started_unseen_is_not_taken_for_the_one_before(
    ledger: Ledger,
) -> None:
    """It has the same uid. What is known of the first one's cgroups says nothing of it."""
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD, cgroups=[CGROUP])
    start(ledger, P0)
    ledger.device_plugin.release([P0])
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    ledger.device_plugin.kubelet_found("life 2")  # which starts it without a PreStart
    ledger.device_plugin.release([P0])
    first, second = sorted(ledger.tenancies.left(R0), key=lambda one: one.key.allocation)
    assert (first.pod, first.cgroups, second.pod, second.cgroups) == (POD, (CGROUP,), POD, ())
    assert first.key.allocation != second.key.allocation
    ledger.work.end_tenancies([first])
    assert former(ledger, R0) == {POD}


def test_no_number_of_an_allocation_comes_again_while_a_tenancy_has_it() -> None:
    ledger, journal = make_ledger(CARD)
    own(ledger)
    ledger.device_plugin.release([P0])
    number = only(ledger).key.allocation
    (allocation,) = reopened(journal, CARD).device_plugin.allocate(REGIONS, [P1])
    assert allocation.number > number


# ------------------------------------------------------------------ the end of an allocation


@pytest.mark.parametrize("named", [True, False])
def test_what_was_never_started_leaves_nobody_and_a_clean_region(
    ledger: Ledger, *, named: bool
) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    if named:
        ledger.device_plugin.bind_pod([P0], POD)
    ledger.device_plugin.prestart_seen([P0])
    ledger.device_plugin.release([P0])
    assert not ledger.tenancies
    assert ledger.record(R0).condition is Condition.BLANK


def test_of_a_pod_that_was_never_known_kubelets_word_ends_what_it_used(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    ledger.device_plugin.release([P0])
    assert not ledger.tenancies
    assert ledger.record(R0).condition is Condition.DIRTY


def test_only_what_kubelet_is_done_with_ends_with_its_processes(ledger: Ledger) -> None:
    """Between two containers of a pod its cgroup may be empty."""
    own(ledger)
    gone(ledger, POD)
    assert only(ledger).used
    ledger.device_plugin.release([P0])
    gone(ledger, POD)
    assert not ledger.tenancies


# ------------------------------------------------------------------ scrubs


@pytest.mark.parametrize("by", ["clean", "programmed"])
def test_the_scrub_of_a_region_ends_no_tenancy_of_the_same_pod_on_another(
    ledger: Ledger, by: str
) -> None:
    """Invariant 10: a pod's other instance, or its other container, may run with that one."""
    own(ledger, P0)
    own(ledger, P1)
    ledger.device_plugin.release([P0, P1])
    ledger.device_plugin.allocate(REGIONS, [P0])
    if by == "clean":
        scrub(ledger, CARD, 0)
    else:
        start(ledger, P0)
    assert former(ledger, R0) == set()
    assert former(ledger, R1) == {POD}


@pytest.mark.parametrize("by", ["clean", "programmed"])
def test_an_owners_pod_keeps_what_it_had_of_the_region_by_other_nodes(
    ledger: Ledger, by: str
) -> None:
    """Invariant 10: another region may have them by now, and the pod was not waited for."""
    own(ledger)
    ledger.device_plugin.release([P0])
    (node,) = CARD.regions[0].grant.nodes
    moved = make_card(1, nodes=(8, 9))
    found(ledger, moved)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    if by == "clean":
        scrub(ledger, moved, 0)
    else:
        start(ledger, P0)
    assert [one.nodes for one in ledger.tenancies.left(R0)] == [(node,)]


def test_a_scrub_under_a_living_owner_makes_its_tenancy_unused(ledger: Ledger) -> None:
    """Balanced PostStops allowed it: none of its containers runs, and the next needs a PreStart."""
    own(ledger)
    ledger.device_plugin.poststop_seen([P0])
    scrub(ledger, CARD, 0)
    assert not only(ledger).used


def test_a_container_that_began_without_a_prestart_during_a_scrub_is_waited_for(
    ledger: Ledger,
) -> None:
    """Invariant 7. Kubelet restarted when the scrub had begun: it did not see the container."""
    ledger.work.dirty([R0], "so")
    ledger.work.working([R0])
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    ledger.device_plugin.kubelet_found("life 2")
    ledger.work.clean(R0, BLANK, blank=True)
    ledger.device_plugin.release([P0])
    assert former(ledger, R0) == {POD}
    assert ledger.record(R0).condition is Condition.DIRTY


# ------------------------------------------------------------------ whose regions, whose nodes


def test_who_has_a_node_of_a_card_for_another_region_may_write_its_memory(ledger: Ledger) -> None:
    ledger.commit(tenancy(R0, "by-region"))
    ledger.commit(tenancy(R2, "by-node", *CARD.regions[1].grant.nodes))
    assert {one.pod for one in ledger.left_on(CARD.id)} == {"by-region", "by-node"}
    assert {one.pod for one in ledger.left_on(CARD.id, but=[R0])} == {"by-node"}
    assert {one.pod for one in ledger.left_on(CARD.id, but=[R1])} == {"by-region"}


# ------------------------------------------------------------------ ResourceClaims


def test_pods_of_a_shared_allocation_that_are_gone_leave_no_row() -> None:
    """Thousands use one allocation, one after the other."""
    ledger, journal = make_ledger(CARD)
    prepare(ledger, CARD, 0)
    rows = []
    for number in range(50):
        pod = PodUid(f"pod-{number + 10}")
        ledger.dra.join({A: [pod]})
        ledger.dra.part(A, [POD, pod])
        left = [one for one in ledger.dra.tenancies_of_claim(A) if one.left]
        assert all(one.used for one in left)
        ledger.work.end_tenancies(left)
        rows.append(len(journal.snapshot.tenancies))
        assert ledger.pods_of([P0]) == {POD, pod}
    assert set(rows) == {2}
    assert ledger.record(R0).condition is Condition.PROGRAMMED


def test_a_pod_that_parted_from_an_allocation_and_runs_on_is_waited_for_at_its_end() -> None:
    ledger, _ = make_ledger(CARD)
    prepare(ledger, CARD, 0)
    ledger.dra.join({A: [LATER]})
    ledger.dra.part(A, [POD])
    assert ledger.pods_of([P0]) == {POD}
    ledger.dra.end_claim(A)
    assert former(ledger, R0) == {POD, LATER}


def test_what_was_handed_over_blank_is_dirty_though_all_who_used_it_are_forgotten() -> None:
    """Invariant 4. They wrote there, whatever the region reads as."""
    ledger, _ = make_ledger(CARD)
    ledger.dra.take(owner(A, P0), [POD])
    ledger.dra.prepared(A, {})
    assert ledger.record(R0).condition is Condition.BLANK
    ledger.dra.join({A: [LATER]})
    ledger.dra.part(A, ())
    ledger.work.end_tenancies(ledger.dra.tenancies_of_claim(A))
    assert not ledger.tenancies
    ledger.dra.end_claim(A)
    assert ledger.record(R0).condition is Condition.DIRTY


def test_a_pod_that_comes_to_an_allocation_again_used_what_it_used() -> None:
    """Invariant 7. What was prepared is not there any more; its first containers may run on."""
    ledger, _ = make_ledger(CARD)
    prepare(ledger, CARD, 0)
    ledger.dra.part(A, ())
    ledger.dra.unprepared(A)
    ledger.dra.join({A: [POD]})
    assert (only(ledger).used, only(ledger).left) == (True, False)
    ledger.dra.join({A: [LATER]})
    assert {one.pod: one.used for one in ledger.tenancies.values()} == {POD: True, LATER: False}


# ------------------------------------------------------------------ starts of the plugin


def test_in_another_boot_who_left_is_gone_and_who_has_a_device_may_have_started() -> None:
    ledger, journal = make_ledger(CARD, OTHER)
    ledger.commit(tenancy(R1, "left"))
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD, cgroups=[CGROUP])
    ledger.dra.take(owner(A, device(OTHER, 0)), [LATER])
    ledger.dra.prepared(A, {})
    again = reopened(journal, CARD, OTHER, boot_id="another")
    assert {(one.region, one.pod, one.used, one.left) for one in again.tenancies.values()} == {
        (R0, POD, True, False),
        (R2, LATER, False, False),  # nothing starts with an allocation before it is prepared again
    }
    assert all(one.cgroups == () for one in again.tenancies.values())
    assert again.allocations[P0].missed_prestart
    assert not again.allocations[device(OTHER, 0)].missed_prestart


@pytest.mark.parametrize("boot_id", ["boot", "another"])
def test_a_tenancy_whose_allocation_a_damaged_journal_lost_is_left(boot_id: str) -> None:
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    del journal.snapshot.allocations[P0]
    journal.snapshot = doubted(journal.snapshot, "rows of it are lost")
    again = reopened(journal, CARD, boot_id=boot_id)
    left = [(one.pod, one.used, one.left) for one in again.tenancies.values()]
    assert left == ([(POD, True, True)] if boot_id == "boot" else [])


def test_a_tenancy_that_a_damaged_journal_lost_is_made_again_as_used() -> None:
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    before = only(ledger)
    assert isinstance(journal, MemoryJournal)
    journal.snapshot.tenancies.clear()
    journal.snapshot = doubted(journal.snapshot, "rows of it are lost")
    assert only(reopened(journal, CARD)) == replace(before, used=True)


def test_of_an_allocation_with_which_somebody_may_have_started_unseen_each_tenancy_is_used() -> (
    None
):
    """As a damaged journal says of all of them."""
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    journal.snapshot = doubted(journal.snapshot, "rows of it are lost")
    assert only(reopened(journal, CARD)).used


# ------------------------------------------------------------------ a scrub under an owner


def test_the_scrub_of_one_region_of_a_card_says_nothing_of_the_others(ledger: Ledger) -> None:
    """The owner of the card still used the other region: it is scrubbed at its end."""
    ledger.device_plugin.allocate(WHOLE, [device(CARD)])
    ledger.device_plugin.bind_pod([device(CARD)], POD)
    start(ledger, device(CARD))
    scrub(ledger, CARD, 0)
    assert {one.region: one.used for one in ledger.tenancies.values()} == {R0: False, R1: True}


def test_the_scrub_of_a_claims_region_ends_the_tenancy_of_a_pod_that_left_it(
    ledger: Ledger,
) -> None:
    prepare(ledger, CARD, 0)
    ledger.dra.join({A: [LATER]})
    assert all(one.used for one in ledger.tenancies.values())
    ledger.dra.part(A, [LATER])
    scrub(ledger, CARD, 0)
    assert {one.pod: (one.used, one.left) for one in ledger.tenancies.values()} == {
        LATER: (False, False)
    }


@pytest.mark.parametrize(
    ("pod", "node", "stays"),
    [
        (LATER, "/dev/dfl-port.0", False),
        (LATER, "/dev/elsewhere", False),
        (POD, "/dev/dfl-port.0", False),  # the present tenancy has it, too
        (POD, "/dev/elsewhere", True),
        (POD, "/dev/dfl-port.1", True),  # the present tenancy of the other region has it
    ],
)
def test_a_scrub_for_an_owner_ends_earlier_tenancies_but_of_the_owner_by_other_nodes(
    ledger: Ledger, pod: PodUid, node: str, *, stays: bool
) -> None:
    """The owner's pod runs: it may still open what these lead to."""
    ledger.device_plugin.allocate(WHOLE, [device(CARD)])
    ledger.device_plugin.bind_pod([device(CARD)], POD)
    ledger.commit(tenancy(R0, pod, node))
    assert former(ledger, R0) == {pod}
    scrub(ledger, CARD, 0)
    assert former(ledger, R0) == ({pod} if stays else set())


@pytest.mark.parametrize("ended", [True, False])
def test_an_owner_whose_regions_scrub_is_not_all_that_is_due_counts_as_its_user(
    ledger: Ledger, *, ended: bool
) -> None:
    """So the region is scrubbed again when the allocation ends."""
    own(ledger)
    ledger.work.working([R0])
    ledger.work.clean(R0, BLANK, blank=True, ended=ended)
    assert only(ledger).used is not ended
    ledger.device_plugin.release([P0])
    expected = Condition.BLANK if ended else Condition.DIRTY
    assert ledger.record(R0).condition is expected


def test_a_look_at_a_region_that_is_clean_already_ends_nobodys_tenancy(ledger: Ledger) -> None:
    """No scrub came between: whoever has its node may still write to it."""
    ledger.commit(tenancy(R0, POD, "/dev/dfl-port.0"))
    assert ledger.record(R0).condition is Condition.BLANK
    ledger.work.clean(R0, BLANK, blank=True)
    assert former(ledger, R0) == {POD}


def test_a_tenancy_that_ended_meanwhile_is_not_ended_again(ledger: Ledger) -> None:
    own(ledger)
    ledger.device_plugin.release([P0])
    left = ledger.tenancies.left(R0)
    for _ in range(2):
        ledger.work.end_tenancies(left)
        assert not ledger.tenancies
