"""Pods that came by kubelet's record alone, and claims that a journal in doubt has otherwise.

A pod of a prepared claim starts without a call, also while no plugin runs. And a journal that was
put back has claims as they were, not as they are.
"""

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.cards import REGIONS
from ledger_scene import scenes
from test_lifecycle import OTHER, A, B, ref
from test_reconcile_record import DRIVER, RecordScene, name
from test_reconcile_watch import idle_watcher

from fpga_plugin.allocation.journal.doubt import doubted
from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import Change, Fact
from fpga_plugin.allocation.names import card_of
from fpga_plugin.cards.operations import TenancyActiveError
from fpga_plugin.errors import NoSourceError, NotFinishedError
from fpga_plugin.ids import CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.kubelet.dra_record import FILE_NAME
from fpga_plugin.kubernetes.names import ClaimUid, PodUid


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., RecordScene]]:
    with scenes(functools.partial(RecordScene, tmp_path)) as make:  # type: ignore[arg-type]
        yield make  # type: ignore[misc]


@pytest.fixture
def scene(make: Callable[..., RecordScene]) -> RecordScene:
    return make()


def touched(scene: RecordScene, region: RegionId) -> list[str]:
    return [what for what in scene.rack.done if region in what]


def prepared(scene: RecordScene, region: RegionId) -> None:
    """Claim A, whose pod-1 runs, as kubelet's record has it too."""
    scene.allocated(A, region)
    scene.prepared()
    scene.pod("pod-1")
    scene.write({A: (name(region),)}, "pod-1")
    assert scene.look()


def joined(scene: RecordScene, region: RegionId) -> None:
    """pod-2 has come without a call, and pod-1 has ended."""
    scene.pod("pod-2")
    scene.pods[:] = [pod for pod in scene.pods if pod.uid != "pod-1"]
    scene.write({A: (name(region),)}, "pod-2")


def serves_devices(scene: RecordScene) -> None:
    """From now on the device plugin API serves."""
    scene.reconciler._claims = scene.reconciler._leftovers = None


# ------------------------------------------------------------------ who is not read yet


def test_the_end_of_a_claim_first_learns_of_pods_that_came_without_a_call(
    scene: RecordScene,
) -> None:
    """pod-2 is deleted by force, and runs on: kubelet unprepares, and its record still names it."""
    region = scene.regions[0]
    prepared(scene, region)
    joined(scene, region)
    scene.rack.done.clear()
    task = scene.unprepare()
    scene.plugin.work()
    assert touched(scene, region) == []
    assert not task.done()
    scene.pods.clear()
    scene.pass_time(task.done)
    task.result()
    assert touched(scene, region)


def test_a_claim_does_not_end_while_its_users_cannot_be_read(scene: RecordScene) -> None:
    region = scene.regions[0]
    prepared(scene, region)
    (scene.folder / FILE_NAME).write_text("{")
    task = scene.unprepare()
    scene.plugin.work()
    assert isinstance(task.exception(), NoSourceError)
    assert not scene.ledger.claim_owners[A].ended
    assert scene.file() == "", "no further pod starts with it meanwhile"
    scene.pods.clear()
    scene.write({A: (name(region),)})
    task = scene.unprepare()
    scene.plugin.work()
    task.result()
    assert scene.ledger.claim_owners[A].ended


@pytest.mark.parametrize("end", ["prepare", "unprepare"])
def test_a_pod_that_came_while_no_plugin_ran_has_its_region_though_the_preparation_is_withdrawn(
    scene: RecordScene, end: str
) -> None:
    """Its region does not read what the journal has, so the new run withdraws the claim."""
    region = scene.regions[0]
    prepared(scene, region)
    scene.pod("pod-2")
    scene.write({A: (name(region),)}, "pod-1", "pod-2")
    scene.rack.slot(region).afu = OTHER
    scene.live_again()
    scene.plugin.begin(scene.files.begin())
    scene.plugin.work()
    assert "claim withdrawn" in scene.logged
    scene.plugin.kubelet_begins("life 1")
    scene.plugin.work()
    assert scene.look()
    joined(scene, region)
    assert scene.look()
    scene.plugin.work()
    scene.rack.done.clear()
    if end == "prepare":  # kubelet restarted, and a further pod comes
        scene.allocated(A, region, pods=("pod-2", "pod-3"))
        task = scene.prepare()
        scene.plugin.work()
        assert not task.done(), "it waits for pod-2's end"
    else:
        scene.unprepare()
        scene.plugin.work()
    assert touched(scene, region) == []


def test_no_preparation_is_withdrawn_while_its_users_cannot_be_read(scene: RecordScene) -> None:
    region = scene.regions[0]
    prepared(scene, region)
    scene.rack.slot(region).afu = OTHER
    scene.live_again()
    (scene.folder / FILE_NAME).write_text("{")
    scene.plugin.begin(scene.files.begin())
    scene.plugin.work()
    assert "claim withdrawn" not in scene.logged
    assert scene.file() == "", "no further pod starts with it meanwhile"
    scene.pod("pod-2")
    scene.write({A: (name(region),)}, "pod-1", "pod-2")
    scene.plugin.begin(scene.files.begin())
    scene.plugin.work()
    assert "claim withdrawn" in scene.logged
    users = scene.ledger.dra.tenancies_of_claim(A)
    assert {one.pod for one in users if one.used} == {"pod-1", "pod-2"}


def test_pods_are_learnt_of_though_the_checkpoint_cannot_be_read(
    scene: RecordScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = scene.regions[0]
    prepared(scene, region)

    async def unreadable() -> bool:
        return False

    monkeypatch.setattr(scene.reconciler._leftovers, "look", unreadable)
    joined(scene, region)
    assert not scene.look()
    assert {one.pod for one in scene.ledger.dra.tenancies_of_claim(A)} == {"pod-1", "pod-2"}


def test_pods_of_all_claims_are_learnt_of_though_none_can_be_written(
    scene: RecordScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _, other = scene.regions
    prepared(scene, one)
    scene.allocated(B, other)
    scene.prepared(B)
    scene.write({A: (name(one),), B: (name(other),)}, "pod-1", "pod-2")

    def full(_: Change) -> None:
        raise JournalError("the disk is full")

    monkeypatch.setattr(scene.journal, "write", full)
    assert not scene.look()
    for claim in (A, B):
        assert {each.pod for each in scene.ledger.dra.tenancies_of_claim(claim)} == {
            "pod-1",
            "pod-2",
        }


def test_a_claim_that_was_ended_and_is_prepared_again_is_in_force(scene: RecordScene) -> None:
    """Kubelet wrote down neither the end nor that it came again; its pods are learnt of."""
    region = scene.regions[0]
    scene.write({A: ()})
    assert scene.look()
    scene.unprepare()
    scene.plugin.work()
    assert scene.ends.over == {A}
    prepared(scene, region)
    assert scene.ends.over == set()
    scene.write({A: (name(region),)}, "pod-1", "pod-2")
    assert scene.look()
    assert {one.pod for one in scene.ledger.dra.tenancies_of_claim(A)} == {"pod-1", "pod-2"}


@pytest.mark.parametrize("cgroup", [True, False])
@pytest.mark.parametrize("what", ["device", "bitstream"])
def test_a_pod_that_waits_for_its_prepare_does_not_wait_for_itself(
    scene: RecordScene, what: str, *, cgroup: bool
) -> None:
    """Kubelet restarted, and writes the next pod into its record before it calls."""
    one, two = scene.regions[:2]
    prepared(scene, one)
    scene.pods.clear()
    if cgroup:
        scene.pod("pod-2", running=False)
    if what == "device":
        scene.allocated(A, two, pods=("pod-2",))
    else:
        scene.allocated(A, one, wants=OTHER, pods=("pod-2",))
    scene.write({A: (name(one),)}, "pod-2")
    task = scene.prepare()
    scene.plugin.work()
    assert scene.look()
    scene.pass_time(task.done)
    assert task.result()


def test_no_file_is_written_while_one_is_withheld(scene: RecordScene) -> None:
    """A neighbour's change has the claim's file looked at, between its removal and the end."""
    region, neighbour = scene.regions[:2]
    prepared(scene, region)
    scene.plugin.begin(scene.files.run())
    scene.plugin.work()
    scene.unprepare()
    scene.until(lambda: not scene.file())
    scene.plugin.call(lambda: scene.ledger.work.dirty([neighbour], "so"))
    while not scene.ledger.claim_owners[A].ended:
        scene.plugin.job(0)
        assert not scene.file()
    scene.plugin.work()
    assert not scene.file()


def test_the_file_of_a_claim_whose_end_was_given_up_is_written_again(scene: RecordScene) -> None:
    """Kubelet's call is over while a thread removes the file; the claim stays in force."""
    region, neighbour = scene.regions[:2]
    prepared(scene, region)
    scene.plugin.begin(scene.files.run())
    scene.plugin.work()
    task = scene.unprepare()
    scene.plugin.loop.settle()
    (removal,) = scene.plugin.jobs
    scene.plugin.call(task.cancel)
    removal.function()  # the thread goes on
    scene.plugin.work()
    assert not scene.file()
    scene.plugin.call(lambda: scene.ledger.work.dirty([neighbour], "so"))
    scene.plugin.work()
    assert scene.file()


# ------------------------------------------------------------------ a journal in doubt


def doubts(scene: RecordScene, old: Change, **more: str) -> None:
    """Another run of the plugin begins, with the state directory of an earlier time."""
    scene.journal.snapshot = doubted(old, "it was put back", claims=True, **more)
    scene.restart()
    scene.rack.done.clear()


def moved(scene: RecordScene, other: RegionId) -> Change:
    """Claim A ended, and now pod-2 has it with another device; returns the former journal."""
    old = scene.journal.snapshot
    scene.pods.clear()
    scene.unprepare()
    scene.plugin.work()
    scene.unrecorded()
    scene.allocated(A, other, pods=("pod-2",))
    scene.prepared()
    scene.pod("pod-2")
    return old


def put_back(scene: RecordScene, old: Change, **more: str) -> None:
    """Another run of the plugin, with the state directory of an earlier time."""
    doubts(scene, old, **more)
    assert scene.look()
    scene.plugin.work()


def test_a_claim_that_ended_before_and_was_prepared_again_since_keeps_its_region(
    scene: RecordScene,
) -> None:
    region = scene.regions[0]
    prepared(scene, region)
    scene.pods.clear()
    scene.unprepare()
    scene.plugin.work()
    assert scene.ledger.claim_owners[A].ended
    old = scene.journal.snapshot
    scene.allocated(A, region, pods=("pod-2",))
    scene.prepared()
    scene.pod("pod-2")
    scene.write({A: (name(region),)}, "pod-2")
    put_back(scene, old)
    assert touched(scene, region) == []
    assert scene.ledger.pods_of([DeviceId(region)]) == {"pod-2"}


@pytest.mark.parametrize("moved", [True, False])
def test_a_claim_that_ended_before_does_not_end_again_unread(
    scene: RecordScene, *, moved: bool
) -> None:
    """By the copy it had ended. pod-2 runs, and is deleted by force before the first look."""
    one, _, other = scene.regions
    now = other if moved else one
    prepared(scene, one)
    scene.pods.clear()
    scene.unprepare()
    scene.plugin.work()
    old = scene.journal.snapshot
    scene.allocated(A, now, pods=("pod-2",))
    scene.prepared()
    scene.pod("pod-2")
    scene.write({A: (name(now),)}, "pod-2")
    doubts(scene, old)
    task = scene.unprepare()
    scene.plugin.work()
    assert isinstance(task.exception(), NotFinishedError)
    assert scene.look()
    scene.plugin.work()
    assert touched(scene, now) == []
    task = scene.unprepare()
    scene.plugin.work()
    assert not task.done()
    assert touched(scene, now) == []
    scene.pods.clear()
    scene.pass_time(task.done)
    assert touched(scene, now)


def test_a_claim_that_kubelet_ends_is_not_in_force_again(scene: RecordScene) -> None:
    """By the copy it had ended, and another claim has one of its devices, which then ends."""
    one, two, _ = scene.regions
    prepared(scene, one)
    scene.pods.clear()
    scene.unprepare()
    scene.plugin.work()
    scene.allocated(B, two, pods=("pod-3",))
    scene.prepared(B)
    old = scene.journal.snapshot
    scene.pod("pod-2")
    scene.write({A: (name(one), name(two))}, "pod-2")
    put_back(scene, old)
    assert scene.ledger.claim_owners[A].ended, "B has one of its devices"
    task = scene.unprepare()
    scene.plugin.work()
    scene.plugin.call(lambda: scene.ledger.dra.end_claim(B))
    assert scene.look()
    scene.plugin.work()
    assert scene.ledger.claim_owners[A].ended
    assert touched(scene, one) == [], "pod-2 runs with it"
    scene.pods.clear()
    scene.pass_time(task.done)
    assert touched(scene, one)
    task.result()


def test_a_claim_that_ended_leaves_no_file_though_the_journal_is_in_doubt(
    scene: RecordScene,
) -> None:
    """The plugin died before it was removed, and now has another directory for new ones."""
    region = scene.regions[0]
    prepared(scene, region)
    content = scene.file()
    scene.pods.clear()
    scene.unprepare()
    scene.plugin.work()
    former = scene.folder / "former" / f"k8s.{DRIVER}-claim_{A}.json"
    former.parent.mkdir()
    former.write_text(content)
    old = scene.journal.snapshot
    ended = replace(old.claim_owners[A], file=str(former))  # type: ignore[type-var]
    scene.write({})
    put_back(scene, replace(old, claim_owners={A: ended}))
    assert not former.exists()


@pytest.mark.parametrize("same", ["driver", "another driver"])
def test_a_claim_that_has_another_device_since_keeps_both(scene: RecordScene, same: str) -> None:
    one, _, other = scene.regions
    prepared(scene, one)
    old = moved(scene, other)
    driver = DRIVER if same == "driver" else "former.example.com"
    scene.write({A: (name(other), "none-of-ours")}, "pod-2", driver=driver)
    put_back(scene, old)
    assert touched(scene, other) == []
    assert set(scene.ledger.claim_owners[A].devices) == {one, other}
    assert not scene.ledger.unreconciled


def test_a_claim_does_not_get_back_what_it_left_while_kubelets_record_still_has_it(
    scene: RecordScene,
) -> None:
    """Of a card that was compared it is the journal that is newer."""
    one, _, other = scene.regions
    prepared(scene, one)
    moved(scene, other)
    assert scene.look()
    assert scene.ledger.claim_owners[A].devices == (other,)
    assert scene.ledger.region_allocation(one) is None


def test_of_a_claim_whose_devices_a_journal_in_doubt_has_in_part_each_is_its_own_once(
    scene: RecordScene,
) -> None:
    one, _, other = scene.regions
    prepared(scene, one)
    old = scene.journal.snapshot
    scene.write({A: (name(one), name(other))}, "pod-1")
    put_back(scene, old)
    assert scene.ledger.claim_owners[A].devices == (one, other)


def test_a_device_that_another_claim_has_by_the_journal_keeps_its_card_back(
    scene: RecordScene,
) -> None:
    one, _, other = scene.regions
    prepared(scene, one)
    scene.allocated(B, other, pods=("pod-3",))
    scene.prepared(B)
    scene.write({A: (name(other),)}, "pod-1")
    put_back(scene, scene.journal.snapshot)
    assert scene.ledger.claim_owner_of(DeviceId(other)).uid == B  # type: ignore[union-attr]
    assert card_of(other) in scene.ledger.unreconciled


def also(scene: RecordScene, claim: ClaimUid, device: str, pod: str) -> None:
    """Kubelet's record names a claim of a former driver, too."""
    path = scene.folder / FILE_NAME
    before = json.loads(json.loads(path.read_text())["Data"])["ClaimInfoStateList"]
    scene.write({claim: (device,)}, pod, driver="former.example.com")
    after = json.loads(json.loads(path.read_text())["Data"])["ClaimInfoStateList"]
    path.write_text(json.dumps({"Data": json.dumps({"ClaimInfoStateList": before + after})}))


def over_but_recorded(scene: RecordScene, region: RegionId) -> None:
    """B ended by the journal, which is in doubt, and kubelet's record has B; A is in force.

    Both had the region, and nobody serves B's driver any more. Its pod-3 runs on, by force.
    """
    scene.allocated(B, region, pods=("pod-3",))
    scene.prepared(B)
    scene.unprepare(B)
    scene.plugin.work()
    scene.allocated(A, region)
    scene.prepared()
    scene.write({A: (name(region),)}, scene.pod("pod-1").uid)
    also(scene, B, name(region), scene.pod("pod-3").uid)
    assert scene.ledger.claim_owners[B].ended
    put_back(scene, scene.journal.snapshot)


@pytest.mark.parametrize("api", ["dra", "device plugin"])
def test_what_two_claims_have_is_known_once_the_pods_of_the_one_that_ended_are_gone(
    scene: RecordScene, api: str
) -> None:
    """Nobody calls for that one, and kubelet's record keeps it for good."""
    region = scene.regions[0]
    over_but_recorded(scene, region)
    if api == "device plugin":
        serves_devices(scene)
    else:  # it is looked at again without a word of kubelet's
        scene.reconciler._watcher = idle_watcher()
        scene.plugin.begin(scene.reconciler.run())
    assert scene.look()
    assert scene.ledger.resource_claims_unknown
    scene.pods[:] = [pod for pod in scene.pods if pod.uid != "pod-3"]
    if api == "device plugin":
        assert scene.look()
    else:
        scene.pass_time(lambda: not scene.ledger.unreconciled)
    assert not scene.ledger.resource_claims_unknown
    assert scene.ledger.claim_owners[B].ended
    assert scene.ledger.claim_owner_of(DeviceId(region)).uid == A  # type: ignore[union-attr]
    assert touched(scene, region) == [], "pod-1 runs with it"


def test_what_ended_leaves_no_file_by_which_a_further_pod_could_start(scene: RecordScene) -> None:
    region = scene.regions[0]
    over_but_recorded(scene, region)
    scene.pods[:] = [pod for pod in scene.pods if pod.uid != "pod-3"]
    stale = scene.folder / "cdi" / f"k8s.{DRIVER}-claim_{B}.json"
    stale.write_text(scene.file())
    scene.restart()
    assert scene.look()
    assert not stale.exists()
    assert scene.file(), "of the claim in force"


def not_adopted(scene: RecordScene, *, elsewhere: bool) -> RegionId:
    """By the journal B has A's region, so A cannot be adopted; pod-a runs with it.

    B left it since, and is `elsewhere` on the node, or over.
    """
    region, _, other = scene.regions
    scene.allocated(B, region, pods=("pod-b",))
    scene.prepared(B)
    old = scene.journal.snapshot
    scene.unprepare(B)
    scene.plugin.work()
    scene.unrecorded(B)
    scene.allocated(A, region, pods=("pod-a",))
    scene.prepared()
    scene.write({A: (name(region),)}, scene.pod("pod-a").uid)
    if elsewhere:
        scene.allocated(B, other, pods=("pod-b2",))
        scene.prepared(B)
        also(scene, B, name(other), scene.pod("pod-b2").uid)
    else:
        del scene.server.claims[B]
    put_back(scene, old)
    return region


@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize("reads", [1, 2])
def test_a_claim_that_ends_before_it_could_be_adopted_has_pods_all_the_same(
    scene: RecordScene, reads: int, *, elsewhere: bool
) -> None:
    """They are deleted by force, and run on; kubelet may ask for the end twice."""
    region = not_adopted(scene, elsewhere=elsewhere)
    for _ in range(reads):
        scene.unprepare(A)
        scene.plugin.work()
        assert scene.look()
        scene.plugin.work()
    if elsewhere:
        scene.pods[:] = [pod for pod in scene.pods if pod.uid != "pod-b2"]
        scene.unprepare(B)
        scene.plugin.work()
    scene.write({})
    assert scene.look()
    scene.plugin.work()
    assert touched(scene, region) == []
    assert [one.pod for one in scene.ledger.tenancies.of(region)].count(PodUid("pod-a")) == 1
    scene.pods.clear()
    scene.pass_time(lambda: bool(touched(scene, region)))
    scene.pass_time(lambda: scene.ledger.tenancies.of(region) == [])


def test_what_a_claim_that_ended_unadopted_has_is_given_to_nobody(scene: RecordScene) -> None:
    region = not_adopted(scene, elsewhere=False)
    scene.unprepare(A)
    scene.plugin.work()
    scene.write({})
    assert scene.look()
    third = ClaimUid("00000000-0000-4000-8000-00000000000c")
    scene.allocated(third, region, pods=("pod-c",))
    task = scene.prepare(third)
    scene.pass_time(task.done)
    assert isinstance(task.exception(), TenancyActiveError)
    assert touched(scene, region) == []


def test_no_further_pod_starts_with_a_claim_that_ends_unadopted(
    scene: RecordScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file goes before kubelet's record is read: pod-z was written down before it started."""
    region = not_adopted(scene, elsewhere=False)
    remove = scene.files.remove

    async def removed(*claim: Any) -> None:
        monkeypatch.undo()
        assert scene.file(A)
        scene.write({A: (name(region),)}, "pod-a", scene.pod("pod-z").uid)
        await remove(*claim)

    monkeypatch.setattr(scene.files, "remove", removed)
    scene.unprepare(A)
    scene.plugin.work()
    users = {one.pod for one in scene.ledger.tenancies.of(region)}
    assert users >= {"pod-a", "pod-z"}


def test_a_claim_that_ends_unadopted_has_no_file_though_its_users_cannot_be_read(
    scene: RecordScene,
) -> None:
    not_adopted(scene, elsewhere=False)
    assert scene.file(A)
    (scene.folder / FILE_NAME).write_text("{")
    task = scene.unprepare(A)
    scene.plugin.work()
    assert isinstance(task.exception(), NoSourceError)
    assert not scene.file(A)


def test_a_claim_that_is_prepared_while_its_former_end_is_repeated_is_in_force(
    scene: RecordScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = scene.regions[0]
    prepared(scene, region)
    scene.pods.clear()
    scene.unprepare()
    scene.plugin.work()
    learn, taken = scene.files.learn, asyncio.Event()
    begun: list[asyncio.Task[Any]] = []
    take = scene.ledger.dra.take

    def takes(*of: Any) -> Any:
        taken.set()
        return take(*of)

    monkeypatch.setattr(scene.ledger.dra, "take", takes)

    async def learnt(uid: ClaimUid) -> None:
        await learn(uid)
        if not begun:
            scene.allocated(A, region, pods=("pod-2",))
            begun.append(asyncio.create_task(scene.lifecycle.prepare(ref(A))))
            await taken.wait()

    monkeypatch.setattr(scene.files, "learn", learnt)
    task = scene.unprepare()
    scene.pass_time(lambda: task.done() and begun[0].done())
    assert isinstance(task.exception(), NotFinishedError)
    assert begun[0].result()
    assert scene.file()


def test_a_claim_that_ends_unread_leaves_its_pods_on_the_device_that_it_has_since(
    scene: RecordScene,
) -> None:
    """By the copy it is in force, on another device."""
    one, _, other = scene.regions
    prepared(scene, one)
    old = moved(scene, other)
    scene.write({A: (name(other),)}, "pod-2")
    doubts(scene, old)
    scene.unprepare()
    scene.plugin.work()
    assert scene.look()
    scene.plugin.work()
    assert touched(scene, other) == []


@pytest.mark.parametrize("driver", [DRIVER, "former.example.com"])
def test_a_claim_that_ended_and_whose_driver_nobody_serves_is_not_in_force_again(
    scene: RecordScene, driver: str
) -> None:
    """Nobody would end it, and kubelet's record names it for good. One of ours kubelet ends."""
    region = scene.regions[0]
    scene.allocated(B, region, pods=("pod-3",))
    scene.prepared(B)
    scene.write({B: (name(region),)}, "pod-3", driver=driver)
    scene.unprepare(B)
    scene.plugin.work()
    assert scene.ledger.claim_owners[B].ended
    put_back(scene, scene.journal.snapshot)
    assert scene.ledger.claim_owners[B].ended == (driver != DRIVER)
    assert not scene.ledger.unreconciled


@pytest.mark.parametrize("boot", ["this", "earlier"])
def test_a_claim_of_another_boots_journal_may_have_been_prepared_in_this_one(
    scene: RecordScene, boot: str
) -> None:
    """Unless the plugin did not serve in this boot: then no container has it yet."""
    region = scene.regions[0]
    prepared(scene, region)
    old = scene.journal.snapshot
    old = replace(old, facts=old.facts | {Fact.BOOT: "an earlier one"})
    served = scene.ledger.boot_id if boot == "this" else "an earlier one"
    put_back(scene, old, boot=served)
    assert bool(touched(scene, region)) == (boot == "earlier")


def test_pods_that_left_are_waited_for_though_the_journal_lost_the_boot(scene: RecordScene) -> None:
    region = scene.regions[0]
    prepared(scene, region)
    scene.unprepare()
    scene.plugin.work()
    assert scene.ledger.tenancies.left(region)
    old = scene.journal.snapshot
    facts = {fact: value for fact, value in old.facts.items() if fact is not Fact.BOOT}
    put_back(scene, replace(old, facts=facts), boot=scene.ledger.boot_id)
    assert touched(scene, region) == []


# ------------------------------------------------------------------ cards that come meanwhile


def absent(scene: RecordScene, region: RegionId) -> CardId:
    """The journal is lost, and a claim's card is not there at the start."""
    card = card_of(region)
    scene.forgotten()
    scene.rack.boards[card].present = False
    scene.journal.snapshot = doubted(Change(), "it was lost", claims=True)
    scene.restart()
    scene.pod("pod-1")
    return card


def test_a_card_that_comes_while_the_record_is_read_is_asked_about_again(
    scene: RecordScene,
) -> None:
    region = scene.regions[0]
    card = absent(scene, region)
    scene.write({A: (name(region),)}, driver="former.example.com")
    task = scene.plugin.begin(scene.reconciler.reconcile())
    scene.plugin.loop.settle()
    scene.plugin.job(0)  # the record was read
    scene.rack.boards[card].present = True
    scan = scene.plugin.begin(scene.plugin.hardware.scan())
    while not scan.done() and len(scene.plugin.jobs) > 1:
        scene.plugin.job(len(scene.plugin.jobs) - 1)
    assert card in scene.ledger.cards
    assert not task.done()
    while not task.done():
        scene.plugin.job(0)
    assert task.result()
    assert card in scene.ledger.unreconciled
    assert scene.look()
    assert card not in scene.ledger.unreconciled
    assert scene.ledger.claim_owner_of(DeviceId(region))


def test_the_device_plugin_api_asks_on_until_every_claim_is_known(scene: RecordScene) -> None:
    """The claim's card is away at first: else all cards were kept back until the next start."""
    region = scene.regions[0]
    card = absent(scene, region)
    scene.write({A: (name(region),)})
    serves_devices(scene)
    task = scene.plugin.begin(scene.reconciler.run())
    scene.plugin.work()
    assert scene.ledger.resource_claims_unknown
    assert not task.done()
    scene.rack.boards[card].present = True
    scene.plugin.begin(scene.plugin.hardware.scan())
    scene.pass_time(lambda: not scene.ledger.resource_claims_unknown)
    assert scene.ledger.claim_owner_of(DeviceId(region))


def test_a_claim_whose_device_a_pod_had_is_known_once_that_is_released(scene: RecordScene) -> None:
    region = scene.regions[0]
    scene.journal.snapshot = doubted(scene.journal.snapshot, "it was put back", claims=True)
    scene.restart()
    scene.pod("pod-1")
    pod = PodUid("pod-x")
    scene.plugin.call(lambda: scene.ledger.device_plugin.adopt(REGIONS, DeviceId(region), pod, {}))
    scene.write({A: (name(region),)})
    serves_devices(scene)
    scene.plugin.begin(scene.reconciler.run())
    scene.plugin.work()
    assert A not in scene.ledger.claim_owners
    scene.plugin.call(lambda: scene.ledger.device_plugin.release([region]))
    scene.pass_time(lambda: A in scene.ledger.claim_owners)
    assert not scene.ledger.resource_claims_unknown
