"""What kubelet's record of claims, and the API server, do to claims: one look after the other.

See test_reconcile_lost_claims.py for what fails meanwhile.
"""

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.cards import AFU
from ledger_scene import scenes
from ledger_support import doubt_owners, trouble
from test_lifecycle import OTHER, A, B, ClaimScene, ref

from fpga_plugin.allocation.dra_steps import DeviceOwnedError
from fpga_plugin.allocation.journal.records import Change, Condition, Fact
from fpga_plugin.allocation.names import NOT_READ, card_of
from fpga_plugin.allocation.obstacles import ObstacleKind
from fpga_plugin.cards.operations import TenancyActiveError
from fpga_plugin.dra.cdi import CdiError
from fpga_plugin.dra.claim import NoSuchClaimError
from fpga_plugin.dra.names import device_name
from fpga_plugin.errors import NoSourceError, NotFinishedError
from fpga_plugin.ids import DeviceId, RegionId
from fpga_plugin.kubernetes.cgroup import PodPresence
from fpga_plugin.kubernetes.kubelet.dra_record import FILE_NAME
from fpga_plugin.kubernetes.names import ClaimUid

DRIVER = "fpga.intel.com"


class RecordScene(ClaimScene):
    """With kubelet's record."""

    def write(
        self,
        claims: dict[ClaimUid, tuple[str, ...]],
        *pods: str,
        driver: str = DRIVER,
        nobody: bool = False,
    ) -> None:
        """The record, of these claims and the names of their devices."""
        states = [
            {
                "ClaimUID": uid,
                "ClaimName": ref(uid).name,
                "Namespace": ref(uid).namespace,
                "PodUIDs": {} if nobody else {pod: {} for pod in pods or ("pod-1",)},
                "DriverState": {
                    driver: {
                        "Devices": [{"DeviceName": d, "RequestNames": ["fpga"]} for d in devices]
                    }
                },
            }
            for uid, devices in claims.items()
        ]
        data = json.dumps({"ClaimInfoStateList": states})
        (self.folder / FILE_NAME).write_text(json.dumps({"Data": data}))

    def look(self) -> bool:
        """One look at it, to its end."""
        task = self.plugin.begin(self.reconciler.reconcile())
        self.plugin.work()
        return bool(task.result())

    def restart(self) -> None:
        """Another run of the plugin, up to where kubelet's record is about to be read."""
        self.live_again()
        self.plugin.kubelet_begins("life 1")
        self.plugin.work()

    def forgotten(self) -> None:
        """The journal was lost, or is a new one."""
        self.journal.snapshot = type(self.journal.snapshot)()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., RecordScene]]:
    with scenes(functools.partial(RecordScene, tmp_path)) as make:  # type: ignore[arg-type]
        yield make  # type: ignore[misc]


@pytest.fixture
def scene(make: Callable[..., RecordScene]) -> RecordScene:
    return make()


def name(region: RegionId | str) -> str:
    return device_name(DeviceId(region))


def test_a_claim_that_the_journal_lost_is_adopted_with_its_file_before_anything_is_scrubbed(
    scene: RecordScene,
) -> None:
    """Invariant 9: its pod runs, or its containers start again without a call."""
    one, two = scene.regions[:2]
    scene.allocated(A, one)
    scene.prepared()
    scene.pod("pod-1")
    scene.write({A: (name(one),)})
    (scene.folder / "cdi" / f"k8s.{DRIVER}-claim_{B}.json").write_text("{}")
    scene.forgotten()
    scene.restart()
    scene.rack.done.clear()
    assert not scene.plugin.queue.synced
    assert scene.look()
    scene.plugin.work()
    assert scene.plugin.queue.synced
    assert scene.ledger.pods_of(scene.ledger.claim_owners[A].devices) == {"pod-1"}
    assert scene.ledger.allocations[DeviceId(one)].missed_prestart
    assert scene.file(A), "its containers may start again"
    assert scene.file(B) == "", "that of a claim which nobody knows"
    assert not [what for what in scene.rack.done if one in what]
    assert not scene.ledger.unreconciled
    assert "claim adopted" in scene.logged
    assert scene.ledger.record(two).condition is Condition.BLANK, "nobody has it: it is scrubbed"


@pytest.mark.parametrize("what", ["loaded", "hangs", "hangs blank"])
def test_what_a_running_pod_did_to_its_region_withdraws_no_claim_at_a_restart(
    scene: RecordScene, what: str
) -> None:
    """Its containers restart without a call, and need the claim's file."""
    region = scene.regions[0]
    board, slot = scene.rack.boards[card_of(region)], scene.rack.slot(region)
    board.card = replace(board.card, owner_loads=what == "loaded")
    scene.plugin.begin(scene.plugin.hardware.scan())
    scene.plugin.work()
    scene.allocated(A, region, wants=AFU if what == "hangs" else None)
    scene.prepared()
    scene.pod("pod-1")
    scene.pod("pod-2")
    scene.write({A: (name(region),)}, "pod-1", "pod-2")
    if what == "loaded":
        slot.afu = OTHER
    else:
        slot.silent = "hung"
    scene.restart()
    scene.plugin.begin(scene.files.begin())
    assert scene.look()
    scene.plugin.work()
    assert scene.file(A)
    assert "claim withdrawn" not in scene.logged
    assert bool(trouble(scene.ledger, region)) is bool(slot.silent), "its health says that it hangs"
    scene.rack.done.clear()
    scene.allocated(A, region, wants=AFU if what == "hangs" else None, pods=("pod-2", "pod-3"))
    scene.prepared()
    assert scene.rack.done == [], "a further pod gets what the claim has: the others run on it"


@pytest.mark.parametrize("what", ["nonsense", "directory"])
def test_while_the_record_cannot_be_read_nothing_is_scrubbed_or_given_out(
    scene: RecordScene, what: str
) -> None:
    region = scene.regions[0]
    scene.forgotten()
    scene.restart()
    path = scene.folder / FILE_NAME
    path.write_text("{") if what == "nonsense" else path.mkdir()
    scene.rack.done.clear()
    for _ in range(2):
        assert not scene.look()
        scene.plugin.work()
    assert scene.reconciler.problem
    assert scene.logged.count("kubelet's record of claims cannot be read") == 1
    assert not scene.plugin.queue.synced
    assert scene.rack.done == []
    path.unlink() if what == "nonsense" else path.rmdir()
    scene.write({})
    assert scene.look()
    assert scene.reconciler.problem == ""
    scene.plugin.work()
    assert scene.ledger.record(region).condition is Condition.BLANK


def test_the_record_tells_of_further_pods_of_a_claim(scene: RecordScene) -> None:
    """No call comes for a pod that shares a prepared claim; its processes are waited for."""
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    scene.write({A: (name(scene.regions[0]),)}, "pod-1", "pod-7")
    scene.look()
    assert scene.ledger.pods_of(scene.ledger.claim_owners[A].devices) == {"pod-1", "pod-7"}
    assert scene.ledger.dra.is_prepared(scene.ledger.claim_owners[A])


def test_a_claim_that_has_ended_is_not_begun_anew_by_an_old_record(scene: RecordScene) -> None:
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    scene.pod("pod-1")
    scene.unprepare()
    scene.write({A: (name(region),)}, "pod-9")
    scene.look()
    assert scene.ledger.claim_owners[A].ended
    assert "pod-9" not in scene.ledger.pods_of(scene.ledger.claim_owners[A].devices)
    assert DeviceId(region) not in scene.ledger.allocations


def test_what_the_record_names_is_adopted_whatever_the_plugin_knows_of_its_card(
    scene: RecordScene,
) -> None:
    """Invariant 9. The state directory may be one that was put back, which knows the card well, and
    not who came since. A pod that is not known to be gone may run."""
    one, other = scene.regions[0], scene.regions[2]
    assert not scene.ledger.unreconciled
    scene.pod("pod-1")
    scene.write({A: (name(one),)})
    scene.rack.done.clear()
    assert scene.look()
    assert scene.ledger.pods_of([DeviceId(one)]) == {"pod-1"}
    assert scene.ledger.allocations[DeviceId(one)].used
    assert "claim adopted" in scene.logged
    scene.allocated(B, one, pods=("pod-b",))
    task = scene.prepare(B)
    scene.pass_time(task.done)
    assert isinstance(task.exception(), DeviceOwnedError)
    scene.allocated(B, other, pods=("pod-b",))
    assert scene.prepared(B), "the rest is served"
    assert not [what for what in scene.rack.done if one in what]


@pytest.mark.parametrize("knows", [True, False])
def test_a_claim_is_not_adopted_if_all_its_pods_are_known_to_be_gone(
    scene: RecordScene, monkeypatch: pytest.MonkeyPatch, *, knows: bool
) -> None:
    """It ended while another plugin served, or before the journal was lost. Nobody would end it
    again; where a pod's cgroup cannot be seen, nobody knows."""
    gone = {"pod-1": PodPresence.GONE, "pod-2": PodPresence.GONE if knows else PodPresence.UNKNOWN}
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    scene.forgotten()
    scene.restart()
    monkeypatch.setattr(scene.operations.cgroups, "state", gone.__getitem__)
    scene.rack.slot(scene.regions[0]).opens.add("somebody")
    scene.write({A: (name(scene.regions[0]),)}, "pod-1", "pod-2")
    assert scene.look()
    assert bool(scene.ledger.claim_owners) is not knows
    assert bool(scene.file(A)) is not knows, "no container starts with what is given to others"
    if knows:
        task = scene.unprepare(A)
        scene.plugin.work()
        assert not task.done(), "its region is not clean yet"


def test_a_claim_whose_pods_are_gone_keeps_its_devices_while_no_driver_can_end_it(
    scene: RecordScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the device plugin API. Kubelet starts a further pod of it by its file, uncalled."""
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    scene.forgotten()
    scene.restart()
    monkeypatch.setattr(scene.operations.cgroups, "state", lambda _: PodPresence.GONE)
    scene.write({A: (name(scene.regions[0]),)}, "pod-1")
    scene.reconciler._claims = scene.reconciler._leftovers = None
    assert scene.look()
    assert scene.ledger.claim_owner_of(DeviceId(scene.regions[0])) is not None
    assert scene.file(A)


def test_a_claim_whose_pods_are_gone_does_not_keep_back_what_it_cannot_have(
    scene: RecordScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the device plugin API: its card is gone, and kubelet cannot end it."""
    region, doubt = scene.regions[0], Change(facts={Fact.RESOURCE_CLAIMS: "in doubt"})
    scene.ledger.commit(doubt)
    monkeypatch.setattr(scene.operations.cgroups, "state", lambda _: PodPresence.GONE)
    scene.reconciler._claims = scene.reconciler._leftovers = None
    scene.write({A: (name("0000-99-00.0-p0"),), B: (name(region),)}, "pod-1")
    assert scene.look()
    assert not scene.ledger.resource_claims_unknown
    assert scene.ledger.claim_owners.keys() == {B}


def test_pods_that_the_record_no_longer_names_are_forgotten_once_they_are_gone(
    scene: RecordScene,
) -> None:
    """What is kept of a claim that thousands of pods use one after the other does not grow."""
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    ghost = scene.pod("pod-1")
    for number in range(2, 6):
        scene.write({A: (name(region),)}, f"pod-{number}")
        assert scene.look()
        assert scene.ledger.pods_of([DeviceId(region)]) == {f"pod-{number}"}
    kept = scene.ledger.dra.tenancies_of_claim(A)
    assert {one.pod for one in kept} == {"pod-1", "pod-5"}, "pod-1 runs, whatever kubelet says"
    assert scene.reconciler._waits, "nobody reports its end"
    ghost.running = False
    assert scene.look()
    assert not scene.reconciler._waits
    assert {one.pod for one in scene.ledger.dra.tenancies_of_claim(A)} == {"pod-5"}
    kept = [one for one in scene.journal.snapshot.tenancies.values() if one is not None]
    assert {one.pod for one in kept} == {"pod-5"}


def test_a_record_that_was_read_around_a_call_is_read_once_more(scene: RecordScene) -> None:
    """Kubelet writes it just before it calls. Read before the call it does not show for which pods
    the call is; if it were not read again, the call's pod would wait for pods that are gone."""
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    scene.write({A: (name(region),)}, "pod-2")
    scene.reconciler._wake.clear()
    look = scene.plugin.begin(scene.reconciler.reconcile())
    scene.allocated(A, region, pods=("pod-2",), wants=OTHER)
    task = scene.prepare()
    scene.plugin.work()
    assert look.result()
    assert not task.done()
    assert "pod-1" in scene.ledger.pods_of([DeviceId(region)])
    assert scene.reconciler._wake.is_set()
    assert scene.look()
    assert scene.ledger.pods_of([DeviceId(region)]) == {"pod-2"}


def test_who_is_named_runs_whatever_the_cgroups_say(scene: RecordScene) -> None:
    """Between two containers a pod's cgroup is empty, and where none is seen nothing reports it:
    what has preparation_error is not prepared again under the pods that kubelet's record names."""
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    scene.write({A: (name(region),)}, "pod-1")
    assert scene.look()
    scene.plugin.begin(scene.files.run())
    scene.plugin.call(lambda: scene.ledger.work.dirty([region], "somebody programmed it"))
    scene.plugin.work()
    assert "claim withdrawn" in scene.logged
    scene.rack.done.clear()
    scene.allocated(A, region, pods=("pod-2",))
    task = scene.prepare()
    scene.pass_time(task.done)
    with pytest.raises(TenancyActiveError, match="pod-1 runs with it"):
        task.result()
    assert scene.rack.done == []
    scene.write({A: (name(region),)}, "pod-2")
    assert scene.look()
    assert scene.prepared()
    assert scene.afu(region) == AFU


def test_what_cannot_be_adopted_keeps_its_card_back_and_no_other(scene: RecordScene) -> None:
    """Invariant 4: somebody has it, and nobody can tell what of it."""
    one, _, other = scene.regions
    scene.forgotten()
    scene.restart()
    scene.pod("pod-1")
    scene.write({A: (name(one), f"{name(card_of(one))}-px")})
    assert scene.look()
    assert "claim not adopted" in scene.logged
    assert scene.ledger.unreconciled == {card_of(one)}
    scene.plugin.work()
    assert scene.ledger.record(other).condition is Condition.BLANK
    assert scene.ledger.record(one).condition is not Condition.BLANK
    scene.write({A: (name(one),)})
    assert scene.look()
    assert A in scene.ledger.claim_owners
    assert not scene.ledger.unreconciled
    scene.plugin.work()
    assert scene.ledger.record(scene.regions[1]).condition is Condition.BLANK, "it is nobody's"


def test_a_claim_is_this_plugins_by_its_driver_or_by_its_devices(scene: RecordScene) -> None:
    """FPGA_PLUGIN_RESOURCE_PREFIX may be another one since; f2 in docs/architecture.md."""
    one, _, other = scene.regions
    scene.pod("pod-1")
    gone = "0000-77-00-0-p0"
    for driver, names, known in (
        ("former.example.com", (name(one), gone), True),
        ("former.example.com", (name(one),), True),
        ("gpu.example.com", ("gpu-0",), False),
        ("gpu.example.com", (gone,), False),
        (DRIVER, (name(one),), True),
    ):
        scene.forgotten()
        scene.restart()
        scene.write({A: names}, driver=driver)
        assert scene.look()
        adopted = scene.ledger.claim_owners.get(A)
        assert (None if adopted is None else adopted.driver) == (
            driver if known and gone not in names else None
        )
        assert scene.ledger.unreconciled == ({card_of(one)} if known and gone in names else set())
    second = replace(
        scene.ledger.claim_owners[A],
        uid=B,
        driver="former.example.com",
        devices=(DeviceId(other),),
        requests={DeviceId(other): ("fpga",)},
    )
    scene.plugin.call(lambda: scene.ledger.dra.adopt_claim(second, []))
    scene.rack.boards[card_of(other)].present = False
    scene.plugin.begin(scene.plugin.hardware.scan())
    scene.plugin.work()
    scene.write({B: (name(other),)}, "pod-7", driver="former.example.com")
    assert scene.look()
    assert "pod-7" in scene.ledger.pods_of([DeviceId(other)]), "its driver is known, its card away"


def test_a_claim_of_no_pod_may_be_one_that_is_about_to_be_used(scene: RecordScene) -> None:
    scene.forgotten()
    scene.restart()
    scene.write({A: (name(scene.regions[0]),)}, nobody=True)
    assert scene.look()
    assert A in scene.ledger.claim_owners


def test_what_pods_have_by_the_other_api_is_read_before_anything_is_believed(
    scene: RecordScene,
) -> None:
    leftovers: Any = SimpleNamespace(
        problem="the checkpoint is half a file", waits=False, settled=set()
    )

    async def look() -> bool:
        return False

    leftovers.look = look
    scene.forgotten()
    scene.restart()
    scene.reconciler._leftovers = leftovers
    scene.write({})
    assert not scene.look()
    assert scene.reconciler.problem == leftovers.problem
    assert not scene.plugin.queue.synced
    assert scene.ledger.unreconciled


def test_of_each_kubelet_instance_the_record_is_read_once_before_any_work(
    scene: RecordScene,
) -> None:
    scene.write({})
    scene.plugin.call(scene.reconciler.kubelet_seen)
    assert not scene.plugin.queue.synced
    assert scene.look()
    assert scene.plugin.queue.synced
    assert scene.look()
    assert scene.logged.count("kubelet's record of claims read") == 1


def test_a_record_of_a_card_that_is_not_there_yet_is_kept_for_it(scene: RecordScene) -> None:
    one = scene.regions[0]
    board = scene.rack.boards[card_of(one)]
    scene.forgotten()
    board.present = False
    scene.restart()
    scene.pod("pod-1")
    scene.write({A: (name(one),)})
    scene.look()
    assert not scene.ledger.claim_owners
    board.present = True
    scene.plugin.begin(scene.plugin.hardware.scan())
    scene.plugin.work()
    assert scene.reconciler._wake.is_set(), "the record is looked at again"
    scene.look()
    assert A in scene.ledger.claim_owners


def test_what_cannot_be_adopted_keeps_all_its_cards_back(scene: RecordScene) -> None:
    one, _, other = scene.regions
    scene.forgotten()
    scene.restart()
    scene.pod("pod-1")
    scene.write({A: (name(one), name(other), "no-device-of-ours")})
    scene.look()
    assert scene.ledger.unreconciled == {card_of(one), card_of(other)}


def test_the_end_of_a_claim_that_could_not_be_adopted_is_answered_when_its_regions_are_clean(
    scene: RecordScene,
) -> None:
    """Invariant 4, and what Unprepare promises. The campaign found it (seed 102, portion 23): in a
    journal that was set back an older claim still had one of the regions."""
    one, two, _ = scene.regions
    scene.forgotten()
    scene.restart()
    scene.pod("pod-1")
    scene.write({B: (name(one),), A: (name(card_of(one)),)})
    assert scene.look()
    assert {*scene.ledger.claim_owners} == {B}
    assert "claim not adopted" in scene.logged
    scene.reconciler._wake.clear()
    task = scene.unprepare(A)
    scene.plugin.work()
    assert not task.done(), "its other region is not clean"
    assert scene.ledger.record(two).condition is Condition.DIRTY
    assert scene.reconciler._wake.is_set(), "kubelet's record is looked at again"
    assert scene.look()
    scene.plugin.work()
    assert scene.ledger.record(two).condition is Condition.DIRTY, "pod-1 may run with it"
    scene.pods.clear()
    scene.pass_time(task.done)
    assert task.result() is None
    assert scene.ledger.record(two).condition is Condition.BLANK
    assert not [what for what in scene.rack.done if one in what], "the older claim has it"
    assert {*scene.ledger.claim_owners} == {B}
    scene.write({B: (name(one),)})
    assert scene.look()
    assert not scene.ends.over | scene.ends.recorded.keys() - {B}, "kubelet has written it down"


def test_no_end_is_answered_before_it_is_known_whether_the_journal_lost_the_claim(
    scene: RecordScene,
) -> None:
    one = scene.regions[0]
    scene.forgotten()
    scene.restart()
    scene.write({A: (name(one),)})
    task = scene.unprepare(A)
    scene.plugin.work()
    with pytest.raises(NotFinishedError, match="record of claims was not read yet"):
        task.result()
    assert scene.look()
    scene.plugin.work()
    scene.pod("pod-1", running=False)
    task = scene.unprepare(A)
    scene.plugin.work()
    assert task.result() is None
    assert scene.ledger.record(one).condition is Condition.BLANK


def test_the_end_of_a_claim_that_the_journal_has_begins_before_kubelets_record_is_read(
    scene: RecordScene,
) -> None:
    """A damaged journal that lost another row of the card: this one's end is no question."""
    one = scene.regions[0]
    scene.allocated(A, one)
    scene.prepared()
    doubt_owners(scene.journal)
    scene.restart()
    assert card_of(one) in scene.ledger.unreconciled
    task = scene.unprepare(A)
    scene.plugin.work()
    assert scene.ledger.claim_owners[A].ended, "a plugin that dies here knows it at its next start"
    assert scene.file(A) == ""
    assert not task.done()
    scene.write({})
    assert scene.look()
    scene.plugin.work()
    assert task.result() is None
    assert scene.ledger.record(one).condition is Condition.BLANK


def test_the_end_of_a_claim_that_nobody_knows_is_answered_once_the_record_was_read(
    scene: RecordScene,
) -> None:
    """Kubelet calls once more for what has ended long ago, and deletes no pod before that."""
    doubt_owners(scene.journal)
    scene.restart()
    assert scene.ledger.cards
    task = scene.unprepare(B)
    scene.plugin.work()
    assert isinstance(task.exception(), NotFinishedError), (
        "the journal may be one that was put back"
    )
    scene.write({})
    assert scene.look()
    task = scene.unprepare(B)
    scene.plugin.work()
    assert task.result() is None


def test_a_claim_that_has_ended_is_not_begun_anew_where_the_journal_lost_rows(
    scene: RecordScene,
) -> None:
    """Invariant 1: kubelet writes the end down after its answer, and nobody ends it twice."""
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    scene.pod("pod-1")
    scene.unprepare()
    scene.plugin.work()
    assert scene.ledger.claim_owners[A].ended
    scene.restart()
    scene.write({A: (name(region),)})
    assert scene.look()
    assert scene.ledger.claim_owners[A].ended
    assert not scene.ledger.allocations


def test_a_card_of_which_nobody_knew_who_has_it_is_scrubbed_once_that_is_known(
    scene: RecordScene,
) -> None:
    """It came long after the start: no other word makes the queue look at it."""
    one, _, other = scene.regions
    board = scene.rack.boards[card_of(other)]
    scene.forgotten()
    board.present = False
    scene.restart()
    scene.write({})
    assert scene.look()
    scene.plugin.work()
    assert scene.ledger.record(one).condition is Condition.BLANK
    board.present = True
    scene.plugin.begin(scene.plugin.hardware.scan())
    scene.plugin.work()
    assert scene.ledger.unreconciled == {card_of(other)}
    assert scene.ledger.record(other).condition is Condition.DIRTY
    assert scene.look()
    scene.plugin.work()
    assert scene.ledger.record(other).condition is Condition.BLANK


def test_at_the_start_the_files_of_claims_in_force_stay_whatever_kubelet_knows(
    scene: RecordScene,
) -> None:
    """Their containers start again without a call; those of claims that ended do not."""
    scene.allocated(A, scene.regions[0])
    scene.allocated(B, scene.regions[2])
    scene.prepared(A)
    scene.prepared(B)
    (ended,) = (scene.folder / "cdi").glob(f"*{B}.json")
    text = ended.read_text()
    scene.pod("pod-1")
    scene.plugin.begin(scene.ends.end(B))
    scene.plugin.work()
    ended.write_text(text)
    scene.write({})
    scene.restart()
    assert scene.look()
    assert scene.file(A)
    assert scene.file(B) == ""


def test_a_claim_of_which_a_damaged_journal_lost_nothing_stays_prepared(
    scene: RecordScene,
) -> None:
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    scene.write({A: (name(scene.regions[0]),)})
    scene.restart()
    assert scene.look()
    assert scene.ledger.dra.is_prepared(scene.ledger.claim_owners[A])
    assert not scene.ledger.unreconciled


def test_of_a_claim_that_the_journal_has_the_journal_tells_what_it_is(scene: RecordScene) -> None:
    """Kubelet's record may be that of another allocation of it."""
    one, two = scene.regions[:2]
    scene.allocated(A, one, two)
    scene.prepared()
    del scene.journal.snapshot.allocations[DeviceId(one)]
    scene.write({A: (name(one),)})
    scene.restart()
    assert scene.look()
    assert scene.ledger.claim_owners[A].devices == (one, two)
    assert set(scene.ledger.allocations) == {one, two}


def test_what_two_claims_have_is_not_worked_on_until_one_of_them_is_over(
    scene: RecordScene,
) -> None:
    """The journal was put back, and the life that doubted it died: this one believes it."""
    region, unknown = scene.regions[0], Change(facts={Fact.RESOURCE_CLAIMS: "in doubt"})
    scene.allocated(A, region, pods=("pod-1",))
    scene.prepared()
    scene.pod("pod-b")
    scene.write({B: (name(region),)}, "pod-b")
    assert not scene.ledger.unreconciled
    scene.ledger.commit(unknown)
    scene.rack.done.clear()
    scene.look()
    assert scene.ledger.unreconciled == {card_of(region)}
    assert scene.ledger.resource_claims_unknown, "the next life may not see kubelet's record"
    del scene.server.claims[A]
    scene.plugin.call(lambda: scene.ledger.dra.end_claim(A))
    scene.plugin.work()
    assert scene.rack.done == [], "pod-b may run on it"
    scene.look()
    assert scene.ledger.pods_of([DeviceId(region)]) == {"pod-b"}
    assert not scene.ledger.unreconciled
    assert not scene.ledger.resource_claims_unknown
    scene.plugin.work()
    assert scene.rack.done == []


# ------------------------------------------------------------------ claims that kubelet lost


@pytest.fixture
def lost(scene: RecordScene) -> RecordScene:
    """A claim that is prepared, and an empty record."""
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    scene.write({})
    return scene


def over(scene: RecordScene) -> bool:
    return A not in scene.ledger.claim_owners or scene.ledger.claim_owners[A].ended


def test_a_claim_that_kubelet_lost_ends_once_it_is_over_and_its_pods_are_gone(
    lost: RecordScene,
) -> None:
    pod = lost.pod("pod-1")
    del lost.server.claims[A]
    for _ in range(2):
        lost.look()
        assert not over(lost), "its pod runs (invariant 7)"
    assert lost.logged.count("kubelet's record lacks a claim") == 1
    assert lost.file(A)
    pod.running = False
    lost.look()
    assert over(lost)
    assert lost.file(A) == ""
    assert "claim ended without a call" in lost.logged
    lost.plugin.work()
    assert lost.ledger.record(lost.regions[0]).condition is Condition.BLANK
    lost.look()
    assert not lost.ledger.claim_owners, "nobody asks for its end: it is forgotten"


@pytest.mark.parametrize("answer", ["reserved", "for something else", "away"])
def test_a_claim_that_may_be_in_use_is_kept(lost: RecordScene, answer: str) -> None:
    if answer == "reserved":
        lost.allocated(A, lost.regions[0], pods=("pod-5",))
    elif answer == "for something else":
        claim = lost.allocated(A, lost.regions[0], pods=())
        lost.server.claims[A] = replace(claim, others=True)
    else:
        lost.server.failing = [NoSourceError("it is away")]
    lost.look()
    assert not over(lost)
    if answer == "reserved":
        assert "pod-5" in lost.ledger.pods_of(lost.ledger.claim_owners[A].devices), (
            "it is waited for at the end"
        )


def users(scene: RecordScene) -> set[str]:
    return {one.pod for one in scene.ledger.dra.tenancies_of_claim(A)}


def test_of_a_claim_that_kubelet_lost_pods_go_that_nobody_names_any_more(
    lost: RecordScene,
) -> None:
    """Else what is kept of it grows with each pod that the API server names for a while."""
    ghost = lost.pod("pod-1")
    for number in (2, 3):
        lost.allocated(A, lost.regions[0], pods=(f"pod-{number}",))
        lost.look()
        assert users(lost) == {"pod-1", f"pod-{number}"}, "pod-1 runs"
    ghost.running = False
    lost.look()
    assert users(lost) == {"pod-3"}
    assert not over(lost)


@pytest.mark.parametrize("why", ["a group", "a call"])
def test_of_a_claim_that_kubelet_lost_no_pod_goes_that_may_have_come_since(
    lost: RecordScene, why: str
) -> None:
    claim = lost.allocated(A, lost.regions[0], pods=("pod-2",))
    if why == "a group":
        lost.server.claims[A] = replace(claim, others=True)
        lost.look()
    else:
        look = lost.plugin.begin(lost.reconciler.reconcile())
        lost.reconciler._ends.calls[A] += 1
        lost.plugin.work()
        assert look.result()
    assert users(lost) == {"pod-1", "pod-2"}


@pytest.mark.parametrize("answer", ["elsewhere", "for nobody"])
def test_a_claim_that_is_nobodys_here_ends(lost: RecordScene, answer: str) -> None:
    if answer == "elsewhere":
        lost.server.failing = [NoSuchClaimError("in another pool")]
    else:
        lost.allocated(A, lost.regions[0], pods=())
    lost.look()
    assert over(lost)


@pytest.mark.parametrize("seen", ["in its record", "by its call"])
def test_a_claim_that_kubelet_begins_to_prepare_meanwhile_is_kept(
    lost: RecordScene, seen: str
) -> None:
    """It writes its record before it calls; the record may have been read before that."""
    del lost.server.claims[A]
    task = lost.plugin.begin(lost.reconciler.reconcile())
    lost.until(lambda: lost.server.asked.count(A) > 1)
    if seen == "in its record":
        lost.write({A: (name(lost.regions[0]),)})
    else:
        lost.reconciler._ends.calls[A] += 1
    lost.plugin.work()
    assert task.result()
    assert not over(lost)
    assert lost.file(A)


def test_a_claim_that_is_prepared_while_the_record_is_read_is_not_a_lost_one(
    scene: RecordScene,
) -> None:
    scene.write({})
    task = scene.plugin.begin(scene.reconciler.reconcile())
    read = scene.plugin.jobs.pop()
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    del scene.server.claims[A]
    read.run()
    scene.plugin.loop.settle()
    scene.plugin.work()
    assert task.result()
    assert not over(scene)
    assert "kubelet's record lacks a claim" not in scene.logged


def test_a_claim_that_kubelet_knows_again_is_no_lost_one(lost: RecordScene) -> None:
    lost.server.failing = [NoSourceError("it is away")]
    lost.look()
    assert lost.reconciler._lost == {A}
    lost.write({A: (name(lost.regions[0]),)})
    lost.look()
    assert lost.reconciler._lost == set()
    assert not over(lost)


def test_a_claim_that_is_forgotten_while_another_lost_one_is_asked_after_ends_no_look(
    lost: RecordScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet ends them meanwhile, before the other one's turn."""
    lost.allocated(B, lost.regions[2], pods=())
    lost.prepared(B)
    lost.server.asked.clear()
    read = lost.server._read

    def meanwhile(asked: Any) -> object:
        for uid in (A, B):
            lost.plugin.call(functools.partial(lost.ledger.dra.end_claim, uid))
            lost.plugin.call(functools.partial(lost.ledger.dra.forget_claim, uid))
        return read(asked)

    monkeypatch.setattr(lost.server, "_read", meanwhile)
    task = lost.plugin.begin(lost.reconciler.reconcile())
    lost.plugin.work()
    assert task.result()
    assert lost.server.asked == [A]
    assert not lost.ledger.claim_owners


def test_nobody_gets_what_a_lost_claim_has_before_its_file_is_removed(
    lost: RecordScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a container would start with what is another's by then."""
    del lost.server.claims[A]
    remove = lost.files.cdi.remove
    failing = [CdiError("read-only file system")]

    def removed(path: str, uid: ClaimUid) -> None:
        if failing:
            raise failing.pop()
        remove(path, uid)

    monkeypatch.setattr(lost.files.cdi, "remove", removed)
    lost.look()
    assert not over(lost)
    assert lost.file(A)
    assert "claim cannot be ended" in lost.logged
    lost.look()
    assert over(lost)
    assert lost.file(A) == ""


def test_what_an_ended_claim_had_is_scrubbed_before_it_is_forgotten(scene: RecordScene) -> None:
    """A Prepare of the same claim would begin on it as on a new one."""
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    pod = scene.pod("pod-1")
    scene.unprepare()
    scene.write({})
    scene.plugin.work()
    scene.look()
    assert scene.ledger.claim_owners[A].ended
    assert scene.reconciler._waits
    assert "kubelet's record lacks a claim" not in scene.logged, "it was not lost: it ended"
    pod.running = False
    scene.pass_time(lambda: scene.ledger.record(scene.regions[0]).condition is Condition.BLANK)
    scene.look()
    assert not scene.ledger.claim_owners
    assert not scene.reconciler._waits


def test_who_waits_for_a_claims_end_has_the_record_looked_at(scene: RecordScene) -> None:
    scene.reconciler._wake.clear()
    scene.ends.doubted(A)
    assert scene.reconciler._wake.is_set()
    scene.reconciler._wake.clear()
    scene.reconciler.kubelet_seen()
    assert scene.reconciler._wake.is_set()


def test_a_journal_that_cannot_be_written_forgets_nothing_and_ends_no_look(
    scene: RecordScene,
) -> None:
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    scene.plugin.begin(scene.ends.end(A))
    scene.plugin.work()
    scene.write({})
    scene.journal.failing = 1
    assert scene.look()
    assert "claim cannot be ended" in scene.logged
    assert scene.ledger.claim_owners[A].ended
    scene.look()
    assert not scene.ledger.claim_owners


def test_once_the_record_was_read_it_is_known_who_has_what_dra_gave(scene: RecordScene) -> None:
    scene.ledger.resource_claims_unknown = "the journal is in doubt"
    scene.write({})
    assert scene.look()
    assert not scene.ledger.resource_claims_unknown


def test_a_claim_that_cannot_be_adopted_leaves_the_question_to_the_next_life(
    scene: RecordScene,
) -> None:
    """It may serve the device plugin API, and not see the record. While DRA serves the claim's card
    alone stays back, and the reason is the record, not that DRA is away."""
    scene.forgotten()
    scene.restart()
    scene.ledger.resource_claims_unknown = "DRA served this node"
    scene.pod("pod-1")
    one = scene.regions[0]
    scene.write({A: (f"{name(card_of(one))}-px",)})
    assert scene.look()
    assert scene.ledger.unreconciled == {card_of(one)}
    assert scene.ledger.resource_claims_unknown
    (obstacle,) = [
        each
        for each in scene.ledger.obstacles.of(DeviceId(one))
        if each.kind is ObstacleKind.UNRECONCILED
    ]
    assert obstacle.message.endswith(NOT_READ)


def test_a_claim_that_cannot_be_journalled_is_adopted_at_the_next_look(
    scene: RecordScene,
) -> None:
    """Invariant 9: until then nobody else gets its card."""
    one = scene.regions[0]
    scene.forgotten()
    scene.restart()
    scene.pod("pod-1")
    scene.write({A: (name(one),)})
    scene.journal.failing = 1
    assert not scene.look()
    assert "claim adopted" not in scene.logged
    assert card_of(one) in scene.ledger.unreconciled
    assert scene.look()
    assert A in scene.ledger.claim_owners
    assert not scene.ledger.unreconciled
