"""Looks at the same instants."""

import asyncio

import pytest

from fpga_plugin.host.ticks import next_tick, tick


def in_a_loop(steps, *, clock):
    async def main():
        asyncio.get_running_loop().time = lambda: clock[0]
        return steps()

    return asyncio.run(main())


def test_all_count_from_when_the_first_began():
    clock = [1000.25]

    def steps():
        assert next_tick(30) == 1030.25
        clock[0] = 1007.0
        assert next_tick(30) == 1030.25
        assert next_tick(10) == 1010.25
        assert next_tick(60) == 1060.25
        clock[0] = 1031.0
        return next_tick(30), next_tick(10), next_tick(60)

    assert in_a_loop(steps, clock=clock) == (1060.25, 1040.25, 1060.25)


@pytest.mark.parametrize("early", [0.0, 1e-9, 1e-4])
def test_who_was_just_woken_is_not_woken_again_at_once(early):
    clock = [7.3]

    def steps():
        first = next_tick(0.7)
        clock[0] = first - early
        return first, next_tick(0.7)

    first, second = in_a_loop(steps, clock=clock)
    assert second - first == pytest.approx(0.7)


def test_another_loop_counts_anew():
    assert in_a_loop(lambda: next_tick(30), clock=[5.0]) == 35.0
    assert in_a_loop(lambda: next_tick(30), clock=[11.0]) == 41.0


def test_a_wait_that_is_cancelled_leaves_no_timer_behind():
    async def main():
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(tick(1000))
        await asyncio.sleep(0)
        assert loop._scheduled
        task.cancel()
        await asyncio.wait([task])
        return [timer for timer in loop._scheduled if not timer.cancelled()]

    assert asyncio.run(main()) == []
