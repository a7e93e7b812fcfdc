"""The work queue of cards: each card by one task at a time, and none before kubelet was heard."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from ledger_world import StillLoop

from fpga_plugin.allocation.queue import CardQueue, Outcome
from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import CardId

CARD, OTHER = CardId("0000-10-00.0"), CardId("0000-11-00.0")


class World:
    """A queue on a clock that stands, and its worker, which looks at cards as a script says."""

    def __init__(self) -> None:
        self.loop = StillLoop()
        self.queue = CardQueue(interval=0.3)
        self.queue.start(self)
        self.script: list[Outcome | Exception] = []
        self.looks: list[CardId] = []
        self.times: list[float] = []
        self.held: asyncio.Future[None] | None = None

    async def work(self, card: CardId) -> Outcome:
        self.looks.append(card)
        self.times.append(self.loop.time())
        if self.held is not None:
            await self.held
        outcome = self.script.pop(0) if self.script else Outcome.NOTHING
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def call(self, *functions: Callable[[], object]) -> None:
        for function in functions:
            self.loop.call_soon(function)
        self.loop.settle()

    def sync(self) -> None:
        self.call(self.queue.sync)

    def add(self, card: CardId = CARD) -> None:
        self.call(lambda: self.queue.add(card))

    def pass_time(self, times: int) -> None:
        for _ in range(times):
            self.loop.pass_time()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.loop.create_task(made.queue.close())
    made.loop.settle()
    assert not asyncio.all_tasks(made.loop)
    assert not made.loop.pass_time(), "a timer is left"
    made.loop.close()


def test_what_was_added_before_kubelet_was_heard_is_looked_at_once_it_was(world: World):
    world.add()
    world.add(OTHER)
    assert not world.looks
    world.sync()
    assert sorted(world.looks) == [CARD, OTHER]


def test_each_sync_looks_at_every_card_that_was_ever_added(world: World):
    world.sync()
    world.add()
    world.call(world.queue.unsync)
    world.add(OTHER)
    assert world.looks == [CARD]
    world.sync()
    assert sorted(world.looks) == [CARD, CARD, OTHER]


def test_a_card_is_looked_at_by_one_task_and_once_more_when_it_was_added_meanwhile(world: World):
    world.sync()
    world.held = world.loop.create_future()
    for _ in range(3):
        world.add()
    assert world.looks == [CARD]
    assert world.queue.busy(CARD)
    world.call(lambda: world.held.set_result(None))
    assert world.looks == [CARD, CARD]
    assert not world.queue.busy(CARD)


def test_a_card_on_which_something_was_done_is_looked_at_until_nothing_is_left(world: World):
    world.script = [Outcome.DONE, Outcome.DONE]
    world.sync()
    world.add()
    assert len(world.looks) == 3


def test_a_card_that_waits_is_looked_at_ever_less_often_up_to_the_interval(world: World):
    world.script = [Outcome.WAIT] * 4 + [Outcome.DONE, Outcome.WAIT]
    world.sync()
    world.add()
    world.pass_time(5)
    waits = [b - a for a, b in zip(world.times, world.times[1:], strict=False)]
    expected = pytest.approx([0.1, 0.2, 0.3, 0.3, 0.0, 0.1], rel=0.25)
    assert waits == expected, "what was done begins again"


def test_a_card_that_waits_is_looked_at_at_once_when_it_is_added(world: World):
    world.script = [Outcome.WAIT]
    world.sync()
    world.add()
    world.add()
    assert world.times == [0.0, 0.0]


def test_what_cannot_be_done_now_is_tried_again(world: World):
    world.script = [RefusedError("the disk is full")]
    world.sync()
    world.add()
    world.pass_time(1)
    assert world.times == pytest.approx([0.0, 0.1], rel=0.25)


def test_an_unexpected_error_ends_the_task_and_the_card_may_be_added_again(world: World):
    world.script = [ValueError("a defect")]
    world.sync()
    world.add()
    assert not world.queue.busy(CARD)
    world.add()
    assert len(world.looks) == 2


def test_another_kubelet_stops_what_waits(world: World):
    world.script = [Outcome.WAIT] * 9
    world.sync()
    world.add()
    world.call(world.queue.unsync)
    world.pass_time(1)
    assert len(world.looks) == 1
    assert not world.queue.busy(CARD)


def test_two_lives_of_kubelet_differ_though_both_are_heard(world: World):
    """Work that began in the one must not be believed in the other."""
    world.sync()
    life = world.queue.instance
    world.call(world.queue.unsync)
    world.sync()
    assert world.queue.instance != life


def test_a_card_that_is_added_before_there_is_a_worker_waits_for_one(world: World):
    queue = CardQueue(interval=0.3)
    queue.sync()
    queue.add(CARD)
    queue.start(world)
    world.call(queue.sync)
    assert world.looks == [CARD]


def test_the_end_of_a_queue_with_nothing_to_do_is_no_error(world: World):
    world.sync()
    world.call(lambda: world.queue.add_later(CARD, 1.0))
    world.idle = True
    world.pass_time(1)
    ending = world.loop.create_task(world.queue.close())
    world.loop.settle()
    assert ending.result() is None


def test_a_card_that_is_added_later_is_looked_at_then(world: World):
    world.sync()
    world.call(lambda: world.queue.add_later(CARD, 2.0), lambda: world.queue.add_later(CARD, 1.0))
    world.pass_time(2)
    assert world.times == [1.0, 2.0]


def test_the_end_waits_for_work_that_runs_and_begins_none(world: World):
    world.script = [Outcome.WAIT]
    world.held = world.loop.create_future()
    world.sync()
    world.add()
    world.call(lambda: world.queue.add_later(OTHER, 1.0))
    ending = world.loop.create_task(world.queue.close())
    world.loop.settle()
    assert not ending.done()
    world.call(lambda: world.held.set_result(None))
    assert ending.done()
    world.add(OTHER)
    world.pass_time(1)
    assert world.looks == [CARD]
