"""GetPreferredAllocation against every choice there is."""

import itertools
from dataclasses import dataclass

import pytest
from doubles.cards import REGIONS, WHOLE, device, make_card
from hypothesis import given
from hypothesis import strategies as st
from ledger_support import make_ledger, make_lists, scrub, start

from fpga_plugin.allocation.journal.records import CardMode
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.preferred import preferred
from fpga_plugin.ids import DeviceId, device_order
from fpga_plugin.kubernetes.names import ResourceName


@dataclass
class Node:
    """A node with cards; the devices of a resource as kubelet sees them."""

    ledger: Ledger
    resource: ResourceName = REGIONS

    def listed(self):
        return make_lists(self.ledger).devices(self.resource)

    def ask(self, available, size, must=()):
        return preferred(self.ledger, self.listed(), available, must, size)

    def all(self) -> list[str]:
        return [d.id for d in self.listed()]


def node(*cards, resource: ResourceName = REGIONS) -> Node:
    ledger, _ = make_ledger(*cards)
    return Node(ledger, resource)


ONE = make_card(1, nodes=(0, 1, 2))
TWO = make_card(2, nodes=(3, 4, 5))
FAR = make_card(3, nodes=(6, 7, 8), numa_node=1)


def test_without_any_other_reason_the_smallest_ids_of_one_card_are_taken() -> None:
    there = node(ONE, TWO)
    assert there.ask(reversed(there.all()), 2) == [device(ONE, 0), device(ONE, 1)]


def test_a_partitioned_card_is_used_up_before_another_is_broken() -> None:
    there = node(ONE, TWO)
    there.ledger.device_plugin.allocate(REGIONS, [device(TWO, 1)])
    free = [d for d in there.all() if d != device(TWO, 1)]
    assert there.ask(free, 1) == [device(TWO, 0)]
    assert there.ask(free, 3) == [device(ONE, 0), device(TWO, 0), device(TWO, 2)]


def test_one_numa_node_counts_more_than_a_partitioned_card() -> None:
    there = node(ONE, TWO, FAR)
    there.ledger.device_plugin.allocate(REGIONS, [device(FAR, 0)])
    free = [d for d in there.all() if d != device(FAR, 0)]
    assert there.ask(free, 3) == [device(ONE, 0), device(ONE, 1), device(ONE, 2)]
    assert there.ask(free, 2) == [device(FAR, 1), device(FAR, 2)]


def test_what_must_be_included_comes_first_and_draws_the_rest_to_its_card() -> None:
    there = node(ONE, TWO, FAR)
    must = [device(FAR, 2)]
    assert there.ask(there.all(), 3, must) == [*must, device(FAR, 0), device(FAR, 1)]


def test_clean_devices_are_taken_before_unhealthy_and_owned_ones() -> None:
    there = node(ONE, TWO)
    there.ledger.work.dirty([ONE.regions[0].id], "x")
    there.ledger.device_plugin.allocate(REGIONS, [device(ONE, 1)])
    start(there.ledger, device(ONE, 1))
    assert there.ask(there.all(), 2) == [device(ONE, 2), device(TWO, 0)]
    every = there.ask(there.all(), 6)
    assert every[-2:] == [device(ONE, 1), device(ONE, 0)]


def test_whole_cards_prefer_one_numa_node() -> None:
    there = node(ONE, FAR, TWO, resource=WHOLE)
    assert there.ask(there.all(), 2) == [device(ONE), device(TWO)]
    assert there.ask(there.all(), 2, [device(FAR)]) == [device(FAR), device(ONE)]


def test_two_small_cards_that_suffice_beat_a_larger_one_with_larger_ids() -> None:
    small, other = make_card(1, nodes=(0, 1)), make_card(2, nodes=(2, 3, 4))
    large = make_card(3, nodes=(5, 6, 7, 8))
    there = node(small, other, large)
    assert {card_of(DeviceId(d)) for d in there.ask(there.all(), 5)} == {small.id, other.id}
    assert {card_of(DeviceId(d)) for d in there.ask(there.all(), 4)} == {large.id}


@pytest.mark.parametrize("size", [0, -1, -(2**31)])
def test_a_size_of_nothing_gives_nothing(size: int) -> None:
    there = node(ONE)
    assert there.ask(there.all(), size, [device(ONE, 1)]) == []


def test_more_than_there_is_gives_all_there_is() -> None:
    there = node(ONE)
    assert sorted(there.ask(there.all(), 2**31 - 1)) == sorted(there.all())


def test_more_that_must_be_included_than_fits_gives_its_first() -> None:
    there = node(ONE)
    must = [device(ONE, 2), device(ONE, 0)]
    assert there.ask(there.all(), 1, must) == must[:1]


def test_unknown_ids_come_last_and_are_no_error() -> None:
    there = node(ONE)
    strange = ["", "zzz", "0000-ff-00.0-p0", "a" * 5000]
    assert there.ask([*strange, device(ONE, 0)], 2) == [device(ONE, 0), ""]
    assert there.ask(strange, 9) == sorted(strange)
    assert there.ask(there.all(), 2, ["zzz"]) == ["zzz", device(ONE, 0)]


def test_what_is_named_twice_is_given_once() -> None:
    there = node(ONE)
    twice = [device(ONE, 0), device(ONE, 0), device(ONE, 1)]
    assert there.ask(twice, 3) == twice[1:]
    assert there.ask(twice, 3, [device(ONE, 1), device(ONE, 1)]) == [twice[2], twice[0]]


def test_what_must_be_included_is_given_unhealthy_and_unavailable_too() -> None:
    there = node(ONE)
    there.ledger.work.faulted(ONE.regions[0].id, "x")
    assert there.ask([device(ONE, 1)], 2, [device(ONE, 0)]) == [device(ONE, 0), device(ONE, 1)]


def test_a_card_that_is_gone_is_as_unknown_as_any_other_id() -> None:
    there = node(ONE, TWO)
    every = there.all()
    there.ledger.hardware.card_gone(ONE.id)
    assert there.ask(every, 1) == [device(TWO, 0)]
    assert there.ask([device(ONE, 0)], 1) == [device(ONE, 0)]


# Each of the next seven broke without a fast test noticing (`make mutants`).


def test_what_is_taken_of_the_clean_ones_draws_the_others_to_its_numa_node() -> None:
    there = node(ONE, FAR)
    free = {device(FAR, 0)}
    for region in (r.id for card in (ONE, FAR) for r in card.regions):
        if region not in free:
            there.ledger.work.dirty([region], "x")
    assert there.ask(there.all(), 2) == [device(FAR, 0), device(FAR, 1)]


def test_of_numa_nodes_that_are_as_good_the_one_with_the_smallest_ids_is_taken() -> None:
    there = node(ONE, FAR, resource=WHOLE)
    assert there.ask(there.all(), 1) == [device(ONE)]
    assert there.ask(reversed(there.all()), 1) == [device(ONE)]


def test_the_numa_node_of_what_must_be_included_counts_more_than_a_partitioned_card() -> None:
    large = make_card(3, nodes=range(6, 16), numa_node=1)
    there = node(ONE, TWO, large)
    there.ledger.device_plugin.allocate(REGIONS, [device(large, 0)])
    free = [d for d in there.all() if d != device(large, 0)]
    answer = there.ask(free, 5, [device(ONE, 0)])
    assert answer == [device(card, port) for card in (ONE, TWO) for port in range(3)][:5]


def test_where_the_numa_node_of_what_must_be_included_is_too_small_another_is_added() -> None:
    farther = make_card(4, nodes=range(9, 12), numa_node=2)
    there = node(ONE, FAR, farther)
    of_one, of_far = ([device(card, port) for port in range(3)] for card in (ONE, FAR))
    assert there.ask(there.all(), 5, of_one[:1]) == [*of_one, *of_far[:2]]
    there.ledger.device_plugin.allocate(REGIONS, [device(farther, 0)])
    free = [d for d in there.all() if d != device(farther, 0)]
    assert there.ask(free, 6, of_one[:1]) == [*of_one, *of_far], "and no third one"


def test_the_card_of_what_must_be_included_is_partitioned_already() -> None:
    there = node(ONE, TWO)
    there.ledger.device_plugin.allocate(REGIONS, [device(TWO, 0)])
    free = [d for d in there.all() if d != device(TWO, 0)]
    assert there.ask(free, 2, [device(ONE, 0)]) == [device(ONE, 0), device(ONE, 1)]
    other = node(ONE, TWO)
    other.ledger.device_plugin.allocate(REGIONS, [device(ONE, 0)])
    free = [d for d in other.all() if d != device(ONE, 0)]
    assert other.ask(free, 2, [device(TWO, 0)]) == [device(TWO, 0), device(TWO, 1)]


def test_no_card_is_opened_for_a_smaller_id_if_a_later_one_gives_more() -> None:
    small, later = make_card(2, nodes=(3,)), make_card(3, nodes=(4, 5))
    first = make_card(1, nodes=(0, 1))
    there = node(first, small, later)
    whole = [device(card, port) for card in (first, later) for port in (0, 1)]
    assert there.ask(there.all(), 4) == whole


def test_the_card_of_what_must_be_included_gives_its_regions_once() -> None:
    large = make_card(1, nodes=range(4))
    small = [make_card(n, nodes=(2 * n, 2 * n + 1)) for n in (2, 3, 4)]
    there = node(large, *small)
    there.ledger.device_plugin.allocate(REGIONS, [device(card, 0) for card in small])
    free = [d for d in there.all() if d not in there.ledger.allocations]
    of_large = [device(large, port) for port in range(4)]
    answer = there.ask(free, 6, of_large[:1])
    assert answer == [*of_large, device(small[0], 1), device(small[1], 1)]


# ------------------------------------------------------------------ every choice there is


@st.composite
def questions(draw):
    """A node of few devices in any state, and a question about it."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda s: sum(s) <= 8))
    cards = []
    first = 0
    for number, size in enumerate(sizes):
        numa = draw(st.sampled_from([None, 0, 1]))
        cards.append(make_card(number, nodes=range(first, first + size), numa_node=numa))
        first += size
    ledger, _ = make_ledger(*cards)
    regions = [DeviceId(r.id) for card in cards for r in card.regions]
    state = draw(st.lists(st.sampled_from("...odf"), min_size=first, max_size=first))
    for region, how in zip(regions, state, strict=True):
        if how == "o":
            ledger.device_plugin.allocate(REGIONS, [region])
        elif how == "d":
            ledger.work.dirty([region], "x")
        elif how == "f":
            ledger.work.faulted(region, "x")
    available = draw(st.lists(st.sampled_from([*regions, DeviceId("else")]), unique=True))
    must = draw(st.lists(st.sampled_from(available), unique=True, max_size=3)) if available else []
    return ledger, available, must, draw(st.integers(0, 9))


def cost(ledger: Ledger, listed, must, choice):
    """The order of criteria, as the module reports it."""
    known = {d.id: d for d in listed}
    devices = [known[d] for d in choice if d in known]
    required = {card_of(d) for d in must if d in known}
    cards = {card_of(d.id) for d in devices}
    return (
        sum(d not in known for d in choice),
        sum(not d.healthy for d in devices),
        sum(d.id in ledger.allocations for d in devices),
        len({d.numa_node for d in devices}),
        -sum(
            card_of(d.id) in required or ledger.mode(card_of(d.id)) is CardMode.PARTITIONED
            for d in devices
        ),
        len(cards),
        sorted(device_order(d.id) for d in devices),
    )


@given(questions())
def test_the_choice_is_the_best_of_all_there_are(question) -> None:
    ledger, available, must, size = question
    listed = make_lists(ledger).devices(REGIONS)
    answer = preferred(ledger, listed, available, must, size)
    kept = must[:size]
    assert answer[: len(kept)] == kept
    assert len(set(answer)) == len(answer) == min(size, len(set(available)))
    others = [d for d in available if d not in kept]
    every = [
        (*kept, *more) for more in itertools.combinations(others, max(len(answer) - len(kept), 0))
    ]
    best = min(cost(ledger, listed, kept, choice) for choice in every)
    assert cost(ledger, listed, kept, answer) == best


@given(
    available=st.lists(st.text(max_size=20), max_size=6),
    must=st.lists(st.text(max_size=20), max_size=6),
    size=st.integers(),
)
def test_nothing_that_kubelet_could_send_raises(available, must, size) -> None:
    there = node(ONE, TWO)
    scrub(there.ledger, ONE)
    answer = there.ask([*available, *there.all()], min(size, 100), must)
    assert len(answer) <= max(size, 0)
    assert set(answer) <= {*available, *must, *there.all()}


def test_the_smallest_ids_decide_between_numa_nodes_whichever_cards_are_partitioned() -> None:
    """Each node has a card that is partitioned and one that is not; the smallest id is on FIRST."""
    first, second = make_card(1, nodes=(0,)), make_card(2, nodes=(1, 2), numa_node=1)
    third, fourth = make_card(3, nodes=(3,), numa_node=1), make_card(4, nodes=(4, 5))
    there = node(first, second, third, fourth)
    owned = [device(second, 1), device(fourth, 1)]
    for each in owned:
        there.ledger.device_plugin.allocate(REGIONS, [each])
    free = [each for each in there.all() if each not in owned]
    assert there.ask(free, 2) == [device(first, 0), device(fourth, 0)]
