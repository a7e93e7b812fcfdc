"""The cards' threads: who waits for whom, and what the end of the plugin stops."""

import asyncio
import threading

import pytest

from fpga_plugin.errors import NotFinishedError
from fpga_plugin.ids import CardId
from fpga_plugin.regions.workers import CardWorkers

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


def test_a_cards_thread_ends_when_nobody_holds_its_lock():
    async def use() -> set[CardId]:
        workers = CardWorkers()
        async with workers.lock(CARD):
            first = await workers.run(CARD, threading.current_thread)
            assert await workers.run(CARD, threading.current_thread) is first
        return set(workers._threads)

    assert not asyncio.run(use())
