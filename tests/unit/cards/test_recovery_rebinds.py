"""When a card's driver is taken off and put on again, and when not, however it is asked for.

It takes all regions of the card away for a moment, and crashes the kernel where a port is open.
"""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
from doubles.cards import AFU, REGIONS, TOO_HOT
from ledger_scene import Scene
from ledger_support import tenancy
from ledger_world import Pod

from fpga_plugin.allocation.journal.records import Change, Condition, DebugHold
from fpga_plugin.allocation.names import card_of
from fpga_plugin.cards import recovery
from fpga_plugin.cards.recovery import Recovery
from fpga_plugin.errors import HardwareError, NotFinishedError, RefusedError
from fpga_plugin.hardware.model import Card, CardProblem
from fpga_plugin.ids import CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.settings.settings import RecoveryPolicy
from fpga_plugin.settings.values import CardSelection


@pytest.fixture
def scene(make: Callable[..., Scene]) -> Scene:
    """A card of two regions, of which the first is poisoned, and another card."""
    scene = make(cards=[2, 1], recovery=RecoveryPolicy.REBIND)
    scene.hold_releases()  # else the queue does it
    poison(scene, scene.regions[0])
    scene.plugin.recovery._now = scene.plugin.loop.time  # type: ignore[method-assign]
    return scene


def poison(scene: Scene, region: RegionId) -> None:
    scene.rack.slot(region).afu = None
    card = scene.rack.boards[card_of(region)].card
    failed = scene.rack.health(card).failed
    scene.plugin.call(lambda: scene.ledger.hardware.set_failing(card.id, failed))


def card(scene: Scene) -> Card:
    return scene.ledger.cards[card_of(scene.regions[0])]


def rebound(scene: Scene, *owner: DeviceId, recovery: Recovery | None = None) -> bool:
    which = recovery or scene.plugin.recovery
    task = scene.plugin.begin(which.rebind(card(scene), owner=frozenset(owner)))
    scene.plugin.work()
    result = task.result()
    assert isinstance(result, bool)
    return result


def commit(scene: Scene, change: Change) -> None:
    scene.plugin.call(lambda: scene.ledger.commit(change))


# ------------------------------------------------------------------ who forbids it


def claimed(scene: Scene) -> None:
    scene.admit(scene.regions[1])


def kept(scene: Scene) -> None:
    region = scene.regions[1]
    debug = DebugHold(region, PodUid("pod"), "space", "name", (), 600.0, "it failed", 1e9)
    commit(scene, Change(debug_holds={region: debug}))


def unreconciled(scene: Scene) -> None:
    scene.ledger.unreconciled.add(card_of(scene.regions[0]))


def bound_by_plugin(scene: Scene) -> None:
    """The other card's pod has a node that is this card's by now."""
    pod = scene.admit(scene.regions[2])
    (one,) = scene.ledger.tenancies.users(scene.ledger.allocations[pod.devices[0]])
    nodes = card(scene).regions[1].grant.nodes
    commit(scene, Change(tenancies={one.key: replace(one, nodes=nodes)}))


def lent(scene: Scene) -> None:
    node = card(scene).regions[1].grant.nodes[0]
    commit(scene, tenancy(scene.regions[2], "pod", node))


def former(scene: Scene, uid: str = "former", region: int = 1) -> None:
    pod = Pod(PodUid(uid), REGIONS, (), {})
    pod.running = True
    scene.pods.append(pod)
    commit(scene, tenancy(scene.regions[region], uid))


HINDRANCES = [claimed, kept, unreconciled, bound_by_plugin, lent, former]


@pytest.mark.parametrize("hindrance", HINDRANCES)
def test_a_card_of_which_somebody_may_have_something_is_not_rebound(
    scene: Scene, hindrance: Callable[[Scene], None]
) -> None:
    """Invariants 7 and 10. It is no attempt either: the card may be tried once that is over."""
    hindrance(scene)
    assert not rebound(scene)
    assert not scene.touched
    assert not scene.ledger.rebinding
    assert "rebinding the driver of a card" not in scene.logged
    assert scene.plugin.recovery.may(card(scene).id)


@pytest.mark.parametrize("hindrance", HINDRANCES)
def test_who_comes_while_kubelet_is_told_is_not_disturbed(
    scene: Scene, hindrance: Callable[[Scene], None]
) -> None:
    async def announced() -> None:
        assert scene.ledger.rebinding == {card(scene).id}, "told that it is Unhealthy, first"
        scene.plugin.loop.call_soon(lambda: None)
        waiting.append(scene.plugin.loop.create_future())
        await waiting[0]

    waiting: list = []
    with mock.patch.object(scene.plugin.recovery._link, "announced", announced):
        task = scene.plugin.begin(scene.plugin.recovery.rebind(card(scene), owner=frozenset()))
        scene.plugin.work()
        with mock.patch.object(scene.ledger, "rebinding", set()):  # else Allocate refuses
            hindrance(scene)
        scene.plugin.call(lambda: waiting[0].set_result(None))
        scene.plugin.work()
    assert task.result() is False
    assert not scene.touched
    assert not scene.ledger.rebinding
    assert scene.plugin.recovery.done == 0


def test_the_pod_that_waits_for_it_is_no_hindrance_to_it(scene: Scene) -> None:
    """Its own container cannot start otherwise; its allocation is as before."""
    mended(scene)
    pod = scene.admit(scene.regions[0])
    poison(scene, scene.regions[0])
    scene.plugin.call(lambda: scene.ledger.device_plugin.bind_pod(pod.devices, pod.uid))
    former(scene, pod.uid, 0)
    allocations = dict(scene.ledger.allocations)
    assert rebound(scene, *pod.devices)
    assert scene.ledger.allocations == allocations
    assert set(scene.touched) == set(scene.regions[:2])


def test_what_is_there_after_a_rebind_is_a_card_of_unknown_history(scene: Scene) -> None:
    """Even where every number is as before, and the port reads as the blank (invariant 4)."""
    with mock.patch.object(scene.rack, "rebind", return_value=None):
        scene.rack.slot(scene.regions[0]).afu = AFU
        assert rebound(scene)
    assert {scene.condition(region) for region in scene.regions[:2]} == {Condition.DIRTY}
    assert scene.condition(scene.regions[2]) is Condition.BLANK
    assert (scene.plugin.recovery.done, scene.plugin.recovery.failed) == (1, 0)
    assert not scene.ledger.rebinding
    assert "card rebound" in scene.logged


def test_a_card_whose_port_is_open_is_left_as_it_was(scene: Scene) -> None:
    """The backend opens every port of it before: nothing was touched."""
    before = dict(scene.ledger.regions)
    scene.rack.slot(scene.regions[1]).opens.add("somebody")
    assert not rebound(scene)
    assert not scene.ledger.rebinding
    assert scene.ledger.regions == before
    assert (scene.plugin.recovery.done, scene.plugin.recovery.failed) == (0, 0)
    assert "card has no driver" not in scene.logged


def test_nothing_is_touched_before_the_journal_has_it(scene: Scene) -> None:
    """Invariant 9: a plugin that dies in between has to find which card has no driver."""
    scene.journal.failing = 1
    assert not rebound(scene)
    assert not scene.touched
    assert not scene.ledger.rebinding


# ------------------------------------------------------------------ a card without driver


def no_driver(_card: object) -> None:
    raise HardwareError("bind: no such device", hint="bind it by hand")


def lose_driver(scene: Scene) -> CardId:
    lost = card(scene).id
    with mock.patch.object(scene.rack, "bind", no_driver):
        assert not rebound(scene)
    assert "card has no driver" in scene.logged
    return lost


def test_a_card_that_stays_without_driver_is_bound_by_the_next_life_of_the_plugin(
    scene: Scene,
) -> None:
    lost = lose_driver(scene)
    assert (scene.plugin.recovery.done, scene.plugin.recovery.failed) == (0, 1)
    assert lost not in scene.ledger.cards
    assert scene.journal.snapshot.rebinding == {lost: True}
    with mock.patch.object(scene.plugin.recovery._queue, "add") as add:
        scene.plugin.begin(scene.plugin.recovery.resume())
        scene.plugin.work()
    add.assert_called_with(lost)
    assert lost in scene.ledger.cards
    assert not scene.journal.snapshot.rebinding
    assert scene.condition(scene.regions[0]) is Condition.DIRTY


def test_what_a_pod_has_of_an_absent_card_keeps_its_driver_from_being_taken_off(scene: Scene):
    """It is not there to be compared, and what is known of it holds all the same."""
    scene.admit(scene.regions[1])
    lost = card(scene).id
    scene.plugin.call(lambda: scene.ledger.hardware.card_gone(lost))
    scene.plugin.call(scene.plugin.queue.sync)
    task = scene.plugin.begin(scene.plugin.recovery.check_unused(lost))
    scene.plugin.work()
    assert isinstance(task.exception(), RefusedError)


def test_a_driver_that_is_missing_is_no_reset_that_did_not_end(scene: Scene) -> None:
    """The scrubber would bind it again and again, under the operator's hands."""
    lost = lose_driver(scene)
    problem = CardProblem(scene.rack.boards[lost].card.address, "no driver")
    assert not scene.plugin.recovery.unfinished(lost)
    with mock.patch.dict(scene.ledger.problems, {lost: problem}):
        assert not scene.plugin.recovery.unfinished(lost)
    with mock.patch.dict(scene.ledger.problems, {lost: replace(problem, passing=True)}):
        assert scene.plugin.recovery.unfinished(lost)


def test_a_card_is_not_bound_while_something_else_is_done_to_it(scene: Scene) -> None:
    lost = lose_driver(scene)
    over = scene.plugin.loop.create_future()

    async def something() -> None:
        async with scene.operations.workers.lock(lost):
            await over

    scene.plugin.begin(something())
    scene.plugin.begin(scene.plugin.recovery.put_on(lost))
    scene.plugin.work()
    assert not scene.rack.boards[lost].present
    scene.plugin.call(lambda: over.set_result(None))
    scene.plugin.work()
    assert lost in scene.ledger.cards


def test_a_card_that_cannot_be_bound_keeps_no_other_from_it(scene: Scene) -> None:
    lost = lose_driver(scene)
    other = card_of(scene.regions[2])
    scene.rack.boards[other].present, scene.rack.boards[other].unbound = False, True
    scene.plugin.call(lambda: scene.ledger.hardware.set_rebinding(other, rebinding=True))
    bind = scene.rack.bind
    order = [lost, other] if lost < other else [other, lost]

    def first_fails(which: CardId) -> None:
        if which == order[0]:
            no_driver(which)
        bind(which)

    scene.logged.clear()
    with (
        mock.patch.object(scene.rack, "bind", first_fails),
        mock.patch.object(scene.plugin.recovery._queue, "add") as add,
    ):
        task = scene.plugin.begin(scene.plugin.recovery.resume())
        scene.plugin.work()
    assert task.result() is None
    assert scene.ledger.rebinding == {order[0]}
    assert mock.call(order[0]) in add.mock_calls, "it is tried again"
    assert scene.logged.count("card has no driver") == 1
    assert scene.logged.count("card bound again") == 1


def test_a_card_that_hangs_while_it_is_bound_keeps_no_other_down(scene: Scene) -> None:
    lost = lose_driver(scene)
    other = card_of(scene.regions[2])
    scene.rack.boards[other].present, scene.rack.boards[other].unbound = False, True
    scene.plugin.call(lambda: scene.ledger.hardware.set_rebinding(other, rebinding=True))
    first = min(lost, other)

    async def hangs() -> None:
        async with scene.operations.workers.lock(first):
            await scene.plugin.loop.create_future()

    scene.plugin.begin(hangs())
    scene.plugin.begin(scene.plugin.recovery.resume())
    scene.plugin.work()
    assert scene.ledger.rebinding == {first}


def test_a_card_in_the_midst_of_a_reset_is_put_online_whatever_the_journal_says(
    scene: Scene,
) -> None:
    """And no other that is not served: it may be so for a reason."""
    ours, other = card(scene), scene.ledger.cards[card_of(scene.regions[2])]
    assert not scene.ledger.rebinding
    problems = {
        ours.id: CardProblem(ours.address, "it is shut down", interrupted=True),
        other.id: CardProblem(other.address, "it has another driver"),
    }
    bind = scene.rack.bind
    with (
        mock.patch.dict(scene.ledger.problems, problems),
        mock.patch.object(scene.rack, "bind", side_effect=bind) as bound,
    ):
        scene.plugin.begin(scene.plugin.recovery.resume())
        scene.plugin.work()
    assert bound.mock_calls == [mock.call(ours.id)]


def test_a_card_that_cannot_be_looked_at_after_its_rebind_is_tried_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread can be started: whether it has its driver is not known."""
    one = card(scene)
    reads = mock.AsyncMock(side_effect=NotFinishedError("no thread can be started"))
    monkeypatch.setattr(scene.plugin.hardware._reads, "run", reads)
    task = scene.plugin.begin(scene.plugin.recovery.rebind(one, owner=frozenset()))
    scene.plugin.work()
    assert not task.result()
    assert one.id in scene.ledger.rebinding


def test_a_card_that_the_operator_leaves_out_is_not_put_online_either(scene: Scene) -> None:
    lost = lose_driver(scene)
    scene.plugin.hardware._cards = CardSelection(excluded=frozenset({lost}))
    with mock.patch.object(scene.rack, "bind") as bound:
        scene.plugin.begin(scene.plugin.recovery.resume())
        scene.plugin.work()
    assert bound.mock_calls == []
    assert lost in scene.ledger.rebinding, "it may be served again"


def test_a_rebind_whose_end_could_not_be_journalled_is_finished_later(scene: Scene) -> None:
    sound = card_of(scene.regions[2])
    scene.plugin.call(lambda: scene.ledger.hardware.set_rebinding(sound, rebinding=True))
    assert sound in scene.journal.snapshot.rebinding
    scene.plugin.call(scene.plugin.queue.sync)
    scene.plugin.work()
    assert sound not in scene.journal.snapshot.rebinding


# ------------------------------------------------------------------ when it is tried


def test_it_is_tried_again_after_a_pause_that_doubles_and_is_forgotten(scene: Scene) -> None:
    """A card that a rebind does not help is not rebound for ever; the queue looks again then."""
    which = scene.plugin.recovery
    clock = [1000.0]
    which._now = lambda: clock[0]  # type: ignore[method-assign]
    later: list[tuple[CardId, float]] = []
    which._queue.add_later = lambda *what: later.append(what)  # type: ignore[method-assign]
    id_ = card(scene).id
    expected = recovery.FIRST_PAUSE
    for _ in range(9):
        assert which.may(id_)
        assert rebound(scene)
        which_card, pause = later.pop()
        assert which_card == id_
        assert pause == pytest.approx(expected, rel=0.25)
        clock[0] += pause - 1
        assert not which.may(id_)
        assert not rebound(scene)
        clock[0] += 1
        expected = min(expected * 2, recovery.LONGEST_PAUSE)
    assert expected == recovery.LONGEST_PAUSE
    clock[0] += recovery.LONGEST_PAUSE + 1
    assert rebound(scene)
    assert later.pop()[1] == pytest.approx(recovery.FIRST_PAUSE, rel=0.25)


def test_the_operator_may_ask_for_it_at_once_and_for_a_drained_card_once(scene: Scene) -> None:
    """A drained card may be pulled by whoever drained it: nothing is done to it unasked."""
    which, this = scene.plugin.recovery, card(scene)
    scene.plugin.call(lambda: scene.ledger.hardware.set_drained(this.id, drained=True))
    assert which.may(this.id)
    assert not which.due(this)
    which.ask(this.id)
    assert which.due(this)
    assert rebound(scene)
    assert not which.may(this.id)
    poison(scene, scene.regions[0])
    assert not which.due(card(scene))
    which.ask(this.id)
    assert which.may(this.id)
    assert rebound(scene)
    poison(scene, scene.regions[0])
    which._attempts.clear()
    assert which.poisoned(card(scene))
    assert not which.due(card(scene)), "he asked for one"


def foreign(scene: Scene) -> None:
    scene.plugin.call(lambda: scene.ledger.hardware.set_foreign({card(scene).id: "drain the node"}))


def paused(scene: Scene) -> None:
    scene.plugin.call(lambda: scene.plugin.recovery._note_attempt(card(scene).id))


def mended(scene: Scene) -> None:
    scene.plugin.call(lambda: scene.ledger.hardware.set_failing(card(scene).id, {}))


@pytest.mark.parametrize("why_not", [claimed, kept, foreign, paused, mended])
def test_a_card_is_only_rebound_in_the_background_where_nobody_has_it(
    scene: Scene, why_not: Callable[[Scene], None]
) -> None:
    assert scene.plugin.recovery.due(card(scene))
    why_not(scene)
    assert not scene.plugin.recovery.due(card(scene))


def test_without_the_operators_word_it_is_never_done(make: Callable[..., Scene]) -> None:
    scene = make(cards=[1])
    scene.hold_releases()
    poison(scene, scene.regions[0])
    scene.plugin.recovery.ask(card(scene).id)
    assert not scene.plugin.recovery.due(card(scene))
    assert not rebound(scene)
    assert not scene.touched


def test_what_a_rebind_would_not_mend_is_not_called_poisoned(scene: Scene) -> None:
    """A card that is too hot is too hot afterwards."""
    which, this = scene.plugin.recovery, card(scene)
    one, two, _ = scene.regions
    assert which.poisoned(this)
    assert which.poisoned(this, [one])
    assert not which.poisoned(this, [two])
    assert not which.poisoned(this, [])
    failed = {**scene.ledger.failing, two: TOO_HOT}
    scene.plugin.call(lambda: scene.ledger.hardware.set_failing(this.id, failed))
    assert not which.poisoned(this)
    assert not which.poisoned(this, [one])
    mended(scene)
    assert not which.poisoned(this)
