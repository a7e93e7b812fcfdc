"""Debug holds: what keeps a region for debugging, and what ends it."""

from dataclasses import replace

import pytest
from doubles.cards import AFU, REGIONS, WHOLE, device, make_card
from ledger_support import found, hold, make_ledger, make_lists, reopened, scrub, shown

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal.records import Condition, DebugHold
from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import RegionId
from fpga_plugin.kubernetes.names import PodUid

CARD = make_card(1)
P0, P1 = device(CARD, 0), device(CARD, 1)
R0 = RegionId(P0)
POD = PodUid("0f1c2d3e-0000-4000-8000-000000000001")
ASKED = DebugHold(RegionId(""), POD, "tenant", "compress", ("app",), 600.0)


def started(debug=ASKED, at=P0, uid=POD, ledger=None):
    """A pod's container runs on a region; it asked for that."""
    journal = None
    if ledger is None:
        ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [at])
    ledger.device_plugin.prestart_seen([at])
    ledger.device_plugin.bind_pod([at], uid)
    ledger.work.working([RegionId(at)])
    ledger.work.programmed(RegionId(at), AFU)
    ledger.device_plugin.started([ledger.allocations[at]], replace(debug, pod=uid))
    return ledger, journal


def kept(until=1000.0):
    ledger, journal = started()
    ledger.device_plugin.release([P0])
    hold(ledger, R0, failure="container 'app' ended with exit code 3")
    hold(ledger, R0, until=until)
    return ledger, journal


def test_it_is_nobodys_and_given_to_nobody():
    ledger, _ = kept()
    assert ledger.region_allocation(R0) is None
    assert ledger.record(R0).condition is Condition.DIRTY
    assert shown(make_lists(ledger), REGIONS) == {P0: False, P1: True}
    assert shown(make_lists(ledger), WHOLE) == {CARD.id: False}
    for resource, name in ((REGIONS, P0), (WHOLE, CARD.id)):
        with pytest.raises(RefusedError, match="p0 is kept for debugging as pod tenant/compress"):
            ledger.device_plugin.allocate(resource, [name])
    assert ledger.others_owned(CARD.id, [RegionId(P1)])  # its card's memory is left alone
    assert not ledger.others_owned(CARD.id, [R0])


def test_it_outlives_the_plugin_but_not_the_boot():
    _, journal = kept()
    ledger = reopened(journal, CARD)
    assert debug_holds.in_force(ledger, R0) is not None
    ledger = reopened(journal, CARD, boot_id="another")
    assert debug_holds.in_force(ledger, R0) is None
    assert R0 not in journal.snapshot.debug_holds


@pytest.mark.parametrize(
    "ends",
    [
        lambda ledger: ledger.work.working([R0]),
        lambda ledger: ledger.hardware.card_gone(CARD.id),
        lambda ledger: ledger.device_plugin.adopt(REGIONS, P0, POD, {}),
        lambda ledger: debug_holds.end(ledger, [R0]),
    ],
    ids=["work", "card gone", "an owner that kubelet knows", "its end"],
)
def test_what_ends_it(ends):
    ledger, journal = kept()
    ends(ledger)
    assert debug_holds.in_force(ledger, R0) is None
    assert not journal.snapshot.debug_holds


def test_before_it_is_decided_another_owner_may_have_it():
    ledger, journal = started()
    ledger.device_plugin.release([P0])
    ledger.device_plugin.allocate(REGIONS, [P0])
    assert not journal.snapshot.debug_holds


def test_before_it_is_decided_its_card_is_left_as_it_is():
    ledger, _ = started()
    assert not debug_holds.on(ledger, CARD.id)
    ledger.device_plugin.release([P0])
    assert debug_holds.in_force(ledger, R0) is None
    assert [one.region for one in debug_holds.on(ledger, CARD.id)] == [R0]  # nobody rebinds it
    assert ledger.others_owned(CARD.id, [RegionId(P1)])  # nor clears its memory
    assert not debug_holds.on(ledger, CARD.id, but=[R0])
    debug_holds.end(ledger, [R0])
    assert not ledger.others_owned(CARD.id, [RegionId(P1)])


@pytest.mark.parametrize(
    "goes_on",
    [
        lambda ledger: ledger.device_plugin.prestart_seen([P0]),
        lambda ledger: ledger.device_plugin.poststop_seen([P0]),
        lambda ledger: ledger.device_plugin.kubelet_found("life 2"),
        lambda ledger: ledger.device_plugin.release([P0]),
    ],
    ids=["PreStart", "PostStop", "another kubelet instance", "release"],
)
def test_it_is_pending_for_as_long_as_its_allocation_goes_on_and_then(goes_on):
    ledger, journal = started()
    goes_on(ledger)
    assert debug_holds.pending(ledger, R0)
    assert R0 in journal.snapshot.debug_holds


def test_it_is_pending_or_in_force():
    ledger, _ = kept()
    assert not debug_holds.pending(ledger, R0)
    assert not debug_holds.pending(ledger, RegionId(P1))


def test_without_a_hold_nothing_is_written_of_one():
    ledger, journal = started()
    debug_holds.end(ledger, [R0])
    writes = journal.writes
    ledger.device_plugin.started([ledger.allocations[P0]])
    debug_holds.end(ledger, [R0])
    assert journal.writes == writes


def test_the_start_of_another_container_forgets_what_failed():
    ledger, _ = started()
    hold(ledger, R0, failure="container 'app' ended with exit code 3")
    ledger.device_plugin.started([ledger.allocations[P0]], ASKED)
    assert not ledger.debug_holds[R0].failure
    ledger.device_plugin.started([ledger.allocations[P0]])
    assert not ledger.debug_holds


def test_an_owner_that_a_journal_shows_wins():
    _, journal = started()
    journal.snapshot.debug_holds[R0] = replace(ASKED, region=R0, until=1000.0)
    ledger = reopened(journal, CARD)
    assert not ledger.debug_holds
    assert ledger.region_allocation(R0) is not None


def test_a_scrub_does_not_touch_it_and_a_found_card_is_the_same():
    ledger, _ = kept()
    found(ledger, CARD)
    assert debug_holds.in_force(ledger, R0) is not None
    debug_holds.end(ledger, [R0])
    scrub(ledger, CARD)
    assert shown(make_lists(ledger), REGIONS) == {P0: True, P1: True}
