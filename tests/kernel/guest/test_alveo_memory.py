"""The card's memory: anyone who has the render node reads and writes all of it."""

import errno
from collections.abc import Iterator

import alveo
import pytest
from alveo import ALL, A, Alveo, B, fails
from doubles import alveo_files

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-alveo")

SIZE = alveo_files.CARD_MEMORY
SECRET = b"a tenant's" * 1000


@pytest.fixture(scope="module")
def plugged() -> Iterator[Alveo]:
    (card,) = alveo.install()
    yield card
    alveo.remove()


@pytest.fixture
def card(plugged: Alveo) -> Alveo:
    plugged.fresh()
    return plugged


def held(card: Alveo, at: int, size: int) -> bytes:
    with card.memory.open("rb") as memory:
        memory.seek(at)
        return memory.read(size)


@pytest.mark.parametrize("at", [0, 4096, 12345, SIZE - len(SECRET)])
def test_what_is_written_is_in_the_cards_memory_and_is_read(card: Alveo, at: int):
    card.write_memory(at, SECRET)
    assert held(card, at, len(SECRET)) == SECRET
    assert card.read_memory(at, len(SECRET)) == SECRET


@pytest.mark.parametrize("mask", [0, ALL])
def test_it_outlives_loads_and_needs_none_and_no_mask_stops_it(card: Alveo, mask: int):
    card.write_memory(0, SECRET)
    card.load(B)
    card.set_mask(mask)
    assert card.read_memory(0, len(SECRET)) == SECRET


def test_several_mebibytes_go_in_one_request(card: Alveo):
    card.write_memory(0, b"\xff" * SIZE)
    card.write_memory(1 << 20, bytes(8 << 20))
    assert held(card, 0, SIZE).count(0) == 8 << 20


def test_beyond_the_cards_memory_a_transfer_fails(card: Alveo):
    with fails(errno.EIO):
        card.write_memory(SIZE, SECRET)
    with fails(errno.EIO):
        card.read_memory(SIZE - 1, 2)


def test_a_transfer_that_the_card_fails_is_told(card: Alveo):
    card.set("dma", 1)
    with fails(errno.EIO):
        card.write_memory(0, SECRET)
    card.set("dma", 0)
    card.write_memory(0, SECRET)


def test_banks_that_an_image_uses_are_waited_for_and_can_be_written(card: Alveo):
    card.load(alveo_files.xclbin(B, used=alveo_files.USED))
    assert (card.uuid, card.image) == (B, B)
    card.write_memory(0, SECRET)
    assert card.read_memory(0, len(SECRET)) == SECRET


def test_this_fake_card_keeps_its_memory_over_a_reset(card: Alveo):
    """A real one may not; the plugin is to count on nothing."""
    card.write_memory(0, SECRET)
    card.shut_down()
    card.come_back()
    card.load(A, force=True)
    assert card.read_memory(0, len(SECRET)) == SECRET
