"""What the ledger's state answers to questions about tenancies, cards that are away and numbers."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from doubles.cards import PREFIX, REGIONS, device, make_card
from doubles.journal import NoJournal
from ledger_support import make_ledger, start, tenancy
from test_dra_steps import POD

from fpga_plugin.allocation.journal.records import (
    Allocation,
    Change,
    Fact,
    Tenancy,
    TenancyKey,
)
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.ids import CardId

CARD = make_card(1, nodes=(0, 1), major=240, fme=236)
OTHER = make_card(2, nodes=(2, 3))
P0, P1 = device(CARD, 0), device(CARD, 1)
R0, R1 = (region.id for region in CARD.regions)
R2 = OTHER.regions[0].id


@pytest.fixture
def ledger() -> Ledger:
    return make_ledger(CARD)[0]


def told(ledger: Ledger, change: Change) -> list[CardId | None]:
    """What listeners are told of a change."""
    cards: list[CardId | None] = []
    ledger.subscribe(cards.append)
    ledger.commit(change)
    return cards


# ------------------------------------------------------------------ who hears of what


def test_that_claims_are_unknown_concerns_more_than_one_card(ledger: Ledger) -> None:
    assert told(ledger, Change(facts={Fact.RESOURCE_CLAIMS: "the journal was lost"})) == [None]


def test_a_tenancy_concerns_the_card_of_its_region_though_no_card_shows_its_nodes(
    ledger: Ledger,
) -> None:
    assert told(ledger, tenancy(R0, "pod-b", "/dev/nowhere")) == [CARD.id]


# ------------------------------------------------------------------ numbers of allocations


def test_a_number_is_new_though_the_journal_lost_the_tenancies_of_the_allocation_that_has_it() -> (
    None
):
    had = Allocation(P0, REGIONS, {R0: CARD.regions[0].grant}, number=7)
    ledger = Ledger(
        prefix=PREFIX,
        journal=NoJournal(),
        snapshot=Change(allocations={P0: had}),
        boot_id="boot",
    )
    assert ledger.next_number() > had.number


def test_a_tenancy_is_of_the_allocation_with_its_number_alone(ledger: Ledger) -> None:
    (had,) = ledger.device_plugin.allocate(REGIONS, [P0])
    assert ledger.allocation_of(TenancyKey(R0, had.number, POD)) == had
    assert ledger.allocation_of(TenancyKey(R0, had.number + 1, POD)) is None
    assert ledger.allocation_of(TenancyKey(R1, had.number, POD)) is None


# ------------------------------------------------------------------ who uses, who has left


def test_a_pod_that_is_not_known_yet_is_no_user_and_one_that_left_is_none_any_more(
    ledger: Ledger,
) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert ledger.pods_of([P0]) == frozenset()
    ledger.device_plugin.bind_pod([P0], POD)
    assert ledger.pods_of([P0]) == {POD}
    (one,) = ledger.tenancies.values()
    ledger.commit(Change(tenancies={one.key: replace(one, left=True)}))
    assert ledger.pods_of([P0]) == frozenset()


def test_only_tenancies_that_are_over_are_left_on_a_card(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    start(ledger, P0)
    assert ledger.left_on(CARD.id) == []
    ledger.device_plugin.release([P0])
    assert ledger.left_on(CARD.id) == list(ledger.tenancies.values())
    assert ledger.left_on(CARD.id, but=[R0]) == []


def test_who_has_another_regions_node_is_left_on_the_card_that_shows_it_once_it_is_over(
    ledger: Ledger,
) -> None:
    node = CARD.regions[0].grant.nodes[0]
    ledger.commit(tenancy(R2, "runs", node, left=False) | tenancy(R2, "left", node, allocation=9))
    assert [one.pod for one in ledger.left_on(CARD.id)] == ["left"]
    assert ledger.left_on(CARD.id, but=[R0]) == []


# ------------------------------------------------------------------ ways to regions


def having(*ways: str, region: str = R0) -> Tenancy:
    nodes = tuple(way for way in ways if way.startswith("/"))
    numbers = tuple(way for way in ways if not way.startswith("/"))
    return Tenancy(TenancyKey(region, 7, POD), nodes, used=True, numbers=numbers)


@pytest.mark.parametrize(
    ("ways", "regions"),
    [
        (["/dev/dfl-port.0"], set()),  # its own
        (["/dev/dfl-port.1"], {R1}),
        (["240:1"], {R1}),
        (["236:1"], {R0, R1}),  # the card's own node: who has it programs any region
        (["/dev/dfl-port.7", "240:7", "236:7"], set()),
    ],
)
def test_nodes_reach_the_regions_that_they_lead_to_now(
    ledger: Ledger, ways: list[str], regions: Iterable[str]
) -> None:
    assert ledger.reached(having(*ways)) == regions


def test_who_has_a_node_of_a_card_that_is_away_is_a_stranger_to_its_region_all_the_same(
    ledger: Ledger,
) -> None:
    ledger.commit(tenancy(R1, "pod-b", "/dev/dfl-port.0"))
    ledger.hardware.card_gone(CARD.id)
    assert [one.pod for one in ledger.strangers(CARD.regions[0])] == ["pod-b"]


# ------------------------------------------------------------------ what the owner loads


@pytest.mark.parametrize("loads", [True, False])
def test_a_region_is_left_to_its_owner_while_its_card_is_there_and_allows_that(
    *, loads: bool
) -> None:
    card = replace(CARD, owner_loads=loads)
    ledger, _ = make_ledger(card)
    assert not ledger.left_to_owner(R0), "nobody has it"
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert ledger.left_to_owner(R0) is loads
    ledger.hardware.card_gone(card.id)
    assert not ledger.left_to_owner(R0)
