"""What goes wrong on a node besides: its disk, the journal's files, the store, the clock.

A wind blows for one run of the plugin: it begins while no plugin runs, and is over when the next
one starts. The state directory is a small file system of its own, so that it can be full or read
only; to mount it takes root.
"""

import contextlib
import ctypes
import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import points
from doubles import schema_3
from fuse_store import CONTENTS, EVERYTHING, FuseStore, why_not

JOURNAL = "journal.sqlite3"
MS_RDONLY, MS_REMOUNT, MNT_DETACH = 1, 32, 2
SIZE = 48 << 20


@dataclass(frozen=True)
class Wind:
    """What goes wrong for one life.

    Attributes:
        spoils_journal: does so, before the plugin starts.
        full, read_only, hangs: the disk is; the store's files do.
        unwritten: some of the journal's transactions fail.
        silent: accelerators hang.
        env: for the plugin.
        spares_users: all pods that may use regions stay in the journal, or in what it becomes.
    """

    name: str
    spoils_journal: Callable[[Path, random.Random], None] | None = None
    full: bool = False
    read_only: bool = False
    hangs: str = ""
    unwritten: bool = False
    silent: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    spares_users: bool = False

    @property
    def forgets(self) -> bool:
        """Owners are found in kubelet's records alone."""
        return self.spoils_journal is not None

    @property
    def refuses(self) -> bool:
        """The plugin may end, with a message."""
        return self.full or self.read_only or self.unwritten


def _files(state: Path) -> list[Path]:
    return [state / f"{JOURNAL}{suffix}" for suffix in ("", "-wal", "-shm")]


def _lost(state: Path, rng: random.Random) -> None:
    del rng
    for file in _files(state):
        file.unlink(missing_ok=True)


def _wal_lost(state: Path, rng: random.Random) -> None:
    del rng
    for file in _files(state)[1:]:
        file.unlink(missing_ok=True)


def _cut(number: int) -> Callable[[Path, random.Random], None]:
    def cut(state: Path, rng: random.Random) -> None:
        file = _files(state)[number]
        if file.exists():
            os.truncate(file, rng.randrange(file.stat().st_size + 1))

    return cut


def _overwritten(number: int) -> Callable[[Path, random.Random], None]:
    """A disk's block of zeros, ones or noise."""

    def overwrite(state: Path, rng: random.Random) -> None:
        file = _files(state)[number]
        if file.exists() and (size := file.stat().st_size):
            with file.open("r+b") as opened:
                opened.seek(rng.randrange(size) // 512 * 512)
                opened.write(rng.choice([bytes(512), b"\xff" * 512, rng.randbytes(512)]))

    return overwrite


def _future(state: Path, rng: random.Random) -> None:
    del rng
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(state / JOURNAL)) as db,
    ):
        db.execute("PRAGMA user_version = 99")


def _marker_lost(state: Path, rng: random.Random) -> None:
    marker = state.with_name("kubelet") / "fpga-plugin" / "marker"
    if rng.random() < 0.5:
        marker.unlink(missing_ok=True)
    elif marker.exists():
        marker.write_text("nonsense\n")


def _older(state: Path, rng: random.Random) -> None:
    """An older copy is put back; there is one since the last time."""
    del rng
    kept = state.with_name("older")
    if kept.exists():
        for file in _files(state):
            file.unlink(missing_ok=True)
            if (kept / file.name).exists():
                shutil.copyfile(kept / file.name, file)
        shutil.rmtree(kept)
        return
    kept.mkdir()
    for file in _files(state)[:2]:
        if file.exists():
            shutil.copyfile(file, kept / file.name)


def _exchanged(state: Path, rng: random.Random) -> None:
    """FPGA_PLUGIN_STATE_DIR is changed, and the next time changed back."""
    del rng
    others = state.with_name("other state")
    others.mkdir(exist_ok=True)
    between = Path(tempfile.mkdtemp(dir=state.parent))
    for here, there in ((state, between), (others, state), (between, others)):
        for file in _files(here):
            if file.exists():
                shutil.move(file, there / file.name)
    between.rmdir()


def _schema_3(state: Path, rng: random.Random) -> None:
    del rng
    with contextlib.suppress(sqlite3.Error):
        schema_3.rewrite(state / JOURNAL)


FAIR = Wind("fair")
_WINDS = (
    Wind("journal lost", _lost),
    Wind("write-ahead log lost", _wal_lost),
    Wind("journal cut", _cut(0)),
    Wind("write-ahead log cut", _cut(1)),
    Wind("journal overwritten", _overwritten(0)),
    Wind("write-ahead log overwritten", _overwritten(1)),
    Wind("journal of a later version", _future),
    Wind("marker lost", _marker_lost, spares_users=True),
    Wind("older journal put back", _older),
    Wind("state directory exchanged", _exchanged),
    Wind("journal of schema 3", _schema_3, spares_users=True),
    Wind("journal not written at times", unwritten=True),
    Wind("disk full", full=True),
    Wind("state directory read only", read_only=True),
    Wind("store hangs", hangs=EVERYTHING, spares_users=True),
    Wind("store's contents hang", hangs=CONTENTS, spares_users=True),
    Wind("accelerators hang", silent=True, spares_users=True),
    Wind("slow fsync", env={points.SLOW: "0.05 0.05 0.05 0.1 0.3 1"}),
    Wind("clock a day ahead", env={points.CLOCK: "86400"}),
    Wind("clock a year back", env={points.CLOCK: "-31536000"}),
)


NAMES = tuple(one.name for one in _WINDS)


def wind(rng: random.Random, only: str = "", *, exposed: bool = False) -> Wind:
    """One of them, or the named one; `exposed`: pods run of which only the journal knows."""
    found = [one for one in _WINDS if one.name == only or not only]
    return rng.choice([one for one in found if one.spares_users or not exposed] or [FAIR])


class Weather:
    """The file systems that make it; only root can.

    Attributes:
        store: where the plugin finds its bitstreams.
    """

    def __init__(self, folder: Path, store: Path) -> None:
        self._state = folder / "state"
        self._state.mkdir(mode=0o700)
        _mount(self._state, 0)
        self._hung: FuseStore | None = None
        self.store = store
        if not why_not():
            self.store = folder / "store"
            self._hung = FuseStore(store, self.store).__enter__()

    def begin(self, what: Wind, rng: random.Random) -> None:
        """Before the plugin starts."""
        if what.spoils_journal is not None:
            what.spoils_journal(self._state, rng)
        if what.full:
            room = os.statvfs(self._state)
            left = rng.choice([0, 0, 1, 8, 24]) * 4096
            with (self._state / "filler").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail * room.f_frsize - left))
        if what.read_only:
            _mount(self._state, MS_REMOUNT | MS_RDONLY)
        if what.hangs and self._hung is not None:
            self._hung.hang(what.hangs)

    def end(self, what: Wind) -> None:
        """When the plugin is dead."""
        if what.read_only:
            _mount(self._state, MS_REMOUNT)
        (self._state / "filler").unlink(missing_ok=True)
        if self._hung is not None:
            self._hung.answer()

    def close(self) -> None:
        """Unmount."""
        if self._hung is not None:
            with contextlib.suppress(OSError, AssertionError):  # its server may have ended first
                self._hung.answer()
            self._hung.__exit__()
        ctypes.CDLL(None).umount2(str(self._state).encode(), MNT_DETACH)


def _mount(place: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={SIZE},mode=700".encode()
    if libc.mount(b"campaign", str(place).encode(), b"tmpfs", flags, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(place))
