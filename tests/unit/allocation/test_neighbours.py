"""Cards that are cabled to rings: who asks for several gets some that lie beside each other."""

import pytest
from doubles.cards import make_card
from ledger_support import make_ledger, make_lists, scrub

from fpga_plugin.allocation.preferred import preferred
from fpga_plugin.ids import CardId, DeviceId
from fpga_plugin.settings.values import parse_neighbours

CARDS = [make_card(number, nodes=(number,), numa_node=number % 2) for number in range(6)]
A, B, C, D, E, F = (CardId(card.id) for card in CARDS)
RING = (A, C, E, F)


def choose(
    size: int, *, available: str = "ABCDEF", must: str = "", rings=(RING,), unhealthy: str = ""
) -> str:
    """Which cards' only regions are taken, by letters."""
    ledger, _ = make_ledger(*CARDS)
    for card, letter in zip(CARDS, "ABCDEF", strict=True):
        scrub(ledger, card)
        if letter in unhealthy:
            ledger.work.dirty([card.regions[0].id], "not clean")
    ids = {letter: f"{card.id}-p0" for card, letter in zip(CARDS, "ABCDEF", strict=True)}
    lists = make_lists(ledger)
    (resource,) = (r for r in lists.resources() if "/region-" in r)
    chosen = preferred(
        ledger,
        lists.devices(resource),
        [ids[letter] for letter in available],
        [ids[letter] for letter in must],
        size,
        rings=rings,
    )
    letters = {DeviceId(device): letter for letter, device in ids.items()}
    return "".join(sorted(letters[DeviceId(device)] for device in chosen))


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        (2, {}, "AC"),
        (2, {"available": "ABDF"}, "AF"),  # the last is the first one's neighbour
        (2, {"available": "AE"}, "AE"),
        (2, {"available": "ABCEF", "must": "E"}, "CE"),
        (2, {"available": "ABEF", "must": "E"}, "EF"),
        (3, {}, "ACE"),
        (3, {"available": "ABEF"}, "AEF"),
        (4, {}, "ACEF"),
        (2, {"available": "BCDEF", "unhealthy": "C"}, "EF"),
    ],
)
def test_cards_in_a_row_are_taken_and_the_shortest_row_of_the_smallest_ids(
    size: int, options: dict[str, str], expected: str
):
    assert choose(size, **options) == expected


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (5, {}),
        (2, {"must": "B"}),
        (2, {"available": "ABDE"}),
        (2, {"available": "BD"}),
    ],
)
def test_where_no_row_has_enough_it_is_as_without_a_table(size: int, options: dict[str, str]):
    assert choose(size, **options) == choose(size, rings=(), **options)


def test_of_two_rings_the_one_that_has_enough():
    assert choose(2, rings=((A, D), (C, F)), available="ACF") == "CF"
    assert choose(3, rings=((A, D), (C, E, F))) == "CEF"


def test_a_row_that_comes_later_in_the_table_and_has_smaller_ids_is_taken():
    assert choose(2, rings=((E, F, A, C),)) == "AC"
    assert choose(2, rings=((E, F), (A, C))) == "AC"


TWO = [make_card(number, nodes=(2 * number, 2 * number + 1)) for number in range(6)]
A0, A1, B0, B1, C0, C1, *_ = (f"{card.id}-p{port}" for card in TWO for port in (0, 1))


def choose_of_two(
    size: int,
    *,
    free: str = "ABCDEF",
    must: tuple[str, ...] = (),
    owned: tuple[str, ...] = (),
    rings=(RING,),
) -> list[str]:
    """Which regions are taken, of cards with two regions each."""
    ledger, _ = make_ledger(*TWO)
    lists = make_lists(ledger)
    (resource,) = (r for r in lists.resources() if "/region-" in r)
    for device in owned:
        ledger.device_plugin.allocate(resource, [device])
    ids = [
        r.id
        for card, letter in zip(TWO, "ABCDEF", strict=True)
        if letter in free
        for r in card.regions
    ]
    available = [device for device in ids if device not in owned]
    return preferred(ledger, lists.devices(resource), available, must, size, rings=rings)


def test_a_region_of_a_row_whose_cards_are_all_taken_already():
    assert choose_of_two(3, must=(A0, C0)) == [A0, C0, A1]


def test_of_cards_with_several_regions_the_smallest_ids_of_the_smallest_row():
    assert choose_of_two(3) == [A0, A1, C0]


def test_where_a_whole_ring_begins_in_the_table_says_nothing():
    assert choose_of_two(3, rings=((C, A),)) == [A0, A1, C0]


def test_what_one_card_can_give_is_chosen_as_without_a_table():
    """A row is for who uses the cables: here the card whose other regions are owned is used up."""
    assert choose_of_two(1, owned=(B0,)) == [B1]
    assert choose_of_two(2, must=(B1,), owned=(B0,)) == [B1, A0]


def test_the_setting_names_each_card_once():
    assert parse_neighbours("0000:10:00.0+0000:12:00.0, 0000:14:00.0+0000:15:00.0") == (
        ("0000-10-00.0", "0000-12-00.0"),
        ("0000-14-00.0", "0000-15-00.0"),
    )
    for text in ("0000:10:00.0", "0000:10:00.0+0000:10:00.0", "a+b", "0000:10:00.0+", ""):
        with pytest.raises(ValueError, match=r"card|ring|address|item"):
            parse_neighbours(text)
