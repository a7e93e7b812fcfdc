"""A ResourceClaim's Prepare and Unprepare, and what happens to it between any two of their steps.

The orders of the checked model are in test_lifecycle_model.py, the driver as kubelet sees it in
tests/integration/test_dra.py.
"""

import asyncio
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from doubles.cards import AFU, BLANK, INTERFACE, OTHER_INTERFACE, PREFIX, REGIONS, TOO_HOT
from ledger_scene import RememberedImages, Scene, scenes
from ledger_support import MemoryJournal, tenancy, trouble
from ledger_world import Plugin, Pod, Rack, make_boards
from test_prepare import poison

from fpga_plugin.allocation.journal.records import ClaimOwner, Condition
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.obstacles import Stops
from fpga_plugin.allocation.permission import Permission
from fpga_plugin.cards.operations import TenancyActiveError
from fpga_plugin.cards.prepare import Plan
from fpga_plugin.dra.claim import ClaimRef, Config, NoSuchClaimError, ResourceClaim
from fpga_plugin.dra.lifecycle import ANSWER_SECONDS
from fpga_plugin.dra.regionconfig import RegionConfig
from fpga_plugin.errors import (
    FpgaPluginError,
    HardwareError,
    NoSourceError,
    NotFinishedError,
    NotPermittedError,
    RefusedError,
    StoreUnavailableError,
    UnknownDeviceError,
)
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import AfuId, BitstreamId, CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import ClaimUid, PodName, PodUid
from fpga_plugin.settings.settings import RecoveryPolicy, ScrubPolicy, ServedApi
from fpga_plugin.settings.values import CdiDevices

A = ClaimUid("00000000-0000-4000-8000-00000000000a")
B = ClaimUid("00000000-0000-4000-8000-00000000000b")
OTHER = AfuId("a" * 32)
BEGIN = 1000.0
"""Of the clock."""


def ref(uid: ClaimUid) -> ClaimRef:
    return ClaimRef(uid, "space", f"claim-{uid[-1]}")


class Server:
    """The API server, as far as claims are read there.

    Attributes:
        claims: as they are now.
        failing: what the next reads end with.
        asked: whose were read.
    """

    def __init__(self) -> None:
        self.claims: dict[ClaimUid, ResourceClaim] = {}
        self.failing: list[FpgaPluginError] = []
        self.asked: list[ClaimUid] = []

    async def get(self, asked: ClaimRef, driver: str = "") -> ResourceClaim:
        return await asyncio.to_thread(functools.partial(self._read, asked))

    def _read(self, asked: ClaimRef) -> ResourceClaim:
        self.asked.append(asked.uid)
        if self.failing:
            raise self.failing.pop(0)
        if (claim := self.claims.get(asked.uid)) is None:
            raise NoSuchClaimError(f"{asked} is not there any more")
        return claim


class Anything:
    """A policy that notes what it is asked, and allows it."""

    policy = None

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    async def check(self, *of: object) -> None:
        self.asked.append(of)


class ClaimScene(Scene):
    """As `Scene`, with the DRA driver."""

    def __init__(
        self,
        folder: Path,
        *,
        cards: tuple[int, ...] = (2, 1),
        memory: bool = False,
        recovery: RecoveryPolicy = RecoveryPolicy.NONE,
        cdi_devices: CdiDevices | None = None,
    ) -> None:
        self.folder, self.recovery, self.cdi_devices = folder, recovery, cdi_devices
        self.pods: list[Pod] = []
        self.touched: list[RegionId] = []
        self.on_touch: Callable[[], object] = lambda: None
        self.images = RememberedImages()
        self.logged: list[str] = []
        self.server, self.policy = Server(), Anything()
        boards = make_boards([(n, memory and not number) for number, n in enumerate(cards)])
        self.rack = Rack(boards, self._touch)
        self.journal = MemoryJournal()
        self.live()

    def live(self) -> None:
        """A run of the plugin's process."""
        self.plugin = Plugin(
            self.rack,
            self.pods,
            self.images,
            self.journal,
            scrub=ScrubPolicy.REQUIRED,
            recovery=self.recovery,
            api={
                "mode": ServedApi.DRA,
                "node_name": "node-a",
                "cdi_dir": str(self.folder / "cdi"),
                "kubelet_root": str(self.folder),
                "cdi_devices": self.cdi_devices,
            },
        )
        self.plugin.loop._now = BEGIN
        self.ledger, self.operations = self.plugin.ledger, self.plugin.operations
        api = self.plugin.dra
        assert api is not None
        self.lifecycle, self.reconciler, self.files = api.lifecycle, api.reconciler, api._files
        self.ends = api.lifecycle._ends
        server: Any = self.server
        permission: Any = self.policy
        assert isinstance(self.lifecycle._permission, Permission), "the operator's policy is asked"
        self.lifecycle._claims = self.reconciler._claims = server
        self.lifecycle._permission = permission

    def live_again(self) -> None:
        """Another run of the plugin, before it has found kubelet."""
        self.plugin.end()
        self.live()
        self.plugin.begin(self.plugin.hardware.scan())
        self.plugin.work()

    def restart(self) -> None:
        """Another run of the plugin, as far as kubelet's record is not asked for."""
        self.live_again()
        self.plugin.kubelet_begins("life 1")
        self.plugin.kubelet_answers()
        self.plugin.work()

    # what others do

    def pod(self, uid: str, *, running: bool = True) -> Pod:
        pod = Pod(PodUid(uid), None, (), {}, running=running)  # type: ignore[arg-type]
        self.pods.append(pod)
        return pod

    def allocated(
        self,
        uid: ClaimUid,
        *devices: RegionId | CardId,
        wants: AfuId | None = AFU,
        pods: tuple[str, ...] = ("pod-1",),
        request: str = "fpga",
    ) -> ResourceClaim:
        """The scheduler gives a claim devices."""
        config = (
            ()
            if wants is None
            else (Config(False, frozenset(), RegionConfig(bitstream=BitstreamId(wants))),)
        )
        claim = self.server.claims[uid] = ResourceClaim(
            ClaimOwner(
                uid,
                "space",
                ref(uid).name,
                tuple(map(DeviceId, devices)),
                dict.fromkeys(map(DeviceId, devices), (request,)),
                PREFIX,
            ),
            config,
            frozenset(map(PodUid, pods)),
        )
        return claim

    # kubelet's calls

    def prepare(self, uid: ClaimUid = A) -> "asyncio.Task[Any]":
        return self.plugin.begin(self.lifecycle.prepare(ref(uid)))

    def prepared(self, uid: ClaimUid = A) -> Any:
        """A Prepare that succeeds."""
        task = self.prepare(uid)
        self.plugin.work()
        return task.result()

    def unprepare(self, uid: ClaimUid = A) -> "asyncio.Task[Any]":
        return self.plugin.begin(self.lifecycle.unprepare(ref(uid)))

    # what the reconciler reads in kubelet's record

    def recorded(self, uid: ClaimUid, *pods: str) -> None:
        """It names these pods of a claim, and no others."""
        self.plugin.call(lambda: self.ledger.dra.part(uid, frozenset(map(PodUid, pods))))

    def unrecorded(self, uid: ClaimUid = A) -> None:
        """It lacks a claim that has ended."""
        assert self.ledger.claim_owners[uid].ended, "else it would be taken for one that was lost"
        self.plugin.begin(self.ends.forget(uid))
        self.plugin.work()

    # what is to be seen

    def file(self, uid: ClaimUid = A) -> str:
        """What the container runtime reads; empty: there is none."""
        found = [*(self.folder / "cdi").glob(f"*{uid}.json")]
        return found[0].read_text() if found else ""

    def afu(self, region: RegionId) -> AfuId | None:
        return self.rack.slot(region).afu

    def pass_time(self, until: Callable[[], bool]) -> None:
        """Let timers end, and the threads that they begin."""
        for _ in range(200):
            self.plugin.work()
            if until():
                return
            self.plugin.loop.pass_time()
        raise AssertionError("it does not happen")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ClaimScene]]:
    with scenes(functools.partial(ClaimScene, tmp_path)) as make:  # type: ignore[arg-type]
        yield make  # type: ignore[misc]


@pytest.fixture
def scene(make: Callable[..., ClaimScene]) -> ClaimScene:
    return make()


# ------------------------------------------------------------------ prepare


def test_a_claim_is_programmed_and_verified_before_kubelet_is_answered(scene: ClaimScene) -> None:
    region = scene.regions[0]
    scene.allocated(A, region)
    (answer,) = scene.prepared()
    assert answer.requests == ("fpga",)
    assert answer.device == region
    assert scene.afu(region) == AFU
    assert scene.ledger.dra.is_prepared(scene.ledger.claim_owners[A])
    assert scene.ledger.record(region).condition is Condition.PROGRAMMED
    assert answer.cdi_ids[0].rpartition("=")[2] in scene.file()
    assert "claim prepared" in scene.logged
    assert scene.lifecycle.read[A] == scene.server.claims[A], "to say whose a later refusal is"


def test_prepare_adds_the_cdi_devices_that_the_operator_set(
    make: Callable[..., ClaimScene],
) -> None:
    board = "vendor.com/opencl=board"
    scene = make(cdi_devices=CdiDevices(((REGIONS, board),)))
    scene.allocated(A, scene.regions[0])
    (answer,) = scene.prepared()
    assert answer.cdi_ids[1:] == (board,)


def test_what_was_prepared_is_answered_again_and_the_hardware_left_alone(scene: ClaimScene) -> None:
    """Kubelet asks for every pod that uses a claim; a pod may run with it by then."""
    scene.allocated(A, scene.regions[0])
    first = scene.prepared()
    scene.pod("pod-1")
    scene.rack.done.clear()
    scene.touched.clear()
    scene.allocated(A, scene.regions[0], pods=("pod-1", "pod-2"))
    assert scene.prepared() == first
    assert (scene.rack.done, scene.touched) == ([], [])
    assert scene.ledger.pods_of(scene.ledger.claim_owners[A].devices) == {"pod-1", "pod-2"}, (
        "both are waited for at its end"
    )


@pytest.mark.parametrize("words", ["failing", "faulted"])
def test_a_region_in_trouble_is_not_answered_as_prepared(scene: ClaimScene, words: str) -> None:
    """Invariant 4: it was prepared well, and has failed since."""
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    card = card_of(region)
    if words == "failing":
        scene.plugin.call(lambda: scene.ledger.hardware.set_failing(card, {region: TOO_HOT}))
    else:
        scene.plugin.call(lambda: scene.ledger.work.faulted(region, "it does not answer"))
    task = scene.prepare()
    scene.pass_time(task.done)
    with pytest.raises(FpgaPluginError):
        task.result()


def test_what_a_tenants_image_may_have_caused_has_nothing_prepared_again_under_a_pod(
    scene: ClaimScene,
) -> None:
    """A further pod of the claim finds what the first one has, and the claim's end mends it."""
    region = scene.regions[0]
    scene.allocated(A, region)
    first = scene.prepared()
    scene.rack.slot(region).silent = "hung"
    scene.plugin.begin(scene.plugin.hardware.check(card_of(region)))
    scene.plugin.work()
    assert trouble(scene.ledger, region)
    scene.rack.done.clear()
    assert scene.prepared() == first
    assert not scene.rack.done
    task = scene.unprepare()
    scene.until(lambda: scene.ledger.claim_owners[A].ended)
    assert [one for one in scene.ends.regions(A) if scene.ends.to_scrub(one)] == [region], (
        "it is worth a scrub"
    )
    scene.plugin.work()
    task.result()
    assert scene.afu(region) == BLANK
    assert not scene.rack.slot(region).silent


def test_an_image_that_reads_as_another_one_is_not_prepared(scene: ClaimScene) -> None:
    """Invariant 2: the kernel reports success on a poisoned port."""
    scene.images.mislabelled = OTHER
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    scene.plugin.work()
    assert task.exception() is not None
    assert not scene.ledger.dra.is_prepared(scene.ledger.claim_owners[A])
    assert scene.file() == ""


def test_what_changes_under_the_last_look_is_not_prepared(scene: ClaimScene) -> None:
    """Another image, after the work and before kubelet hears of it."""
    region = scene.regions[0]
    scene.allocated(A, region)
    task = scene.prepare()
    scene.until(lambda: scene.afu(region) == AFU)
    scene.rack.slot(region).afu = OTHER
    scene.plugin.work()
    assert not task.done()
    assert not scene.ledger.dra.is_prepared(scene.ledger.claim_owners[A])
    assert scene.file() == ""
    scene.pass_time(task.done)
    assert task.result()
    assert scene.afu(region) == AFU, "it is programmed again"


def test_nothing_is_given_out_before_kubelets_record_was_read(scene: ClaimScene) -> None:
    """A claim that the journal lost may have the device (invariant 1)."""
    scene.plugin.queue.unsync()
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    scene.plugin.work()
    assert not task.done()
    assert not scene.ledger.allocations
    scene.plugin.call(scene.plugin.queue.sync)
    scene.pass_time(task.done)
    assert task.result()


def test_a_server_that_is_away_for_a_moment_fails_nothing(scene: ClaimScene) -> None:
    scene.server.failing = [NoSourceError("it is away"), NoSourceError("it is away")]
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    scene.pass_time(task.done)
    assert task.result()
    assert len(scene.server.asked) == 3


def test_an_error_that_does_not_pass_is_told_at_once(scene: ClaimScene) -> None:
    task = scene.prepare()
    scene.plugin.work()
    assert isinstance(task.exception(), NoSuchClaimError)
    assert scene.server.asked == [A]


def test_an_unexpected_error_is_told_as_one_and_the_next_call_works(scene: ClaimScene) -> None:
    scene.allocated(A, scene.regions[0])
    scene.server.failing = [ZeroDivisionError("a bug")]  # type: ignore[list-item]
    task = scene.prepare()
    scene.plugin.work()
    error = task.exception()
    assert isinstance(error, FpgaPluginError)
    assert "unexpected" in str(error)
    assert "preparation failed" in scene.logged
    assert scene.prepared()


def test_work_that_takes_too_long_goes_on_and_the_next_call_has_its_result(
    scene: ClaimScene,
) -> None:
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    assert scene.plugin.jobs, "the claim is being read"
    scene.plugin.loop.pass_time()
    scene.plugin.loop.settle()
    assert scene.plugin.loop.time() == BEGIN + ANSWER_SECONDS
    with pytest.raises(NotFinishedError, match="not finished after 40 s"):
        task.result()
    again = scene.prepare()
    scene.plugin.work()
    assert again.result()
    assert [what[0] for what in scene.rack.done].count("program") == 1


def test_what_has_to_pass_is_waited_for_no_longer_than_kubelet_waits(scene: ClaimScene) -> None:
    """A pod of a claim that ended runs on: its memory is not wiped under it (invariant 7)."""
    region = scene.regions[0]
    scene.allocated(B, region, pods=("pod-b",))
    scene.prepared(B)
    former = scene.pod("pod-b")
    scene.unprepare(B)
    scene.allocated(A, region)
    scene.rack.done.clear()
    task = scene.prepare()
    scene.pass_time(task.done)
    assert scene.plugin.loop.time() <= BEGIN + ANSWER_SECONDS
    with pytest.raises(FpgaPluginError, match="pod-b"):
        task.result()
    assert not [what for what in scene.rack.done if what[0] in {"program", "reset"}]
    former.running = False
    again = scene.prepare()
    scene.pass_time(again.done)
    assert again.result()


def stand_back(scene: ClaimScene, why: str, *, passes: bool = False) -> None:
    """Something is so of the first card that passes in seconds; or it passes."""
    ledger, card = scene.ledger, card_of(scene.regions[0])
    if why == "unreconciled":
        scene.plugin.call(lambda: (ledger.reconciled if passes else ledger.keep_back)([card]))
        return
    if why == "gone for a rebind":
        scene.rack.boards[card].present = passes
        scene.plugin.begin(scene.plugin.hardware.scan())
        scene.plugin.work()
    scene.plugin.call(lambda: ledger.hardware.set_rebinding(card, rebinding=not passes))


@pytest.mark.parametrize("why", ["rebinding", "gone for a rebind", "unreconciled"])
def test_what_keeps_a_card_back_for_seconds_is_waited_for(scene: ClaimScene, why: str) -> None:
    """A card is plugged in, or rebound, while a pod is scheduled to it."""
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.plugin.queue._worker = None  # it takes a rebind for ended that nobody does
    stand_back(scene, why)
    before = next(scene.ledger.obstacles.against(Stops.CLAIM, region)).refusal()
    task = scene.prepare()
    scene.pass_time(lambda: scene.plugin.loop.time() > BEGIN + 5)
    assert not task.done()
    assert DeviceId(region) not in scene.ledger.allocations
    stand_back(scene, why, passes=True)
    scene.pass_time(task.done)
    assert task.result()
    assert scene.afu(region) == AFU

    scene.unprepare()
    scene.plugin.work()
    stand_back(scene, why)
    begun = scene.plugin.loop.time()
    task = scene.prepare()
    scene.pass_time(task.done)
    assert ANSWER_SECONDS - 5 < scene.plugin.loop.time() - begun <= ANSWER_SECONDS
    error = task.exception()
    assert isinstance(error, RefusedError)
    assert (error.status, str(error)) == (RefusedError.status, str(before))


def test_a_card_that_is_gone_is_not_waited_for(scene: ClaimScene) -> None:
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.rack.boards[card_of(region)].present = False
    scene.plugin.begin(scene.plugin.hardware.scan())
    scene.plugin.work()
    task = scene.prepare()
    scene.plugin.work()
    assert isinstance(task.exception(), RefusedError)
    assert scene.plugin.loop.time() == BEGIN


@pytest.mark.parametrize("what", ["load", "blank"])
def test_a_store_that_answers_again_is_waited_for(scene: ClaimScene, what: str) -> None:
    """Kubelet asks again only after a minute or more."""
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.plugin.queue.unsync()
    scene.plugin.call(lambda: scene.ledger.work.dirty([region], "a pod may have used it"))
    scene.plugin.queue.synced = True
    reads = getattr(scene.images, what)

    async def read(*of: Any) -> Any:
        if scene.plugin.loop.time() == BEGIN:
            raise StoreUnavailableError("it hangs")
        return await reads(*of)

    with mock.patch.object(scene.images, what, read):
        task = scene.prepare()
        scene.pass_time(task.done)
    assert task.result()
    assert BEGIN < scene.plugin.loop.time() < BEGIN + 1
    assert scene.afu(region) == AFU


@pytest.mark.parametrize("tries", [1, 2])
def test_a_store_that_does_not_answer_is_named_when_the_time_is_up(
    scene: ClaimScene, tries: int
) -> None:
    """The last try may be under way then."""
    scene.allocated(A, scene.regions[0])
    begun = []

    async def read(*_of: Any) -> Any:
        begun.append(scene.plugin.loop.time())
        await asyncio.sleep(ANSWER_SECONDS * 0.6)
        raise StoreUnavailableError("/srv/x.gbs: not read")

    with mock.patch.object(scene.images, "load", read):
        if tries == 1:
            scene.lifecycle.seconds = ANSWER_SECONDS / 2
        task = scene.prepare()
        scene.pass_time(task.done)
    assert len(begun) == tries
    error = task.exception()
    assert isinstance(error, NotFinishedError)
    assert ("/srv/x.gbs: not read" in error.message) is (tries == 2)


def test_a_claim_that_keeps_another_waiting_is_doubted_and_its_end_is_noticed(
    scene: ClaimScene,
) -> None:
    """Invariant 1. Kubelet may have forgotten the one that has the device."""
    region = scene.regions[0]
    scene.allocated(B, region)
    scene.prepared(B)
    doubted: list[ClaimUid] = []
    scene.ends.doubted = doubted.append
    scene.allocated(A, region)
    task = scene.prepare()
    scene.plugin.work()
    assert not task.done()
    assert doubted == [B]
    assert scene.ledger.claim_owner_of(DeviceId(region)).uid == B  # type: ignore[union-attr]
    ended = scene.unprepare(B)
    scene.pass_time(task.done)
    assert task.result()
    ended.result()
    assert scene.afu(region) == AFU
    assert scene.server.asked.count(A) == 1, "the API server is not asked at each try"


@pytest.mark.parametrize("instant", range(12))
def test_a_claim_that_ends_while_it_is_prepared_gets_nothing(
    make: Callable[..., ClaimScene], instant: int
) -> None:
    """Kubelet gave up, and unprepares: at any instant, no file is left and no device taken."""
    scene = make(cards=[1])
    (region,) = scene.regions
    scene.allocated(A, region)
    task = scene.prepare()
    for _ in range(instant):
        scene.plugin.job(0)
    ended = scene.unprepare()
    scene.until(lambda: all(one.ended for one in scene.ledger.claim_owners.values()))
    was_done = task.done()
    scene.plugin.work()
    scene.pass_time(lambda: ended.done() and task.done())
    ended.result()
    assert was_done or isinstance(task.exception(), RefusedError | NotFinishedError)
    assert scene.file() == ""
    assert not scene.ledger.allocations
    assert all(one.ended for one in scene.ledger.claim_owners.values())
    assert A not in scene.lifecycle.read
    assert scene.afu(region) == BLANK
    assert scene.ledger.record(region).condition is Condition.BLANK


@pytest.mark.parametrize("gone", [True, False])
def test_a_file_that_is_written_when_nobody_waits_any_more_does_not_outlive_its_claim(
    scene: ClaimScene, *, gone: bool
) -> None:
    """A file without a claim would let a container start with what is another's by then."""
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    scene.until(
        lambda: (
            scene.ledger.claim_owners.get(A) is not None
            and scene.ledger.dra.is_prepared(scene.ledger.claim_owners[A])
        )
    )
    write = scene.plugin.jobs[-1]
    if gone:
        task.cancel()  # kubelet's call is over
        scene.plugin.loop.settle()
    ended = scene.unprepare()
    scene.plugin.jobs.remove(write)
    scene.plugin.work()
    assert not ended.done(), "it waits for the file, which it then removes"
    write.run()
    scene.plugin.loop.settle()
    assert scene.file()
    scene.plugin.work()
    ended.result()
    assert scene.file() == ""
    assert task.cancelled() if gone else task.result()


def until_prepared(scene: ClaimScene) -> None:
    """The journal has it; its file is not written yet."""
    owners, is_prepared = scene.ledger.claim_owners, scene.ledger.dra.is_prepared
    scene.until(lambda: A in owners and is_prepared(owners[A]))


def test_a_claim_that_ends_while_its_file_is_written_has_none_afterwards(
    scene: ClaimScene,
) -> None:
    """Also while its pod still runs, and so its end is not over."""
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    until_prepared(scene)
    scene.pod("pod-1")
    scene.plugin.begin(scene.ends.end(A))
    scene.plugin.work()
    assert task.result(), "it was prepared before"
    assert scene.ledger.claim_owners[A].ended
    assert scene.file() == ""


def test_a_claim_that_is_forgotten_while_its_file_is_written_is_told_to_have_ended(
    scene: ClaimScene,
) -> None:
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    until_prepared(scene)
    scene.plugin.call(lambda: scene.ledger.dra.end_claim(A))
    scene.plugin.call(lambda: scene.ledger.dra.forget_claim(A))
    scene.plugin.work()
    assert isinstance(task.exception(), NoSuchClaimError)
    assert scene.file() == ""


def test_a_claim_that_is_prepared_again_after_its_end_is_not_answered_by_the_work_before(
    scene: ClaimScene,
) -> None:
    scene.allocated(A, scene.regions[0])
    first = scene.prepare()
    scene.plugin.begin(scene.ends.end(A))
    second = scene.prepare()
    scene.plugin.work()
    assert isinstance(first.exception(), NoSuchClaimError)
    assert second.result()


def test_the_end_of_earlier_work_does_not_hide_the_present_one_from_a_claims_end(
    scene: ClaimScene,
) -> None:
    """Invariant 2: what is not told to end would prepare a claim that is over."""
    region = scene.regions[0]
    scene.allocated(A, region)
    first = scene.prepare()
    scene.plugin.begin(scene.ends.end(A))
    second = scene.prepare()
    scene.plugin.job(0)  # the first one has read the claim, and notices
    assert first.done()
    assert not second.done()
    scene.plugin.begin(scene.ends.end(A))
    scene.plugin.work()
    assert isinstance(second.exception(), NoSuchClaimError)
    assert not scene.ledger.allocations
    assert scene.file() == ""
    assert scene.afu(region) == BLANK


def test_work_that_fails_when_nobody_waits_any_more_leaves_no_error_behind(
    scene: ClaimScene,
) -> None:
    told: list[dict[str, Any]] = []
    scene.plugin.loop.set_exception_handler(lambda _, what: told.append(what))
    scene.prepare().cancel()
    scene.plugin.loop.settle()
    scene.plugin.work()
    gc.collect()
    scene.plugin.loop.settle()
    assert told == []


def test_one_region_in_trouble_is_enough(scene: ClaimScene) -> None:
    """Of a claim with several: what stands is not answered without what does not."""
    one, two = scene.regions[:2]
    scene.allocated(A, one, two)
    scene.prepared()
    scene.plugin.call(lambda: scene.ledger.hardware.set_failing(card_of(two), {two: TOO_HOT}))
    task = scene.prepare()
    scene.pass_time(task.done)
    with pytest.raises(FpgaPluginError):
        task.result()


def test_a_card_that_goes_while_the_file_is_written_leaves_no_file(scene: ClaimScene) -> None:
    region = scene.regions[0]
    scene.allocated(A, region)
    task = scene.prepare()
    until_prepared(scene)
    scene.rack.boards[card_of(region)].present = False
    scene.plugin.call(lambda: scene.ledger.hardware.card_gone(card_of(region)))
    scene.plugin.work()
    with pytest.raises(NotFinishedError, match="changed after it was prepared"):
        task.result()
    assert scene.file() == ""


# ------------------------------------------------------------------ allocated again


def test_a_call_that_joins_an_earlier_ones_work_looks_at_the_claim_itself(
    scene: ClaimScene,
) -> None:
    """The claim was allocated again after that work had read it."""
    one, two = scene.regions[:2]
    scene.allocated(A, one)
    first = scene.prepare()
    scene.plugin.job(0)
    scene.allocated(A, two, pods=("pod-2",))
    second = scene.prepare()
    scene.plugin.work()
    assert first.done()
    assert not second.done(), "the pod of the first call has it"
    scene.recorded(A, "pod-2")
    scene.pass_time(second.done)
    (answer,) = second.result()
    assert answer.device == two
    assert set(scene.ledger.allocations) == {DeviceId(two)}
    assert one not in scene.file()


@pytest.mark.parametrize("change", ["device", "request", "bitstream", "more", "none"])
def test_what_was_prepared_for_another_allocation_is_withdrawn_before_anything_else(
    scene: ClaimScene, change: str
) -> None:
    """Its file goes first: no container starts with it, whatever comes of the new one."""
    one, two = scene.regions[:2]
    scene.allocated(A, one)
    scene.prepared()
    scene.recorded(A)
    scene.rack.done.clear()
    match change:
        case "device":
            scene.allocated(A, two, pods=("pod-2",))
        case "request":
            scene.allocated(A, one, request="other", pods=("pod-2",))
        case "bitstream":
            scene.allocated(A, one, wants=OTHER, pods=("pod-2",))
        case "more":
            scene.allocated(A, one, two, pods=("pod-2",))
        case "none":
            scene.allocated(A, one)
    scene.images.has_blank = True
    task = scene.prepare()
    scene.plugin.job(0)  # the claim was read
    if change == "none":
        scene.plugin.work()
        assert task.result()
        assert scene.rack.done == []
        return
    scene.until(lambda: scene.file() == "")
    assert "claim withdrawn" not in scene.logged, "of whoever started with it is not known yet"
    scene.until(lambda: not scene.ledger.dra.is_prepared(scene.ledger.claim_owners[A]))
    assert "claim withdrawn" in scene.logged
    assert scene.rack.done == []
    scene.plugin.work()
    assert {answer.device for answer in task.result()} == {*scene.server.claims[A].owner.devices}
    assert scene.file()
    if change == "bitstream":
        assert scene.afu(one) == OTHER


def test_two_claims_that_swap_their_devices_do_not_wait_for_each_other(scene: ClaimScene) -> None:
    one, two = scene.regions[:2]
    scene.allocated(A, one)
    scene.allocated(B, two)
    scene.prepared(A)
    scene.prepared(B)
    scene.allocated(A, two)
    scene.allocated(B, one)
    scene.recorded(A)
    scene.recorded(B)
    tasks = [scene.prepare(A), scene.prepare(B)]
    scene.pass_time(lambda: all(task.done() for task in tasks))
    assert [task.result()[0].device for task in tasks] == [two, one]
    assert "claim left devices" in scene.logged


def test_what_a_claim_leaves_is_scrubbed_even_if_it_never_gets_its_new_devices(
    scene: ClaimScene,
) -> None:
    _, two, one = scene.regions
    scene.allocated(B, two)
    scene.prepared(B)
    scene.allocated(A, one)
    scene.prepared(A)
    scene.recorded(A)
    scene.allocated(A, two)
    task = scene.prepare(A)
    scene.plugin.work()
    assert not task.done(), "B has it"
    assert scene.afu(one) == BLANK
    assert scene.ledger.record(one).condition is Condition.BLANK
    assert scene.file(A) == ""
    assert A not in scene.ledger.claim_owners


@pytest.mark.parametrize("change", ["device", "bitstream"])
def test_what_a_living_pod_of_the_claim_has_is_left_alone(scene: ClaimScene, change: str) -> None:
    """Invariant 7: not scrubbed, not programmed, not given to anybody under it."""
    one, two = scene.regions[:2]
    scene.allocated(A, one)
    scene.prepared()
    scene.pod("pod-1")
    scene.rack.done.clear()
    scene.touched.clear()
    scene.allocated(A, two if change == "device" else one, wants=OTHER)
    task = scene.prepare()
    scene.plugin.work()
    assert not task.done()
    assert (scene.rack.done, scene.touched) == ([], [])
    assert scene.afu(one) == AFU
    assert DeviceId(one) in scene.ledger.allocations
    assert scene.ledger.record(one).condition is Condition.PROGRAMMED, "as it still is"
    scene.pass_time(task.done)
    assert isinstance(task.exception(), TenancyActiveError)
    assert "pod-1" in str(task.exception())


def test_after_a_restart_another_device_is_another_allocation(scene: ClaimScene) -> None:
    one, two = scene.regions[:2]
    scene.allocated(A, one)
    scene.prepared()
    scene.restart()
    scene.recorded(A)
    scene.allocated(A, two)
    (answer,) = scene.prepared()
    assert answer.device == two
    assert set(scene.ledger.allocations) == {DeviceId(two)}


@pytest.mark.parametrize("runs", [True, False])
def test_a_claim_that_ends_while_it_is_withdrawn_is_told_to_have_ended(
    scene: ClaimScene, *, runs: bool
) -> None:
    one, two = scene.regions[:2]
    scene.allocated(A, one)
    scene.prepared()
    scene.allocated(A, two)
    task = scene.prepare()
    scene.plugin.job(0)  # it was read
    removal = scene.plugin.jobs.pop(0)
    scene.pod("pod-1", running=runs)
    ended = scene.unprepare()
    removal.run()
    scene.plugin.loop.settle()
    scene.plugin.work()
    assert ended.done() is not runs
    assert isinstance(task.exception(), NoSuchClaimError)
    assert all(one.ended for one in scene.ledger.claim_owners.values())


def test_an_adopted_claim_that_moves_on_leaves_no_file_of_what_it_had(scene: ClaimScene) -> None:
    """Else a container would start with a region that is scrubbed, or another claim's by then."""
    one, two = scene.regions[:2]
    scene.allocated(B, two, pods=("pod-b",))
    scene.prepared(B)
    adopt(scene, one)
    scene.allocated(A, two)
    task = scene.prepare()
    scene.plugin.work()
    assert not task.done(), "B has it"
    assert scene.file(A) == ""


def test_a_claim_that_ended_is_prepared_anew_elsewhere_while_its_old_pod_runs(
    scene: ClaimScene,
) -> None:
    one, two = scene.regions[:2]
    scene.allocated(A, one)
    scene.prepared()
    scene.pod("pod-1")
    scene.plugin.begin(scene.ends.end(A))
    scene.plugin.work()
    scene.allocated(A, two, pods=("pod-2",))
    assert scene.prepared()
    assert scene.afu(one) == AFU, "the old pod's"


def test_after_a_restart_another_request_for_the_same_device_is_another_allocation(
    scene: ClaimScene,
) -> None:
    """The containers of the new one find their nodes by the request's name in the claim's file."""
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    scene.restart()
    scene.recorded(A)
    scene.allocated(A, scene.regions[0], request="other", pods=("pod-2",))
    (answer,) = scene.prepared()
    assert answer.requests == ("other",)
    assert "FPGA_REQUEST_OTHER" in scene.file()
    assert "FPGA_REQUEST_FPGA" not in scene.file()


def adopt(scene: ClaimScene, region: RegionId) -> None:
    """Kubelet's record shows a claim that the journal lost; its file is there."""
    device = DeviceId(region)
    owner = ClaimOwner(A, "space", "claim-a", (device,), {device: ("fpga",)})
    scene.plugin.call(lambda: scene.ledger.dra.adopt_claim(owner, [PodUid("pod-1")]))
    scene.files.cdi.write(scene.ledger.claim_owners[A], [scene.ledger.allocations[device]], {})


def test_what_was_adopted_keeps_its_file_while_its_pod_runs(scene: ClaimScene) -> None:
    """Its containers may start again without a call, and nobody knows what it was prepared for."""
    region = scene.regions[0]
    scene.pod("pod-1")
    adopt(scene, region)
    for wants in (AFU, OTHER):
        scene.allocated(A, region, wants=wants)
        task = scene.prepare()
        scene.pass_time(task.done)
        assert isinstance(task.exception(), TenancyActiveError)
    assert scene.file()


def test_a_poisoned_region_is_mended_for_a_claim_where_the_operator_allows_that(
    make: Callable[..., ClaimScene],
) -> None:
    scene = make(cards=[1], recovery=RecoveryPolicy.REBIND)
    (region,) = scene.regions

    asked: list[object] = []

    async def meanwhile(*of: object) -> None:
        if not asked:
            scene.hold_releases()  # else it is mended in the background
            poison(scene, region)
        asked.append(of)

    scene.policy.check = meanwhile  # type: ignore[method-assign]
    scene.allocated(A, region)
    assert scene.prepared()
    assert scene.afu(region) == AFU


def test_while_the_api_server_is_away_it_is_asked_often_enough_and_given_up_at_once_at_the_end(
    scene: ClaimScene,
) -> None:
    scene.server.failing = [NoSourceError("it is away")] * 1000
    task = scene.prepare()
    scene.pass_time(task.done)
    assert isinstance(task.exception(), NoSourceError)
    assert 15 < len(scene.server.asked) < 40, "every two seconds, and sooner at first"
    begin = scene.plugin.loop.time()
    task = scene.prepare()
    scene.plugin.work()
    closed = scene.plugin.begin(scene.lifecycle.close())
    scene.pass_time(closed.done)
    assert scene.plugin.loop.time() < begin + 1, "a process that ends does not wait for it"
    assert isinstance(task.exception(), NoSourceError)


def test_a_pod_of_the_other_api_is_no_claim_that_kubelet_may_have_lost(
    scene: ClaimScene,
) -> None:
    doubted: list[object] = []
    scene.ends.doubted = doubted.append
    device = DeviceId(scene.regions[0])
    scene.plugin.call(lambda: scene.ledger.device_plugin.allocate(REGIONS, [device]))
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    scene.plugin.work()
    assert not task.done()
    assert doubted == []


def test_the_pod_that_comes_with_a_prepared_claim_is_one_of_its_users_before_it_is_answered(
    scene: ClaimScene,
) -> None:
    """No call comes for a further pod of a claim where kubelet restarts: the read claim reports."""
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    scene.allocated(A, scene.regions[0], wants=OTHER, pods=("pod-2",))
    scene.pod("pod-2")
    task = scene.prepare()
    scene.plugin.work()
    assert not task.done()
    assert scene.ledger.pods_of(scene.ledger.claim_owners[A].devices) == {"pod-1", "pod-2"}
    assert scene.afu(scene.regions[0]) == AFU, "pod-2 runs with it"


# ------------------------------------------------------------------ policy


def test_the_policy_is_asked_of_each_device_in_the_claims_namespace(scene: ClaimScene) -> None:
    one, two, other = scene.regions
    scene.allocated(A, one, two, other)
    scene.prepared()
    first, again = scene.policy.asked[:3], scene.policy.asked[3:]
    asked = [each[:-1] for each in first]
    assert [each[:-1] for each in again] == asked, "once more at the hand-over"
    assert [devices for _, _, devices, _ in asked] == [[one], [two], [other]]
    for identity, resource, _, requests in asked:
        assert identity.name == PodName("space", ref(A).name)
        assert resource.interface_id == INTERFACE
        assert [each.bitstream_id for each in requests] == [AFU]


def test_with_dra_nothing_of_the_device_plugin_api_is_made(make: Callable[..., ClaimScene]) -> None:
    """Each would look at every change of the ledger, for nobody."""
    listeners = make().ledger._listeners
    told = {type(getattr(one, "__self__", one)).__name__ for one in listeners}
    assert told >= {"ClaimLifecycle", "ClaimFiles", "ClaimReconciler"}
    assert not told & {"DeviceLists", "PreStarts", "Reconciler", "Owners"}


@pytest.mark.parametrize("instant", ["programming", "reading back"])
def test_a_policy_that_changes_before_the_hand_over_is_the_one_that_counts(
    scene: ClaimScene, monkeypatch: pytest.MonkeyPatch, instant: str
) -> None:
    region, policy, preparer = scene.regions[0], scene.policy, scene.lifecycle._preparer

    async def deny(*_: object) -> None:
        raise NotPermittedError("namespace space may not have it")

    def changes() -> None:
        policy.policy = "another"  # type: ignore[assignment]
        policy.check = deny  # type: ignore[method-assign]

    name = "prepare" if instant == "programming" else "read_back"
    before = getattr(preparer, name)

    async def meanwhile(plan: Plan) -> object:
        found = await before(plan)
        changes()
        return found

    monkeypatch.setattr(preparer, name, meanwhile)
    scene.allocated(A, region)
    task = scene.prepare()
    scene.pass_time(task.done)
    assert isinstance(task.exception(), NotPermittedError)
    assert scene.afu(region) == AFU, "it was programmed by then"
    assert not scene.ledger.dra.is_prepared(scene.ledger.claim_owners[A])
    assert scene.file() == ""


def test_the_policy_is_asked_of_the_card_that_is_there_and_of_no_other(
    scene: ClaimScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is read in between: a rule for one kind of card must not be asked of another."""
    card = scene.ledger.cards[card_of(scene.regions[0])]
    other = replace(card, interface_id=OTHER_INTERFACE)
    wishes, asked = scene.lifecycle._claim_targets.of, []

    async def meanwhile(claim: ResourceClaim) -> Any:
        found = await wishes(claim)
        asked.append(claim)
        if len(asked) == 1:
            scene.ledger.hardware.card_found(other, {}, BLANK)
        return found

    monkeypatch.setattr(scene.lifecycle._claim_targets, "of", meanwhile)
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    scene.plugin.work()
    assert asked
    assert not scene.policy.asked
    scene.pass_time(lambda: task.done() or bool(scene.policy.asked))
    for _, resource, _, requests, _ in scene.policy.asked:
        assert {each.interface_id for each in requests} <= {resource.interface_id}


def test_a_card_that_goes_while_its_images_are_looked_for_is_told(
    scene: ClaimScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = scene.lifecycle._claim_targets.of

    async def meanwhile(claim: ResourceClaim) -> Any:
        found = await wishes(claim)
        scene.ledger.hardware.card_gone(card_of(scene.regions[0]))
        scene.ledger.resources.clear()
        return found

    monkeypatch.setattr(scene.lifecycle._claim_targets, "of", meanwhile)
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    scene.plugin.work()
    assert isinstance(task.exception(), UnknownDeviceError)
    assert not scene.ledger.allocations


def test_what_a_claim_left_is_scrubbed_though_something_works_on_the_card(
    scene: ClaimScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What works on it may have looked already: the card is added once more."""
    region, _, other = scene.regions
    scene.allocated(A, region)
    scene.prepared()
    scene.recorded(A)
    scene.allocated(A, other)
    monkeypatch.setattr(scene.plugin.queue, "busy", lambda _: True)
    task = scene.prepare()
    scene.pass_time(task.done)
    assert task.result()
    assert scene.ledger.record(region).condition is Condition.BLANK


def test_what_the_policy_refuses_gets_no_device(scene: ClaimScene) -> None:
    async def refuse(*_: object) -> None:
        raise NotPermittedError("rule 1 says no")

    scene.policy.check = refuse  # type: ignore[method-assign]
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    scene.plugin.work()
    assert isinstance(task.exception(), NotPermittedError)
    assert not scene.ledger.allocations
    assert not scene.rack.done


def test_a_card_that_is_gone_is_told_and_nothing_is_taken(scene: ClaimScene) -> None:
    card = card_of(scene.regions[0])
    scene.plugin.call(lambda: scene.ledger.hardware.card_gone(card))
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    scene.plugin.work()
    assert isinstance(task.exception(), FpgaPluginError)
    assert not scene.ledger.claim_owners


def test_a_card_that_is_not_given_out_any_more_is_told_as_no_device(scene: ClaimScene) -> None:
    """The claim was allocated while its card could still be reprogrammed."""
    board = scene.rack.boards[card_of(scene.regions[0])]
    board.card = replace(board.card, reprogrammable=False)
    scene.plugin.call(lambda: scene.ledger.show(board.card))
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    scene.plugin.work()
    assert isinstance(task.exception(), UnknownDeviceError)
    assert not scene.ledger.allocations


# ------------------------------------------------------------------ unprepare


def test_unprepare_is_answered_when_the_region_is_clean(scene: ClaimScene) -> None:
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    task = scene.unprepare()
    assert not task.done()
    scene.plugin.work()
    task.result()
    assert scene.afu(region) == BLANK
    assert scene.file() == ""
    assert not scene.ledger.allocations
    assert A not in scene.lifecycle.read
    assert "claim ended" in scene.logged
    scene.unrecorded()
    assert not scene.ledger.claim_owners


def test_unprepare_is_answered_in_time_however_little_there_is(scene: ClaimScene) -> None:
    """Kubelet gives up after 45 s, and what it gave up it does not hear of."""
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    scene.pod("pod-1")
    scene.lifecycle.seconds = 0.5
    task = scene.unprepare()
    scene.pass_time(task.done)
    assert scene.plugin.loop.time() == pytest.approx(BEGIN + 0.5)
    assert isinstance(task.exception(), NotFinishedError)


def test_a_whole_card_is_given_back_when_all_of_it_is_clean(
    make: Callable[..., ClaimScene],
) -> None:
    scene = make(cards=[2, 1], memory=True)
    card = card_of(scene.regions[0])
    scene.allocated(A, card)
    scene.prepared()
    task = scene.unprepare()
    scene.until(lambda: scene.afu(scene.regions[0]) == BLANK)
    assert not task.done()
    scene.plugin.work()
    task.result()
    assert [scene.afu(region) for region in scene.regions] == [BLANK] * 3


def test_unprepare_waits_for_a_pod_that_runs_and_tells_that_it_does(scene: ClaimScene) -> None:
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    pod = scene.pod("pod-1")
    scene.rack.done.clear()
    task = scene.unprepare()
    scene.plugin.work()
    assert not task.done()
    assert scene.file() == "", "but no container starts with it any more"
    scene.pass_time(task.done)
    assert scene.plugin.loop.time() == pytest.approx(BEGIN + ANSWER_SECONDS)
    with pytest.raises(NotFinishedError, match=r"not scrubbed after 40 s.*`scrub waits`"):
        task.result()
    assert scene.rack.done == []
    assert scene.ledger.claim_owners[A].ended
    pod.running = False
    again = scene.unprepare()
    scene.unrecorded()
    assert scene.ledger.claim_owners, "not before its region is clean"
    scene.pass_time(again.done)
    again.result()
    scene.unrecorded()
    assert not scene.ledger.claim_owners


def test_what_cannot_be_cleaned_is_kept_back_and_holds_up_no_pod(scene: ClaimScene) -> None:
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    scene.plugin.call(lambda: scene.ledger.work.faulted(region, "it does not answer"))
    task = scene.unprepare()
    scene.plugin.work()
    task.result()
    scene.unrecorded()
    assert not scene.ledger.claim_owners


def faulted(scene: ClaimScene) -> None:
    scene.plugin.call(lambda: scene.ledger.work.faulted(scene.regions[0], "it does not answer"))


def hot(scene: ClaimScene) -> None:
    region = scene.regions[0]
    scene.ledger.hardware.set_failing(card_of(region), {region: TOO_HOT})


def without_a_blank(scene: ClaimScene) -> None:
    scene.images.has_blank = False


def hot_once_clean(scene: ClaimScene) -> None:
    region = scene.regions[0]

    def look(_: object) -> None:
        if scene.ledger.record(region).condition is Condition.BLANK and not scene.ledger.failing:
            hot(scene)

    scene.ledger.subscribe(look)


@pytest.mark.parametrize(
    "trouble",
    [faulted, lambda scene: scene.plugin.call(lambda: hot(scene)), hot_once_clean, without_a_blank],
)
def test_the_end_of_what_is_kept_back_is_answered_once_the_scheduler_knows(
    scene: ClaimScene, trouble: Callable[[ClaimScene], None]
) -> None:
    """It would give the device to the next claim, whose pod would wait, or be evicted, for it."""
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    trouble(scene)
    asked, knows = [], asyncio.Event()

    async def tell() -> None:
        asked.append(scene.plugin.loop.time())
        await knows.wait()

    scene.lifecycle.tell_scheduler = tell
    task = scene.unprepare()
    scene.pass_time(lambda: asked)
    scene.plugin.work()
    assert not task.done()
    scene.plugin.call(knows.set)
    scene.plugin.work()
    task.result()
    assert len(asked) == 1


def test_one_region_that_is_kept_back_is_enough_for_the_scheduler(scene: ClaimScene) -> None:
    asked: list[bool] = []

    async def tell() -> None:
        asked.append(True)

    scene.lifecycle.tell_scheduler = tell
    one, two = scene.regions[:2]
    scene.allocated(A, one, two)
    scene.prepared()
    scene.plugin.call(lambda: scene.ledger.work.faulted(one, "it does not answer"))
    task = scene.unprepare()
    scene.pass_time(task.done)
    task.result()
    assert scene.ledger.record(two).condition is Condition.BLANK
    assert asked == [True]


def test_the_end_of_what_is_clean_waits_for_no_scheduler(scene: ClaimScene) -> None:
    async def tell() -> None:
        pytest.fail("nothing is to be told")

    scene.lifecycle.tell_scheduler = tell
    scene.allocated(A, scene.regions[0])
    scene.prepared()
    task = scene.unprepare()
    scene.pass_time(task.done)
    task.result()
    task = scene.unprepare()  # kubelet did not hear it
    scene.pass_time(task.done)
    task.result()


def test_without_a_blank_the_region_is_kept_back_and_the_pod_is_not(scene: ClaimScene) -> None:
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    scene.images.has_blank = False
    task = scene.unprepare()
    scene.plugin.work()
    scene.pass_time(task.done)
    task.result()
    assert scene.ledger.record(region).condition is Condition.DIRTY


def test_what_an_earlier_run_had_no_blank_for_is_scrubbed_before_the_answer(
    scene: ClaimScene,
) -> None:
    """Kubelet asks again after the plugin was killed; the store answers by then."""
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    scene.images.has_blank = False
    scene.unprepare()
    scene.plugin.work()
    assert "no-blank-image" in scene.ledger.record(region).reason
    scene.images.has_blank = True
    scene.live_again()
    task = scene.unprepare()
    scene.plugin.work()
    assert not task.done()
    scene.plugin.kubelet_begins("life 1")
    scene.plugin.kubelet_answers()
    scene.plugin.work()
    task.result()
    assert scene.condition(region) is Condition.BLANK


def test_a_port_that_cannot_be_opened_holds_up_neither_its_claim_nor_the_neighbours(
    scene: ClaimScene,
) -> None:
    broken, other = scene.regions[:2]
    for uid, region in ((A, broken), (B, other)):
        scene.allocated(uid, region)
        scene.prepared(uid)
    opens = scene.rack.open_port

    def fails(card: Card, region: Region) -> Any:
        if region.id == broken:
            raise HardwareError("the port cannot be opened (EIO)")
        return opens(card, region)

    with mock.patch.object(scene.rack, "open_port", fails):
        for task in (scene.unprepare(A), scene.unprepare(B)):
            scene.pass_time(task.done)
            task.result()
    assert scene.condition(broken) is Condition.FAULTED, "which is a taint"
    assert scene.condition(other) is Condition.BLANK
    assert scene.plugin.loop.time() < BEGIN + 1


def test_a_region_that_others_may_open_by_its_node_holds_up_no_pod(scene: ClaimScene) -> None:
    """Invariant 10: it is not scrubbed, and not given out, before those end who have its node."""
    region = scene.regions[0]
    scene.allocated(A, region)
    scene.prepared()
    (node,) = scene.ledger.region(region).grant.nodes  # type: ignore[union-attr]
    others = tenancy(scene.regions[1], "pod-z", node)
    scene.plugin.call(lambda: scene.ledger.commit(others))
    scene.pod("pod-z")
    scene.rack.done.clear()
    task = scene.unprepare()
    scene.plugin.work()
    task.result()
    assert scene.rack.done == []
    assert scene.ledger.record(region).condition is Condition.DIRTY


def test_a_device_of_several_requests_and_the_pod_of_extended_resources_are_noted(
    scene: ClaimScene,
) -> None:
    """The pod is waited for at the end, though the claim is not reserved for it yet."""
    region = scene.regions[0]
    claim = scene.allocated(A, region, pods=())
    of = {DeviceId(region): ("a", "b")}
    scene.server.claims[A] = replace(
        claim,
        owner=replace(claim.owner, requests=of, subrequests={"b": "b/x"}),
        pod=(PodName("space", "compress"), PodUid("pod-3")),
    )

    async def blank(_: ResourceClaim) -> dict[RegionId, None]:
        return {region: None}

    scene.lifecycle._claim_targets.of = blank  # type: ignore[assignment,method-assign]
    (answer,) = scene.prepared()
    assert answer.requests == ("a", "b")
    assert scene.ledger.claim_owners[A].subrequests == {"b": "b/x"}
    assert scene.ledger.pods_of(scene.ledger.claim_owners[A].devices) == {"pod-3"}


def test_a_neighbour_that_is_dirty_does_not_hold_up_the_end(scene: ClaimScene) -> None:
    one, two = scene.regions[:2]
    scene.allocated(A, one)
    scene.allocated(B, two, pods=("pod-b",))
    scene.prepared(A)
    scene.prepared(B)
    scene.pod("pod-b")
    scene.unprepare(B)
    task = scene.unprepare(A)
    scene.plugin.work()
    task.result()
    scene.unrecorded(A)
    scene.unrecorded(B)
    assert set(scene.ledger.claim_owners) == {B}


def test_the_end_of_an_unknown_claim_is_nothing(scene: ClaimScene) -> None:
    task = scene.unprepare()
    scene.plugin.work()
    task.result()
    assert "claim ended" not in scene.logged
    assert scene.journal.snapshot.claim_owners == {}


def test_a_process_that_ends_waits_for_what_it_does_and_begins_nothing(scene: ClaimScene) -> None:
    scene.allocated(A, scene.regions[0])
    task = scene.prepare()
    closed = scene.plugin.begin(scene.lifecycle.close())
    assert not closed.done()
    scene.plugin.work()
    closed.result()
    assert task.exception() is not None
    assert not scene.rack.done
    assert not scene.ledger.allocations


def test_a_process_that_ends_idle_waits_for_nothing(scene: ClaimScene) -> None:
    closed = scene.plugin.begin(scene.lifecycle.close())
    scene.plugin.loop.settle()
    closed.result()
