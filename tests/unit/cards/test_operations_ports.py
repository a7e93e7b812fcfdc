"""Ports that are held for a moment are closed again, whatever becomes of who held them."""

import asyncio
import threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from doubles import LIMIT
from doubles.cards import make_card

from fpga_plugin.cards.actions import CardActions
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.cards.workers import CardWorkers
from fpga_plugin.errors import NotFinishedError, PortInUseError

CARD = make_card(0)


class Backend:
    """Opens a port when the test lets it, and counts those that are open."""

    def __init__(self):
        self.opening, self.closing = threading.Event(), threading.Event()
        self.go_on = threading.Event()
        self.slow = "open"
        self.fails = False
        self.open = []

    @contextmanager
    def open_port(self, _card, region):
        if self.slow == "open":
            self.opening.set()
            assert self.go_on.wait(LIMIT)
        if self.fails and self.open:
            raise PortInUseError("somebody has it open")
        self.open.append(region.id)
        try:
            yield object()
        finally:
            if self.slow == "close":
                self.closing.set()
                assert self.go_on.wait(LIMIT)
            self.open.remove(region.id)

    def numbers(self, region):
        return {}


def make_bench():
    backend, workers = Backend(), CardWorkers()
    ledger = SimpleNamespace(
        returns=Counter(),
        cards={CARD.id: CARD},
        problems={},
        drained={CARD.id},
        rebinding=set(),
        unreconciled=frozenset(),
        allocations_on=lambda _: (),
        record=lambda _: SimpleNamespace(condition="blank", reason=""),
        hardware=SimpleNamespace(numbered=lambda _: None),
        tenancies=SimpleNamespace(left=lambda _: []),
        obstacles=SimpleNamespace(first=lambda *_: None),
        strangers=lambda _: [],
    )
    operations = CardOperations(
        ledger=ledger, backend=backend, blanks=None, workers=workers, cgroups=None, observer=None
    )
    return operations, backend


async def reached(event):
    assert await asyncio.to_thread(event.wait, 20)


async def cancelled_while_the_thread_works(task, operations, backend, *, times):
    """Cancel a task, see that it keeps the card's lock for as long as the thread works."""
    for _ in range(times):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        assert operations.workers.locked(CARD.id)
    backend.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.open == []
    assert not operations.workers.locked(CARD.id)


async def hold(operations, inside=lambda: asyncio.sleep(0)):
    async with operations.workers.lock(CARD.id), operations.ports(CARD, CARD.regions):
        await inside()


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("slow", ["open", "close"])
def test_ports_of_a_task_that_is_cancelled_are_closed(slow, times):
    async def story():
        operations, backend = make_bench()
        backend.slow = slow
        task = asyncio.create_task(hold(operations))
        await reached(backend.opening if slow == "open" else backend.closing)
        await cancelled_while_the_thread_works(task, operations, backend, times=times)

    asyncio.run(story())


@pytest.mark.parametrize("went", [False, True])
def test_numbers_of_a_card_that_went_while_its_ports_opened_are_not_written(went):
    """They may be those of the card that is there now (invariant 10)."""

    async def story():
        operations, backend = make_bench()
        backend.slow, noted = "", []
        operations.ledger.hardware.numbered = noted.append

        def numbers(_region):
            operations.ledger.returns[CARD.id] += went
            return {}

        backend.numbers = numbers
        await hold(operations)
        assert len(noted) == (0 if went else 1)

    asyncio.run(story())


def test_ports_of_a_task_that_is_cancelled_while_it_holds_them_are_closed():
    async def story():
        operations, backend = make_bench()
        backend.slow = ""
        holds = asyncio.Event()

        async def inside():
            holds.set()
            await asyncio.sleep(20)

        task = asyncio.create_task(hold(operations, inside))
        async with asyncio.timeout(20):
            await holds.wait()
        assert len(backend.open) == len(CARD.regions)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.open == []

    asyncio.run(story())


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_of_ports_that_cannot_all_be_had_none_is_kept_by_who_is_cancelled():
    async def story():
        operations, backend = make_bench()
        backend.fails = True
        task = asyncio.create_task(hold(operations))
        await reached(backend.opening)
        await cancelled_while_the_thread_works(task, operations, backend, times=1)

    asyncio.run(story())


class _Port:
    """Closed by nobody but who holds it."""

    def __init__(self, opened, region):
        self.opened, self.region = opened, region
        opened.append(region)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opened.remove(self.region)


def no_thread(_thread):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_ports_are_closed_though_no_thread_can_be_started(monkeypatch, when):
    """Else they would be in use until the process ends. The work on them is tried again."""

    async def story():
        operations, backend = make_bench()
        backend.open_port = lambda _card, region: _Port(backend.open, region.id)

        async def inside():
            assert len(backend.open) == len(CARD.regions)
            patch.setattr(threading.Thread, "start", no_thread)
            await operations.workers.run(CARD.id, int)

        with monkeypatch.context() as patch:
            if when == "before":
                patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(NotFinishedError, match="no thread"):
                await hold(operations, inside)
        assert backend.open == []
        await hold(operations)

    asyncio.run(story())


def test_a_call_that_runs_out_of_time_while_a_port_opens_leaves_none_open():
    """`card drain` on a connection whose time is up, and on a plugin that ends."""

    async def story():
        operations, backend = make_bench()
        recovery = SimpleNamespace(due=lambda _: False, unask=lambda _: None)
        actions = CardActions(operations, recovery, None)
        operations.ledger.hardware.set_drained = lambda *_, **__: None

        async def drain():
            async with asyncio.timeout(None) as scope:
                scopes.append(scope)
                await actions.drain(CARD.id)

        scopes = []
        task = asyncio.create_task(drain())
        await reached(backend.opening)
        scopes[0].reschedule(0)
        for _ in range(5):
            await asyncio.sleep(0)
        backend.go_on.set()
        with pytest.raises(TimeoutError):
            await task
        assert backend.open == []
        assert not operations.workers.locked(CARD.id)

    asyncio.run(story())


def test_an_exception_of_the_threads_function_is_raised():
    async def story():
        workers = CardWorkers()
        with pytest.raises(ZeroDivisionError):
            await workers.run(CARD.id, lambda: 1 // 0)

    asyncio.run(story())
