"""The journal: allocations and conditions in SQLite, so that the plugin may die at any instant.

WAL with synchronous NORMAL: a committed transaction survives the death of the process, which is
all that it has to survive (after a reboot nothing that it says about conditions holds), and costs
no disk wait. Writes happen on the event loop, one short transaction a step, before the step is
answered or begun; the write-ahead log is folded into the database by `checkpoint`, from a thread.
Only the first commit after a complete fold waits for the disk, once: SQLite syncs the header of the
log that begins again, and shortens its file.
"""

import os
import sqlite3
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from itertools import chain
from typing import Final, Protocol

import structlog

from fpga_plugin.allocation.journal import history, rows
from fpga_plugin.allocation.journal.doubt import doubted, unasked
from fpga_plugin.allocation.journal.marker import MARKER_FILE, Marker
from fpga_plugin.allocation.journal.records import Change, Fact
from fpga_plugin.errors import FpgaPluginError, quote
from fpga_plugin.host.file_identity import Inode, inode_at

log = structlog.get_logger()

JOURNAL_FILE: Final = "journal.sqlite3"
"""In the state directory."""

_FILES: Final = ("", "-wal", "-shm")
"""What the names of a database's files end with."""

_KEPT_LOG: Final = 1 << 20
"""Bytes of a log that was folded in which keep their room on the disk."""

_FOLDS: Final = 40
_FOLD_PAUSE: Final = 0.05
"""Attempts to fold in the rest of a log, and the seconds between two attempts."""

_MODE: Final = 0o600
"""Owners and their uids are private to the plugin and root."""


class JournalError(FpgaPluginError):
    """The journal cannot be written; what was asked for has not happened."""


class JournalWriter(Protocol):
    """Where the ledger writes before it answers."""

    def write(self, change: Change) -> None:
        """Make a change durable, all of it or nothing.

        Raises:
            JournalError: nothing was written.
        """


class Journal:
    """`<state dir>/journal.sqlite3`. For the event loop's thread, `checkpoint` for any.

    Attributes:
        snapshot: what it held when it was opened, as far as it is believed.
        doubt: why it is in doubt (`fpga_plugin.allocation.journal.doubt`); empty: it is not.
        left_out: rows that made no sense and were taken out of it, for people.
        set_aside: where an unreadable predecessor was moved to, or a copy of it as it was.
        marker: what the last run of the plugin served.
    """

    def __init__(self, path: str, marker: Marker | None = None) -> None:
        """Open and read the journal; an unreadable one is moved aside and named in `set_aside`.

        One that can be read, and is in doubt, is rewritten with what is still believed of it.

        Args:
            path: the file.
            marker: what the last life wrote of its journal; None: it lies beside this one.

        Raises:
            JournalError: the directory or the journal cannot be written.
        """
        self.path = path
        self.doubt = ""
        self.set_aside: str | None = None
        self._writes = 0
        self._folded = -1  # how many were written when all was folded in; opening writes, too
        self._fold_failed = False
        self.marker = marker or Marker(os.path.join(os.path.dirname(path), MARKER_FILE))
        try:
            try:
                self._db, self.snapshot = self._open()
            except (sqlite3.DatabaseError, ValueError) as error:
                if not _unreadable(error, path):
                    raise
                self.doubt = f"it was set aside: {error}"
                self.set_aside = self._move_aside()
                self._db, self.snapshot = self._open()
        except (sqlite3.Error, OSError) as error:
            raise self._failed(error) from error

    def _room_for_another(self) -> str:
        """Where a journal that cannot be used is kept; of several the last."""
        path = f"{self.path}.unreadable"
        for suffix in _FILES:
            with suppress(FileNotFoundError):
                os.unlink(path + suffix)
        return path

    def _move_aside(self) -> str:
        aside = self._room_for_another()
        for suffix in _FILES:
            if os.path.lexists(self.path + suffix):
                os.replace(self.path + suffix, aside + suffix)
        return aside

    def _failed(self, error: Exception) -> JournalError:
        if os.path.lexists(self.path) and not os.path.isfile(self.path):
            return JournalError(
                f"journal {self.path}: something else than a file is in its place",
                hint="move it away",
            )
        damaged = getattr(error, "sqlite_errorcode", 0) in (
            sqlite3.SQLITE_CORRUPT,
            sqlite3.SQLITE_NOTADB,
        )
        return JournalError(
            f"journal {self.path}: {error.strerror if isinstance(error, OSError) else error}",
            hint="restart the plugin, which sets it aside and asks kubelet for the owners"
            if damaged
            else "check that the state directory is writable and its disk not full",
        )

    def _connect(self) -> sqlite3.Connection:
        _create(self.path)  # private, and SQLite gives the log the modes of the database
        db = sqlite3.connect(self.path, isolation_level=None, timeout=1.0)
        # Damaged text is a value that makes no sense, not an error of the reading.
        db.text_factory = lambda raw: raw.decode(errors="surrogateescape")
        return db

    def _open(self) -> tuple[sqlite3.Connection, Change]:
        db = self._connect()
        try:
            self._set_up(db)
            rows.prepare(db)
            history.prepare(db)
            return db, self._load(db)
        except BaseException:
            db.close()
            raise

    def _set_up(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        # A checkpoint waits for the disk: never inside a step.
        db.execute("PRAGMA wal_autocheckpoint = 0")
        # A log that was folded in begins again in the same file, which SQLite never shortens else.
        db.execute(f"PRAGMA journal_size_limit = {_KEPT_LOG}")
        # The first reading makes the log. SQLite has it open from then on, and makes no other one
        # while the database is open: it only shortens it.
        db.execute("PRAGMA schema_version")
        self._inodes = self._inodes_now()

    def _inodes_now(self) -> tuple[Inode | None, Inode | None]:
        """The files that have the journal's names: the database and its log."""
        return inode_at(self.path), inode_at(f"{self.path}-wal")

    def _load(self, db: sqlite3.Connection) -> Change:
        loaded = rows.load(db)
        self.left_out = loaded.left_out
        self.doubt = self.doubt or self._doubt(loaded)
        self._commits = max(loaded.commits, self.marker.counted)
        identity, snapshot = loaded.identity, loaded.snapshot
        if new := bool(self.doubt or not identity):
            # Of another id than before: whatever is a copy of it, or was put aside, is told apart.
            identity = uuid.uuid4().hex
        if self.doubt:
            claims = self.marker.may_have_claims
            snapshot = doubted(snapshot, self.doubt, boot=self.marker.boot, claims=claims)
        elif self.marker.served_otherwise:
            snapshot = unasked(snapshot, claims=self.marker.left_dra)
        # Before the marker says that this journal served last.
        if new or snapshot is not loaded.snapshot:
            copy = new and bool(loaded.snapshot or loaded.left_out)
            self._rewrite(db, snapshot, identity, copy=copy)
        claims = bool(snapshot.claim_owners or snapshot.facts.get(Fact.RESOURCE_CLAIMS))
        self.marker.begin(identity, self._commits, claims=claims)
        return snapshot

    def _doubt(self, loaded: rows.Loaded) -> str:
        """Why a journal is in doubt; empty: it is the last life's, and all of it is there."""
        last, missing = self.marker.last, self.marker.counted - loaded.commits
        if loaded.wrong:
            return loaded.wrong
        if last is None:
            known_by_none = f"{self.marker.path} does not say whether it is the last life's"
            return known_by_none if loaded.snapshot else ""
        if last.journal != loaded.identity:
            return f"the plugin last ran with another one, in {quote(last.state_dir)}"
        if missing > 0:
            return (
                f"it lacks the last {missing} of {self.marker.counted} transactions: its"
                " write-ahead log was lost or damaged, or an older copy put in its place"
            )
        return ""

    def _rewrite(
        self, db: sqlite3.Connection, snapshot: Change, identity: str, *, copy: bool
    ) -> None:
        """Make it say this and nothing else, all or nothing; a `copy` of before is kept."""
        if copy:
            self.set_aside = self._room_for_another()
            _create(self.set_aside)  # SQLite fills an empty file
            db.execute("VACUUM INTO ?", (self.set_aside,))
        self._commits += 1
        db.execute("BEGIN IMMEDIATE")  # closing the connection rolls it back
        for statement, values in rows.replacement(snapshot, identity, self._commits):
            db.executemany(statement, values)
        db.execute(f"PRAGMA user_version = {rows.SCHEMA_VERSION}")
        db.execute("COMMIT")

    def keep(self) -> None:
        """Put the journal back if somebody removed it; what cannot be mended now is logged."""
        try:
            self._keep()
        except JournalError as error:
            log.error("the journal cannot be put back", error=error.message, hint=error.hint)  # noqa: TRY400  # a traceback says nothing more

    def _keep(self) -> None:
        """Whether what is written gets into the file that the next start reads; else see to it.

        SQLite writes on into a file that was removed, the log alone, too, and all of that would be
        lost.

        Raises:
            JournalError: it was removed, and cannot be put back.
        """
        if self._inodes_now() == self._inodes:
            return
        try:
            self._put_back()
        except (sqlite3.Error, OSError) as error:
            raise self._failed(error) from error
        log.error(
            "the journal was removed while it was in use, and is put back",
            file=self.path,
            hint="nothing is lost; leave the state directory alone while the plugin runs",
        )

    def _put_back(self) -> None:
        new = f"{self.path}.new"
        os.makedirs(os.path.dirname(self.path), 0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            os.unlink(new)
        _create(new)
        self._db.execute("VACUUM INTO ?", (new,))
        # Closed first: SQLite removes a log by its name, which is that of the new one's, too.
        self._db.close()
        self._move_aside()
        os.replace(new, self.path)
        self._db = self._connect()
        self._set_up(self._db)
        self.marker.count(self._commits, whole=True)

    def write(self, change: Change) -> None:
        """Make a change durable (`JournalWriter`)."""
        commits = self._commits + 1
        self._commit(chain(rows.statements(change), (rows.counted(commits),)))
        self._commits = commits
        self.marker.count(commits)

    def remember(self, entries: Sequence[history.Entry]) -> None:
        """Add to the history; no decision depends on it, so it is no counted transaction.

        Raises:
            JournalError: nothing was written.
        """
        self._commit(history.statements(entries))

    def _commit(self, statements: Iterable[rows.Statement | history.Statement]) -> None:
        """One transaction, all of it or nothing; it makes the statements as it goes.

        Raises:
            JournalError: nothing was written.
        """
        self._keep()
        try:
            with self._db:  # which rolls back what fails
                self._db.execute("BEGIN IMMEDIATE")
                for statement, values in statements:
                    self._db.executemany(statement, values)
                self._db.execute("COMMIT")
            self._writes += 1
        except ValueError as error:
            raise JournalError(
                f"journal {self.path}: a row could not be read again: {error}",
                hint="please report this; the plugin's restart does without it",
            ) from error
        except (sqlite3.Error, OverflowError) as error:
            raise self._failed(error) from error

    def log_bytes(self) -> int:
        """How long the write-ahead log is; a log that was folded in counts until the next write."""
        try:
            return os.stat(f"{self.path}-wal").st_size
        except OSError:  # somebody removed it: `keep` sees to that
            return 0

    def checkpoint(self) -> None:
        """Fold the write-ahead log into the database; waits for the disk, so call from a thread.

        The log begins again only where all of it was folded in when somebody writes next. A busy
        plugin writes while this waits for the disk, which SQLite does not say: what came
        meanwhile is less each time. Nothing begins where nothing was written since: until 3.51.3 a
        checkpoint of a log that is folded in may damage the database if a write begins the log
        again at that instant (sqlite.org/wal.html#walresetbug).
        """
        if not os.path.exists(self.path):  # opening it would make one
            return
        try:
            with closing(sqlite3.connect(self.path, isolation_level=None, timeout=5.0)) as db:
                for _ in range(_FOLDS):
                    seen = self._writes
                    if seen == self._folded:
                        return
                    busy, length, folded = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                    self._fold_failed = False
                    if length == folded and not busy and self._writes == seen:
                        self._folded = seen
                        return
                    time.sleep(_FOLD_PAUSE)
        except sqlite3.Error as error:
            # The log only grows; the next checkpoint, or the next start, folds it in.
            if not self._fold_failed:
                log.warning(
                    "the journal's write-ahead log cannot be folded in",
                    file=self.path,
                    error=str(error),
                    hint="nothing is lost, and it is tried again, but the log grows: see whether"
                    " the state directory's disk is full or damaged",
                )
            self._fold_failed = True

    def close(self) -> None:
        """Close it; what was written stays."""
        self._db.close()


def _create(path: str) -> None:
    """An empty file that only its owner reads, unless there is one."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))


def _unreadable(error: Exception, path: str) -> bool:
    """Whether the file is there and says nothing that can be used; else it may be tried again.

    SQLite's plain error is a missing table or column; a damaged file has a code of its own, and
    what the disk or another process is to blame for has others. A file that says it is for readers
    only (its byte 18, the write version) looks like a disk that is.
    """
    if not isinstance(error, sqlite3.OperationalError):
        return True
    if error.sqlite_errorcode == sqlite3.SQLITE_READONLY:
        return os.access(path, os.W_OK)
    return error.sqlite_errorcode == sqlite3.SQLITE_ERROR
