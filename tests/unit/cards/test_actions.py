"""What an operator does with a card, and what he is told before he pulls it.

"It may be pulled" is a promise to somebody who has a hand on the hardware, and virtual functions
that are made or removed take away what somebody has of the card.
"""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from doubles.cards import AFU, REGIONS, TOO_HOT
from ledger_scene import Scene
from ledger_support import tenancy
from ledger_world import INSTANCES, Pod

from fpga_plugin.allocation.journal.records import Change, Condition, DebugHold
from fpga_plugin.allocation.names import card_of
from fpga_plugin.cards.actions import CardActions, CardState
from fpga_plugin.errors import (
    FpgaPluginError,
    NotFinishedError,
    RefusedError,
    UnknownDeviceError,
)
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.model import CardProblem, PciFunction, Region
from fpga_plugin.ids import CardId, DeviceId, PciAddress, RegionId
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.settings.settings import RecoveryPolicy


@pytest.fixture
def scene(make: Callable[..., Scene]) -> Scene:
    """A card of two regions that is out of service, and another card."""
    scene = make(cards=[2, 1], recovery=RecoveryPolicy.REBIND)
    scene.hold_releases()  # else the queue does it
    scene.plugin.recovery._now = scene.plugin.loop.time  # type: ignore[method-assign]
    drain(scene)
    return scene


def drain(scene: Scene, *, drained: bool = True) -> None:
    scene.plugin.call(lambda: scene.ledger.hardware.set_drained(card(scene), drained=drained))


def card(scene: Scene) -> CardId:
    return card_of(scene.regions[0])


def done(scene: Scene, action: Callable[[CardActions], Coroutine[Any, Any, Any]]) -> Any:
    task = scene.plugin.begin(action(scene.plugin.actions))
    scene.plugin.work()
    return task.result()


def state(scene: Scene) -> CardState:
    found = done(scene, lambda actions: actions.state(card(scene)))
    assert isinstance(found, CardState)
    return found


def commit(scene: Scene, change: Change) -> None:
    scene.plugin.call(lambda: scene.ledger.commit(change))


# ------------------------------------------------------------------ what may be in the way


def owned(scene: Scene) -> None:
    drain(scene, drained=False)
    scene.start(scene.admit(scene.regions[0]), AFU)
    drain(scene)


def in_service(scene: Scene) -> None:
    drain(scene, drained=False)


def unreconciled(scene: Scene) -> None:
    scene.ledger.unreconciled.add(card(scene))


def foreign(scene: Scene) -> None:
    scene.plugin.call(lambda: scene.ledger.hardware.set_foreign({card(scene): "pod x has it"}))


def stranger(scene: Scene) -> None:
    """A pod was given a node of the region as another card's, and may have it open later."""
    node = scene.ledger.cards[card(scene)].regions[0].grant.nodes[0]
    commit(scene, tenancy(scene.regions[2], "pod", node))


def at_work(scene: Scene) -> None:
    async def work() -> None:
        async with scene.operations.workers.lock(card(scene)):
            await scene.plugin.loop.create_future()

    scene.plugin.begin(work())


def port_open(scene: Scene) -> None:
    scene.rack.slot(scene.regions[0]).opens.add("somebody")


def former(scene: Scene) -> None:
    """A pod that had a region, and lives on: as a force-deleted one may."""
    commit(scene, tenancy(scene.regions[0], living(scene).uid))


def living(scene: Scene) -> Pod:
    pod = Pod(PodUid("former"), REGIONS, (), {})
    pod.running = True
    scene.pods.append(pod)
    return pod


def kept(scene: Scene, until: float = 1e9) -> None:
    region = scene.regions[0]
    debug = DebugHold(region, PodUid("pod"), "space", "name", (), 600.0, "it failed", until)
    commit(scene, Change(debug_holds={region: debug}))


def undecided(scene: Scene) -> None:
    kept(scene, until=0.0)


def rebind_asked_for(scene: Scene) -> None:
    poison(scene)
    scene.plugin.recovery.ask(card(scene))


def poison(scene: Scene) -> None:
    scene.rack.slot(scene.regions[0]).afu = None
    failed = scene.rack.health(scene.ledger.cards[card(scene)]).failed
    scene.plugin.call(lambda: scene.ledger.hardware.set_failing(card(scene), failed))


def dirty(scene: Scene) -> None:
    scene.plugin.call(lambda: scene.ledger.work.dirty([scene.regions[0]], "it was had"))


def dirty_and_hot(scene: Scene) -> None:
    dirty(scene)
    scene.plugin.call(
        lambda: scene.ledger.hardware.set_failing(card(scene), {scene.regions[0]: TOO_HOT})
    )


def faulted(scene: Scene) -> None:
    scene.plugin.call(lambda: scene.ledger.work.working([scene.regions[0]]))
    scene.plugin.call(lambda: scene.ledger.work.faulted(scene.regions[0], "it broke"))


def scrubbing(scene: Scene) -> None:
    scene.plugin.call(lambda: scene.ledger.work.working([scene.regions[0]]))


@pytest.mark.parametrize(
    ("way", "waits", "not_clean"),
    [
        (lambda _: None, [], []),
        (owned, ["{} has an owner"], []),
        (in_service, ["it is in service: run `fpga-plugin card drain"], []),
        (unreconciled, ["not looked at: who has card"], []),
        (foreign, ["not looked at: card 0000-10-00.0 is left alone: pod x has it"], []),
        (stranger, ["is also open to pod pod, which was given it as"], []),
        (kept, ["not looked at: region {} is kept for debugging as pod space/name"], []),
        (undecided, ["not looked at: region {} is to be kept for debugging"], []),
        (at_work, ["work on it is under way"], []),
        (port_open, ["of region {} is in use"], []),
        (former, ["pod former, which had {}, still runs"], []),
        (rebind_asked_for, ["its driver is to be rebound"], []),
        (dirty, ["{} is not scrubbed yet"], ["{} is DIRTY (it was had)"]),
        (dirty_and_hot, ["{} is not scrubbed yet"], ["{} is DIRTY (thermal: AP6)"]),
        (scrubbing, ["{} is not scrubbed yet"], ["{} is SCRUBBING"]),
        (faulted, [], ["{} is FAULTED (it broke)"]),
    ],
)
def test_what_keeps_a_card_from_being_pulled(
    scene: Scene, way: Callable[[Scene], None], waits: list[str], not_clean: list[str]
) -> None:
    """Each alone is told, in words, and nothing else is."""
    way(scene)
    found = state(scene)
    region = scene.regions[0]
    for words, told in zip(waits, found.waits_for, strict=True):
        assert words.format(region) in told
    for words, told in zip(not_clean, found.not_clean, strict=True):
        assert told.startswith(words.format(region))
    assert found.may_be_pulled == (not waits)
    assert (found.present, found.drained) == (True, way is not in_service)
    assert [one.used for one in found.owners] == ([True] if way is owned else [])


@pytest.mark.parametrize("asks", ["drain", "undrain", "retry", "state"])
@pytest.mark.parametrize("way", [owned, unreconciled, foreign, stranger, kept, undecided, former])
def test_no_port_is_tried_that_somebody_may_want_to_open(
    scene: Scene, way: Callable[[Scene], None], asks: str
) -> None:
    """Invariant 7: the probe itself would make the tenant's open fail, and resets what is kept."""
    way(scene)
    tried: list[RegionId] = []
    port = scene.rack.open_port

    def noted(which: Any, region: Any) -> Any:
        tried.append(region.id)
        return port(which, region)

    questions: dict[str, Callable[[CardActions], Coroutine[Any, Any, Any]]] = {
        "drain": lambda actions: actions.drain(card(scene)),
        "undrain": lambda actions: actions.drain(card(scene), drained=False),
        "retry": lambda actions: actions.retry(card(scene)),
        "state": lambda actions: actions.state(card(scene)),
    }
    with mock.patch.object(scene.rack, "open_port", noted):
        done(scene, questions[asks])
    assert scene.regions[0] not in tried
    assert (scene.regions[1] in tried) == (way in {stranger, kept, undecided, former})


def test_an_owner_that_comes_while_a_port_is_tried_keeps_his_to_himself(scene: Scene) -> None:
    """Kubelet's records named him."""
    tried: list[RegionId] = []
    port = scene.rack.open_port

    def noted(which: Any, region: Any) -> Any:
        tried.append(region.id)
        pod, device = living(scene), DeviceId(scene.regions[1])
        scene.ledger.device_plugin.adopt(REGIONS, device, pod.uid, {})
        return port(which, region)

    with mock.patch.object(scene.rack, "open_port", noted):
        assert state(scene).waits_for[0] == f"not looked at: {scene.regions[1]} has an owner"
    assert tried == [scene.regions[0]]


def test_nobody_works_on_a_card_while_its_ports_are_tried(scene: Scene) -> None:
    """Whoever works on it would find them in use, and take that for a tenant."""
    task = scene.plugin.begin(scene.plugin.actions.state(card(scene)))
    seen = []
    while scene.plugin.jobs:
        seen.append(scene.operations.workers.locked(card(scene)))
        scene.plugin.job(0)
    assert task.done()
    assert seen
    assert all(seen)


def test_an_owner_that_comes_while_it_waits_for_the_card_is_not_disturbed(scene: Scene) -> None:
    """Somebody else's work on the card came first, and its end gave the card an owner."""
    over = scene.plugin.loop.create_future()

    async def asks() -> CardState:
        async with scene.operations.workers.lock(card(scene)):
            await over
        return await scene.plugin.actions.state(card(scene))

    async def is_next() -> None:
        async with scene.operations.workers.lock(card(scene)):
            scene.ledger.hardware.set_drained(card(scene), drained=False)
            scene.ledger.device_plugin.allocate(REGIONS, [scene.regions[0]])

    asked: Any = scene.plugin.begin(asks())
    scene.plugin.begin(is_next())
    with mock.patch.object(scene.rack, "open_port", side_effect=AssertionError("disturbed")):
        scene.plugin.call(lambda: over.set_result(None))
        scene.plugin.work()
    assert asked.result().waits_for == ("it got an owner just now",)


# ------------------------------------------------------------------ which cards are known


def unplug(scene: Scene) -> None:
    scene.rack.boards[card(scene)].present = False
    scene.plugin.begin(scene.plugin.hardware.look(card(scene)))
    scene.plugin.work()
    assert card(scene) not in scene.ledger.cards


@pytest.mark.parametrize("by", ["drain", "rebinding", "allocation", "nothing"])
def test_a_card_that_is_not_there_is_known_by_what_is_remembered_of_it(
    scene: Scene, by: str
) -> None:
    """A pulled card's drain can be ended, and its allocations are seen."""
    drain(scene, drained=False)
    if by == "allocation":
        scene.admit(scene.regions[0])
    unplug(scene)
    if by == "drain":
        drain(scene)
    if by == "rebinding":
        scene.plugin.call(lambda: scene.ledger.hardware.set_rebinding(card(scene), rebinding=True))
    if by == "nothing":
        with pytest.raises(UnknownDeviceError, match="no card"):
            state(scene)
        return
    found = state(scene)
    assert (found.present, found.drained) == (False, by == "drain")
    assert len(found.waits_for) == (by == "allocation")
    assert found.not_clean == ()


@pytest.mark.parametrize("text", ["", "../x", "0000-ff-00.0", "0000-10-00.0-p0"])
def test_what_names_no_card_is_refused(scene: Scene, text: str) -> None:
    with pytest.raises(UnknownDeviceError, match="no card"):
        done(scene, lambda actions: actions.state(text))


# ------------------------------------------------------------------ in and out of service


def test_a_card_that_is_drained_is_so_for_the_next_life_too_and_until_its_end(
    scene: Scene,
) -> None:
    drain(scene, drained=False)
    assert done(scene, lambda actions: actions.drain(card(scene))).drained
    assert scene.journal.snapshot.drained == {card(scene): True}
    assert not done(scene, lambda actions: actions.drain(card(scene), drained=False)).drained
    assert not scene.journal.snapshot.drained


def test_what_failed_on_a_card_is_tried_again_when_the_operator_asks(scene: Scene) -> None:
    faulted(scene)
    done(scene, lambda actions: actions.retry(card(scene)))
    assert scene.condition(scene.regions[0]) is Condition.DIRTY, "worth a scrub again"
    assert scene.rack.accepted == [card(scene)], "what was counted before is no error any more"
    assert "card bound again" not in scene.logged, "it has its driver"
    drain(scene, drained=False)
    faulted(scene)
    scene.plugin.kubelet_answers()
    scene.plugin.work()
    assert scene.condition(scene.regions[0]) is Condition.FAULTED
    done(scene, lambda actions: actions.retry(card(scene)))
    scene.plugin.work()
    assert scene.condition(scene.regions[0]) is Condition.BLANK


def test_errors_of_a_card_are_cleared_while_nobody_works_on_it(scene: Scene) -> None:
    """Whoever works on it reads them."""
    held: list[bool] = []

    def clear_errors(_: object) -> dict[str, int]:
        held.append(scene.operations.workers.locked(card(scene)))
        return {}

    with mock.patch.object(scene.rack, "clear_errors", clear_errors):
        done(scene, lambda actions: actions.retry(card(scene)))
    assert held == [True]


def test_a_card_that_is_tried_again_is_looked_at(scene: Scene) -> None:
    scene.plugin.call(
        lambda: scene.ledger.hardware.set_failing(card(scene), {scene.regions[0]: TOO_HOT})
    )
    done(scene, lambda actions: actions.retry(card(scene)))
    assert not scene.ledger.failing, "the hardware says that it is well"


def test_a_poisoned_card_is_rebound_out_of_service_only_when_it_is_asked_for(
    scene: Scene,
) -> None:
    """The operator was told that it may be pulled."""
    poison(scene)
    assert state(scene).may_be_pulled
    asked = done(scene, lambda actions: actions.retry(card(scene)))
    assert asked.waits_for[0] == "its driver is to be rebound"


def test_a_card_without_its_driver_gets_it_when_the_operator_asks(scene: Scene) -> None:
    scene.plugin.call(lambda: scene.ledger.hardware.set_rebinding(card(scene), rebinding=True))
    unplug(scene)
    scene.rack.boards[card(scene)].unbound = True
    done(scene, lambda actions: actions.retry(card(scene)))
    assert card(scene) in scene.ledger.cards
    assert not scene.ledger.rebinding


@pytest.mark.parametrize("way", [kept, undecided])
def test_what_is_kept_for_debugging_is_given_up_at_once(
    scene: Scene, way: Callable[[Scene], None]
) -> None:
    way(scene)
    done(scene, lambda actions: actions.release(card(scene)))
    assert not scene.journal.snapshot.debug_holds
    writes = scene.journal.writes
    with pytest.raises(RefusedError, match="nothing of card"):
        done(scene, lambda actions: actions.release(card(scene)))
    assert scene.journal.writes == writes
    assert scene.logged.count("an operator ends what is kept for debugging") == 1


# ------------------------------------------------------------------ virtual functions


class Maker:
    """`make_functions`, and in what state it found the card."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.calls: list[tuple[CardId, bool]] = []
        scene.rack.make_functions = self.make  # type: ignore[method-assign]
        scene.rack.functions = lambda _card: [FUNCTION]  # type: ignore[method-assign]
        scene.rack.lent.update(scene.regions[:2])

    def make(self, which: CardId, *, make: bool) -> None:
        self.calls.append((which, make))
        assert self.scene.operations.workers.locked(which), "somebody may work on it"
        board = self.scene.rack.boards[which]
        assert not any(slot.held or slot.opens for slot in board.slots.values()), "it would wait"
        assert not self.scene.rack.lent, "a driver of the plugin's still has them"
        board.card = replace(
            board.card,
            regions=tuple(replace(r, handle=next(INSTANCES)) for r in board.card.regions),
        )


FUNCTION = mock.create_autospec(PciFunction, instance=True)


@pytest.mark.parametrize("wanted", [True, False])
def test_functions_are_made_of_a_card_that_nobody_has(scene: Scene, *, wanted: bool) -> None:
    """All that the plugin has of it is given back before, and what is there then is looked at."""
    maker = Maker(scene)
    made = done(scene, lambda actions: actions.functions(card(scene), make=wanted))
    assert made == (FUNCTION,)
    assert maker.calls == [(card(scene), wanted)]
    assert scene.ledger.cards[card(scene)] == scene.rack.boards[card(scene)].card


def test_functions_are_made_of_a_card_that_is_not_served_for_the_lack_of_them(
    scene: Scene,
) -> None:
    """Such a card is not compared with kubelet's records, of which all owners are adopted."""
    unreconciled(scene)
    unplug(scene)
    maker = Maker(scene)
    scene.rack.lent.clear()
    scene.plugin.call(scene.plugin.queue.unsync)
    with pytest.raises(RefusedError, match="is not known"):
        done(scene, lambda actions: actions.functions(card(scene), make=True))
    scene.plugin.call(scene.plugin.queue.sync)
    scene.rack.boards[card(scene)].present = True
    done(scene, lambda actions: actions.functions(card(scene), make=True))
    assert maker.calls == [(card(scene), True)]


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (owned, "{} has an owner"),
        (in_service, "is in service"),
        (kept, "region {} is kept for debugging as pod space/name"),
        (undecided, "region {} is to be kept for debugging, if its container failed"),
        (unreconciled, "is not known: kubelet's records were not read"),
        (foreign, "is left alone: pod x has it"),
        (stranger, "of region {} is also open to pod pod"),
        (former, "pod former, which had {}, still runs"),
        (port_open, "of region {} is in use"),
    ],
)
def test_functions_of_a_card_that_somebody_has_or_may_be_given_stay(
    scene: Scene, way: Callable[[Scene], None], words: str
) -> None:
    """Invariant 3: they are what the pod was given; the kernel waits, or crashes, where it has one
    open."""
    way(scene)
    maker = Maker(scene)
    with pytest.raises(FpgaPluginError, match=words.format(scene.regions[0])):
        done(scene, lambda actions: actions.functions(card(scene), make=False))
    assert maker.calls == []


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_an_owner_that_kubelets_records_name_meanwhile_keeps_its_functions(
    scene: Scene, *, last: bool, ended: bool
) -> None:
    """Neither is another port tried: the owner may be about to open it."""
    pod = living(scene)
    maker = Maker(scene)
    given_back: list[RegionId] = []

    def give_back(_card: object, region: Region) -> None:
        given_back.append(region.id)
        scene.rack.lent.discard(region.id)
        if len(given_back) == 1 + last:
            steps = scene.ledger.device_plugin
            steps.adopt(REGIONS, DeviceId(scene.regions[1]), pod.uid, {})
            if ended:
                steps.release([scene.regions[1]])

    scene.rack.give_back = give_back  # type: ignore[method-assign]
    words = "still runs" if ended else "has an owner"
    with pytest.raises(RefusedError, match=f"{scene.regions[1]}.* {words}"):
        done(scene, lambda actions: actions.functions(card(scene), make=False))
    assert given_back == scene.regions[: 1 + last]
    assert maker.calls == []


@pytest.mark.parametrize("lives", [True, False])
def test_functions_of_a_card_that_cannot_be_served_are_made_unless_somebody_has_one(
    scene: Scene, *, lives: bool
) -> None:
    if lives:
        former(scene)
    unplug(scene)
    scene.rack.make_functions = mock.Mock()  # type: ignore[method-assign]
    scene.rack.functions = lambda _card: []  # type: ignore[method-assign]
    if lives:
        with pytest.raises(RefusedError, match=r"pod former, which had .*, still runs"):
            done(scene, lambda actions: actions.functions(card(scene), make=True))
        scene.rack.make_functions.assert_not_called()
    else:
        done(scene, lambda actions: actions.functions(card(scene), make=True))
        scene.rack.make_functions.assert_called_once_with(card(scene), make=True)


def test_a_card_that_is_only_known_for_its_trouble_has_functions(scene: Scene) -> None:
    """So a card comes to have those without which it cannot be served."""
    problem = CardProblem(PciAddress(0, 0x77, 0, 0), "it has no functions", "make them")
    other = problem.address.card_id
    scene.plugin.hardware.problems[other] = problem
    scene.rack.make_functions = mock.Mock()  # type: ignore[method-assign]
    scene.rack.scan_card = lambda _card: problem  # type: ignore[method-assign]
    scene.rack.functions = lambda which: [FUNCTION] * (which == other)  # type: ignore[method-assign]
    assert done(scene, lambda actions: actions.functions(other, make=True)) == (FUNCTION,)
    scene.rack.make_functions.assert_called_once_with(other, make=True)
    with pytest.raises(UnknownDeviceError):
        done(scene, lambda actions: actions.functions("0000-78-00.0", make=True))


def test_a_card_that_could_not_be_served_is_looked_at_again_on_request(scene: Scene) -> None:
    """No event may tell that it can be served. Until it is, nobody knows who uses it."""
    drain(scene, drained=False)
    scan = scene.rack.scan_card
    problem = CardProblem(PciAddress.parse(card(scene)), "its module is missing", "load it")
    scene.rack.scan_card = lambda _card: problem  # type: ignore[method-assign]
    for _ in range(2):
        found = done(scene, lambda actions: actions.retry(card(scene)))
        assert card(scene) not in scene.ledger.cards
        assert (found.present, found.may_be_pulled) == (False, False)
        assert problem.message in found.waits_for[0]
    scene.rack.scan_card = scan  # type: ignore[method-assign]
    assert done(scene, lambda actions: actions.retry(card(scene))).present
    assert card(scene) in scene.ledger.cards


def test_a_card_whose_port_cannot_be_tried_may_not_be_pulled(scene: Scene) -> None:
    error = NotFinishedError("/dev/dfl-port.0 cannot be opened (EMFILE)")
    scene.rack.open_port = mock.Mock(side_effect=error)  # type: ignore[method-assign]
    found = done(scene, lambda actions: actions.drain(card(scene)))
    assert error.message in found.waits_for


def test_a_retry_says_nothing_of_a_card_that_is_drained_later(scene: Scene) -> None:
    """It may be pulled by then: its driver is not rebound unasked."""
    drain(scene, drained=False)
    done(scene, lambda actions: actions.retry(card(scene)))
    assert done(scene, lambda actions: actions.drain(card(scene))).may_be_pulled
    present = scene.ledger.cards[card(scene)]
    poisoned = Fault(FaultKind.POISONED, "its port is in reset")
    scene.ledger.hardware.set_failing(card(scene), dict.fromkeys(scene.regions[:2], poisoned))
    assert not scene.plugin.recovery.due(present)
    scene.plugin.call(lambda: scene.plugin.recovery.ask(card(scene)))
    assert scene.plugin.recovery.due(present)
