"""Claims of DRA that kubelet's record lacks, or has and the journal lacks."""

import asyncio
import gc
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles import LIMIT
from doubles.cards import AFU, BLANK, PREFIX, make_card
from doubles.cards import device as device_of
from doubles.loops import until
from ledger_support import MemoryJournal, former, make_ledger, scrub
from structlog.testing import capture_logs
from test_dra_steps import POD, A, owner, prepare

from fpga_plugin.allocation.journal.doubt import doubted
from fpga_plugin.allocation.journal.records import Condition, Prepared
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.dra import reconcile
from fpga_plugin.dra.cdi import CdiError, CdiFiles
from fpga_plugin.dra.claim import ClaimRef, NoSuchClaimError, ResourceClaim, read_claim
from fpga_plugin.dra.claim_targets import ClaimTargets
from fpga_plugin.dra.ends import ClaimEnds
from fpga_plugin.dra.files import ClaimFiles
from fpga_plugin.dra.lifecycle import ClaimLifecycle
from fpga_plugin.dra.names import device_name
from fpga_plugin.dra.reconcile import ClaimReconciler
from fpga_plugin.errors import FpgaPluginError, RefusedError
from fpga_plugin.ids import CardId, RegionId
from fpga_plugin.kubernetes.cgroup import PodPresence
from fpga_plugin.kubernetes.names import ClaimUid, PodUid

CARD = make_card()
DRIVER = "fpga.intel.com"


NO_BLANKS = SimpleNamespace(missing=lambda _card: False)
"""None was looked for (`Blanks`)."""


class Queue:
    """In step with kubelet; scrubs nothing."""

    synced = True

    def __init__(self) -> None:
        self.added: list[CardId] = []

    def sync(self) -> None:
        self.synced = True

    def add(self, card: CardId) -> None:
        self.added.append(card)


class Files(CdiFiles):
    """A directory that cannot be written as often as a test says."""

    failing = 0

    def remove(self, path: str, uid: ClaimUid) -> None:
        if self.failing:
            self.failing -= 1
            raise CdiError("the file cannot be removed")
        super().remove(path, uid)


class NoLeftovers:
    """Kubelet's checkpoint names no pod."""

    problem = ""
    waits = False

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def settled(self) -> set[CardId]:
        return set(self._ledger.cards)

    async def look(self) -> bool:
        return True


class World:
    """A claim that is prepared, and kubelet's root directory without a record of it.

    Attributes:
        claim: as the API server has it; None: it has none.
        asked: how often it was.
        living: the pod that still runs.
    """

    def __init__(self, root: str, *, fresh: bool = False, damaged: bool = False) -> None:
        self.root = Path(root)
        self.ledger, journal = make_ledger(*(() if fresh else (CARD,)), dra=True)
        self.journal: MemoryJournal = journal
        self.region = CARD.regions[0].id
        if fresh:
            self.ledger.hardware.card_found(CARD, {}, BLANK)
        else:
            prepare(self.ledger, CARD, 0)
        self.claim: bytes | None = None
        self.asked = 0
        self.living: PodUid | None = None
        self.queue = Queue()
        self.files = Files(f"{root}/cdi", DRIVER)
        if not fresh:
            self.files.write(self.ledger.claim_owners[A], self.ledger.allocations.values(), {})
        if damaged:
            journal.snapshot = doubted(replace(journal.snapshot, allocations={}), "the claim's row")
            self.ledger = Ledger(
                prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot"
            )
            self.ledger.hardware.card_found(
                CARD, dict.fromkeys([one.id for one in CARD.regions], AFU), AFU
            )
        operations = SimpleNamespace(
            ledger=self.ledger,
            living=self._living,
            cgroups=SimpleNamespace(state=lambda _: PodPresence.ALIVE),
        )
        told = SimpleNamespace(get=self._get)
        nothing = SimpleNamespace()
        files = ClaimFiles(self.ledger, self.files)
        self.ends = ends = ClaimEnds(self.ledger, NO_BLANKS, self.queue, files)  # type: ignore[arg-type]
        self.life = ClaimLifecycle(
            operations,
            nothing,
            nothing,
            self.queue,
            claims=told,
            claim_targets=nothing,
            permission=nothing,
            files=files,
            ends=ends,
            tell_scheduler=nothing,
        )
        self.reconciler = ClaimReconciler(
            operations,
            self.queue,
            ends,
            files,
            root=root,
            driver=DRIVER,
            claims=told,
            leftovers=NoLeftovers(self.ledger),  # type: ignore[arg-type]
        )

    async def _living(self, _pods: object) -> PodUid | None:
        return self.living

    async def _get(self, ref: ClaimRef, driver: str = "") -> ResourceClaim:
        self.asked += 1
        if self.claim is None:
            raise NoSuchClaimError("there is none")
        return read_claim(self.claim, ref, driver=driver or DRIVER, node="node-a")

    def play(self, until: Callable[[], bool]) -> None:
        async def run() -> None:
            async with asyncio.timeout(LIMIT):
                task = asyncio.create_task(self.reconciler.run())
                while not until() and not task.done():  # noqa: ASYNC110  # nobody announces it
                    await asyncio.sleep(0.001)
            task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError), ended

        asyncio.run(run())

    def record(self, uid: ClaimUid) -> None:
        """Kubelet's, of one claim on the region."""
        state = {"Devices": [{"DeviceName": self.region.replace(".", "-"), "RequestNames": ["r"]}]}
        claim = {
            "ClaimUID": uid,
            "ClaimName": "c",
            "Namespace": "n",
            "PodUIDs": {POD: {}},
            "DriverState": {DRIVER: state},
        }
        data = json.dumps({"ClaimInfoStateList": [claim]})
        (self.root / "dra_manager_state").write_text(json.dumps({"Data": data}))


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    monkeypatch.setattr(reconcile, "LOOK_SECONDS", 0.01)
    return World(str(tmp_path))


def has_ended(world: World, tmp_path) -> bool:
    return (
        world.ledger.claim_owners[A].ended
        and world.ledger.record(world.region).condition is Condition.DIRTY
        and world.queue.added == [CARD.id]
        and not list((tmp_path / "cdi").iterdir())
    )


def test_a_claim_whose_end_cannot_be_written_down_is_ended_later(world: World, tmp_path):
    world.journal.failing = 2
    with capture_logs() as logs:
        world.play(lambda: has_ended(world, tmp_path))
    assert [one["event"] for one in logs].count("claim cannot be ended") == 2


def test_a_file_that_cannot_be_removed_is_removed_later(world: World, tmp_path):
    world.files.failing = 2
    with capture_logs() as logs:
        world.play(lambda: any(one["event"] == "claim ended without a call" for one in logs))
    assert has_ended(world, tmp_path)
    assert [one["event"] for one in logs].count("claim cannot be ended") == 2


def allocated(*pools: str) -> bytes:
    """The claim, as the API server has it."""
    one = {"request": "r", "driver": DRIVER, "device": device_name(device_of(CARD, 0))}
    results = [one | {"pool": pool} for pool in pools]
    status = {
        "allocation": {"devices": {"results": results}},
        "reservedFor": [{"resource": "pods", "name": "p", "uid": "a-pod-there"}],
    }
    return json.dumps({"metadata": {"uid": A}, "status": status}).encode()


@pytest.mark.parametrize("pools", [(), ("node-b",), ("node-b", "node-b")])
def test_a_claim_that_is_allocated_elsewhere_by_now_ends_here(world: World, tmp_path, pools):
    world.claim = allocated(*pools)
    world.living = POD

    def over() -> bool:
        if world.living is not None and world.asked > 2:
            assert not world.ledger.claim_owners[A].ended  # its pod still runs here
            world.living = None
        return has_ended(world, tmp_path)

    world.play(over)


@pytest.mark.parametrize("pools", [("node-a",), ("node-b", "node-a")])
def test_a_claim_that_has_a_device_here_is_kept(world: World, pools):
    world.claim = allocated(*pools)
    world.play(lambda: world.asked > 2)
    assert not world.ledger.claim_owners[A].ended


def after_a_round(world: World) -> None:
    world.queue.synced = False
    world.play(lambda: world.queue.synced)


def test_a_record_that_is_not_rewritten_yet_makes_no_claim_of_one_that_has_ended(world: World):
    """Kubelet writes the end down after its answer, and the rest of the pod's claims."""
    world.ledger.dra.end_claim(A)
    scrub(world.ledger, CARD)
    world.record(A)
    world.queue.synced = False
    record = world.root / "dra_manager_state"

    def forgotten() -> bool:
        if world.queue.synced and record.exists():
            assert world.ledger.claim_owners[A].ended, "while the record names it"
            assert not world.ledger.allocations
            record.unlink()
        return not world.ledger.claim_owners

    world.play(forgotten)
    assert not record.exists()
    assert world.ledger.record(world.region).condition is Condition.BLANK


def test_a_claim_on_a_card_that_is_new_to_the_journal_is_adopted(tmp_path):
    world = World(str(tmp_path), fresh=True)
    world.record(A)
    after_a_round(world)
    assert world.ledger.pods_of(world.ledger.claim_owners[A].devices) == {POD}
    assert not world.ledger.unreconciled


def test_a_claim_whose_device_a_damaged_journal_lost_keeps_it(tmp_path):
    world = World(str(tmp_path), damaged=True)
    assert not world.ledger.allocations
    world.record(A)
    after_a_round(world)
    assert world.ledger.allocations[device_of(CARD, 0)].missed_prestart
    assert not world.ledger.dra.is_prepared(world.ledger.claim_owners[A])
    assert not world.ledger.unreconciled


def test_pods_whose_claim_both_records_lost_are_former_owners_of_its_regions(tmp_path):
    world = World(str(tmp_path), damaged=True)
    world.claim = allocated("node-a")
    world.living = POD
    after_a_round(world)
    assert [former(world.ledger, one.id) for one in CARD.regions] == [
        {POD} if one.id == world.region else set() for one in CARD.regions
    ]


def test_a_card_stays_back_whose_lost_claim_cannot_be_adopted(tmp_path):
    world = World(str(tmp_path), damaged=True)
    world.ledger.dra.adopt_claim(owner(ClaimUid("claim-b"), device_of(CARD)), [POD])
    world.living = POD
    world.record(A)
    after_a_round(world)
    assert world.ledger.unreconciled == {CARD.id}


def test_a_card_that_went_while_its_claim_was_read_is_named(world: World):
    claim = read_claim(allocated("node-a"), ClaimRef(A, "n", "c"), driver=DRIVER, node="node-a")
    world.ledger.hardware.card_gone(CARD.id)
    with pytest.raises(RefusedError, match="is gone"):
        asyncio.run(ClaimTargets(world.ledger, SimpleNamespace(), None).of(claim))


async def ends_slowly(world: World) -> tuple["asyncio.Task[None]", Callable[[], None]]:
    """The claim's end, in the midst of the removal of its file, and what lets it go on."""
    begun, go_on = threading.Event(), threading.Event()
    remove = world.files.remove

    def slowly(*args: object) -> None:
        begun.set()
        assert go_on.wait(LIMIT)
        remove(*args)  # type: ignore[arg-type]

    world.files.remove = slowly  # type: ignore[method-assign]
    ending = asyncio.create_task(world.ends.end(A))
    assert await asyncio.to_thread(begun.wait, LIMIT)
    return ending, go_on.set


def stands(world: World) -> asyncio.Event:
    """The claim is as it was prepared; its next Prepare waits for this before it finds that out."""
    world.claim = allocated("node-a").replace(b'"r"', b'"fpga"')
    world.ledger.dra.prepared(A, {world.region: Prepared()})
    found = asyncio.Event()

    async def blank(*_: object) -> dict[RegionId, None]:
        await found.wait()
        return {world.region: None}

    async def as_it_is(error: FpgaPluginError) -> FpgaPluginError:
        return error

    world.life._targets.explained = as_it_is  # type: ignore[assignment,method-assign]
    world.life._claim_targets.of = blank  # type: ignore[method-assign]
    world.life._targets.exactly = blank  # type: ignore[assignment,method-assign]
    world.life._permission.check = blank  # type: ignore[assignment,method-assign]
    return found


def test_a_claim_that_ends_while_nobody_waits_for_its_answer_leaves_no_error(world: World):
    told: list[str] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told_: told.append(str(told_)))
        stands(world).set()
        ending, go_on = await ends_slowly(world)
        call = asyncio.create_task(world.life.prepare(ClaimRef(A, "n", "c")))
        await until(lambda: f"answer {A}" in [one.get_name() for one in asyncio.all_tasks()])
        call.cancel()
        (ended,) = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError)
        go_on()
        await ending
        this = asyncio.current_task()
        while left := asyncio.all_tasks() - {this}:
            await asyncio.wait(left)
        del left, call
        gc.collect()

    asyncio.run(run())
    assert told == []
    assert not list((world.root / "cdi").iterdir())


def test_a_prepare_that_began_in_the_midst_of_a_claims_end_does_not_take_its_device_again(
    world: World,
):
    async def run() -> None:
        found = stands(world)
        ending, go_on = await ends_slowly(world)
        call = asyncio.create_task(world.life.prepare(ClaimRef(A, "n", "c")))
        await until(lambda: A in world.life.read)
        go_on()
        await ending
        found.set()
        with pytest.raises(NoSuchClaimError):
            await call

    asyncio.run(run())
    assert world.ledger.claim_owners[A].ended


# ------------------------------------------------------------------ the device plugin API serves


@pytest.fixture
def left(world: World) -> World:
    """What DRA left, seen by the device plugin API, which has a queue and records of its own."""
    world.reconciler._claims = world.reconciler._leftovers = None
    watcher = SimpleNamespace(start=lambda: pytest.fail("it polls"), close=lambda: None)
    world.reconciler._watcher = watcher  # type: ignore[assignment]
    world.queue.synced = False
    return world


def test_claims_that_dra_left_end_with_their_processes_and_then_nothing_is_looked_at(
    left: World, tmp_path
):
    left.living = POD
    record = tmp_path / "dra_manager_state"
    record.write_text(json.dumps({"Data": json.dumps({"ClaimInfoStateList": []})}))

    async def run() -> None:
        async with asyncio.timeout(LIMIT):
            task = asyncio.create_task(left.reconciler.run())
            while A not in left.reconciler._lost:  # noqa: ASYNC110  # nobody announces it
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            assert not left.ledger.claim_owners[A].ended, "its pod runs"
            left.living = None
            while not left.ledger.claim_owners[A].ended:  # noqa: ASYNC110  # nobody announces it
                await asyncio.sleep(0.001)
            scrub(left.ledger, CARD)
            await task

    asyncio.run(run())
    assert not left.ledger.claim_owners
    assert not left.queue.synced, "the records of the device plugin API are not read by that"
    assert left.asked == 0, "the API server is not asked"


def test_without_kubelets_record_nobody_knows_who_has_what_dra_gave(left: World):
    left.ledger.dra.end_claim(A)
    left.ledger.dra.forget_claim(A)
    left.ledger.resource_claims_unknown = "DRA served this node"
    looks = 0

    def twice() -> bool:
        nonlocal looks
        looks += bool(left.reconciler.problem)
        return looks > 2

    left.play(twice)
    assert "is not there" in left.reconciler.problem
    assert left.ledger.resource_claims_unknown


def test_what_of_dra_cannot_be_adopted_leaves_the_rest_unknown(left: World):
    left.ledger.resource_claims_unknown = "DRA served this node"
    left.record(ClaimUid("claim-b"))  # whose device A has
    assert asyncio.run(left.reconciler.reconcile())
    assert left.ledger.resource_claims_unknown
    left.record(A)
    assert asyncio.run(left.reconciler.reconcile())
    assert not left.ledger.resource_claims_unknown


def test_what_dra_left_is_looked_at_again_and_again_while_its_pods_run(left: World, tmp_path):
    """Nothing else tells the device plugin API that kubelet's record has changed."""
    left.record(A)

    async def run() -> None:
        async with asyncio.timeout(LIMIT):
            task = asyncio.create_task(left.reconciler.run())
            while not left.ends.recorded:  # noqa: ASYNC110  # nobody announces it
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            record = tmp_path / "dra_manager_state"
            record.write_text(json.dumps({"Data": json.dumps({"ClaimInfoStateList": []})}))
            while not left.ledger.claim_owners[A].ended:  # noqa: ASYNC110  # nobody announces it
                await asyncio.sleep(0.001)
            task.cancel()

    asyncio.run(run())
