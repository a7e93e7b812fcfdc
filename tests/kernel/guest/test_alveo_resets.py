"""Resets of an Alveo card, and drivers that come and go."""

import signal
import time
from collections.abc import Iterator

import alveo
import pytest
from alveo import A, Alveo, B, holder, until

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-alveo")


@pytest.fixture(scope="module")
def plugged() -> Iterator[list[Alveo]]:
    yield alveo.install(cards=2)
    alveo.remove()


@pytest.fixture
def cards(plugged: list[Alveo]) -> list[Alveo]:
    for card in plugged:
        card.fresh()
    return plugged


@pytest.fixture
def card(cards: list[Alveo]) -> Alveo:
    return cards[0]


def test_two_cards_are_two(cards: list[Alveo]):
    first, second = cards
    first.load(B)
    assert [(card.uuid, card.image) for card in cards] == [(B, B), (A, A)]
    first.set_mask(alveo.ALL)
    assert second.mask == 0
    assert first.node != second.node
    assert first.mgmt_node != second.mgmt_node


def test_a_shutdown_resets_the_card_and_leaves_no_uuid(card: Alveo):
    before = card.resets
    card.shut_down()
    assert card.resets > before
    assert card.nodes() == []
    time.sleep(2)
    assert card.nodes() == []  # until it is told to come back
    card.come_back()
    assert card.uuid in {None, alveo.NO_UUID}
    card.load(B)
    assert (card.uuid, card.image) == (B, B)


def test_a_shutdown_ends_who_holds_the_node(card: Alveo):
    with holder(card) as tenant:
        card.shut_down()
        assert tenant.wait(alveo.PATIENCE) == -signal.SIGBUS
    card.come_back()
    card.load(B)
    assert card.uuid == B


def test_a_holder_that_ignores_sigbus_keeps_the_reset_back_until_it_ends(card: Alveo):
    before = card.resets
    with holder(card, stubborn=True) as tenant:
        (card.pf1 / "shutdown").write_text("1")
        time.sleep(5)
        assert tenant.poll() is None
        assert card.resets == before
    until(lambda: card.resets > before, "the card is reset")
    until(lambda: card.tells("dev_offline", "0", pf0=True), "PF0 is back")
    until(lambda: not card.nodes(), "PF1 is shut down")
    card.come_back()
    card.load(B)
    assert card.uuid == B


def test_pf0s_own_reset_pf1_does_not_hear_of(card: Alveo):
    before = card.resets
    (card.pf0 / "mgmt_reset").write_text("1")
    until(lambda: card.resets > before, "the card is reset")
    until(lambda: card.tells("dev_offline", "0", pf0=True), "PF0 is back")
    assert (card.uuid, card.of_pf1("ready")) == (A, "0x1")
    card.load(B)
    assert (card.uuid, card.image) == (B, B)


def test_cards_that_come_back_in_another_order_have_each_others_nodes(cards: list[Alveo]):
    before = [card.node for card in cards]
    for card in cards:
        card.shut_down()
    for card in reversed(cards):
        card.come_back()
    assert [card.node for card in cards] == before[::-1]


def test_one_that_is_reset_alone_has_its_node_again(cards: list[Alveo]):
    before = [card.node for card in cards]
    cards[0].shut_down()
    cards[0].come_back()
    assert [card.node for card in cards] == before


def test_xclmgmt_may_be_bound_again_under_xocl(card: Alveo):
    card.unbind("xclmgmt")
    time.sleep(1)
    card.bind("xclmgmt")
    until(lambda: card.tells("ready", "1", pf0=True), "PF0 is ready")
    card.settle()
    card.load(B)
    assert (card.uuid, card.image) == (B, B)
