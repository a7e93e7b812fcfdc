"""A region is programmed by hand: when, in which order, and when not.

It is the one way onto a region that no allocation stands for. So everything that a PreStart asks
has to be asked here, too.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from doubles.cards import AFU, BLANK, INTERFACE, REGIONS, TOO_HOT
from ledger_scene import Scene
from ledger_support import tenancy, trouble
from ledger_world import Pod

from fpga_plugin.allocation.journal.records import Change, Condition, DebugHold, TenantImage
from fpga_plugin.allocation.names import card_of
from fpga_plugin.bitstreams.id_names import Names
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards.byhand import HandProgrammer, Programmed
from fpga_plugin.errors import (
    CardGoneError,
    FpgaPluginError,
    InvalidRequestError,
    PortInUseError,
    RefusedError,
    UnknownDeviceError,
)
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import Alias, BitstreamId, CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import PodUid

NAMES = Names({(INTERFACE, Alias("gzip")): BitstreamId(AFU)})


@pytest.fixture
def scene(make: Callable[..., Scene]) -> Scene:
    """A card of two regions that is out of service, and another card."""
    return prepared(make(cards=[2, 1]))


def prepared(scene: Scene) -> Scene:
    scene.hold_releases()  # else the queue does it
    scene.logged.clear()
    drain(scene)

    async def names() -> Names:
        return NAMES

    async def aliases() -> Any:
        return NAMES.bitstreams

    scene.images.names, scene.images.aliases = names, aliases  # type: ignore[attr-defined]
    scene.images.titles = {"hello_afu": AFU}
    return scene


def programmer(scene: Scene) -> HandProgrammer:
    return HandProgrammer(scene.operations, scene.images)  # type: ignore[arg-type]


def drain(scene: Scene, *, drained: bool = True) -> None:
    scene.plugin.call(lambda: scene.ledger.hardware.set_drained(card(scene), drained=drained))


def card(scene: Scene) -> CardId:
    return card_of(scene.regions[0])


def asked(
    scene: Scene, by: HandProgrammer | None = None, name: str = "one", **what: str
) -> Coroutine[Any, Any, Programmed | None]:
    wanted = {"card": str(card(scene)), "region": "0", "bitstream": str(AFU)} | what
    return (by or programmer(scene)).program(name, **wanted)


def program(scene: Scene, **what: str) -> Programmed:
    task: Any = scene.plugin.begin(asked(scene, **what))
    scene.plugin.work()
    found = task.result()
    assert isinstance(found, Programmed)
    return found


def commit(scene: Scene, change: Change) -> None:
    scene.plugin.call(lambda: scene.ledger.commit(change))


# ------------------------------------------------------------------ what is done


@pytest.mark.parametrize("bitstream", [str(AFU), "gzip"])
@pytest.mark.parametrize("region", ["1", "id"])
def test_a_region_is_scrubbed_programmed_and_verified(
    scene: Scene, region: str, bitstream: str
) -> None:
    """The region that is named, by what the store calls the image; the other is left alone."""
    wanted = scene.regions[1]
    done = program(scene, region=wanted if region == "id" else region, bitstream=bitstream)
    assert (done.region, done.afu_id, done.name) == (wanted, AFU, "gzip")
    assert [name for name, _ in done.steps][-3:] == ["set parameters", "program", "verify"]
    assert scene.operations.clocks == {wanted: done.clock}
    assert scene.condition(wanted) is Condition.PROGRAMMED
    resets = [what for what in scene.rack.done if what[0] != "settings"]
    assert resets == [("reset", wanted), ("program", wanted, BLANK), ("program", wanted, AFU)]
    assert not scene.ledger.memory_clear_pending, "this card has no memory that could be cleared"
    assert scene.logged.count("region scrubbed") == 1
    assert "programming by hand failed" not in scene.logged


def test_a_region_whose_accelerator_hangs_is_scrubbed_and_programmed(scene: Scene) -> None:
    scene.rack.slot(scene.regions[0]).silent = "hung"
    scene.plugin.begin(scene.plugin.hardware.check(card(scene)))
    scene.plugin.work()
    assert trouble(scene.ledger, scene.regions[0])
    program(scene)
    assert scene.condition(scene.regions[0]) is Condition.PROGRAMMED


def test_the_journal_has_each_step_before_it_begins(make: Callable[..., Scene]) -> None:
    """Invariant 9: a plugin that dies here finds a region to scrub, an image that is no function,
    and memory to clear; its successor waits for a PR that its death does not stop."""
    scene = prepared(make(cards=[2, 1], memory=True))
    region = scene.regions[0]
    in_flight: list[frozenset[RegionId]] = []
    scene.operations.workers._tell = in_flight.append
    seen = []

    def touched() -> None:
        told = scene.journal.snapshot
        seen.append(
            (
                told.regions[region].condition,
                told.memory_clear_pending.get(card(scene)),
                TenantImage(region, AFU) in told.images,
            )
        )
        assert scene.operations.workers.locked(card(scene)), "somebody else may work on it"

    scene.on_touch = touched
    program(scene)
    *before, at_program = seen
    assert set(before) == {(Condition.SCRUBBING, True, False)}
    assert at_program == (Condition.SCRUBBING, None, True), "cleared by then"
    assert scene.rack.done.index(("memory", card(scene))) < scene.rack.done.index(
        ("program", region, AFU)
    )
    assert not scene.ledger.memory_clear_pending
    assert in_flight == [frozenset({region}), frozenset()] * 2


# ------------------------------------------------------------------ when it is not done


def in_service(scene: Scene) -> None:
    drain(scene, drained=False)


def in_its_flash(scene: Scene) -> None:
    found = scene.ledger.cards[card(scene)]
    scene.ledger.cards[card(scene)] = replace(found, reprogrammable=False)


def functions(scene: Scene) -> None:
    scene.ledger.naming.serves_functions = True


def owned(scene: Scene, region: int = 0) -> None:
    drain(scene, drained=False)
    scene.admit(scene.regions[region])
    drain(scene)


def neighbour(scene: Scene) -> None:
    owned(scene, 1)


def foreign(scene: Scene) -> None:
    scene.ledger.foreign[card(scene)] = "another plugin served it"


def unreconciled(scene: Scene) -> None:
    scene.ledger.unreconciled.add(card(scene))


def rebinding(scene: Scene) -> None:
    scene.plugin.call(lambda: scene.ledger.hardware.set_rebinding(card(scene), rebinding=True))


def lent(scene: Scene) -> None:
    node = scene.ledger.cards[card(scene)].regions[0].grant.nodes[0]
    commit(scene, tenancy(scene.regions[2], "pod", node))


def kept(scene: Scene) -> None:
    region = scene.regions[0]
    debug = DebugHold(region, PodUid("pod"), "space", "name", (), 600.0, "it failed", 1e9)
    commit(scene, Change(debug_holds={region: debug}))


def failing(scene: Scene) -> None:
    scene.plugin.call(
        lambda: scene.ledger.hardware.set_failing(card(scene), {scene.regions[0]: TOO_HOT})
    )


def former(scene: Scene, region: int = 0) -> None:
    pod = Pod(PodUid("former"), REGIONS, (), {})
    pod.running = True
    scene.pods.append(pod)
    commit(scene, tenancy(scene.regions[region], pod.uid))


def neighbours_former(scene: Scene) -> None:
    former(scene, 1)


def port_open(scene: Scene) -> None:
    scene.rack.slot(scene.regions[0]).opens.add("somebody")


@pytest.mark.parametrize(
    ("way", "words", "asks_the_store"),
    [
        (in_service, "is in service", False),
        (in_its_flash, "cannot be reconfigured partially", False),
        (functions, "holds functions", False),
        (owned, "{} has an owner", False),
        (neighbour, "has an owner", False),
        (foreign, "is left alone: another plugin served it", False),
        (unreconciled, "is not known: kubelet's records", False),
        (rebinding, "is being rebound", False),
        (lent, "of region {} is also open to pod pod", False),
        (kept, "region {} is kept for debugging as pod space/name", False),
        (failing, "region {} is faulted: thermal: AP6", False),
        (former, "pod former, which had {}, still runs", True),
        (neighbours_former, r"pod former, which had .*-p1, still runs", True),
        (port_open, "of region {} is in use", True),
    ],
)
def test_what_somebody_has_or_may_be_given_is_not_programmed(
    scene: Scene, way: Callable[[Scene], None], words: str, *, asks_the_store: bool
) -> None:
    """Invariants 1, 7 and 10; nothing is touched, and the region is what it was."""
    way(scene)
    before = scene.condition(scene.regions[0])
    with pytest.raises(FpgaPluginError, match=words.format(scene.regions[0])) as error:
        program(scene)
    assert isinstance(error.value, RefusedError | PortInUseError)
    assert ("ends that" in (error.value.hint or "")) == (way is kept)
    assert not scene.touched
    assert scene.condition(scene.regions[0]) is before
    assert bool(scene.images.loaded) == asks_the_store
    assert "region prepared" not in scene.logged, "nothing was done that could be told"
    assert "programming by hand failed" in scene.logged, "whoever asked may be gone"


def comes_back_into_service(scene: Scene) -> None:
    drain(scene, drained=False)
    scene.admit(scene.regions[0])


def goes(scene: Scene) -> None:
    scene.plugin.call(lambda: scene.ledger.hardware.card_gone(card(scene)))


def is_swapped(scene: Scene) -> None:
    scene.swap(card(scene), told=True)


@pytest.mark.parametrize("way", [comes_back_into_service, goes, is_swapped])
@pytest.mark.parametrize("when", ["store", "port"])
def test_what_comes_between_is_noticed_before_a_region_is_touched(
    scene: Scene, when: str, way: Callable[[Scene], None]
) -> None:
    """Invariants 1 and 2: while the store was read, or its port was opened."""
    task: Any = scene.plugin.begin(asked(scene))
    open_port = scene.rack.open_port

    def opened(*which: Any) -> Any:
        assert when == "port", "what came between was there before it was opened"
        scene.rack.open_port = open_port  # type: ignore[method-assign]
        way(scene)
        return open_port(*which)

    if when == "store":
        assert len(scene.plugin.jobs) == 1, "it is asked"
        way(scene)
    scene.rack.open_port = opened  # type: ignore[method-assign]
    scene.plugin.work()
    kind: type[FpgaPluginError] = RefusedError if way is comes_back_into_service else CardGoneError
    with pytest.raises(kind):
        task.result()
    assert not scene.touched


def test_who_came_and_went_while_the_blank_was_read_is_asked_for(scene: Scene) -> None:
    """On Alveo nothing else guards his processes: ports are not held exclusively."""
    pod = Pod(PodUid("late"), REGIONS, (), {})
    pod.running = True
    scene.pods.append(pod)
    load, steps = scene.operations.blanks.load, scene.ledger.device_plugin

    async def meanwhile(card: Card) -> Bitstream | None:
        steps.adopt(REGIONS, DeviceId(scene.regions[0]), pod.uid, {})
        steps.release([scene.regions[0]])
        return await load(card)

    with (
        mock.patch.object(scene.operations.blanks, "load", meanwhile),
        pytest.raises(RefusedError, match=f"pod late, which had {scene.regions[0]}, still runs"),
    ):
        program(scene)
    assert not scene.touched


def test_a_card_that_comes_back_while_it_is_scrubbed_gets_no_image_by_hand(scene: Scene) -> None:
    """Whoever is given it next would find it scrubbed by a plugin that then programmed it."""
    scene.on_touch = lambda: scene.ledger.hardware.set_drained(card(scene), drained=False)
    with pytest.raises(RefusedError, match="is in service"):
        program(scene)
    assert ("program", scene.regions[0], AFU) not in scene.rack.done
    assert scene.condition(scene.regions[0]) is Condition.DIRTY, "nobody works on it any more"


def test_a_programming_that_failed_is_told_and_leaves_a_region_to_scrub(scene: Scene) -> None:
    scene.rack.bad_prs = ["error"]
    with pytest.raises(FpgaPluginError, match="PR of region"):
        program(scene)
    assert scene.condition(scene.regions[0]) is Condition.DIRTY
    assert scene.operations.clocks == {}
    assert "programming by hand failed" in scene.logged


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ({"card": "../x"}, UnknownDeviceError, "no card"),
        ({"card": "0000-77-00.0"}, UnknownDeviceError, "no card"),
        ({"region": "2"}, UnknownDeviceError, "has no region"),
        ({"region": "0000-11-00.0-p0"}, UnknownDeviceError, "has no region"),
        ({"bitstream": "unheard-of"}, InvalidRequestError, "no name of one"),
        ({"bitstream": "../x"}, InvalidRequestError, "no name of one"),
    ],
)
def test_what_is_not_known_is_refused(
    scene: Scene, what: dict[str, str], kind: type[FpgaPluginError], words: str
) -> None:
    """Invariant 11: no text of a client reaches the store or the hardware unparsed."""
    with pytest.raises(kind, match=words):
        program(scene, **what)
    assert not scene.touched
    assert not scene.images.loaded


def test_who_names_a_title_is_given_the_id(scene: Scene) -> None:
    """Status and `bitstream list` show titles, in quotes."""
    with pytest.raises(InvalidRequestError, match="no name of one") as caught:
        program(scene, bitstream="hello_afu")
    assert caught.value.hint == f"it is the title of bitstream {AFU}: name that"


# ------------------------------------------------------------------ who waits


def test_asking_again_by_the_same_name_waits_on_and_programs_once(scene: Scene) -> None:
    """A client may wait for less long than a programming takes."""
    by = programmer(scene)
    first: Any = scene.plugin.begin(asked(scene, by))
    assert scene.plugin.loop.pass_time()
    assert first.result() is None, "not finished yet"
    again: Any = scene.plugin.begin(asked(scene, by))
    scene.plugin.work()
    assert again.result().afu_id == AFU
    later: Any = scene.plugin.begin(asked(scene, by))
    scene.plugin.loop.settle()
    assert later.result() == again.result()
    assert scene.rack.done.count(("program", scene.regions[0], AFU)) == 1
    other: Any = scene.plugin.begin(asked(scene, by, name="another"))
    scene.plugin.work()
    assert other.result().afu_id == AFU
    assert scene.rack.done.count(("program", scene.regions[0], AFU)) == 2


def test_the_end_of_the_plugin_waits_for_what_has_begun(scene: Scene) -> None:
    """Else a port stays open, or a region half programmed, in the threads of a dead process."""
    by = programmer(scene)
    nothing = scene.plugin.begin(by.close())
    assert nothing.done()
    assert nothing.result() is None
    scene.plugin.begin(asked(scene, by))
    closes = scene.plugin.begin(by.close())
    assert not closes.done()
    scene.plugin.work()
    assert closes.done()
    assert not by._running, "what has ended is not held"


def test_a_programming_that_is_given_up_is_no_error_of_its_own(scene: Scene) -> None:
    by = programmer(scene)
    complaints: list[Any] = []
    scene.plugin.loop.set_exception_handler(lambda _, context: complaints.append(context))
    scene.plugin.begin(asked(scene, by))
    (task,) = by._running
    assert isinstance(task, asyncio.Task)
    task.cancel()
    scene.plugin.work()
    assert task.cancelled()
    assert complaints == []
    assert "programming by hand failed" not in scene.logged


def test_the_outcome_is_known_although_whoever_asked_went(scene: Scene) -> None:
    by = programmer(scene)
    asks = scene.plugin.begin(asked(scene, by))
    asks.cancel()
    with mock.patch.object(scene.rack, "bad_prs", ["error"]):
        scene.plugin.work()
    assert "programming by hand failed" in scene.logged
