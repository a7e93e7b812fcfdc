"""What is advertised: the table in docs/architecture.md."""

from dataclasses import replace

import pytest
from doubles.cards import AFU, OTHER_INTERFACE, PREFIX, REGIONS, TOO_HOT, WHOLE, device, make_card
from ledger_support import (
    MemoryJournal,
    found,
    make_ledger,
    make_lists,
    reopened,
    scrub,
    shown,
    start,
)

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import resource_names
from fpga_plugin.ids import RegionId
from fpga_plugin.kubernetes.names import PodUid, ResourceName
from fpga_plugin.settings.settings import Advertise, ScrubPolicy

CARD = make_card(1, nodes=(0, 1), clears_memory=True)
OTHER = make_card(2, nodes=(2, 3), numa_node=1)
P0, P1, BOARD = device(CARD, 0), device(CARD, 1), device(CARD)
R0 = RegionId(P0)


def two():
    ledger, _ = make_ledger(CARD, OTHER)
    return ledger, make_lists(ledger)


def test_every_card_is_advertised_whole_and_by_region_with_its_numa_node() -> None:
    _, lists = two()
    assert lists.resources() == (WHOLE, REGIONS)
    assert [(d.id, d.healthy, d.numa_node) for d in lists.devices(REGIONS)] == [
        (P0, True, 0),
        (P1, True, 0),
        (device(OTHER, 0), True, 1),
        (device(OTHER, 1), True, 1),
    ]
    assert [(d.id, d.healthy, d.numa_node) for d in lists.devices(WHOLE)] == [
        (BOARD, True, 0),
        (device(OTHER), True, 1),
    ]


def test_a_whole_allocation_takes_the_regions_off_the_list_and_the_reverse() -> None:
    ledger, lists = two()
    ledger.device_plugin.allocate(WHOLE, [BOARD])
    assert P0 not in shown(lists)
    assert shown(lists, WHOLE)[BOARD]
    ledger.device_plugin.release([BOARD])
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert shown(lists)[P0]
    assert shown(lists)[P1]
    assert BOARD not in shown(lists, WHOLE)
    ledger.device_plugin.release([P0])
    assert shown(lists, WHOLE)[BOARD]


def test_an_owned_device_is_listed_healthy_in_every_condition_but_faulted() -> None:
    ledger, lists = two()
    ledger.device_plugin.allocate(REGIONS, [P0])
    for step in (
        lambda: ledger.work.dirty([R0], "x"),
        lambda: ledger.work.working([R0]),
        lambda: ledger.work.programmed(R0, AFU),
        lambda: ledger.hardware.set_foreign({CARD.id: "x"}),
        lambda: ledger.work.set_memory_clear_pending(CARD.id, open_=True),
        lambda: ledger.device_plugin.kubelet_found("life 2"),
    ):
        step()
        assert shown(lists)[P0]
    ledger.work.faulted(R0, "x")
    assert not shown(lists)[P0]


def test_an_owned_device_whose_hardware_goes_stays_listed_unhealthy() -> None:
    ledger, lists = two()
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.allocate(WHOLE, [device(OTHER)])
    ledger.hardware.set_failing(CARD.id, {R0: TOO_HOT})
    assert shown(lists)[P0] is False
    ledger.hardware.set_failing(CARD.id, {})
    assert shown(lists)[P0]
    ledger.hardware.card_gone(CARD.id)
    assert shown(lists)[P0] is False
    assert P1 not in shown(lists)
    found(ledger, replace(OTHER, regions=OTHER.regions[:1]))
    assert shown(lists, WHOLE)[device(OTHER)] is False


@pytest.mark.parametrize("step", ["dirty", "working", "faulted", "failing", "foreign"])
def test_a_free_device_is_healthy_only_when_clean_and_sound(step: str) -> None:
    ledger, lists = two()
    match step:
        case "dirty":
            ledger.work.dirty([R0], "x")
        case "working":
            ledger.work.working([R0])
        case "faulted":
            ledger.work.faulted(R0, "x")
        case "failing":
            ledger.hardware.set_failing(CARD.id, {R0: TOO_HOT})
        case "foreign":
            ledger.hardware.set_foreign({CARD.id: "x"})
    assert shown(lists)[P0] is False
    assert shown(lists)[P1] is (step != "foreign")
    assert shown(lists, WHOLE)[BOARD] is False
    assert shown(lists)[device(OTHER, 0)]


def test_a_memory_clear_pending_holds_back_the_whole_card_only() -> None:
    ledger, lists = two()
    ledger.work.set_memory_clear_pending(CARD.id, open_=True)
    assert shown(lists, WHOLE)[BOARD] is False
    assert shown(lists)[P0]
    ledger.work.set_memory_clear_pending(CARD.id, open_=False)
    assert shown(lists, WHOLE)[BOARD]


def test_a_whole_card_needs_all_of_its_regions() -> None:
    ledger, lists = two()
    found(ledger, replace(CARD, regions=CARD.regions[:1]))
    assert shown(lists, WHOLE)[BOARD] is False
    assert P1 not in shown(lists)


@pytest.mark.parametrize("policy", ScrubPolicy)
def test_unblanked_is_clean_under_best_effort_only(policy: ScrubPolicy) -> None:
    ledger, _ = make_ledger(CARD)
    lists = make_lists(ledger, scrub=policy)
    ledger.work.working([R0])
    ledger.work.clean(R0, AFU, blank=False)
    assert shown(lists)[P0] is (policy is ScrubPolicy.BEST_EFFORT)


def test_a_region_comes_back_when_another_card_gives_its_node_up() -> None:
    ledger, lists = two()
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.hardware.card_gone(CARD.id)
    found(ledger, make_card(2, nodes=(0, 3), numa_node=1))
    scrub(ledger, OTHER)
    assert shown(lists)[device(OTHER, 0)] is False
    assert shown(lists, WHOLE)[device(OTHER)] is False
    ledger.device_plugin.release([P0])
    assert shown(lists)[device(OTHER, 0)]
    assert shown(lists, WHOLE)[device(OTHER)]


def test_a_resource_stays_registered_when_its_cards_are_gone_and_over_restarts() -> None:
    ledger, journal = make_ledger(CARD)
    lists = make_lists(ledger)
    ledger.hardware.card_gone(CARD.id)
    assert lists.resources() == (WHOLE, REGIONS)
    assert lists.devices(REGIONS) == ()
    assert make_lists(reopened(journal)).resources() == (WHOLE, REGIONS)


def test_a_card_with_another_interface_id_is_listed_under_it_and_what_is_owned_under_the_old():
    ledger, lists = two()
    ledger.device_plugin.allocate(REGIONS, [P0])
    changed = replace(CARD, interface_id=OTHER_INTERFACE)
    of_regions, of_card = resource_names(PREFIX, changed.interface_id)
    found(ledger, changed)
    scrub(ledger, changed)
    assert shown(lists)[P0]
    assert P1 not in shown(lists)
    assert shown(lists, of_regions) == {P1: True}
    assert shown(lists, of_card) == {}
    assert lists.resources() == tuple(sorted([of_card, of_regions, WHOLE, REGIONS]))


@pytest.mark.parametrize(
    ("advertise", "kept", "left_out"),
    [(Advertise.REGION, REGIONS, WHOLE), (Advertise.WHOLE, WHOLE, REGIONS)],
)
def test_what_is_not_to_be_advertised_is_not_registered_nor_listed(
    advertise: Advertise, kept: ResourceName, left_out: ResourceName
) -> None:
    ledger, _ = make_ledger(CARD)
    lists = make_lists(ledger, advertise=advertise)
    assert lists.resources() == (kept,)
    assert lists.devices(left_out) == ()
    assert all(shown(lists, kept).values())


@pytest.mark.parametrize("adopted", [True, False])
def test_an_allocation_of_what_is_not_advertised_any_more_is_listed_as_long_as_it_lasts(
    *, adopted: bool
) -> None:
    ledger, journal = make_ledger(CARD)
    if not adopted:
        ledger.device_plugin.allocate(WHOLE, [BOARD])
    ledger = reopened(journal, CARD)
    lists = make_lists(ledger, advertise=Advertise.REGION)
    if adopted:
        assert lists.resources() == (REGIONS,)
        ledger.device_plugin.adopt(WHOLE, BOARD, PodUid("a"), {})
    assert lists.resources() == (WHOLE, REGIONS)
    assert shown(lists, WHOLE) == {BOARD: True}
    assert shown(lists) == {}
    ledger.device_plugin.release([BOARD])
    assert lists.resources() == (WHOLE, REGIONS), "a name once registered stays registered"
    assert shown(lists, WHOLE) == {}


def test_resources_of_another_prefix_are_not_registered() -> None:
    ledger, journal = make_ledger(CARD)
    old = ResourceName("example.com/region-" + "0" * 32)
    resources = journal.snapshot.resources | {old: True}
    journal = MemoryJournal(replace(journal.snapshot, resources=resources))
    ledger = reopened(journal, CARD)
    assert make_lists(ledger).resources() == (WHOLE, REGIONS)


def test_a_resource_of_another_prefix_is_registered_while_its_devices_are_owned() -> None:
    old = ResourceName(REGIONS.replace(PREFIX, "fpga.example.com"))
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    (allocation,) = ledger.allocations.values()
    snapshot = replace(
        journal.snapshot,
        resources={old: True},
        allocations={P0: replace(allocation, resource=old)},
    )
    ledger = reopened(MemoryJournal(snapshot), CARD)
    lists = make_lists(ledger)
    assert lists.resources() == tuple(sorted((old, WHOLE, REGIONS)))
    assert shown(lists, old) == {P0: True}
    assert P0 not in shown(lists)
    assert shown(lists, WHOLE) == {}
    ledger.device_plugin.allocate(old, [P0])  # kubelet's next container of the pod
    ledger.device_plugin.release([P0])
    assert shown(lists, old) == {}
    assert P0 in shown(lists)
    assert make_lists(reopened(MemoryJournal(journal.snapshot), CARD)).resources() == (
        WHOLE,
        REGIONS,
    )


def test_listeners_hear_which_card_changed_until_they_stop() -> None:
    ledger, _ = make_ledger(CARD, OTHER)
    heard: list[object] = []
    stop = ledger.subscribe(heard.append)
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    assert set(heard) == {CARD.id}
    heard.clear()
    found(ledger, replace(OTHER, interface_id=OTHER_INTERFACE))
    assert set(heard) == {None, OTHER.id}
    stop()
    heard.clear()
    ledger.device_plugin.release([P0])
    assert heard == []


def test_a_list_that_did_not_change_is_the_same_object() -> None:
    ledger, lists = two()
    before = lists.devices(WHOLE)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.release([P0])
    ledger.device_plugin.prestart_seen([P0])
    assert lists.devices(WHOLE) == before
    again = lists.devices(REGIONS)
    ledger.device_plugin.kubelet_found("life 2")
    assert lists.devices(REGIONS) is again


@pytest.mark.parametrize("advertise", [Advertise.BOTH, Advertise.REGION, Advertise.WHOLE])
def test_a_card_with_its_vendors_name_is_listed_by_it_whatever_is_advertised(
    advertise: Advertise,
) -> None:
    """That name is the only one that it has."""
    name = ResourceName("amd.com/xilinx_u55c_gen3x16_xdma_base_3-0")
    journal = MemoryJournal()
    ledger = Ledger(
        prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot", shells=True
    )
    found(ledger, replace(CARD, vendor_resource=name))
    scrub(ledger, CARD)
    lists = make_lists(ledger, advertise=advertise)
    assert lists.resources() == (name,)
    assert shown(lists, name) == {P0: True, P1: True}
