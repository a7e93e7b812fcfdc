"""The journal: what is written survives; what cannot be read is told and set aside."""

import itertools
import os
import shutil
import sqlite3
import stat
from contextlib import closing, suppress

import pytest
from doubles.cards import BLANK, PREFIX, REGIONS, WHOLE, device, make_card
from ledger_support import ProcessDiedError, content, found, remembered, scrub, start

from fpga_plugin.ids import PodUid, RegionId
from fpga_plugin.ledger import rows
from fpga_plugin.ledger.journal import SCHEMA_VERSION, Journal, JournalError
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.ledger.records import Change, Condition, Snapshot

CARD = make_card(1, nodes=(0, 1), clears_memory=True)
OTHER = make_card(2, nodes=(2, 3))
P0, P1 = device(CARD, 0), device(CARD, 1)


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "journal.sqlite3")


def opened(journal: Journal) -> Ledger:
    ledger = Ledger(prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot")
    journal.set_boot_id("boot")
    return ledger


def lived(path: str) -> Ledger:
    """A journal with something in every table."""
    journal = Journal(path)
    ledger = opened(journal)
    ledger.kubelet_epoch("life 1")
    for card in (CARD, OTHER):
        found(ledger, card)
        scrub(ledger, card)
    ledger.allocate(REGIONS, [P0, P1])
    ledger.env_seen()
    start(ledger, P0)
    ledger.bind_pod([P0], PodUid("pod-a"))
    ledger.release([P0])
    ledger.allocate(REGIONS, [P0])
    start(ledger, P1)
    ledger.release([P1])
    ledger.allocate(WHOLE, [device(OTHER)])
    ledger.faulted(RegionId(device(OTHER, 1)), "a reason\nof 2 lines, ünicode and 'quotes'")
    ledger.set_debt(CARD.id, open_=True)
    journal.close()
    return ledger


def test_everything_survives(path: str) -> None:
    ledger = lived(path)
    assert ledger.strays
    assert content(Journal(path).snapshot) == remembered(ledger, "boot")


def test_what_was_written_survives_a_death_without_close(path: str) -> None:
    journal = Journal(path)
    ledger = opened(journal)
    found(ledger, CARD)
    ledger.allocate(REGIONS, [P0])
    # Another process would find exactly these files.
    for suffix in ("", "-wal"):
        with open(path + suffix, "rb") as source, open(path + "2" + suffix, "wb") as copy:
            copy.write(source.read())
    journal.close()
    assert content(Journal(path + "2").snapshot) == remembered(ledger, "boot")


def test_a_write_is_all_or_nothing(path: str) -> None:
    journal = Journal(path)
    before = content(journal.snapshot)
    ledger = opened(journal)
    found(ledger, CARD)
    claims = ledger.allocate(REGIONS, [P0, P1])
    with pytest.raises(JournalError):
        journal.write(Change(claims={c.device: None for c in claims}, epoch="\udc80"))
    journal.close()
    assert len(Journal(path).snapshot.claims) == 2
    assert before != content(Journal(path).snapshot)


def test_folding_the_log_loses_nothing_and_never_raises(path: str, tmp_path) -> None:
    journal = Journal(path)
    ledger = opened(journal)
    found(ledger, CARD)
    journal.checkpoint()
    ledger.allocate(REGIONS, [P0])
    journal.checkpoint()
    journal.close()
    assert content(Journal(path).snapshot) == remembered(ledger, "boot")
    journal.path = str(tmp_path / "no" / "such" / "folder")
    journal.checkpoint()


# ------------------------------------------------------------------ failures


def test_a_full_disk_leaves_memory_and_journal_as_they_were(path: str) -> None:
    journal = Journal(path)
    ledger = opened(journal)
    found(ledger, CARD)
    ledger.allocate(REGIONS, [P0])
    before = remembered(ledger, "boot")
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    pod = PodUid("p" * 500_000)
    with pytest.raises(JournalError, match=r"journal\.sqlite3: database or disk is full: check"):
        ledger.bind_pod([P0], pod)
    assert remembered(ledger, "boot") == before == content(_read(path))
    journal._db.execute("PRAGMA max_page_count = 1000000")
    ledger.bind_pod([P0], pod)
    assert ledger.claims[P0].pod == pod


def _read(path: str) -> Snapshot:
    other = Journal(path)
    other.close()
    return other.snapshot


def test_a_closed_journal_is_an_error_and_not_a_crash(path: str) -> None:
    journal = Journal(path)
    ledger = opened(journal)
    found(ledger, CARD)
    journal.close()
    with pytest.raises(JournalError, match="check that the state directory is writable"):
        ledger.allocate(REGIONS, [P0])


def test_a_directory_that_cannot_be_written_is_told(tmp_path) -> None:
    with pytest.raises(JournalError, match="No such file or directory: check that the state"):
        Journal(str(tmp_path / "missing" / "journal.sqlite3"))
    (tmp_path / "journal.sqlite3").mkdir()
    with pytest.raises(
        JournalError, match="something else than a file is in its place: move it away"
    ):
        Journal(str(tmp_path / "journal.sqlite3"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_told(tmp_path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(JournalError):
        Journal(str(tmp_path / "journal.sqlite3"))


def modes(folder) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_nobody_else_reads_a_journal_or_its_log(tmp_path) -> None:
    opened(Journal(str(tmp_path / "journal.sqlite3")))
    found = modes(tmp_path)
    assert {"journal.sqlite3", "journal.sqlite3-wal", "journal.sqlite3-shm"} <= found.keys()
    assert set(found.values()) == {0o600}


def test_a_journal_of_an_earlier_version_is_closed_to_others(tmp_path) -> None:
    path = str(tmp_path / "journal.sqlite3")
    Journal(path).write(Change(drained={CARD.id: True}))  # not closed, as after a crash: with a log
    (tmp_path / "journal.sqlite3.unreadable").touch()
    for file in tmp_path.iterdir():
        file.chmod(0o644)
    assert CARD.id in Journal(path).snapshot.drained
    assert set(modes(tmp_path).values()) == {0o600}


def test_a_journal_that_is_set_aside_or_put_back_is_closed_to_others_too(tmp_path) -> None:
    path = tmp_path / "journal.sqlite3"
    journal = Journal(str(path))
    journal.write(Change(drained={CARD.id: True}))
    path.unlink()
    journal.keep()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT INTO debts VALUES ('nonsense')")
    assert Journal(str(path)).set_aside
    assert modes(tmp_path).keys() >= {"journal.sqlite3", "journal.sqlite3.unreadable"}
    assert set(modes(tmp_path).values()) == {0o600}


def test_a_journal_is_at_no_time_open_to_others_while_it_is_put_back(tmp_path, monkeypatch) -> None:
    path = tmp_path / "journal.sqlite3"
    journal = Journal(str(path))
    path.unlink()
    seen = []
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda *names: (seen.append(modes(tmp_path)), replace(*names))
    )
    journal.keep()
    assert any("journal.sqlite3.new" in each for each in seen)
    assert {mode for each in seen for mode in each.values()} == {0o600}


def test_a_link_in_the_journals_place_does_not_change_what_it_leads_to(tmp_path) -> None:
    other = tmp_path / "other"
    other.touch(mode=0o644)
    (tmp_path / "journal.sqlite3-wal").symlink_to(other)
    with suppress(JournalError):
        Journal(str(tmp_path / "journal.sqlite3"))
    assert stat.S_IMODE(other.stat().st_mode) == 0o644


# ------------------------------------------------------------------ unreadable


def begins_anew(path: str) -> None:
    journal = Journal(path)
    assert journal.set_aside == f"{path}.unreadable"
    assert os.path.exists(journal.set_aside)
    assert content(journal.snapshot) == content(Snapshot())
    opened(journal)
    journal.close()
    again = Journal(path)
    assert again.set_aside is None
    assert again.snapshot.boot_id == "boot"
    again.close()


@pytest.mark.parametrize(
    "garbage", [b"not a database at all, but long enough to be one" * 99, b"\0" * 8192]
)
def test_garbage_is_set_aside(path: str, garbage: bytes) -> None:
    with open(path, "wb") as file:
        file.write(garbage)
    begins_anew(path)


def test_a_damaged_database_is_set_aside(path: str) -> None:
    lived(path)
    with open(path, "r+b") as file:
        size = os.path.getsize(path)
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    begins_anew(path)


def test_a_journal_that_says_it_is_for_readers_only_is_set_aside(path: str) -> None:
    lived(path)
    with open(path, "r+b") as file:
        file.seek(18)
        file.write(b"\x57")
    begins_anew(path)


CLAIM = f"""INSERT OR REPLACE INTO claims VALUES (
  '{P0}', '{REGIONS}', '[["{P0}", "/dev/dfl-port.0"]]', 0, 0, 0, NULL, '', 0, 0)"""


def run(path: str, *statements: str) -> None:
    """What a disk, or a person, did to a journal that nobody has open."""
    db = sqlite3.connect(path)
    with db:
        for statement in statements:
            db.execute(statement)
    db.close()


@pytest.mark.parametrize(
    "statements",
    [
        ("ALTER TABLE regions RENAME TO other", "CREATE TABLE regions (region TEXT)"),
        ("ALTER TABLE claims RENAME COLUMN pod TO owner",),
        ("ALTER TABLE claims ADD COLUMN more TEXT",),
        ("ALTER TABLE debts RENAME TO other", "CREATE VIEW debts AS SELECT card FROM drained"),
        ("CREATE TRIGGER t AFTER INSERT ON claims BEGIN DELETE FROM claims; END",),
    ],
)
def test_tables_that_no_plugin_made_are_set_aside(path: str, statements: tuple[str, ...]) -> None:
    lived(path)
    run(path, *statements)
    begins_anew(path)


NONSENSE = [
    "UPDATE regions SET condition = 'SHINY'",
    "UPDATE regions SET region = 'hello' WHERE region = (SELECT min(region) FROM regions)",
    f"INSERT INTO regions VALUES ('{device(CARD)}', 'BLANK', '', NULL, '[]')",
    "UPDATE regions SET former = 'pod-a'",
    "UPDATE regions SET former = '{\"a\": 1}'",
    "UPDATE regions SET former = '[1]'",
    "UPDATE regions SET former = '[\"\"]'",
    "UPDATE regions SET afu_id = 'xyz'",
    "UPDATE regions SET reason = x'ff'",
    "UPDATE regions SET reason = CAST(x'ff' AS TEXT)",
    "UPDATE regions SET reason = hex(zeroblob(40000))",
    f"UPDATE regions SET former = '{'[' * 60000}'",
    CLAIM.replace(f"'{P0}', '{REGIONS}'", f"'../{P0}', '{REGIONS}'"),
    CLAIM.replace(f"'{REGIONS}'", f"'{WHOLE}'"),
    CLAIM.replace(f"'{REGIONS}'", "'fpga.intel.com/region-../../etc'"),
    CLAIM.replace('"/dev/dfl-port.0"', "5"),
    CLAIM.replace('"/dev/dfl-port.0"', '"/dev/a b"'),
    CLAIM.replace('"/dev/dfl-port.0"', '"\\ud800"'),
    CLAIM.replace('"]]', f'"], ["{P0}", "/dev/dfl-port.1"]]'),
    CLAIM.replace('[["', '["').replace('"]]', '"]'),
    CLAIM.replace(f'[["{P0}", "/dev/dfl-port.0"]]', "[]"),
    CLAIM.replace(f'[["{P0}", "/dev/dfl-port.0"]]', "7"),
    CLAIM.replace(f'[["{P0}"', f'[["{P1}"'),
    CLAIM.replace(f'[["{P0}"', f'[["{device(OTHER, 0)}"'),
    CLAIM.replace("0, 0)", "-1, 0)"),
    CLAIM.replace("0, 0)", "9223372036854775807, 0)"),
    CLAIM.replace("0, 0)", "'many', 0)"),
    CLAIM.replace("0, 0, 0, NULL", "'yes', 0, 0, NULL"),
    CLAIM.replace("0, 0, 0, NULL", "7, 0, 0, NULL"),
    CLAIM.replace("0, 0, 0, NULL", "0, 0, 0, ''"),
    f"INSERT INTO debts VALUES ('{P0}')",
    "INSERT INTO strays VALUES ('zzz', 1)",
    f"INSERT INTO strays VALUES ('{device(OTHER, 0)}', -1)",
    f"INSERT OR REPLACE INTO since VALUES ('{P0}', 9e999)",
    "INSERT INTO resources VALUES ('fpga.intel.com/x\n../y')",
    "INSERT OR REPLACE INTO meta VALUES ('epoch', x'00')",
]


@pytest.mark.parametrize("statement", NONSENSE)
def test_rows_that_no_plugin_wrote_are_left_out(path: str, statement: str) -> None:
    lived(path)
    run(path, statement)
    journal = Journal(path)
    assert journal.left_out
    assert journal.set_aside == f"{path}.unreadable"
    snapshot = journal.snapshot
    # No condition counts, and kubelet is asked for owners that may be missing.
    assert snapshot.unreconciled >= {CARD.id, OTHER.id}
    assert {r.condition for r in snapshot.regions} <= {Condition.DIRTY, Condition.FAULTED}
    # The other card's claim, fault and debts are as they were.
    assert snapshot.debts == {CARD.id}
    assert device(OTHER) in {claim.device for claim in snapshot.claims}
    if not statement.startswith("UPDATE regions"):
        faulted = {r.region for r in snapshot.regions if r.condition is Condition.FAULTED}
        assert faulted == {RegionId(device(OTHER, 1))}
    # It is mended: a second start finds nothing wrong, and what is done is written.
    opened(journal).release([device(OTHER)])
    journal.close()
    again = Journal(path)
    assert not again.left_out
    assert device(OTHER) not in {claim.device for claim in again.snapshot.claims}
    assert again.snapshot.unreconciled >= {OTHER.id}
    again.close()
    with sqlite3.connect(f"{path}.unreadable") as db:
        assert db.execute("SELECT count(*) FROM claims").fetchone() >= (2,)
    db.close()


def test_a_card_that_is_claimed_in_both_ways_has_no_claim_until_kubelet_tells(path: str) -> None:
    lived(path)
    run(path, CLAIM.replace(f"'{P0}', '{REGIONS}'", f"'{device(CARD)}', '{WHOLE}'"))
    journal = Journal(path)
    (left_out,) = journal.left_out
    assert left_out == f"claims on card {CARD.id}: as a whole and by region at the same time"
    assert [claim.device for claim in journal.snapshot.claims] == [device(OTHER)]
    ledger = opened(journal)
    found(ledger, CARD)
    assert ledger.adopt(REGIONS, P0, PodUid("pod-a"), {}).pod == "pod-a"
    journal.close()


def test_a_drained_card_stays_drained_whatever_else_is_damaged(path: str) -> None:
    lived(path)
    run(path, f"INSERT INTO drained VALUES ('{OTHER.id}')", *NONSENSE[:3])
    assert Journal(path).snapshot.drained == {OTHER.id}


def test_a_plugin_that_dies_while_it_mends_finds_everything_again(path: str, monkeypatch) -> None:
    lived(path)
    run(path, NONSENSE[2])
    real = rows.replacement

    def dies(snapshot: Snapshot):
        yield from itertools.islice(real(snapshot), 6)
        raise ProcessDiedError

    with monkeypatch.context() as patch:
        patch.setattr(rows, "replacement", dies)
        with pytest.raises(ProcessDiedError):
            Journal(path)
    journal = Journal(path)
    assert len(journal.left_out) == 1
    assert device(OTHER) in {claim.device for claim in journal.snapshot.claims}


def test_the_columns_that_are_expected_are_those_that_are_made(path: str) -> None:
    Journal(path).close()
    db = sqlite3.connect(path)
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    db.close()
    assert tables == set(rows._COLUMNS)  # their columns: check_tables


def test_a_row_that_this_test_calls_sound_is_read(path: str) -> None:
    lived(path)
    with sqlite3.connect(path) as db:
        db.execute(CLAIM)
    db.close()
    journal = Journal(path)
    assert journal.set_aside is None
    assert {c.device: c for c in journal.snapshot.claims}[P0].nodes == (
        (RegionId(P0), "/dev/dfl-port.0"),
    )


def test_a_newer_plugins_journal_is_refused_and_left_untouched(path: str) -> None:
    newer = SCHEMA_VERSION + 1
    db = sqlite3.connect(path)
    with db:
        db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)")
        db.execute("INSERT INTO meta VALUES ('schema', ?)", (str(newer),))
        db.execute("CREATE TABLE claims (whatever TEXT)")
    db.close()
    with pytest.raises(JournalError, match=f"schema '{newer}', this plugin writes"):
        Journal(path)
    db = sqlite3.connect(path)
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    db.close()
    assert "regions" not in tables
    assert not os.path.exists(f"{path}.unreadable")


def test_a_locked_journal_is_not_taken_for_an_unreadable_one(path: str) -> None:
    lived(path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(JournalError, match="locked"):
        Journal(path)
    holder.execute("ROLLBACK")
    holder.close()
    assert not os.path.exists(f"{path}.unreadable")
    assert Journal(path).snapshot.claims


# ------------------------------------------------------------------ a new journal


def test_until_kubelets_records_were_adopted_the_journal_knows_that_they_were_not(
    path: str,
) -> None:
    """The plugin may die between its first start and kubelet's first answer."""
    journal = Journal(path)
    opened(journal).card_found(CARD, {}, BLANK)
    journal.close()
    journal = Journal(path)
    assert journal.snapshot.boot_id == "boot"
    assert journal.snapshot.unreconciled == {CARD.id}
    ledger = opened(journal)
    ledger.card_found(CARD, {}, BLANK)
    ledger.adopt(REGIONS, P0, PodUid("pod-a"), {})
    assert ledger.unreconciled == {CARD.id}
    ledger.reconciled([CARD.id])
    journal.close()
    assert not Journal(path).snapshot.unreconciled


def test_a_condition_is_written_before_its_work_begins(path: str) -> None:
    journal = Journal(path)
    ledger = opened(journal)
    found(ledger, CARD)
    ledger.working([RegionId(P0)])
    records = {r.region: r.condition for r in _read(path).regions}
    assert records[RegionId(P0)] is Condition.SCRUBBING


def test_a_journal_that_is_damaged_while_it_is_used_says_what_helps(path: str) -> None:
    lived(path)
    journal = Journal(path)
    ledger = opened(journal)
    journal.checkpoint()
    journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(path, "r+b") as file:
        size = os.path.getsize(path)
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    journal._db.execute("PRAGMA cache_size = 0")
    with pytest.raises(JournalError, match="malformed: restart the plugin, which sets it aside"):
        ledger.release([device(OTHER)])
    journal.close()
    begins_anew(path)


# ------------------------------------------------------------------ removed while it is used


@pytest.mark.parametrize("what", ["directory", "file", "file and log", "another file"])
def test_a_journal_that_is_removed_while_it_is_used_is_put_back(tmp_path, what: str) -> None:
    path = str(tmp_path / "state" / "journal.sqlite3")
    (tmp_path / "state").mkdir()
    ledger = lived(path)
    journal = Journal(path)
    ledger = opened(journal)
    if what == "directory":
        shutil.rmtree(tmp_path / "state")
    else:
        os.unlink(path)
    if what == "file and log":
        os.unlink(f"{path}-wal")
    if what == "another file":
        lived(path)
    journal.checkpoint()  # makes no empty one
    ledger.release([device(OTHER)])
    ledger.set_debt(CARD.id, open_=False)
    assert stat.S_IMODE(os.stat(tmp_path / "state").st_mode) & 0o077 == 0 or what != "directory"
    # What another process would find, the log included.
    os.mkdir(tmp_path / "copy")
    for suffix in ("", "-wal"):
        shutil.copyfile(path + suffix, str(tmp_path / "copy" / f"journal.sqlite3{suffix}"))
    copy = Journal(str(tmp_path / "copy" / "journal.sqlite3"))
    assert content(copy.snapshot) == remembered(ledger, "boot")
    copy.close()
    ledger.set_debt(CARD.id, open_=True)
    journal.close()
    assert content(Journal(path).snapshot) == remembered(ledger, "boot")


def test_a_journal_that_cannot_be_put_back_refuses_what_it_cannot_keep(tmp_path) -> None:
    path = str(tmp_path / "state" / "journal.sqlite3")
    (tmp_path / "state").mkdir()
    ledger = lived(path)
    journal = Journal(path)
    ledger = opened(journal)
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "state").write_text("a file")
    before = remembered(ledger, "boot")
    with pytest.raises(JournalError, match="check that the state directory is writable"):
        ledger.release([device(OTHER)])
    journal.keep()  # logs
    assert remembered(ledger, "boot") == before
    (tmp_path / "state").unlink()
    assert ledger.release([device(OTHER)])
    journal.close()
    assert content(Journal(path).snapshot) == remembered(ledger, "boot")
