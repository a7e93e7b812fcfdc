"""The journal: what is written survives; what cannot be read is told and set aside."""

import asyncio
import itertools
import os
import shutil
import sqlite3
import stat
import threading
from contextlib import closing, suppress
from dataclasses import fields
from functools import partial

import pytest
import structlog
from doubles import LIMIT
from doubles.cards import AFU, BLANK, PREFIX, REGIONS, WHOLE, device, make_card
from ledger_support import ProcessDiedError, found, remembered, scrub, start
from test_state_unwritten import owner

from fpga_plugin.allocation.journal import rows
from fpga_plugin.allocation.journal.history import Entry, HistoryEvent, HistoryKind
from fpga_plugin.allocation.journal.journal import Journal, JournalError
from fpga_plugin.allocation.journal.marker import Marker, Served
from fpga_plugin.allocation.journal.peek import peek
from fpga_plugin.allocation.journal.records import (
    AliasBinding,
    Allocation,
    Change,
    ClaimOwner,
    Condition,
    DebugHold,
    Fact,
    Prepared,
    RegionRecord,
    Tenancy,
    TenancyKey,
    TenantImage,
)
from fpga_plugin.allocation.journal.rows import SCHEMA_VERSION
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.daemon import process as daemon
from fpga_plugin.errors import RefusedError
from fpga_plugin.hardware.grant import Grant, Mount
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import RegionId, device_variable
from fpga_plugin.kubernetes.cgroup import Cgroup
from fpga_plugin.kubernetes.names import ClaimUid, PodUid, ResourceName
from fpga_plugin.settings.settings import Settings

CARD = make_card(1, nodes=(0, 1), clears_memory=True)
OTHER = make_card(2, nodes=(2, 3))
P0, P1 = device(CARD, 0), device(CARD, 1)


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "journal.sqlite3")


def opened(journal: Journal) -> Ledger:
    return Ledger(prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot")


def lived(path: str) -> Ledger:
    """A journal with rows of every kind but those of damage."""
    journal = Journal(path)
    ledger = opened(journal)
    ledger.device_plugin.kubelet_found("life 1")
    for card in (CARD, OTHER):
        found(ledger, card)
        scrub(ledger, card)
    ledger.device_plugin.allocate(REGIONS, [P0, P1])
    ledger.device_plugin.env_seen()
    start(ledger, P0)
    ledger.device_plugin.bind_pod([P0], PodUid("pod-a"))
    ledger.device_plugin.release([P0])
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P1)
    ledger.device_plugin.release([P1])
    ledger.device_plugin.allocate(WHOLE, [device(OTHER)])
    ledger.work.faulted(RegionId(device(OTHER, 1)), "a reason\nof 2 lines, ünicode and 'quotes'")
    ledger.work.set_memory_clear_pending(CARD.id, open_=True)
    journal.close()
    return ledger


def test_everything_survives(path: str) -> None:
    ledger = lived(path)
    assert ledger.pending_poststops
    assert Journal(path).snapshot == remembered(ledger, "boot")


def test_what_was_written_survives_a_death_without_close(path: str) -> None:
    journal = Journal(path)
    ledger = opened(journal)
    found(ledger, CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    copy = copied(path)
    journal.close()
    assert Journal(copy).snapshot == remembered(ledger, "boot")


LOG = ("journal.sqlite3", "marker")
"""What is left without a write-ahead log."""


def copied(path: str, only: tuple[str, ...] = (*LOG, "journal.sqlite3-wal")) -> str:
    """Another process would find exactly these files."""
    directory = os.path.dirname(path)
    os.mkdir(copy := os.path.join(directory, "copy"))
    for name in only:
        shutil.copyfile(os.path.join(directory, name), os.path.join(copy, name))
    return os.path.join(copy, "journal.sqlite3")


def behind(path: str) -> tuple[Journal, Ledger]:
    """A journal of which most is in the file, and an allocation and its image only in the log."""
    journal = Journal(path)
    ledger = opened(journal)
    for card in (CARD, OTHER):
        found(ledger, card)
        scrub(ledger, card)
    ledger.hardware.set_drained(OTHER.id, drained=True)
    journal.checkpoint()
    ledger.device_plugin.allocate(REGIONS, [P0])
    start(ledger, P0)
    return journal, ledger


def doubted(path: str) -> Journal:
    """Opens a journal of which nothing may be believed that gives a region out unscrubbed."""
    journal = Journal(path)
    regions = journal.snapshot.regions.values()
    assert {r.region for r in regions} == {r.id for card in (CARD, OTHER) for r in card.regions}
    assert {r.condition for r in regions} == {Condition.DIRTY}
    assert opened(journal).unreconciled == {CARD.id, OTHER.id}
    assert OTHER.id in journal.snapshot.drained
    assert journal.set_aside is not None
    return journal


@pytest.mark.parametrize("what", ["removed", "empty", "cut off", "damaged"])
def test_a_write_ahead_log_that_is_lost_gives_no_region_out_unscrubbed(
    path: str, what: str
) -> None:
    journal, _ = behind(path)
    copy = copied(path, LOG if what == "removed" else (*LOG, "journal.sqlite3-wal"))
    journal.close()
    if what == "empty":
        os.truncate(f"{copy}-wal", 0)
    elif what == "cut off":
        os.truncate(f"{copy}-wal", 32 + 24 + 4096 - 1)  # within its first page
    elif what == "damaged":
        with open(f"{copy}-wal", "r+b") as log:
            log.seek(32 + 24 + 100)
            log.write(b"\xff" * 8)
    reopened = doubted(copy)
    assert "write-ahead log was lost or damaged" in reopened.doubt
    reopened.write(Change(memory_clear_pending={CARD.id: True}))
    reopened.close()
    assert Journal(copy).doubt == "", "it was doubted once, and counts on from there"


def test_an_allocation_of_a_damaged_journal_gives_nobody_its_device_until_kubelet_told(
    path: str,
) -> None:
    """It may have ended since, and another pod have a region of the card."""
    journal, _ = behind(path)
    copy = copied(path, LOG)
    journal.close()
    damaged = Journal(copy)
    old = Allocation(P1, REGIONS, {RegionId(P1): CARD.regions[1].grant})
    damaged.write(Change(allocations={P1: old}))
    damaged.close()
    ledger = opened(Journal(copy))
    ledger.hardware.card_found(CARD, {}, BLANK)
    assert P1 in ledger.allocations
    with pytest.raises(RefusedError, match="is not known"):
        ledger.device_plugin.allocate(REGIONS, [P1])
    ledger.reconciled([CARD.id])
    assert ledger.device_plugin.allocate(REGIONS, [P1])


@pytest.mark.parametrize("prestarts", [0, 1], ids=["not started", "stopped"])
def test_of_an_allocation_of_a_damaged_journal_a_container_may_have_started_since(
    path: str, prestarts: int
) -> None:
    """Its PreStart may be what was lost.

    Else the region would be scrubbed under that container, and the pod's next one be taken for its
    first (found by the campaign: seed 92, portion 7).
    """
    journal = Journal(path)
    ledger = opened(journal)
    ledger.device_plugin.kubelet_found("life 1")
    found(ledger, CARD)
    scrub(ledger, CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    for _ in range(prestarts):
        ledger.device_plugin.prestart_seen([P0])
        ledger.device_plugin.poststop_seen([P0])
    assert ledger.device_plugin.balanced(P0) is bool(prestarts)
    journal.checkpoint()
    start(ledger, P0)
    copy = copied(path, LOG)
    journal.close()
    ledger = opened(Journal(copy))
    assert not ledger.allocations[P0].started, "it is what was lost"
    assert ledger.allocations[P0].used
    assert not ledger.device_plugin.balanced(P0)


@pytest.mark.parametrize("content", [None, "", "7", "00000000000000000007\n{}x"])
def test_a_journal_of_which_no_marker_tells_is_doubted(path: str, content: str | None) -> None:
    journal, _ = behind(path)
    journal.close()
    marker = os.path.join(os.path.dirname(path), "marker")
    os.unlink(marker)
    if content is not None:
        with open(marker, "w", encoding="ascii") as file:
            file.write(content)
    reopened = doubted(path)
    assert reopened.doubt == f"{marker} does not say whether it is the last life's"
    reopened.close()
    assert Journal(path).doubt == ""


def swapped(path: str, other: str) -> None:
    """Another state directory; what lies below kubelet's directory stays."""
    for name in ("journal.sqlite3", "journal.sqlite3-wal", "journal.sqlite3-shm"):
        at = os.path.join(os.path.dirname(path), name)
        away = os.path.join(os.path.dirname(path), other)
        os.makedirs(away, exist_ok=True)
        if os.path.exists(at):
            os.replace(at, os.path.join(away, name))


def test_a_state_directory_that_comes_back_is_doubted_whatever_it_counts(path: str) -> None:
    """In between, another one served: it has no allocation of pods since then."""
    journal, _ = behind(path)
    journal.close()
    swapped(path, "first")
    second = Journal(path)
    assert second.doubt.startswith("the plugin last ran with another one, in ")
    assert second.snapshot == Change(facts={Fact.LOST: second.doubt})
    assert second.set_aside is None, "there is nothing to keep a copy of"
    assert opened(second)
    second.close()
    again = Journal(path)
    assert again.doubt == ""
    again.close()
    swapped(path, "second")
    for name in os.listdir(first := os.path.join(os.path.dirname(path), "first")):
        os.replace(os.path.join(first, name), os.path.join(os.path.dirname(path), name))
    back = doubted(path)
    assert back.doubt.startswith("the plugin last ran with another one, in ")
    back.close()
    assert Journal(path).doubt == ""


def test_a_marker_that_could_not_be_written_makes_the_next_start_doubt(path: str) -> None:
    """It is not known then what another state directory did in between."""
    marker = os.path.join(os.path.dirname(path), "marker")
    Journal(path).close()
    temporary = os.path.join(os.path.dirname(path), ".marker.tmp")
    os.mkdir(temporary)  # in the way
    with structlog.testing.capture_logs() as logs:
        os.unlink(marker)
        journal, ledger = behind(path)
        ledger.device_plugin.release([P0])
    (one,) = logs
    assert one["event"] == "the journal's marker cannot be written"
    journal.close()
    os.rmdir(temporary)
    doubted(path).close()
    assert Journal(path).doubt == ""


def test_two_copies_of_one_journal_are_told_apart_once_one_of_them_was_mended(path: str) -> None:
    journal, _ = behind(path)
    copy = copied(path)
    identity = journal.marker._now.journal
    journal.close()
    os.unlink(os.path.join(os.path.dirname(copy), "marker"))
    mended = Journal(copy)
    assert mended.doubt
    assert mended.marker._now.journal != identity
    mended.close()


@pytest.mark.parametrize("what", ["lost", "set aside", "in part"])
def test_regions_that_a_lost_journal_may_have_known_may_hold_an_owners_image(
    path: str, what: str
) -> None:
    journal, _ = behind(path)
    journal.close()
    if what == "lost":
        os.unlink(path)
    elif what == "set aside":
        run(path, "DROP TABLE journal")
    else:
        run(path, f"UPDATE journal SET value = '0' WHERE kind = 'regions' AND key = '{P1}'")
    Journal(path).close()  # and the plugin dies before it has seen any card
    ledger = opened(Journal(path))
    late = make_card(3, nodes=(4, 5))
    claimed = make_card(4, nodes=(6, 7))
    ledger.device_plugin.adopt(REGIONS, device(claimed, 0), PodUid("pod"), env_of(claimed))
    ledger.device_plugin.release([device(claimed, 0)])  # before its card is there
    for card in (CARD, OTHER, late, claimed):
        found(ledger, card)
    images = {r.id: {None} for c in (CARD, OTHER, late, claimed) for r in c.regions}
    assert ledger.images == images


def env_of(card: Card) -> dict[str, str]:
    """What a pod's container has of a card's regions."""
    return {device_variable(r.id): str(r.grant) for r in card.regions}


def test_a_new_nodes_regions_hold_no_owners_images(path: str) -> None:
    for _ in range(2):
        journal = Journal(path)
        assert Fact.LOST not in journal.snapshot.facts
        ledger = opened(journal)
        found(ledger, CARD)
        assert not ledger.images
        journal.close()


def test_a_death_between_commit_and_count_costs_nothing(path: str, monkeypatch) -> None:
    journal, ledger = behind(path)
    with monkeypatch.context() as patched:
        patched.setattr("fpga_plugin.allocation.journal.marker.os.pwrite", died)
        with pytest.raises(ProcessDiedError):
            ledger.device_plugin.release([P0])
    copy = copied(path)
    journal.close()
    reopened = Journal(copy)
    assert reopened.doubt == ""
    assert P0 not in reopened.snapshot.allocations


def died(*_: object) -> None:
    raise ProcessDiedError


def test_a_write_is_all_or_nothing(path: str) -> None:
    journal = Journal(path)
    before = journal.snapshot
    ledger = opened(journal)
    found(ledger, CARD)
    allocations = ledger.device_plugin.allocate(REGIONS, [P0, P1])
    with pytest.raises(JournalError):
        journal.write(
            Change(
                allocations={c.device: None for c in allocations},
                resources={ResourceName("\udc80"): True},
            )
        )
    journal.close()
    assert len(Journal(path).snapshot.allocations) == 2
    assert before != Journal(path).snapshot


def test_folding_the_log_loses_nothing_and_never_raises(path: str, tmp_path) -> None:
    journal = Journal(path)
    ledger = opened(journal)
    found(ledger, CARD)
    journal.checkpoint()
    ledger.device_plugin.allocate(REGIONS, [P0])
    journal.checkpoint()
    journal.close()
    assert Journal(path).snapshot == remembered(ledger, "boot")
    journal.path = str(tmp_path / "no" / "such" / "folder")
    journal.checkpoint()


def written(journal: Journal, size: int) -> None:
    """Write until the log has so many bytes."""
    ledger = opened(journal)
    found(ledger, CARD)
    while journal.log_bytes() < size:
        for drained in (True, False):
            ledger.hardware.set_drained(CARD.id, drained=drained)


def test_a_log_that_was_folded_in_gives_its_room_back_with_the_next_write(path: str) -> None:
    journal = Journal(path)
    written(journal, 3 << 20)
    journal.checkpoint()
    written(journal, 0)
    assert journal.log_bytes() <= 1 << 20
    journal.close()


def test_what_is_written_while_the_log_is_folded_in_does_not_keep_it_growing(
    path: str, monkeypatch
) -> None:
    journal = Journal(path)
    written(journal, 3 << 20)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM journal").fetchall()
        written(journal, journal.log_bytes() + 1)  # which it does not see: it is not folded in
        pauses = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                reader.execute("COMMIT")

        monkeypatch.setattr("fpga_plugin.allocation.journal.journal.time.sleep", pause)
        journal.checkpoint()
        assert len(pauses) == 3
    written(journal, 0)
    written(journal, 0)
    assert journal.log_bytes() <= 1 << 20
    journal.close()


def passes(monkeypatch, beside=lambda: None) -> list[str]:
    """The checkpoints that begin from now on; something is done before each is notified of."""
    begun: list[str] = []

    class Connection(sqlite3.Connection):
        def execute(self, sql, *values):
            cursor = super().execute(sql, *values)  # which has the row already
            if "wal_checkpoint" in sql:
                begun.append(sql)
                beside()
            return cursor

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))
    return begun


def test_a_commit_beside_a_pass_that_folded_all_it_knew_is_folded_in_by_another(
    path: str, monkeypatch
) -> None:
    journal = Journal(path)
    written(journal, 3 << 20)
    ledger = opened(journal)
    beside = [partial(ledger.hardware.set_drained, CARD.id, drained=on) for on in (False, True)]
    monkeypatch.setattr("fpga_plugin.allocation.journal.journal._FOLD_PAUSE", 0)
    begun = passes(monkeypatch, lambda: beside.pop()() if beside else None)
    journal.checkpoint()
    assert len(begun) == 3
    written(journal, 0)
    assert journal.log_bytes() <= 1 << 20
    journal.close()


def test_commits_of_a_thread_while_the_log_is_folded_in_do_not_keep_it_growing(path: str) -> None:
    journal = Journal(path)
    written(journal, 3 << 20)
    folding = threading.Thread(target=journal.checkpoint)
    folding.start()
    written(journal, 0)
    folding.join(LIMIT)
    written(journal, 0)
    assert journal.log_bytes() <= 1 << 20
    journal.close()


def test_a_log_is_not_folded_in_again_where_nothing_was_written(path: str, monkeypatch) -> None:
    """SQLite before 3.51.3 may damage a database whose folded log begins again meanwhile."""
    journal = Journal(path)
    begun = passes(monkeypatch)
    for write in (
        lambda: None,  # it was opened, which writes
        lambda: journal.write(Change(drained={CARD.id: True})),
        lambda: journal.remember([Entry(RegionId(P0), HistoryKind.CLAIMED, HistoryEvent(at=1.0))]),
    ):
        write()
        begun.clear()
        for _ in range(3):
            journal.checkpoint()
        assert len(begun) == 1
    journal.close()


def test_a_pass_that_another_kept_from_beginning_has_folded_nothing(path: str, monkeypatch) -> None:
    journal = Journal(path)
    written(journal, 3 << 20)
    monkeypatch.setattr("fpga_plugin.allocation.journal.journal._FOLD_PAUSE", 0)
    told = [(1, -1, -1)]

    class Connection(sqlite3.Connection):
        def execute(self, sql, *values):
            if told and "wal_checkpoint" in sql:
                return super().execute("VALUES (?, ?, ?)", told.pop())
            return super().execute(sql, *values)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))
    journal.checkpoint()
    written(journal, 0)
    assert journal.log_bytes() <= 1 << 20
    journal.close()


def test_a_log_that_cannot_be_folded_in_is_told_once_until_it_works_again(
    path: str, monkeypatch
) -> None:
    journal = Journal(path)
    connect = sqlite3.connect

    def fails(*_values, **_named):
        raise sqlite3.OperationalError("disk I/O error")

    with structlog.testing.capture_logs() as logs:
        for times in (1, 2):
            monkeypatch.setattr(sqlite3, "connect", fails)
            for _ in range(3):
                journal.checkpoint()
            monkeypatch.setattr(sqlite3, "connect", connect)
            journal.checkpoint()
            journal.write(Change(drained={CARD.id: True}))
            told = [(each["log_level"], each["file"], each["error"]) for each in logs]
            assert told == [("warning", path, "disk I/O error")] * times
    journal.close()


def test_a_log_that_grows_fast_is_folded_in_before_its_time(path: str, monkeypatch) -> None:
    monkeypatch.setattr(daemon, "KEEP_SECONDS", 0.001)
    monkeypatch.setattr(daemon, "FOLD_SECONDS", 1e9)
    monkeypatch.setattr(daemon, "FOLD_BYTES", 2 << 20)
    journal = Journal(path)
    folded = threading.Event()
    fold = journal.checkpoint
    monkeypatch.setattr(journal, "checkpoint", lambda: (fold(), folded.set()))

    async def work() -> bool:
        folding = asyncio.create_task(daemon.Daemon(Settings())._fold(journal))
        await asyncio.sleep(0.02)
        early = folded.is_set()
        written(journal, 3 << 20)
        assert await asyncio.to_thread(folded.wait, LIMIT)
        folding.cancel()
        await asyncio.wait({folding})
        return early

    assert not asyncio.run(work())
    written(journal, 0)
    assert journal.log_bytes() <= 1 << 20
    journal.close()


# ------------------------------------------------------------------ failures


def test_a_full_disk_leaves_the_journal_as_it_was_until_there_is_room(path: str) -> None:
    journal = Journal(path)
    ledger = opened(journal)
    found(ledger, CARD)
    ledger.device_plugin.allocate(REGIONS, [P0])
    before = remembered(ledger, "boot")
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    uid = PodUid("p" * 60_000)
    with pytest.raises(JournalError, match=r"journal\.sqlite3: database or disk is full: check"):
        ledger.device_plugin.bind_pod([P0], uid)
    assert before == _read(path)
    journal._db.execute("PRAGMA max_page_count = 1000000")
    ledger.device_plugin.bind_pod([P0], uid)
    assert remembered(ledger, "boot") == _read(path)
    assert ledger.allocations[P0].pod == uid


def _read(path: str) -> Change:
    other = Journal(path)
    other.close()
    return other.snapshot


def test_a_closed_journal_is_an_error_and_not_a_crash(path: str) -> None:
    journal = Journal(path)
    ledger = opened(journal)
    found(ledger, CARD)
    journal.close()
    with pytest.raises(JournalError, match="check that the state directory is writable"):
        ledger.device_plugin.allocate(REGIONS, [P0])


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


def test_a_journal_that_is_set_aside_or_put_back_is_closed_to_others_too(tmp_path) -> None:
    path = tmp_path / "journal.sqlite3"
    journal = Journal(str(path))
    journal.write(Change(drained={CARD.id: True}))
    path.unlink()
    journal.keep()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(row("memory_clear_pending", "nonsense", "true"))
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
    assert journal.doubt.startswith("it was set aside: "), "people read why"
    assert journal.snapshot == Change(facts={Fact.LOST: journal.doubt})
    opened(journal)
    journal.close()
    again = Journal(path)
    assert (again.set_aside, again.doubt) == (None, "")
    assert again.snapshot.facts[Fact.BOOT] == "boot"
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


def test_pages_that_do_not_fit_together_are_set_aside_though_they_can_be_read(path: str) -> None:
    lived(path)
    with open(path, "r+b") as file:
        file.seek(36)
        file.write((7).to_bytes(4))  # free pages, of which there are none
    begins_anew(path)


def test_a_journal_that_says_it_is_for_readers_only_is_set_aside(path: str) -> None:
    lived(path)
    with open(path, "r+b") as file:
        file.seek(18)
        file.write(b"\x57")
    begins_anew(path)


def row(kind: str, key: str, value: str) -> str:
    """SQL that writes a row over whatever is there."""
    quoted = ", ".join("'" + text.replace("'", "''") + "'" for text in (kind, key, value))
    return f"INSERT OR REPLACE INTO journal VALUES ({quoted})"


GRANT = '{"nodes":["/dev/dfl-port.0"],"shared":[],"mounts":[],"env":{}}'
GRANTS = f'{{"{P0}":{GRANT}}}'
CLAIM = (
    f'{{"device":"{P0}","resource":"{REGIONS}","grants":{GRANTS},"started":false,"prestart_seen":false,'
    '"missed_prestart":false,"pod":null,"instance":"","prestarts":0,"poststops":0,"number":0,"since":0.0}'
)


def allocation(was: str = "", is_: str = "", *, of: str = CLAIM, device: str = P0) -> str:
    """SQL that writes an allocation, in which something is something else."""
    assert was in of
    return row("allocations", device, of.replace(was, is_))


def record(was: str, is_: str) -> str:
    """SQL that does the same to all records of regions."""
    return f"UPDATE journal SET value = replace(value, '{was}', '{is_}') WHERE kind = 'regions'"


KEY = f'{{"region":"{P0}","allocation":7,"pod":"pod-b"}}'
TENANCY = (
    f'{{"key":{KEY},"nodes":["/dev/dfl-port.0"],"used":true,"left":true,'
    '"cgroups":[{"tree":"/t","path":"/t/p","device":1,"inode":2}]}'
)


def tenancy(was: str = "", is_: str = "", *, key: str = KEY) -> str:
    """SQL that writes a tenancy, in which something is something else."""
    assert was in TENANCY
    return row("tenancies", key, TENANCY.replace(was, is_))


def tenancy_key(was: str, is_: str) -> str:
    """The same in its key, which is in the row besides."""
    assert was in KEY
    return tenancy(was, is_, key=KEY.replace(was, is_))


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
        ("ALTER TABLE journal RENAME TO other", "CREATE TABLE journal (kind, key, value)"),
        ("ALTER TABLE journal RENAME COLUMN key TO name",),
        ("ALTER TABLE journal ADD COLUMN more TEXT",),
        ("ALTER TABLE journal RENAME TO other", "CREATE VIEW journal AS SELECT * FROM other"),
        ("CREATE TRIGGER t AFTER INSERT ON journal BEGIN DELETE FROM journal; END",),
        ("CREATE UNIQUE INDEX i ON journal (value, key)",),
        ("DROP TABLE journal",),
    ],
)
def test_tables_that_no_plugin_made_are_set_aside(path: str, statements: tuple[str, ...]) -> None:
    lived(path)
    run(path, *statements)
    begins_anew(path)


LONG = ",".join(f'"/dev/{number}"' for number in range(30000))


def debug(old: str, new: str) -> str:
    """SQL that writes a row of a debugged region with one thing wrong."""
    sound = (
        f'{{"region":"{P0}","pod":"pod","namespace":"space","name":"name","containers":["app"],'
        '"seconds":600.0,"failure":"","until":0.0}'
    )
    assert old in sound
    return row("debug_holds", P0, sound.replace(old, new))


NONSENSE = [
    debug('"until":0.0', '"until":-1.0'),
    debug('"name":"name"', '"name":"../name"'),
    debug('"containers":["app"]', '"containers":["a b"]'),
    debug('"seconds":600.0', '"seconds":1e300'),
    debug(f'"region":"{P0}"', f'"region":"{P1}"'),
    record('"condition":"', '"condition":"SHINY'),
    record('"condition"', '"conditions"'),
    record('"reason":"', '"more":1,"reason":"'),
    record('"afu_id":"', '"afu_id":"x'),
    record('"afu_id":"b', '"afu_id":"B'),
    record(f'"region":"{P0}"', f'"region":"{P1}"'),
    "UPDATE journal SET value = substr(value, 2) WHERE kind = 'regions'",
    "UPDATE journal SET value = CAST(value AS BLOB) WHERE kind = 'regions'",
    "UPDATE journal SET value = value || CAST(x'ff' AS TEXT) WHERE kind = 'regions'",
    record('"reason":"', '"reason":"' + "x" * 65536),
    f"UPDATE journal SET value = '{'[' * 60000}' WHERE kind = 'regions'",
    f"""UPDATE journal SET value = '{{"x":{"[" * 60000}' WHERE kind = 'regions'""",
    f"UPDATE journal SET key = 'hello' WHERE kind = 'regions' AND key = '{device(OTHER, 0)}'",
    row(
        "regions",
        device(CARD),
        f'{{"region":"{device(CARD)}","condition":"BLANK","reason":"","afu_id":null}}',
    ),
    allocation(f'"{P0}"', f'"../{P0}"', device=f"../{P0}"),
    allocation(f'"device":"{P0}"', f'"device":"{P1}"'),
    allocation(REGIONS, WHOLE),
    allocation(REGIONS, "fpga.intel.com/region-../../etc"),
    allocation(REGIONS, f"x/../{REGIONS}"),
    allocation('"/dev/dfl-port.0"', "5"),
    allocation("/dev/dfl-port.0", "/dev/a b"),
    allocation("/dev/dfl-port.0", "dev/dfl-port.0"),
    allocation("/dev/dfl-port.0", "/" + 255 * "x"),
    allocation("/dev/dfl-port.0", "\\ud800"),
    allocation(GRANTS, f'{{"{P0}":{GRANT},"{P0}":{GRANT}}}'),
    allocation(GRANTS, f'{{"{P0}":["/dev/dfl-port.0"]}}'),
    allocation(GRANTS, "{}"),
    allocation(GRANTS, "7"),
    allocation('["/dev/dfl-port.0"]', "[]"),
    allocation('"shared":[]', '"shared":["dev"]'),
    allocation('"shared":[],', ""),
    allocation(
        '"mounts":[]', '"mounts":[{"host_path":"a","container_path":"/b","read_only":true}]'
    ),
    allocation(
        '"mounts":[]', '"mounts":[{"host_path":"/a","container_path":"b","read_only":true}]'
    ),
    allocation('"env":{}', '"env":{"A":1}'),
    allocation(f'{{"{P0}":', f'{{"{P1}":'),
    allocation(f'{{"{P0}":', f'{{"{device(OTHER, 0)}":'),
    allocation(f'{{"{P0}":', f'{{"{P0.upper()}":'),
    allocation('"prestarts":0', '"prestarts":-1'),
    allocation('"prestarts":0', '"prestarts":9223372036854775807'),
    allocation('"poststops":0', '"poststops":4294967296'),
    allocation('"poststops":0', '"poststops":"many"'),
    allocation('"started":false', '"started":"yes"'),
    allocation('"started":false', '"started":1'),
    allocation('"started":false', '"started":null'),
    allocation('"started":false,', ""),
    allocation('"started":false', '"stasted":true'),
    allocation('"started":false', '"started":true,"started":false'),
    allocation('"pod":null', '"pod":""'),
    allocation('"pod":null', f'"pod":"{"p" * 65537}"'),
    allocation('"instance":""', f'"instance":"{"e" * 65537}"'),
    allocation('"since":0.0', '"since":9e999'),
    allocation('"since":0.0', '"since":100000000000.0'),
    allocation('"since":0.0', '"since":-1.0'),
    tenancy('"/dev/dfl-port.0"', LONG),
    row("memory_clear_pending", P0, "true"),
    row("memory_clear_pending", CARD.id, "false"),
    row("memory_clear_pending", CARD.id, "1"),
    row("memory_clear_pending", CARD.id.replace("-", ":"), "true"),
    row("debt", CARD.id, "true"),
    f"INSERT INTO journal VALUES (x'00', '{CARD.id}', 'true')",
    "INSERT INTO journal VALUES ('memory_clear_pending', x'00', 'true')",
    row("pending_poststops", "zzz", "1"),
    row("pending_poststops", device(OTHER, 0), "-1"),
    row("pending_poststops", device(OTHER, 0), "0"),
    tenancy_key("pod-b", ""),
    tenancy_key(P0, CARD.id),
    tenancy_key(P0, "zzz"),
    tenancy_key('"pod"', '"pad"'),
    tenancy_key('"pod"', ' "pod"'),
    tenancy_key("7", "-1"),
    tenancy_key("7", "9223372036854775807"),
    tenancy_key("}", ',"more":1}'),
    tenancy('"allocation":7', '"allocation":8'),
    tenancy('"pod":"pod-b"', '"pod":null'),
    tenancy("/dev", "dev"),
    tenancy('["/dev/dfl-port.0"]', '"/dev/dfl-port.0"'),
    tenancy('"used":true', '"used":1'),
    tenancy('"left":true,', ""),
    tenancy('"left":true', '"left":true,"more":1'),
    tenancy('"inode":2', '"inode":-2'),
    tenancy('"inode":2', '"inode":"2"'),
    tenancy('"/t/p"', '"' + "x" * 4097 + '"'),
    row("resources", "fpga.intel.com/x\n../y", "true"),
    row("resources", f"{REGIONS}\n", "true"),
    row("facts", "kubelet", "7"),
    row("facts", "kubelet", '""'),
    row("facts", "somebody", '"1"'),
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
    assert opened(journal).unreconciled >= {CARD.id, OTHER.id}
    assert {r.condition for r in snapshot.regions.values()} <= {Condition.DIRTY, Condition.FAULTED}
    # The other card's allocation, fault and memory_clear_pending are as they were.
    assert snapshot.memory_clear_pending.keys() <= {CARD.id}
    assert snapshot.memory_clear_pending or "'memory_clear_pending'" in statement
    assert device(OTHER) in snapshot.allocations
    if not statement.startswith("UPDATE"):
        records = snapshot.regions.values()
        faulted = {r.region for r in records if r.condition is Condition.FAULTED}
        assert faulted == {RegionId(device(OTHER, 1))}
    # It is mended: a second start finds nothing wrong, and what is done is written.
    opened(journal).device_plugin.release([device(OTHER)])
    journal.close()
    again = Journal(path)
    assert not again.left_out
    assert device(OTHER) not in again.snapshot.allocations
    again.close()
    with sqlite3.connect(f"{path}.unreadable") as db:
        assert db.execute("SELECT 1 FROM journal WHERE kind = 'allocations'").fetchone()
    db.close()


def test_a_card_that_is_claimed_in_both_ways_has_no_allocation_until_kubelet_tells(
    path: str,
) -> None:
    lived(path)
    whole = CLAIM.replace(f'"device":"{P0}"', f'"device":"{device(CARD)}"')
    run(path, allocation(REGIONS, WHOLE, of=whole, device=device(CARD)))
    journal = Journal(path)
    assert journal.left_out == (f"allocations on {CARD.id}, as a whole and by region",)
    assert list(journal.snapshot.allocations) == [device(OTHER)]
    ledger = opened(journal)
    found(ledger, CARD)
    assert ledger.device_plugin.adopt(REGIONS, P0, PodUid("pod-a"), {}).pod == "pod-a"
    journal.close()


def test_a_drained_card_stays_drained_whatever_else_is_damaged(path: str) -> None:
    lived(path)
    run(path, row("drained", OTHER.id, "true"), *NONSENSE[:3])
    assert Journal(path).snapshot.drained == {OTHER.id: True}


def test_a_plugin_that_dies_while_it_mends_finds_everything_again(path: str, monkeypatch) -> None:
    lived(path)
    run(path, NONSENSE[-1])
    real = rows.replacement

    def dies(snapshot: Change, identity: str, commits: int):
        yield from itertools.islice(real(snapshot, identity, commits), 2)
        raise ProcessDiedError

    with monkeypatch.context() as patch:
        patch.setattr(rows, "replacement", dies)
        with pytest.raises(ProcessDiedError):
            Journal(path)
    journal = Journal(path)
    assert len(journal.left_out) == 1
    assert device(OTHER) in journal.snapshot.allocations


def test_a_row_that_this_test_calls_sound_is_read(path: str) -> None:
    lived(path)
    run(
        path,
        allocation(),
        tenancy(),
        row("pending_poststops", P1, "3"),
        row("facts", "kubelet", '"1"'),
    )
    journal = Journal(path)
    assert journal.set_aside is None
    found = journal.snapshot.allocations[P0]
    assert found is not None
    assert found.grants[RegionId(P0)].nodes == ("/dev/dfl-port.0",)


TENANCY_KEY = TenancyKey(RegionId(P0), 7, PodUid("pod"))
UID = ClaimUid("0f1c2d3e-0000-4000-8000-000000000001")
EVERYTHING = Change(
    facts={Fact.BOOT: "a", Fact.KUBELET: "b", Fact.ENVIRONMENT: "c", Fact.LOST: "d"},
    allocations={
        P0: Allocation(
            device=P0,
            resource=REGIONS,
            grants={
                RegionId(P0): Grant(("/dev/a",), ("/dev/b",), (Mount("/c", "/d"),), {"E": "f"})
            },
            started=True,
            prestart_seen=True,
            missed_prestart=True,
            pod=PodUid("pod"),
            instance="b",
            prestarts=2,
            poststops=1,
            number=7,
            since=1.5,
        )
    },
    regions={RegionId(P0): RegionRecord(RegionId(P0), Condition.FAULTED, "why", AFU)},
    memory_clear_pending={CARD.id: True},
    drained={CARD.id: True},
    rebinding={CARD.id: True},
    unreconciled={CARD.id: True},
    tenancies={
        TENANCY_KEY: Tenancy(
            TENANCY_KEY,
            ("/dev/dfl-port.0",),
            used=True,
            left=True,
            cgroups=(Cgroup("/t", "/t/p", 1, 2),),
        )
    },
    claim_owners={
        UID: ClaimOwner(
            UID,
            "space",
            "claim",
            (P0,),
            {P0: ("main",)},
            "fpga.intel.com",
            "/cdi/a.json",
            "a",
            {RegionId(P0): Prepared("0" * 32, "aes", AFU, 100, debug=True)},
            ended=True,
        )
    },
    images={TenantImage(RegionId(P0), AFU): True},
    alias_bindings={ResourceName(f"{PREFIX}/region-gzip"): AliasBinding("0" * 32, current=True)},
    resources={REGIONS: True},
    pending_poststops={P0: 3},
    debug_holds={
        RegionId(P0): DebugHold(
            RegionId(P0), PodUid("pod"), "space", "name", ("app",), 600.0, "why", 1000.5
        )
    },
)

FORM = f"""\
alias_bindings|{PREFIX}/region-gzip|{{"interface_id":"{"0" * 32}","current":true}}
allocations|{P0}|{{"device":"{P0}","resource":"{REGIONS}","grants":{{"{P0}":{{"nodes":["/dev/a"],\
"shared":["/dev/b"],"mounts":[{{"host_path":"/c","container_path":"/d","read_only":true}}],\
"env":{{"E":"f"}}}}}},\
"started":true,"prestart_seen":true,"missed_prestart":true,"pod":"pod","instance":"b","prestarts":2,"poststops":1,\
"number":7,"since":1.5}}
claim_owners|{UID}|{{"uid":"{UID}","namespace":"space","name":"claim","devices":["{P0}"],\
"requests":{{"{P0}":["main"]}},"driver":"fpga.intel.com","file":"/cdi/a.json","boot":"a",\
"prepared":{{"{P0}":{{"interface_id":"{"0" * 32}","bitstream":"aes","afu_id":"{AFU}","clock":100,\
"debug":true}}}},"ended":true,"subrequests":{{}},"pod_claim":""}}
commits||2
debug_holds|{P0}|{{"region":"{P0}","pod":"pod","namespace":"space","name":"name","containers":["app"],\
"seconds":600.0,"failure":"why","until":1000.5}}
drained|{CARD.id}|true
facts|boot|"a"
facts|environment|"c"
facts|kubelet|"b"
facts|lost|"d"
identity||{"0" * 32}
images|{{"region":"{P0}","afu_id":"{AFU}"}}|true
memory_clear_pending|{CARD.id}|true
pending_poststops|{P0}|3
rebinding|{CARD.id}|true
regions|{P0}|{{"region":"{P0}","condition":"FAULTED","reason":"why","afu_id":"{AFU}"}}
resources|{REGIONS}|true
tenancies|{{"region":"{P0}","allocation":7,"pod":"pod"}}|{{"key":{{"region":"{P0}",\
"allocation":7,"pod":"pod"}},"nodes":["/dev/dfl-port.0"],"used":true,"left":true,\
"cgroups":[{{"tree":"/t","path":"/t/p","device":1,"inode":2}}]}}
unreconciled|{CARD.id}|true
"""


def test_the_form_of_the_rows_is_that_of_their_number(path: str) -> None:
    """What a change of it has to change as well: `SCHEMA_VERSION`, and this test."""
    assert all(getattr(EVERYTHING, kind.name) for kind in fields(Change)), "a row of each kind"
    journal = Journal(path)
    journal._db.execute(f"UPDATE journal SET value = '{32 * '0'}' WHERE kind = 'identity'")
    journal.marker.begin("0" * 32, 1, claims=False)
    journal.write(EVERYTHING)
    written = [
        "|".join(row) for row in journal._db.execute("SELECT * FROM journal ORDER BY kind, key")
    ]
    assert (SCHEMA_VERSION, written) == (4, FORM.splitlines())
    journal.close()
    assert Journal(path).snapshot == EVERYTHING


def test_a_locked_journal_is_not_taken_for_an_unreadable_one(path: str) -> None:
    lived(path)
    owner = sqlite3.connect(path, isolation_level=None)
    owner.execute("BEGIN EXCLUSIVE")
    with pytest.raises(JournalError, match="locked"):
        Journal(path)
    owner.execute("ROLLBACK")
    owner.close()
    assert not os.path.exists(f"{path}.unreadable")
    assert Journal(path).snapshot.allocations


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (row("drained", P0, "true"), "1 of its rows make no sense, such as drained"),
        (f"PRAGMA user_version = {SCHEMA_VERSION + 1}", "another version of the plugin wrote it"),
    ],
)
def test_who_only_looks_sees_all_of_it_or_is_told(path: str, damage: str, why: str) -> None:
    ledger = lived(path)
    found = peek(os.path.dirname(path))
    assert found.allocations == ledger.allocations
    assert found.regions == ledger.regions
    run(path, damage)
    with pytest.raises(JournalError, match=f"cannot be read: {why}"):
        peek(os.path.dirname(path))
    assert not os.path.exists(f"{path}.unreadable")


def test_who_only_looks_at_tables_that_no_plugin_made_is_told(path: str) -> None:
    """A trigger may have written anything."""
    lived(path)
    run(path, "CREATE TRIGGER t AFTER INSERT ON journal BEGIN DELETE FROM journal; END")
    with pytest.raises(JournalError, match="its tables are not those"):
        peek(os.path.dirname(path))


def test_a_journal_without_one_row_that_makes_sense_is_kept_beside(path: str) -> None:
    Journal(path).close()
    run(path, "DELETE FROM journal", row("drained", "nonsense", "true"))
    journal = Journal(path)
    assert journal.left_out
    assert journal.set_aside == f"{path}.unreadable"
    assert os.path.exists(journal.set_aside)
    journal.close()


def test_a_journal_of_an_earlier_form_is_doubted_once(path: str) -> None:
    lived(path)
    run(path, f"PRAGMA user_version = {SCHEMA_VERSION - 1}")
    reopened = Journal(path)
    assert "another version of the plugin wrote it" in reopened.doubt
    reopened.close()
    assert Journal(path).doubt == ""


def test_the_marker_lies_where_it_is_said_to(path: str, tmp_path) -> None:
    """Beside the journal it would travel with the state directory."""
    os.mkdir(elsewhere := str(tmp_path / "elsewhere"))
    Journal(path, Marker(f"{elsewhere}/marker")).close()
    assert os.path.exists(f"{elsewhere}/marker")
    assert not os.path.exists(f"{tmp_path}/marker")


def told_of_claims(path: str, change: Change) -> bool:
    """Whether the marker says that ResourceClaims may have devices, after a start with this."""
    journal = Journal(path)
    journal.write(change)
    journal.close()
    Journal(path).close()
    last = Marker(os.path.join(os.path.dirname(path), "marker")).last
    assert last is not None
    return last.claims


def test_the_marker_says_whether_resourceclaims_may_have_devices(path: str) -> None:
    claim = ClaimOwner(
        ClaimUid("claim-a"), "n", "c", devices=(P0,), requests={P0: ("fpga",)}, driver=PREFIX
    )
    assert not told_of_claims(path, Change())
    assert told_of_claims(path, Change(claim_owners={claim.uid: claim}))
    assert not told_of_claims(path, Change(claim_owners={claim.uid: None}))
    assert told_of_claims(path, Change(facts={Fact.RESOURCE_CLAIMS: "the journal was lost"}))
    assert not told_of_claims(path, Change(facts={Fact.RESOURCE_CLAIMS: ""}))


@pytest.mark.parametrize("claims", [False, True])
def test_a_lost_journal_has_the_claims_that_the_marker_tells_of(path: str, *, claims: bool) -> None:
    if claims:
        told_of_claims(path, Change(facts={Fact.RESOURCE_CLAIMS: "the journal was lost"}))
    else:
        Journal(path).close()
    os.unlink(path)
    Journal(path).close()
    last = Marker(os.path.join(os.path.dirname(path), "marker")).last
    assert last is not None
    assert last.claims is claims


def test_a_sound_journal_is_believed_although_the_marker_told_of_claims(path: str) -> None:
    told_of_claims(path, Change(facts={Fact.RESOURCE_CLAIMS: "the journal was lost"}))
    assert not told_of_claims(path, Change(facts={Fact.RESOURCE_CLAIMS: ""}))


# ------------------------------------------------------------------ a new journal


def test_until_kubelets_records_were_adopted_owners_that_the_journal_lacks_are_expected(
    path: str,
) -> None:
    """The plugin may die between its first start and kubelet's first answer."""
    journal = Journal(path)
    opened(journal).hardware.card_found(CARD, {}, BLANK)
    journal.close()
    journal = Journal(path)
    assert journal.snapshot.facts[Fact.BOOT] == "boot"
    ledger = opened(journal)
    assert ledger.unreconciled == {CARD.id}
    ledger.hardware.card_found(CARD, {}, BLANK)
    ledger.device_plugin.adopt(REGIONS, P0, PodUid("pod-a"), {})
    assert ledger.unreconciled == {CARD.id}
    ledger.reconciled([CARD.id])
    assert not ledger.unreconciled
    journal.close()
    journal = Journal(path)
    assert not opened(journal).unreconciled, "this journal served last, and asked"
    journal.close()
    os.unlink(journal.marker.path)
    assert opened(Journal(path)).unreconciled == {CARD.id}


@pytest.mark.parametrize("doubt", [True, False])
@pytest.mark.parametrize("now", ["dra", "device-plugin"])
@pytest.mark.parametrize("last", ["dra", "device-plugin"])
def test_a_life_that_is_killed_before_it_asks_who_the_owners_are_leaves_that_to_the_next(
    path: str, last: str, now: str, *, doubt: bool
) -> None:
    """It may give out what kubelet's records name as another pod's (invariant 1)."""
    lived(path)

    def life(api: str) -> Journal:
        return Journal(path, Marker(f"{path}.marker", Served(api)))

    life(last).close()
    journal = life(last)
    ledger = opened(journal)
    ledger.dra.claims_read()
    ledger.reconciled([CARD.id, OTHER.id])
    if doubt:
        journal._db.execute(f"UPDATE journal SET value = '{32 * '0'}' WHERE kind = 'identity'")
    journal.close()
    life(now).close()
    journal = life(now)
    assert not journal.doubt
    ledger = opened(journal)
    unknown = doubt or last != now
    assert ledger.unreconciled == ({CARD.id, OTHER.id} if unknown else set())
    assert bool(ledger.resource_claims_unknown) == (doubt and "dra" in {last, now})
    assert life(now).snapshot.unreconciled == dict.fromkeys(ledger.unreconciled, True)


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_what_dra_had_not_compared_the_device_plugin_api_asks_kubelets_claims_about(
    path: str, *, compared: bool, killed: bool
) -> None:
    """The journal may be a new one on a node where pods have claims."""

    def life(api: str) -> Journal:
        return Journal(path, Marker(f"{path}.marker", Served(api)))

    journal = life("dra")
    ledger = opened(journal)
    ledger.hardware.card_found(CARD, {}, BLANK)
    if compared:
        ledger.reconciled([CARD.id])
    journal.close()
    for _ in range(2 if killed else 1):
        journal = life("device-plugin")
        ledger = opened(journal)
        journal.close()
    assert ledger.unreconciled == {CARD.id}
    assert bool(ledger.resource_claims_unknown) != compared
    assert bool(opened(life("dra")).resource_claims_unknown) != compared


@pytest.mark.parametrize("served", ["boot 1", "boot 2", ""])
def test_in_which_boot_the_conditions_hold_the_marker_says_where_the_journal_is_in_doubt(
    path: str, served: str
) -> None:
    """A pod may use since this boot what another journal gave it; "": nobody knows when that was.

    If the plugin did not serve in this boot yet, no container of a claim runs.
    """

    def life(journal: str, boot: str) -> tuple[Journal, Ledger]:
        marker = Marker(f"{path}.marker", Served("dra", boot=boot))
        opened_one = Journal(journal, marker)
        snapshot = opened_one.snapshot
        ledger = Ledger(prefix=PREFIX, journal=opened_one, snapshot=snapshot, boot_id="boot 2")
        return opened_one, ledger

    uid = ClaimUid("claim-a")
    journal = Journal(path, Marker(f"{path}.marker", Served("dra", boot="boot 1")))
    snapshot = journal.snapshot
    ledger = Ledger(prefix=PREFIX, journal=journal, snapshot=snapshot, boot_id="boot 1", dra=True)
    found(ledger, CARD)
    ledger.reconciled([CARD.id])
    ledger.dra.take(owner(uid, P0), [PodUid("pod-1")])
    ledger.dra.prepared(uid, {})
    journal.close()
    another, _ = life(f"{path}.other", served)
    another.close()
    again, ledger = life(path, "boot 2")
    assert again.doubt
    assert ledger.allocations[P0].used == (served != "boot 1")
    assert [one.used for one in ledger.tenancies.values()] == [served != "boot 1"]
    again.close()
    again, ledger = life(path, "boot 2")
    assert not again.doubt
    assert ledger.allocations[P0].used == (served != "boot 1"), "however often it starts"


def test_a_condition_is_written_before_its_work_begins(path: str) -> None:
    journal = Journal(path)
    ledger = opened(journal)
    found(ledger, CARD)
    ledger.work.working([RegionId(P0)])
    records = _read(path).regions
    assert records[RegionId(P0)].condition is Condition.SCRUBBING


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
        ledger.device_plugin.release([device(OTHER)])
    journal.close()
    begins_anew(path)


# ------------------------------------------------------------------ removed while it is used


@pytest.mark.parametrize(
    "what", ["directory", "file", "file and log", "log", "another log", "another file"]
)
def test_a_journal_that_is_removed_while_it_is_used_is_put_back(tmp_path, what: str) -> None:
    path = str(tmp_path / "state" / "journal.sqlite3")
    (tmp_path / "state").mkdir()
    ledger = lived(path)
    journal = Journal(path)
    ledger = opened(journal)
    if what == "directory":
        shutil.rmtree(tmp_path / "state")
    if "file" in what:
        os.unlink(path)
    if "log" in what:
        os.unlink(f"{path}-wal")
    if what == "another file":
        lived(path)
    if what != "log":
        journal.checkpoint()  # makes no empty one, but of the log
    if "log" in what:
        assert os.path.exists(f"{path}-wal") == (what == "another log")
    ledger.device_plugin.release([device(OTHER)])
    ledger.work.set_memory_clear_pending(CARD.id, open_=False)
    assert stat.S_IMODE(os.stat(tmp_path / "state").st_mode) & 0o077 == 0 or what != "directory"
    copy = Journal(copied(path))
    assert copy.snapshot == remembered(ledger, "boot")
    copy.close()
    ledger.work.set_memory_clear_pending(CARD.id, open_=True)
    journal.close()
    assert Journal(path).snapshot == remembered(ledger, "boot")


def test_a_log_is_put_back_by_a_look_before_anything_is_written(path: str) -> None:
    journal = Journal(path)
    ledger = opened(journal)
    found(ledger, CARD)
    os.unlink(f"{path}-wal")
    with structlog.testing.capture_logs() as logs:
        journal.keep()
        journal.keep()
    assert [each["log_level"] for each in logs] == ["error"]
    assert Journal(copied(path)).snapshot == remembered(ledger, "boot")
    journal.close()


def test_nothing_that_sqlite_does_with_the_log_passes_for_a_removal(tmp_path, path: str) -> None:
    journal = Journal(path)
    with structlog.testing.capture_logs() as logs:
        for what in (
            lambda: written(journal, 3 << 20),
            journal.checkpoint,  # the next write begins it again and shortens it
            lambda: journal._db.execute("PRAGMA wal_checkpoint(RESTART)"),
            lambda: journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)"),
            lambda: peek(str(tmp_path)),
            lambda: _read(path),
            lambda: journal._db.execute("VACUUM"),
            lambda: shutil.copyfile(path, f"{path}.backup"),
        ):
            what()
            journal.keep()
            journal.write(Change(drained={CARD.id: True}))
            journal.keep()
        journal = Journal(copied(path))  # which begins with a log
        journal.keep()
    assert not logs
    assert not list(tmp_path.glob("*.unreadable"))


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
        ledger.device_plugin.release([device(OTHER)])
    journal.keep()  # logs
    assert remembered(ledger, "boot") == before
    (tmp_path / "state").unlink()
    assert ledger.device_plugin.release([device(OTHER)])
    journal.close()
    assert Journal(path).snapshot == remembered(ledger, "boot")
