"""Claims' files while the plugin runs: what goes, what comes back, and what is left alone.

The orders of starts and restarts are in test_files.py.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.cards import AFU
from ledger_scene import scenes
from test_lifecycle import A, B, ClaimScene

from fpga_plugin.allocation.journal.records import ClaimOwner
from fpga_plugin.allocation.names import card_of
from fpga_plugin.dra.cdi import CdiError
from fpga_plugin.kubernetes.names import ClaimUid


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ClaimScene]]:
    with scenes(functools.partial(ClaimScene, tmp_path)) as make:
        yield make


@pytest.fixture
def scene(make: Callable[..., ClaimScene]) -> ClaimScene:
    """A claim on each of two cards, and the files looked after."""
    scene = make()
    scene.allocated(A, scene.regions[0])
    scene.allocated(B, scene.regions[2], pods=("pod-b",))
    scene.prepared(A)
    scene.prepared(B)
    return scene


def run(scene: ClaimScene) -> "asyncio.Task[None]":
    task = scene.plugin.begin(scene.files.run())
    scene.plugin.work()
    assert not task.done()
    return task


def pull(scene: ClaimScene, uid: ClaimUid) -> None:
    """The card of a claim goes."""
    (device,) = scene.ledger.claim_owners[uid].devices
    card = card_of(device)
    scene.rack.boards[card].present = False
    scene.plugin.call(lambda: scene.ledger.hardware.card_gone(card))


def path(scene: ClaimScene, uid: ClaimUid) -> Path:
    (found,) = (scene.folder / "cdi").glob(f"*{uid}.json")
    return found


def test_what_changes_while_nothing_is_to_be_done_is_noticed(scene: ClaimScene) -> None:
    """Invariant 10: a container that starts again makes no call."""
    task = run(scene)
    pull(scene, A)
    scene.plugin.work()
    assert scene.file(A) == ""
    assert scene.file(B)
    assert not task.done()
    assert scene.ledger.dra.is_prepared(scene.ledger.claim_owners[A]), (
        "it may be as it was: nobody saw it"
    )


def test_a_file_that_is_right_is_not_written_again(scene: ClaimScene) -> None:
    """What the operator adds stays as it was when the claim was prepared."""
    run(scene)
    before = path(scene, A).stat().st_ino, path(scene, B).stat().st_ino
    scene.plugin.call(lambda: scene.ledger.dra.join({A: ["pod-9"]}))  # type: ignore[list-item]
    scene.plugin.work()
    assert (path(scene, A).stat().st_ino, path(scene, B).stat().st_ino) == before


def test_the_file_of_a_claim_that_ended_before_the_plugin_died_is_removed_at_the_start(
    scene: ClaimScene,
) -> None:
    """Kubelet may never ask again."""
    remains = scene.file(A)
    place = path(scene, A)
    scene.plugin.call(lambda: scene.ledger.dra.end_claim(A))
    place.write_text(remains)
    scene.plugin.end()
    scene.live()
    scene.plugin.begin(scene.plugin.hardware.scan())
    scene.plugin.work()
    scene.plugin.begin(scene.files.begin())
    scene.plugin.work()
    assert scene.file(A) == ""
    assert scene.file(B)
    written = path(scene, B).stat().st_ino
    run(scene)
    assert path(scene, B).stat().st_ino == written, "once is enough"


def test_while_all_is_in_order_nothing_wakes_the_process(scene: ClaimScene) -> None:
    def timers() -> int:
        return sum(not one.cancelled() for one in scene.plugin.loop._scheduled)

    before = timers()
    run(scene)
    assert timers() == before


def test_a_file_that_cannot_be_removed_is_told_once_and_tried_again(
    scene: ClaimScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, failing = scene.files.cdi.remove, [True]

    def removed(path: str, uid: ClaimUid) -> None:
        if failing[0]:
            raise CdiError("read-only file system")
        remove(path, uid)

    monkeypatch.setattr(scene.files.cdi, "remove", removed)
    words = "claim's file not in order"
    run(scene)
    pull(scene, A)
    scene.plugin.work()
    assert scene.file(A)
    scene.plugin.call(lambda: scene.ledger.dra.join({B: ["pod-9"]}))  # type: ignore[list-item]
    scene.plugin.work()
    assert scene.logged.count(words) == 1
    failing[0] = False
    scene.pass_time(lambda: scene.file(A) == "")
    failing[0] = True
    scene.plugin.call(lambda: scene.ledger.work.dirty([scene.regions[0]], "it came back, and went"))
    pull(scene, B)
    scene.plugin.work()
    assert scene.logged.count(words) == 3, "of both: it is another failure"


def test_a_claim_that_is_forgotten_while_others_are_looked_at_ends_nothing(
    scene: ClaimScene,
) -> None:
    """The task that looks after all files would end with it."""
    task = run(scene)
    pull(scene, A)
    pull(scene, B)
    removal = scene.plugin.jobs.pop()
    scene.plugin.call(lambda: scene.ledger.dra.end_claim(B))
    scene.plugin.call(lambda: scene.ledger.dra.forget_claim(B))
    scene.plugin.call(lambda: scene.ledger.dra.end_claim(A))
    scene.plugin.call(lambda: scene.ledger.dra.forget_claim(A))
    removal.run()
    scene.plugin.loop.settle()
    scene.plugin.work()
    assert not task.done()
    assert scene.file(A) == ""


def test_a_claim_that_is_withdrawn_while_its_file_is_removed_is_not_withdrawn_twice(
    scene: ClaimScene,
) -> None:
    """Or is being prepared again: what is said of it then is not true."""
    run(scene)
    region = scene.regions[0]
    scene.plugin.call(lambda: scene.ledger.work.dirty([region], "somebody may have used it"))
    (removal,) = [job for job in scene.plugin.jobs if "remove" in repr(job.function)]
    scene.plugin.jobs.remove(removal)
    scene.plugin.call(lambda: scene.ledger.dra.unprepared(A))
    removal.run()
    scene.plugin.loop.settle()
    scene.plugin.work()
    assert "claim withdrawn" not in scene.logged
    assert scene.file(A) == ""


def test_a_claim_that_is_prepared_anew_while_its_file_is_removed_has_its_file_again(
    scene: ClaimScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet was notified that it is prepared, and asks no more."""
    run(scene)
    ledger, region = scene.ledger, scene.regions[0]
    scene.plugin.call(lambda: ledger.work.dirty([region], "somebody may have used it"))
    (removal,) = [job for job in scene.plugin.jobs if "remove" in repr(job.function)]
    scene.plugin.jobs.remove(removal)

    def again() -> None:
        ledger.dra.take(ledger.claim_owners[A], ())
        ledger.work.working([region])
        ledger.work.programmed(region, AFU)
        ledger.dra.prepared(A, {})

    scene.plugin.call(again)
    written, write = [], scene.files.cdi.write

    def noted(of: ClaimOwner, *rest: Any) -> None:
        written.append(of)
        write(of, *rest)

    monkeypatch.setattr(scene.files.cdi, "write", noted)
    removal.run()
    scene.plugin.loop.settle()
    scene.plugin.work()
    assert scene.file(A)
    assert written == [ledger.claim_owners[A]], "and never that of what it had"


def test_a_claim_that_is_forgotten_while_its_preparation_is_withdrawn_is_nobodys(
    scene: ClaimScene,
) -> None:
    ledger = scene.ledger
    withdrawn = scene.plugin.begin(scene.files.withdraw(ledger.claim_owners[A], "it changed"))
    (removal,) = scene.plugin.jobs
    scene.plugin.jobs.remove(removal)
    scene.plugin.call(lambda: ledger.dra.end_claim(A))
    scene.plugin.call(lambda: ledger.dra.forget_claim(A))
    removal.run()
    scene.plugin.loop.settle()
    scene.plugin.work()
    withdrawn.result()
    assert "claim withdrawn" not in scene.logged
