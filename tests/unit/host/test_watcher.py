"""Files that come, change and go are told, on the watched store of bitstreams."""

import asyncio
import contextlib
import errno
import shutil
import threading
from pathlib import Path
from typing import Self

import pytest
from doubles import LIMIT
from structlog.testing import capture_logs
from test_store import AFU, INTERFACE, OTHER_INTERFACE

from fpga_plugin.bitstreams.watched_names import look_at_store
from fpga_plugin.host import watcher
from fpga_plugin.host.watcher import Look, Watcher


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "store"
    (path / INTERFACE).mkdir(parents=True)
    return path


class StatusContext:
    """A store that is watched, and what the watcher said."""

    def __init__(self, root: Path, **rest) -> None:
        self.root = str(root)
        self.calls: asyncio.Queue = asyncio.Queue()
        self.refusals: list[OSError] = []
        self.watcher = Watcher(self, name="test", **rest)

    def look(self, look: Look) -> None:
        look_at_store(look, self.root, None)

    def changed(self, path) -> None:
        """Only blank bitstreams count here, by their interface id."""
        if path is None or path.endswith("/blank.gbs"):
            self.calls.put_nowait(path and path.partition("/")[0])

    def unwatched(self, error: OSError) -> None:
        self.refusals.append(error)

    async def __aenter__(self) -> Self:
        self.watcher.start()
        await asyncio.wait_for(self.watcher.ready(), 10)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.watcher.close()

    async def one(self):
        """The next call; those that repeat it at once are the same change."""
        call = await asyncio.wait_for(self.calls.get(), 10)
        while not self.calls.empty() and self.calls._queue[0] == call:
            self.calls.get_nowait()
        return call

    async def until(self, wanted) -> None:
        """Leave out what comes before a call."""
        while await self.one() != wanted:
            pass

    async def quiet(self, root: Path) -> None:
        """Check that nothing was reported, by a change after it that is."""
        marker = root / OTHER_INTERFACE
        marker.mkdir(parents=True)
        (marker / "blank.gbs").write_bytes(b"marker")
        assert await self.one() == OTHER_INTERFACE


def watching(root: Path, story) -> None:
    async def run() -> None:
        async with StatusContext(root) as survey:
            await story(survey)

    asyncio.run(run())


def replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(".new")
    temporary.write_bytes(content)
    temporary.rename(path)


def test_a_blank_bitstream_is_reported_when_it_comes_changes_and_goes(root):
    blank = root / INTERFACE / "blank.gbs"

    async def story(survey):
        replace(blank, b"1")
        assert await survey.one() == INTERFACE
        replace(blank, b"2")
        assert await survey.one() == INTERFACE
        with blank.open("r+b") as file:  # in place, the same size
            file.write(b"3")
        assert await survey.one() == INTERFACE
        blank.unlink()
        assert await survey.one() == INTERFACE

    watching(root, story)


def test_files_that_were_there_at_the_start_and_files_of_other_kinds_are_not_reported(root):
    (root / INTERFACE / "blank.gbs").write_bytes(b"1")

    async def story(survey):
        (root / INTERFACE / f"{AFU}.gbs").write_bytes(b"1")
        (root / "sources").mkdir()
        (root / "sources" / "blank.gbs").write_bytes(b"1")
        (root / "README.md").write_text("")
        await survey.quiet(root)

    watching(root, story)


def test_a_directory_that_comes_later_is_seen_with_its_file(root):
    async def story(survey):
        (root / OTHER_INTERFACE).mkdir()
        (root / OTHER_INTERFACE / "blank.gbs").write_bytes(b"1")
        assert await survey.one() == OTHER_INTERFACE
        shutil.rmtree(root / OTHER_INTERFACE)
        assert await survey.one() == OTHER_INTERFACE

    watching(root, story)


def test_a_store_that_comes_later_is_seen_however_it_comes(tmp_path):
    root = tmp_path / "srv" / "intel.com" / "fpga"

    async def story(survey):
        blank = root / INTERFACE / "blank.gbs"
        blank.parent.mkdir(parents=True)
        blank.write_bytes(b"1")
        assert await survey.one() == INTERFACE
        (tmp_path / "srv").rename(tmp_path / "gone")
        assert await survey.one() == INTERFACE
        (tmp_path / "gone").rename(tmp_path / "srv")
        assert await survey.one() == INTERFACE
        shutil.rmtree(root)
        assert await survey.one() == INTERFACE
        staged = tmp_path / "staged"
        (staged / INTERFACE).mkdir(parents=True)
        (staged / INTERFACE / "blank.gbs").write_bytes(b"2")
        staged.rename(root)
        assert await survey.one() == INTERFACE

    watching(root, story)


def test_a_configmap_that_switches_its_data_is_seen(root):
    shutil.rmtree(root / INTERFACE)
    for version in ("1", "2"):
        (root / f"..{version}" / INTERFACE).mkdir(parents=True)
        (root / f"..{version}" / INTERFACE / "blank.gbs").write_text(version)
    (root / "..data").symlink_to("..1")
    (root / INTERFACE).symlink_to(f"..data/{INTERFACE}")

    async def story(survey):
        (root / "..data_tmp").symlink_to("..2")
        (root / "..data_tmp").rename(root / "..data")
        assert await survey.one() == INTERFACE
        shutil.rmtree(root / "..1")
        replace(root / "..2" / INTERFACE / "blank.gbs", b"3")
        assert await survey.one() == INTERFACE

    watching(root, story)


def test_a_linked_store_and_a_linked_file_are_seen_to_change(root, tmp_path):
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    common = root / "common.gbs"
    common.write_bytes(b"1")
    (root / INTERFACE / "blank.gbs").symlink_to("../common.gbs")

    async def story(survey):
        link.unlink()
        link.symlink_to(root)
        assert await survey.one() == INTERFACE
        replace(common, b"2")
        assert await survey.one() == INTERFACE

    watching(link, story)


def test_a_file_that_becomes_readable_is_reported(root):
    blank = root / INTERFACE / "blank.gbs"
    blank.write_bytes(b"1")
    blank.chmod(0)

    async def story(survey):
        blank.chmod(0o644)
        assert await survey.one() == INTERFACE

    watching(root, story)


def test_what_was_lost_with_its_event_is_reported(root):
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 200_000:
        pytest.skip("a queue of this size takes long to overflow")
    one, other = root / INTERFACE / "a", root / INTERFACE / "b"
    one.write_bytes(b"")

    async def story(survey):
        for _ in range(limit // 4 + 1):
            one.rename(other)
            other.rename(one)
        (root / INTERFACE / "blank.gbs").write_bytes(b"1")
        assert await asyncio.wait_for(survey.calls.get(), 60) == INTERFACE

    watching(root, story)


def test_events_beyond_one_turn_of_the_loop_are_not_left_behind(root):
    one, other = root / INTERFACE / "a", root / INTERFACE / "b"
    one.write_bytes(b"")

    async def story(survey):
        # So many that the last ones are read in the first turn, but not taken in it.
        for _ in range(watcher._MAX_EVENTS // 4 + 1):
            one.rename(other)
            other.rename(one)
        (root / INTERFACE / "blank.gbs").write_bytes(b"1")
        assert await survey.one() == INTERFACE

    watching(root, story)


def test_a_file_that_comes_before_its_directory_is_watched_is_reported(root, monkeypatch):
    look = StatusContext.look
    blank = root / OTHER_INTERFACE / "blank.gbs"

    def overtaken(*args):
        look(*args)
        if blank.parent.exists() and not blank.exists():
            blank.write_bytes(b"1")

    monkeypatch.setattr(StatusContext, "look", overtaken)

    async def story(survey):
        blank.parent.mkdir()
        assert await survey.one() == OTHER_INTERFACE

    watching(root, story)


def kernel_watches() -> int:
    """How many watches this process has (proc(5), fdinfo)."""
    count = 0
    for info in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            count += info.read_text().count("inotify wd:")
    return count


async def watches(count: int) -> None:
    """Wait until this process has so many."""
    async with asyncio.timeout(LIMIT):
        while kernel_watches() != count:  # noqa: ASYNC110  # nobody announces it
            await asyncio.sleep(0.01)


def test_watches_of_what_is_gone_are_given_back(root):
    async def story(survey):
        for number in range(5):
            (root / OTHER_INTERFACE).mkdir()
            (root / OTHER_INTERFACE / "blank.gbs").write_bytes(b"1")
            assert await survey.one() == OTHER_INTERFACE
            (root / OTHER_INTERFACE).rename(root / f"old-{number}")
            assert await survey.one() == OTHER_INTERFACE
        replace(root / INTERFACE / "blank.gbs", b"1")  # lets what the kernel says of it arrive
        assert await survey.one() == INTERFACE
        assert kernel_watches() == directories

    directories = len(root.resolve().parts) + 1  # down to the root, and the interface's own
    watching(root, story)


def test_no_call_comes_after_close_even_for_events_that_were_queued(root):
    async def story(survey):
        (root / INTERFACE / "blank.gbs").write_bytes(b"1")
        survey.watcher.close()
        survey.watcher.close()
        async with StatusContext(root) as later:
            await later.quiet(root)
        assert survey.calls.empty()

    watching(root, story)


def test_close_from_within_a_call_ends_the_calls(root):
    (root / OTHER_INTERFACE).mkdir()

    class Once(StatusContext):
        def changed(self, path) -> None:
            super().changed(path)
            self.watcher.close()

    async def run() -> None:
        survey = Once(root)
        async with survey:
            for interface_id in (INTERFACE, OTHER_INTERFACE):
                (root / interface_id / "blank.gbs").write_bytes(b"1")
            await asyncio.wait_for(survey.calls.get(), 10)
            await asyncio.sleep(0.05)
            assert survey.calls.empty()

    asyncio.run(run())


def none_left(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["add_watch", "__init__"])
def test_a_kernel_without_watches_to_give_is_said_once_and_asked_again(root, monkeypatch, what):
    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(watcher.Inotify, what, none_left)
            async with StatusContext(root, retry=0.01) as survey:
                await asyncio.sleep(0.1)
                assert [error.errno for error in survey.refusals] == [errno.ENOSPC]
                assert survey.calls.empty()
                patch.undo()
                await watches(len(root.resolve().parts) + 1)
                (root / INTERFACE / "blank.gbs").write_bytes(b"1")
                assert await survey.one() == INTERFACE

    asyncio.run(run())


@pytest.mark.parametrize("what", ["add_watch", "__init__"])
def test_without_watches_what_differs_is_told_and_nothing_else(root, monkeypatch, what):
    monkeypatch.setattr(watcher.Inotify, what, none_left)
    (root / INTERFACE / "blank.gbs").write_bytes(b"1")

    async def run() -> None:
        async with StatusContext(root, retry=0.01) as survey:
            await asyncio.sleep(0.1)
            assert survey.calls.empty()
            await survey.quiet(root)
            replace(root / INTERFACE / "blank.gbs", b"2")
            assert await survey.one() == INTERFACE

    asyncio.run(run())


def refusing(patch, wanted: str) -> None:
    """The kernel gives no watch for directories of this name."""
    add_watch = watcher.Inotify.add_watch

    def limited(inotify, path, mask):
        if str(path).endswith(wanted):
            none_left()
        return add_watch(inotify, path, mask)

    patch.setattr(watcher.Inotify, "add_watch", limited)


def test_a_directory_that_the_kernel_does_not_watch_takes_no_other_with_it(root, monkeypatch):
    staged = root / "staged"
    staged.mkdir()
    (staged / "blank.gbs").write_bytes(b"1")

    async def run() -> None:
        async with StatusContext(root) as survey:
            with monkeypatch.context() as patch:
                refusing(patch, OTHER_INTERFACE)
                staged.rename(root / OTHER_INTERFACE)
                assert await survey.one() == OTHER_INTERFACE
                assert [error.errno for error in survey.refusals] == [errno.ENOSPC]
                (root / INTERFACE / "blank.gbs").write_bytes(b"1")
                assert await survey.one() == INTERFACE

    asyncio.run(run())


def test_a_directory_that_the_kernel_does_not_watch_is_looked_at_until_it_does(root, monkeypatch):
    async def run() -> None:
        async with StatusContext(root, retry=0.01) as survey:
            with monkeypatch.context() as patch:
                refusing(patch, OTHER_INTERFACE)
                (root / OTHER_INTERFACE).mkdir()
                await asyncio.sleep(0.05)
                (root / OTHER_INTERFACE / "blank.gbs").write_bytes(b"1")
                assert await survey.one() == OTHER_INTERFACE
            await watches(len(root.resolve().parts) + 2)
            assert len(survey.refusals) == 1

    asyncio.run(run())


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_directory_that_cannot_be_listed_stays_watched_with_what_is_in_it(
    root, monkeypatch, code
):
    (root / INTERFACE / "blank.gbs").write_bytes(b"1")
    listdir = watcher.os.listdir

    def failing(path):
        if str(path) == str(root.resolve()):
            raise OSError(code, "refused", path)
        return listdir(path)

    async def run() -> None:
        async with StatusContext(root, retry=0.2) as survey:
            before = kernel_watches()
            with monkeypatch.context() as patch:
                patch.setattr(watcher.os, "listdir", failing)
                (root / OTHER_INTERFACE).mkdir()
                await asyncio.sleep(0.1)
                assert [error.errno for error in survey.refusals] == [code]
                assert survey.calls.empty()
                assert kernel_watches() == before
            await watches(before + 1)

    asyncio.run(run())


def test_a_file_that_comes_before_its_directory_is_watched_anew_is_reported(root, monkeypatch):
    """The numbers of an instance's watches begin at one again."""
    blank = root / OTHER_INTERFACE / "blank.gbs"
    watch = Look.watch
    mended = threading.Event()

    def overtaken(look, inotify):
        if mended.is_set() and not blank.parent.exists():
            blank.parent.mkdir()
        return watch(look, inotify)

    async def run() -> None:
        async with StatusContext(root, retry=0.1) as survey:
            with monkeypatch.context() as patch:
                patch.setattr(watcher.Inotify, "get", none_left)  # the instance breaks
                (root / INTERFACE / "blank.gbs").write_bytes(b"1")
                await survey.until(INTERFACE)
            mended.set()
            async with asyncio.timeout(LIMIT):
                while not blank.parent.exists():  # noqa: ASYNC110  # nobody announces it
                    await asyncio.sleep(0.01)
            replace(blank, b"1")
            await survey.until(OTHER_INTERFACE)

    monkeypatch.setattr(Look, "watch", overtaken)
    asyncio.run(run())


def no_thread(*_args) -> None:
    raise RuntimeError("can't start new thread")


def test_a_first_look_without_a_thread_holds_up_nobody_and_is_said_once(root, monkeypatch):
    async def run() -> None:
        async with StatusContext(root, retry=0.01) as survey:  # it is ready
            await asyncio.sleep(0.1)
            assert survey.calls.empty()
            patch.undo()
            assert await survey.one() is None
            (root / INTERFACE / "blank.gbs").write_bytes(b"1")
            assert await survey.one() == INTERFACE

    with monkeypatch.context() as patch, capture_logs() as lines:
        patch.setattr(threading.Thread, "start", no_thread)
        asyncio.run(run())
    assert [line["event"] for line in lines] == ["watching files failed, and is tried again"]


def test_a_look_without_a_thread_does_not_end_the_watching(root, monkeypatch):
    async def run() -> None:
        async with StatusContext(root, retry=0.05) as survey:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_thread)
                (root / INTERFACE / "blank.gbs").write_bytes(b"1")
                await asyncio.sleep(0.02)
            assert await survey.one() == INTERFACE
            replace(root / INTERFACE / "blank.gbs", b"2")
            assert await survey.one() == INTERFACE

    asyncio.run(run())


def test_what_inotify_does_not_see_is_found_when_it_is_time_to_look(root, monkeypatch):
    monkeypatch.setattr(Watcher, "_matters", lambda *_: False)

    async def run() -> None:
        async with StatusContext(root, recheck=0.01) as survey:
            (root / INTERFACE / "blank.gbs").write_bytes(b"1")
            assert await survey.one() == INTERFACE
            await asyncio.sleep(0.05)
            assert survey.calls.empty()

    asyncio.run(run())


def test_a_file_system_that_does_not_answer_holds_up_nobody_and_is_watched_when_it_does(
    root, monkeypatch
):
    monkeypatch.setattr(watcher, "ANSWER_SECONDS", 0.05)
    answer = threading.Event()
    look = StatusContext.look

    def hang(*args):
        answer.wait()
        look(*args)

    monkeypatch.setattr(StatusContext, "look", hang)

    async def story(survey):
        assert [type(error) for error in survey.refusals] == [TimeoutError]
        await asyncio.sleep(0.1)
        assert survey.calls.empty()
        answer.set()
        assert await survey.one() is None
        (root / INTERFACE / "blank.gbs").write_bytes(b"1")
        assert await survey.one() == INTERFACE
        assert len(survey.refusals) == 1

    try:
        watching(root, story)
    finally:
        answer.set()


def test_a_close_while_the_file_system_hangs_closes_nothing_that_its_thread_uses(root, monkeypatch):
    """The number of a descriptor that is closed becomes that of the next file."""
    monkeypatch.setattr(watcher, "ANSWER_SECONDS", 0.05)
    answer, done = threading.Event(), threading.Event()
    look = StatusContext.look
    added = []

    def hang(*args):
        answer.wait()
        look(*args)

    def watch(*args):
        try:
            added.append(add_watch(*args))
        finally:
            done.set()
        return added[-1]

    add_watch = watcher.Inotify.add_watch
    monkeypatch.setattr(StatusContext, "look", hang)
    monkeypatch.setattr(watcher.Inotify, "add_watch", watch)

    async def story(survey):
        survey.watcher.close()
        await asyncio.sleep(0.05)
        answer.set()
        assert await asyncio.to_thread(done.wait, 10)
        assert added
        await watches(0)
        assert survey.calls.empty()

    try:
        watching(root, story)
    finally:
        answer.set()
