"""Rows that no plugin wrote, one by one: what only one look of several refuses.

A journal that is believed where it should not be gives a region out unscrubbed (invariant 4).
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.cards import AFU, INTERFACE, PREFIX, REGIONS, WHOLE, device, make_card

from fpga_plugin.allocation.journal import rows
from fpga_plugin.allocation.journal.history import latest
from fpga_plugin.allocation.journal.journal import JOURNAL_FILE, Journal, JournalError
from fpga_plugin.allocation.journal.peek import peek
from fpga_plugin.allocation.journal.records import (
    AliasBinding,
    Allocation,
    Change,
    ClaimOwner,
    Fact,
    TenantImage,
)
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.ids import RegionId
from fpga_plugin.kubernetes.names import ClaimUid, ResourceName


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        yield made


@pytest.mark.parametrize(
    "statement",
    [
        f"PRAGMA user_version = {rows.SCHEMA_VERSION}",
        "CREATE TABLE somebody_elses (key TEXT)",
    ],
    ids=["a journal whose tables are gone", "another program's file"],
)
def test_only_an_empty_file_becomes_a_journal(db: sqlite3.Connection, statement: str) -> None:
    """Any other is set aside, so that what it knew counts as lost; it is left as it is."""
    db.execute(statement)
    before = list(db.execute("SELECT sql FROM sqlite_master"))
    with pytest.raises(ValueError, match="tables are not"):
        rows.prepare(db)
    assert list(db.execute("SELECT sql FROM sqlite_master")) == before


def count(db: sqlite3.Connection, key: str, value: str | bytes) -> rows.Loaded:
    rows.prepare(db)
    db.execute("INSERT INTO journal VALUES ('commits', ?, ?)", (key, value))
    return rows.load(db)


@pytest.mark.parametrize("number", [0, 7, 10**18 - 1])
def test_a_journal_says_how_many_transactions_made_it(db: sqlite3.Connection, number: int) -> None:
    assert count(db, "", str(number)) == rows.Loaded(Change(), (), number)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x", "7"),
        ("", b"7"),
        ("", ""),
        ("", "-1"),
        ("", "1_0"),
        ("", " 7"),
        ("", "\u0667"),
        ("", "1" + 18 * "0"),
    ],
)
def test_a_count_that_no_plugin_wrote_is_told_and_counts_nothing(
    db: sqlite3.Connection, key: str, value: str | bytes
) -> None:
    """By it a write-ahead log is missed that is lost: a number that is too high or too low would
    doubt every journal, or believe one that lacks its last claims."""
    loaded = count(db, key, value)
    assert loaded.commits == 0
    assert len(loaded.left_out) == 1
    assert loaded.left_out[0].startswith("commits")


# ------------------------------------------------------------------ rows that hold together

CARD, OTHER = make_card(1), make_card(2)
P0, P1 = device(CARD, 0), device(CARD, 1)
UID = ClaimUid("0f1c2d3e-0000-4000-8000-000000000001")
SOUND = Change(
    claim_owners={UID: ClaimOwner(UID, "space", "claim", (P0, P1), {P0: ("a",), P1: ("b",)})},  # type: ignore[arg-type]
    images={TenantImage(RegionId(P0), AFU): True},
    alias_bindings={ResourceName(f"{PREFIX}/region-gzip"): AliasBinding(INTERFACE, current=True)},
    allocations={
        device(CARD): Allocation(
            device(CARD), WHOLE, {RegionId(d): Grant((f"/dev/{d}",)) for d in (P0, P1)}
        )
    },
)


def load(db: sqlite3.Connection, change: Change, *damage: str) -> rows.Loaded:
    rows.prepare(db)
    for sql, values in rows.statements(change):
        db.executemany(sql, values)
    for one in damage:
        db.execute(one)
    return rows.load(db)


def test_a_name_of_amds_plugin_may_be_bound(db: sqlite3.Connection) -> None:
    name = ResourceName("amd.com/xilinx_u55c_3-0")
    change = Change(alias_bindings={name: AliasBinding(INTERFACE, current=False)})
    assert load(db, change).snapshot == change


def test_what_the_ledger_writes_is_read(db: sqlite3.Connection) -> None:
    assert load(db, SOUND) == rows.Loaded(SOUND)


@pytest.mark.parametrize(
    ("kind", "column", "was", "is_"),
    [
        ("claim_owners", "key", "0001", "0002"),
        ("claim_owners", "value", f'["{P0}","{P1}"]', "[]"),
        ("claim_owners", "value", f'["{P0}","{P1}"]', f'["{P0}","{P1}","{P1}"]'),
        ("claim_owners", "value", f'["{P0}","{P1}"]', f'["{P0}","{P1}","../x"]'),
        ("claim_owners", "value", f'["{P0}","{P1}"]', f'["{P0}"]'),
        ("images", "key", P0, CARD.id),
        ("images", "key", P0, "../x"),
        ("alias_bindings", "key", "region-gzip", "region-blank"),
        ("alias_bindings", "key", "region-gzip", "../gzip"),
        ("allocations", "value", f'"{P1}"', f'"{device(OTHER, 1)}"'),
    ],
)
def test_rows_whose_parts_contradict_each_other_are_left_out(
    db: sqlite3.Connection, kind: str, column: str, was: str, is_: str
) -> None:
    """Half of one would be believed: a claim of another's devices, a node of another's card."""
    new = f"replace({column}, '{was}', '{is_}')"
    damage = f"UPDATE journal SET {column} = {new} WHERE kind = '{kind}'"
    loaded = load(db, SOUND, damage)
    assert [told.split()[0] for told in loaded.left_out] == [kind]
    assert not getattr(loaded.snapshot, kind)


def test_a_claims_devices_need_not_all_be_of_a_request(db: sqlite3.Connection) -> None:
    owner = ClaimOwner(UID, "space", "claim", (P0, P1), {P0: ("a",)})  # type: ignore[arg-type]
    assert load(db, Change(claim_owners={UID: owner})).left_out == ()


def test_a_claim_owner_of_no_device_is_none(db: sqlite3.Connection) -> None:
    """Nothing would ever end it."""
    damage = f"""UPDATE journal SET value = replace(value, '["{P0}","{P1}"]', '[]')"""
    loaded = load(db, SOUND, f"{damage} WHERE kind = 'claim_owners'")
    assert (len(loaded.left_out), loaded.snapshot.claim_owners) == (1, {})


@pytest.mark.parametrize(
    "change",
    [
        Change(claim_owners={UID: ClaimOwner(UID, "space", "claim", (), {})}),
        Change(claim_owners={UID: ClaimOwner(UID, "n" * (1 << 16) + "n", "claim", (P0,), {})}),
        Change(
            claim_owners={UID: ClaimOwner(UID, "space", "claim", (P0,), {P0: ("n" * 60000,) * 5})}
        ),
        Change(facts={Fact.LOST: "l" * (1 << 16) + "l"}),
        Change(facts={Fact.LOST: "\udc80"}),
        Change(allocations={P1: Allocation(P0, REGIONS, {RegionId(P0): Grant(("/dev/a",))})}),
        Change(images={TenantImage(RegionId(CARD.id), AFU): True}),
    ],
    ids=[
        "no device",
        "long text",
        "long row",
        "long instance",
        "no text",
        "other key",
        "no region",
    ],
)
def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, change: Change) -> None:
    """A row that is refused when it is read is forgotten by a restart, with what it protected."""
    journal = Journal(str(tmp_path / JOURNAL_FILE))
    with pytest.raises(JournalError, match="a row could not be read again"):
        journal.write(Change(memory_clear_pending={CARD.id: True}) | change)
    journal.write(Change(drained={CARD.id: True}))
    journal.close()
    again = Journal(journal.path)
    assert (again.snapshot, again.doubt) == (Change(drained={CARD.id: True}), "")
    again.close()


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "../" + "0" * 29])
def test_an_id_that_no_plugin_wrote_is_none(db: sqlite3.Connection, text: str) -> None:
    rows.prepare(db)
    db.execute("INSERT INTO journal VALUES ('identity', '', ?)", (text,))
    loaded = rows.load(db)
    assert (loaded.identity, len(loaded.left_out)) == ("", 1)


@pytest.mark.parametrize("version", [rows.SCHEMA_VERSION + 1, rows.SCHEMA_VERSION - 1])
def test_of_another_version_is_read_what_this_one_understands(
    db: sqlite3.Connection, version: int
) -> None:
    """A field more, or less: what a row takes from others is worth more than its form."""
    more = 'UPDATE journal SET value = replace(value, \'"api":\', \'"more":7,"api":\')'
    loaded = load(
        db,
        SOUND,
        f"PRAGMA user_version = {version}",
        more.replace('"api"', '"device"'),
        "INSERT INTO journal VALUES ('news', 'key', 'value')",
    )
    assert loaded.snapshot == SOUND
    assert [told.split()[0] for told in loaded.left_out] == ["news"]
    assert loaded.version == version


def schema_3(db: sqlite3.Connection, *written: tuple[str, str, str]) -> rows.Loaded:
    """A journal of the releases until eea44c1."""
    rows.prepare(db)
    db.execute("PRAGMA user_version = 3")
    db.executemany("INSERT INTO journal VALUES (?, ?, ?)", written)
    return rows.load(db)


ALLOCATION_3 = (
    f'{{"device":"{P0}","resource":"{REGIONS}","grants":{{"{P0}":{{"nodes":["/dev/dfl-port.0"],'
    '"shared":[],"mounts":[],"env":{}}},"started":true,"touched":true,"exposed":false,'
    '"pod":"pod-a","epoch":"life 1","prestarts":1,"poststops":0,"generation":9,"since":0.0}'
)


def test_rows_of_schema_3_are_read_under_their_present_names(db: sqlite3.Connection) -> None:
    loaded = schema_3(
        db,
        ("claims", P0, ALLOCATION_3),
        ("debts", CARD.id, "true"),
        ("loans", f'{{"pod":"pod-b","region":"{P0}","node":"/dev/dfl-port.7"}}', "true"),
        ("unreconciled", CARD.id, "true"),
    )
    assert (loaded.left_out, loaded.version) == ((), 3)
    allocation = loaded.snapshot.allocations[P0]
    assert allocation is not None
    assert (allocation.pod, allocation.started) == ("pod-a", True)
    assert loaded.snapshot.memory_clear_pending == {CARD.id: True}
    (left,) = loaded.snapshot.tenancies.values()
    assert left is not None
    assert (left.pod, left.nodes, left.left) == ("pod-b", ("/dev/dfl-port.7",), True)


@pytest.mark.parametrize("kind", ["claims", "loans"])
def test_a_journal_of_today_has_no_rows_of_schema_3(db: sqlite3.Connection, kind: str) -> None:
    rows.prepare(db)
    db.execute("INSERT INTO journal VALUES (?, ?, 'true')", (kind, CARD.id))
    assert [told.split()[0] for told in rows.load(db).left_out] == [kind]


def test_the_numbers_of_a_journal_of_today_stay(db: sqlite3.Connection) -> None:
    """Tenancies name their allocation by them."""
    numbered = replace(SOUND.allocations[device(CARD)], number=77)
    loaded = load(db, replace(SOUND, allocations={device(CARD): numbered}))
    assert loaded.snapshot.allocations[device(CARD)].number == 77


def test_a_key_that_no_plugin_writes_so_is_none(db: sqlite3.Connection) -> None:
    """A second row for one tenancy would win, or lose, by chance."""
    key = f'{{"region":"{P0}","allocation":7,"pod":"pod-b"}}'
    value = f'{{"key":{key},"nodes":["/dev/dfl-port.0"],"used":true,"left":true,"cgroups":[]}}'
    rows.prepare(db)
    db.execute("INSERT INTO journal VALUES ('tenancies', ?, ?)", (key, value))
    assert len(rows.load(db).snapshot.tenancies) == 1
    db.execute("UPDATE journal SET key = ?", (key.replace(",", ", "),))
    assert [told.split()[0] for told in rows.load(db).left_out] == ["tenancies"]


def test_what_is_told_of_a_row_is_one_line_of_plain_text(db: sqlite3.Connection) -> None:
    """Invariant 11: a journal may say anything; it is read by people, in a log."""
    kind = "a\n\x1b[31m\u00e9" + 300 * "k"
    rows.prepare(db)
    db.execute("INSERT INTO journal VALUES (?, 'key', 'value')", (kind,))
    (told,) = rows.load(db).left_out
    assert told.startswith("a??[31m?kkk")
    assert told.split()[0] == "a??[31m?" + 248 * "k"


def test_where_no_plugin_has_run_nobody_has_anything(tmp_path: Path) -> None:
    assert peek(str(tmp_path)) == Change()
    assert list(tmp_path.iterdir()) == [], "nothing is made by who only looks"


@pytest.mark.parametrize(
    "look",
    [lambda folder: peek(str(folder)), lambda folder: list(latest(str(folder / JOURNAL_FILE)))],
    ids=["peek", "history"],
)
def test_who_only_looks_says_so_to_any_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], object]
) -> None:
    """Debian's takes such a name for a URI unasked; others would make a file `file:...?mode=ro`."""
    Journal(str(tmp_path / JOURNAL_FILE)).close()
    connect, asked = sqlite3.connect, []

    def noted(name: str, **how: Any) -> sqlite3.Connection:
        asked.append((name.split("?", maxsplit=1)[0], "mode=ro" in name, how["uri"]))
        return connect(name, **how)

    monkeypatch.setattr(sqlite3, "connect", noted)
    look(tmp_path)
    assert asked == [(f"file:{tmp_path / JOURNAL_FILE}", True, True)]
