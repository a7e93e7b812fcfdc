"""Device numbers: a container opens by them what it was given, whatever path leads there now.

A module that is loaded again has another major, and an IOMMU group another minor: the number of a
living container's node may be another region's by then, or an FME's (invariant 10).
"""

from dataclasses import replace

import pytest
from doubles.cards import REGIONS, device, make_card
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
from msgspec import UNSET
from test_dra_steps import A, prepare

from fpga_plugin.allocation.journal.records import Tenancy
from fpga_plugin.allocation.journal.rows import statements
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import PodUid

POD, NEXT = PodUid("pod-a"), PodUid("pod-b")
CARD, OTHER = make_card(1, major=240), make_card(2, nodes=(2, 3), major=240)
P0, P1, P2 = device(CARD, 0), device(CARD, 1), device(OTHER, 0)
R0, R1, R2 = CARD.regions[0], CARD.regions[1], OTHER.regions[0]


def own(ledger: Ledger, one: DeviceId, pod: PodUid = POD) -> None:
    ledger.device_plugin.allocate(REGIONS, [one])
    ledger.device_plugin.bind_pod([one], pod)
    start(ledger, one)


def only(ledger: Ledger) -> Tenancy:
    (one,) = ledger.tenancies.values()
    return one


def renumbered(numbers: dict[str, str]):
    """OTHER, whose first region's node has these."""
    first, second = OTHER.regions
    return replace(OTHER, regions=(replace(first, numbers=numbers), second))


def listed(ledger: Ledger, one: DeviceId) -> bool:
    return shown(make_lists(ledger)).get(one, False)


def test_a_region_with_a_living_pods_number_is_given_to_nobody() -> None:
    """The module was loaded again: OTHER's node has the number that CARD's had."""
    ledger, _ = make_ledger(CARD, OTHER)
    own(ledger, P0)
    assert listed(ledger, P2)
    ledger.hardware.card_gone(CARD.id)
    found(ledger, renumbered({"/dev/dfl-port.2": "240:0"}))
    assert ledger.strangers(R2)
    assert not listed(ledger, P2)
    with pytest.raises(RefusedError, match="is also open to the pod"):
        ledger.device_plugin.allocate(REGIONS, [P2])
    ledger.device_plugin.release([P0])
    with pytest.raises(RefusedError, match="and may still run"):
        ledger.device_plugin.allocate(REGIONS, [P2])
    ledger.work.end_tenancies(ledger.tenancies.left(R0.id))
    scrub(ledger, OTHER)
    assert ledger.device_plugin.allocate(REGIONS, [P2])


def test_a_card_whose_fme_has_a_living_pods_number_is_given_to_nobody() -> None:
    """Who opens the FME programs every region, that which he was given as well."""
    ledger, _ = make_ledger(CARD, OTHER)
    own(ledger, P0)
    found(ledger, make_card(1, major=239, fme=240))  # the FME of card 1 is 240:1
    assert not ledger.strangers(R0)
    own(ledger, P1, NEXT)
    found(ledger, make_card(1, major=238, fme=239))  # and now 239:1, which P1's node had
    for region in (R0, R1):
        assert {one.pod for one in ledger.strangers(region)} == {NEXT}
    with pytest.raises(RefusedError, match="is also open to the pod that was given"):
        ledger.obstacles.check_grants(ledger.allocations[P1])


def test_a_pod_whose_container_starts_again_has_the_number_of_before_and_that_of_now() -> None:
    """Kubelet gives it the path, and the runtime what the path leads to: it is its own region."""
    ledger, _ = make_ledger(CARD, OTHER)
    own(ledger, P0)
    found(ledger, make_card(1, major=239))
    ledger.obstacles.check_grants(ledger.allocations[P0])
    assert only(ledger).numbers == ("239:0", "240:0")


def test_a_pod_that_is_done_gets_no_new_number() -> None:
    ledger, _ = make_ledger(CARD)
    own(ledger, P0)
    ledger.device_plugin.release([P0])
    found(ledger, make_card(1, major=239))
    assert only(ledger).numbers == ("240:0",)


@pytest.mark.parametrize("left", [False, True])
def test_a_row_without_numbers_is_read_and_gets_those_that_its_nodes_have(*, left: bool) -> None:
    """Of the plugin of before: its pods run on, and their containers start again."""
    ledger, journal = make_ledger(make_card(1))
    own(ledger, P0)
    if left:
        ledger.device_plugin.release([P0])
    assert only(ledger).numbers is UNSET
    rows = [row for _, of in statements(journal.snapshot) for row in of]
    assert not any("numbers" in value for *_, value in rows)
    again = reopened(journal, CARD)
    assert only(again).numbers == ("240:0",)
    if not left:
        again.obstacles.check_grants(again.allocations[P0])


def test_in_another_boot_a_pod_has_the_numbers_of_this_one() -> None:
    """No process of before runs, and majors move."""
    ledger, journal = make_ledger(CARD)
    own(ledger, P0)
    after = reopened(journal, make_card(1, major=239), boot_id="next")
    assert only(after).numbers == ("239:0",)


def test_a_number_that_shows_only_when_the_region_is_held_counts_from_then_on() -> None:
    """VFIO's groups get theirs when the first function is bound: at the scrub, or the PreStart."""
    bare = renumbered({})
    ledger, _ = make_ledger(CARD, bare)
    own(ledger, P0)
    own(ledger, P2, NEXT)
    ledger.hardware.numbered({R2.id: {"/dev/dfl-port.2": "240:0"}})
    with pytest.raises(RefusedError, match="the device number of region"):
        ledger.obstacles.check_grants(ledger.allocations[P2])
    (one,) = (each for each in ledger.tenancies.values() if each.pod == NEXT)
    assert one.numbers == ("240:0",)


def test_numbers_hold_in_memory_where_they_cannot_be_written() -> None:
    journal = MemoryJournal()
    ledger = Ledger(
        prefix="fpga.intel.com", journal=journal, snapshot=journal.snapshot, boot_id="b"
    )
    ledger.device_plugin.kubelet_found("life 1")
    found(ledger, make_card(1))
    scrub(ledger, CARD)
    own(ledger, P0)
    journal.failing = 1
    with pytest.raises(Exception, match="database or disk is full"):
        ledger.hardware.numbered({R0.id: R0.numbers})
    assert only(ledger).numbers == ("240:0",)


def test_what_a_pod_had_by_another_number_stays_in_its_hands_after_a_scrub() -> None:
    ledger, _ = make_ledger(CARD)
    own(ledger, P0)
    ledger.device_plugin.release([P0])
    found(ledger, make_card(1, major=239))
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    scrub(ledger, make_card(1, major=239), 0)
    assert [one.numbers for one in ledger.tenancies.left(R0.id)] == [("240:0",)]


def test_a_prepared_resourceclaim_is_withdrawn_while_its_regions_number_is_anothers() -> None:
    """Its CDI file goes (`dra.kept`), by the same comparison."""
    ledger, _ = make_ledger(CARD, OTHER)
    own(ledger, P2)
    prepare(ledger, CARD, 0)
    assert not ledger.dra.grant_error(ledger.claim_owners[A])
    first, second = CARD.regions
    found(
        ledger,
        replace(CARD, regions=(replace(first, numbers={"/dev/dfl-port.0": "240:2"}), second)),
    )
    assert "is also open to the pod" in ledger.dra.grant_error(ledger.claim_owners[A])


def test_a_tenancys_numbers_outlive_the_plugin() -> None:
    ledger, journal = make_ledger(CARD, OTHER)
    own(ledger, P0)
    after = reopened(journal, OTHER)
    assert only(after).numbers == ("240:0",)
    found(after, renumbered({"/dev/dfl-port.2": "240:0"}))
    assert after.strangers(R2)


def test_each_node_of_a_tenancy_adds_its_number() -> None:
    card = make_card(1, nodes=((0, 1),))
    ledger, _ = make_ledger(card)
    own(ledger, device(card, 0))
    numbers = {"/dev/dfl-port.0": "240:0", "/dev/dfl-port.1": "240:1"}
    ledger.hardware.numbered({card.regions[0].id: numbers})
    assert only(ledger).numbers == ("240:0", "240:1")


def test_numbers_that_nobody_has_are_shown_all_the_same() -> None:
    """A list may differ by them: another region's pod may have one."""
    ledger, _ = make_ledger(make_card(1))
    shown_again: list[object] = []
    ledger.subscribe(shown_again.append)
    ledger.hardware.numbered({R0.id: R0.numbers})
    assert CARD.id in shown_again


def test_numbers_that_are_known_are_not_written_again() -> None:
    ledger, journal = make_ledger(CARD)
    own(ledger, P0)
    writes = journal.writes
    found(ledger, CARD)
    assert journal.writes == writes
