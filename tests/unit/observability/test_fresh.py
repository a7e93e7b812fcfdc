"""Many ask for what is slow to learn: it is learned once, and nobody waits too long."""

import asyncio

import pytest

from fpga_plugin.observability.fresh import Fresh


class Slow:
    """Answers 1, 2, …, each once it may go on."""

    def __init__(self) -> None:
        self.asked = 0
        self.go_on = asyncio.Event()

    async def __call__(self) -> int:
        self.asked += 1
        await self.go_on.wait()
        return self.asked


def test_however_many_ask_it_is_asked_once():
    async def scene():
        slow, fresh = Slow(), Fresh(0, seconds=60.0)
        asking = [asyncio.create_task(fresh.get(slow)) for _ in range(8)]
        await asyncio.sleep(0)
        slow.go_on.set()
        assert await asyncio.gather(*asking) == [1] * 8
        assert await fresh.get(slow) == 1
        assert slow.asked == 1

    asyncio.run(scene())


def test_what_is_old_is_asked_for_again():
    async def scene():
        slow, fresh = Slow(), Fresh(0, seconds=0.0)
        slow.go_on.set()
        assert [await fresh.get(slow) for _ in range(3)] == [1, 2, 3]

    asyncio.run(scene())


def test_who_does_not_wait_has_the_last_answer_and_who_goes_ends_nobody_elses_wait():
    async def scene():
        slow, fresh = Slow(), Fresh(0, seconds=0.0, wait=0.01)
        assert await fresh.get(slow) == 0
        gone, stays = (asyncio.create_task(fresh.get(slow)) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        slow.go_on.set()
        assert await stays == 1
        assert slow.asked == 1

    asyncio.run(scene())


def test_what_goes_wrong_is_told_to_who_asks_and_tried_again():
    async def fails() -> int:
        raise OSError("away")

    async def works() -> int:
        return 1

    async def scene():
        fresh = Fresh(0, seconds=0.0)
        with pytest.raises(OSError, match="away"):
            await fresh.get(fails)
        assert fresh.last == 0
        assert await fresh.get(works) == 1

    asyncio.run(scene())
