"""What the ledger and the report say of a region after a step on it failed, for any cause."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from doubles.cards import TOO_HOT
from ledger_scene import Scene

from fpga_plugin.allocation.journal.records import Condition, Tenancy, TenancyKey
from fpga_plugin.allocation.names import card_of
from fpga_plugin.cards.operations import Work
from fpga_plugin.cards.reports import Report
from fpga_plugin.errors import (
    CardGoneError,
    FpgaPluginError,
    HardwareError,
    PortInUseError,
    ProgrammingError,
    RefusedError,
    WrongImageError,
)
from fpga_plugin.hardware.backend import CardHealth
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import RegionId
from fpga_plugin.kubernetes.cgroup import Cgroup
from fpga_plugin.kubernetes.names import PodUid


@pytest.fixture
def scene(make: Callable[..., Scene]) -> Scene:
    scene = make(cards=[2], memory=True)
    scene.hold_releases()
    return scene


def card(scene: Scene) -> Card:
    return scene.ledger.cards[card_of(scene.regions[0])]


def begun(scene: Scene, *regions: RegionId) -> dict[RegionId, Report]:
    """Work on these regions has begun."""
    scene.plugin.call(lambda: scene.ledger.work.working(regions))
    scene.plugin.call(lambda: scene.operations.begin(card(scene), regions))
    return {region: Report(region) for region in regions}


def step(scene: Scene, does: Callable[[], None], *, pr: bool = False, blank: bool = False):
    (report,) = begun(scene, scene.regions[0]).values()
    task = scene.plugin.begin(scene.operations.step(card(scene), report, does, pr=pr, blank=blank))
    scene.plugin.work()
    return report, task.exception()


def fails(error: Exception) -> Callable[[], None]:
    def does() -> None:
        raise error

    return does


@pytest.mark.parametrize(
    ("error", "blank", "after"),
    [
        (WrongImageError("another id"), False, Condition.DIRTY),
        (WrongImageError("another id"), True, Condition.FAULTED),
        (CardGoneError("it went"), False, Condition.DIRTY),
        (PortInUseError("it is open"), False, Condition.DIRTY),
        (RefusedError("no"), False, Condition.DIRTY),
        (HardwareError("it failed"), False, Condition.DIRTY),
        (ZeroDivisionError("a bug"), False, Condition.DIRTY),
    ],
)
def test_a_step_that_fails_leaves_a_region_that_nobody_gets_and_says_why(
    scene: Scene, error: Exception, *, blank: bool, after: Condition
) -> None:
    """Invariant 4: SCRUBBING would be a region on which somebody works, and nobody does."""
    report, raised = step(scene, fails(error), blank=blank)
    assert raised is error
    assert scene.condition(scene.regions[0]) is after
    assert str(error) in report.error
    assert report.failure


def test_a_region_that_fails_twice_is_faulted_unless_a_pr_went_well_in_between(
    scene: Scene,
) -> None:
    """The first may be that of a card that was swapped between two looks."""
    region, broken = scene.regions[0], fails(HardwareError("it failed"))
    step(scene, broken)
    assert scene.condition(region) is Condition.DIRTY
    step(scene, lambda: None, pr=True)
    step(scene, broken)
    assert scene.condition(region) is Condition.DIRTY
    step(scene, lambda: None)
    step(scene, broken)
    assert scene.condition(region) is Condition.FAULTED, "a reset that goes well says nothing"


@pytest.mark.parametrize(
    ("health", "after"),
    [
        (HardwareError("no answer"), Condition.FAULTED),
        (CardHealth({}), Condition.DIRTY),
        ("too hot", Condition.DIRTY),
    ],
)
def test_what_failed_on_a_card_whose_signals_cannot_be_read_is_faulted(
    scene: Scene, health: object, after: Condition
) -> None:
    """Nobody says that it is well."""

    def read(_card: Card) -> object:
        if isinstance(health, Exception):
            raise health
        return CardHealth({scene.regions[0]: TOO_HOT}) if health == "too hot" else health

    error = HardwareError("it failed")
    with mock.patch.object(scene.rack, "health", read):
        assert step(scene, fails(error))[1] is error
    assert scene.condition(scene.regions[0]) is after
    assert (scene.regions[0] in scene.ledger.failing) is (health == "too hot")


def test_a_pr_that_fails_on_a_sound_port_may_be_tried_again(scene: Scene) -> None:
    """Nothing was written."""
    for _ in range(3):
        step(scene, fails(ProgrammingError("refused")), pr=True)
        assert scene.condition(scene.regions[0]) is Condition.DIRTY


def test_a_file_that_is_mislabelled_never_costs_the_node_the_region(scene: Scene) -> None:
    """A tenant names it as often as it likes; f11 is the same of an image that hangs."""
    for _ in range(3):
        step(scene, fails(WrongImageError("another id")), pr=True)
        assert scene.condition(scene.regions[0]) is Condition.DIRTY


def replug(scene: Scene) -> None:
    this = card(scene)
    scene.ledger.hardware.card_gone(this.id)
    scene.ledger.hardware.card_found(this, {}, None)


@pytest.mark.parametrize("error", [None, HardwareError("it failed")])
def test_what_was_done_to_a_card_that_went_says_nothing_of_the_one_that_is_there(
    scene: Scene, error: Exception | None
) -> None:
    """Invariant 2: the step went well, on whatever was there then."""

    def does() -> None:
        replug(scene)
        if error is not None:
            raise error

    report, raised = step(scene, does)
    assert isinstance(raised, CardGoneError)
    assert report.error
    assert scene.condition(scene.regions[0]) is Condition.DIRTY
    assert scene.regions[0] not in scene.operations.doubted


def test_what_was_refused_stays_refused_though_the_card_went(scene: Scene) -> None:
    """The next try works on another card, and is refused for the same reason."""

    def does() -> None:
        replug(scene)
        raise RefusedError("no")

    _, raised = step(scene, does)
    assert not isinstance(raised, CardGoneError)
    assert str(raised) == "no"


def test_a_scrub_that_must_not_begin_leaves_the_ledger_as_it_is(scene: Scene) -> None:
    region = card(scene).regions[0]
    before, writes = scene.ledger.record(region.id), scene.journal.writes
    ports, reports = {region.id: mock.Mock()}, {region.id: Report(region.id)}
    check = mock.Mock(side_effect=RefusedError("kubelet restarted"))
    work = Work(scene.operations, card(scene), ports, reports, check)
    task = scene.plugin.begin(work.scrub([region], None))
    scene.plugin.work()
    assert isinstance(task.exception(), RefusedError)
    assert (scene.ledger.record(region.id), scene.journal.writes) == (before, writes)


def test_a_card_that_came_back_is_not_blamed_for_what_failed_before(scene: Scene) -> None:
    broken = fails(HardwareError("it failed"))
    step(scene, broken)
    scene.plugin.call(lambda: replug(scene))
    step(scene, broken)
    assert scene.condition(scene.regions[0]) is Condition.DIRTY


@pytest.mark.parametrize("keep", [True, False])
def test_a_scrub_whose_blank_reads_as_something_else_is_a_region_that_is_lost(
    scene: Scene, *, keep: bool
) -> None:
    """Invariant 4: of a tenant's file it would say less."""
    (report,) = begun(scene, scene.regions[0]).values()
    flights: list[bool] = []

    def does(*_: object, **__: object) -> None:
        flights.append(bool(scene.operations.workers._in_flight))
        raise WrongImageError("another id")

    with mock.patch("fpga_plugin.cards.operations.steps.scrub", does):
        region = card(scene).regions[0]
        ports, reports = {region.id: mock.Mock()}, {region.id: report}
        work = Work(scene.operations, card(scene), ports, reports, lambda: None)
        keeping = {region.id} if keep else set()
        task = scene.plugin.begin(work.scrub([region], None, keeping))
        scene.plugin.work()
    assert isinstance(task.exception(), WrongImageError)
    assert scene.condition(scene.regions[0]) is Condition.FAULTED
    assert flights == [not keep], "nothing is programmed where it stays"


def test_who_watches_is_told_of_each_report(scene: Scene) -> None:
    told = mock.Mock()
    report = Report(scene.regions[0])
    with mock.patch.object(type(scene.operations), "observer", told):
        scene.plugin.call(lambda: scene.operations.report(report))
    told.reported.assert_called_once_with(report)


@pytest.mark.parametrize("pr", [True, False])
def test_a_successor_waits_for_prs_and_for_nothing_else(scene: Scene, *, pr: bool) -> None:
    """Only a process in a PR cannot die."""
    seen: list[bool] = []
    step(
        scene,
        lambda: seen.append(scene.regions[0] in scene.operations.workers._in_flight),
        pr=pr,
    )
    assert seen == [pr]
    assert not scene.operations.workers._in_flight


CGROUP, LATER = Cgroup("/t", "/t/pod", 1, 2), Cgroup("/t", "/t/pod", 1, 3)


@pytest.mark.parametrize(
    ("more", "lives"),
    [
        ({}, True),
        ({"used": False}, False),  # no container of it ever had the region
        ({"left": False}, True),
        # Another instance of the pod runs, which never had it, or may have.
        ({"cgroups": (CGROUP,)}, False),
        ({"cgroups": (CGROUP,), "left": False}, True),  # kubelet may be about to start it again
        ({"cgroups": (CGROUP, LATER)}, True),
        ({"cgroups": (LATER,)}, True),
    ],
)
def test_a_pod_is_gone_by_kubelets_word_and_by_its_cgroup_never_by_one_alone(
    scene: Scene, more: dict[str, Any], *, lives: bool
) -> None:
    """Invariant 7. A pod of its uid runs; the cgroup in which it ran first is gone."""
    key = TenancyKey(scene.regions[0], 1, PodUid("pod"))
    one = replace(Tenancy(key, (), used=True, left=True), **more)
    cgroups = mock.Mock(may_live=lambda _: True, instance_gone=lambda noted: set(noted) == {CGROUP})
    with mock.patch.object(type(scene.operations), "cgroups", cgroups):
        task = scene.plugin.begin(scene.operations.living([one]))
        scene.plugin.work()
        assert (task.result() is one) == lives


@pytest.mark.parametrize("left", [False, True])
def test_of_a_pod_that_is_not_known_kubelets_word_is_all_there_is(
    scene: Scene, *, left: bool
) -> None:
    one = Tenancy(TenancyKey(scene.regions[0], 1, None), (), used=True, left=left)
    task = scene.plugin.begin(scene.operations.living([one]))
    scene.plugin.work()
    assert task.result() is (None if left else one)


@pytest.mark.parametrize("pods", [("b", "a"), ("b", None, "a"), (None, "b")])
def test_of_several_that_live_the_first_by_name_is_named(
    scene: Scene, pods: tuple[str | None, ...]
) -> None:
    """A pod that nobody knows comes first. So a reason that is shown does not change by itself."""
    keys = [TenancyKey(scene.regions[0], n, pod and PodUid(pod)) for n, pod in enumerate(pods)]
    task = scene.plugin.begin(scene.operations.living(Tenancy(k, (), used=True) for k in keys))
    scene.plugin.work()
    one = task.result()
    assert one is not None
    assert one.pod == (None if None in pods else "a")


def test_no_cgroup_is_asked_about_a_pod_that_is_not_known(scene: Scene) -> None:
    """Nothing would ever end such a tenancy."""
    one = Tenancy(TenancyKey(scene.regions[0], 1, None), (), used=True, left=True)
    cgroups = mock.Mock(may_live=lambda _: True, instance_gone=lambda _: False)
    with mock.patch.object(type(scene.operations), "cgroups", cgroups):
        task = scene.plugin.begin(scene.operations.living([one]))
        scene.plugin.work()
    assert task.result() is None


def clear(scene: Scene, reports: dict[RegionId, Report]) -> BaseException | None:
    task = scene.plugin.begin(scene.operations.clear_memory(card(scene), reports))
    scene.plugin.work()
    return task.exception()


def test_one_card_has_one_memory_and_all_its_regions_are_told_what_became_of_it(
    scene: Scene,
) -> None:
    reports = begun(scene, *scene.regions)
    flights: list[bool] = []
    real = scene.rack.clear_memory

    def cleared(this: Card) -> None:
        flights.append(bool(scene.operations.workers._in_flight))
        real(this)

    with mock.patch.object(scene.rack, "clear_memory", cleared):
        assert clear(scene, reports) is None
    assert flights == [False], "it is no PR: a process may die of it"
    first, second = reports.values()
    assert first.steps == second.steps
    assert first.steps


@pytest.mark.parametrize("lost", [True, False])
def test_where_the_memory_cannot_be_cleared_none_of_its_regions_is_given_out(
    scene: Scene, *, lost: bool
) -> None:
    """Invariant 4: what the last owner left in it may be read by the next."""
    reports = begun(scene, *scene.regions)
    if lost:
        scene.operations.doubted.update(scene.regions)
    error = HardwareError("the knob does not move")
    with mock.patch.object(scene.rack, "clear_memory", mock.Mock(side_effect=error)):
        assert isinstance(clear(scene, reports), FpgaPluginError)
    after = Condition.FAULTED if lost else Condition.DIRTY
    assert {scene.condition(region) for region in scene.regions} == {after}
    assert all("the knob does not move" in report.error for report in reports.values())
