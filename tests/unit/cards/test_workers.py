"""The cards' threads: who waits for whom, and what the end of the plugin stops."""

import asyncio
import contextlib
import gc
import threading
from unittest import mock

import pytest
from doubles import LIMIT

from fpga_plugin.cards.workers import CardWorkers
from fpga_plugin.errors import HardwareError, NotFinishedError
from fpga_plugin.ids import CardId, RegionId

CARD, OTHER = CardId("0000-3b-00.0"), CardId("0000-5e-00.0")


def test_another_card_does_not_wait_for_what_runs_on_a_card():
    async def look() -> None:
        workers, end = CardWorkers(), threading.Event()
        async with workers.lock(CARD):
            work = asyncio.create_task(workers.run(CARD, end.wait))
            queued = asyncio.create_task(workers.run(CARD, int))
            try:
                assert await workers.run(OTHER, lambda: 2) == 2
                assert not work.done()
                assert not queued.done()
            finally:
                end.set()
            assert await work
            await queued

    asyncio.run(asyncio.wait_for(look(), 60))


def test_an_ending_plugin_begins_no_new_work_and_closes_what_is_open():
    async def end() -> None:
        workers = CardWorkers()
        called: list[str] = []
        workers.close()
        with pytest.raises(NotFinishedError, match="ending"):
            await workers.run(CARD, called.append, "begun")
        await workers.finish(CARD, called.append, "given back")
        assert called == ["given back"]

    asyncio.run(end())


def test_a_card_is_stuck_by_the_call_that_runs_longest_and_until_it_ends():
    """Another one that began later, or the end of the task that waits for it, change nothing."""

    async def look() -> None:
        workers, end = CardWorkers(), threading.Event()
        long = asyncio.create_task(workers.run(CARD, end.wait))
        await asyncio.sleep(0.1)
        with mock.patch("fpga_plugin.cards.workers.WORK_SECONDS", 0.05):
            try:
                long.cancel()
                await workers.run(CARD, int)
                assert workers.stuck(CARD)
                assert not workers.stuck(OTHER)
            finally:
                end.set()
            with pytest.raises(asyncio.CancelledError):
                await long
            assert not workers.stuck(CARD)

    asyncio.run(asyncio.wait_for(look(), 60))


def test_a_cards_thread_ends_with_its_call():
    async def use() -> None:
        workers = CardWorkers()
        async with workers.lock(CARD):
            thread = await workers.run(CARD, threading.current_thread)
            await asyncio.to_thread(thread.join, LIMIT)
            assert not thread.is_alive()

    asyncio.run(use())


def test_a_successor_is_told_of_every_pr_in_flight_until_it_ends():
    """It waits for these of a process that dies: the kernel ends such a PR (invariant 9)."""
    told: list[frozenset[RegionId]] = []
    workers = CardWorkers(told.append)
    one, two = RegionId(f"{CARD}-p0"), RegionId(f"{OTHER}-p0")
    with workers.in_flight(one):
        assert told[-1:] == [{one}]
        with contextlib.suppress(HardwareError), workers.in_flight(two):
            assert told[-1] == {one, two}
            raise HardwareError("the PR failed")
        assert told[-1] == {one}
    assert told[-1] == frozenset()
    with CardWorkers().in_flight(one):
        """Nobody has to be told."""


def test_a_failure_that_nobody_waits_for_is_no_complaint_of_asyncio():
    """The caller was cancelled and is told so; the log shows no error without a device."""
    complaints: list[object] = []

    async def use() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, of: complaints.append(of))
        workers, began, end = CardWorkers(), threading.Event(), threading.Event()

        def fail() -> None:
            began.set()
            assert end.wait(LIMIT)
            raise HardwareError("the card did not answer")

        task = asyncio.create_task(workers.run(CARD, fail))
        assert await asyncio.to_thread(began.wait, LIMIT)
        task.cancel()
        await asyncio.sleep(0)
        end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(use())
    gc.collect()
    assert not complaints
