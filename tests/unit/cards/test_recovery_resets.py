"""A card that is reset as a whole between two owners: when it is, and what a failure leaves.

A reset ends every process that has the card's node, and the node may come back under another
number: it must not begin while a pod may have it, and what is there afterwards is not known yet.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
from doubles.cards import AFU, BLANK, TOO_HOT
from ledger_scene import Scene, scenes
from ledger_world import Pod

from fpga_plugin.allocation.journal.records import Condition, RegionRecord
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.cards.operations import TenancyActiveError
from fpga_plugin.cards.recovery import FIRST_PAUSE
from fpga_plugin.cards.reports import Report
from fpga_plugin.errors import HardwareError, NotFinishedError, PortInUseError, RefusedError
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.model import Card, CardHealth, CardProblem
from fpga_plugin.ids import CardId, RegionId


class World(Scene):
    """A node with one card that resets, and what is reported of it."""

    def __init__(self, *, regions: int = 1) -> None:
        super().__init__(cards=[regions], resets=True)
        (self.board,) = self.rack.boards.values()
        self.card_id = self.board.card.id
        self.region = self.regions[0]
        self.reports: list[Report] = []
        self.operations.observer.reported = self.reports.append  # type: ignore[method-assign]

    def _touch(self, region: RegionId) -> None:
        assert self.resets < 9, "the card is reset again and again"
        super()._touch(region)

    def settle(self) -> None:
        """Let threads finish and waits end, some seconds of them."""
        for _ in range(50):
            self.plugin.work()
            if not self.plugin.loop.pass_time():
                break

    def run(self, *ids: RegionId | CardId) -> Pod:
        """A pod that runs."""
        pod = self.admit(*(ids or (self.region,)))
        self.start(pod, *[AFU] * len(pod.nodes))
        pod.running = True
        self.rack.done.clear()
        self.reports.clear()
        return pod

    def deallocate(self, pod: Pod) -> None:
        pod.active = False
        self.plugin.call(lambda: self.plugin.calls.deallocate(pod.resource, pod.devices))

    def leave(self, *ids: RegionId | CardId) -> None:
        """A pod ran and is gone; nothing was scrubbed yet."""
        pod = self.run(*ids)
        pod.running = False
        self.deallocate(pod)

    def until_the_cgroup_is_read(self) -> None:
        """Let threads finish until one is about to look for the last owner."""
        for _ in range(20):
            calls = [getattr(job.function, "func", job.function) for job in self.plugin.jobs]
            if [call.__name__ for call in calls] == ["_may_live"]:
                return
            self.plugin.job(0)
        raise AssertionError("nobody looks for the last owner")

    @property
    def record(self) -> RegionRecord:
        return self.ledger.record(self.region)

    @property
    def scrubber_waits(self) -> str:
        return self.plugin.scrubber.waits_for(self.region)

    @property
    def resets(self) -> int:
        return self.rack.done.count(("reset card", self.card_id))


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    with scenes(World) as make:
        yield make


@pytest.fixture
def world(make) -> World:
    return make()


# ------------------------------------------------------------------ the scrub


def test_a_card_is_reset_before_its_region_is_blanked(world: World) -> None:
    region, states = world.region, []
    world.leave()
    before = world.board.card.regions[0].grant

    def look() -> None:
        states.append(
            (
                world.rack.done[-1][0],
                world.card_id in world.journal.snapshot.rebinding,
                region in world.operations.workers._in_flight,
                world.condition(region),
            )
        )

    world.on_touch = look
    world.settle()
    assert world.resets == 1
    assert [what[0] for what in world.rack.done[:2]] == ["reset card", "reset"]
    assert ("program", region, BLANK) in world.rack.done
    assert states[0] == ("reset card", True, True, Condition.SCRUBBING), "a crash would find it"
    assert not any(rebinding for what, rebinding, *_ in states if what != "reset card")
    assert world.record.condition is Condition.BLANK
    assert world.ledger.cards[world.card_id].regions[0].grant != before
    (report,) = world.reports
    assert report.scrubbed
    assert report.steps[0].name == "reset card"
    assert not report.error
    assert not world.scrubber_waits


def test_a_reset_waits_while_the_last_pod_runs(world: World) -> None:
    pod = world.run()
    world.deallocate(pod)
    world.settle()
    assert not world.rack.done
    assert world.condition(world.region) is Condition.DIRTY
    assert f"pod {pod.uid}, its last owner, still runs" in world.scrubber_waits
    assert not world.reports
    pod.running = False
    world.settle()
    assert world.resets == 1
    assert world.condition(world.region) is Condition.BLANK


def test_nothing_is_reset_while_kubelets_records_are_not_known(world: World) -> None:
    """Kubelet restarted while the last owner's cgroup was read."""
    world.leave()
    world.until_the_cgroup_is_read()
    world.plugin.call(world.plugin.queue.unsync)
    world.settle()
    assert not world.rack.done
    assert not world.reports
    assert world.condition(world.region) is Condition.DIRTY
    world.plugin.call(world.plugin.queue.sync)
    world.settle()
    assert world.resets == 1


@pytest.mark.parametrize("regions", [1, 2])
def test_nothing_is_reset_if_a_region_may_not_be_worked_on_any_more(make, regions: int) -> None:
    """One of the card's is enough; it began to fail while the last owner's cgroup was read."""
    world = make(regions=regions)
    world.leave(*([world.card_id] if regions == 2 else [world.region]))
    world.until_the_cgroup_is_read()
    failed = {world.region: TOO_HOT}
    world.plugin.call(lambda: world.ledger.hardware.set_failing(world.card_id, failed))
    world.plugin.work()
    assert not world.resets
    assert not world.reports
    world.plugin.call(lambda: world.ledger.hardware.set_failing(world.card_id, {}))
    world.settle()
    assert world.resets == 1
    assert {world.condition(region) for region in world.regions} == {Condition.BLANK}


@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("during", ["may_live", "open_all", "program"])
def test_an_owner_that_leaves_while_its_region_is_scrubbed_between_containers_is_reset_away(
    world: World, during: str, *, known: bool, followed: bool
) -> None:
    """An extended kubelet: the PostStop balances, and Deallocate follows in the midst of it.

    The next pod's Allocate may follow at once, and its PreStart comes later.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not known:  # it sends the environment, so nobody need know the pod
            patch.setattr(world.plugin.prestarts._pods, "_identify", lambda *_: Identity())
        pod = world.run()
    pod.running = False
    world.plugin.call(lambda: world.plugin.calls.poststop(pod.resource, pod.devices))
    for _ in range(20):
        calls = [job.function for job in world.plugin.jobs]
        while any(hasattr(call, "func") for call in calls):
            calls = [getattr(call, "func", call) for call in calls]
        if during in {call.__name__ for call in calls} or not calls:
            break
        world.plugin.job(0)
    world.deallocate(pod)
    if followed:
        world.admit(world.region)
    world.settle()
    assert world.record.condition is Condition.BLANK
    assert world.resets == 1


def test_a_reset_that_failed_says_why_and_is_tried_again(world: World) -> None:
    world.leave()
    reset = world.rack.reset
    error = PortInUseError("/dev/x is in use", hint="end process 7")
    with mock.patch.object(world.rack, "reset", side_effect=error):
        world.plugin.work()
    assert not world.rack.done, "nothing is blanked on a card that was not reset"
    assert world.condition(world.region) is Condition.DIRTY
    assert world.record.reason == "/dev/x is in use"
    assert world.scrubber_waits == "/dev/x is in use (end process 7)"
    (report,) = world.reports
    assert report.scrubbed
    assert report.error == str(error)
    assert [step.name for step in report.steps] == ["reset card"]
    assert "region not scrubbed" in world.logged
    assert world.rack.reset == reset
    world.settle()
    assert world.resets == 1
    assert world.condition(world.region) is Condition.BLANK
    assert not world.scrubber_waits


@pytest.mark.parametrize("why", ["the blank fails", "the node is open"])
def test_a_scrub_that_failed_after_the_reset_pauses_before_the_next(world: World, why: str) -> None:
    """A reset takes seconds, and ends whatever has the node."""
    world.leave()
    region = world.region

    def fail() -> None:
        if why == "the blank fails":
            world.rack.bad_prs = ["error"]
        else:
            world.plugin.loop.call_soon(world.rack.slot(region).opens.add, "a process")

    world.on_touch = fail
    world.plugin.work()
    assert world.condition(region) is Condition.DIRTY
    assert world.resets == 1


@pytest.mark.parametrize("moves", [True, False])
def test_a_card_is_not_reset_again_and_again_for_a_region_that_cannot_be_held(
    world: World, *, moves: bool
) -> None:
    world.rack.resets_move = moves
    world.leave()
    error = HardwareError("its device number cannot be read")
    with mock.patch.object(world.rack, "open_port", side_effect=error):
        world.settle()
    assert world.condition(world.region) is Condition.FAULTED
    assert world.record.reason == error.message
    assert world.resets == 2
    assert not world.journal.snapshot.rebinding
    first, second = world.reports
    assert first.error == second.error == error.message
    assert [step.name for step in first.steps] == ["reset card"]


# ------------------------------------------------------------------ the reset itself


def begin_reset(world: World, report: Report):
    card = world.ledger.cards[world.card_id]
    return world.plugin.begin(world.plugin.recovery.reset(card, {world.region}, report))


def test_a_region_is_dirty_before_a_reset_and_after_it(world: World) -> None:
    world.hold_releases()
    world.leave()
    assert world.condition(world.region) is Condition.DIRTY
    report = Report(world.region)
    task = begin_reset(world, report)
    assert world.condition(world.region) is Condition.SCRUBBING
    assert world.journal.snapshot.rebinding == {world.card_id: True}
    assert report.scrubbed
    world.plugin.work()
    card = task.result()
    assert isinstance(card, Card)
    assert card == world.board.card, "as it is now"
    assert world.ledger.cards[world.card_id] is card
    assert world.condition(world.region) is Condition.DIRTY
    assert not world.journal.snapshot.rebinding


def test_a_card_that_is_gone_after_its_reset_is_none(world: World) -> None:
    world.hold_releases()
    world.leave()
    task = begin_reset(world, Report(world.region))

    def gone() -> None:
        world.board.present = False

    world.on_touch = gone
    world.plugin.work()
    assert task.result() is None
    assert world.condition(world.region) is Condition.DIRTY


def test_a_reset_that_failed_is_what_the_next_start_finishes(world: World) -> None:
    """The card may be in the midst of it: no driver is on it, for all that is known."""
    world.hold_releases()
    world.leave()
    with mock.patch.object(world.rack, "reset", side_effect=HardwareError("no answer")):
        task = begin_reset(world, Report(world.region))
        world.plugin.work()
    assert isinstance(task.exception(), HardwareError)
    assert world.journal.snapshot.rebinding == {world.card_id: True}
    assert world.condition(world.region) is Condition.DIRTY


# ------------------------------------------------------------------ one that failed half-way


class HalfReset(World):
    """A card whose next reset fails and leaves it down, until `bind` puts it online.

    Attributes:
        down: it shows no node, and its health says that it may pass.
        ready: `bind` can put it online.
        binds: how often that was tried.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = self.ready = False
        self.binds = 0
        rack, scan, health = self.rack, self.rack.scan_card, self.rack.health
        rack.scan_card = lambda card: self.problem if self.down else scan(card)
        rack.health = lambda card: self.health if self.down else health(card)
        rack.bind = self.bind
        self.well = rack.reset

    def power_on(self) -> None:
        super().power_on()
        self.rack.reset = self.fail

    @property
    def problem(self) -> CardProblem:
        return CardProblem(self.board.card.address, "no render nodes", passing=True)

    @property
    def health(self) -> CardHealth:
        return CardHealth({self.region: Fault(FaultKind.TRANSIENT, "unreadable: not ready")})

    def fail(self, card: Card) -> None:
        self.down, self.rack.reset = True, self.well
        raise HardwareError("its management function is offline", hint="see the kernel's log")

    def bind(self, _card: CardId) -> None:
        self.binds += 1
        if self.down and not self.ready:
            raise HardwareError("it is not back", hint="wait")
        self.down = False

    def look(self, *, scanned: bool) -> None:
        """An event, or a look at its health alone."""
        hardware = self.plugin.hardware
        self.plugin.begin((hardware.rescan if scanned else hardware.check)(self.card_id))
        self.settle()


@pytest.fixture
def half() -> Iterator[HalfReset]:
    with scenes(HalfReset) as make:
        yield make()


@pytest.mark.parametrize("scanned", [False, True])
def test_a_reset_that_failed_half_way_is_finished_whatever_the_cards_health_says(
    half: HalfReset, *, scanned: bool
) -> None:
    half.leave()
    half.settle()
    half.look(scanned=scanned)
    assert (half.card_id in half.ledger.cards) is not scanned
    assert half.journal.snapshot.rebinding == {half.card_id: True}, "a restart would finish it"
    if not scanned:
        assert half.scrubber_waits == "it is not back (wait)"
    assert 2 < half.binds < 4 + half.plugin.loop.time() / FIRST_PAUSE, "each takes a minute or more"
    half.ready = True
    half.settle()
    assert not half.down
    assert not half.journal.snapshot.rebinding
    half.plugin.begin(half.plugin.hardware.check_all())
    half.settle()
    assert half.condition(half.region) is Condition.BLANK
    assert half.resets == 1, "what came back is reset before it is blanked"


@pytest.mark.parametrize("scanned", [False, True])
def test_an_operators_retry_finishes_a_reset_that_failed(half: HalfReset, *, scanned: bool) -> None:
    half.leave()
    half.settle()
    half.look(scanned=scanned)
    half.hold_releases()
    for half.ready in (False, True):
        task = half.plugin.begin(half.plugin.actions.retry(half.card_id))
        half.settle()
        assert half.down is not half.ready
        if not half.ready:
            assert isinstance(task.exception(), HardwareError)
            assert half.journal.snapshot.rebinding
    assert task.result().present
    assert not half.ledger.failing
    assert not half.resets, "nothing is reset while kubelet's records are not known"


def test_what_came_back_from_a_failed_reset_is_not_reset_under_a_pod(half: HalfReset) -> None:
    """The pod that was thought to be gone runs: a card that is down is put online, no more."""
    half.leave()
    half.settle()
    half.look(scanned=True)
    half.pods[0].running = half.ready = True
    half.settle()
    assert not half.down
    assert not half.resets
    assert "still runs" in half.scrubber_waits
    half.pods[0].running = False
    half.settle()
    assert half.condition(half.region) is Condition.BLANK


def test_a_reset_that_a_dead_plugin_left_is_tried_until_it_ends(half: HalfReset) -> None:
    """Also where the journal did not know of it."""
    half.down, half.rack.reset = True, half.well
    half.look(scanned=True)
    problem = replace(half.problem, interrupted=True)
    with mock.patch.dict(half.ledger.problems, {half.card_id: problem}):
        half.plugin.begin(half.plugin.recovery.resume())
        half.settle()
        assert half.journal.snapshot.rebinding == {half.card_id: True}
        half.ready = True
        half.settle()
    assert not half.down
    assert half.condition(half.region) is Condition.BLANK


# ------------------------------------------------------------------ in a PreStart


def prestarts_reset(world: World) -> Pod:
    """A pod on a region whose last owner is gone, with the card as it was left."""
    world.hold_releases()
    world.rack.resets_move = False
    world.leave()
    return world.admit(world.region)


def test_a_prestart_resets_the_card_before_it_blanks_the_region(world: World) -> None:
    pod = prestarts_reset(world)
    world.start(pod, AFU)
    programs = [what for what in world.rack.done if what[0] in {"reset card", "program"}]
    assert programs == [
        ("reset card", world.card_id),
        ("program", world.region, BLANK),
        ("program", world.region, AFU),
    ]
    first, second = world.reports
    assert [step.name for step in first.steps] == ["reset card"]
    assert first.pod == second.pod == pod.uid
    assert first.former == {world.pods[0].uid}


def test_a_prestart_that_was_given_a_node_that_moved_is_refused(world: World) -> None:
    pod = prestarts_reset(world)
    world.rack.resets_move = True
    task = world.prestart(pod, AFU)
    world.refused(task, RefusedError, "device numbering changed")
    assert world.resets == 1
    assert ("program", world.region, AFU) not in world.rack.done


def test_a_pods_own_earlier_processes_are_not_ended_by_a_reset(world: World) -> None:
    """A static pod comes again under its uid."""
    pod = prestarts_reset(world)
    former = world.pods[0]
    pod.uid = former.uid
    former.running = True
    world.refused(world.prestart(pod, AFU), TenancyActiveError, "still runs")
    assert not world.rack.done
    former.running = False
    world.start(pod, AFU)
    assert world.resets == 1


def test_a_plan_that_no_longer_holds_resets_nothing(world: World) -> None:
    """Kubelet restarted while the last owner's cgroup was read for the last time."""
    pod = prestarts_reset(world)
    task = world.prestart(pod, AFU)
    world.until_the_cgroup_is_read()
    world.plugin.job(0)
    world.until_the_cgroup_is_read()
    world.plugin.kubelet_begins("life 2")
    world.refused(task, NotFinishedError, "kubelet restarted")
    assert not world.rack.done
    assert not world.reports
