"""Which dirty regions of a card that is reset between owners get that reset."""

from types import SimpleNamespace

import pytest
from doubles.cards import make_card

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.cards.recovery import Recovery

REGION = make_card().regions[0].id
DIRTY, USED, UNUSED = Condition.DIRTY, SimpleNamespace(used=True), SimpleNamespace(used=False)


@pytest.mark.parametrize(
    ("resets", "condition", "allocation", "left", "due"),
    [
        (True, DIRTY, None, [], True),
        (True, DIRTY, UNUSED, [], True),
        (True, DIRTY, USED, [], False),
        (True, DIRTY, USED, ["former"], True),
        (True, Condition.BLANK, None, [], False),
        (False, DIRTY, None, [], False),
    ],
)
def test_a_reset_comes_between_owners_only(resets, condition, allocation, left, due) -> None:
    ledger = SimpleNamespace(
        record=lambda _: SimpleNamespace(condition=condition),
        region_allocation=lambda _: allocation,
        tenancies=SimpleNamespace(left=lambda _: left),
    )
    recovery = SimpleNamespace(_ledger=ledger)
    card = SimpleNamespace(resets=resets)
    assert Recovery.due_for_reset(recovery, card, [REGION]) == ({REGION} if due else frozenset())
