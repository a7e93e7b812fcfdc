"""What an owner loads that may load its own is nobody else's doing."""

from dataclasses import replace
from pathlib import Path

import pytest
from doubles.alveo import OTHER, Rig
from doubles.cards import AFU, BLANK, REGIONS, make_card
from ledger_support import make_ledger, scrub, start

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.hardware.model import Card
from fpga_plugin.hardware.xrt import defs
from fpga_plugin.hardware.xrt.backend import XrtBackend
from fpga_plugin.ids import DeviceId

CARD = replace(make_card(nodes=(0,)), owner_loads=True)
R0 = CARD.regions[0].id


def own(ledger: Ledger) -> None:
    ledger.device_plugin.allocate(REGIONS, [DeviceId(R0)])


def clean_ledger(card: Card = CARD) -> Ledger:
    ledger, _ = make_ledger(card)
    scrub(ledger, card)
    return ledger


@pytest.mark.parametrize(("loads", "expected"), [(True, True), (False, False)])
def test_what_a_running_owner_loaded_is_no_change_by_another(*, loads: bool, expected: bool):
    ledger = clean_ledger(replace(CARD, owner_loads=loads))
    own(ledger)
    assert not ledger.hardware.as_left(R0, AFU), "it has not begun"
    start(ledger, DeviceId(R0), program=False)
    assert ledger.hardware.as_left(R0, BLANK)
    assert ledger.hardware.as_left(R0, AFU) is expected
    assert ledger.left_to_owner(R0) is loads


def test_a_free_region_is_left_to_nobody():
    ledger = clean_ledger()
    assert not ledger.left_to_owner(R0)
    assert not ledger.hardware.as_left(R0, AFU)


def test_a_programmed_one_is_not_left_to_its_owner():
    ledger = clean_ledger()
    own(ledger)
    start(ledger, DeviceId(R0))
    assert not ledger.left_to_owner(R0)
    assert not ledger.hardware.as_left(R0, BLANK)


def test_a_region_that_is_left_lets_loads_through_and_no_reset(tmp_path: Path):
    rig = Rig(tmp_path)
    rig.backend = XrtBackend(rig.kernel, tenant_loads=True)
    assert rig.card().owner_loads
    rig.program()
    with rig.backend.open_port(rig.card(), rig.region()) as port:
        port.leave()
    assert rig.board().copy == defs.MASK_WHILE_LOADING
    assert not defs.MASK_WHILE_LOADING & defs.LOADS
    assert defs.MASK_WHILE_LOADING & defs.HOT_RESET
    assert rig.backend.guard(rig.card(), left=True) == ""
    assert rig.board().copy == defs.MASK_WHILE_LOADING
    rig.board().set_mask("0x0")
    assert rig.backend.guard(rig.card(), left=True)
    assert rig.board().copy == defs.MASK_WHILE_LOADING
    assert rig.backend.guard(rig.card(), left=False)
    assert rig.board().copy == defs.MASK


def test_by_default_nobody_loads_his_own(tmp_path: Path):
    assert not Rig(tmp_path).card().owner_loads
    assert OTHER
