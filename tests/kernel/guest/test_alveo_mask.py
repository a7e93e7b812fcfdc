"""Who may program an Alveo card: the mask of mailbox requests that PF0 drops."""

import errno
import time
from collections.abc import Iterator

import alveo
import pytest
from alveo import ALL, LOADS, NO_UUID, RESET, TENANT_LOADS, A, Alveo, B, fails, until

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-alveo")

OLD = (1 << 8, 1 << 7 | 1 << 8)
"""Masks that older texts name."""


@pytest.fixture(scope="module")
def plugged() -> Iterator[Alveo]:
    (card,) = alveo.install()
    yield card
    alveo.remove()


@pytest.fixture
def card(plugged: Alveo) -> Alveo:
    plugged.fresh()
    return plugged


@pytest.mark.parametrize("mask", [LOADS, ALL])
def test_under_the_mask_another_load_fails_at_once_and_the_card_keeps_its_image(
    card: Alveo, mask: int
):
    card.set_mask(mask)
    begin = time.monotonic()
    with fails(errno.ETIMEDOUT):
        card.load(B)
    assert time.monotonic() - begin < 10
    assert (card.uuid, card.image) == (NO_UUID, A)  # PF1's record is gone, to the tenant's loss
    with fails(errno.ETIMEDOUT):
        card.load(A)  # so that this is a load, too
    card.set_mask(0)
    card.load(A)
    assert (card.uuid, card.image) == (A, A)


def test_under_the_mask_a_load_of_the_same_uuid_is_none_and_by_force_is_refused(card: Alveo):
    card.set_mask(ALL)
    before = card.bursts
    card.load(A)
    assert card.uuid == A
    with fails(errno.ETIMEDOUT):
        card.load(A, force=True)
    assert card.bursts == before


@pytest.mark.parametrize("mask", [*OLD, TENANT_LOADS])
def test_masks_that_leave_out_the_requests_for_slots_stop_no_load(card: Alveo, mask: int):
    card.set_mask(mask)
    card.load(B)
    assert (card.uuid, card.image) == (B, B)


def test_a_context_that_another_holds_stops_loads_and_loses_nothing(card: Alveo):
    with card.opened() as ours:
        card.context(ours, alveo.OPEN, A)
        with fails(errno.EBUSY):
            card.load(B)
        assert (card.uuid, card.image) == (A, A)
        card.context(ours, alveo.CLOSE, A)
    card.load(B)
    assert (card.uuid, card.image) == (B, B)


def test_pf0_itself_programs_under_any_mask(card: Alveo):
    card.set_mask(ALL)
    card.mgmt_load(B)
    assert (card.uuid, card.image) == (A, B)


def test_only_pf0_has_the_mask_to_write(card: Alveo):
    card.set_mask(ALL)
    with fails(errno.EACCES):
        (card.pf1 / alveo.DISABLE).write_text("0")
    assert card.mask == ALL


def test_a_tenants_reset_is_refused_if_its_bit_is_set_and_else_resets_the_card(card: Alveo):
    card.set_mask(RESET)
    before = card.resets
    with fails(errno.ENOTSUP):
        card.hot_reset()
    assert card.resets == before
    card.set_mask(LOADS)
    card.hot_reset()
    until(lambda: card.resets > before, "the card is reset")
    until(lambda: card.tells("dev_offline", "0", pf0=True), "PF0 is back")
    card.settle()


def test_a_shutdown_resets_nothing_while_resets_are_masked(card: Alveo):
    """PF1 asks PF0 for the reset, so the host's own way is shut, too; the node stays."""
    card.set_mask(RESET)
    before = card.resets
    (card.pf1 / "shutdown").write_text("1")
    until(lambda: card.tells("shutdown", "1"), "PF1 says that it is shut down")
    time.sleep(3)
    assert card.resets == before
    assert len(card.nodes()) == 2
    card.come_back()
    assert card.image == A


def test_the_mask_survives_a_reset_and_a_new_binding_of_xocl(card: Alveo):
    card.set_mask(LOADS)
    card.shut_down()
    assert card.mask == LOADS
    card.come_back()
    assert card.mask == LOADS
    card.unbind("xocl")
    card.bind("xocl")
    card.settle()
    assert card.mask == LOADS
    with fails(errno.ETIMEDOUT):
        card.load(B)


def test_the_mask_is_lost_when_xclmgmt_is_bound_again(card: Alveo):
    card.set_mask(ALL)
    card.unbind("xclmgmt")
    card.bind("xclmgmt")
    until(lambda: card.tells("ready", "1", pf0=True), "PF0 is ready")
    assert card.mask == 0
