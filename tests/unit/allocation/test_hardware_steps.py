"""Cards that come, go, and come back as others, as the ledger takes them.

All orders of such steps are in test_ledger_steps.py.
"""

from dataclasses import replace

import pytest
from doubles.cards import AFU, BLANK, PREFIX, REGIONS, TOO_HOT, WHOLE, device, make_card
from ledger_support import MemoryJournal, found, make_ledger, reopened, scrub, start

from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import Change, Condition, RegionRecord
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import function_name
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import AfuId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import PodUid

CARD = make_card(1)
OTHER_AFU = AfuId("a" * 32)
R0, R1 = (region.id for region in CARD.regions)


def condition(ledger: Ledger, region: RegionId = R0) -> Condition:
    return ledger.record(region).condition


def test_what_is_not_served_is_no_resource() -> None:
    """A resource, once registered, stays registered."""
    journal = MemoryJournal()
    ledger = Ledger(
        prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="", functions=True
    )
    found(ledger, CARD, AFU)
    assert ledger.resources == {function_name(PREFIX, CARD.interface_id, AFU)}
    ledger, _ = make_ledger()
    found(ledger, replace(CARD, reprogrammable=False))
    assert not {REGIONS, WHOLE} & ledger.resources
    found(ledger, CARD)
    assert {REGIONS, WHOLE} <= ledger.resources


def test_a_card_that_is_found_again_as_it_was_has_not_gone() -> None:
    """Work that began on it goes on, and what is known of it stays known."""
    ledger, _ = make_ledger(CARD)
    lives = ledger.returns[CARD.id]
    assert ledger.hardware.card_found(CARD, {R0: BLANK, R1: BLANK}, BLANK) == frozenset()
    assert ledger.returns[CARD.id] == lives
    assert condition(ledger) is Condition.BLANK
    other = replace(CARD, regions=(replace(CARD.regions[0], handle=7), *CARD.regions[1:]))
    assert ledger.hardware.card_found(other, {R0: BLANK, R1: BLANK}, BLANK) == {R0}
    assert ledger.returns[CARD.id] == lives + 1
    assert (condition(ledger), condition(ledger, R1)) == (Condition.DIRTY, Condition.BLANK)


def test_a_card_that_goes_is_told_and_one_that_is_not_there_cannot_go() -> None:
    ledger, _ = make_ledger(CARD)
    told: list[object] = []
    ledger.subscribe(told.append)
    ledger.hardware.card_gone(make_card(7).id)
    assert told == []
    lives = ledger.returns[CARD.id]
    ledger.hardware.card_gone(CARD.id)
    assert CARD.id in told
    assert ledger.returns[CARD.id] == lives + 1
    assert condition(ledger) is Condition.DIRTY
    ledger.hardware.card_gone(CARD.id)
    assert ledger.returns[CARD.id] == lives + 1


def test_of_a_card_that_goes_nothing_that_was_seen_is_believed_and_dirty_is_dirty() -> None:
    """Its list is sent, though the journal learns nothing; it has no memory that needs clearing."""
    ledger, journal = make_ledger(CARD, blank=False)
    assert ledger.functions[R0] == BLANK
    told: list[object] = []
    ledger.subscribe(told.append)
    before, writes = ledger.record(R0), journal.writes
    assert before.condition is Condition.DIRTY
    ledger.hardware.card_gone(CARD.id)
    assert told == [CARD.id]
    assert not ledger.functions
    assert ledger.record(R0) == before
    assert journal.writes == writes
    assert not ledger.memory_clear_pending


def test_the_memory_of_a_card_that_went_is_cleared_before_it_is_given_out_again() -> None:
    """Somebody may have had it elsewhere."""
    card = make_card(1, clears_memory=True)
    ledger, _ = make_ledger(card)
    assert card.id not in ledger.memory_clear_pending
    ledger.hardware.card_gone(card.id)
    assert card.id in ledger.memory_clear_pending


@pytest.mark.parametrize("owned", [True, False])
def test_signals_that_pass_leave_a_free_region_dirty_and_an_owners_alone(*, owned: bool) -> None:
    ledger, _ = make_ledger(CARD)
    if owned:
        ledger.device_plugin.allocate(REGIONS, [device(CARD, 0)])
        ledger.work.working([R0])
        ledger.work.programmed(R0, AFU)
    told: list[object] = []
    ledger.hardware.set_failing(CARD.id, {R0: TOO_HOT})
    ledger.subscribe(told.append)
    ledger.hardware.set_failing(CARD.id, {R0: TOO_HOT})
    assert told == [], "nothing is new"
    ledger.hardware.set_failing(CARD.id, {})
    assert told
    assert condition(ledger) is (Condition.PROGRAMMED if owned else Condition.DIRTY)
    assert condition(ledger, R1) is Condition.BLANK, "it never failed"
    ledger.hardware.set_failing(make_card(7).id, {R0: TOO_HOT})
    assert not ledger.failing


def test_signals_that_pass_change_nothing_for_an_owner_that_did_not_start_and_for_a_scrub() -> None:
    """The scrub reports by itself how it ended; an owner's region is scrubbed before it is used."""
    ledger, _ = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [device(CARD, 0)])
    ledger.work.working([R1])
    ledger.hardware.set_failing(CARD.id, {R0: TOO_HOT, R1: TOO_HOT})
    ledger.hardware.set_failing(CARD.id, {})
    assert condition(ledger) is Condition.BLANK
    assert condition(ledger, R1) is Condition.SCRUBBING


def test_a_poisoned_region_that_answers_again_is_worth_another_scrub() -> None:
    ledger, _ = make_ledger(CARD)
    ledger.work.working([R0])
    ledger.work.faulted(R0, "poisoned")
    ledger.hardware.set_failing(CARD.id, {R0: TOO_HOT})
    ledger.hardware.set_failing(CARD.id, {})
    assert condition(ledger) is Condition.DIRTY


@pytest.mark.parametrize(
    ("owned", "used", "observed", "after"),
    [
        (False, False, BLANK, Condition.BLANK),
        (False, False, AFU, Condition.DIRTY),
        (False, False, None, Condition.DIRTY),
        (True, True, AFU, Condition.PROGRAMMED),
        (True, True, BLANK, Condition.DIRTY),
        (True, True, None, Condition.PROGRAMMED),
        (True, False, AFU, Condition.PROGRAMMED),
        (True, False, None, Condition.DIRTY),
    ],
)
def test_what_reads_otherwise_than_it_was_left_is_dirty(
    *, owned: bool, used: bool, observed, after
) -> None:
    """Somebody else programmed it. That it cannot be read says nothing while its owner may run."""
    ledger, _ = make_ledger(CARD)
    if owned:
        ledger.device_plugin.allocate(REGIONS, [DeviceId(R0)])
        ledger.work.working([R0])
        ledger.work.programmed(R0, AFU)
    if used:
        start(ledger, DeviceId(R0), program=False)
    before = ledger.record(R0)
    changed = ledger.hardware.verify(CARD.id, {R0: observed})
    assert condition(ledger) is after
    assert changed == ({R0: before} if after is Condition.DIRTY else {})
    shown = observed if changed and observed is not None else (AFU if owned else BLANK)
    assert ledger.functions[R0] == shown, "the last that could be read"
    assert ledger.hardware.verify(make_card(7).id, {R1: AFU}) == {}, (
        "of another card nothing is believed"
    )


def test_what_was_programmed_by_hand_on_a_drained_card_is_dirty_when_it_serves_again() -> None:
    other = make_card(2, nodes=(2, 3))
    ledger, journal = make_ledger(CARD, other)
    r2 = other.regions[0].id
    ledger.device_plugin.allocate(REGIONS, [DeviceId(R1)])
    ledger.hardware.set_drained(CARD.id, drained=True)
    assert ledger.drained == {CARD.id}
    ledger.commit(
        Change(
            regions={
                one: replace(ledger.record(one), condition=Condition.PROGRAMMED)
                for one in (R0, R1, r2)
            }
        )
    )
    writes = journal.writes
    ledger.hardware.set_drained(CARD.id, drained=True)
    assert journal.writes == writes
    assert condition(ledger) is Condition.PROGRAMMED
    ledger.hardware.set_drained(CARD.id, drained=False)
    assert condition(ledger) is Condition.DIRTY
    assert condition(ledger, R1) is Condition.PROGRAMMED, "it has an owner"
    assert condition(ledger, r2) is Condition.PROGRAMMED, "of another card"


def test_a_clean_idle_card_is_drained_and_serves_again_as_it_is() -> None:
    """It is not programmed for that (invariant 9), and draining takes nothing away."""
    ledger, _ = make_ledger(CARD)
    by_hand = replace(ledger.record(R1), condition=Condition.PROGRAMMED)
    ledger.commit(Change(regions={R1: by_hand}))
    ledger.hardware.set_drained(CARD.id, drained=True)
    assert ledger.record(R1) == by_hand
    ledger.hardware.set_drained(CARD.id, drained=False)
    assert condition(ledger) is Condition.BLANK


def test_what_a_region_shows_is_known_while_it_cannot_be_read() -> None:
    ledger, _ = make_ledger(CARD)
    assert ledger.functions[R0] == BLANK
    ledger.hardware.card_found(CARD, {R0: None, R1: None}, BLANK)
    assert ledger.functions[R0] == BLANK


def test_a_rebind_is_noted_once_and_survives_the_plugin() -> None:
    ledger, journal = make_ledger(CARD)
    ledger.hardware.set_rebinding(CARD.id, rebinding=True)
    writes = journal.writes
    ledger.hardware.set_rebinding(CARD.id, rebinding=True)
    assert journal.writes == writes
    assert journal.snapshot.rebinding == {CARD.id: True}
    ledger.hardware.set_rebinding(CARD.id, rebinding=False)
    assert not ledger.rebinding


def test_who_shows_a_card_hears_of_foreign_pods_that_come_and_go() -> None:
    ledger, _ = make_ledger(CARD)
    told: list[object] = []
    ledger.subscribe(told.append)
    ledger.hardware.set_foreign({CARD.id: "drain the node"})
    ledger.hardware.set_foreign({CARD.id: "drain the node"})
    assert told == [CARD.id]
    ledger.hardware.set_foreign({})
    assert told == [CARD.id, CARD.id]


def test_a_card_that_comes_back_is_not_clean_as_it_was() -> None:
    """Invariant 9: it may have been in another machine."""
    ledger, _ = make_ledger(CARD)
    ledger.hardware.card_gone(CARD.id)
    found(ledger, CARD)
    assert condition(ledger) is Condition.DIRTY
    scrub(ledger, CARD)
    assert condition(ledger) is Condition.BLANK


@pytest.mark.parametrize(
    ("blank", "functions", "after"),
    [
        (None, False, Condition.UNBLANKED),
        (BLANK, False, Condition.DIRTY),
        (BLANK, True, Condition.UNBLANKED),
    ],
)
def test_what_was_only_reset_is_blanked_once_that_is_possible_and_meant(
    blank, after, *, functions: bool
) -> None:
    """A function is handed over as it is: there, nothing is to be blanked."""
    before, journal = make_ledger(CARD)
    before.commit(Change(regions={R0: RegionRecord(R0, Condition.UNBLANKED, "no blank", AFU)}))
    ledger = Ledger(
        prefix=PREFIX,
        journal=journal,
        snapshot=journal.snapshot,
        boot_id="boot",
        functions=functions,
    )
    ledger.hardware.card_found(CARD, {R0: AFU, R1: BLANK}, blank)
    assert condition(ledger) is after


@pytest.mark.parametrize(
    ("was", "afu", "owned", "observed", "blank", "after"),
    [
        (Condition.BLANK, BLANK, False, BLANK, BLANK, Condition.BLANK),
        (Condition.BLANK, BLANK, False, BLANK, AFU, Condition.DIRTY),
        (Condition.BLANK, BLANK, False, AFU, BLANK, Condition.DIRTY),
        # Of what an owner has a store that does not answer says nothing.
        (Condition.BLANK, BLANK, True, BLANK, None, Condition.BLANK),
        (Condition.BLANK, BLANK, True, AFU, None, Condition.DIRTY),
        (Condition.BLANK, None, True, None, None, Condition.DIRTY),
        (Condition.BLANK, BLANK, True, BLANK, AFU, Condition.DIRTY),
        (Condition.BLANK, BLANK, False, BLANK, None, Condition.DIRTY),
        (Condition.BLANK, None, False, None, None, Condition.DIRTY),
        (Condition.UNBLANKED, AFU, False, AFU, None, Condition.UNBLANKED),
        (Condition.UNBLANKED, AFU, False, BLANK, None, Condition.DIRTY),
        (Condition.UNBLANKED, None, False, None, None, Condition.DIRTY),
        (Condition.PROGRAMMED, AFU, True, AFU, BLANK, Condition.PROGRAMMED),
        (Condition.PROGRAMMED, AFU, True, BLANK, BLANK, Condition.DIRTY),
        (Condition.PROGRAMMED, AFU, True, None, BLANK, Condition.DIRTY),
        (Condition.PROGRAMMED, None, True, None, BLANK, Condition.DIRTY),
        (Condition.PROGRAMMED, AFU, False, AFU, BLANK, Condition.DIRTY),
        (Condition.FAULTED, None, False, None, BLANK, Condition.FAULTED),
        (Condition.FAULTED, None, False, AFU, BLANK, Condition.DIRTY),
        (Condition.DIRTY, None, False, BLANK, BLANK, Condition.DIRTY),
    ],
)
def test_at_first_sight_the_journal_is_believed_as_far_as_the_hardware_agrees(  # noqa: PLR0917  # a table
    was, afu, owned, observed, blank, after
) -> None:
    """Invariant 4: what cannot be read agrees with nothing."""
    before, journal = make_ledger(CARD)
    if owned:
        before.device_plugin.allocate(REGIONS, [DeviceId(R0)])
    before.commit(Change(regions={R0: RegionRecord(R0, was, "so", afu)}))
    ledger = Ledger(prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot")
    ledger.hardware.card_found(CARD, {R0: observed, R1: BLANK}, blank)
    assert condition(ledger) is after


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("observed", [AFU, BLANK, OTHER_AFU, None])
@pytest.mark.parametrize("has", ["nothing", "allocation", "blank", "image"])
def test_a_restart_takes_from_an_owner_what_the_running_plugin_would_and_no_more(
    has: str, observed: AfuId | None, *, loads: bool
) -> None:
    """Else a restart, as at an upgrade, withdraws the claim of a pod that runs."""
    card = replace(CARD, owner_loads=loads)
    ledger, journal = make_ledger(card)
    if has != "nothing":
        ledger.device_plugin.allocate(REGIONS, [DeviceId(R0)])
    if has in {"blank", "image"}:
        start(ledger, DeviceId(R0), program=has == "image")
    left = ledger.hardware.as_left(R0, observed)
    again = reopened(journal)
    again.hardware.card_found(card, {R0: observed, R1: BLANK}, BLANK)
    assert (again.record(R0) == ledger.record(R0)) is left
    assert left is (
        observed == (AFU if has == "image" else BLANK)
        or (has in {"blank", "image"} and observed is None)
        or (has == "blank" and loads)
    )


def test_what_was_never_known_is_not_an_owners_though_it_cannot_be_read() -> None:
    """Of what is handed over the journal has the AFU id."""
    ledger, journal = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [DeviceId(R0)])
    start(ledger, DeviceId(R0))
    ledger.commit(Change(regions={R0: replace(ledger.record(R0), afu_id=None)}))
    again = reopened(journal)
    again.hardware.card_found(CARD, {R0: None, R1: BLANK}, BLANK)
    assert condition(again) is Condition.DIRTY


def test_a_missing_blank_is_no_silent_store_where_the_owner_has_a_function() -> None:
    """Functions are never blanked: that no blank is known says nothing of the store."""
    before, journal = make_ledger(CARD)
    function = function_name(PREFIX, CARD.interface_id, BLANK)
    before.device_plugin.adopt(function, DeviceId(R0), PodUid("pod-a"), {})
    before.commit(Change(regions={R0: RegionRecord(R0, Condition.BLANK, afu_id=BLANK)}))
    ledger = Ledger(
        prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot", functions=True
    )
    ledger.hardware.card_found(CARD, {R0: BLANK, R1: BLANK}, None)
    assert condition(ledger) is Condition.DIRTY


def test_a_region_that_is_new_to_the_journal_says_nothing_of_the_cards_memory() -> None:
    """Of a card that the journal knows, what it says of memory holds."""
    card = make_card(1, nodes=(0, 1), clears_memory=True)
    one = replace(card, regions=card.regions[:1])
    ledger, _ = make_ledger(one)
    assert card.id not in ledger.memory_clear_pending
    ledger.hardware.card_found(card, {R0: BLANK, R1: BLANK}, BLANK)
    assert card.id not in ledger.memory_clear_pending
    assert card.id in ledger.unreconciled


def _regions(card: Card, **changed: object) -> Card:
    """The card, with its first region changed."""
    first, *others = card.regions
    return replace(card, regions=(replace(first, **changed), *others))


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(
    ("changed", "went"), [({"handle": 7}, {R0}), ({"grant": Grant(("/dev/dfl-port.9",))}, None)]
)
def test_a_region_with_another_node_is_another_one_unless_its_card_is_reset_as_a_whole(
    changed: dict[str, object], went: set[RegionId] | None, *, resets: bool
) -> None:
    """Such a card's node may have another number after its reset; its handle stays."""
    card = replace(CARD, resets=resets)
    ledger, _ = make_ledger(card)
    found_again = ledger.hardware.card_found(
        _regions(card, **changed), {R0: BLANK, R1: BLANK}, BLANK
    )
    assert found_again == (went if went is not None else set() if resets else {R0})


def test_a_card_whose_owners_were_not_asked_for_stays_one_in_the_next_life() -> None:
    """The plugin may be killed between its first look at a card and kubelet's records."""
    ledger, journal = make_ledger()
    for _ in range(2):
        ledger.hardware.card_found(CARD, {R0: BLANK, R1: BLANK}, BLANK)
        assert ledger.unreconciled == {CARD.id}
        ledger = reopened(journal)
        assert ledger.unreconciled == {CARD.id}
    ledger.reconciled([CARD.id])
    assert not reopened(journal).unreconciled


@pytest.mark.parametrize("known", [True, False])
def test_that_owners_are_known_counts_once_it_is_written_and_that_they_are_not_at_once(
    *, known: bool
) -> None:
    ledger, journal = make_ledger(CARD)
    if known:
        ledger.keep_back([CARD.id])
    journal.failing = 1
    with pytest.raises(JournalError):
        (ledger.reconciled if known else ledger.keep_back)([CARD.id])
    assert ledger.unreconciled == {CARD.id}
    ledger.work.set_memory_clear_pending(CARD.id, open_=True)
    assert reopened(journal).unreconciled == {CARD.id}
