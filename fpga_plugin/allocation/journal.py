"""The journal: claims and conditions in SQLite, so that the plugin may die at any instant.

WAL with synchronous NORMAL: a committed transaction survives the death of the process, which is
all that it has to survive (after a reboot nothing that it says about conditions holds), and costs
no disk wait. Writes happen on the event loop, one short transaction a step, before the step is
answered or begun; the write-ahead log is folded into the database by `checkpoint`, from a thread.
"""

import json
import os
import sqlite3
from collections.abc import Iterable
from typing import Final, Protocol

from fpga_plugin.allocation.records import Change, Claim, Condition, RegionRecord, Snapshot
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import AfuId, CardId, DeviceId, PodUid, RegionId, ResourceName

SCHEMA_VERSION: Final = 1

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (
  device TEXT PRIMARY KEY, resource TEXT NOT NULL, nodes TEXT NOT NULL, started INTEGER NOT NULL,
  touched INTEGER NOT NULL, exposed INTEGER NOT NULL, pod TEXT, epoch TEXT NOT NULL,
  prestarts INTEGER NOT NULL, poststops INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS regions (
  region TEXT PRIMARY KEY, condition TEXT NOT NULL, reason TEXT NOT NULL, afu_id TEXT,
  former TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS debts (card TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS strays (device TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS resources (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""


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
        snapshot: what it held when it was opened.
        set_aside: where an unreadable predecessor was moved to.
    """

    def __init__(self, path: str) -> None:
        """Open and read the journal; an unreadable one is moved aside and named in `set_aside`.

        Raises:
            JournalError: the directory cannot be written, or a newer plugin wrote the journal.
        """
        self.path = path
        self.set_aside: str | None = None
        try:
            try:
                self._db, self.snapshot = self._open()
            except sqlite3.OperationalError:
                raise
            except (sqlite3.DatabaseError, ValueError):
                # What is on the regions is then unknown, which is a state that the plugin handles:
                # everything without an owner is dirty, and kubelet's records name the owners.
                self.set_aside = f"{path}.unreadable"
                for suffix in ("", "-wal", "-shm"):
                    if os.path.exists(path + suffix):
                        os.replace(path + suffix, self.set_aside + suffix)
                self._db, self.snapshot = self._open()
        except (sqlite3.Error, OSError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> JournalError:
        return JournalError(
            f"journal {self.path}: {error}",
            hint="check that the state directory is writable and its disk not full",
        )

    def _open(self) -> tuple[sqlite3.Connection, Snapshot]:
        db = sqlite3.connect(self.path, isolation_level=None, timeout=1.0)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            # A checkpoint waits for the disk: never inside a step.
            db.execute("PRAGMA wal_autocheckpoint = 0")
            db.executescript(_SCHEMA)
            row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
            if row is None:
                db.execute("INSERT INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))
            elif row[0] != str(SCHEMA_VERSION):
                raise JournalError(  # noqa: TRY301  # the handler below only closes
                    f"journal {self.path} has schema {row[0]}, this plugin writes {SCHEMA_VERSION}",
                    hint="run the plugin version that wrote it, or drain the node and remove it",
                )
            return db, self._load(db)
        except BaseException:
            db.close()
            raise

    @staticmethod
    def _load(db: sqlite3.Connection) -> Snapshot:
        meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
        claims = db.execute(
            "SELECT device, resource, nodes, started, touched, exposed, pod, epoch, prestarts,"
            " poststops FROM claims"
        ).fetchall()
        regions = db.execute(
            "SELECT region, condition, reason, afu_id, former FROM regions"
        ).fetchall()
        debts = db.execute("SELECT card FROM debts").fetchall()
        resources = db.execute("SELECT name FROM resources").fetchall()
        strays = db.execute("SELECT device, number FROM strays").fetchall()
        return Snapshot(
            boot_id=meta.get("boot_id", ""),
            epoch=meta.get("epoch", ""),
            env_epoch=meta.get("env_epoch", ""),
            claims=tuple(
                Claim(
                    device=DeviceId(device),
                    resource=ResourceName(resource),
                    nodes=tuple((RegionId(r), node) for r, node in json.loads(nodes)),
                    started=bool(started),
                    touched=bool(touched),
                    exposed=bool(exposed),
                    pod=None if pod is None else PodUid(pod),
                    epoch=epoch,
                    prestarts=prestarts,
                    poststops=poststops,
                )
                for (
                    device,
                    resource,
                    nodes,
                    started,
                    touched,
                    exposed,
                    pod,
                    epoch,
                    prestarts,
                    poststops,
                ) in claims
            ),
            regions=tuple(
                RegionRecord(
                    region=RegionId(region),
                    condition=Condition(condition),
                    reason=reason,
                    afu_id=None if afu_id is None else AfuId(afu_id),
                    former=frozenset(PodUid(uid) for uid in json.loads(former)),
                )
                for region, condition, reason, afu_id, former in regions
            ),
            debts=frozenset(CardId(card) for (card,) in debts),
            resources=frozenset(ResourceName(name) for (name,) in resources),
            strays={DeviceId(device): number for device, number in strays},
        )

    def set_boot_id(self, boot_id: str) -> None:
        """Note in which boot the conditions hold from now on."""
        self._transaction([("INSERT OR REPLACE INTO meta VALUES ('boot_id', ?)", [(boot_id,)])])

    def write(self, change: Change) -> None:
        """Make a change durable (`JournalWriter`)."""
        statements: list[tuple[str, Iterable[tuple[object, ...]]]] = []
        if change.claims:
            statements.append(
                (
                    "DELETE FROM claims WHERE device = ?",
                    [(device,) for device, claim in change.claims.items() if claim is None],
                )
            )
            statements.append(
                (
                    "INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    [
                        (
                            claim.device,
                            claim.resource,
                            json.dumps(claim.nodes),
                            claim.started,
                            claim.touched,
                            claim.exposed,
                            claim.pod,
                            claim.epoch,
                            claim.prestarts,
                            claim.poststops,
                        )
                        for claim in change.claims.values()
                        if claim is not None
                    ],
                )
            )
        if change.regions:
            statements.append(
                (
                    "INSERT OR REPLACE INTO regions VALUES (?, ?, ?, ?, ?)",
                    [
                        (
                            record.region,
                            record.condition,
                            record.reason,
                            record.afu_id,
                            json.dumps(sorted(record.former)),
                        )
                        for record in change.regions.values()
                    ],
                )
            )
        if change.debts:
            statements.append(
                (
                    "INSERT OR IGNORE INTO debts VALUES (?)",
                    [(card,) for card, open_ in change.debts.items() if open_],
                )
            )
            statements.append(
                (
                    "DELETE FROM debts WHERE card = ?",
                    [(card,) for card, open_ in change.debts.items() if not open_],
                )
            )
        if change.resources:
            statements.append(
                (
                    "INSERT OR IGNORE INTO resources VALUES (?)",
                    [(name,) for name in sorted(change.resources)],
                )
            )
        if change.strays:
            statements.append(
                ("DELETE FROM strays WHERE device = ?", [(device,) for device in change.strays])
            )
            statements.append(
                (
                    "INSERT INTO strays VALUES (?, ?)",
                    [(device, number) for device, number in change.strays.items() if number],
                )
            )
        if change.epoch is not None:
            statements.append(
                ("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", [(change.epoch,)])
            )
        if change.env_epoch is not None:
            statements.append(
                ("INSERT OR REPLACE INTO meta VALUES ('env_epoch', ?)", [(change.env_epoch,)])
            )
        self._transaction(statements)

    def _transaction(self, statements: Iterable[tuple[str, Iterable[tuple[object, ...]]]]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for statement, rows in statements:
                    self._db.executemany(statement, rows)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def checkpoint(self) -> None:
        """Fold the write-ahead log into the database; waits for the disk, so call from a thread."""
        db = sqlite3.connect(self.path, isolation_level=None, timeout=5.0)
        try:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error:
            # The log only grows; the next checkpoint, or the next start, folds it in.
            return
        finally:
            db.close()

    def close(self) -> None:
        """Close it; what was written stays."""
        self._db.close()


class NoJournal:
    """Writes nothing: for `devices`, and for tests of the ledger alone."""

    def write(self, change: Change) -> None:
        """Forget the change (`JournalWriter`)."""
