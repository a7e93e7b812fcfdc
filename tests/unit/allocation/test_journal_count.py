"""The count of a journal's transactions goes on, and so do they, whatever is lost on the way.

A write-ahead log that is lost is only noticed by a count that is behind (invariant 4), so the count
may never begin again.
"""

import os
import shutil
import sqlite3
import stat

import pytest
from ledger_support import remembered
from test_journal import (
    CARD,
    LOG,
    P0,
    ProcessDiedError,
    behind,
    copied,
    died,
    doubted,
    path,
)

from fpga_plugin.allocation.journal import rows
from fpga_plugin.allocation.journal.journal import Journal, JournalError
from fpga_plugin.allocation.journal.records import Change

__all__ = ["path"]


def test_a_log_that_is_lost_a_second_time_is_doubted_a_second_time(path: str) -> None:
    """What was mended is in the log, too."""
    journal, _ = behind(path)
    copy = copied(path, LOG)
    journal.close()
    mended = doubted(copy)
    again = copied(copy, LOG)
    mended.close()
    doubted(again).close()


def test_a_log_that_is_lost_after_a_death_before_the_count_is_doubted(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next life counts on from what the journal says, not from the file that was behind."""
    journal, ledger = behind(path)
    with monkeypatch.context() as patched:
        patched.setattr("fpga_plugin.allocation.journal.marker.os.pwrite", died)
        with pytest.raises(ProcessDiedError):
            ledger.device_plugin.release([P0])
    journal.close()
    reopened = Journal(path)
    reopened.write(Change(memory_clear_pending={CARD.id: True}))
    copy = copied(path, LOG)
    reopened.close()
    doubted(copy).close()


def test_no_step_waits_for_the_disk(path: str) -> None:
    """Invariant 5; and so after it was put back, where somebody had removed it."""

    def settings() -> tuple[object, ...]:
        names = ("journal_mode", "synchronous", "wal_autocheckpoint")
        return tuple(journal._db.execute(f"PRAGMA {name}").fetchone()[0] for name in names)

    journal = Journal(path)
    normal = 1
    assert settings() == ("wal", normal, 0)
    os.unlink(path)
    journal.keep()
    assert os.path.exists(path)
    assert settings() == ("wal", normal, 0)
    journal.close()


def test_what_fails_within_a_transaction_keeps_no_later_one_from_being_written(path: str) -> None:
    journal = Journal(path)

    def statements():
        yield from rows.statements(Change(memory_clear_pending={CARD.id: True}))
        raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(JournalError):
        journal._commit(statements())
    journal.write(Change(drained={CARD.id: True}))
    journal.close()
    again = Journal(path)
    assert (again.snapshot.memory_clear_pending, again.snapshot.drained) == ({}, {CARD.id: True})
    again.close()


@pytest.mark.parametrize("log", [True, False], ids=["with its log", "without"])
def test_folding_makes_no_journal_where_somebody_removed_it(path: str, *, log: bool) -> None:
    """An empty one would be taken for that of a new node."""
    journal, _ = behind(path)
    os.unlink(path)
    if not log:
        os.unlink(f"{path}-wal")
    journal.checkpoint()
    assert not os.path.exists(path)
    journal.close()


def test_what_is_in_the_way_is_no_part_of_a_journal_that_is_put_back(path: str) -> None:
    """SQLite reads whatever log lies beside a database: that of another one, too."""
    journal, ledger = behind(path)
    os.mkdir(folder := os.path.join(os.path.dirname(path), "other"))
    other, _ = behind(os.path.join(folder, "journal.sqlite3"))
    other.write(Change(memory_clear_pending={CARD.id: True}))
    for suffix in ("", "-wal"):
        os.unlink(path + suffix)
        shutil.copyfile(other.path + suffix, path + suffix)
    with open(f"{path}.new", "w", encoding="ascii") as left_by_a_death:
        left_by_a_death.write("half of it")
    journal.keep()
    copy = Journal(copied(path))
    assert copy.snapshot == remembered(ledger, "boot")
    assert copy.doubt == ""
    for each in (copy, other, journal):
        each.close()


def test_a_log_that_somebody_removed_has_no_bytes(path: str) -> None:
    journal = Journal(path)
    assert journal.log_bytes()
    os.unlink(f"{path}-wal")
    assert journal.log_bytes() == 0
    journal.close()


def test_a_journal_of_another_user_keeps_its_mode(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may read it is that user's word; to change it would fail in any case."""
    Journal(path).close()
    os.chmod(path, 0o640)
    monkeypatch.setattr(
        "fpga_plugin.allocation.journal.journal.os.geteuid", lambda: os.getuid() + 1
    )
    Journal(path).close()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640
