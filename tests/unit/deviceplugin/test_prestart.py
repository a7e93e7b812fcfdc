"""The gate at its narrowest: what comes between a preparation and the container that it is for.

The real ledger and lifecycle run on `ledger_world`, whose threads end when a test says so. In each
test something happens at one chosen instant, and the container must not start.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from doubles.cards import BLANK, OTHER_INTERFACE, PREFIX, REGIONS, TOO_HOT, WHOLE
from ledger_scene import Scene, scenes
from ledger_support import doubt_owners
from ledger_world import AFUS, FACTORY, Checkpoint, Hand, Plugin, env_for

from fpga_plugin.allocation.journal.records import Condition, Ownership
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.deviceplugin import prestart
from fpga_plugin.errors import (
    CardGoneError,
    FpgaPluginError,
    HardwareError,
    NoSourceError,
    NotFinishedError,
    NotPermittedError,
    RefusedError,
    WrongImageError,
)
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.model import Card, CardHealth
from fpga_plugin.ids import AfuId, DeviceId
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.policy.file import PolicyFile
from fpga_plugin.settings.settings import ScrubPolicy

AFU, OTHER_AFU = AFUS
ALLOW, DENY = (f"version: 1\ndefault: {word}\nrules: []\n" for word in ("allow", "deny"))


@pytest.fixture
def begin() -> Iterator[Callable[..., Scene]]:
    with scenes() as make:
        yield make


@pytest.fixture
def scene(begin) -> Scene:
    return begin()


# ------------------------------------------------------------------ while it is prepared


@pytest.mark.parametrize("ended", [True, False], ids=["it is done", "its port is to be closed"])
def test_a_change_of_one_card_while_another_is_still_prepared_is_seen(scene: Scene, *, ended: bool):
    scene.hold_releases()
    first, _, second = scene.regions
    pod = scene.admit(first, second)
    task = scene.prestart(pod, AFU, OTHER_AFU)
    scene.until(lambda: len(scene.plugin.jobs) == 2)  # each card's thread has something to do
    scene.plugin.job(0)  # the first card's; from here on its next one comes after the second's
    scene.until(lambda: scene.condition(first) is Condition.PROGRAMMED, job=1)
    if ended:
        scene.until(lambda: len(scene.plugin.jobs) == 1, job=1)
    assert not scene.rack.slot(second).held
    scene.swap(card_of(first), told=True)
    assert scene.condition(first) is Condition.DIRTY
    scene.refused(task, NotFinishedError, f"region {first} changed")
    scene.start(pod, AFU, OTHER_AFU)
    assert [scene.rack.slot(r).afu for r in (first, second)] == [AFU, OTHER_AFU]
    assert not scene.rack.slot(first).data


def test_a_mislabelled_image_is_found_by_its_afu_id_and_its_region_stays_in_service(scene: Scene):
    scene.hold_releases()
    region = scene.regions[0]
    scene.images.mislabelled = FACTORY
    scene.refused(scene.prestart(scene.admit(region), AFU), WrongImageError, "shows AFU f0f0")
    assert scene.condition(region) is Condition.DIRTY
    scene.images.mislabelled = None
    scene.start(scene.pods[-1], AFU)


def test_memory_is_not_called_clear_for_a_card_that_came_while_it_was_cleared(begin):
    scene = begin(memory=True)
    scene.hold_releases()
    board = next(iter(scene.rack.boards.values()))
    tenant = scene.admit(board.card.id)
    scene.start(tenant, AFU, AFU)
    clear = scene.rack.clear_memory

    def cleared_and_swapped(card: Card) -> None:
        scene.rack.clear_memory = clear
        clear(card)
        scene.swap(card.id, told=True)

    scene.rack.clear_memory = cleared_and_swapped
    pod = scene.admit(board.card.id)
    scene.refused(scene.prestart(pod, AFU, AFU), CardGoneError, "was removed while")
    assert board.card.id in scene.ledger.memory_clear_pending
    scene.start(pod, AFU, AFU)
    assert not board.memory


def test_a_card_is_not_handed_over_with_its_memory_before_it_is_known_who_is_on_it(begin):
    scene = begin(memory=True)
    scene.hold_releases()
    board = next(iter(scene.rack.boards.values()))
    scene.start(scene.admit(board.card.id), AFU, AFU)
    board.memory.add("what the tenant left")
    pod = scene.admit(board.card.id)
    scene.plugin.end()  # a new life of the process, which has not read kubelet's records
    doubt_owners(scene.journal)
    scene.plugin = Plugin(
        scene.rack, scene.pods, scene.images, scene.journal, scrub=ScrubPolicy.REQUIRED
    )
    scene.ledger = scene.plugin.ledger
    scene.plugin.begin(scene.plugin.hardware.scan())
    scene.plugin.work()
    scene.refused(scene.prestart(pod, AFU, AFU), NotFinishedError, "is not cleared")
    assert board.memory, "nobody knows who else is on the card"
    scene.ledger.reconciled([board.card.id])
    scene.start(pod, AFU, AFU)
    assert not board.memory


# ------------------------------------------------------------------ while its owner is looked for


@pytest.mark.parametrize(
    ("others", "mixed"),
    [
        ({WHOLE}, True),
        ({WHOLE.replace(PREFIX, "old.example")}, True),  # the operator changed the prefix since
        ({REGIONS.replace(PREFIX, "old.example")}, False),
        ({WHOLE[:-4] + "0000"}, False),
        ({REGIONS.replace("/region-", "/af-")}, False),
        ({f"{PREFIX}/x-1", f"{PREFIX}/y-1"}, False),
        ({f"{PREFIX}/x", f"{PREFIX}/y"}, False),
    ],
)
def test_only_this_plugins_kinds_of_one_interface_are_a_mixture(
    scene: Scene, others: set[str], *, mixed: bool
):
    identify = Checkpoint._identify

    def with_others(*args) -> Identity:
        identity = identify(*args)
        return replace(identity, resources=identity.resources | others)

    pod = scene.admit(scene.regions[0])
    with mock.patch.object(Checkpoint, "_identify", with_others):
        if mixed:
            scene.refused(scene.prestart(pod, AFU), RefusedError, "regions and whole cards of")
        else:
            scene.start(pod, AFU)


@pytest.mark.parametrize("jobs", [0, 1], ids=["records", "cgroup"])
def test_a_successors_allocation_does_not_get_the_pod_of_the_call_before(scene: Scene, jobs: int):
    """Kubelet's records are read in a thread, and meanwhile the region changes hands."""
    region = scene.regions[0]
    caller = scene.admit(region)
    task = scene.prestart(caller, AFU)
    for _ in range(jobs):
        scene.plugin.job(0)
    scene.plugin.call(lambda: scene.plugin.calls.deallocate(REGIONS, [region]))
    successor = scene.admit(region)
    scene.refused(task, RefusedError, "ended before its container started")
    assert scene.ledger.allocations[DeviceId(region)].pod in {None, successor.uid}


def test_an_allocation_that_ends_while_its_pod_is_looked_up_is_not_made_again(scene: Scene):
    """Kubelet's records may show the pod for a while after its Deallocate."""
    region = scene.regions[0]
    task = scene.prestart(scene.admit(region), AFU)
    scene.plugin.call(lambda: scene.plugin.calls.deallocate(REGIONS, [region]))
    scene.refused(task, RefusedError, "ended before its container started")
    assert not scene.ledger.allocations


def test_a_pod_that_nobody_knows_does_not_start_on_its_successors_allocation(scene: Scene):
    region = scene.regions[0]
    task = scene.prestart(scene.admit(region), AFU)
    scene.plugin.call(lambda: scene.plugin.calls.deallocate(REGIONS, [region]))
    scene.admit(region).active = False  # kubelet's records do not show it yet
    scene.refused(task, RefusedError, "ended before its container started")
    assert scene.rack.slot(region).afu == BLANK


def test_a_failure_of_a_card_does_not_count_for_the_card_that_replaced_it(
    scene: Scene, monkeypatch
):
    """Work that fails on a card of good health gets one more try, and so on the next card."""
    region = scene.regions[0]

    def reset(_hand):
        raise HardwareError("the port did not acknowledge")

    pod = scene.admit(region)
    scene.start(pod, AFU)
    monkeypatch.setattr(Hand, "reset", reset)
    seen = []
    for swapped in (False, True, False):
        if swapped:
            scene.swap(card_of(region), told=True)
        task = scene.prestart(pod, AFU)
        scene.plugin.work()
        with pytest.raises(HardwareError):
            task.result()
        seen.append(scene.condition(region))
    assert seen == [Condition.DIRTY, Condition.DIRTY, Condition.FAULTED]


def test_the_operators_commands_stand_in_status_and_the_pods_owner_reads_whom_to_ask(
    scene: Scene, monkeypatch
):
    region = scene.regions[0]
    failed = HardwareError("the port did not acknowledge", hint="as root: echo a > unbind")

    def reset(_hand):
        raise failed

    pod = scene.admit(region)
    scene.start(pod, AFU)
    monkeypatch.setattr(Hand, "reset", reset)
    with mock.patch.object(EventRecorder, "refused", autospec=True) as refused:
        task = scene.prestart(pod, AFU)
        scene.plugin.work()
    with pytest.raises(HardwareError) as caught:
        task.result()
    told = caught.value.for_tenant()
    assert str(told) == "the port did not acknowledge: ask the node's operator"
    ((_, _, _, error), _) = refused.call_args
    assert str(error) == "the port did not acknowledge: as root: echo a > unbind"


# ------------------------------------------------------------------ at the hand-over


def test_a_container_starts_on_what_it_asked_for(scene: Scene):
    first, other, second = scene.regions
    scene.start(scene.admit(first, second), AFU)
    scene.start(scene.admit(other))
    assert [scene.rack.slot(r).afu for r in (first, second, other)] == [AFU, BLANK, BLANK]
    assert scene.ledger.ownership(first) is Ownership.STARTED


@pytest.mark.parametrize("wants", [(AFU,), ()], ids=["programmed", "blank"])
@pytest.mark.parametrize("shows", [FACTORY, None], ids=["another image", "nothing"])
def test_a_region_that_changed_unseen_is_found_at_the_hand_over(
    scene: Scene, wants, shows: AfuId | None
):
    scene.hold_releases()
    region = scene.regions[0]
    task = scene.prepare(scene.admit(region), *wants)
    scene.rack.slot(region).afu = shows
    scene.refused(task, NotFinishedError, "shows (f0f0|none)")
    assert scene.condition(region) is Condition.DIRTY
    scene.rack.slot(region).afu = FACTORY
    scene.start(scene.pods[-1], *wants)
    assert scene.rack.slot(region).afu == (AFU if wants else BLANK)


@pytest.mark.parametrize(("told", "late"), [(True, False), (False, False), (True, True)])
def test_a_card_that_came_in_place_of_the_prepared_one_serves_nobody(
    scene: Scene, *, told: bool, late: bool
):
    """After the last look (`late`) only what the plugin is notified of can be known."""
    first, _, second = scene.regions
    task = scene.prepare(scene.admit(first, second), AFU, AFU)
    if late:
        scene.plugin.job(0)  # the first card was looked at; the second answers late
    # The new card holds the very image that was asked for, from whomever.
    scene.swap(card_of(first), told=told)
    scene.rack.slot(first).afu = AFU
    scene.refused(task, NotFinishedError)


def test_an_allocation_that_ends_during_the_last_look_ends_its_prestart(scene: Scene):
    region = scene.regions[0]
    task = scene.prepare(scene.admit(region), AFU)
    scene.plugin.call(lambda: scene.plugin.calls.deallocate(REGIONS, [region]))
    scene.refused(task, FpgaPluginError)
    assert scene.condition(region) is Condition.BLANK, "scrubbed for nobody"


def test_of_two_calls_that_wait_for_one_preparation_only_one_gets_its_result(scene: Scene):
    pod = scene.admit(scene.regions[0])
    calls = [scene.prestart(pod, AFU) for _ in range(2)]
    scene.plugin.work()
    assert [call.exception() for call in calls].count(None) == 1
    assert "another call used the preparation" in str([call.exception() for call in calls])
    assert scene.logged.count("prepared") == 1


def test_a_successor_does_not_start_on_what_its_predecessors_call_prepared(scene: Scene):
    region = scene.regions[0]
    task = scene.prepare(scene.admit(region), AFU)
    scene.admit(region)  # an implied release: kubelet says nothing else
    scene.refused(task, RefusedError, "ended before its container started")


def test_another_kubelet_during_the_last_look_ends_the_call_of_the_one_before(scene: Scene):
    task = scene.prepare(scene.admit(scene.regions[0]), AFU)
    scene.plugin.call(lambda: scene.plugin.reconciler.kubelet_found("life 2"))
    scene.refused(task, NotFinishedError)


@pytest.mark.parametrize("touches", [1, 2, 3])
def test_another_kubelet_stops_the_work_for_the_one_before(begin, touches: int):
    scene = begin(cards=(2,), memory=True)
    scene.hold_releases()
    former = scene.admit(*scene.regions)
    scene.start(former, AFU, OTHER_AFU)
    pod = scene.admit(*scene.regions)
    scene.touched.clear()
    task = scene.prestart(pod, AFU, OTHER_AFU)
    scene.until(lambda: len(scene.touched) >= touches)
    before = len(scene.touched)
    scene.plugin.call(lambda: scene.plugin.reconciler.kubelet_found("life 2"))
    scene.plugin.work()
    with pytest.raises(NotFinishedError):
        task.result()
    assert len(scene.touched) <= before + 2, "a reset and a PR: only what had begun ends"
    assert Condition.PROGRAMMED not in {scene.ledger.record(r).condition for r in scene.regions}


def test_hardware_that_fails_during_the_last_look_is_given_to_nobody(scene: Scene):
    region = scene.regions[0]
    task = scene.prepare(scene.admit(region), AFU)
    scene.plugin.call(lambda: scene.ledger.hardware.set_failing(card_of(region), {region: TOO_HOT}))
    scene.refused(task, RefusedError, "thermal")


def test_a_plugin_that_ends_during_the_last_look_hands_nothing_over(scene: Scene):
    """Kubelet gets no answer any more, so the journal must not say that the container started."""
    task = scene.prepare(scene.admit(scene.regions[0]), AFU)
    closing = scene.plugin.begin(scene.plugin.prestarts.close())
    assert closing.done()
    scene.refused(task, NotFinishedError)


def test_one_card_that_does_not_answer_holds_up_no_other(scene: Scene):
    first, other, second = scene.regions
    hangs = scene.prepare(scene.admit(first), AFU)
    (stuck,) = scene.plugin.jobs
    scene.plugin.jobs.clear()  # a thread that never ends
    scene.start(scene.admit(second), AFU)
    scene.plugin.loop.pass_time()  # the call's own time
    assert "last checks are not done" in str(hangs.exception())
    stuck.run()
    scene.start(scene.pods[0], AFU)  # what was prepared is still there
    assert scene.logged.count("prepared") == 2
    assert scene.condition(other) is Condition.BLANK


@pytest.mark.parametrize("when", ["while it is prepared", "during the last look"])
def test_a_policy_that_forbids_it_by_now_is_obeyed(begin, tmp_path: Path, when: str):
    path = tmp_path / "policy.yaml"
    path.write_text(ALLOW)
    policy = PolicyFile(str(path), guarded=False)
    scene = begin(policy=policy)
    pod = scene.admit(scene.regions[0])
    task = scene.prestart(pod, AFU) if when.startswith("while") else scene.prepare(pod, AFU)
    if when.startswith("while"):
        scene.until(lambda: scene.rack.slot(pod.devices[0]).afu == AFU)
    waiting = len(scene.plugin.jobs)
    path.write_text(DENY + "# another length\n")
    scene.plugin.begin(policy.reload())
    scene.until(lambda: policy.policy.default.value == "deny", job=waiting)
    kind = NotPermittedError if when.startswith("while") else NotFinishedError
    scene.refused(task, kind)
    scene.refused(scene.prestart(pod, AFU), NotPermittedError, "the default is deny")


def test_a_policy_that_forbids_it_by_now_is_told_though_the_work_failed(begin, tmp_path: Path):
    """Else a pod that may not have it goes on trying."""
    path = tmp_path / "policy.yaml"
    path.write_text(ALLOW)
    policy = PolicyFile(str(path), guarded=False)
    scene = begin(policy=policy)
    scene.images.mislabelled = OTHER_AFU
    task = scene.prestart(scene.admit(region := scene.regions[0]), AFU)
    scene.until(lambda: scene.rack.slot(region).afu == OTHER_AFU)
    waiting = len(scene.plugin.jobs)
    path.write_text(DENY + "# another length\n")
    scene.plugin.begin(policy.reload())
    scene.until(lambda: policy.policy.default.value == "deny", job=waiting)
    scene.refused(task, NotPermittedError, "the default is deny")


def test_a_pod_gets_no_region_that_another_has_by_kubelets_checkpoint_too(scene: Scene):
    """Kubelet sends the environment, so the pod need not be known; the other one runs."""
    (region, *_) = scene.regions
    running = scene.admit(region)
    scene.start(running, AFU)
    running.running = True
    other = replace(running, uid=PodUid("other"), nodes=dict(running.nodes))
    scene.pods.append(other)
    before = list(scene.touched)
    task = scene.prestart(other, OTHER_AFU)
    scene.plugin.work()
    assert isinstance(task.exception(), NoSourceError)
    assert scene.touched == before


def test_a_pod_that_no_record_names_is_bound_to_nothing(scene: Scene):
    """An extended kubelet sends the environment, and its records may not name the pod yet."""
    pod = scene.admit(scene.regions[0])
    looked: list[object] = []
    scene.plugin.prestarts._look_at_cgroup = looked.append
    pod.active = False  # in no record
    scene.plugin.work()
    scene.start(pod, AFU)
    assert looked == []
    assert scene.ledger.allocations[pod.devices[0]].pod is None


@pytest.mark.parametrize("when", ["before", "while it is prepared"])
def test_the_policy_is_not_passed_by_for_a_card_that_was_reflashed(
    begin, tmp_path: Path, when: str
):
    """The resource means the interface id of before, and no question about requests would fit."""
    path = tmp_path / "policy.yaml"
    path.write_text(DENY if when == "before" else ALLOW)
    scene = begin(policy=PolicyFile(str(path), guarded=False))
    region = scene.regions[0]
    pod = scene.admit(region)
    board = scene.rack.boards[card_of(region)]
    env = env_for([AFU]) | {"FPGA_REGION_0": OTHER_INTERFACE}
    flashed = replace(board.card, interface_id=OTHER_INTERFACE)
    if when == "before":
        board.card = flashed
        scene.swap(card_of(region), told=True)
        call = scene.plugin.prestarts.serve(pod.resource, pod.devices, env, 30.0)
        task = scene.plugin.begin(call)
    else:
        task = scene.prestart(pod, AFU)
        scene.until(lambda: scene.rack.slot(region).afu == AFU)
        scene.ledger.cards[board.card.id] = flashed
    scene.refused(task, RefusedError, f"has interface id {OTHER_INTERFACE}")
    if when == "before":
        assert scene.rack.slot(region).afu != AFU


# ------------------------------------------------------------------ results that nobody fetches


def test_a_result_that_nobody_fetched_serves_the_next_call_until_it_expires(scene: Scene):
    region = scene.regions[0]
    pod = scene.admit(region)
    task = scene.prepare(pod, AFU)
    task.cancel()
    scene.plugin.work()
    scene.start(pod, AFU)
    assert scene.logged.count("prepared") == 1

    task = scene.prepare(pod, AFU)
    task.cancel()
    begun = scene.plugin.loop.time()
    while scene.plugin.loop.time() < begun + prestart.UNCLAIMED_FOR:
        assert "a preparation expired unused" not in scene.logged
        assert scene.plugin.loop.pass_time()
    assert scene.plugin.loop.time() - begun == prestart.UNCLAIMED_FOR
    assert scene.condition(region) is Condition.DIRTY
    assert scene.ledger.ownership(region) is Ownership.STARTED
    scene.plugin.work()
    assert scene.rack.slot(region).afu == AFU, "nothing is scrubbed under an owner"
    scene.start(pod, AFU)
    assert scene.logged.count("prepared") == 3


def test_before_kubelets_records_were_read_a_start_touches_its_own_region_alone(scene: Scene):
    first, neighbour, _ = scene.regions
    scene.start(scene.admit(neighbour), AFU)
    scene.plugin.queue.unsync()
    scene.plugin.call(lambda: scene.plugin.calls.deallocate(REGIONS, [neighbour]))
    scene.ledger.keep_back([card_of(first)])
    with pytest.raises(RefusedError, match="is not known"):
        scene.admit(first)
    scene.ledger.reconciled([card_of(first)])
    pod = scene.admit(first)
    scene.ledger.keep_back([card_of(first)])
    scene.start(pod, OTHER_AFU)
    assert scene.condition(neighbour) is Condition.DIRTY
    assert scene.rack.slot(neighbour).afu == AFU
    assert scene.rack.slot(first).afu == OTHER_AFU


def test_a_result_that_was_fetched_does_not_expire(scene: Scene):
    region, failed = scene.regions[0], []
    scene.plugin.loop.set_exception_handler(lambda _, what: failed.append(what))
    scene.start(scene.admit(region), AFU)
    while scene.plugin.loop.pass_time():
        pass
    assert scene.condition(region) is Condition.PROGRAMMED
    assert failed == []


def test_a_failure_that_nobody_fetched_expires_like_a_result(scene: Scene):
    region, failed = scene.regions[0], []
    scene.plugin.loop.set_exception_handler(lambda _, what: failed.append(what))
    scene.images.mislabelled = OTHER_AFU
    pod = scene.admit(region)
    task = scene.prestart(pod, AFU)
    scene.until(lambda: scene.condition(region) is Condition.SCRUBBING)
    task.cancel()
    scene.plugin.work()
    assert "preparation failed" in scene.logged
    while scene.plugin.loop.pass_time():
        scene.plugin.work()
    assert "a preparation expired unused" in scene.logged
    assert failed == []


@pytest.mark.parametrize("fetched", [True, False])
def test_each_result_has_its_own_time(scene: Scene, *, fetched: bool):
    region = scene.regions[0]
    pod = scene.admit(region)
    task = scene.prepare(pod, AFU)
    if not fetched:
        task.cancel()
    scene.plugin.work()
    half = scene.plugin.loop.time() + prestart.UNCLAIMED_FOR / 2
    scene.plugin.loop.call_at(half, bool)
    while scene.plugin.loop.time() < half:
        scene.plugin.loop.pass_time()
    scene.prepare(pod, OTHER_AFU).cancel()
    scene.plugin.work()
    while scene.condition(region) is Condition.PROGRAMMED:
        assert scene.plugin.loop.pass_time()
    assert scene.plugin.loop.time() == half + prestart.UNCLAIMED_FOR


@pytest.mark.parametrize("end", ["Deallocate", "an Allocate for another pod"])
def test_an_ended_allocation_keeps_no_image_in_memory(scene: Scene, end: str):
    region = scene.regions[0]
    task = scene.prepare(scene.admit(region), AFU)
    task.cancel()
    scene.plugin.work()
    (image,) = scene.images.loaded
    assert image() is not None
    if end == "Deallocate":
        scene.plugin.call(lambda: scene.plugin.calls.deallocate(REGIONS, [region]))
    else:
        scene.admit(region)
    del task
    gc.collect()
    assert image() is None


@pytest.mark.parametrize(
    ("kind", "condition"),
    [
        (FaultKind.TRANSIENT, Condition.DIRTY),
        (FaultKind.LASTING, Condition.FAULTED),
        (FaultKind.POISONED, Condition.FAULTED),
    ],
)
def test_what_is_wrong_with_a_region_decides_whether_work_on_it_is_tried_again(
    scene: Scene, kind: FaultKind, condition: Condition
):
    region = scene.regions[0]
    pod = scene.admit(region)
    scene.rack.bad_prs = ["error"]
    fault = Fault(kind, "what the hardware says")
    with mock.patch.object(scene.rack, "health", return_value=CardHealth({region: fault})):
        task = scene.prestart(pod, AFUS[0])
        scene.plugin.work()
    assert isinstance(task.exception(), HardwareError)
    assert scene.condition(region) is condition
    assert scene.ledger.failing == {region: fault}
