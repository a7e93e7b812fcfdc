"""Traces of the checked model (docs/model), replayed step by step on the real ledger and claims.

After each step what the plugin knows and what is on the cards has to be what the model says. A step
of the model ends where the plugin's code waits for a thread, so each thread's end is a step here.
"""

import asyncio
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar
from unittest import mock

import ledger_world
import pytest
import structlog
from doubles.cards import BLANK, REGIONS, WHOLE
from ledger_support import MemoryJournal, doubt_owners, former
from ledger_world import Images, Job, Plugin, Pod, Rack, env_for, make_boards
from repository import ROOT

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.cards.workers import CardWorkers
from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import AfuId, CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.settings.settings import ScrubPolicy

TRACES = sorted((ROOT / "tests/traces/protocol").glob("*.txt"))
CONDITIONS = (Condition.DIRTY, Condition.SCRUBBING, Condition.BLANK, Condition.PROGRAMMED)
BLANK_POD = 2
"""The pod that asks for no bitstream, as in the model."""

KINDS = {
    "CardOperations._may_live": "look",
    "CardOperations.ports.<locals>.open_all": "open",
    "Images.blank.<locals>.<lambda>": "load",
    "scrub": "wipe",
    "CardOperations.clear_memory.<locals>.<lambda>": "clear",
    "Work.program.<locals>.program": "bring",
    "Preparer._bring.<locals>.<lambda>": "bring",
    "ExitStack.close": "close",
    "Gated.lock.<locals>.gate": "gate",
    "afu_ids": "last look",
    "wake_up": "sleep",
}
"""What the ends of threads are in the model; all others are part of the step before them."""

NEXT = ("", "look", "open", "load", "wipe", "clear", "bring", "close")
"""What a card's thread does next, as the model numbers it."""

ASIDE = ("kubelet ", "containers without PreStart")
"""How the names of tasks begin that are neither a call nor work on a card."""

caller: contextvars.ContextVar[int] = contextvars.ContextVar("caller", default=0)


def image(pod: int) -> AfuId:
    return AfuId(f"{pod}" * 32)


def uid(pod: int) -> PodUid:
    return PodUid(f"pod-{pod}")


def asks(number: int, pod: Pod) -> list[AfuId]:
    return [] if number == BLANK_POD else [image(number)] * len(pod.nodes)


RECORDS = -1
"""In place of a pod: what compares kubelet's records (`test_reconcile_model`)."""


def of_card() -> bool:
    """Whether what runs now is work on a card, not the call that waits for it."""
    task = asyncio.current_task()
    return task is not None and not task.get_name().startswith(("call ", *ASIDE))


def asker() -> int:
    """Which pod's call runs now, if it is one."""
    task = asyncio.current_task()
    return RECORDS if task is not None and task.get_name().startswith(ASIDE) else caller.get()


def begun_by() -> int:
    """Which pod's preparation runs now; 0: a scrub."""
    task = asyncio.current_task()
    return 0 if task is None or task.get_name().startswith("release") else caller.get()


async def start_job(plugin: Plugin, function: Callable[[], object]) -> object:
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    job = Job(function, plugin.loop.create_future())
    job.kind = KINDS.get(inner.__qualname__, "")  # type: ignore[attr-defined]
    # The last look belongs to the call, though a task of its own takes it.
    job.of_card = of_card() and job.kind != "last look"  # type: ignore[attr-defined]
    job.pod = begun_by() if job.of_card else asker()  # type: ignore[attr-defined]
    plugin.jobs.append(job)
    return await job.future


class Gated(CardWorkers):
    """The cards' threads; who wants a card's lock waits until the trace lets it."""

    def __init__(self, plugin: Plugin) -> None:
        super().__init__()
        self._plugin = plugin

    async def run(self, card, function, *args, **kwargs):
        return await start_job(self._plugin, functools.partial(function, *args, **kwargs))

    finish = run

    @asynccontextmanager
    async def lock(self, card):
        def gate() -> None:
            """The trace says when."""

        await start_job(self._plugin, gate)
        async with super().lock(card):
            yield


class Replay:
    """One node: a card of two regions whose memory can be cleared, and the plugin."""

    extended = True

    def __init__(self) -> None:
        self.pods: dict[int, Pod] = {}
        self.known: list[Pod] = []
        self.calls: dict[int, asyncio.Task[None]] = {}
        self.rack = Rack(make_boards([(2, True)]), lambda _: None)
        (self.board,) = self.rack.boards.values()
        self.card: CardId = self.board.card.id
        self.regions: list[RegionId] = [region.id for region in self.board.card.regions]
        self.devices = [*map(DeviceId, self.regions), DeviceId(self.card)]
        self.journal = MemoryJournal()
        self.instance = 1
        self.begin()
        self.plugin.kubelet_answers()
        self.plugin.work()

    # ------------------------------------------------------------ the plugin's process

    def begin(self) -> None:
        self.plugin = Plugin(
            self.rack, self.known, Images(), self.journal, scrub=ScrubPolicy.REQUIRED
        )
        self.plugin.begin(self.plugin.hardware.scan())
        self.plugin.work()
        self.report_instance()

    def report_instance(self) -> None:
        self.plugin.kubelet_begins(f"life {self.instance}")

    def jobs(self, *, pod: int | None = None) -> list[Job]:
        """A call's, or those of work on the card that has its lock."""
        if pod is not None:
            return [job for job in self.plugin.jobs if not job.of_card and job.pod == pod]  # type: ignore[attr-defined]
        return [job for job in self.plugin.jobs if job.of_card and job.kind != "gate"]  # type: ignore[attr-defined]

    def end_of(self, job: Job) -> None:
        self.plugin.jobs.remove(job)
        job.run()
        self.plugin.loop.settle()

    def go_on(self, awaited: str) -> None:
        """What the model has as part of the step before."""
        while (jobs := self.jobs()) and jobs[0].kind != awaited:  # type: ignore[attr-defined]
            # The model closes all ports of a scrub in one step.
            aside = {"", "look"} if awaited else {"", "look", "close"}
            assert jobs[0].kind in aside, f"{jobs[0].kind}, not {awaited or 'nothing'}"  # type: ignore[attr-defined]
            self.end_of(jobs[0])
        assert bool(awaited) == bool(jobs), f"{awaited or 'nothing'} is awaited"

    def crash(self) -> None:
        self.plugin.end()
        self.calls.clear()
        doubt_owners(self.journal)  # the model has no other life
        self.begin()

    # ------------------------------------------------------------ containers

    def attach(self, number: int) -> None:
        pod = self.pods[number]
        for region in pod.nodes:
            slot = self.rack.slot(region)
            if not slot.held:
                slot.data.add(pod.uid)
                self.board.memory.add(pod.uid)
                if number in self.ungated:
                    slot.opens.add(pod.uid)

    def stop(self, number: int) -> None:
        self.pods[number].running = False
        self.ungated.discard(number)
        for slot in self.board.slots.values():
            slot.opens.discard(uid(number))

    def learn_owners(self) -> None:
        for pod in self.known:
            for device in pod.devices if pod.active else ():
                if self.plugin.ledger.allocations[device].pod is None:
                    self.plugin.ledger.device_plugin.bind_pod([device], pod.uid)

    def cancel(self, number: int) -> None:
        task = self.calls.pop(number, None)
        if task is not None and not task.done():
            task.cancel()
            self.plugin.loop.settle()

    # ------------------------------------------------------------ steps

    ungated: set[int]

    def step(self, name: str, x: int, y: int, kind: int) -> None:
        getattr(self, f"step_{name}")(x, y)
        if name != "power_on":
            self.go_on(NEXT[kind])

    def step_power_on(self, _x: int, _y: int) -> None:
        self.ungated = set()

    def step_admit(self, number: int, index: int) -> None:
        device, resource = self.devices[index], WHOLE if index == 2 else REGIONS
        try:
            self.plugin.call(lambda: self.plugin.calls.allocate(resource, [device]))
        except RefusedError:
            return
        grants = self.plugin.ledger.allocations[device].grants
        nodes = {region: node for region, grant in grants.items() for node in grant.nodes}
        self.pods[number] = Pod(uid(number), resource, (device,), nodes)
        self.known.append(self.pods[number])

    def step_admit_again(self, number: int, _: int) -> None:
        pod = self.pods[number]
        try:
            self.plugin.call(lambda: self.plugin.calls.allocate(pod.resource, pod.devices))
        except RefusedError:
            pod.active = False

    def step_prestart(self, number: int, _: int) -> None:
        pod = self.pods[number]
        env = env_for(asks(number, pod)) if self.extended else {}
        coroutine = self.plugin.prestarts.serve(pod.resource, pod.devices, env, 30.0)
        caller.set(number)
        task = self.calls[number] = self.plugin.loop.create_task(coroutine, name=f"call {number}")
        self.plugin.loop.settle()
        assert not task.done()

    def step_identify(self, number: int, _: int) -> None:
        while (jobs := self.jobs(pod=number)) and jobs[0].kind != "last look":  # type: ignore[attr-defined]
            self.end_of(jobs[0])

    def step_start(self, number: int, _: int) -> None:
        self.last_looks(number)
        if self.calls.pop(number).exception() is None:
            self.pods[number].running = True
            self.attach(number)

    def step_start_lost(self, number: int, _: int) -> None:
        self.last_looks(number)
        self.calls.pop(number).exception()

    def last_looks(self, number: int) -> None:
        while jobs := self.jobs(pod=number):
            self.end_of(jobs[0])

    def step_prestart_fails(self, number: int, _: int) -> None:
        self.cancel(number)

    step_prestart_late = step_prestart_fails

    def step_attach(self, number: int, _: int) -> None:
        self.attach(number)

    def step_stop(self, number: int, _: int) -> None:
        self.stop(number)

    def step_end(self, number: int, _: int) -> None:
        self.cancel(number)
        self.pods[number].active = False
        self.stop(number)

    def step_end_by_force(self, number: int, _: int) -> None:
        pod = self.pods[number]
        pod.active = False
        if self.plugin.ledger.allocations[pod.devices[0]].pod != pod.uid:
            self.cancel(number)

    def step_start_ungated(self, number: int, _: int) -> None:
        self.pods[number].running = True
        self.ungated.add(number)
        self.attach(number)

    def step_poststop(self, number: int, _: int) -> None:
        pod = self.pods[number]
        self.plugin.call(lambda: self.plugin.calls.poststop(pod.resource, pod.devices))

    def step_deallocate(self, index: int, _: int) -> None:
        device, resource = self.devices[index], WHOLE if index == 2 else REGIONS
        self.plugin.call(lambda: self.plugin.calls.deallocate(resource, [device]))

    def step_prepare(self, _card: int, index: int) -> None:
        self.open_gate(lambda pod: bool(pod) and self.pods[pod].devices == (self.devices[index],))

    def step_scrub(self, _card: int, _: int) -> None:
        if not any(job.kind == "gate" and not job.pod for job in self.plugin.jobs):  # type: ignore[attr-defined]
            self.plugin.call(lambda: self.plugin.queue.add(self.card))
        self.open_gate(lambda pod: not pod)

    step_pay = step_scrub

    def open_gate(self, mine: Callable[[int], bool]) -> None:
        gates = [job for job in self.plugin.jobs if job.kind == "gate" and mine(job.pod)]  # type: ignore[attr-defined]
        self.end_of(gates[-1])

    def step_work(self, _card: int, _: int) -> None:
        self.end_of(self.jobs()[0])

    def step_crash(self, _x: int, _y: int) -> None:
        self.crash()

    step_crash_away = step_crash

    def step_crash_after(self, _card: int, _: int) -> None:
        self.jobs()[0].run()
        self.crash()

    def step_kubelet_restarts(self, _x: int, _y: int) -> None:
        for number in tuple(self.calls):
            self.cancel(number)
        self.instance += 1
        self.report_instance()
        self.plugin.call(self.learn_owners)

    def step_registered(self, _x: int, _y: int) -> None:
        """Nothing changes yet."""

    def step_kubelet_answers(self, _x: int, _y: int) -> None:
        self.plugin.call(self.learn_owners)
        self.plugin.kubelet_answers()

    # ------------------------------------------------------------ states

    def state(self) -> list[str]:
        """As the model prints it, but for the work that is under way."""
        ledger, said = self.plugin.ledger, []
        for device in self.devices:
            claim = ledger.allocations.get(device)
            if claim is None:
                said.append(f"C00000{ledger.pending_poststops.get(device, 0)}")
                continue
            owner = next((n for n in range(4) if uid(n) == claim.pod), 0)
            due = claim.prestarts - claim.poststops
            said.append(
                f"C1{claim.prestart_seen:d}{claim.started:d}{claim.missed_prestart:d}{owner}{due}"
            )
        for region in self.regions:
            record, slot = ledger.record(region), self.rack.slot(region)
            on_it = next((n for n in (1, 2, 3) if slot.afu == image(n)), 0)
            assert on_it or slot.afu == BLANK
            said.append(
                f"R{CONDITIONS.index(record.condition)}{bits(former(ledger, region))}{on_it}"
                f"{bits(slot.data)}{slot.held is not None:d}"
            )
        said.append(f"D{self.card in ledger.memory_clear_pending:d}{bits(self.board.memory)}")
        return said


def bits(pods) -> int:
    return sum(1 << (number - 1) for number in (1, 2, 3) if uid(number) in pods)


R = TypeVar("R", bound=Replay)


@contextmanager
def replays(kind: type[R]) -> Iterator[R]:
    made: list[R] = []

    async def to_thread(function, *args, **kwargs):
        return await start_job(plugins[-1], functools.partial(function, *args, **kwargs))

    def drop(_logger, _method, _event):
        raise structlog.DropEvent

    plugins: list[Plugin] = []
    construct = Plugin.__init__

    def remembered(self, *args, **kwargs) -> None:
        plugins.append(self)
        construct(self, *args, **kwargs)

    structlog.configure(processors=[drop], cache_logger_on_first_use=False)
    try:
        with (
            mock.patch("asyncio.to_thread", to_thread),
            mock.patch.object(ledger_world, "_Workers", Gated),
            mock.patch.object(Plugin, "__init__", remembered),
        ):
            made.append(kind())
            try:
                yield made[0]
            finally:
                made[0].plugin.end()
    finally:
        structlog.reset_defaults()


def play(replay: Replay, trace: Path) -> None:
    """Step by step; raises at the first after which the plugin is not as the model says."""
    for number, line in enumerate(trace.read_text().splitlines(), 1):
        name, x, y, *state, work = line.split()
        try:
            replay.step(name, int(x), int(y), int(work[2]))
            assert replay.state() == state
        except (AssertionError, IndexError) as error:
            raise AssertionError(f"{trace.name}:{number}: {line}: {error}") from error


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_after_each_step_of_a_trace_the_plugin_is_as_the_model_says(trace: Path):
    with replays(Replay) as replay:
        play(replay, trace)


def test_the_traces_have_every_kind_of_step():
    lines = [line for trace in TRACES for line in trace.read_text().splitlines()]
    names = {line.split()[0] for line in lines}
    steps = {name.removeprefix("step_") for name in dir(Replay) if name.startswith("step_")}
    assert names == steps
    before = [(a.split()[-1], b.split()[0]) for a, b in itertools.pairwise(lines)]
    assert {work for work, name in before if name == "work"} >= {
        f"W{kind}{pc}" for kind, pcs in ((1, "1234567"), (2, "1234"), (2, "57")) for pc in pcs
    }
