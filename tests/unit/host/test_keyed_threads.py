"""Calls that hang: whom they hold up, how many threads they take, and what ends with them."""

import asyncio
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from fpga_plugin.errors import NotFinishedError
from fpga_plugin.host.keyed_threads import KeyedThreads, LateError

SOON = 0.05
LONG = 20.0


@contextmanager
def hung():
    """A call that does not end before the block does; it says how often it was made."""
    gate = threading.Event()
    made = []

    def call():
        made.append(threading.get_ident())
        gate.wait(LONG)
        return "at last"

    call.made = made
    call.end = gate.set
    try:
        yield call
    finally:
        gate.set()


def run(story):
    asyncio.run(story())


def test_a_call_gives_what_the_function_gave_or_raised():
    async def story():
        threads = KeyedThreads("t")
        assert await threads.run("a", lambda: 7, seconds=LONG) == 7
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", lambda: 1 // 0, seconds=LONG)

    run(story)


def test_a_key_that_hangs_takes_one_thread_however_often_it_is_asked_for():
    async def story():
        threads = KeyedThreads("t")
        with hung() as call:
            for _ in range(5):
                with pytest.raises(LateError) as late:
                    await threads.run("a", call, seconds=SOON)
                assert late.value.others == ()
            assert len(call.made) == 1
            assert await threads.run("b", lambda: "b", seconds=LONG) == "b"
            call.end()
            await asyncio.wait(late.value.ended)
            assert await threads.run("a", lambda: "a", seconds=LONG) == "a"

    run(story)


def test_a_call_of_a_key_that_is_late_already_fails_at_once_unless_it_says_how_long_it_waits():
    async def story():
        threads = KeyedThreads("t")
        loop = asyncio.get_running_loop()
        with hung() as call:
            with pytest.raises(LateError):
                await threads.run("a", call, seconds=SOON)
            began = loop.time()
            with pytest.raises(LateError) as late:
                await threads.run("a", call, seconds=SOON)
            assert late.value.seconds >= SOON
            with pytest.raises(LateError):
                await threads.run("a", call, seconds=2 * SOON, least=2 * SOON)
            assert loop.time() >= began + 2 * SOON
            assert len(call.made) == 1

    run(story)


def test_a_call_that_waits_for_another_of_its_key_makes_its_own_call_then():
    async def story():
        threads = KeyedThreads("t")
        with hung() as call:
            first = asyncio.create_task(threads.run("a", call, seconds=LONG))
            await asyncio.sleep(0)
            second = asyncio.create_task(threads.run("a", lambda: "mine", seconds=LONG))
            await asyncio.sleep(SOON)
            call.end()
            assert (await first, await second) == ("at last", "mine")

    run(story)


def test_a_call_that_comes_at_the_very_end_of_a_late_one_does_not_stop_the_loop(monkeypatch):
    """The future of the late one is done, and the callbacks of that are still to come."""
    outcomes = []

    async def story():
        threads = KeyedThreads("t")
        loop = asyncio.get_running_loop()
        tell = loop.call_soon_threadsafe

        def then_call() -> None:
            try:
                threads.run("a", lambda: "a", seconds=0).send(None)
            except (LateError, TimeoutError) as error:
                outcomes.append(type(error))

        with hung() as call:
            with pytest.raises(LateError) as late:
                await threads.run("a", call, seconds=SOON)
            monkeypatch.setattr(
                loop, "call_soon_threadsafe", lambda f, *a: tell(lambda: (f(*a), then_call()))
            )
            call.end()
            await asyncio.wait(late.value.ended)
            monkeypatch.undo()
        await asyncio.sleep(SOON)

    def stuck(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(10)
    try:
        run(story)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert outcomes[:1] == [LateError]  # it began its own call, and had no time left


def test_where_all_threads_hang_a_call_names_their_keys_and_the_next_goes_on_when_one_ends():
    async def story():
        threads = KeyedThreads("t", most=2)
        with hung() as one, hung() as two:
            for key, call in (("a", one), ("b", two)):
                with pytest.raises(LateError):
                    await threads.run(key, call, seconds=SOON)
            with pytest.raises(LateError) as late:
                await threads.run("c", lambda: "c", seconds=SOON)
            assert set(late.value.others) == {"a", "b"}
            one.end()
            assert await threads.run("c", lambda: "c", seconds=LONG, least=LONG) == "c"

    run(story)


def test_a_call_that_spares_threads_leaves_them_to_others():
    async def story():
        threads = KeyedThreads("t", most=3)
        with hung() as call:
            with pytest.raises(LateError):
                await threads.run("a", call, seconds=SOON, spare=2)
            with pytest.raises(LateError):
                await threads.run("b", lambda: "b", seconds=SOON, spare=2)
            assert await threads.run("b", lambda: "b", seconds=LONG) == "b"

    run(story)


def test_a_caller_who_is_cancelled_leaves_the_thread_its_key():
    async def story():
        threads = KeyedThreads("t")
        with hung() as call:
            task = asyncio.create_task(threads.run("a", call, seconds=LONG))
            await asyncio.sleep(SOON)
            task.cancel()
            with pytest.raises(LateError):
                await threads.run("a", lambda: "a", seconds=SOON)
            call.end()
            assert await threads.run("a", lambda: "a", seconds=LONG, least=LONG) == "a"

    run(story)


def test_many_keys_are_read_in_one_thread_and_one_that_hangs_holds_up_no_other():
    async def story():
        threads = KeyedThreads("t")
        with hung() as call:
            used = set()

            def read(key):
                used.add(threading.get_ident())
                return call() if key == 3 else key * 10

            others = {key: key * 10 for key in range(1, 9) if key != 3}
            assert await threads.each(range(1, 9), read, seconds=SOON) == (others, {3})
            assert len(used) <= 2
            assert await threads.each(range(1, 9), read, seconds=SOON) == (others, {3})
            assert len(call.made) == 1
            with pytest.raises(LateError):
                await threads.run(3, lambda: 3, seconds=SOON)
            call.end()
            assert await threads.run(3, lambda: 3, seconds=LONG, least=LONG) == 3
            found, late = await threads.each(range(1, 9), read, seconds=LONG)
            assert (len(found), late) == (8, set())

    run(story)


def test_a_key_that_somebody_else_reads_at_the_moment_is_left_out_and_not_late():
    async def story():
        threads = KeyedThreads("t")
        with hung() as call:
            reading = asyncio.create_task(threads.run(1, call, seconds=LONG))
            await asyncio.sleep(0)
            assert await threads.each([1, 2], lambda key: key, seconds=LONG) == ({2: 2}, set())
            call.end()
            await reading

    run(story)


def test_what_a_function_raises_for_one_of_many_keys_is_raised():
    async def story():
        with pytest.raises(ZeroDivisionError):
            await KeyedThreads("t").each([1, 0], lambda key: 1 // key, seconds=LONG)

    run(story)


def test_a_node_that_gives_no_thread_is_no_defect(monkeypatch):
    def none(_thread):
        raise RuntimeError("can't start new thread")

    async def story():
        threads = KeyedThreads("t")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none)
            with pytest.raises(NotFinishedError, match="pids"):
                await threads.run("a", int, seconds=LONG)
            with pytest.raises(NotFinishedError, match="pids"):
                await threads.each(["a"], int, seconds=LONG)
        assert await threads.run("a", int, seconds=LONG) == 0

    run(story)


def test_the_end_of_the_process_waits_for_no_thread():
    program = """
import asyncio, threading
from fpga_plugin.host.keyed_threads import LateError, KeyedThreads

async def story():
    try:
        await KeyedThreads("t").run("a", threading.Event().wait, seconds=0.05)
    except LateError:
        print("late")

asyncio.run(story())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "late\n"
