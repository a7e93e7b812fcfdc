"""When kubelet's record of claims is read: at each word that it changed, and not all the time."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ledger_scene import scenes
from test_dra_steps import LATER, POD
from test_dra_steps import A as CLAIM
from test_lifecycle import A
from test_reconcile_lost_claims import World
from test_reconcile_record import RecordScene, name

from fpga_plugin.dra import reconcile
from fpga_plugin.errors import NoSourceError


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., RecordScene]]:
    with scenes(functools.partial(RecordScene, tmp_path)) as make:
        yield make


class Reads:
    """How often the record was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        read = reconcile.read_record

        def counted(*where: Any) -> Any:
            self.number += 1
            return read(*where)

        monkeypatch.setattr(reconcile, "read_record", counted)


async def _ready() -> None:
    """It watches."""


def idle_watcher() -> Any:
    """Kubelet writes nothing."""
    return SimpleNamespace(start=lambda: None, ready=_ready, close=lambda: None)


@pytest.fixture
def scene(make: Callable[..., RecordScene]) -> RecordScene:
    scene = make()
    scene.reconciler._watcher = idle_watcher()
    return scene


def timers(scene: RecordScene) -> int:
    return sum(not one.cancelled() for one in scene.plugin.loop._scheduled)


def test_the_record_is_read_once_and_then_at_each_word(
    scene: RecordScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin with nothing to do wakes nobody."""
    reads, before = Reads(monkeypatch), timers(scene)
    task = scene.plugin.begin(scene.reconciler.run())
    scene.plugin.work()
    assert (reads.number, timers(scene)) == (1, before)
    for number, word in enumerate(
        (scene.reconciler.kubelet_seen, lambda: scene.reconciler.changed(None)), 2
    ):
        scene.plugin.call(word)
        scene.plugin.work()
        assert (reads.number, timers(scene)) == (number, before)
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    scene.plugin.work()
    assert reads.number == 3, "what changes of a region is none of the record's business"
    assert not task.done()


def test_the_record_is_not_read_before_it_is_watched(
    scene: RecordScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kubelet writes in between would be noticed by nobody."""
    reads, watching = Reads(monkeypatch), scene.plugin.loop.create_future()

    async def ready() -> None:
        await watching

    scene.reconciler._watcher.ready = ready  # type: ignore[method-assign]
    scene.plugin.begin(scene.reconciler.run())
    scene.plugin.work()
    assert reads.number == 0
    scene.plugin.call(lambda: watching.set_result(None))
    scene.plugin.work()
    assert reads.number == 1


def test_while_a_claim_is_lost_it_is_asked_after_again_and_again(
    scene: RecordScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    scene.write({})
    reads = Reads(monkeypatch)
    scene.server.failing = [NoSourceError("it is away")] * 3
    scene.plugin.begin(scene.reconciler.run())
    scene.pass_time(lambda: not scene.server.failing)
    assert reads.number == 3
    scene.write({A: (name(scene.regions[0]),)})
    scene.pass_time(lambda: reads.number == 4)
    assert not scene.plugin.loop.pass_time(), "kubelet has it again: nothing is to come"


def test_a_record_that_cannot_be_read_is_tried_again(
    scene: RecordScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scene.folder / "dra_manager_state").write_text("{")
    reads = Reads(monkeypatch)
    scene.plugin.begin(scene.reconciler.run())
    scene.pass_time(lambda: reads.number == 3)
    scene.write({})
    scene.pass_time(lambda: not scene.reconciler.problem)


def test_the_end_of_a_scrub_that_is_awaited_is_such_a_word(scene: RecordScene) -> None:
    """An ended claim is forgotten when its region is clean, though kubelet asks no more."""
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    pod = scene.pod("pod-1")
    scene.plugin.begin(scene.ends.end(A))
    scene.write({})
    scene.plugin.begin(scene.reconciler.run())
    scene.plugin.work()
    assert scene.ledger.claim_owners[A].ended
    pod.running = False
    scene.pass_time(lambda: A not in scene.ledger.claim_owners)


def test_a_life_that_ends_hears_of_nothing_more(scene: RecordScene) -> None:
    listeners, closed = len(scene.ledger._listeners), []
    scene.reconciler._watcher.close = lambda: closed.append(True)  # type: ignore[method-assign]
    task = scene.plugin.begin(scene.reconciler.run())
    scene.plugin.work()
    task.cancel()
    scene.plugin.loop.settle()
    assert task.cancelled()
    assert len(scene.ledger._listeners) == listeners - 1
    assert closed == [True]


def test_a_claim_that_cannot_be_forgotten_now_is_forgotten_later(scene: RecordScene) -> None:
    """The journal cannot be written for a while, and nothing else happens."""
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    scene.plugin.begin(scene.ends.end(A))
    scene.plugin.work()
    scene.write({})
    scene.journal.failing = 1
    scene.plugin.begin(scene.reconciler.run())
    scene.plugin.work()
    assert A in scene.ledger.claim_owners
    scene.pass_time(lambda: A not in scene.ledger.claim_owners)


def test_what_kubelet_writes_is_noticed(tmp_path: Path) -> None:
    """By inotify: no call comes for a pod that shares a prepared claim."""
    world = World(str(tmp_path))
    world.claim = None
    world.living = POD
    world.queue.synced = False
    steps: list[str] = []

    def learnt() -> bool:
        if world.queue.synced and not steps:
            steps.append("written")
            world.record(CLAIM)
            path = world.root / "dra_manager_state"
            told = path.read_text().replace(POD, LATER)
            path.with_name("new").write_text(told)
            path.with_name("new").replace(path)
        return LATER in world.ledger.pods_of(world.ledger.claim_owners[CLAIM].devices)

    world.play(learnt)
    assert world.ledger.pods_of(world.ledger.claim_owners[CLAIM].devices) == {LATER}, (
        "it alone is named"
    )
