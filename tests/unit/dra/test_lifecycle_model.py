"""Traces of the checked model of DRA (docs/model/claims.pml), replayed step by step on its api.

As `test_ledger_model` does for the other api: after each step what the plugin knows and what is on
the cards has to be what the model says. ClaimLifecycle, ClaimReconciler and the claims' files are
the real ones; kubelet's calls, its record and the API server are the trace's.
"""

import asyncio
import functools
import itertools
import os
import re
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ledger_world
import pytest
import structlog
from doubles.cards import BLANK, PREFIX
from ledger_support import MemoryJournal
from ledger_world import Images, Job, Plugin, Pod, Rack, make_boards
from repository import ROOT
from test_ledger_model import CONDITIONS, KINDS, NEXT, Gated, caller, image

from fpga_plugin.allocation.journal.records import ClaimOwner
from fpga_plugin.dra import reconcile
from fpga_plugin.dra.cdi import CdiError
from fpga_plugin.dra.claim import (
    ClaimRef,
    Config,
    NoSuchClaimError,
    ResourceClaim,
)
from fpga_plugin.dra.names import device_name
from fpga_plugin.dra.regionconfig import RegionConfig
from fpga_plugin.ids import BitstreamId, CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.cgroup import known_gone
from fpga_plugin.kubernetes.kubelet.dra_record import RecordedClaim
from fpga_plugin.kubernetes.names import ClaimUid, PodUid
from fpga_plugin.settings.settings import ScrubPolicy, ServedApi

TRACES = sorted((ROOT / "tests/traces/claims").glob("*.txt"))
BLANK_CLAIM = 2
"""The claim that asks for no bitstream, as in the model."""

PODS = tuple(itertools.product((1, 2, 3), (1, 2)))
"""Claims and numbers of pods, from the lowest bit of the model's sets on."""

ASKED = ("Anything._allowed", "Images.load.<locals>.<lambda>")
"""What is asked before a claim gets its devices, and is no step of the model."""

WITHHELD = ("CdiFiles.remove", "read_record")
"""What a preparation, or the end of one, takes back first, and is no step of the model."""

OF_CALLS = (*WITHHELD, "CdiFiles.write", "Server._read", "Anything._allowed")
"""Ends of threads that belong to a claim, and to no card."""


def uid(claim: int) -> ClaimUid:
    return ClaimUid(f"00000000-0000-4000-8000-00000000000{claim}")


def pod_uid(claim: int, number: int) -> PodUid:
    return PodUid(f"pod-{claim}-{number}")


def bits(uids: Any) -> int:
    return sum(1 << n for n, each in enumerate(PODS) if pod_uid(*each) in uids)


class ClaimJob(Job):
    """With what the replay asks of a job.

    Attributes:
        kind: what the model calls it.
        name: of the function.
        of_card: it is work on a card.
        claim: whose; 0: a scrub's.
        working: for its preparation, which goes on when the call ends.
    """

    kind: str
    name: str
    of_card: bool
    claim: int
    working: bool


async def start_job(plugin: Plugin, function: Any) -> object:
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    job = ClaimJob(function, plugin.loop.create_future())
    task = asyncio.current_task()
    name = "" if task is None else task.get_name()
    job.name = inner.__qualname__
    job.kind = KINDS.get(job.name, "")
    of_claim = name.startswith(("call ", "prepare ", "answer ")) and job.kind != "gate"
    job.of_card = not of_claim and job.kind != "last look" and job.name not in OF_CALLS
    job.claim = 0 if name.startswith("release") else caller.get()
    job.working = name.startswith("prepare ")
    plugin.jobs.append(job)
    return await job.future


class Server:
    """The API server: what each claim has now."""

    def __init__(self, replay: "Replay") -> None:
        self._replay = replay

    async def get(self, ref: ClaimRef, driver: str = "") -> ResourceClaim:
        return await asyncio.to_thread(self._read, ref)

    def _read(self, ref: ClaimRef) -> ResourceClaim:
        replay = self._replay
        number = next(n for n in (1, 2, 3) if uid(n) == ref.uid)
        device = replay.allocated.get(number)
        if device is None:
            raise NoSuchClaimError(f"{ref} has nothing")
        config = Config(False, frozenset(), RegionConfig(bitstream=BitstreamId(image(number))))
        return ResourceClaim(
            ClaimOwner(ref.uid, ref.namespace, ref.name, (device,), {device: ("fpga",)}, PREFIX),
            () if number == BLANK_CLAIM else (config,),
            frozenset(replay.present(number)),
        )


class Anything:
    """A policy that allows everything, and takes its time."""

    policy = None

    async def check(self, *_: object) -> None:
        await asyncio.to_thread(self._allowed)

    def _allowed(self) -> None:
        """It is."""


class Replay:
    """One node: a card of two regions whose memory can be cleared, and the plugin."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.allocated: dict[int, DeviceId] = {}
        self.recorded: dict[int, dict[str, tuple[str, ...]]] = {}
        self.pods = {each: Pod(pod_uid(*each), None, (), {}) for each in PODS}  # type: ignore[arg-type]
        for pod in self.pods.values():
            pod.active = False
        self.calls: dict[int, asyncio.Task[object]] = {}
        self.rack = Rack(make_boards([(2, True)]), lambda _: None)
        (self.board,) = self.rack.boards.values()
        self.card: CardId = self.board.card.id
        self.regions: list[RegionId] = [region.id for region in self.board.card.regions]
        self.devices = [*map(DeviceId, self.regions), DeviceId(self.card)]
        self.journal = MemoryJournal()
        self.begin()
        self.plugin.kubelet_answers()
        self.plugin.work()

    # ------------------------------------------------------------ the plugin's process

    def begin(self) -> None:
        self.plugin = Plugin(
            self.rack,
            list(self.pods.values()),
            Images(),
            self.journal,
            scrub=ScrubPolicy.REQUIRED,
            api={
                "mode": ServedApi.DRA,
                "node_name": "node-a",
                "cdi_dir": str(self.folder / "cdi"),
                "kubelet_root": str(self.folder),
            },
        )
        api = self.plugin.dra
        assert api is not None
        self.lifecycle, self.reconciler = api.lifecycle, api.reconciler
        self.lifecycle.seconds = 1e9
        server: Any = Server(self)
        permission: Any = Anything()
        self.lifecycle._claims = self.reconciler._claims = server
        self.lifecycle._permission = permission
        self.plugin.begin(self.plugin.hardware.scan())
        self.plugin.work()
        self.finish(api._files.begin())

    def finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Do it all, its threads included."""
        caller.set(9)
        task = self.plugin.loop.create_task(coroutine, name="call of the reconciler")
        self.plugin.loop.settle()
        while jobs := self.jobs(9):
            self.end_of(jobs[0])
        return task.result()

    def jobs(self, claim: int | None = None) -> list[Any]:
        """A claim's, or those of work on the card that has its lock."""
        jobs: list[Any] = self.plugin.jobs
        if claim is not None:
            return [job for job in jobs if not job.of_card and job.claim == claim]
        return [job for job in jobs if job.of_card and job.kind != "gate"]

    def end_of(self, job: Job) -> None:
        self.plugin.jobs.remove(job)
        job.run()
        self.plugin.loop.settle()

    def go_on(self, awaited: str) -> None:
        """What the model has as part of the step before."""
        while (jobs := self.jobs()) and jobs[0].kind != awaited:
            # The model closes all ports of a scrub in one step.
            aside = {"", "look"} if awaited else {"", "look", "close"}
            assert jobs[0].kind in aside, f"{jobs[0].kind}, not {awaited or 'nothing'}"
            self.end_of(jobs[0])
        assert bool(awaited) == bool(jobs), f"{awaited or 'nothing'} is awaited"

    # ------------------------------------------------------------ pods

    def present(self, claim: int) -> set[PodUid]:
        """Pods that kubelet has."""
        return {pod.uid for (mine, _), pod in self.pods.items() if mine == claim and pod.active}

    def call(self, claim: int, coroutine: Coroutine[Any, Any, object]) -> None:
        caller.set(claim)
        task = self.plugin.loop.create_task(coroutine, name=f"call {claim}")
        self.calls[claim] = task
        self.plugin.loop.settle()

    def cancel(self, claim: int) -> None:
        """Kubelet does not wait; what a thread does to a file is done, and nobody hears of it."""
        files = [one for one in self.jobs(claim) if one.name.startswith("CdiFiles.")]
        for job in [one for one in files if not one.working]:
            self.plugin.jobs.remove(job)
            if job.name == "CdiFiles.remove":
                job.run()
            else:  # the claim's file is nobody's any more
                job.future.set_exception(CdiError("no room"))
        task = self.calls.pop(claim, None)
        if task is not None and not task.done():
            task.cancel()
            self.plugin.loop.settle()

    def ended(self, claim: int) -> None:
        """Let what worked for a claim notice that it is over."""
        while jobs := [
            one for one in self.jobs(claim) if one.working or not one.name.startswith("CdiFiles.")
        ]:
            self.end_of(jobs[0])
        for job in [one for one in self.plugin.jobs if one.kind == "gate" and one.claim == claim]:  # type: ignore[attr-defined]
            self.end_of(job)

    def record(self) -> Mapping[ClaimUid, RecordedClaim]:
        """Kubelet's."""
        return {
            uid(n): RecordedClaim(
                uid(n),
                "n",
                f"c{n}",
                frozenset(self.present(n)),
                PREFIX,
                devices,
            )
            for n, devices in self.recorded.items()
        }

    # ------------------------------------------------------------ steps

    def step(self, name: str, x: int, y: int, kind: int) -> None:
        getattr(self, f"step_{name}")(x, y)
        if name != "power_on":
            self.go_on(NEXT[kind])

    def step_power_on(self, _x: int, _y: int) -> None:
        """It is."""

    def step_allocate(self, claim: int, index_and_pod: int) -> None:
        index, number = divmod(index_and_pod, 10)
        self.allocated[claim] = self.devices[index]
        self.pods[claim, number].active = True

    def step_free(self, claim: int, _: int) -> None:
        del self.allocated[claim]

    step_free_by_force = step_free

    def step_join(self, claim: int, _: int) -> None:
        self.pods[claim, 2].active = True

    def step_again(self, claim: int, number: int) -> None:
        self.pods[claim, number].active = True

    def step_prepare(self, claim: int, _: int) -> None:
        self.recorded.setdefault(claim, {})  # it has no devices before it is answered
        self.call(claim, self.lifecycle.prepare(ClaimRef(uid(claim), "n", f"c{claim}")))

    def step_claim_read(self, claim: int, _: int) -> None:
        for _ in range(100):
            if jobs := [one for one in self.jobs(claim) if one.name == "Server._read"]:
                self.end_of(jobs[0])
                break
            self.plugin.loop.pass_time()  # kubelet's record was not read at the first try
        else:
            raise AssertionError("it does not read the claim")
        # What it had under an earlier allocation is withdrawn; to let go of it is another step.
        while self.prepared(claim) and (
            jobs := [one for one in self.jobs(claim) if one.name in WITHHELD]
        ):
            self.end_of(jobs[0])
        if claim not in self.allocated and claim in self.calls:
            assert self.calls.pop(claim).exception() is not None
        if self.prepared(claim):
            self.asks(claim)

    def asks(self, claim: int) -> None:
        """Whether it may have what it asks for, and which image that is."""
        while jobs := [one for one in self.jobs(claim) if one.name in ASKED]:
            self.end_of(jobs[0])

    def prepared(self, claim: int) -> bool:
        owner = self.plugin.ledger.claim_owners.get(uid(claim))
        return owner is not None and self.plugin.ledger.dra.is_prepared(owner)

    def step_leave(self, claim: int, _: int) -> None:
        """It lets go of its only device, and goes on to where it may take the other."""
        (had,) = self.plugin.ledger.claim_owners[uid(claim)].devices
        for _ in range(100):
            if jobs := self.jobs(claim):
                self.end_of(jobs[0])
            else:
                self.plugin.loop.pass_time()  # until it is tried again
            if uid(claim) not in self.plugin.ledger.claim_owners:
                assert had not in self.plugin.ledger.allocations
                return
        raise AssertionError("it does not let go of what it had")

    def step_take(self, claim: int, _: int) -> None:
        for _ in range(100):
            if any(job.kind == "gate" and job.claim == claim for job in self.plugin.jobs):  # type: ignore[attr-defined]
                return
            if jobs := self.jobs(claim):
                self.end_of(jobs[0])
            else:
                self.plugin.loop.pass_time()  # until it is tried again
        raise AssertionError("it does not take its devices")

    def step_begin(self, _card: int, claim: int) -> None:
        self.open_gate(claim)

    def step_look(self, claim: int, _: int) -> None:
        self.asks(claim)
        (job,) = (one for one in self.jobs(claim) if one.kind == "last look")
        self.end_of(job)

    def step_prepared(self, claim: int, _: int) -> None:
        self.step_prepared_lost(claim, _)
        self.recorded[claim] = {device_name(self.allocated_to(claim)): ("fpga",)}

    def allocated_to(self, claim: int) -> DeviceId:
        (device,) = self.plugin.ledger.claim_owners[uid(claim)].devices
        return device

    def step_prepared_lost(self, claim: int, _: int) -> None:
        (job,) = self.jobs(claim)
        assert job.name == "CdiFiles.write"
        self.end_of(job)
        assert self.calls.pop(claim).result()

    def step_kubelet_gives_up(self, claim: int, _: int) -> None:
        self.cancel(claim)

    def step_unprepare(self, claim: int, _: int) -> None:
        self.call(claim, self.lifecycle.unprepare(ClaimRef(uid(claim), "n", f"c{claim}")))
        while self.in_force(claim):
            jobs = [one for one in self.jobs(claim) if one.name in WITHHELD and not one.working]
            self.end_of(jobs[0])
        self.ended(claim)

    def in_force(self, claim: int) -> bool:
        owner = self.plugin.ledger.claim_owners.get(uid(claim))
        return owner is not None and not owner.ended

    def step_unprepared(self, claim: int, _: int) -> None:
        self.step_unprepared_lost(claim, _)
        del self.recorded[claim]

    def step_unprepared_lost(self, claim: int, _: int) -> None:
        while jobs := self.jobs(claim):
            (job,) = jobs
            assert job.name in WITHHELD
            self.end_of(job)
        assert self.calls.pop(claim).result() is None

    def step_end_lost(self, claim: int, _: int) -> None:
        def read(*_: object) -> Mapping[ClaimUid, RecordedClaim]:
            return self.record()

        with (
            mock.patch.object(reconcile, "read_record", read),
            # In the model that is a step of its own.
            mock.patch.object(self.reconciler._files, "learn", mock.AsyncMock()),
        ):
            owner = self.plugin.ledger.claim_owners[uid(claim)]
            self.finish(self.reconciler._end_if_over(owner, self.reconciler._ends.calls[owner.uid]))
        self.ended(claim)

    step_part = step_end_lost

    def step_forget(self, claim: int, _: int) -> None:
        assert self.finish(self.reconciler._ends.forget(uid(claim)))

    def step_record_read(self, _x: int, _y: int) -> None:
        record, calls = self.record(), self.reconciler._ends.calls.copy()
        pods = {pod for one in record.values() for pod in one.pods}
        gone = known_gone(self.plugin.operations.cgroups, pods)
        stale = {each for each, one in record.items() if one.pods and one.pods <= gone}
        ledger = self.plugin.ledger
        self.plugin.call(lambda: ledger.dra.join({n: one.pods for n, one in record.items()}))
        self.plugin.call(
            lambda: self.reconciler._adopt(
                record, stale - self.plugin.ledger.claim_owners.keys(), [self.card]
            )
        )
        self.plugin.call(self.plugin.queue.sync)
        for each, one in record.items():
            self.finish(self.reconciler._part(each, one.pods, calls[each]))

    def step_kubelet_restarts(self, _x: int, _y: int) -> None:
        for claim in tuple(self.calls):
            self.cancel(claim)

    def step_record_lost(self, _x: int, _y: int) -> None:
        self.step_kubelet_restarts(0, 0)
        self.recorded.clear()

    def step_start(self, claim: int, number: int) -> None:
        pod = self.pods[claim, number]
        pod.running = True
        for region in self.regions_of(claim):
            self.rack.slot(region).data.add(uid(claim))
            self.board.memory.add(uid(claim))

    def regions_of(self, claim: int) -> set[RegionId]:
        """To which the nodes in the claim's file lead."""
        (path,) = (self.folder / "cdi").glob(f"*{uid(claim)}.json")
        nodes = set(re.findall(r'"hostPath":"([^"]*)"', path.read_text()))
        return {slot.id for node in nodes if (slot := self.rack.find(os.fspath(node))) is not None}

    def step_stop(self, claim: int, number: int) -> None:
        self.pods[claim, number].running = False

    def step_end(self, claim: int, number: int) -> None:
        self.pods[claim, number].active = self.pods[claim, number].running = False

    def step_scrub(self, _card: int, _: int) -> None:
        if not any(job.kind == "gate" and not job.claim for job in self.plugin.jobs):  # type: ignore[attr-defined]
            self.plugin.call(lambda: self.plugin.queue.add(self.card))
        self.open_gate(0)

    step_pay = step_scrub

    def open_gate(self, claim: int) -> None:
        gates = [one for one in self.plugin.jobs if one.kind == "gate" and one.claim == claim]  # type: ignore[attr-defined]
        self.end_of(gates[-1])

    def step_work(self, _card: int, _: int) -> None:
        self.end_of(self.jobs()[0])

    def step_crash(self, _x: int, _y: int) -> None:
        self.plugin.end()
        self.calls.clear()
        self.begin()

    def step_crash_after(self, _card: int, _: int) -> None:
        self.jobs()[0].run()
        self.step_crash(0, 0)

    # ------------------------------------------------------------ states

    def state(self) -> list[str]:
        """As the model prints it, but for the work that is under way."""
        ledger, said = self.plugin.ledger, []
        for claim in (1, 2, 3):
            owner = ledger.claim_owners.get(uid(claim))
            if owner is None:
                said.append("C000000")
                continue
            (device,) = owner.devices
            index = self.devices.index(device)
            if owner.ended:
                said.append(f"C3{index}0000")
                continue
            prepared = ledger.dra.is_prepared(owner)
            used = ledger.allocations[device].used
            known = bits(ledger.pods_of(owner.devices)) >> 2 * (claim - 1)
            users = {one.pod for one in ledger.dra.tenancies_of_claim(owner.uid) if one.used}
            had = bits(users) >> 2 * (claim - 1)
            file = prepared and any((self.folder / "cdi").glob(f"*{uid(claim)}.json"))
            said.append(f"C{1 + prepared:d}{index}{used:d}{known}{had}{file:d}")
        for region in self.regions:
            record, slot = ledger.record(region), self.rack.slot(region)
            pods = bits({one.pod for one in ledger.tenancies.left(region) if one.used})
            on_it = next((n for n in (1, 2, 3) if slot.afu == image(n)), 0)
            assert on_it or slot.afu == BLANK
            said.append(
                f"R{CONDITIONS.index(record.condition)}-{pods}-{on_it}"
                f"{tenants(slot.data)}{slot.held is not None:d}"
            )
        said.append(f"D{self.card in ledger.memory_clear_pending:d}{tenants(self.board.memory)}")
        return said


def tenants(uids: Any) -> int:
    return sum(1 << (number - 1) for number in (1, 2, 3) if uid(number) in uids)


@contextmanager
def replays(folder: Path) -> Iterator[Replay]:
    made: list[Replay] = []
    plugins: list[Plugin] = []
    construct = Plugin.__init__

    async def to_thread(function: Any, *args: Any, **kwargs: Any) -> object:
        return await start_job(plugins[-1], functools.partial(function, *args, **kwargs))

    def drop(*_: Any) -> Any:
        raise structlog.DropEvent

    def remembered(self: Plugin, *args: Any, **kwargs: Any) -> None:
        plugins.append(self)
        construct(self, *args, **kwargs)

    structlog.configure(processors=[drop], cache_logger_on_first_use=False)
    try:
        with (
            mock.patch("asyncio.to_thread", to_thread),
            mock.patch.object(ledger_world, "_Workers", Gated),
            mock.patch("test_ledger_model.start_job", start_job),
            mock.patch.object(Plugin, "__init__", remembered),
        ):
            made.append(Replay(folder))
            try:
                yield made[0]
            finally:
                made[0].plugin.end()
    finally:
        structlog.reset_defaults()


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_after_each_step_of_a_trace_the_plugin_is_as_the_model_says(trace: Path, tmp_path: Path):
    with replays(tmp_path) as replay:
        for number, line in enumerate(trace.read_text().splitlines(), 1):
            name, x, y, *state, work = line.split()
            try:
                replay.step(name, int(x), int(y), int(work[2]))
                assert replay.state() == state
            except (AssertionError, IndexError, ValueError) as error:
                raise AssertionError(f"{trace.name}:{number}: {line}: {error!r}") from error


def test_the_traces_have_every_kind_of_step():
    lines = [line for trace in TRACES for line in trace.read_text().splitlines()]
    names = {line.split()[0] for line in lines}
    steps = {name.removeprefix("step_") for name in dir(Replay) if name.startswith("step_")}
    assert names | {"pay"} == steps  # random walks hardly come to these


def answered(replay: Replay, claim: int) -> Any:
    """What kubelet's call for a claim comes to, when all threads and clocks go on."""
    task = replay.calls[claim]
    for _ in range(1000):
        if task.done():
            return replay.calls.pop(claim).result()
        go_on(replay)
    raise AssertionError("it is not answered")


def go_on(replay: Replay) -> None:
    if jobs := replay.plugin.jobs:
        replay.end_of(jobs[0])
    else:
        replay.step_record_read(0, 0)
        replay.plugin.loop.pass_time()


def joined(replay: Replay, happens: Any) -> Any:
    """The answer to a call that joins the work of one which kubelet gave up; this is between."""
    replay.step_allocate(1, 1)
    replay.step_prepare(1, 0)
    replay.step_claim_read(1, 0)
    replay.cancel(1)
    (work,) = replay.lifecycle._work.values()
    happens()
    replay.step_prepare(1, 0)
    assert replay.lifecycle._work == {uid(1): work}, "it has joined"
    return answered(replay, 1)


def test_a_call_that_joins_an_earlier_one_is_answered_what_the_claim_has_now(tmp_path: Path):
    with replays(tmp_path) as replay:

        def allocated_anew() -> None:
            replay.step_end(1, 1)
            replay.step_free(1, 0)
            replay.step_allocate(1, 12)

        (device,) = joined(replay, allocated_anew)
        assert device.device == replay.devices[1]
        assert replay.regions_of(1) == {replay.regions[1]}


def test_a_pod_that_came_since_an_earlier_call_read_the_claim_keeps_its_region(tmp_path: Path):
    with replays(tmp_path) as replay:
        joined(replay, lambda: replay.step_join(1, 0))
        for number in (1, 2):
            replay.step_start(1, number)
        replay.step_end(1, 1)
        replay.step_unprepare(1, 0)
        slot = replay.rack.slot(replay.regions[0])
        for _ in range(100):
            go_on(replay)
            assert (slot.afu, slot.data) == (image(1), {uid(1)})
        replay.step_end(1, 2)
        answered(replay, 1)
        assert (slot.afu, slot.data) == (BLANK, set())


def test_two_claims_of_a_pod_that_all_forgot_are_kept_until_it_is_gone(tmp_path: Path):
    """Kubelet's record, the plugin's process and the allocations are lost while the pod runs."""
    with replays(tmp_path) as replay:
        replay.pods[2, 1] = replay.pods[1, 1]
        slots = [replay.rack.slot(region) for region in replay.regions]
        for claim, index in ((1, 0), (2, 1)):
            replay.step_allocate(claim, 10 * index + 1)
            replay.step_prepare(claim, 0)
            assert answered(replay, claim)
            replay.step_start(claim, 1)
        there = [(image(1), {uid(1)}), (BLANK, {uid(2)})]
        assert [(slot.afu, slot.data) for slot in slots] == there
        replay.step_record_lost(0, 0)
        replay.step_crash(0, 0)
        replay.step_record_read(0, 0)
        for claim in (1, 2):
            replay.step_free(claim, 0)
            replay.step_end_lost(claim, 0)
        for _ in range(100):
            go_on(replay)
            assert [(slot.afu, slot.data) for slot in slots] == there
        assert replay.regions_of(1) == {replay.regions[0]}
        replay.step_end(1, 1)
        for claim in (1, 2):
            replay.step_end_lost(claim, 0)
        for _ in range(1000):
            if all((slot.afu, slot.data) == (BLANK, set()) for slot in slots):
                break
            go_on(replay)
        else:
            raise AssertionError("what they had is not scrubbed")
        assert not [*(tmp_path / "cdi").glob("*.json")]


def test_what_a_forgotten_pod_left_is_scrubbed_when_its_claim_lets_go_of_it(tmp_path: Path):
    """Its claim asks for no image: the region reads as blank, and is not."""
    with replays(tmp_path) as replay:
        blank = BLANK_CLAIM
        replay.step_allocate(blank, 1)
        replay.step_prepare(blank, 0)
        assert answered(replay, blank)
        replay.recorded[blank] = {device_name(replay.devices[0]): ("fpga",)}
        replay.step_start(blank, 1)
        replay.step_end(blank, 1)
        replay.step_free(blank, 0)
        replay.step_record_lost(0, 0)
        replay.step_allocate(blank, 12)
        replay.step_prepare(blank, 0)
        slot = replay.rack.slot(replay.regions[0])
        assert slot.data
        (device,) = answered(replay, blank)
        assert device.device == replay.devices[1]
        replay.plugin.work()
        assert not slot.data
