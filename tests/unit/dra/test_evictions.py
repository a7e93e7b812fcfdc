"""Pods whose claim's device failed before they started, and which nobody evicts."""

import re
from dataclasses import replace

import pytest
from doubles.cards import AFU, device, make_card
from ledger_support import make_ledger
from test_dra_steps import POD, A, owner

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.dra.claim import ResourceClaim
from fpga_plugin.dra.evictions import PATIENCE, Evictions
from fpga_plugin.ids import RegionId
from fpga_plugin.kubernetes.names import PodName

CARD = make_card()
P0 = device(CARD, 0)
BY_CLAIM = ResourceClaim(owner(A, P0))
BY_LIMITS = replace(BY_CLAIM, pod=(PodName("n", "p"), POD))


def failed() -> Ledger:
    """A claim's region that failed while it was prepared."""
    ledger, _ = make_ledger(CARD)
    ledger.dra.take(owner(A, P0), [POD])
    ledger.work.working([RegionId(P0)])
    ledger.work.faulted(RegionId(P0), "PR failed")
    return ledger


class Clock:
    """Moved by hand."""

    now = 500.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("claim", "why"), [(BY_LIMITS, "asks by limits .*#141290"), (BY_CLAIM, "tolerates")]
)
def test_a_pod_that_is_still_asked_for_was_not_evicted(claim: ResourceClaim, why: str) -> None:
    waits = Evictions(failed(), clock := Clock())
    assert waits.overdue(claim) == ""
    clock.now += PATIENCE - 0.1
    assert waits.overdue(claim) == "", "its eviction may be under way"
    clock.now = 500 + PATIENCE
    assert waits.overdue(claim)
    clock.now = 575
    said = waits.overdue(claim)
    assert re.search(rf"{P0} failed .* after 75 s nobody .*{why}.*delete", said)


def test_nobody_is_to_be_evicted_whose_device_is_well_or_was_started() -> None:
    ledger, _ = make_ledger(CARD)
    ledger.dra.take(owner(A, P0), [POD])
    waits = Evictions(ledger, clock := Clock())
    assert waits.overdue(BY_LIMITS) == ""
    clock.now = 600
    assert waits.overdue(BY_LIMITS) == ""
    ledger.work.working([RegionId(P0)])
    ledger.work.programmed(RegionId(P0), AFU)
    ledger.dra.prepared(A, {})
    ledger.work.faulted(RegionId(P0), "thermal: too hot")
    clock.now = 700
    assert waits.overdue(BY_LIMITS) == ""
    clock.now = 800
    assert waits.overdue(BY_LIMITS) == ""


def test_a_device_that_was_well_in_between_begins_again() -> None:
    ledger = failed()
    waits = Evictions(ledger, clock := Clock())
    assert waits.overdue(BY_CLAIM) == ""
    assert waits.overdue(replace(BY_CLAIM, owner=owner(A))) == ""
    clock.now += PATIENCE
    assert waits.overdue(BY_CLAIM) == ""
    clock.now += PATIENCE
    assert f"after {PATIENCE:.0f} s" in waits.overdue(BY_CLAIM)
