"""What kubelet is sent of devices, one fact after the other.

The table of docs/architecture.md as a whole is in test_lists.py and test_ledger.py.
"""

from dataclasses import replace

import pytest
from doubles.cards import AFU, INTERFACE, PREFIX, REGIONS, TOO_HOT, WHOLE, device, make_card
from ledger_support import MemoryJournal, doubt_owners, found, make_ledger, make_lists, scrub, shown

from fpga_plugin.allocation.exposure import ExposurePolicy
from fpga_plugin.allocation.journal.records import Change
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.lists import DeviceLists
from fpga_plugin.allocation.names import function_name
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import Alias, DeviceId, RegionId
from fpga_plugin.kubernetes.names import ResourceName
from fpga_plugin.settings.settings import Advertise, Exposure

CARD = make_card(1, numa_node=1, clears_memory=True)
OTHER = make_card(2, nodes=(2, 3), numa_node=0)
P0, P1, BOARD = device(CARD, 0), device(CARD, 1), device(CARD)
R0, R1 = RegionId(P0), RegionId(P1)
FUNCTION = function_name(PREFIX, CARD.interface_id, AFU)
ALIAS = Alias("board")
OF_ALIAS = (ResourceName(f"{PREFIX}/fpga-board"), ResourceName(f"{PREFIX}/region-board"))


@pytest.fixture
def ledger() -> Ledger:
    return make_ledger(CARD, OTHER)[0]


@pytest.fixture
def lists(ledger: Ledger) -> DeviceLists:
    made = make_lists(ledger)
    assert all(shown(made).values()), "listed once, so that each test sees a change of the list"
    assert all(shown(made, WHOLE).values())
    return made


def serving(journal: MemoryJournal, card: Card = CARD) -> tuple[Ledger, DeviceLists]:
    """A node that hands over the functions of its regions, each of which was reset."""
    ledger = Ledger(
        prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot", functions=True
    )
    found(ledger, card, AFU)
    for region in card.regions:
        if ledger.region_allocation(region.id) is None:
            ledger.work.working([region.id])
            ledger.work.clean(region.id, AFU, blank=False)
    return ledger, make_lists(ledger, advertise=Advertise.AF)


# ------------------------------------------------------------------ resources


def test_a_resource_of_this_life_stays_registered_under_a_new_alias_too(
    ledger: Ledger, lists: DeviceLists
) -> None:
    """Kubelet forgets an endpoint that goes, and fails the pods that it still admits by it."""
    assert lists.resources() == (WHOLE, REGIONS)
    ledger.naming.call_interfaces({INTERFACE: ALIAS})
    assert lists.resources() == tuple(sorted((*OF_ALIAS, WHOLE, REGIONS)))
    assert make_lists(ledger).resources() == OF_ALIAS, "after a restart the old names are over"


def test_an_alias_that_nothing_explains_any_more_is_not_registered() -> None:
    nobodys = ResourceName(f"{PREFIX}/region-lost")
    ledger, _ = make_ledger(CARD, snapshot=Change(resources={nobodys: True}))
    assert ledger.naming.resource(nobodys) is None
    assert make_lists(ledger).resources() == (WHOLE, REGIONS)


def test_the_only_resource_of_a_node_is_registered() -> None:
    _, lists = serving(MemoryJournal())
    assert lists.resources() == (FUNCTION,)


def test_the_resource_of_an_allocation_is_registered_whatever_else_the_journal_lost() -> None:
    """Its pod is admitted again by this name."""
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    alone = MemoryJournal(Change(allocations=dict(journal.snapshot.allocations)))
    again = Ledger(prefix=PREFIX, journal=alone, snapshot=alone.snapshot, boot_id="boot")
    assert not again.resources
    assert make_lists(again).resources() == (REGIONS,)


def test_a_function_has_no_alias_and_is_registered_where_its_card_has_one() -> None:
    ledger, _ = serving(MemoryJournal())
    ledger.naming.call_interfaces({INTERFACE: ALIAS})
    assert FUNCTION in make_lists(ledger, advertise=Advertise.AF).resources()


# ------------------------------------------------------------------ owned devices


def test_an_owned_device_is_told_with_its_numa_node(ledger: Ledger, lists: DeviceLists) -> None:
    """Else the topology manager would admit its pod by another node after kubelet's restart."""
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert [(d.id, d.numa_node) for d in lists.devices(REGIONS)][:2] == [(P0, 1), (P1, 1)]


def test_while_a_card_is_rebound_none_of_its_devices_is_healthy_owned_or_not(
    ledger: Ledger, lists: DeviceLists
) -> None:
    """Its nodes are about to go: kubelet must start no container on them."""
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.hardware.set_rebinding(CARD.id, rebinding=True)
    assert (shown(lists)[P0], shown(lists)[P1]) == (False, False)
    ledger.hardware.set_rebinding(CARD.id, rebinding=False)
    assert (shown(lists)[P0], shown(lists)[P1]) == (True, True)


def test_an_owned_region_that_is_gone_from_its_card_is_unhealthy_and_its_neighbour_is_not(
    ledger: Ledger, lists: DeviceLists
) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.allocate(REGIONS, [P1])
    found(ledger, replace(CARD, regions=CARD.regions[:1]))
    assert (shown(lists)[P0], shown(lists)[P1]) == (True, False)


def test_one_broken_region_makes_an_owned_card_unhealthy(
    ledger: Ledger, lists: DeviceLists
) -> None:
    ledger.device_plugin.allocate(WHOLE, [BOARD])
    ledger.hardware.set_failing(CARD.id, {R1: TOO_HOT})
    assert shown(lists, WHOLE)[BOARD] is False


# ------------------------------------------------------------------ free devices


def test_of_a_drained_card_only_what_is_owned_is_listed(ledger: Ledger, lists: DeviceLists) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.hardware.set_drained(CARD.id, drained=True)
    assert P0 in shown(lists)
    assert P1 not in shown(lists)
    ledger.device_plugin.release([P0])
    assert not {P0, P1} & shown(lists).keys()
    assert BOARD not in shown(lists, WHOLE)


def test_of_a_card_that_went_no_device_stays_on_a_list(ledger: Ledger, lists: DeviceLists) -> None:
    ledger.hardware.card_gone(CARD.id)
    assert set(shown(lists)) == {device(OTHER, 0), device(OTHER, 1)}
    assert set(shown(lists, WHOLE)) == {device(OTHER)}


def test_what_nobody_can_tell_the_owners_of_is_not_healthy() -> None:
    """Kubelet's records may name an owner that the journal lost (invariant 1)."""
    _, journal = make_ledger(CARD)
    doubt_owners(journal)
    again = Ledger(prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot")
    again.hardware.card_found(CARD, dict.fromkeys((R0, R1), None), None)
    scrub(again, CARD)
    lists = make_lists(again)
    assert shown(lists) == {P0: False, P1: False}
    assert shown(lists, WHOLE) == {BOARD: False}
    again.reconciled([CARD.id])
    assert shown(lists) == {P0: True, P1: True}
    assert shown(lists, WHOLE) == {BOARD: True}


# ------------------------------------------------------------------ functions


def test_of_a_card_that_a_pod_has_as_a_whole_no_function_is_given_to_another() -> None:
    """The allocation is of an earlier setting; its pod still has every region (invariant 1)."""
    before, journal = make_ledger(CARD)
    before.device_plugin.allocate(WHOLE, [BOARD])
    _, lists = serving(journal)
    assert shown(lists, WHOLE) == {BOARD: True}
    assert shown(lists, FUNCTION) == {}


def test_what_the_operator_gives_to_nobody_by_region_is_no_healthy_function() -> None:
    ledger, lists = serving(MemoryJournal(), replace(CARD, clears_memory=False))
    assert shown(lists, FUNCTION) == {P0: True, P1: True}
    ledger.obstacles.exposure = ExposurePolicy(uncleared_memory=Exposure.REFUSE_REGIONS)
    assert shown(make_lists(ledger, advertise=Advertise.AF), FUNCTION) == {P0: False, P1: False}


# ------------------------------------------------------------------ what is kept


def test_a_list_is_made_anew_only_if_it_says_something_else(
    ledger: Ledger, lists: DeviceLists
) -> None:
    """Of a thousand devices each comparison would cost, and each new list a message to kubelet."""
    regions, cards = lists.devices(REGIONS), lists.devices(WHOLE)
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert lists.devices(REGIONS) is regions, "an owned device is as Healthy as a free one"
    assert lists.devices(WHOLE) != cards


def test_only_the_cards_that_changed_are_looked_at_again(
    ledger: Ledger, lists: DeviceLists, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[DeviceId] = []
    allocations_on = ledger.allocations_on
    monkeypatch.setattr(
        ledger, "allocations_on", lambda c: looked_at.append(c) or allocations_on(c)
    )
    lists.devices(REGIONS)
    assert looked_at == []
    ledger.hardware.set_foreign({OTHER.id: "x"})
    looked_at.clear()  # what the change itself asked
    lists.devices(REGIONS)
    assert set(looked_at) == {OTHER.id}
