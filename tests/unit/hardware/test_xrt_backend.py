"""What the XRT backend remembers of a card, and what it leaves as it is."""

import errno
import threading
from pathlib import Path

import pytest
from doubles.alveo import CARD, CARD_2, Rig

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.model import Card, CardProblem
from fpga_plugin.hardware.xrt import defs

EIO = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig.with_a_clock(tmp_path, monkeypatch)


def test_a_scan_has_each_card_or_its_problem(rig: Rig):
    rig.kernel.instead["0000:10:00.0/recovery"] = "1"
    found = rig.backend.scan()
    assert set(found.cards) == {CARD_2}
    assert set(found.problems) == {CARD}


def test_of_a_card_that_is_being_reset_nothing_is_read(rig: Rig):
    card = rig.card()

    def look(what: str) -> None:
        before = len(rig.kernel.read_paths)
        assert rig.backend.scan_card(CARD) == card
        assert len(rig.kernel.read_paths) == before

    rig.kernel.before = look
    rig.backend.reset(card)


def test_a_look_that_a_reset_overtook_shows_the_card_as_it_was(rig: Rig):
    """What it has read is a card that vanishes."""
    card = rig.card()
    begun, looked = threading.Event(), threading.Event()

    def wait(what: str) -> None:
        if what.endswith("shutdown=0"):
            begun.set()
            assert looked.wait(30)

    resets = threading.Thread(target=rig.backend.reset, args=(card,))
    read = rig.kernel.inner.read

    def overtaken(path: str) -> str:
        if path.endswith("0.0/ready") and not resets.ident:
            rig.kernel.before = wait
            resets.start()
            assert begun.wait(30)
        return read(path)

    rig.kernel.inner.read = overtaken  # type: ignore[method-assign]  # of this test's own kernel
    try:
        assert rig.backend.scan_card(CARD) == card
    finally:
        looked.set()
        resets.join(30)
    assert resets.ident, "no reset began while the card was read"
    assert rig.card() == card


def test_no_card_is_reset_while_another_is_put_online(rig: Rig):
    """Else each might get the node of the other."""
    held: list[bool] = []
    rig.kernel.before = lambda what: held.append(rig.backend._one_reset.locked())
    rig.board().put(shutdown=True)
    rig.backend.bind(CARD)
    assert held
    assert all(held)
    assert not rig.backend._one_reset.locked()


def test_a_card_that_is_online_is_left_as_it_is(rig: Rig):
    rig.backend.bind(CARD)
    assert not rig.kernel.written


def test_a_card_that_has_no_driver_cannot_be_put_online(rig: Rig):
    rig.board().unbind(user=True)
    with pytest.raises(HardwareError, match="cannot be put online"):
        rig.backend.bind(CARD)
    assert not rig.kernel.written


def test_a_mask_that_is_there_is_not_set_again(rig: Rig):
    rig.program()
    rig.kernel.written.clear()
    for left in (False, True):
        assert rig.backend.guard(rig.card(), left=left) == ""
    assert not rig.kernel.written


def test_what_a_tenant_may_load_by_is_no_mask_of_another_card(rig: Rig):
    rig.program()
    rig.board().set_mask(hex(defs.MASK_WHILE_LOADING))
    rig.clock.sleep(1)
    assert rig.backend.guard(rig.card(), left=True) == ""
    assert "0x4220" in rig.backend.guard(rig.card(), left=False)
    assert rig.board().copy == defs.MASK


def test_a_copy_that_differs_from_the_mask_is_no_guard(rig: Rig):
    rig.program()
    rig.kernel.instead["0.0/config_mailbox_channel_disable"] = hex(defs.MASK_WHILE_LOADING)
    assert rig.backend.health(rig.card()).unguarded


def counted(rig: Rig, errors: int) -> bool:
    """Whether a card that has counted so many fatal errors is out of service."""
    rig.kernel.instead["0.0/aer_dev_fatal"] = f"TOTAL_ERR_FATAL {errors}"
    return bool(rig.backend.health(rig.card()).failed)


def test_errors_that_the_operator_accepts_count_no_more(rig: Rig):
    assert not counted(rig, 0)
    assert counted(rig, 1)
    rig.backend.accept_errors(CARD)
    assert not counted(rig, 1)
    assert counted(rig, 2)


@pytest.mark.parametrize("goes", [True, False])
def test_a_card_that_was_away_begins_with_no_errors(rig: Rig, *, goes: bool):
    assert not counted(rig, 0)
    assert counted(rig, 1)
    if goes:
        rig.kernel.instead["0.0/vendor"] = EIO
        assert rig.backend.scan_card(CARD) is None
    else:
        rig.kernel.instead["0.0/recovery"] = "1"
        assert isinstance(rig.backend.scan_card(CARD), CardProblem)
    rig.kernel.instead.clear()
    assert isinstance(rig.backend.scan_card(CARD), Card)
    assert not counted(rig, 1)


def test_a_number_that_cannot_be_read_is_an_error(rig: Rig):
    region = rig.region()
    rig.kernel.instead["renderD128/dev"] = EIO
    with pytest.raises(HardwareError, match=r"number of region .* cannot be read \(Input/output"):
        rig.backend.numbers(region)
