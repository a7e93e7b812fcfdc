"""What is said of cards whose regions are not served because of what is on them."""

from dataclasses import replace

import structlog
from doubles.cards import AFU, BLANK, PREFIX, make_card
from ledger_support import MemoryJournal, found, make_ledger

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.cards.functions import FunctionNews, note
from fpga_plugin.hardware.model import Card

CARD = make_card(1)
FIXED = replace(make_card(2, nodes=(2,), reprogrammable=False), description="a board")
R0, R1 = (region.id for region in CARD.regions)
IMAGE, NO_PR = "an earlier tenant's image is no function", "card cannot be reprogrammed"


def functions_ledger(journal: MemoryJournal) -> Ledger:
    """A node that advertises what its regions hold, after a restart."""
    ledger = Ledger(
        prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot", functions=True
    )
    for card in (CARD, FIXED):
        found(ledger, card, AFU)
    return ledger


def told(news: FunctionNews, *cards: Card) -> list[tuple[object, ...]]:
    with structlog.testing.capture_logs() as lines:
        for card in cards:
            news.found(card)
    return [(line["event"], line["card"], line.get("regions")) for line in lines]


def test_an_owners_image_is_no_function_and_that_is_said_until_it_is_blanked() -> None:
    """Whoever programmed it may have put anything there (invariants 2 and 4)."""
    before, journal = make_ledger(CARD, FIXED)
    before.work.working([R0], image=AFU)
    ledger = functions_ledger(journal)
    news = FunctionNews(ledger)
    assert told(news, CARD, CARD, FIXED) == [(IMAGE, CARD.id, [R0])]
    assert note(ledger, CARD).startswith(f"{R0} not advertised: an owner's image")
    assert note(ledger, FIXED) == ""
    ledger.work.working([R1], image=AFU)
    assert told(news, CARD) == [(IMAGE, CARD.id, [R0, R1])]
    for region in (R0, R1):
        ledger.work.working([region])
        ledger.work.clean(region, BLANK, blank=True)
    assert told(news, CARD) == []
    assert note(ledger, CARD) == ""
    ledger.work.working([R0], image=AFU)
    assert told(news, CARD) == [(IMAGE, CARD.id, [R0])], "it is news again"


def test_of_regions_that_are_programmed_only_a_card_that_cannot_be_is_told() -> None:
    ledger, _ = make_ledger(CARD, FIXED)
    ledger.work.working([R0], image=AFU)
    assert note(ledger, CARD) == ""
    assert note(ledger, FIXED).startswith("cannot be reprogrammed: ")
    assert told(FunctionNews(ledger), CARD, FIXED, FIXED) == [(NO_PR, FIXED.id, None)]
