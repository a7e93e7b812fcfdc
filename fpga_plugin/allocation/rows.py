"""How the ledger's values look in the journal's tables.

What is read is checked like any foreign input: a row that this plugin would not have written makes
the journal unreadable, which is a state that the plugin handles, instead of an error later on.
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NoReturn, TypeAlias, cast

from fpga_plugin.allocation.names import card_of, is_card
from fpga_plugin.allocation.records import Change, Claim, Condition, RegionRecord, Snapshot
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
CREATE TABLE IF NOT EXISTS since (device TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS resources (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""

Statement: TypeAlias = tuple[str, Sequence[tuple[object, ...]]]
"""SQL, and the rows to run it with."""


def load(db: sqlite3.Connection) -> Snapshot:
    """Read everything.

    Raises:
        ValueError: a row is not as this plugin writes it.
        sqlite3.Error: it cannot be read, or lacks a table or column.
    """
    meta = {_text(key): _text(value) for key, value in db.execute("SELECT key, value FROM meta")}
    # A table of its own: journals of before are read as they are.
    since = {
        _device(device): _time(at) for device, at in db.execute("SELECT device, at FROM since")
    }
    claims = db.execute(
        "SELECT device, resource, nodes, started, touched, exposed, pod, epoch, prestarts,"
        " poststops FROM claims"
    )
    regions = db.execute("SELECT region, condition, reason, afu_id, former FROM regions")
    return Snapshot(
        boot_id=meta.get("boot_id", ""),
        epoch=meta.get("epoch", ""),
        env_epoch=meta.get("env_epoch", ""),
        fresh="fresh" in meta,
        claims=tuple(_claim(row, since) for row in claims),
        regions=tuple(_record(row) for row in regions),
        debts=frozenset(_card(card) for (card,) in db.execute("SELECT card FROM debts")),
        drained=frozenset(_card(card) for (card,) in db.execute("SELECT card FROM drained")),
        rebinding=frozenset(_card(card) for (card,) in db.execute("SELECT card FROM rebinding")),
        resources=frozenset(
            ResourceName(_text(name)) for (name,) in db.execute("SELECT name FROM resources")
        ),
        strays={
            _device(device): _count(number)
            for device, number in db.execute("SELECT device, number FROM strays")
        },
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
    if change.adopted:
        yield "DELETE FROM meta WHERE key = ?", [("fresh",)]


def _claim(row: tuple[object, ...], since: Mapping[DeviceId, float]) -> Claim:
    device, resource, nodes, started, touched, exposed, pod, epoch, prestarts, poststops = row
    found = _device(device)
    granted = _nodes(nodes, found)
    return Claim(
        device=found,
        resource=ResourceName(_text(resource)),
        nodes=granted,
        started=_flag(started),
        touched=_flag(touched),
        exposed=_flag(exposed),
        pod=None if pod is None else PodUid(_text(pod)),
        epoch=_text(epoch),
        prestarts=_count(prestarts),
        poststops=_count(poststops),
        since=since.get(found, 0.0),
    )


def _record(row: tuple[object, ...]) -> RegionRecord:
    region, condition, reason, afu_id, former = row
    return RegionRecord(
        region=_region(region),
        condition=Condition(_text(condition)),
        reason=_text(reason),
        afu_id=None if afu_id is None else AfuId(parse_afu_id(_text(afu_id))),
        former=frozenset(PodUid(_text(uid)) for uid in _list(former)),
    )


def _nodes(value: object, device: DeviceId) -> tuple[tuple[RegionId, str], ...]:
    nodes = []
    for pair in _list(value):
        if not isinstance(pair, list) or len(pair) != 2:  # noqa: PLR2004  # region and node
            _nonsense(pair)
        region = _region(pair[0])
        if device not in {DeviceId(region), DeviceId(card_of(region))}:
            _nonsense(pair)
        nodes.append((region, _text(pair[1])))
    if not nodes:
        _nonsense(value)
    return tuple(nodes)


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


def _text(value: object) -> str:
    return value if isinstance(value, str) else _nonsense(value)


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else _nonsense(value)


def _time(value: object) -> float:
    return value if isinstance(value, float) and value >= 0 else _nonsense(value)


def _flag(value: object) -> bool:
    return bool(value) if isinstance(value, int) else _nonsense(value)


def _nonsense(value: object) -> NoReturn:
    message = f"a row of the journal holds {value!r}"
    raise ValueError(message)
