"""A step while it is made: it sees what it has marked itself, and what its tenancies had before."""

from dataclasses import replace

import pytest
from doubles.cards import REGIONS, device, make_card
from ledger_support import found, make_ledger, scrub, start
from msgspec import UNSET
from test_dra_steps import POD

from fpga_plugin.allocation.journal.records import Condition, TenancyKey
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.step import Step

CARD = make_card(1, nodes=(0, 1), major=240)
P0 = device(CARD, 0)
R0, R1 = (region.id for region in CARD.regions)


@pytest.fixture
def ledger() -> Ledger:
    return make_ledger(CARD)[0]


@pytest.mark.parametrize(
    ("before", "marked", "spoilt"),
    [
        (Condition.FAULTED, Condition.BLANK, True),
        (Condition.BLANK, Condition.FAULTED, False),
        (Condition.PROGRAMMED, Condition.SCRUBBING, False),
    ],
)
def test_a_region_is_spoilt_by_what_the_step_has_made_of_it(
    ledger: Ledger, before: Condition, marked: Condition, *, spoilt: bool
) -> None:
    earlier = Step(ledger)
    earlier.mark([R0], before)
    earlier.commit()
    step = Step(ledger)
    step.mark([R0], marked, "so")
    step.spoil(R0, "a pod may have used it")
    assert step.record(R0) == step.change.regions[R0]
    expected = (Condition.DIRTY, "a pod may have used it") if spoilt else (marked, "so")
    assert (step.record(R0).condition, step.record(R0).reason) == expected
    assert step.record(R1).condition is Condition.BLANK, "of others it says what is so"


def test_a_pod_that_begins_again_has_the_numbers_of_before_and_those_of_now(
    ledger: Ledger,
) -> None:
    """Its processes of before are there yet: what has their number now is open to them."""
    (allocation,) = ledger.device_plugin.allocate(REGIONS, [P0])
    key = TenancyKey(R0, allocation.number, POD)
    for major, numbers in ((240, ("240:0",)), (239, ("239:0", "240:0"))):
        found(ledger, make_card(1, nodes=(0, 1), major=major))
        step = Step(ledger)
        step.begin(allocation, [POD], used=False)
        step.commit()
        assert ledger.tenancies[key].numbers == numbers
    ledger.hardware.card_gone(CARD.id)
    other = replace(allocation, number=allocation.number + 1)
    step = Step(ledger)
    step.begin(other, [POD], used=False)
    assert step.change.tenancies[replace(key, allocation=other.number)].numbers is UNSET


def test_a_release_leaves_alone_what_the_pods_node_leads_to_until_its_processes_have_ended(
    ledger: Ledger,
) -> None:
    ledger.device_plugin.allocate(REGIONS, [P0])
    ledger.device_plugin.bind_pod([P0], POD)
    start(ledger, P0)
    first, second = CARD.regions
    first = replace(first, numbers={"/dev/dfl-port.0": "240:7"})
    second = replace(second, numbers={"/dev/dfl-port.1": "240:0"})  # which the pod's node had
    found(ledger, replace(CARD, regions=(first, second)))
    scrub(ledger, CARD, 1)
    ledger.device_plugin.release([P0])
    assert [one.pod for one in ledger.strangers(second)] == [POD]
    assert ledger.record(R1).condition is Condition.BLANK
    ledger.work.end_tenancies(ledger.tenancies.left(R0))
    assert ledger.record(R1).condition is Condition.DIRTY
