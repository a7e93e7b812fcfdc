"""One plugin a node: the two file locks that a plugin holds from its start to its end.

Two processes that served the same cards would program under each other's tenants. The first lock
lies in the state directory, with the journal that it guards. The second lies below kubelet's
directory, so that plugins with different state directories but one kubelet meet too. Both are
`flock(2)` locks: the kernel frees them when their holder is gone, however it went.

A process in a PR ioctl cannot be killed: it lives, and holds its locks, until the ioctl returns.
The holder therefore writes into the lock files which regions are being programmed. A successor that
reads this there waits longer than it would otherwise, and says why.
"""

import asyncio
import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final

import structlog

from fpga_plugin.errors import FpgaPluginError, LockHeldError
from fpga_plugin.ids import RegionId, parse_device_id

_WAIT: Final = 10.0
"""Seconds that a plugin waits for another to end; from the last time that it was programming."""

WAIT_PROGRAMMING: Final = 120.0
"""Seconds that it waits at most, while the other one says that it is programming."""

LOCK_DIRECTORY: Final = "fpga-plugin"
"""Below kubelet's directory; in it is what belongs to the node and not to a state directory."""

_OF_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

_OWN_ENTRIES: Final = frozenset({"verified", "simulated", "status.sock"})
"""What the plugin itself has in its state directory beside plain files."""

_POLL: Final = 0.05
_REPORT: Final = 5.0
_MAX_CONTENT: Final = 64 * 1024
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

_log = structlog.get_logger(__name__)


class NodeLocks:
    """Both locks, held."""

    def __init__(self, descriptors: Collection[int]) -> None:
        self._descriptors = tuple(descriptors)
        self._guard = threading.Lock()
        self._released = False
        self.set_programming(())

    def set_programming(self, regions: Collection[RegionId]) -> None:
        """Tell a successor which regions have a PR in flight; call it before and after each PR.

        Takes microseconds, may be called from any thread, and never raises: the note only makes a
        successor patient, so a full disk does not stop a PR for it.
        """
        holder = {"pid": os.getpid(), "programming": sorted(regions)}
        content = json.dumps(holder).encode() + b"\n"
        with self._guard:
            if self._released:
                return
            for descriptor in self._descriptors:
                try:
                    # A reader takes the first line only, so it never sees half of each.
                    os.pwrite(descriptor, content, 0)
                    os.ftruncate(descriptor, len(content))
                except OSError as error:
                    _log.warning("lock file not written", reason=_reason(error))

    def release(self) -> None:
        """Let go of both locks; a second call does nothing. The files stay."""
        with self._guard:
            if self._released:
                return
            self._released = True
            for descriptor in reversed(self._descriptors):
                os.close(descriptor)


async def acquire_locks(
    state_dir: str,
    kubelet_dir: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> NodeLocks:
    """Take `<state dir>/lock`, then `<kubelet dir>/fpga-plugin/lock`.

    The state directory and `<kubelet dir>/fpga-plugin` are made where only they are missing.

    Args:
        state_dir: FPGA_PLUGIN_STATE_DIR.
        kubelet_dir: FPGA_PLUGIN_KUBELET_DIR.
        clock: monotonic seconds; tests have their own.
        sleep: waits; tests have their own.

    Raises:
        LockHeldError: another plugin still holds one of them. Then neither is held.
        FpgaPluginError: a directory is missing or cannot be written.
    """
    subdirectory = os.path.join(kubelet_dir, LOCK_DIRECTORY)
    _make_directory(state_dir, "FPGA_PLUGIN_STATE_DIR")
    _make_private(state_dir)
    _make_directory(subdirectory, "FPGA_PLUGIN_KUBELET_DIR")
    begin = clock()
    held: list[int] = []
    try:
        for path in (os.path.join(state_dir, "lock"), os.path.join(subdirectory, "lock")):
            if (descriptor := _open(path, held)) is not None:
                held.append(descriptor)
                await _lock(path, descriptor, begin, clock, sleep)
    except BaseException:  # cancellation too: a lock must not outlive the attempt
        for descriptor in held:
            os.close(descriptor)
        raise
    return NodeLocks(held)


async def _lock(
    path: str,
    descriptor: int,
    begin: float,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
) -> None:
    """Lock an open file, and wait for another holder as long as that is worth it."""
    deadline, report_at = begin + _WAIT, begin
    while not _try_lock(path, descriptor):
        pid, programming = _read_holder(descriptor)
        now = clock()
        if programming:
            deadline = now + _WAIT
        if now >= min(deadline, begin + WAIT_PROGRAMMING):
            who = f" (pid {pid} in its own container)" if pid else ""
            if programming:
                who += f", programming {', '.join(programming[:4])},"
            raise LockHeldError(
                f"another fpga-plugin{who} holds {path} and did not end within {now - begin:.0f} s",
                hint="one plugin serves a node: end the other one, or wait until it has ended",
            )
        if now >= report_at:
            report_at = now + _REPORT
            _log.info(
                "waiting for another fpga-plugin to end",
                lock=path,
                holder_pid=pid,
                programming=programming,
                reason="it is programming, and a process in a PR cannot be ended"
                if programming
                else "it holds the lock",
                waited=round(now - begin, 1),
            )
        await sleep(_POLL)


def _open(path: str, held: Collection[int]) -> int | None:
    """Open a lock file; None if it is one of those held: one directory may serve as both."""
    try:
        descriptor = os.open(path, _LOCK_FLAGS, 0o600)
    except OSError as error:
        raise FpgaPluginError(
            f"cannot open the lock file {path}: {_reason(error)}",
            hint="it has to be a plain file in a directory that this process can write",
        ) from error
    if any(os.path.sameopenfile(descriptor, other) for other in held):
        os.close(descriptor)
        return None
    return descriptor


def _try_lock(path: str, descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise FpgaPluginError(
            f"cannot lock {path}: {_reason(error)}",
            hint="the directory has to be on a local file system",
        ) from error
    return True


def _read_holder(descriptor: int) -> tuple[int, list[RegionId]]:
    """What the holder wrote: its pid in its own pid namespace, and regions with a PR in flight.

    0 and none where that cannot be read or makes no sense.
    """
    try:
        value = json.loads(os.pread(descriptor, _MAX_CONTENT, 0).split(b"\n", 1)[0])
        regions = [RegionId(parse_device_id(name)) for name in value["programming"]]
        return int(value["pid"]), regions
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0, []


def _make_directory(path: str, setting: str) -> None:
    if os.path.isdir(path):
        return
    try:
        os.mkdir(path, 0o700)
    except FileExistsError as error:
        raise FpgaPluginError(
            f"{path} is no directory",
            hint=f"move it away, or set {setting} to another place",
        ) from error
    except OSError as error:
        raise FpgaPluginError(
            f"cannot make the directory {path}: {_reason(error)}",
            hint=f"{os.path.dirname(path)} has to be a directory that this process can write "
            f"(in a container: a mount of the node's own), or set {setting} to another place",
        ) from error
    _log.info("directory made", path=path)


def _make_private(path: str) -> None:
    """Take the state directory from others: who has which device is for root to know.

    The kubelet makes a hostPath with mode 0755, and so did earlier versions' users. A directory
    that is not the plugin's alone, as where the setting says /var/lib, keeps its mode.
    """
    try:
        found = os.stat(path)
        if found.st_uid != os.geteuid():
            reason = f"user {found.st_uid} owns it, who can replace the journal"
        elif not found.st_mode & _OF_OTHERS:
            return
        elif foreign := _foreign(path, found):
            reason = f"others may look into it, and {foreign}"
        else:
            os.chmod(path, 0o700)
            _log.info("directory closed to other users", path=path)
            return
    except OSError as error:
        reason = _reason(error)
    _log.warning(
        "the state directory is not the plugin's alone",
        path=path,
        reason=reason,
        hint="give the plugin's user a directory of its own, with mode 0700"
        " (FPGA_PLUGIN_STATE_DIR)",
    )


def _foreign(path: str, found: os.stat_result) -> str:
    """What shows that a directory also serves others; empty if nothing does."""
    if found.st_mode & stat.S_ISVTX:
        return "it is meant for all users"
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                other = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # a predecessor takes its own away as it ends
            plain = stat.S_ISREG(other.st_mode) or entry.name in _OWN_ENTRIES
            if other.st_uid != found.st_uid or not plain:
                return f"'{entry.name}' in it is not the plugin's"
    return ""


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0)
