"""How allocations end, and what is refused: rules of the ledger that broke unnoticed."""

import pytest
from doubles.cards import AFU, PREFIX, REGIONS, TOO_HOT, WHOLE, device, make_card
from ledger_support import MemoryJournal, former, found, gone, hold, make_ledger, scrub, start

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal.records import Change, Condition, DebugHold
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import function_name
from fpga_plugin.allocation.work_steps import BY_HAND
from fpga_plugin.errors import NotFinishedError, RefusedError
from fpga_plugin.ids import DeviceId, RegionId, device_variable
from fpga_plugin.kubernetes.names import PodUid, ResourceName

CARD = make_card(1, nodes=(0, 1))
OTHER = make_card(2, nodes=(2, 3))
P0, P1 = device(CARD, 0), device(CARD, 1)
R0, R1 = RegionId(P0), RegionId(P1)
POD_A, POD_B = PodUid("pod-a"), PodUid("pod-b")


@pytest.fixture
def ledger() -> Ledger:
    return make_ledger(CARD, OTHER)[0]


def own(ledger: Ledger, one: DeviceId, pod: PodUid, *, begun: bool = True) -> None:
    ledger.device_plugin.allocate(REGIONS, [one])
    ledger.device_plugin.bind_pod([one], pod)
    if begun:
        start(ledger, one)


def swap_nodes(ledger: Ledger) -> None:
    found(ledger, make_card(1, nodes=(1, 0)))


def condition(ledger: Ledger, region: RegionId = R0) -> Condition:
    return ledger.record(region).condition


# ------------------------------------------------------------------ who may have a card


def test_a_drained_card_is_given_to_its_owners_next_container_and_to_nobody_else(ledger: Ledger):
    own(ledger, P0, POD_A, begun=False)
    ledger.hardware.set_drained(CARD.id, drained=True)
    ledger.device_plugin.allocate(REGIONS, [P0])
    with pytest.raises(RefusedError, match="being taken out of service") as refused:
        ledger.device_plugin.allocate(REGIONS, [P1])
    assert "undrain" in refused.value.hint
    assert P1 not in ledger.allocations


def test_a_card_whose_driver_is_being_rebound_is_given_to_nobody(ledger: Ledger) -> None:
    """Its nodes are gone in an instant, and come back as others."""
    own(ledger, P0, POD_A, begun=False)
    ledger.hardware.set_rebinding(CARD.id, rebinding=True)
    for one in (P0, P1):
        with pytest.raises(RefusedError):
            ledger.device_plugin.allocate(REGIONS, [one])


def test_what_is_to_be_given_by_function_is_given_to_no_new_pod_by_region() -> None:
    journal = MemoryJournal()
    before = Ledger(prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot")
    before.device_plugin.kubelet_found("life 1")
    found(before, CARD)
    scrub(before, CARD)
    own(before, P0, POD_A)
    ledger = Ledger(
        prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot", functions=True
    )
    found(ledger, CARD)
    with pytest.raises(RefusedError, match="handed over with the functions that are on them"):
        ledger.device_plugin.allocate(REGIONS, [P0])
    assert ledger.allocations[P0].pod == POD_A, "who has it keeps it"
    ledger.device_plugin.release([P0])
    ledger.work.working([R0])
    ledger.work.clean(R0, AFU, blank=False)
    function = function_name(PREFIX, CARD.interface_id, AFU)
    for _ in range(2):  # the second pod's Allocate ends the first one's allocation
        (allocation,) = ledger.device_plugin.allocate(function, [P0])
        start(ledger, P0, program=False)
    assert allocation.resource == function
    assert ledger.ends == {"released": 1, "implied": 1}


def test_a_region_that_is_kept_for_its_operator_is_given_to_nobody(ledger: Ledger) -> None:
    """It is as its pod's failed container left it, and nothing of it was scrubbed."""
    own(ledger, P0, POD_A)
    debug = DebugHold(R0, POD_A, "space", "name", (), 600.0)
    ledger.device_plugin.started([ledger.allocations[P0]], debug)
    ledger.device_plugin.release([P0])
    hold(ledger, R0, until=1000.0)
    with pytest.raises(RefusedError, match="is kept"):
        ledger.device_plugin.allocate(REGIONS, [P0])
    debug_holds.end(ledger, [R0])
    ledger.device_plugin.allocate(REGIONS, [P0])


def test_what_is_known_of_a_kept_region_is_written_once_and_of_no_other() -> None:
    ledger, journal = make_ledger(CARD)
    own(ledger, P0, POD_A)
    ledger.device_plugin.started(
        [ledger.allocations[P0]], DebugHold(R0, POD_A, "space", "name", (), 600.0)
    )
    ledger.device_plugin.release([P0])
    writes = journal.writes
    for _ in range(2):
        hold(ledger, R0, failure="it ended with 1")
        hold(ledger, R0, until=1000.0)
    assert journal.writes == writes + 2
    assert set(journal.snapshot.debug_holds) == {R0}
    assert journal.snapshot.debug_holds[R0].failure == "it ended with 1"
    assert journal.snapshot.debug_holds[R0].until == 1000.0


@pytest.mark.parametrize(
    "how",
    ["Allocate", "kubelet's records", "his next container", "an allocation that was found late"],
)
def test_another_owner_ends_what_was_to_be_looked_at(ledger: Ledger, how: str) -> None:
    own(ledger, P0, POD_A)
    ledger.device_plugin.started(
        [ledger.allocations[P0]], DebugHold(R0, POD_A, "space", "name", (), 600.0)
    )
    assert ledger.debug_holds
    if how == "Allocate":
        ledger.device_plugin.allocate(REGIONS, [P0])
    elif how == "his next container":
        ledger.device_plugin.started([ledger.allocations[P0]])
    elif how == "an allocation that was found late":
        ledger.device_plugin.release([P0])
        assert ledger.debug_holds
        ledger.device_plugin.adopt(REGIONS, P0, POD_B, {})
    else:
        ledger.device_plugin.bind_pod(
            [P0, P1], POD_B
        )  # of P1 nobody has an allocation, and nobody gets one
        assert P1 not in ledger.allocations
    assert not ledger.debug_holds


def test_each_allocate_and_prestart_counts_so_that_an_older_list_ends_no_allocation(
    ledger: Ledger,
) -> None:
    seen = [ledger.activity[P0]]
    for step in (ledger.device_plugin.allocate, ledger.device_plugin.allocate):
        step(REGIONS, [P0])
        seen.append(ledger.activity[P0])
    ledger.device_plugin.prestart_seen([P0])
    seen.append(ledger.activity[P0])
    assert len(set(seen)) == 4


def test_no_kubelet_is_known_to_send_an_environment_before_there_is_one() -> None:
    journal = MemoryJournal()
    ledger = Ledger(prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot")
    assert not ledger.device_plugin.sends_env


# ------------------------------------------------------------------ whose region it was


def test_regions_of_two_owners_whose_nodes_were_swapped_wait_for_both(ledger: Ledger) -> None:
    """Each may have opened either region, and both allocations end in one call (invariant 7)."""
    own(ledger, P0, POD_A)
    own(ledger, P1, POD_B)
    swap_nodes(ledger)
    ledger.device_plugin.release([P0, P1])
    assert (former(ledger, R0), former(ledger, R1)) == ({POD_A}, {POD_B})
    strangers = [ledger.strangers(region) for region in ledger.cards[CARD.id].regions]
    assert [[one.pod for one in each] for each in strangers] == [[POD_B], [POD_A]]
    assert condition(ledger, R0) is condition(ledger, R1) is Condition.DIRTY


def test_a_faulted_region_that_was_reached_by_its_node_stays_faulted(ledger: Ledger) -> None:
    own(ledger, P0, POD_A)
    swap_nodes(ledger)
    ledger.work.faulted(R1, "PR failed")
    ledger.device_plugin.release([P0])
    gone(ledger, POD_A)
    assert ledger.record(R1).reason == "PR failed"
    assert condition(ledger, R1) is Condition.FAULTED


@pytest.mark.parametrize(
    ("begun", "stops", "waited_for"),
    [
        ("never", 0, set()),
        ("refused", 0, set()),  # no container starts before its PreStart succeeded
        ("refused", 1, set()),
        ("unseen", 0, {POD_A}),  # kubelet restarted: it may have begun without a PreStart
        ("blank", 0, {POD_A}),
        ("early", 0, {POD_A}),  # the PostStop was an earlier pod's: its container runs
    ],
)
def test_who_is_waited_for_before_a_region_is_scrubbed(
    ledger: Ledger, begun: str, stops: int, waited_for: set[PodUid]
) -> None:
    own(ledger, P0, POD_A, begun=False)
    if begun == "unseen":
        ledger.device_plugin.kubelet_found("life 2")
    elif begun != "never":
        ledger.device_plugin.prestart_seen([P0])
    if begun == "early":
        ledger.device_plugin.poststop_seen([P0])
    if begun in {"blank", "early"}:
        ledger.device_plugin.started([ledger.allocations[P0]])
    for _ in range(stops):
        ledger.device_plugin.poststop_seen([P0])
    ledger.device_plugin.release([P0])
    assert former(ledger, R0) == waited_for


@pytest.mark.parametrize(
    ("begun", "used"), [("refused", False), ("answered", True), ("unseen", True)]
)
def test_a_region_that_was_scrubbed_under_its_allocation_is_used_by_the_next_start(
    ledger: Ledger, begun: str, *, used: bool
) -> None:
    own(ledger, P0, POD_A)
    ledger.device_plugin.poststop_seen([P0])
    scrub(ledger, CARD, 0)
    if begun == "unseen":
        ledger.device_plugin.kubelet_found("life 2")
    else:
        ledger.device_plugin.prestart_seen([P0])
    if begun == "answered":
        ledger.device_plugin.started([ledger.allocations[P0]])
    ledger.device_plugin.release([P0])
    assert condition(ledger) is (Condition.DIRTY if used else Condition.BLANK)
    assert former(ledger, R0) == ({POD_A} if used else set())


@pytest.mark.parametrize(
    ("used", "reason", "says"),
    [
        (True, "", "its owner left"),
        (True, "PR failed", "its owner left"),
        (False, "PR failed", "PR failed"),
        (False, "", "its owner left"),
    ],
)
def test_a_dirty_region_says_why(ledger: Ledger, *, used: bool, reason: str, says: str) -> None:
    own(ledger, P0, POD_A, begun=used)
    ledger.work.dirty([R0], reason)
    ledger.device_plugin.release([P0])
    assert ledger.record(R0).reason == says


# ------------------------------------------------------------------ PostStops


def test_nobodys_region_is_not_balanced(ledger: Ledger) -> None:
    assert not ledger.device_plugin.balanced(P0)


@pytest.mark.parametrize("stays", [Condition.FAULTED, Condition.SCRUBBING])
def test_the_last_poststop_changes_nothing_about_a_region_that_is_lost_or_worked_on(
    ledger: Ledger, stays: Condition
) -> None:
    own(ledger, P0, POD_A)
    if stays is Condition.FAULTED:
        ledger.work.faulted(R0, "PR failed")
    else:
        ledger.work.working([R0])
    assert ledger.device_plugin.poststop_seen([P0]) == (P0,)
    assert condition(ledger) is stays


@pytest.mark.parametrize("by", ["adopted", "another pod's"])
def test_the_poststops_of_an_allocation_that_was_found_late_are_still_to_come(
    ledger: Ledger, by: str
) -> None:
    """Of it one PreStart was not seen, and those of earlier allocations are counted first: else one
    of them would end the count of the successor, whose container runs."""
    own(ledger, P0, POD_A)
    if by == "adopted":
        ledger.device_plugin.release([P0])
        assert ledger.pending_poststops[P0] == 1
        ledger.device_plugin.adopt(REGIONS, P0, POD_B, {})
    else:
        ledger.device_plugin.bind_pod([P0], POD_B)
    assert not ledger.pending_poststops.get(P0)
    assert ledger.allocations[P0].prestarts == 2
    ledger.device_plugin.release([P0])
    assert ledger.pending_poststops[P0] == 2


def test_an_allocation_that_nothing_preceded_owes_no_poststop_but_the_one_not_seen(ledger: Ledger):
    ledger.device_plugin.adopt(REGIONS, P0, POD_A, {})
    assert ledger.allocations[P0].prestarts == 1


def test_an_allocate_takes_over_the_poststops_that_are_still_to_come(ledger: Ledger) -> None:
    (fresh,) = ledger.device_plugin.allocate(REGIONS, [P1])
    assert fresh.prestarts == 0
    own(ledger, P0, POD_A)
    ledger.device_plugin.release([P0])
    (allocation,) = ledger.device_plugin.allocate(REGIONS, [P0])
    assert allocation.prestarts == 1
    assert not ledger.pending_poststops.get(P0)


def test_ends_are_counted_by_what_ended_them(ledger: Ledger) -> None:
    own(ledger, P0, POD_A)
    own(ledger, P0, POD_B)
    assert ledger.ends == {"implied": 1}
    ledger.device_plugin.bind_pod([P0], POD_A)
    assert ledger.ends == {"implied": 2}
    own(ledger, P1, POD_B)
    ledger.device_plugin.release([P0, P1, "unknown"])
    assert ledger.ends == {"implied": 2, "released": 2}


def test_another_pods_allocation_ends_and_no_other_of_the_call(ledger: Ledger) -> None:
    own(ledger, P0, POD_A)
    own(ledger, P1, POD_B)
    ledger.device_plugin.bind_pod([P0, P1], POD_B)
    assert ledger.ends == {"implied": 1}
    assert former(ledger, R0) == {POD_A}
    assert not former(ledger, R1)


# ------------------------------------------------------------------ adoption


def test_an_adopted_resource_is_registered_so_that_kubelet_admits_its_pods_again() -> None:
    ledger, journal = make_ledger(CARD)
    gone = make_card(7, nodes=(8,), interface_id=CARD.interface_id)
    resource = ResourceName(REGIONS.replace("ce48", "0000"))
    node = {device_variable(RegionId(device(gone, 0))): "/dev/dfl-port.8"}
    ledger.device_plugin.adopt(resource, device(gone, 0), POD_A, node)
    assert resource in ledger.resources
    assert journal.snapshot.resources[resource], "after a restart of the plugin, too"


def test_adoption_writes_no_resource_again_that_is_known() -> None:
    ledger, journal = make_ledger(CARD)
    written: list[Change] = []
    write = journal.write
    journal.write = lambda change: (written.append(change), write(change))[1]  # type: ignore[method-assign]
    ledger.device_plugin.adopt(REGIONS, P0, POD_A, {})
    assert [change.resources for change in written] == [{}]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Condition.BLANK, Condition.DIRTY),
        (Condition.PROGRAMMED, Condition.DIRTY),
        (Condition.FAULTED, Condition.FAULTED),
        (Condition.SCRUBBING, Condition.SCRUBBING),
    ],
)
def test_what_an_adopted_allocation_may_have_used_is_dirty(
    ledger: Ledger, before: Condition, after: Condition
) -> None:
    if before is Condition.FAULTED:
        ledger.work.faulted(R0, "PR failed")
    elif before is not Condition.BLANK:
        ledger.hardware.set_drained(CARD.id, drained=True)
        ledger.work.working([R0])
        if before is Condition.PROGRAMMED:
            ledger.work.programmed(R0, AFU, by_hand=True)
    ledger.device_plugin.adopt(REGIONS, P0, POD_A, {})
    assert condition(ledger) is after


# ------------------------------------------------------------------ work on regions


def test_only_what_failed_and_nobody_has_is_tried_again(ledger: Ledger) -> None:
    """An owner's FAULTED region made DIRTY would come back to the list under him."""
    own(ledger, P0, POD_A, begun=False)
    for region in (R0, R1):
        ledger.work.faulted(region, "PR failed")
    ledger.work.forgive(CARD.id, "mended")
    assert condition(ledger, R0) is Condition.FAULTED
    assert condition(ledger, R1) is Condition.DIRTY
    assert ledger.record(R1).reason == "mended"
    other = RegionId(device(OTHER, 0))
    ledger.work.forgive(OTHER.id, "mended")
    assert condition(ledger, other) is Condition.BLANK
    ledger.work.forgive(make_card(9).id, "mended")  # a card that is not there


def test_what_the_hardware_still_calls_failed_is_not_tried_again(ledger: Ledger) -> None:
    ledger.work.faulted(R0, "PR failed")
    ledger.hardware.set_failing(CARD.id, {R0: TOO_HOT})
    before = condition(ledger)
    assert before is Condition.FAULTED
    ledger.work.forgive(CARD.id, "mended")
    assert condition(ledger) is Condition.FAULTED


def test_what_was_programmed_for_an_owner_that_left_meanwhile_is_nobodys(ledger: Ledger) -> None:
    own(ledger, P0, POD_A, begun=False)
    ledger.work.working([R0])
    ledger.device_plugin.release([P0])
    with pytest.raises(NotFinishedError, match="its owner left"):
        ledger.work.programmed(R0, AFU)
    assert condition(ledger) is Condition.SCRUBBING


@pytest.mark.parametrize("by", ["an owner", "hand"])
def test_whoever_gets_a_region_after_its_former_owner_is_gone_ends_his_tenancy(
    ledger: Ledger, by: str
) -> None:
    own(ledger, P0, POD_A)
    ledger.device_plugin.release([P0])
    assert former(ledger, R0) == {POD_A}
    if by == "hand":
        ledger.hardware.set_drained(CARD.id, drained=True)
        ledger.work.working([R0])
        ledger.work.programmed(R0, AFU, by_hand=True)
        assert ledger.record(R0).reason == BY_HAND
    else:
        own(ledger, P0, POD_B)
    assert not former(ledger, R0)
    assert POD_A not in {one.pod for one in ledger.tenancies.values()}


@pytest.mark.parametrize("hindrance", ["in service", "owned", "disturbed", "not begun"])
def test_what_an_operator_programs_is_his_only_on_a_drained_card_that_nobody_touched(
    ledger: Ledger, hindrance: str
) -> None:
    if hindrance == "owned":
        own(ledger, P0, POD_A, begun=False)
    if hindrance != "in service":
        ledger.hardware.set_drained(CARD.id, drained=True)
    if hindrance != "not begun":
        ledger.work.working([R0])
    if hindrance == "disturbed":
        ledger.work.dirty([R0], "the card went")
    with pytest.raises(NotFinishedError):
        ledger.work.programmed(R0, AFU, by_hand=True)
    assert condition(ledger) is not Condition.PROGRAMMED


def test_no_function_is_named_where_none_was_read() -> None:
    journal = MemoryJournal()
    ledger = Ledger(
        prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot", functions=True
    )
    found(ledger, CARD, None)
    ledger.work.working([R0])
    names = set(ledger.resources)
    ledger.work.clean(R0, None, blank=False)
    assert ledger.resources == names


def test_an_owner_of_a_card_that_is_gone_is_not_asked_what_the_card_exposes(ledger: Ledger) -> None:
    """The call ends with what is wrong, not with an error of the plugin's own."""
    ledger.device_plugin.allocate(WHOLE, [device(OTHER)])
    ledger.hardware.card_gone(OTHER.id)
    with pytest.raises(RefusedError):
        ledger.device_plugin.allocate(WHOLE, [device(OTHER)])
