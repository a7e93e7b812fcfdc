"""What AMD's drivers make of an image: program, read back, refuse, and who hears of it."""

import errno
from collections.abc import Iterator

import alveo
import pytest
from alveo import ALIEN, NO_UUID, A, Alveo, B, fails
from doubles import alveo_files

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


def test_a_card_that_was_never_programmed_has_no_uuid(plugged: Alveo):
    assert (plugged.of_pf0("ready"), plugged.of_pf1("ready")) == ("1", "0x1")
    assert [name.rstrip("0123456789") for name in plugged.nodes()] == ["card", "renderD"]
    assert plugged.uuid is None
    # One a line, and each as often as the driver met it.
    assert set(plugged.of_pf0("interface_uuids").split()) == {alveo_files.INTERFACE}
    assert plugged.of_pf0("logic_uuids") == alveo_files.LOGIC
    assert plugged.mask == 0


def test_what_was_programmed_reads_back(card: Alveo):
    assert (card.uuid, card.image) == (A, A)
    card.load(B)
    assert (card.uuid, card.image) == (B, B)


def test_the_same_uuid_is_streamed_again_only_by_force(card: Alveo):
    before = card.bursts
    card.load(A)
    assert card.bursts == before
    card.load(A, force=True)
    assert card.bursts > before
    assert (card.uuid, card.image) == (A, A)


@pytest.mark.parametrize("force", [False, True])
def test_an_image_for_another_shell_is_refused_and_changes_nothing(card: Alveo, *, force: bool):
    before = card.bursts
    with fails(errno.EINVAL):
        card.load(ALIEN, force=force)
    assert (card.uuid, card.image, card.bursts) == (A, A, before)


def test_of_a_flat_image_the_driver_programs_nothing_and_says_that_it_did(card: Alveo):
    before = card.bursts
    card.load(alveo_files.xclbin(B, mode=alveo_files.FLAT))
    assert (card.uuid, card.image, card.bursts) == (B, A, before)


def test_an_image_that_names_no_interface_is_programmed(card: Alveo):
    whole = alveo_files.xclbin(B)
    card.load(whole.replace(b"interface_uuid", b"interface_none"))
    assert (card.uuid, card.image) == (B, B)


def test_one_that_fails_leaves_no_uuid_until_another_is_programmed(card: Alveo):
    card.set("stuck", 1)
    with fails(errno.ETIMEDOUT):
        card.load(B)
    assert card.uuid == NO_UUID
    card.set("stuck", 0)
    card.load(B)
    assert (card.uuid, card.image) == (B, B)


def test_what_pf0_programs_pf1_does_not_hear_of(card: Alveo):
    card.mgmt_load(B)
    assert (card.uuid, card.image) == (A, B)
    card.load(A)  # it believes that this is there
    assert (card.uuid, card.image) == (A, B)
    card.load(A, force=True)
    assert (card.uuid, card.image) == (A, A)
