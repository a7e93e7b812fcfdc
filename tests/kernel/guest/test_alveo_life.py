"""The life of an allocation on AMD's own drivers, and what tenants and others do to it."""

import errno
import signal
import time
from collections.abc import Iterator

import alveo
import pytest
from alveo import ALL, A, Alveo, B, fails, holder, until
from alveo_node import BLANK, CARDS, REGIONS, AlveoNode, dirt, dirty, request
from daemon_support import HEALTHY, UNHEALTHY, Refused

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-alveo")


@pytest.fixture(scope="module")
def cards() -> Iterator[list[Alveo]]:
    found = alveo.install(cards=2)
    for card in found:
        card.fresh()
    yield found
    alveo.remove()


@pytest.fixture(scope="module")
def node(cards: list[Alveo]) -> Iterator[AlveoNode]:
    """One daemon for all: a start of it takes long here. Each test gives back what it has."""
    with AlveoNode(*cards) as it:
        yield it.up()


@pytest.fixture
def card(cards: list[Alveo]) -> Alveo:
    return cards[0]


def region(card: Alveo) -> str:
    return f"{card.id}-p0"


def begin(node: AlveoNode, card: Alveo) -> None:
    clean(node, card)
    node.kubelet.allocate(region(card), resource=REGIONS)
    node.prestart(region(card), request(A))


def give_back(node: AlveoNode, card: Alveo) -> None:
    """The allocation ends; the PostStop of its last container comes after that.

    One that never came would be waited for: the next allocation's first would count as this one's.
    """
    node.kubelet.deallocate(region(card), resource=REGIONS)
    node.kubelet.poststop(region(card), resource=REGIONS)


def end(node: AlveoNode, card: Alveo) -> None:
    """The allocation ends, and the card is clean before it is offered again."""
    resets = card.resets
    dirty(card)
    give_back(node, card)
    clean(node, card)
    assert card.resets > resets


def clean(node: AlveoNode, card: Alveo) -> None:
    node.kubelet.until_health(card.id, HEALTHY, CARDS)
    node.kubelet.until_health(region(card), HEALTHY, REGIONS)
    blank(card)


def blank(card: Alveo) -> None:
    assert (card.uuid, card.image, card.mask) == (BLANK, BLANK, ALL)
    assert dirt(card) == 0


def stop(node: AlveoNode, card: Alveo) -> None:
    """A container ends and its allocation goes on: the region is scrubbed, without a reset."""
    mark, resets = node.plugin.mark, card.resets
    node.kubelet.poststop(region(card), resource=REGIONS)
    node.plugin.until_logged("region scrubbed", mark, region=region(card))
    blank(card)
    assert card.resets == resets


def test_free_cards_are_blank_masked_and_healthy(node: AlveoNode, cards: list[Alveo]):
    assert node.kubelet.listed(REGIONS) == {region(card): HEALTHY for card in cards}
    assert node.kubelet.listed(CARDS) == {card.id: HEALTHY for card in cards}
    for card in cards:
        clean(node, card)


def test_an_allocation_from_its_begin_to_its_end(node: AlveoNode, cards: list[Alveo]):
    card, other = cards
    kubelet = node.kubelet
    answer = kubelet.allocate(region(card), resource=REGIONS)
    assert [(d.container_path, d.host_path, d.permissions) for d in answer.devices] == [
        (card.node, card.node, "rw")
    ]
    assert card.image == BLANK  # Allocate touches nothing
    node.prestart(region(card), request(A))
    assert (card.uuid, card.image, card.mask) == (A, A, ALL)
    assert other.image == BLANK
    with card.opened() as tenant:
        card.context(tenant, alveo.OPEN, A)
        dirty(card)
        card.context(tenant, alveo.CLOSE, A)
    stop(node, card)
    node.prestart(region(card), request(B))
    assert (card.uuid, card.image) == (B, B)
    end(node, card)


def test_a_tenant_can_neither_load_nor_reset(node: AlveoNode, card: Alveo):
    begin(node, card)
    resets = card.resets
    with fails(errno.ETIMEDOUT):
        card.load(B)
    with fails(errno.ETIMEDOUT):
        card.load(A, force=True)
    with fails(errno.ENOTSUP):
        card.hot_reset()
    assert (card.image, card.resets) == (A, resets)
    end(node, card)


def test_a_tenant_who_holds_the_node_past_his_allocation_is_ended(node: AlveoNode, card: Alveo):
    begin(node, card)
    with holder(card) as tenant:
        end(node, card)
        assert tenant.wait(alveo.PATIENCE) == -signal.SIGBUS


def test_one_who_ignores_that_keeps_the_card_until_he_ends(node: AlveoNode, card: Alveo):
    begin(node, card)
    dirty(card)
    with holder(card, stubborn=True) as tenant:
        give_back(node, card)
        node.kubelet.until_health(region(card), UNHEALTHY, REGIONS)
        time.sleep(5)
        assert node.kubelet.listed(REGIONS)[region(card)] == UNHEALTHY
        assert card.image == A  # and nobody has touched it
        tenant.kill()
    clean(node, card)


def test_what_pf0_programs_behind_our_back_is_gone_after_the_end(node: AlveoNode, card: Alveo):
    begin(node, card)
    card.mgmt_load(B)
    assert (card.uuid, card.image) == (A, B)
    stop(node, card)
    node.prestart(region(card), request(A))
    assert (card.uuid, card.image) == (A, A)
    end(node, card)


def test_of_an_owned_card_the_mask_is_set_again_when_xclmgmt_is_bound_again(
    node: AlveoNode, card: Alveo
):
    begin(node, card)
    card.unbind("xclmgmt")
    card.bind("xclmgmt")
    until(lambda: card.mask == ALL, "the mask is set again")
    until(lambda: card.tells(alveo.DISABLE, hex(ALL)), "PF1 has heard of it")
    assert node.kubelet.listed(REGIONS)[region(card)] == HEALTHY
    end(node, card)


def test_a_load_that_fails_is_told_and_the_next_owner_finds_a_clean_card(
    node: AlveoNode, card: Alveo
):
    node.kubelet.allocate(region(card), resource=REGIONS)
    card.set("stuck", 1)
    with pytest.raises(Refused, match="ETIMEDOUT"):
        node.prestart(region(card), request(A))
    card.set("stuck", 0)
    end(node, card)
    begin(node, card)
    assert card.image == A
    end(node, card)


def renumbered(node: AlveoNode, card: Alveo) -> bool:
    """Whether a start is refused by that reason, which the plugin knows once it has looked."""
    with pytest.raises(Refused) as refused:
        node.prestart(region(card), request(A))
    return "device numbering changed" in refused.value.message


def test_cards_that_swapped_their_nodes_are_given_to_nobody_by_the_old_grant(
    node: AlveoNode, cards: list[Alveo]
):
    for card in cards:
        begin(node, card)
    before = [card.node for card in cards]
    # It would mask resets again at once.
    node.plugin.process.send_signal(signal.SIGSTOP)
    try:
        for card in cards:
            card.set_mask(0)
            card.shut_down()
        for card in reversed(cards):
            card.come_back()
    finally:
        node.plugin.process.send_signal(signal.SIGCONT)
    assert [card.node for card in cards] == before[::-1]
    for card in cards:
        until(lambda card=card: renumbered(node, card), "the plugin says why")  # type: ignore[misc]  # bound now
        dirty(card)
    give_back(node, cards[0])
    time.sleep(5)
    listed = node.kubelet.listed(REGIONS)[region(cards[0])]
    assert (listed, cards[0].image) == (UNHEALTHY, A), "the other card's pod may open its node"
    give_back(node, cards[1])
    for card in cards:
        clean(node, card)
