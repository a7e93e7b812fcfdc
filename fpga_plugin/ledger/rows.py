"""How the ledger's values look in the journal's tables.

What is read is checked like any foreign input: a row that this plugin would not have written is
left out and told, instead of an error later on, or a container on a region that somebody else has.
What one row alone does not show, `fpga_plugin.ledger.salvage` looks at.
"""

import json
import math
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias, TypeVar, cast

from fpga_plugin.errors import quote
from fpga_plugin.ids import (
    AfuId,
    CardId,
    DeviceId,
    PodUid,
    RegionId,
    ResourceName,
    parse_afu_id,
    parse_device_id,
)
from fpga_plugin.ledger.names import card_of, is_card, names_kind_of
from fpga_plugin.ledger.records import Change, Claim, Condition, Loan, RegionRecord, Snapshot

SCHEMA: Final = """
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
CREATE TABLE IF NOT EXISTS drained (card TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rebinding (card TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unreconciled (card TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS loans (
  pod TEXT NOT NULL, region TEXT NOT NULL, node TEXT NOT NULL,
  PRIMARY KEY (pod, region, node)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS since (device TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS resources (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""

Statement: TypeAlias = tuple[str, Sequence[tuple[object, ...]]]
"""SQL, and the rows to run it with."""

Row: TypeAlias = tuple[object, ...]
T = TypeVar("T")

_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "meta": ("key", "value"),
    "claims": (
        *("device", "resource", "nodes", "started", "touched", "exposed", "pod", "epoch"),
        *("prestarts", "poststops"),
    ),
    "regions": ("region", "condition", "reason", "afu_id", "former"),
    "debts": ("card",),
    "strays": ("device", "number"),
    "drained": ("card",),
    "rebinding": ("card",),
    "unreconciled": ("card",),
    "loans": ("pod", "region", "node"),
    "since": ("device", "at"),
    "resources": ("name",),
}
"""Of each table of `SCHEMA`: rows are written by position."""

_MAX_TEXT: Final = 1 << 16
"""Characters of one value: far more than the longest reason."""

_MAX_COUNT: Final = 1 << 32
"""PreStarts of one claim; SQLite's integers end at 2^63, and these are counted on."""

_MAX_TIME: Final = 1e11
"""Seconds since 1970, in the year 5138; Python's dates end later."""

# Kubelet's rule for the domain, and this plugin's own names: a name from here gets registered.
_RESOURCE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/(region|fpga)-[0-9a-f]{32}", re.ASCII)
_NODE = re.compile(r"/[!-~]{1,254}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a journal says.

    Attributes:
        snapshot: of the rows that make sense.
        left_out: what the others are, for people.
    """

    snapshot: Snapshot
    left_out: tuple[str, ...] = ()


def check_tables(db: sqlite3.Connection) -> None:
    """Whether what is written would find its place, and nothing else happens then.

    A damaged file may well be read, and fail at every write until somebody removes it.

    Raises:
        ValueError: a table is another one, there is more than tables, or pages do not fit together.
        sqlite3.Error: it cannot be read.
    """
    (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()  # 0.5 ms for 1000 claims
    if verdict != "ok":
        _nonsense(verdict)
    others = db.execute("SELECT name FROM sqlite_master WHERE type IN ('view', 'trigger')")
    if (other := others.fetchone()) is not None:
        _nonsense(other[0])
    for table, columns in _COLUMNS.items():
        found = tuple(row[1] for row in db.execute(f"PRAGMA table_info({table})"))
        if found != columns:
            _nonsense(found)


def load(db: sqlite3.Connection) -> Loaded:
    """Read everything.

    Raises:
        sqlite3.Error: it cannot be read, or lacks a table or column.
    """
    left_out: list[str] = []

    def each(table: str, parse: Callable[[Row], T]) -> Iterable[T]:
        columns = _COLUMNS[table]
        for row in db.execute(f"SELECT {', '.join(columns)} FROM {table}"):  # noqa: S608  # ours
            try:
                yield parse(row)
            except (ValueError, RecursionError) as error:
                left_out.append(f"{table}, {columns[0]} {quote(row[0])}: {error}")

    meta = dict(each("meta", lambda row: (_text(row[0]), _text(row[1]))))
    # A table of its own: journals of before are read as they are.
    since = dict(each("since", lambda row: (_device(row[0]), _time(row[1]))))
    snapshot = Snapshot(
        boot_id=meta.get("boot_id", ""),
        epoch=meta.get("epoch", ""),
        env_epoch=meta.get("env_epoch", ""),
        claims=tuple(each("claims", lambda row: _claim(row, since))),
        regions=tuple(each("regions", _record)),
        debts=frozenset(each("debts", lambda row: _card(row[0]))),
        drained=frozenset(each("drained", lambda row: _card(row[0]))),
        rebinding=frozenset(each("rebinding", lambda row: _card(row[0]))),
        unreconciled=frozenset(each("unreconciled", lambda row: _card(row[0]))),
        loans=frozenset(each("loans", _loan)),
        resources=frozenset(each("resources", lambda row: _resource(row[0]))),
        strays=dict(each("strays", lambda row: (_device(row[0]), _count(row[1])))),
    )
    return Loaded(snapshot, tuple(left_out))


def replacement(snapshot: Snapshot) -> Iterable[Statement]:
    """What makes the journal say this and nothing else."""
    for table in _COLUMNS:
        if table != "meta":
            yield f"DELETE FROM {table}", [()]  # noqa: S608  # a word of this module
    yield "DELETE FROM meta WHERE key IS NOT ?", [("schema",)]
    yield "INSERT INTO meta VALUES ('boot_id', ?)", [(snapshot.boot_id,)]
    yield from statements(
        Change(
            claims={claim.device: claim for claim in snapshot.claims},
            regions={record.region: record for record in snapshot.regions},
            debts=dict.fromkeys(snapshot.debts, True),
            drained=dict.fromkeys(snapshot.drained, True),
            rebinding=dict.fromkeys(snapshot.rebinding, True),
            unreconciled=dict.fromkeys(snapshot.unreconciled, True),
            loans=dict.fromkeys(snapshot.loans, True),
            resources=set(snapshot.resources),
            strays=dict(snapshot.strays),
            epoch=snapshot.epoch,
            env_epoch=snapshot.env_epoch,
        )
    )


def statements(change: Change) -> Iterable[Statement]:
    """What makes a change durable."""
    claims = [claim for claim in change.claims.values() if claim is not None]
    gone = [(device,) for device, claim in change.claims.items() if claim is None]
    yield "DELETE FROM claims WHERE device = ?", gone
    yield "DELETE FROM since WHERE device = ?", gone
    yield (
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
            for claim in claims
        ],
    )
    yield (
        "INSERT OR REPLACE INTO since VALUES (?, ?)",
        [(claim.device, claim.since) for claim in claims if claim.since],
    )
    yield (
        "INSERT OR REPLACE INTO regions VALUES (?, ?, ?, ?, ?)",
        [
            (r.region, r.condition, r.reason, r.afu_id, json.dumps(sorted(r.former)))
            for r in change.regions.values()
        ],
    )
    for table, cards in (
        ("debts", change.debts),
        ("drained", change.drained),
        ("rebinding", change.rebinding),
        ("unreconciled", change.unreconciled),
    ):
        yield (
            f"INSERT OR IGNORE INTO {table} VALUES (?)",  # noqa: S608  # a word of this module
            [(card,) for card, on in cards.items() if on],
        )
        yield (
            f"DELETE FROM {table} WHERE card = ?",  # noqa: S608  # the same
            [(card,) for card, on in cards.items() if not on],
        )
    yield "INSERT OR IGNORE INTO resources VALUES (?)", [(n,) for n in sorted(change.resources)]
    yield "DELETE FROM strays WHERE device = ?", [(d,) for d, n in change.strays.items() if not n]
    yield (
        "INSERT OR REPLACE INTO strays VALUES (?, ?)",
        [(device, number) for device, number in change.strays.items() if number],
    )
    told = {"epoch": change.epoch, "env_epoch": change.env_epoch}
    yield (
        "INSERT OR REPLACE INTO meta VALUES (?, ?)",
        [(key, value) for key, value in told.items() if value is not None],
    )
    loans = [((loan.pod, loan.region, loan.node), on) for loan, on in change.loans.items()]
    yield "INSERT OR IGNORE INTO loans VALUES (?, ?, ?)", [row for row, on in loans if on]
    yield (
        "DELETE FROM loans WHERE pod = ? AND region = ? AND node = ?",
        [row for row, on in loans if not on],
    )


def _claim(row: Row, since: Mapping[DeviceId, float]) -> Claim:
    device, resource, nodes, started, touched, exposed, pod, epoch, prestarts, poststops = row
    found = _device(device)
    name = _resource(resource)
    if not names_kind_of(name, found):
        _nonsense(resource)
    return Claim(
        device=found,
        resource=name,
        nodes=_nodes(nodes, found),
        started=_flag(started),
        touched=_flag(touched),
        exposed=_flag(exposed),
        pod=None if pod is None else _uid(pod),
        epoch=_text(epoch),
        prestarts=_count(prestarts),
        poststops=_count(poststops),
        since=since.get(found, 0.0),
    )


def _record(row: Row) -> RegionRecord:
    region, condition, reason, afu_id, former = row
    return RegionRecord(
        region=_region(region),
        condition=Condition(_text(condition)),
        reason=_text(reason),
        afu_id=None if afu_id is None else AfuId(parse_afu_id(_text(afu_id))),
        former=frozenset(_uid(uid) for uid in _list(former)),
    )


def _loan(row: Row) -> Loan:
    pod, region, node = row
    return Loan(_uid(pod), _region(region), _node(node))


def _node(value: object) -> str:
    return _text(value) if _NODE.fullmatch(_text(value)) else _nonsense(value)


def _nodes(value: object, device: DeviceId) -> tuple[tuple[RegionId, str], ...]:
    nodes: dict[RegionId, str] = {}
    for pair in _list(value):
        if not isinstance(pair, list) or len(pair) != 2:  # noqa: PLR2004  # region and node
            _nonsense(pair)
        region, node = _region(pair[0]), _node(pair[1])
        ours = device in {DeviceId(region), DeviceId(card_of(region))}
        if not ours or region in nodes:
            _nonsense(pair)
        nodes[region] = node
    if not nodes:
        _nonsense(value)
    return tuple(nodes.items())


def _list(value: object) -> list[object]:
    parsed = json.loads(_text(value))
    return cast("list[object]", parsed) if isinstance(parsed, list) else _nonsense(value)


def _device(value: object) -> DeviceId:
    return parse_device_id(_text(value))


def _region(value: object) -> RegionId:
    device = _device(value)
    return _nonsense(value) if is_card(device) else RegionId(device)


def _card(value: object) -> CardId:
    device = _device(value)
    return CardId(device) if is_card(device) else _nonsense(value)


def _resource(value: object) -> ResourceName:
    return ResourceName(_text(value)) if _RESOURCE.fullmatch(_text(value)) else _nonsense(value)


def _uid(value: object) -> PodUid:
    """A pod's uid; what may be in it was looked at where kubelet told it."""
    return PodUid(_text(value)) if _text(value) else _nonsense(value)


def _text(value: object) -> str:
    """Text that can be written again: damaged bytes are surrogates here."""
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        _nonsense(value)
    value.encode()
    return value


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < _MAX_COUNT else _nonsense(value)


def _time(value: object) -> float:
    in_range = isinstance(value, float) and math.isfinite(value) and 0 <= value < _MAX_TIME
    return cast("float", value) if in_range else _nonsense(value)


def _flag(value: object) -> bool:
    return bool(value) if value in (0, 1) else _nonsense(value)


def _nonsense(value: object) -> NoReturn:
    raise ValueError(f"{quote(value)} makes no sense there")
