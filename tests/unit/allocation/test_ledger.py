"""Allocations and conditions, step by step."""

from dataclasses import replace

import pytest
from doubles.cards import (
    AFU,
    BLANK,
    INTERFACE,
    OTHER_INTERFACE,
    POISONED,
    PREFIX,
    REGIONS,
    TOO_HOT,
    WHOLE,
    device,
    make_card,
)
from ledger_support import (
    MemoryJournal,
    former,
    found,
    gone,
    make_ledger,
    make_lists,
    remembered,
    reopened,
    scrub,
    shown,
    start,
    trouble,
)

from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import CardMode, Condition, Ownership
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import DELETE_THE_POD, resource_names
from fpga_plugin.cards.reads import SILENT
from fpga_plugin.errors import NotFinishedError, RefusedError, UnknownDeviceError
from fpga_plugin.hardware.model import Card, CardProblem
from fpga_plugin.ids import Alias, DeviceId, RegionId, device_variable
from fpga_plugin.kubernetes.names import PodUid, ResourceName
from fpga_plugin.settings.settings import ScrubPolicy

CARD = make_card(1, nodes=(0, 1), clears_memory=True)
OTHER = make_card(2, nodes=(2, 3))
P0, P1 = device(CARD, 0), device(CARD, 1)
R0, R1 = RegionId(P0), RegionId(P1)
BOARD = device(CARD)
POD_A, POD_B = PodUid("pod-a"), PodUid("pod-b")


@pytest.fixture
def ledger() -> Ledger:
    return make_ledger(CARD, OTHER)[0]


def condition(ledger: Ledger, region: RegionId = R0) -> Condition:
    return ledger.record(region).condition


def renumbered(card: Card, *nodes: int) -> Card:
    return make_card(card.address.bus - 0x10, nodes=nodes, clears_memory=card.clears_memory)


# ------------------------------------------------------------------ Allocate


def test_allocate_allocations_and_prestart_starts(ledger: Ledger) -> None:
    assert ledger.ownership(R0) is Ownership.FREE
    (allocation,) = ledger.device_plugin.allocate(REGIONS, [P0])
    assert allocation.grants[R0].nodes == ("/dev/dfl-port.0",)
    assert ledger.ownership(R0) is Ownership.CLAIMED
    assert (ledger.mode(CARD.id), condition(ledger)) == (CardMode.PARTITIONED, Condition.BLANK)
    start(ledger, P0)
    assert (ledger.ownership(R0), condition(ledger)) == (Ownership.STARTED, Condition.PROGRAMMED)
    assert ledger.ownership(R1) is Ownership.FREE


def test_a_whole_allocation_owns_every_region(ledger: Ledger) -> None:
    (allocation,) = ledger.device_plugin.allocate(WHOLE, [BOARD])
    assert list(allocation.grants) == [R0, R1]
    assert ledger.mode(CARD.id) is CardMode.WHOLE
    assert {ledger.ownership(r) for r in (R0, R1)} == {Ownership.CLAIMED}


def test_across_modes_allocate_is_refused(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    with pytest.raises(RefusedError, match=f"{P0} are in use"):
        ledger.device_plugin.allocate(WHOLE, [BOARD])
    ledger.device_plugin.release([P0])
    ledger.device_plugin.allocate(WHOLE, [BOARD])
    with pytest.raises(RefusedError, match="the whole card is in use"):
        ledger.device_plugin.allocate(REGIONS, [P1])
    ledger.device_plugin.allocate(REGIONS, [device(OTHER, 0)])


@pytest.mark.parametrize(
    "ids", [["0000-11-00.0-p2"], ["0000-11-00.0"], [""], ["x" * 999], ["0000:11:00.0-p0"]]
)
def test_an_unknown_device_is_not_found(ledger: Ledger, ids: list[str]) -> None:
    with pytest.raises(UnknownDeviceError, match="has no device"):
        ledger.device_plugin.allocate(REGIONS, ids)


def test_one_device_that_cannot_be_had_refuses_all(ledger: Ledger) -> None:
    ledger.work.faulted(R1, "PR failed")
    with pytest.raises(RefusedError, match="is faulted: PR failed"):
        ledger.device_plugin.allocate(REGIONS, [P0, P1])
    assert not ledger.allocations


@pytest.mark.parametrize("how", ["blank", "dirty", "scrubbing", "programmed"])
def test_allocate_succeeds_in_any_condition_but_faulted(ledger: Ledger, how: str) -> None:
    if how != "blank":
        ledger.work.dirty([R0], "x")
    if how in {"scrubbing", "programmed"}:
        ledger.work.working([R0])
    ledger.device_plugin.allocate(REGIONS, [P0])
    if how == "programmed":
        with pytest.raises(NotFinishedError):
            ledger.work.programmed(R0, AFU)  # the work began before there was this owner


def test_failed_hardware_refuses_allocate(ledger: Ledger) -> None:
    ledger.hardware.set_failing(CARD.id, {R0: TOO_HOT})
    with pytest.raises(RefusedError, match="thermal: AP6"):
        ledger.device_plugin.allocate(REGIONS, [P0])
    with pytest.raises(RefusedError, match="thermal: AP6"):
        ledger.device_plugin.allocate(WHOLE, [BOARD])
    ledger.device_plugin.allocate(REGIONS, [P1])


def test_an_incomplete_card_is_not_given_as_a_whole(ledger: Ledger) -> None:
    found(ledger, replace(CARD, regions=CARD.regions[:1]))
    with pytest.raises(RefusedError, match="shows 1 of its 2 regions"):
        ledger.device_plugin.allocate(WHOLE, [BOARD])
    with pytest.raises(UnknownDeviceError):
        ledger.device_plugin.allocate(REGIONS, [P1])


def test_a_card_that_another_plugin_serves_is_left_alone(ledger: Ledger) -> None:
    ledger.hardware.set_foreign({CARD.id: "drain the node"})
    with pytest.raises(RefusedError, match="drain the node"):
        ledger.device_plugin.allocate(REGIONS, [P0])


def test_repeated_allocate_without_a_prestart_is_the_same_allocation(ledger: Ledger) -> None:
    first = ledger.device_plugin.allocate(REGIONS, [P0, P1])
    again = ledger.device_plugin.allocate(REGIONS, [P1])
    assert again == first[1:]
    assert again[0].number == first[1].number
    assert condition(ledger, R1) is Condition.BLANK


def test_allocate_after_a_prestart_releases_exactly_the_ids_named(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0, P1])
    start(ledger, P0, P1)
    ledger.device_plugin.bind_pod([P0, P1], POD_A)
    before = ledger.allocations[P1]
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert ledger.allocations[P1] is before
    assert (ledger.allocations[P0].started, ledger.allocations[P0].pod) == (False, None)
    assert condition(ledger, R0) is Condition.DIRTY
    assert former(ledger, R0) == {POD_A}
    assert condition(ledger, R1) is Condition.PROGRAMMED


def test_allocate_after_a_prestart_that_failed_leaves_a_clean_region_clean(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.prestart_seen([P0])
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert condition(ledger) is Condition.BLANK
    assert not ledger.allocations[P0].prestart_seen


def test_an_allocation_from_before_kubelets_restart_counts_as_used(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    for _ in range(2):
        ledger.device_plugin.kubelet_found("life 2")
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert condition(ledger) is Condition.DIRTY
    assert not ledger.allocations[P0].missed_prestart


def test_stale_nodes_end_an_allocation_that_never_started(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    found(ledger, renumbered(CARD, 5, 6))
    with pytest.raises(RefusedError, match="device numbering changed since the pod was admitted"):
        ledger.device_plugin.allocate(REGIONS, [P0])
    (allocation,) = ledger.device_plugin.allocate(REGIONS, [P0])
    assert allocation.grants[R0].nodes == ("/dev/dfl-port.5",)


def test_a_failing_journal_grants_nothing() -> None:
    ledger, journal = make_ledger(CARD)
    before = remembered(ledger, "boot")
    journal.failing = 1
    with pytest.raises(JournalError, match="disk is full"):
        ledger.device_plugin.allocate(REGIONS, [P0])
    assert remembered(ledger, "boot") == before == journal.snapshot
    ledger.device_plugin.allocate(REGIONS, [P0])


# ------------------------------------------------------------------ nodes (invariant 10)


def test_a_node_in_other_hands_is_not_given_out_until_they_let_go(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    ledger.hardware.card_gone(CARD.id)
    found(ledger, renumbered(OTHER, 0, 3))
    scrub(ledger, OTHER)
    lent = ledger.cards[OTHER.id].regions[0]
    assert [(one.nodes, one.region) for one in ledger.strangers(lent)] == [
        (("/dev/dfl-port.0",), R0)
    ]
    with pytest.raises(RefusedError, match="is also open to the pod"):
        ledger.device_plugin.allocate(REGIONS, [device(OTHER, 0)])
    with pytest.raises(RefusedError, match="is also open to the pod"):
        ledger.device_plugin.allocate(WHOLE, [device(OTHER)])
    ledger.device_plugin.allocate(REGIONS, [device(OTHER, 1)])
    ledger.device_plugin.release([P0, device(OTHER, 1)])
    ledger.device_plugin.allocate(WHOLE, [device(OTHER)])


@pytest.mark.parametrize("started", [True, False])
def test_a_region_under_a_stale_node_is_dirty_where_it_may_have_been_used(
    ledger: Ledger, *, started: bool
) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD_A)
    if started:
        start(ledger, P0)
    found(ledger, renumbered(CARD, 1, 0))
    scrub(ledger, CARD, 1)
    ledger.device_plugin.release([P0])
    (_, of_its_node) = ledger.cards[CARD.id].regions
    assert [one.pod for one in ledger.strangers(of_its_node)] == ([POD_A] if started else [])
    gone(ledger, POD_A)
    assert condition(ledger, R1) is (Condition.DIRTY if started else Condition.BLANK)
    assert not ledger.strangers(of_its_node)


def ghost_with_node_0(ledger: Ledger) -> RegionId:
    """Pod A ran on port 0 and was deleted by force; another card has its node now."""
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD_A)
    start(ledger, P0)
    ledger.hardware.card_gone(CARD.id)
    ledger.device_plugin.release([P0])
    found(ledger, renumbered(OTHER, 0, 3))
    scrub(ledger, OTHER)
    return RegionId(device(OTHER, 0))


def test_the_node_of_a_pod_whose_allocation_ended_is_not_given_out_while_it_lives(
    ledger: Ledger,
) -> None:
    lent = ghost_with_node_0(ledger)
    lists = make_lists(ledger)
    assert shown(lists) == {lent: False, device(OTHER, 1): True}
    assert shown(lists, WHOLE) == {device(OTHER): False}
    with pytest.raises(RefusedError, match="open to pod"):
        ledger.device_plugin.allocate(REGIONS, [DeviceId(lent)])
    with pytest.raises(RefusedError, match="open to pod"):
        ledger.device_plugin.allocate(WHOLE, [device(OTHER)])


def test_what_a_pod_may_have_opened_by_its_old_node_is_scrubbed_when_it_is_gone(
    ledger: Ledger,
) -> None:
    lent = ghost_with_node_0(ledger)
    gone(ledger, POD_A)
    assert condition(ledger, lent) is Condition.DIRTY
    scrub(ledger, OTHER, 0)
    assert shown(make_lists(ledger)) == {lent: True, device(OTHER, 1): True}
    ledger.device_plugin.allocate(REGIONS, [DeviceId(lent)])


def test_the_scrub_of_a_region_ends_what_its_former_owner_had_of_it(ledger: Ledger) -> None:
    lent = ghost_with_node_0(ledger)
    found(ledger, renumbered(CARD, 7, 8))
    scrub(ledger, CARD)  # nobody scrubs before pod A is gone
    assert not ledger.tenancies
    assert condition(ledger, lent) is Condition.DIRTY


def test_a_pod_that_gets_its_region_again_keeps_what_it_was_given_before(ledger: Ledger) -> None:
    for _ in range(2):
        ledger.device_plugin.allocate(REGIONS, [P0])
        ledger.device_plugin.bind_pod([P0], POD_A)
        start(ledger, P0)
        ledger.device_plugin.release([P0])
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD_A)
    start(ledger, P0)
    assert {node for one in ledger.tenancies.values() for node in one.nodes} == {"/dev/dfl-port.0"}


def test_a_pod_that_never_ran_keeps_no_node(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD_A)
    ledger.device_plugin.release([P0])
    assert not ledger.tenancies


@pytest.mark.parametrize("boot_id", ["boot", "another boot"])
def test_a_tenancy_that_was_left_outlives_the_plugin_and_not_the_boot(boot_id: str) -> None:
    ledger, journal = make_ledger(CARD, OTHER)
    lent = ghost_with_node_0(ledger)
    again = reopened(journal, renumbered(OTHER, 0, 3), boot_id=boot_id)
    node = next(r for r in again.cards[OTHER.id].regions if r.id == lent)
    assert bool(again.strangers(node)) == (boot_id == "boot")


# ------------------------------------------------------------------ cards nobody was asked about


def test_a_card_that_the_journal_does_not_know_is_not_given_out_before_its_owners_are_known(
    ledger: Ledger,
) -> None:
    new = make_card(5, nodes=(8, 9))
    ledger.hardware.card_found(new, dict.fromkeys((r.id for r in new.regions), BLANK), BLANK)
    scrub(ledger, new)
    lists = make_lists(ledger)
    devices = [device(new, 0), device(new, 1)]
    assert [shown(lists)[one] for one in devices] == [False, False]
    assert shown(lists, WHOLE)[device(new)] is False
    for resource, one in ((REGIONS, devices[0]), (WHOLE, device(new))):
        with pytest.raises(RefusedError, match="kubelet's records were not read"):
            ledger.device_plugin.allocate(resource, [one])
    assert ledger.others_owned(new.id, [RegionId(d) for d in devices])
    ledger.reconciled([new.id])
    assert [shown(lists)[one] for one in devices] == [True, True]
    ledger.device_plugin.allocate(WHOLE, [device(new)])


def test_a_port_that_comes_later_is_asked_about_too(ledger: Ledger) -> None:
    new = make_card(5, nodes=(8, 9))
    found(ledger, replace(new, regions=new.regions[:1]))
    assert not ledger.unreconciled
    ledger.hardware.card_found(new, {}, BLANK)
    assert ledger.unreconciled == {new.id}


def test_a_card_whose_owners_were_not_asked_for_stays_so_over_a_restart() -> None:
    ledger, journal = make_ledger()
    ledger.hardware.card_found(CARD, {}, BLANK)
    again = Ledger(prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot")
    again.hardware.card_found(CARD, {}, BLANK)
    assert again.unreconciled == {CARD.id}


def test_an_adopted_allocation_may_be_of_another_interface_but_not_of_another_kind(
    ledger: Ledger,
) -> None:
    old = ResourceName(f"{PREFIX}/region-{OTHER_INTERFACE}")
    with pytest.raises(RefusedError, match="is no device of"):
        ledger.device_plugin.adopt(WHOLE, P0, POD_A, {})
    ledger.device_plugin.adopt(old, P0, POD_A, {})
    assert shown(make_lists(ledger), old) == {P0: True}
    assert old in make_lists(ledger).resources()


# ------------------------------------------------------------------ stale nodes at PreStart


def test_prestart_finds_that_the_numbers_changed(ledger: Ledger) -> None:
    (allocation,) = ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.obstacles.check_grants(allocation)
    found(ledger, renumbered(CARD, 1, 0))
    with pytest.raises(RefusedError, match=r"dfl-port.0 and is /dev/dfl-port.1 now: delete"):
        ledger.obstacles.check_grants(allocation)
    ledger.hardware.card_gone(CARD.id)
    with pytest.raises(RefusedError, match="is gone"):
        ledger.obstacles.check_grants(allocation)


def test_an_allocation_hears_why_a_card_that_is_there_is_not_served(ledger: Ledger) -> None:
    (allocation,) = ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.problems[CARD.id] = CardProblem(CARD.address, "it has no IOMMU", "switch it on")
    ledger.obstacles.check_grants(allocation)  # what is served still is
    ledger.hardware.card_gone(CARD.id)
    with pytest.raises(RefusedError, match=f"card {CARD.id} is not served: it has no IOMMU") as why:
        ledger.obstacles.check_grants(allocation)
    assert why.value.hint == "switch it on", "as the operator reads it"
    assert why.value.for_tenant().hint == f"{DELETE_THE_POD}, or ask the node's operator"
    with pytest.raises(RefusedError, match="it has no IOMMU"):
        ledger.device_plugin.allocate(REGIONS, [P0])


def test_an_allocation_hears_which_card_is_silent_and_what_helps(ledger: Ledger) -> None:
    (allocation,) = ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.problems[CARD.id] = CardProblem(CARD.address, SILENT)
    ledger.hardware.card_gone(CARD.id)
    with pytest.raises(RefusedError) as why:
        ledger.obstacles.check_grants(allocation)
    told = f"{DELETE_THE_POD}, or ask the node's operator"
    assert str(why.value.for_tenant()) == f"card {CARD.id} is not served: {SILENT}: {told}"


# ------------------------------------------------------------------ releases


def test_release_of_unknown_and_unowned_devices_is_no_error(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert ledger.device_plugin.release(["", "zzz", P1, P0, P0, BOARD]) == (P0,)
    assert ledger.device_plugin.release([P0]) == ()


def test_after_use_a_region_is_dirty_and_remembers_its_owner(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD_A)
    start(ledger, P0)
    ledger.device_plugin.release([P0])
    assert former(ledger, R0) == {POD_A}
    assert condition(ledger) is Condition.DIRTY
    scrub(ledger, CARD, 0)
    assert former(ledger, R0) == frozenset()
    assert condition(ledger) is Condition.BLANK


def test_an_unused_allocation_leaves_a_clean_region_clean(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(WHOLE, [BOARD])
    ledger.device_plugin.release([BOARD])
    assert {condition(ledger, r) for r in (R0, R1)} == {Condition.BLANK}


def test_deallocate_after_a_refused_allocate_ends_nobody_elses_allocation(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(WHOLE, [BOARD])
    with pytest.raises(RefusedError):
        ledger.device_plugin.allocate(REGIONS, [P0])
    assert ledger.device_plugin.release([P0]) == ()
    assert ledger.mode(CARD.id) is CardMode.WHOLE


def test_a_faulted_region_stays_so_when_its_owner_leaves(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    ledger.work.faulted(R0, "PR failed")
    ledger.device_plugin.release([P0])
    assert condition(ledger) is Condition.FAULTED


# ------------------------------------------------------------------ PostStops


def used(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)


def test_a_balanced_poststop_leaves_the_allocation_and_a_dirty_region(ledger: Ledger) -> None:
    used(ledger)
    assert ledger.device_plugin.poststop_seen([P0]) == (P0,)
    assert ledger.device_plugin.balanced(P0)
    assert condition(ledger) is Condition.DIRTY
    assert ledger.ownership(R0) is Ownership.STARTED
    scrub(ledger, CARD, 0)
    ledger.device_plugin.release([P0])
    assert condition(ledger) is Condition.BLANK, "scrubbed already"
    assert former(ledger, R0) == frozenset()


def test_a_poststop_that_was_an_earlier_pods_does_not_spare_a_used_region_its_scrub(
    ledger: Ledger,
) -> None:
    """Found by docs/model: the earlier pod's PreStart failed while the plugin was away."""
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.prestart_seen([P0])
    ledger.device_plugin.poststop_seen([P0])  # the earlier pod's, counted as this one's
    ledger.device_plugin.started(
        [ledger.allocations[P0]]
    )  # handed over blank, which it stays in the ledger's eyes
    assert condition(ledger) is Condition.BLANK
    assert ledger.device_plugin.balanced(P0)
    ledger.device_plugin.release([P0])
    assert condition(ledger) is Condition.DIRTY, "it ran on it"


def test_a_container_that_starts_after_a_scrub_under_its_allocation_leaves_a_dirty_region(
    ledger: Ledger,
) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    ledger.device_plugin.poststop_seen([P0])
    scrub(ledger, CARD)
    ledger.device_plugin.prestart_seen([P0])
    ledger.device_plugin.poststop_seen([P0])  # counted early: it was the first one's, told twice
    ledger.device_plugin.started([ledger.allocations[P0]])
    ledger.device_plugin.release([P0])
    assert condition(ledger) is Condition.DIRTY


def test_prestarts_that_failed_count(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.prestart_seen([P0])
    start(ledger, P0)
    assert ledger.device_plugin.poststop_seen([P0]) == ()
    assert ledger.device_plugin.poststop_seen([P0]) == (P0,)
    assert ledger.device_plugin.poststop_seen([P0]) == ()


def test_a_container_that_never_started_leaves_nothing_to_scrub(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.prestart_seen([P0])
    assert ledger.device_plugin.poststop_seen([P0]) == (P0,)
    assert condition(ledger) is Condition.BLANK


def test_a_restarted_container_unbalances_again(ledger: Ledger) -> None:
    used(ledger)
    ledger.device_plugin.poststop_seen([P0])
    ledger.device_plugin.prestart_seen([P0])
    assert not ledger.device_plugin.balanced(P0)


def test_a_late_poststop_does_not_count_for_the_successor(ledger: Ledger) -> None:
    used(ledger)
    ledger.device_plugin.release([P0])
    used(ledger)
    assert ledger.device_plugin.poststop_seen([P0]) == (), "the first owner's"
    assert ledger.device_plugin.poststop_seen([P0]) == (P0,)


def test_a_late_poststop_between_two_owners_is_counted_off(ledger: Ledger) -> None:
    used(ledger)
    ledger.device_plugin.release([P0])
    assert ledger.device_plugin.poststop_seen([P0]) == ()
    used(ledger)
    assert ledger.device_plugin.poststop_seen([P0]) == (P0,)


def test_after_kubelets_restart_poststops_of_an_allocation_balance_nothing(ledger: Ledger) -> None:
    used(ledger)
    ledger.device_plugin.kubelet_found("life 2")
    ledger.device_plugin.prestart_seen([P0])
    for _ in range(5):
        assert ledger.device_plugin.poststop_seen([P0]) == ()
    ledger.device_plugin.release([P0])
    used(ledger)
    assert ledger.device_plugin.poststop_seen([P0]) == (), "one that kubelet may have begun to send"


def test_late_poststops_are_forgotten_with_the_kubelet_that_owed_them(ledger: Ledger) -> None:
    used(ledger)
    ledger.device_plugin.release([P0])
    ledger.device_plugin.kubelet_found("life 2")
    used(ledger)
    assert ledger.device_plugin.poststop_seen([P0]) == (P0,)


def test_counts_survive_the_plugin_until_the_next_prestart() -> None:
    ledger, journal = make_ledger(CARD)
    used(ledger)
    assert reopened(journal, CARD).device_plugin.poststop_seen([P0]) == (P0,)
    ledger, journal = make_ledger(CARD)
    used(ledger)
    again = reopened(journal, CARD)
    again.device_plugin.prestart_seen([P0])
    for _ in range(5):
        assert again.device_plugin.poststop_seen([P0]) == (), (
            "one may be of a start that failed meanwhile"
        )


def test_a_prestart_that_cannot_be_written_counts_all_the_same() -> None:
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    journal.failing = 1
    with pytest.raises(JournalError):
        ledger.device_plugin.prestart_seen([P0])
    start(ledger, P0)
    assert ledger.device_plugin.poststop_seen([P0]) == ()


def test_a_poststop_of_a_device_that_nobody_has_is_no_error(ledger: Ledger) -> None:
    assert ledger.device_plugin.poststop_seen([P0, BOARD]) == ()


# ------------------------------------------------------------------ pods


def test_another_pod_in_kubelets_records_is_another_owner(ledger: Ledger) -> None:
    used(ledger)
    ledger.device_plugin.bind_pod([P0], POD_A)
    ledger.device_plugin.bind_pod([P0], POD_A)
    assert condition(ledger) is Condition.PROGRAMMED
    ledger.device_plugin.bind_pod([P0], POD_B)
    assert former(ledger, R0) == {POD_A}
    assert condition(ledger) is Condition.DIRTY
    allocation = ledger.allocations[P0]
    assert (allocation.pod, allocation.missed_prestart, allocation.started) == (POD_B, True, False)
    assert allocation.grants == {R0: CARD.regions[0].grant}


def test_adoption_keeps_the_nodes_that_kubelet_hands_out(ledger: Ledger) -> None:
    allocation = ledger.device_plugin.adopt(
        REGIONS, P0, POD_A, {device_variable(R0): "/dev/dfl-port.7"}
    )
    assert allocation.grants[R0].nodes == ("/dev/dfl-port.7",)
    assert (allocation.missed_prestart, allocation.pod, condition(ledger)) == (
        True,
        POD_A,
        Condition.DIRTY,
    )
    with pytest.raises(RefusedError, match="device numbering changed"):
        ledger.obstacles.check_grants(allocation)


def test_the_next_container_of_an_adopted_pod_gets_no_other_node_than_its_first(
    ledger: Ledger,
) -> None:
    """Its first one would start on what another region has there by now."""
    ledger.device_plugin.adopt(REGIONS, P0, POD_A, {device_variable(R0): "/dev/dfl-port.7"})
    with pytest.raises(RefusedError, match="device numbering changed since the pod was admitted"):
        ledger.device_plugin.allocate(REGIONS, [P0])
    (allocation,) = ledger.device_plugin.allocate(REGIONS, [P0])
    assert allocation.grants == {R0: CARD.regions[0].grant}


def test_adoption_takes_nothing_from_an_owner(ledger: Ledger) -> None:
    used(ledger)
    with pytest.raises(RefusedError, match="has an owner already"):
        ledger.device_plugin.adopt(REGIONS, P0, POD_B, {})
    with pytest.raises(RefusedError, match="cannot be given as a whole"):
        ledger.device_plugin.adopt(WHOLE, BOARD, POD_B, {})
    assert condition(ledger) is Condition.PROGRAMMED


def test_poststops_of_an_adopted_allocation_balance_nothing(ledger: Ledger) -> None:
    ledger.device_plugin.adopt(REGIONS, P0, POD_A, {})
    ledger.device_plugin.prestart_seen([P0])
    for _ in range(5):
        assert ledger.device_plugin.poststop_seen([P0]) == ()


# ------------------------------------------------------------------ work


def test_work_is_concluded_only_where_nothing_came_between(ledger: Ledger) -> None:
    with pytest.raises(NotFinishedError, match="changed while it was worked on"):
        ledger.work.programmed(R0, AFU)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.work.working([R0])
    ledger.hardware.card_gone(CARD.id)
    found(ledger, CARD)
    for conclude in (
        lambda: ledger.work.clean(R0, BLANK, blank=True),
        lambda: ledger.work.programmed(R0, AFU),
    ):
        with pytest.raises(NotFinishedError, match="the card went and came back"):
            conclude()
    assert condition(ledger) is Condition.DIRTY


def test_an_image_that_was_programmed_for_an_owner_that_left_does_not_count_for_the_next(
    ledger: Ledger,
) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.prestart_seen([P0])
    ledger.work.working([R0])
    ledger.device_plugin.release([P0])
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.work.working([R0])  # the second step of the same work
    with pytest.raises(NotFinishedError, match="its owner left"):
        ledger.work.programmed(R0, AFU)
    assert condition(ledger) is Condition.SCRUBBING


def test_a_scrub_during_which_an_owner_left_is_done_again(ledger: Ledger) -> None:
    ledger.work.dirty([R0], "x")
    ledger.work.working([R0])
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD_A)
    ledger.device_plugin.kubelet_found("life 2")
    ledger.device_plugin.release([P0])
    with pytest.raises(NotFinishedError, match="an owner left"):
        ledger.work.clean(R0, BLANK, blank=True)
    assert former(ledger, R0) == {POD_A}


def test_a_debt_is_open_from_the_first_sight_of_a_card_with_memory() -> None:
    ledger, _ = make_ledger(CARD, OTHER, blank=False)
    assert ledger.memory_clear_pending == {CARD.id}
    scrub(ledger, CARD)
    ledger.hardware.card_gone(CARD.id)
    assert ledger.memory_clear_pending == {CARD.id}


@pytest.mark.parametrize(
    ("claimed", "mine", "others"),
    [
        ([], [R0], False),
        ([P0], [R0], False),
        ([P0, P1], [R0], True),
        ([P1], [R0], True),
        ([BOARD], [R0, R1], False),
        ([BOARD], [R0], True),
    ],
)
def test_memory_is_cleared_only_where_nobody_else_owns_a_region(claimed, mine, *, others) -> None:
    ledger, _ = make_ledger(CARD)
    for one in claimed:
        ledger.device_plugin.allocate(WHOLE if one == BOARD else REGIONS, [one])
    assert ledger.others_owned(CARD.id, mine) is others


# ------------------------------------------------------------------ hardware


def test_a_card_that_comes_back_is_dirty_and_its_allocations_stay(ledger: Ledger) -> None:
    used(ledger)
    ledger.hardware.card_gone(CARD.id)
    assert ledger.allocations[P0].started
    found(ledger, CARD)
    assert {condition(ledger, r) for r in (R0, R1)} == {Condition.DIRTY}
    ledger.obstacles.check_grants(ledger.allocations[P0])


def test_a_card_that_is_found_again_unchanged_stays_as_it_is(ledger: Ledger) -> None:
    used(ledger)
    found(ledger, CARD, AFU)
    assert condition(ledger) is Condition.PROGRAMMED
    assert condition(ledger, R1) is Condition.BLANK


def test_a_card_with_another_interface_id_has_another_resource_and_dirty_regions(
    ledger: Ledger,
) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    found(ledger, replace(CARD, interface_id=OTHER_INTERFACE))
    assert {condition(ledger, r) for r in (R0, R1)} == {Condition.DIRTY}
    other, _ = resource_names("fpga.intel.com", ledger.cards[CARD.id].interface_id)
    assert ledger.naming.device_resource(P0) == REGIONS, "as long as its allocation lasts"
    assert ledger.naming.device_resource(P1) == other
    assert {REGIONS, WHOLE, other} <= ledger.resources


@pytest.mark.parametrize("now", ["alias", "moved alias", "reflashed"])
def test_the_next_pod_gets_no_device_by_a_name_that_it_is_no_longer_given_out_by(
    ledger: Ledger, now: str
) -> None:
    resource = ResourceName(f"{PREFIX}/region-board") if now == "moved alias" else REGIONS
    if now == "moved alias":
        ledger.naming.call_interfaces({INTERFACE: Alias("board")})
    ledger.device_plugin.allocate(resource, [P0])
    if now == "reflashed":
        found(ledger, replace(CARD, interface_id=OTHER_INTERFACE))
    else:
        ledger.naming.call_interfaces({INTERFACE: Alias("next")})
    ledger.device_plugin.allocate(resource, [P0])  # the same pod's next container
    start(ledger, P0)
    allocation = ledger.allocations[P0]
    present = ledger.naming.present_resource(P0)
    assert present not in {None, resource}
    with pytest.raises(RefusedError, match=f"{P0} is given out as {present}"):
        ledger.device_plugin.allocate(resource, [P0])
    assert ledger.allocations == {P0: allocation}
    ledger.device_plugin.release([P0])
    assert ledger.naming.device_resource(P0) == present


def test_a_region_that_recovers_is_dirty_unless_owned(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    ledger.hardware.set_failing(CARD.id, {R0: TOO_HOT, R1: TOO_HOT})
    assert (trouble(ledger, R0), trouble(ledger, R1)) == (
        TOO_HOT.message,
        TOO_HOT.message,
    )
    ledger.hardware.set_failing(CARD.id, {})
    assert condition(ledger) is Condition.PROGRAMMED
    assert condition(ledger, R1) is Condition.DIRTY


def test_a_poisoned_port_that_answers_again_is_worth_a_scrub(ledger: Ledger) -> None:
    ledger.work.faulted(R0, "poisoned")
    ledger.hardware.set_failing(CARD.id, {R0: POISONED})
    ledger.hardware.set_failing(CARD.id, {})
    assert condition(ledger) is Condition.DIRTY


def test_a_region_that_reads_otherwise_than_it_was_left_is_dirty(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    assert not ledger.hardware.verify(CARD.id, {R0: AFU, R1: BLANK})
    assert not ledger.hardware.verify(CARD.id, {R0: None}), "its health says why it cannot be read"
    assert condition(ledger) is Condition.PROGRAMMED
    before = ledger.record(R0), ledger.record(R1)
    assert ledger.hardware.verify(CARD.id, {R0: BLANK, R1: None}) == {R0: before[0], R1: before[1]}
    assert condition(ledger) is condition(ledger, R1) is Condition.DIRTY
    assert not ledger.hardware.verify(CARD.id, {R0: BLANK, R1: None}), "told once"
    assert ledger.ownership(R0) is Ownership.STARTED


def test_a_region_of_another_instance_is_dirty_and_no_other(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    ledger.hardware.set_failing(CARD.id, {R0: TOO_HOT})
    lives = ledger.returns[CARD.id]
    again = replace(CARD, regions=(replace(CARD.regions[0], handle=2), *CARD.regions[1:]))
    assert ledger.hardware.card_found(again, {R0: AFU, R1: BLANK}, BLANK) == {R0}
    assert condition(ledger) is Condition.DIRTY
    assert condition(ledger, R1) is Condition.BLANK
    assert not trouble(ledger, R0), "that was another's"
    assert ledger.returns[CARD.id] == lives + 1
    assert not ledger.hardware.card_found(again, {R0: AFU, R1: BLANK}, BLANK)


@pytest.mark.parametrize("step", ["gone", "found", "failing", "verify", "dirty", "faulted"])
def test_a_change_that_makes_a_region_unusable_holds_though_it_cannot_be_journalled(
    step: str,
) -> None:
    ledger, journal = make_ledger(CARD)
    if step == "found":
        ledger.hardware.card_gone(CARD.id)
        scrub(ledger, CARD)
    if step == "failing":
        ledger.hardware.set_failing(CARD.id, {R0: TOO_HOT})
    journal.failing = 1
    with pytest.raises(JournalError):  # noqa: PT012  # one step of several kinds
        match step:
            case "gone":
                ledger.hardware.card_gone(CARD.id)
            case "found":
                found(ledger, CARD)
            case "failing":
                ledger.hardware.set_failing(CARD.id, {})
            case "verify":
                ledger.hardware.verify(CARD.id, {R0: AFU})
            case "dirty":
                ledger.work.dirty([R0], "x")
            case "faulted":
                ledger.work.faulted(R0, "x")
    assert condition(ledger) is (Condition.FAULTED if step == "faulted" else Condition.DIRTY)
    assert (CARD.id in ledger.cards) is (step != "gone")


# ------------------------------------------------------------------ restarts


def test_a_restart_in_the_same_boot_knows_everything() -> None:
    ledger, journal = make_ledger(CARD, OTHER)
    used(ledger)
    ledger.device_plugin.bind_pod([P0], POD_A)
    again = Ledger(
        prefix="fpga.intel.com", journal=journal, snapshot=journal.snapshot, boot_id="boot"
    )
    again.hardware.card_found(CARD, {R0: AFU, R1: BLANK}, BLANK)
    assert again.allocations == ledger.allocations
    assert condition(again) is Condition.PROGRAMMED
    assert condition(again, R1) is Condition.BLANK


@pytest.mark.parametrize(
    ("before", "reads", "blank", "after"),
    [
        (Condition.BLANK, BLANK, BLANK, Condition.BLANK),
        (Condition.BLANK, AFU, BLANK, Condition.DIRTY),
        (Condition.BLANK, None, BLANK, Condition.DIRTY),
        (Condition.BLANK, BLANK, AFU, Condition.DIRTY),
        (Condition.BLANK, BLANK, None, Condition.DIRTY),
        (Condition.UNBLANKED, AFU, None, Condition.UNBLANKED),
        (Condition.UNBLANKED, AFU, BLANK, Condition.DIRTY),
        (Condition.UNBLANKED, BLANK, None, Condition.DIRTY),
        (Condition.DIRTY, BLANK, BLANK, Condition.DIRTY),
        (Condition.SCRUBBING, BLANK, BLANK, Condition.DIRTY),
        (Condition.FAULTED, None, BLANK, Condition.FAULTED),
        (Condition.FAULTED, BLANK, BLANK, Condition.DIRTY),
    ],
)
def test_after_a_restart_the_hardware_has_to_agree(before, reads, blank, after) -> None:
    ledger, journal = make_ledger(CARD)
    match before:
        case Condition.DIRTY:
            ledger.work.dirty([R0], "x")
        case Condition.FAULTED:
            ledger.work.faulted(R0, "x")
        case Condition.SCRUBBING:
            ledger.work.working([R0])
        case Condition.UNBLANKED:
            ledger.work.working([R0])
            ledger.work.clean(R0, AFU, blank=False)
    again = reopened(journal)
    again.hardware.card_found(CARD, {R0: reads, R1: BLANK}, blank)
    assert condition(again) is after


def test_unblanked_regions_are_dirty_once_a_blank_is_required() -> None:
    ledger, journal = make_ledger(CARD)
    ledger.work.working([R0])
    ledger.work.clean(R0, AFU, blank=False)
    again = Ledger(
        prefix="fpga.intel.com",
        journal=journal,
        snapshot=journal.snapshot,
        boot_id="boot",
        scrub=ScrubPolicy.REQUIRED,
    )
    again.hardware.card_found(CARD, {R0: AFU, R1: BLANK}, None)
    assert condition(again) is Condition.DIRTY


@pytest.mark.parametrize("owned", [True, False])
def test_an_image_outlives_the_plugin_only_with_its_owner(*, owned: bool) -> None:
    ledger, journal = make_ledger(CARD)
    used(ledger)
    if not owned:
        journal.snapshot = replace(journal.snapshot, allocations={})
    again = reopened(journal)
    again.hardware.card_found(CARD, {R0: AFU, R1: BLANK}, BLANK)
    assert condition(again) is (Condition.PROGRAMMED if owned else Condition.DIRTY)


def test_after_a_boot_allocations_stay_unstarted_and_nothing_is_clean() -> None:
    ledger, journal = make_ledger(CARD)
    used(ledger)
    ledger.device_plugin.bind_pod([P0], POD_A)
    again = reopened(journal, CARD, boot_id="another")
    allocation = again.allocations[P0]
    assert (
        allocation.started,
        allocation.prestart_seen,
        allocation.missed_prestart,
        allocation.pod,
    ) == (False, False, True, POD_A)
    assert {condition(again, r) for r in (R0, R1)} == {Condition.DIRTY}
    assert journal.snapshot == remembered(again, "another")
    third = reopened(journal, CARD, boot_id="another")
    assert third.allocations == again.allocations


def test_without_a_journal_everything_is_dirty() -> None:
    ledger = reopened(MemoryJournal(), CARD)
    assert {condition(ledger, r) for r in (R0, R1)} == {Condition.DIRTY}
    assert ledger.memory_clear_pending == {CARD.id}


def test_env_is_known_of_one_kubelet_only(ledger: Ledger) -> None:
    assert not ledger.device_plugin.sends_env
    ledger.device_plugin.env_seen()
    assert ledger.device_plugin.sends_env
    ledger.device_plugin.kubelet_found("life 2")
    assert not ledger.device_plugin.sends_env


# ------------------------------------------------------------------ leases


def test_a_lease_holds_as_long_as_the_devices_have_the_same_allocations(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0, P1])
    lease = ledger.lease([P0, P1])
    assert lease.devices == (P0, P1)
    start(ledger, P0)
    ledger.device_plugin.bind_pod([P0], POD_A)
    assert lease == ledger.lease([P1, P0])
    lease.check()
    ledger.device_plugin.bind_pod([P0], POD_B)
    assert not lease.holds
    assert lease != ledger.lease([P0, P1])
    with pytest.raises(RefusedError, match=f"the allocation of {P0} ended before its container"):
        lease.check()


def test_a_lease_ends_with_any_of_its_allocations_and_covers_those_that_there_are(
    ledger: Ledger,
) -> None:
    ledger.device_plugin.allocate(REGIONS, [P1])
    lease = ledger.lease([P0, P1])
    assert lease.devices == (P1,)
    ledger.device_plugin.allocate(REGIONS, [P0])
    lease.check()
    ledger.device_plugin.release([P1])
    with pytest.raises(RefusedError, match=str(P1)):
        lease.check()
