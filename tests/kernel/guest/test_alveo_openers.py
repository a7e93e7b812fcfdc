"""Who has an Alveo card open, and what the drivers say of it."""

import errno
import os
from collections.abc import Iterator

import alveo
import pytest
import rack
from alveo import A, Alveo, B, fails

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-alveo")


@pytest.fixture(scope="module")
def plugged() -> Iterator[Alveo]:
    (card,) = alveo.install()
    yield card
    alveo.remove()


@pytest.fixture
def card(plugged: Alveo) -> Alveo:
    plugged.fresh()
    return plugged


def clients(card: Alveo) -> list[int]:
    """Pids of those that have a context."""
    found = card.of_pf1("kdsstat").partition("client pid:")[2]
    return [int(pid) for pid in found.split()]


def test_the_node_knows_no_exclusive_open(card: Alveo):
    with fails(errno.EBUSY), card.opened(os.O_RDWR | os.O_EXCL):
        pass
    with card.opened(), card.opened(), fails(errno.EBUSY), card.opened(os.O_RDWR | os.O_EXCL):
        pass


def test_the_cards_other_node_opens_for_nobody(card: Alveo):
    (name,) = (name for name in card.nodes() if name.startswith("card"))
    with fails(errno.EPERM):
        os.close(os.open(f"/dev/dri/{name}", os.O_RDWR | os.O_CLOEXEC))


def test_the_driver_tells_of_contexts_and_not_of_openers(card: Alveo):
    with card.opened() as first, card.opened():
        assert clients(card) == []
        assert rack.openers(card.node) == 2
        with fails(errno.EINVAL, errno.ENOENT, errno.EBUSY):
            card.context(first, alveo.OPEN, B)  # not the image that is there
        assert clients(card) == []
        card.context(first, alveo.OPEN, A)
        assert clients(card) == [os.getpid()]
        card.context(first, alveo.CLOSE, A)
        assert clients(card) == []


def test_an_opener_without_a_context_stops_no_load(card: Alveo):
    with card.opened():
        card.load(B)
    assert (card.uuid, card.image) == (B, B)


def test_a_context_ends_with_its_descriptor(card: Alveo):
    with card.opened() as descriptor:
        card.context(descriptor, alveo.OPEN, A)
    assert clients(card) == []
    card.load(B)
    assert card.image == B
