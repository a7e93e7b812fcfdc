"""How the ledger's values look in the journal: one table, a row for each value.

A row is its kind, which is a field of `Change`, its key, and its value as JSON. The values' own
types say what may be in them, so a new field of `Allocation` is written, read and checked without
a line here; `SCHEMA_VERSION` goes up with it.

What is read is checked like any foreign input: a row that this plugin would not have written is
left out and told, instead of an error later on, or a container on a region that somebody else has.
What is written is checked by the same parser, so that none of it is left out when it is read.
"""

import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import msgspec

from fpga_plugin.allocation.journal import history
from fpga_plugin.allocation.journal.doubt import GONE, PRESENT_KINDS, allocated_twice, of_schema_3
from fpga_plugin.allocation.journal.records import (
    AliasBinding,
    Allocation,
    Change,
    ClaimOwner,
    Count,
    DebugHold,
    Fact,
    RegionRecord,
    Tenancy,
    TenancyKey,
    TenantImage,
    Text,
)
from fpga_plugin.allocation.names import card_of, is_card, names_kind_of, parse_region_id
from fpga_plugin.errors import quote
from fpga_plugin.ids import CardId, DeviceId, aliased_name, kind_of, parse_device_id
from fpga_plugin.kubernetes.names import ClaimUid, ResourceName, parse_claim_uid

SCHEMA_VERSION: Final = 4
"""In the file's `user_version`; of the form of all rows, so of each type that is in one."""

SCHEMA: Final = (
    "CREATE TABLE journal (kind TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL,"
    " PRIMARY KEY (kind, key)) WITHOUT ROWID"
)

_LOANS: Final = 3
"""The form before it, of the plugin's releases until eea44c1."""

_INSERT: Final = "INSERT OR REPLACE INTO journal VALUES (?, ?, ?)"

Statement: TypeAlias = tuple[str, Sequence[tuple[str, ...]]]
"""SQL, and the rows to run it with."""

_COMMITS: Final = "commits"
_IDENTITY: Final = "identity"
"""The rows that are no fields of `Change`: `marker` says what for."""

_MAX_TEXT: Final = 1 << 18
"""Characters of one value: far more than a region of the largest card with the longest reason."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a journal says.

    Attributes:
        snapshot: of the rows that make sense.
        left_out: what the others are, for people.
        commits: how many transactions made it, as it says itself; 0 where it does not.
        identity: which journal it is; empty where it does not say.
        version: of the form of its rows.
    """

    snapshot: Change
    left_out: tuple[str, ...] = ()
    commits: int = 0
    identity: str = ""
    version: object = SCHEMA_VERSION

    @property
    def wrong(self) -> str:
        """Why not all of it is what this version of the plugin writes; empty: it is."""
        if self.version != SCHEMA_VERSION:
            known = SCHEMA_VERSION
            return f"another version of the plugin wrote it (schema {self.version}, not {known})"
        if self.left_out:  # a device may look free because of it
            return f"{len(self.left_out)} of its rows make no sense, such as {self.left_out[0]}"
        return ""


def prepare(db: sqlite3.Connection) -> None:
    """Make the table in an empty file; of another see that it can be used as it is.

    A damaged file may well be read, and fail at every write until somebody removes it.

    Raises:
        ValueError: it is of another form, or its pages do not fit together.
        sqlite3.Error: it cannot be read or written.
    """
    new = not _tables(db) and not _version(db)
    if not new:
        check(db)
    db.execute("BEGIN IMMEDIATE")  # closing the connection rolls it back
    for sql in (SCHEMA, *history.SCHEMA) if new else ():
        db.execute(sql)
    # A file that can be read and not written is better known now than by the first Allocate.
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION if new else _version(db)}")
    db.execute("COMMIT")


def check(db: sqlite3.Connection) -> None:
    """Whether what is written would find its place, and nothing else happens then.

    Raises:
        ValueError: it is of another form, or its pages do not fit together.
        sqlite3.Error: it cannot be read.
    """
    (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()  # 0.5 ms for 1000 allocations
    if verdict != "ok":
        msg = f"it is damaged: {quote(verdict)}"
        raise ValueError(msg)
    if {*_tables(db)} != {SCHEMA, *history.SCHEMA}:
        msg = "its tables are not those that the plugin makes"
        raise ValueError(msg)


def load(db: sqlite3.Connection) -> Loaded:
    """Read everything; of another version's form, what this one understands.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    snapshot = Change()
    left_out: list[str] = []
    itself: dict[object, str] = {_COMMITS: "0", _IDENTITY: ""}
    version = _version(db)
    found = db.execute("SELECT kind, key, value FROM journal").fetchall()
    for kind, key, value in found:
        try:
            if kind in itself:
                itself[kind] = _about_itself(kind, key, value)
                continue
            if version == _LOANS:
                if kind in GONE:
                    continue
                kind = PRESENT_KINDS.get(kind, kind)  # noqa: PLW2901  # under its present name
            parsed, content = _parse(kind, key, value, exactly=version == SCHEMA_VERSION)
        except (ValueError, RecursionError) as error:
            left_out.append(f"{_shown(kind)} {quote(key)}: {_shown(error)}")
        else:
            getattr(snapshot, kind)[parsed] = content
    both = allocated_twice(snapshot.allocations)
    left_out += (f"allocations on {card}, as a whole and by region" for card in both)
    if version == _LOANS:
        snapshot = of_schema_3(snapshot, found)
    return Loaded(snapshot, tuple(left_out), int(itself[_COMMITS]), itself[_IDENTITY], version)


def replacement(snapshot: Change, identity: str, commits: int) -> Iterable[Statement]:
    """What makes the journal say this and nothing else."""
    yield "DELETE FROM journal", [()]
    yield from statements(snapshot)
    yield _INSERT, [(_IDENTITY, "", identity)]
    yield counted(commits)


def statements(change: Change) -> Iterable[Statement]:
    """What makes a change durable.

    Raises:
        ValueError: a row could not be read again.
    """
    gone: list[tuple[str, ...]] = []
    there: list[tuple[str, ...]] = []
    for kind in _KINDS:
        for key, value in getattr(change, kind).items():
            row = (kind, _key(key))
            if value:
                there.append((*row, _json(value)))
                _parse(*there[-1])
            else:
                gone.append(row)
    yield "DELETE FROM journal WHERE kind = ? AND key = ?", gone
    yield _INSERT, there


def counted(commits: int) -> Statement:
    """What makes the journal say how many transactions it has committed, this one included."""
    return _INSERT, [(_COMMITS, "", str(commits))]


def _about_itself(kind: str, key: object, value: object) -> str:
    sound = key == "" and isinstance(value, str) and _ABOUT[kind].fullmatch(value)
    return str(value) if sound else _nonsense(value)


def _version(db: sqlite3.Connection) -> object:
    return db.execute("PRAGMA user_version").fetchone()[0]


def _tables(db: sqlite3.Connection) -> list[object]:
    """How all tables were made, and whatever else a database may have (indexes, triggers)."""
    return [sql for (sql,) in db.execute("SELECT sql FROM sqlite_master")]


def _parse(
    kind: object, key: object, value: object, *, exactly: bool = True
) -> tuple[object, object]:
    """A row's key and value; `exactly` as this version of the plugin writes it.

    Raises:
        ValueError: this plugin would not have written it.
        RecursionError: the same.
    """
    if not isinstance(kind, str) or (of := _KINDS.get(kind)) is None:
        _nonsense(kind)
    if not isinstance(key, str) or not isinstance(value, str) or len(value) > _MAX_TEXT:
        _nonsense(value)
    parsed, content = of.key(key), of.value.decode(value)
    if not content:
        _nonsense(value)
    # A field of another name would be passed over, and its default be taken for the truth.
    if _key(parsed) != key or (exactly and _json(content) != value):
        msg = "the plugin does not write it so"
        raise ValueError(msg)
    if of.own and getattr(content, of.own) != parsed:
        _nonsense(parsed)
    if of.check is not None:
        of.check(parsed, content)
    return parsed, content


def _key(key: object) -> str:
    return key if isinstance(key, str) else _json(key)


def _json(value: object) -> str:
    return _ENCODER.encode(value).decode()


def _check_allocation(device: DeviceId, allocation: Allocation) -> None:
    ours = all(device in {parse_region_id(region), card_of(region)} for region in allocation.grants)
    if not allocation.grants or not ours:
        _nonsense(allocation.grants)
    if not names_kind_of(allocation.resource, device):
        _nonsense(allocation.resource)


def _check_claim_owner(_uid: ClaimUid, owner: ClaimOwner) -> None:
    if not owner.devices or len(set(owner.devices)) < len(owner.devices):
        _nonsense(owner.devices)
    for device in owner.devices:
        parse_device_id(device)
    if not owner.requests.keys() <= set(owner.devices):
        _nonsense(owner.requests)


def _card(text: str) -> CardId:
    device = parse_device_id(text)
    return CardId(device) if is_card(device) else _nonsense(text)


def _of_region(key: msgspec.json.Decoder[TenancyKey | TenantImage], text: str) -> object:
    parsed = key.decode(text)
    parse_region_id(parsed.region)
    return parsed


def _resource(parts: Callable[[str], object], text: str) -> ResourceName:
    return _nonsense(text) if parts(text) is None else ResourceName(text)


def _shown(value: object) -> str:
    """What may quote a row, for a log."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in str(value)[:256])


def _nonsense(value: object) -> NoReturn:
    msg = f"{quote(value)} is not a valid value"
    raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the rows of one kind hold.

    Attributes:
        key: parses one.
        value: the same.
        own: the field of a value that is its key, too; empty: it has none.
        check: raises ValueError where the two do not belong together.
    """

    key: Callable[[str], object]
    value: msgspec.json.Decoder[Any]
    own: str = ""
    check: Callable[[Any, Any], None] | None = None


# Made at import: see kubernetes/kubelet/checkpoint.py.
_ENCODER: Final = msgspec.json.Encoder(order="deterministic")
_FLAG: Final = msgspec.json.Decoder(bool)

_ABOUT: Final = {_COMMITS: re.compile(r"[0-9]{1,18}"), _IDENTITY: re.compile(r"[0-9a-f]{32}")}
"""18 digits: 30 million years of a thousand transactions a second."""

_KINDS: Final[Mapping[str, _Kind]] = {
    "facts": _Kind(Fact, msgspec.json.Decoder(Text)),
    "allocations": _Kind(
        parse_device_id, msgspec.json.Decoder(Allocation), "device", _check_allocation
    ),
    "regions": _Kind(parse_region_id, msgspec.json.Decoder(RegionRecord), "region"),
    "memory_clear_pending": _Kind(_card, _FLAG),
    "drained": _Kind(_card, _FLAG),
    "rebinding": _Kind(_card, _FLAG),
    "unreconciled": _Kind(_card, _FLAG),
    "tenancies": _Kind(
        partial(_of_region, msgspec.json.Decoder(TenancyKey)), msgspec.json.Decoder(Tenancy), "key"
    ),
    "resources": _Kind(partial(_resource, kind_of), _FLAG),
    "pending_poststops": _Kind(parse_device_id, msgspec.json.Decoder(Count)),
    "claim_owners": _Kind(
        parse_claim_uid, msgspec.json.Decoder(ClaimOwner), "uid", _check_claim_owner
    ),
    "images": _Kind(partial(_of_region, msgspec.json.Decoder(TenantImage)), _FLAG),
    "debug_holds": _Kind(parse_region_id, msgspec.json.Decoder(DebugHold), "region"),
    "alias_bindings": _Kind(partial(_resource, aliased_name), msgspec.json.Decoder(AliasBinding)),
}
"""By the field of `Change`."""
