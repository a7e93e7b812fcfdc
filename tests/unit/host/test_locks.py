"""Locks: one plugin a node, and a successor that waits exactly as long as it should."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fpga_plugin.errors import FpgaPluginError, LockHeldError
from fpga_plugin.host.locks import NodeLocks, acquire_locks
from fpga_plugin.ids import RegionId

REGION = RegionId("0000-3b-00.0-p0")


class Dirs:
    def __init__(self, root: Path) -> None:
        self.state = root / "state"
        self.kubelet = root / "kubelet"
        self.state.mkdir(mode=0o700)
        self.kubelet.mkdir()
        self.state_lock = self.state / "lock"
        self.kubelet_lock = self.kubelet / "fpga-plugin" / "lock"


class Time:
    """Time that passes only while a successor sleeps; `at` has what happens when."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.begin = self.now
        self.at: list[tuple[float, Callable[[], None]]] = []

    @property
    def passed(self) -> float:
        return self.now - self.begin

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        assert seconds >= 0.05, "polls no faster than every 50 ms"
        self.now += seconds
        for when, event in list(self.at):
            if self.passed >= when:
                self.at.remove((when, event))
                event()


@pytest.fixture
def dirs(tmp_path):
    return Dirs(tmp_path)


@pytest.fixture
def time():
    return Time()


def acquire(dirs: Dirs, time: Time | None = None) -> NodeLocks:
    time = time or Time()
    return asyncio.run(
        acquire_locks(str(dirs.state), str(dirs.kubelet), clock=time.clock, sleep=time.sleep)
    )


def test_both_locks_are_taken_and_the_sub_directory_is_made(dirs):
    locks = acquire(dirs)
    for path in (dirs.state_lock, dirs.kubelet_lock):
        assert json.loads(path.read_text()) == {"pid": os.getpid(), "programming": []}
    locks.release()
    locks.release()
    acquire(dirs).release()


def test_a_missing_state_directory_is_made(dirs):
    dirs.state.rmdir()
    acquire(dirs).release()
    assert dirs.state.stat().st_mode & 0o777 == 0o700


ALONE = "the state directory is not the plugin's alone"


def acquired_with_mode(dirs, mode: int) -> tuple[int, list[str]]:
    """The directory's mode afterwards, and the reasons that were logged for leaving it."""
    dirs.state.chmod(mode)
    with capture_logs() as logs:
        acquire(dirs).release()
    reasons = [entry["reason"] for entry in logs if entry["event"] == ALONE]
    return dirs.state.stat().st_mode & 0o7777, reasons


def test_a_state_directory_as_kubelet_makes_it_is_closed_to_others(dirs):
    (dirs.state / "verified").mkdir()
    for name in ("lock", "journal.sqlite3", "journal.sqlite3-wal"):
        (dirs.state / name).touch()
    assert acquired_with_mode(dirs, 0o755) == (0o700, [])


def test_a_directory_that_serves_others_too_keeps_its_mode_and_is_told(dirs):
    (dirs.state / "containerd").mkdir()
    mode, (reason,) = acquired_with_mode(dirs, 0o755)
    assert (mode, reason) == (
        0o755,
        "others may look into it, and 'containerd' in it is not the plugin's",
    )


def test_a_directory_for_all_users_keeps_its_mode_and_is_told(dirs):
    mode, (reason,) = acquired_with_mode(dirs, 0o1777)
    assert (mode, reason) == (0o1777, "others may look into it, and it is meant for all users")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory away")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_directory_of_another_user_is_left_as_it_is_and_told(dirs, mode: int):
    os.chown(dirs.state, 12345, 12345)
    left, (reason,) = acquired_with_mode(dirs, mode)
    assert (left, reason) == (mode, "user 12345 owns it, who can replace the journal")


def test_a_second_plugin_is_refused_after_ten_seconds(dirs, time):
    locks = acquire(dirs)
    with pytest.raises(LockHeldError) as caught:
        acquire(dirs, time)
    assert 10 <= time.passed < 10.1
    assert str(dirs.state_lock) in caught.value.message
    assert f"pid {os.getpid()}" in caught.value.message
    locks.release()


def test_another_state_directory_does_not_make_a_second_plugin(dirs, time, tmp_path):
    locks = acquire(dirs)
    other = tmp_path / "other"
    other.mkdir()
    dirs.state = other
    with pytest.raises(LockHeldError, match=str(dirs.kubelet_lock)):
        acquire(dirs, time)
    assert 10 <= time.passed < 10.1
    # The first of the two locks was let go again.
    locks.release()
    acquire(dirs).release()


def test_a_successor_goes_on_as_soon_as_the_locks_are_free(dirs, time):
    locks = acquire(dirs)
    time.at.append((3, locks.release))
    acquire(dirs, time).release()
    assert 3 <= time.passed < 3.1


def test_a_successor_waits_longer_for_a_pr_in_flight_and_says_why(dirs, time):
    locks = acquire(dirs)
    locks.set_programming({REGION})
    time.at.append((60, locks.release))
    with capture_logs() as logs:
        acquire(dirs, time).release()
    assert 60 <= time.passed < 60.1
    waiting = [log for log in logs if log["event"].startswith("waiting")]
    assert 6 <= len(waiting) <= 20
    for log in waiting:
        assert log["programming"] == [REGION]
        assert "programming" in log["reason"]


def test_a_successor_gives_up_ten_seconds_after_the_pr(dirs, time):
    locks = acquire(dirs)
    locks.set_programming({REGION})
    time.at.append((30, lambda: locks.set_programming(())))
    with pytest.raises(LockHeldError):
        acquire(dirs, time)
    assert 39.9 <= time.passed < 40.2
    locks.release()


def test_a_successor_waits_two_minutes_at_most(dirs, time):
    locks = acquire(dirs)
    locks.set_programming({REGION})
    with pytest.raises(LockHeldError, match=REGION):
        acquire(dirs, time)
    assert 120 <= time.passed < 120.1
    locks.release()


def test_the_note_of_a_dead_holder_keeps_nobody_waiting(dirs, time):
    locks = acquire(dirs)
    locks.set_programming({REGION})
    locks.release()
    again = acquire(dirs, time)
    assert time.passed == 0
    assert json.loads(dirs.state_lock.read_text())["programming"] == []
    again.release()


def test_a_shorter_note_replaces_a_longer_one(dirs):
    locks = acquire(dirs)
    locks.set_programming({RegionId(f"0000-3b-00.0-p{n}") for n in range(50)})
    assert len(json.loads(dirs.state_lock.read_text())["programming"]) == 50
    locks.set_programming({REGION})
    assert json.loads(dirs.state_lock.read_text())["programming"] == [REGION]
    locks.release()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"7\n",
        b'{"pid": 1}\n',
        b'{"pid": {}, "programming": []}\n',
        b'{"pid": 1, "programming": ["x\\n"]}\n',
        b'{"pid": 1, "programming": [3]}\n',
        b"[" * 60_000,
        b"\xff" * 100_000,
    ],
)
def test_a_note_that_makes_no_sense_counts_as_none(dirs, time, content):
    locks = acquire(dirs)
    dirs.state_lock.write_bytes(content)
    with pytest.raises(LockHeldError):
        acquire(dirs, time)
    assert 10 <= time.passed < 10.1
    locks.release()


def test_a_note_for_a_longer_one_is_read_without_its_tail(dirs, time):
    locks = acquire(dirs)
    note = json.dumps({"pid": 5, "programming": [REGION]}).encode()
    dirs.state_lock.write_bytes(note + b'\nrest of a longer note"]}\n')
    with pytest.raises(LockHeldError, match=REGION):
        acquire(dirs, time)
    assert time.passed >= 120
    locks.release()


def test_one_directory_for_both_does_not_lock_the_plugin_out(dirs, time):
    dirs.state = dirs.kubelet / "fpga-plugin"
    locks = acquire(dirs, time)
    assert time.passed == 0
    with pytest.raises(LockHeldError):
        acquire(dirs, time)
    locks.release()


def test_a_cancelled_attempt_leaves_no_lock_behind(dirs):
    locks = acquire(dirs)
    second = Dirs.__new__(Dirs)
    second.state, second.kubelet = dirs.state.parent / "state2", dirs.kubelet

    async def cancelled() -> None:
        asyncio.current_task().cancel()  # takes effect at the first sleep, with one lock held
        await acquire_locks(str(second.state), str(second.kubelet))

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert (second.state / "lock").exists()
    locks.release()
    acquire(second).release()


def test_a_missing_directory_is_an_error_with_a_hint(tmp_path, dirs):
    dirs.kubelet = tmp_path / "no" / "such"
    with pytest.raises(FpgaPluginError, match="No such file") as caught:
        acquire(dirs)
    assert "FPGA_PLUGIN_KUBELET_DIR" in caught.value.hint

    dirs.state = tmp_path / "no" / "such"
    with pytest.raises(FpgaPluginError, match="No such file") as caught:
        acquire(dirs)
    assert "FPGA_PLUGIN_STATE_DIR" in caught.value.hint


def test_a_file_instead_of_a_directory_is_an_error(dirs):
    dirs.state.rmdir()
    dirs.state.touch()
    with pytest.raises(FpgaPluginError, match="is no directory: move it away"):
        acquire(dirs)


def test_a_link_instead_of_a_lock_file_is_refused(dirs, tmp_path):
    dirs.state_lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FpgaPluginError, match="cannot open the lock file"):
        acquire(dirs)
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_does_not_stop_a_pr(dirs, monkeypatch):
    locks = acquire(dirs)

    def full(*_args):
        raise OSError(28, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with capture_logs() as logs:
        locks.set_programming({REGION})
    assert logs[0]["event"] == "lock file not written"
    monkeypatch.undo()
    locks.release()


def test_nothing_is_written_after_the_release(dirs):
    locks = acquire(dirs)
    locks.release()
    locks.set_programming({REGION})
    assert json.loads(dirs.state_lock.read_text())["programming"] == []


HOLDER = """
import asyncio, signal, subprocess, sys
from fpga_plugin.host.locks import acquire_locks
locks = asyncio.run(acquire_locks(sys.argv[1], sys.argv[2]))
locks.set_programming({"0000-3b-00.0-p0"})
child = subprocess.Popen(["/bin/sh", "-c", "read line"], close_fds=False)
print(child.pid, flush=True)
signal.pause()
"""


def test_a_killed_holder_frees_the_locks_while_its_child_lives_on(dirs, time):
    dirs.kubelet_lock.parent.mkdir()
    command = [sys.executable, "-c", HOLDER, str(dirs.state), str(dirs.kubelet)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            child = int(holder.stdout.readline())
            with pytest.raises(LockHeldError, match=f"pid {holder.pid}"):
                acquire(dirs, time)
            assert time.passed >= 120
        finally:
            holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(child, 0)  # it waits for a line on the standard input that this test holds open
        acquire(dirs).release()
