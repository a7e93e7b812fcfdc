"""A region that an operator programmed has no owner, and comes to nobody before a scrub."""

import asyncio
from typing import Any

import pytest
from doubles.cards import AFU, REGIONS, device, make_card
from ledger_support import found, make_ledger, make_lists, reopened, shown

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.bitstreams.id_names import Names
from fpga_plugin.cards.byhand import HandProgrammer
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.errors import (
    FpgaPluginError,
    InvalidRequestError,
    NotFinishedError,
    NotPermittedError,
    RefusedError,
    StoreUnavailableError,
)
from fpga_plugin.ids import RegionId

CARD = make_card(1)
P0 = device(CARD, 0)
R0 = RegionId(P0)


def programmed():
    ledger, journal = make_ledger(CARD)
    ledger.hardware.set_drained(CARD.id, drained=True)
    ledger.work.working([R0])
    ledger.work.programmed(R0, AFU, by_hand=True)
    return ledger, journal


def test_it_is_programmed_and_has_no_owner():
    ledger, _ = programmed()
    assert ledger.record(R0).condition is Condition.PROGRAMMED
    assert not ledger.allocations
    assert shown(make_lists(ledger), REGIONS) == {}


def test_the_end_of_the_drain_leaves_it_dirty_in_the_same_step():
    ledger, journal = programmed()
    writes = journal.writes
    ledger.hardware.set_drained(CARD.id, drained=False)
    assert journal.writes == writes + 1
    assert ledger.record(R0).condition is Condition.DIRTY
    assert shown(make_lists(ledger), REGIONS) == {P0: False, device(CARD, 1): True}


def test_a_restart_leaves_it_dirty():
    _, journal = programmed()
    ledger = reopened(journal)
    found(ledger, CARD, AFU)
    assert ledger.record(R0).condition is Condition.DIRTY


def test_an_allocation_that_kubelets_records_show_finds_it_dirty():
    ledger, _ = programmed()
    ledger.device_plugin.adopt(REGIONS, P0, None, {})
    assert ledger.record(R0).condition is Condition.DIRTY


def test_a_card_that_is_in_service_again_gets_no_image_by_hand():
    ledger, _ = make_ledger(CARD)
    ledger.hardware.set_drained(CARD.id, drained=True)
    ledger.work.working([R0])
    ledger.hardware.set_drained(CARD.id, drained=False)
    with pytest.raises(NotFinishedError):
        ledger.work.programmed(R0, AFU, by_hand=True)
    assert ledger.record(R0).condition is Condition.SCRUBBING


def test_an_owners_image_stays_when_its_card_is_drained_and_brought_back():
    ledger, _ = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.work.working([R0])
    ledger.work.programmed(R0, AFU)
    ledger.hardware.set_drained(CARD.id, drained=True)
    ledger.hardware.set_drained(CARD.id, drained=False)
    assert ledger.record(R0).condition is Condition.PROGRAMMED


@pytest.mark.parametrize("error", [StoreUnavailableError("it hangs"), NotPermittedError("broken")])
def test_a_name_that_cannot_be_looked_up_is_refused_for_that_reason(error: FpgaPluginError):
    class Store:
        async def aliases(self):
            raise error

        async def titled(self, title, interface_id):
            return ""

        async def names(self):
            return Names()

    async def program(bitstream: str) -> None:
        nothing: Any = None
        operations = CardOperations(
            ledger=make_ledger(CARD)[0],
            backend=nothing,
            blanks=nothing,
            workers=nothing,
            cgroups=nothing,
            observer=nothing,
        )
        programmer: Any = HandProgrammer(operations, Store())  # type: ignore[arg-type]
        await programmer.program("n", card=CARD.id, region="0", bitstream=bitstream)

    with pytest.raises(type(error), match=error.message):
        asyncio.run(program("gzip"))
    with pytest.raises(InvalidRequestError, match="no name of one"):
        asyncio.run(program("../x"))
    with pytest.raises(RefusedError, match="in service"):
        asyncio.run(program("a" * 32))
