"""What is scrubbed, cleared and given back when nobody asks for it: the release's other duties.

What may come between two of its steps is in test_scrub_release.py.
"""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
from doubles.cards import BLANK, INTERFACE, OTHER_INTERFACE, REGIONS, TOO_HOT
from ledger_scene import Scene
from ledger_world import AFUS, Pod

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal.records import Condition, DebugHold
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.queue import Outcome
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.errors import HardwareError, StoreUnavailableError
from fpga_plugin.hardware.backend import DriverSettings
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.model import CardHealth
from fpga_plugin.ids import RegionId
from fpga_plugin.settings.settings import RecoveryPolicy, ScrubPolicy

AFU = AFUS[0]


def settle(scene: Scene) -> None:
    """Let threads finish and waits end, some seconds of them."""
    for _ in range(50):
        scene.plugin.work()
        if not scene.plugin.loop.pass_time():
            break


def run(scene: Scene, region: RegionId, *wants: str) -> Pod:
    """A pod that runs on it."""
    pod = scene.admit(region)
    scene.start(pod, *wants)
    pod.running = True
    return pod


def deallocate(scene: Scene, pod: Pod, *, ends: bool = True) -> None:
    pod.active = False
    pod.running = not ends
    scene.plugin.call(lambda: scene.plugin.calls.deallocate(pod.resource, pod.devices))


def dirty(scene: Scene, *regions: RegionId) -> None:
    scene.plugin.call(lambda: scene.ledger.work.dirty(regions, "a pod may have used it"))


def look(scene: Scene, region: RegionId) -> None:
    """Something changed about its card."""
    scene.plugin.call(lambda: scene.plugin.queue.add(card_of(region)))


def owe(scene: Scene) -> None:
    """Somebody's data is in the first card's memory, and all of its regions are clean."""
    card = card_of(scene.regions[0])
    scene.rack.boards[card].memory.add("somebody")
    scene.plugin.call(lambda: scene.ledger.work.set_memory_clear_pending(card, open_=True))


def memory(scene: Scene) -> set[str]:
    return scene.rack.boards[card_of(scene.regions[0])].memory


# ------------------------------------------------------------------ a scrub


def test_a_scrub_resets_and_gives_the_driver_its_defaults_before_the_blank(make) -> None:
    """A clock or a debug flag of the last owner's would be the next one's."""
    scene = make(cards=[1])
    (region,) = scene.regions
    pod = run(scene, region, AFU)
    scene.rack.done.clear()
    deallocate(scene, pod)
    settle(scene)
    assert scene.rack.done == [
        ("reset", region),
        ("settings", region, DriverSettings()),
        ("program", region, BLANK),
    ]


def test_a_region_that_becomes_due_while_the_blank_is_read_is_scrubbed_too(make) -> None:
    scene = make(cards=[2])
    one, other = scene.regions
    dirty(scene, one)
    assert scene.plugin.jobs
    dirty(scene, other)
    settle(scene)
    assert scene.condition(one) is scene.condition(other) is Condition.BLANK
    assert "release stopped" not in scene.logged


@pytest.mark.parametrize("waits_for", ["an open port", "an earlier tenant", "an owner that runs"])
def test_what_a_scrub_waits_for_is_logged_once_each_time(make, waits_for: str) -> None:
    scene = make(cards=[1])
    (region,) = scene.regions
    for times in (1, 2):
        pod = run(scene, region, AFU)
        if waits_for == "an open port":
            scene.rack.slot(region).opens.add("somebody")
            deallocate(scene, pod)
        elif waits_for == "an earlier tenant":
            deallocate(scene, pod, ends=False)
        else:
            scene.plugin.call(lambda pod=pod: scene.plugin.calls.poststop(REGIONS, pod.devices))
        settle(scene)
        look(scene, region)
        settle(scene)
        assert scene.logged.count("scrub waits") == times
        scene.rack.slot(region).opens.clear()
        pod.running = pod.active = False
        settle(scene)
        assert scene.condition(region) is Condition.BLANK
        if waits_for == "an owner that runs":
            deallocate(scene, pod)
            settle(scene)


def test_of_a_card_only_the_region_that_is_free_is_scrubbed_and_all_of_them_are(make) -> None:
    """One that is open does not keep the others, and comes when it is closed."""
    scene = make(cards=[3])
    one, opened, owned = scene.regions
    run(scene, owned, AFU)
    scene.rack.slot(opened).opens.add("somebody")
    scene.rack.done.clear()
    with mock.patch.object(CardOperations, "report", autospec=True) as told:
        dirty(scene, one, opened)
        settle(scene)
        assert {what[1] for what in scene.rack.done} == {one}
        scene.rack.done.clear()
        scene.rack.slot(opened).opens.clear()
        settle(scene)
        assert {what[1] for what in scene.rack.done} == {opened}
    assert [call.args[1].region for call in told.call_args_list] == [one, opened]


def test_what_fails_on_one_region_does_not_call_it_clean_and_the_other_is(make) -> None:
    scene = make(cards=[2], memory=True)
    one, other = scene.regions
    scene.rack.bad_prs = ["poison"]
    dirty(scene, one, other)
    settle(scene)
    assert scene.condition(one) is Condition.FAULTED
    assert scene.condition(other) is Condition.BLANK
    assert scene.ledger.memory_clear_pending, "what is on the other may write the memory again"


@pytest.mark.parametrize("what", ["open_port", "numbers"])
def test_a_port_that_cannot_be_opened_fails_its_region_alone(make, what: str) -> None:
    """As any scrub that fails: once more, as its card may have been swapped, then FAULTED."""
    scene = make(cards=[2])
    one, other = scene.regions
    scene.rack.slot(one).opens.add("somebody")
    dirty(scene, one)
    scene.plugin.work()
    assert scene.plugin.scrubber.waits_for(one)
    scene.rack.slot(one).opens.clear()
    real, tries = getattr(scene.rack, what), []

    def fails(*of):
        if of[-1].id != one:
            return real(*of)
        tries.append(scene.condition(other))
        raise HardwareError("the port cannot be opened (EIO)")

    with (
        mock.patch.object(scene.rack, what, fails),
        mock.patch.object(CardOperations, "report", autospec=True) as told,
    ):
        dirty(scene, other)
        look(scene, one)
        scene.plugin.work()
        assert scene.condition(other) is Condition.BLANK
        assert scene.condition(one) is Condition.DIRTY
        assert scene.ledger.record(one).reason == "the port cannot be opened (EIO)"
        assert not scene.plugin.scrubber.waits_for(one), "it waits for nothing"
        settle(scene)
        assert scene.condition(one) is Condition.FAULTED
        assert len(tries) == 2
    assert not scene.rack.slot(one).held
    failed = [c.args[1] for c in told.call_args_list if c.args[1].region == one]
    assert [(report.scrubbed, report.failure) for report in failed] == [(True, "hardware")] * 2
    scene.plugin.call(lambda: scene.ledger.work.forgive(card_of(one), "it was mended"))
    settle(scene)
    assert scene.condition(one) is Condition.BLANK


def test_what_could_not_be_opened_of_a_card_that_is_too_hot_waits_until_it_is_not(make) -> None:
    scene = make(cards=[1])
    (region,) = scene.regions
    error = HardwareError("the port cannot be opened (EIO)")
    health = CardHealth({region: TOO_HOT})
    with (
        mock.patch.object(scene.rack, "open_port", side_effect=error) as opened,
        mock.patch.object(scene.rack, "health", return_value=health),
    ):
        dirty(scene, region)
        settle(scene)
        assert scene.condition(region) is Condition.DIRTY
        assert opened.call_count == 1
    scene.plugin.call(lambda: scene.ledger.hardware.set_failing(card_of(region), {}))
    look(scene, region)
    settle(scene)
    assert scene.condition(region) is Condition.BLANK


def test_where_nothing_could_be_scrubbed_nothing_is_owed(make) -> None:
    scene = make(cards=[1], memory=True)
    (region,) = scene.regions
    scene.rack.slot(region).opens.add("somebody")
    dirty(scene, region)
    settle(scene)
    assert not scene.ledger.memory_clear_pending


def test_a_card_that_goes_while_its_port_is_closed_is_not_called_clean(make) -> None:
    """The card that comes into its slot has the same numbers."""
    scene = make(cards=[1])
    (region,) = scene.regions
    dirty(scene, region)
    scene.until(lambda: any(what[0] == "program" for what in scene.rack.done))
    scene.until(lambda: scene.condition(region) is Condition.SCRUBBING)
    scene.swap(card_of(region), told=True)
    scene.hold_releases()
    scene.plugin.work()
    assert scene.condition(region) is not Condition.BLANK


def test_a_report_tells_each_step_and_what_it_found(make) -> None:
    scene = make(cards=[1])
    (region,) = scene.regions
    reset = [("quiesce", ""), ("clear errors", ""), ("restore defaults", "")]
    blanked = [("program blank", f"AFU {BLANK}"), ("verify", f"AFU id reads {BLANK}")]
    with mock.patch.object(CardOperations, "report", autospec=True) as told:
        dirty(scene, region)
        settle(scene)
        run(scene, region, AFU)
        scene.rack.bad_prs = ["error"]
        scene.hold_releases()
        (pod,) = scene.pods
        failed = scene.prestart(pod, AFU)
        scene.plugin.work()
    scrub, start, failure = (call.args[1] for call in told.call_args_list)
    assert [(step.name, step.note) for step in scrub.steps] == [
        *reset,
        *blanked,
        ("clear errors", ""),
    ]
    (clock, programmed, verified) = start.steps
    assert clock.name == "set parameters"
    assert clock.note.startswith("clock: ")
    assert (programmed.name, programmed.note) == ("program", f"AFU {AFU}")
    assert (verified.name, verified.note) == ("verify", f"AFU id reads {AFU}")
    assert start.pod == pod.uid
    assert failure.steps[-1].note == failed.exception().message
    assert all(0 <= step.seconds < 600 for one in (scrub, start, failure) for step in one.steps)


def test_a_report_of_a_scrub_under_an_owner_names_him(make) -> None:
    scene = make(cards=[1])
    (region,) = scene.regions
    pod = run(scene, region, AFU)
    pod.running = False
    with mock.patch.object(CardOperations, "report", autospec=True) as told:
        scene.plugin.call(lambda: scene.plugin.calls.poststop(REGIONS, pod.devices))
        settle(scene)
    assert [call.args[1].pod for call in told.call_args_list] == [pod.uid]


# ------------------------------------------------------------------ blank bitstreams


def test_without_a_blank_a_region_waits_for_it_and_says_so(make) -> None:
    scene = make(cards=[1])
    (region,) = scene.regions
    scene.images.has_blank = False
    dirty(scene, region)
    settle(scene)
    assert not scene.rack.done
    assert "no-blank-image" in scene.ledger.record(region).reason
    writes = scene.journal.writes
    look(scene, region)
    settle(scene)
    assert scene.journal.writes == writes, "it is said once"
    scene.images.has_blank = True
    scene.plugin.call(lambda: scene.plugin.scrubber.blank_changed(OTHER_INTERFACE))
    settle(scene)
    assert scene.condition(region) is Condition.DIRTY, "that is another kind of card's"
    scene.plugin.call(lambda: scene.plugin.scrubber.blank_changed(INTERFACE))
    settle(scene)
    assert scene.condition(region) is Condition.BLANK


def test_while_the_store_does_not_answer_a_region_waits_for_its_blank_as_for_a_missing_one(
    make,
) -> None:
    scene = make(cards=[1])
    (region,) = scene.regions
    with mock.patch.object(scene.images, "blank", side_effect=StoreUnavailableError("it hangs")):
        dirty(scene, region)
        settle(scene)
    assert scene.ledger.record(region).reason == "no-blank-image: it hangs"
    assert "release waits" not in scene.logged
    scene.plugin.call(lambda: scene.plugin.scrubber.blank_changed(INTERFACE))
    settle(scene)
    assert scene.condition(region) is Condition.BLANK


@pytest.mark.parametrize("interface", [INTERFACE, None])
def test_another_blank_has_its_afu_id_read_anew_and_what_failed_for_it_tried_again(
    make, interface: str | None
) -> None:
    scene = make(cards=[1])
    (region,) = scene.regions
    scene.plugin.call(lambda: scene.ledger.work.faulted(region, "the blank is mislabelled"))
    settle(scene)
    assert scene.condition(region) is Condition.FAULTED
    with mock.patch.object(scene.plugin.operations.blanks, "forget") as forget:
        scene.plugin.call(lambda: scene.plugin.scrubber.blank_changed(interface))
    forget.assert_called_once_with(interface)
    settle(scene)
    assert scene.condition(region) is Condition.BLANK


def test_without_a_blank_the_operator_may_let_a_reset_be_enough(make) -> None:
    scene = make(cards=[1], scrub=ScrubPolicy.BEST_EFFORT)
    (region,) = scene.regions
    pod = run(scene, region, AFU)
    scene.images.has_blank = False
    scene.rack.done.clear()
    deallocate(scene, pod)
    settle(scene)
    assert scene.rack.done == [("reset", region), ("settings", region, DriverSettings())]
    assert scene.condition(region) is Condition.UNBLANKED
    assert scene.ledger.record(region).afu_id == AFU, "as what is on it still reads"


@pytest.mark.parametrize("has_blank", [True, False])
def test_functions_and_images_of_one_card_are_scrubbed_each_in_its_way(
    make, *, has_blank: bool
) -> None:
    """FPGA_PLUGIN_ADVERTISE became `af` while a pod had a region: what nobody has is a function by
    now, and is reset; his is blanked, or waits for a blank."""
    scene = make(cards=[2])
    owned, free = scene.regions
    pod = run(scene, owned, AFU)
    scene.ledger.naming.serves_functions = True
    scene.images.has_blank = has_blank
    pod.running = False
    scene.rack.done.clear()
    scene.hold_releases()
    scene.plugin.call(lambda: scene.plugin.calls.poststop(REGIONS, pod.devices))
    dirty(scene, free)
    scene.plugin.call(scene.plugin.queue.sync)
    settle(scene)
    programmed = [what for what in scene.rack.done if what[0] == "program"]
    assert programmed == [("program", owned, BLANK)] * has_blank
    assert ("reset", free) in scene.rack.done
    assert scene.condition(free) is Condition.UNBLANKED
    assert scene.condition(owned) is (Condition.BLANK if has_blank else Condition.DIRTY)
    assert "release stopped" not in scene.logged


def test_no_blank_is_read_for_a_card_whose_functions_all_stay(make) -> None:
    scene = make(cards=[2])
    scene.ledger.naming.serves_functions = True
    with mock.patch.object(scene.operations.blanks, "load") as load:
        dirty(scene, *scene.regions)
        settle(scene)
    assert not load.called
    assert {scene.condition(region) for region in scene.regions} == {Condition.UNBLANKED}


def test_of_a_card_that_went_nothing_is_done(make) -> None:
    scene = make(cards=[1])
    card = card_of(scene.regions[0])
    scene.plugin.call(lambda: scene.ledger.hardware.card_gone(card))
    writes = scene.journal.writes
    task = scene.plugin.begin(scene.plugin.scrubber.work(card))
    scene.plugin.work()
    assert task.result() is Outcome.NOTHING
    assert scene.journal.writes == writes


# ------------------------------------------------------------------ memory


def test_a_debt_is_paid_when_a_cards_regions_are_clean_and_nobody_has_one(make) -> None:
    scene = make(cards=[2], memory=True)
    owe(scene)
    settle(scene)
    assert scene.rack.done == [("memory", card_of(scene.regions[0]))]
    assert not scene.ledger.memory_clear_pending


@pytest.mark.parametrize("begun", ["claimed", "blank", "blank and balanced"])
def test_a_debt_is_not_paid_while_anybody_has_a_region(make, begun: str) -> None:
    """Its owner may have asked for no image: the region is BLANK, and he uses the memory."""
    scene = make(cards=[2], memory=True)
    scene.hold_releases()
    pod = scene.admit(scene.regions[0])
    if begun != "claimed":
        scene.start(pod)
        pod.running = True
    scene.plugin.call(scene.plugin.queue.sync)
    owe(scene)
    settle(scene)
    assert memory(scene)
    deallocate(scene, pod)
    settle(scene)
    assert not memory(scene)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_debt_is_not_paid_while_any_region_of_the_card_is_in_trouble(make, failing: int) -> None:
    scene = make(cards=[2], memory=True)
    region = scene.regions[failing]
    fail = partial(scene.ledger.hardware.set_failing, card_of(region))
    scene.plugin.call(lambda: fail({region: TOO_HOT}))
    owe(scene)
    settle(scene)
    assert memory(scene)
    scene.plugin.call(lambda: fail({}))
    settle(scene)
    assert not memory(scene)


def test_a_debt_is_paid_under_a_fault_that_stops_no_work(make) -> None:
    scene = make(cards=[2], memory=True)
    curable = Fault(FaultKind.CURABLE, "pcie: PcieError")
    failing = dict.fromkeys(scene.regions, curable)
    scene.plugin.call(lambda: scene.ledger.hardware.set_failing(card_of(scene.regions[0]), failing))
    owe(scene)
    settle(scene)
    assert not memory(scene)


def test_memory_that_cannot_be_cleared_stays_owed_and_the_card_is_not_given_as_a_whole(
    make,
) -> None:
    scene = make(cards=[2], memory=True)
    with mock.patch.object(scene.rack, "clear_memory", side_effect=OSError("knob")):
        owe(scene)
        settle(scene)
    assert scene.ledger.memory_clear_pending
    assert Condition.DIRTY in {scene.condition(region) for region in scene.regions}


def test_a_card_without_memory_to_clear_owes_nothing(make) -> None:
    scene = make(cards=[1], memory=False)
    (region,) = scene.regions
    dirty(scene, region)
    settle(scene)
    assert scene.condition(region) is Condition.BLANK
    assert not scene.ledger.memory_clear_pending
    owe(scene)
    settle(scene)
    assert memory(scene), "there is nothing to clear it with"
    assert not scene.plugin.queue.busy(card_of(region)), "nor is there anything to wait for"


def test_nothing_is_done_once_kubelet_restarted_while_the_card_was_busy(make) -> None:
    """The release had been asked for before, and waited for the card's lock."""
    scene = make(cards=[1], memory=True)
    (region,) = scene.regions
    scene.rack.lent = {region}
    lock = scene.operations.workers.lock(card_of(region))
    scene.plugin.begin(lock.__aenter__())
    owe(scene)
    scene.plugin.queue.unsync()
    scene.plugin.begin(lock.__aexit__(None, None, None))
    settle(scene)
    assert memory(scene), "an owner may have begun to use it"
    assert scene.rack.lent


# ------------------------------------------------------------------ nodes that moved


def moved(scene: Scene, pod: Pod) -> None:
    """The card's two regions have each other's node now."""
    card = scene.rack.boards[card_of(pod.devices[0])].card
    one, other = card.regions
    swapped = (replace(one, grant=other.grant), replace(other, grant=one.grant))
    board = scene.rack.boards[card.id]
    board.card = replace(card, regions=swapped)
    seen = {region.id: board.slots[region.id].afu for region in swapped}
    scene.plugin.call(lambda: scene.ledger.hardware.card_found(board.card, seen, BLANK))


def test_a_region_whose_node_a_living_pod_was_given_for_another_is_not_opened(make) -> None:
    """Invariants 7 and 10: the container opens the node that it was given, whatever it leads to."""
    scene = make(cards=[2])
    one, other = scene.regions
    pod = run(scene, one, AFU)
    moved(scene, pod)
    dirty(scene, other)
    opened = scene.rack.open_port = mock.Mock(wraps=scene.rack.open_port)
    settle(scene)
    assert not opened.called
    deallocate(scene, pod, ends=False)  # by force: it runs on
    settle(scene)
    assert not opened.called
    pod.running = False
    settle(scene)
    assert {scene.condition(one), scene.condition(other)} == {Condition.BLANK}
    assert not scene.ledger.tenancies


def test_a_card_that_a_pod_without_an_allocation_may_open_is_told_once(make) -> None:
    scene = make(cards=[2])
    pod = run(scene, scene.regions[0], AFU)
    moved(scene, pod)
    deallocate(scene, pod, ends=False)
    settle(scene)
    told = "a card is held back: a pod that still runs may open its regions"
    assert scene.logged.count(told) == 1
    pod.running = False
    settle(scene)
    assert scene.logged.count(told) == 1


def test_a_card_that_is_clean_waits_for_who_has_its_node(make) -> None:
    """Nothing of it is to be scrubbed, and the pod's own card, which would wait for it, is gone."""
    scene = make(cards=[1, 1])
    one, other = scene.regions
    pod = run(scene, one, AFU)
    gone, card = card_of(one), card_of(other)
    (of_gone,) = scene.rack.boards[gone].card.regions
    scene.rack.boards[gone].present = False
    scene.plugin.call(lambda: scene.ledger.hardware.card_gone(gone))
    board = scene.rack.boards[card]
    (region,) = board.card.regions
    board.card = replace(board.card, regions=(replace(region, grant=of_gone.grant),))
    deallocate(scene, pod, ends=False)
    scene.plugin.call(lambda: scene.ledger.hardware.card_found(board.card, {other: BLANK}, BLANK))
    scene.plugin.call(lambda: scene.ledger.work.working([other]))
    scene.plugin.call(lambda: scene.ledger.work.clean(other, BLANK, blank=True))
    settle(scene)
    assert scene.ledger.tenancies
    assert scene.plugin.queue.busy(card)
    pod.running = False
    scene.rack.done.clear()
    settle(scene)
    assert not scene.ledger.tenancies
    assert {what[1] for what in scene.rack.done} == {other}, "the pod may have used it by its node"
    assert scene.condition(other) is Condition.BLANK


# ------------------------------------------------------------------ bound_by_plugin drivers


def test_drivers_that_were_bound_for_a_region_go_when_nobody_has_it(make) -> None:
    scene = make(cards=[2])
    one, other = scene.regions
    pod = run(scene, one, AFU)
    run(scene, other, AFU)
    scene.rack.lent = {one, other}
    deallocate(scene, pod)
    settle(scene)
    assert scene.condition(one) is Condition.BLANK
    assert scene.rack.lent == {other}


@pytest.mark.parametrize("kept", ["claimed", "not clean", "foreign", "another's node"])
def test_drivers_of_a_region_that_somebody_may_have_stay(make, kept: str) -> None:
    scene = make(cards=[2])
    one, other = scene.regions
    card = card_of(one)
    if kept == "claimed":
        scene.admit(one)
    elif kept == "not clean":
        scene.rack.slot(one).opens.add("somebody")
        dirty(scene, one)
    elif kept == "foreign":
        scene.plugin.call(lambda: scene.ledger.hardware.set_foreign({card: "drain the node"}))
    else:
        moved(scene, run(scene, other, AFU))
        scene.plugin.call(lambda: scene.ledger.work.working([one]))
        scene.plugin.call(lambda: scene.ledger.work.clean(one, BLANK, blank=True))
    scene.rack.lent = {one}
    look(scene, one)
    settle(scene)
    assert scene.rack.lent == {one}


def test_drivers_are_given_back_though_nothing_is_to_be_scrubbed(make) -> None:
    scene = make(cards=[1])
    scene.rack.lent = set(scene.regions)
    look(scene, scene.regions[0])
    settle(scene)
    assert not scene.rack.lent


# ------------------------------------------------------------------ recovery


def test_a_poisoned_card_that_nobody_has_is_rebound_and_scrubbed(make) -> None:
    scene = make(cards=[2], recovery=RecoveryPolicy.REBIND)
    one, other = scene.regions
    scene.rack.bad_prs = ["poison"]
    dirty(scene, one)
    settle(scene)
    assert scene.plugin.recovery.done == 1
    assert {scene.condition(one), scene.condition(other)} == {Condition.BLANK}


# ------------------------------------------------------------------ who runs


def test_an_owner_whose_containers_ended_as_often_as_they_began_is_not_scrubbed_under(
    make,
) -> None:
    """Kubelet may say one end twice; the pod's cgroup says that a container runs."""
    scene = make(cards=[1])
    (region,) = scene.regions
    pod = run(scene, region, AFU)
    scene.rack.done.clear()
    scene.plugin.call(lambda: scene.plugin.calls.poststop(pod.resource, pod.devices))
    settle(scene)
    assert not scene.rack.done
    pod.running = False
    settle(scene)
    assert scene.condition(region) is Condition.BLANK


def test_an_owner_that_has_not_begun_waits_for_no_container_of_his(make) -> None:
    """Another container of his pod runs, and has nothing to do with the region."""
    scene = make(cards=[1])
    (region,) = scene.regions
    pod = scene.admit(region)
    pod.running = True
    scene.plugin.call(lambda: scene.ledger.device_plugin.bind_pod(pod.devices, pod.uid))
    dirty(scene, region)
    settle(scene)
    assert scene.condition(region) is Condition.BLANK


def test_an_owner_whom_nobody_knows_is_not_looked_for(make) -> None:
    scene = make(cards=[1])
    (region,) = scene.regions
    pod = scene.admit(region)
    pod.active = False  # kubelet's records do not say whose allocation it is
    scene.start(pod, AFU)
    with mock.patch.object(scene.operations.cgroups, "may_run_containers") as asked:
        scene.plugin.call(lambda: scene.plugin.calls.poststop(REGIONS, pod.devices))
        settle(scene)
    assert not asked.called
    assert scene.condition(region) is Condition.BLANK


def test_a_region_that_is_to_be_looked_at_is_not_scrubbed(make) -> None:
    """Its pod asked for it: whether its container failed is not known yet."""
    scene = make(cards=[1])
    (region,) = scene.regions
    pod = run(scene, region, AFU)
    debug = DebugHold(region, pod.uid, "space", "name", (), 600.0)
    scene.plugin.call(
        lambda: scene.ledger.device_plugin.started([scene.ledger.allocations[region]], debug)
    )
    scene.rack.done.clear()
    with mock.patch.object(scene.operations.cgroups, "may_live", return_value=False):
        scene.plugin.call(lambda: scene.ledger.device_plugin.release([region]))
        settle(scene)
        assert scene.ledger.debug_holds
        assert not scene.rack.done
        scene.plugin.call(lambda: debug_holds.end(scene.ledger, [region]))
        look(scene, region)
        settle(scene)
    assert scene.condition(region) is Condition.BLANK


def test_no_scrub_begins_while_kubelets_records_are_not_known(make) -> None:
    """It restarted while the last owner's cgroup was read, or the blank bitstream was."""
    instant = 0
    while True:
        scene = make(cards=[1])
        (region,) = scene.regions
        dirty(scene, region)
        for _ in range(instant):
            scene.plugin.job(0)
        if scene.condition(region) is Condition.BLANK:
            break
        jobs, scrubbed = len(scene.plugin.jobs), bool(scene.rack.done)
        scene.plugin.queue.unsync()
        for _ in range(jobs):
            scene.plugin.job(0)
        scene.rack.done.clear()
        scene.plugin.work()
        assert not scene.rack.done
        assert scene.condition(region) is Condition.DIRTY or scrubbed
        instant += 1
    assert instant > 2
