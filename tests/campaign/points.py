"""What is put into a daemon of the campaign before it starts: a log of its hardware, and its death.

Runs in the daemon's own process, after the fork (`spawn`); nothing of it is in the package. The
simulated cards write down what happens to them, below the code that drives them: a line for each
partial reconfiguration, reset, exclusive open and clear of memory. And the process kills itself at
the n-th failure point that it comes by: before and after each of the journal's transactions (and
between the commit and its count), around each call to the kernel, in the middle of each PR, around
each answer and list for kubelet, around each rename.
"""

import functools
import itertools
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LOG, KILL, CLOCK, SLOW = "CAMPAIGN_LOG", "CAMPAIGN_KILL", "CAMPAIGN_CLOCK", "CAMPAIGN_SLOW"
UNWRITTEN = "CAMPAIGN_UNWRITTEN"
PORT_RESET = 0xB640
"""DFL_FPGA_PORT_RESET, linux/fpga-dfl.h."""

ANSWERS = 16
"""Failure points of the answers to four registrations: message and status, before and after."""

SYNCED = ("COMMIT", "VACUUM", "PRAGMA wal_checkpoint", "PRAGMA journal_mode")
"""Statements for which SQLite may wait for the disk."""

FAMILIES = ("journal", "hardware", "answer", "rename")


class Points:
    """The log, and the counter of failure points.

    Args:
        log: where a line is added for whatever happens to the hardware.
        kill: FAMILY:N, the failure point to die at; FAMILY may be `any`. With `:late` those count
            that come once kubelet has got its first answers. Empty: at none.
    """

    def __init__(self, log: str, kill: str) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._family, number, late = [*kill.split(":"), "", "", ""][:3]
        self._left = int(number or 0)
        self._answers = 0 if late else ANSWERS
        self._lock = threading.Lock()

    def note(self, *words: object) -> None:
        """One line, in one write."""
        line = " ".join(map(str, (f"{time.time() % 86400:.6f}", *words)))
        os.write(self._log, f"{line}\n".encode())

    def visit(self, family: str, name: str) -> None:
        """A failure point; does not return from the one that was asked for."""
        with self._lock:
            self._answers += family == "answer"
            if self._family not in {family, "any"} or self._answers < ANSWERS:
                return
            self._left -= 1
            if self._left == 0:
                self.note("KILL", family, name)
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

    def around(self, owner: Any, method: str, family: str, name: str = "") -> None:
        """Failure points before and after a method."""
        called: Callable[..., Any] = getattr(owner, method)
        name = name or method

        @functools.wraps(called)
        def wrapper(*args: Any, **more: Any) -> Any:
            self.visit(family, f"before-{name}")
            result = called(*args, **more)
            self.visit(family, f"after-{name}")
            return result

        setattr(owner, method, wrapper)

    def around_coroutine(self, owner: Any, method: str, family: str, name: str) -> None:
        """The same for a coroutine."""
        called: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(called)
        async def wrapper(*args: Any, **more: Any) -> Any:
            self.visit(family, f"before-{name}")
            result = await called(*args, **more)
            self.visit(family, f"after-{name}")
            return result

        setattr(owner, method, wrapper)


def install(env: Mapping[str, str]) -> None:
    """Into this process, as its environment says."""
    points = Points(env[LOG], env.get(KILL, ""))
    _journal(points, env)
    _hardware(points)
    _alveo(points)
    _wire(points)
    if env.get("FPGA_PLUGIN_MODE") == "dra":
        _claims(points)
    _leftovers()
    points.around(os, "replace", "rename")
    if jump := float(env.get(CLOCK, "0")):
        _jump(jump)
    if seconds := env.get(SLOW, ""):
        _sync_slowly(points, [*map(float, seconds.split())])


def _journal(points: Points, env: Mapping[str, str]) -> None:
    from fpga_plugin.allocation.journal.journal import Journal
    from fpga_plugin.allocation.journal.marker import Marker

    points.around(Journal, "_open", "journal", "opening")
    points.around(Journal, "write", "journal", "transaction")
    if unwritten := env.get(UNWRITTEN, ""):
        _do_not_write([*map(int, unwritten.split())])
    points.around(Marker, "count", "journal", "count")
    points.around(Marker, "begin", "journal", "marker")
    points.around(Journal, "remember", "journal", "history")
    points.around(Journal, "checkpoint", "journal", "fold")


def _do_not_write(failing: Sequence[int]) -> None:
    """Of the journal's transactions these fail, by their numbers in this life."""
    from fpga_plugin.allocation.journal.journal import Journal

    transaction, number = Journal.write, itertools.count()

    def write(self: Any, change: Any) -> None:
        if next(number) in failing:
            raise self._failed(sqlite3.OperationalError("disk I/O error"))
        transaction(self, change)

    Journal.write = write  # type: ignore[method-assign]


def _hardware(points: Points) -> None:
    from fpga_plugin.hardware.simulated.board import Board
    from fpga_plugin.hardware.simulated.kernel import SimulatedKernel
    from fpga_plugin.hardware.simulated.pr import Reconfiguration

    made, ioctl = SimulatedKernel.__init__, SimulatedKernel.ioctl
    opened = SimulatedKernel._open_port
    begun, cleared = Reconfiguration._begin, Board.clear_memory

    def make(self: Any, *args: Any, **more: Any) -> None:
        def sleep(seconds: float) -> None:
            points.visit("hardware", "in-a-pr")
            time.sleep(seconds)

        made(self, *args, sleep=sleep, **more)

    def begin(self: Any, file: Any, port: int, programmed: Any) -> Any:
        fault = begun(self, file, port, programmed)
        points.note("PR", file.board.region(port), file.board.state(port).afu_id)
        return fault

    def clear(self: Any, text: str) -> None:
        cleared(self, text)
        points.note("CLEAR", self.card)

    def command(self: Any, handle: Any, request: int, argument: Any) -> int:
        file = self._open.get(handle)
        result = int(ioctl(self, handle, request, argument))
        if request == PORT_RESET and file is not None:
            points.note("RESET", file.board.region(file.port))
        return result

    def open_port(self: Any, board: Any, port: int, node: str, *, exclusive: bool) -> Any:
        if exclusive:  # also where it is refused: the attempt alone is what a tenant feels
            points.note("OPEN", board.region(port))
        return opened(self, board, port, node, exclusive=exclusive)

    SimulatedKernel.__init__ = make  # type: ignore[method-assign]
    SimulatedKernel.ioctl = command  # type: ignore[method-assign]
    SimulatedKernel._open_port = open_port  # type: ignore[method-assign]
    Reconfiguration._begin = begin  # type: ignore[method-assign]
    Board.clear_memory = clear  # type: ignore[method-assign]
    for method in ("open", "ioctl", "write", "close"):
        points.around(SimulatedKernel, method, "hardware")


def _alveo(points: Points) -> None:
    """Of Alveo cards the same, in a time in which something else can happen, too."""
    from fpga_plugin.hardware.simulated.alveo import board
    from fpga_plugin.hardware.simulated.alveo.board import AlveoBoard
    from fpga_plugin.hardware.simulated.alveo.kernel import SimulatedXrtKernel
    from fpga_plugin.hardware.xrt import port, waiting
    from fpga_plugin.hardware.xrt.backend import XrtBackend

    for name in ("COPY", "RESET", "DOWN", "UP", "LOST", "REFRESH"):
        seconds = f"{name}_SECONDS"
        setattr(board, seconds, getattr(board, seconds) / 20)
    port.LATE_REFRESH_SECONDS = 0.02
    waiting.POLL_SECONDS = 0.005
    loads, fails = AlveoBoard.loads, AlveoBoard.fails
    happens, cleared = AlveoBoard._happens, XrtBackend.clear_memory

    def load(self: Any, uuid: Any, **more: Any) -> None:
        loads(self, uuid, **more)
        points.note("PR", self.region, self.state.afu_id)

    def fail(self: Any, **more: Any) -> None:
        fails(self, **more)
        points.note("PR", self.region, self.state.afu_id)

    def happen(self: Any, what: str, at: float) -> None:
        happens(self, what, at)
        if what == "reset":
            points.note("RESET", self.region)

    def clear(self: Any, card: Any) -> None:
        cleared(self, card)
        points.note("CLEAR", card.id)

    AlveoBoard.loads = load  # type: ignore[method-assign]
    AlveoBoard.fails = fail  # type: ignore[method-assign]
    AlveoBoard._happens = happen  # type: ignore[method-assign]
    XrtBackend.clear_memory = clear  # type: ignore[method-assign]
    for method in ("open", "ioctl", "write", "close"):
        points.around(SimulatedXrtKernel, method, "hardware", f"alveo-{method}")


def _wire(points: Points) -> None:
    from grpclib.server import Stream

    points.around_coroutine(Stream, "send_message", "answer", "message")
    points.around_coroutine(Stream, "send_trailing_metadata", "answer", "status")


def _claims(points: Points) -> None:
    """The API server's answers."""
    from fpga_plugin.dra.slices import SliceReconciler
    from fpga_plugin.kubernetes.apiserver.rest import Session

    points.around_coroutine(Session, "call", "api", "api-server")
    SliceReconciler.__init__.__kwdefaults__["settle"] = 0.01


def _leftovers() -> None:
    """What claims have, by either API, is looked at sooner: lives are short."""
    from fpga_plugin.dra import reconcile

    reconcile.LOOK_SECONDS = 0.2  # type: ignore[misc]


def _jump(seconds: float) -> None:
    """The node's clock is set, half a second after the start."""
    real, begin = time.time, time.monotonic()

    def jumped() -> float:
        return real() + (seconds if time.monotonic() > begin + 0.5 else 0)

    time.time = jumped


def _sync_slowly(points: Points, seconds: Sequence[float]) -> None:
    """The disk takes one of these times to sync: all is written by then, and nobody was told."""
    sync = os.fsync

    def wait(family: str) -> None:
        half = random.choice(seconds) / 2
        time.sleep(half)
        points.visit(family, "in-a-sync")
        time.sleep(half)

    class Connection(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            done = super().execute(statement, *values)
            if statement.startswith(SYNCED):
                wait("journal")
            return done

    def slow(file: Any) -> None:
        sync(file)
        wait("rename")

    sqlite3.connect = functools.partial(sqlite3.connect, factory=Connection)  # type: ignore[assignment]
    os.fsync = slow
