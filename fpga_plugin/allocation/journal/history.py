"""What happened to each region: the last allocations, programmings, scrubs and refusals.

A table of its own in the journal's file. Nothing is decided by it: it is written after the event,
never in an event's own step, and what cannot be written or read is left out. It stays small by
itself: of each region and kind of event the last `MOST` are kept.
"""

import enum
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import msgspec

from fpga_plugin.allocation.journal.records import Afu, Time, Uid
from fpga_plugin.ids import RegionId, parse_device_id

_TABLE: Final = (
    "CREATE TABLE history (id INTEGER PRIMARY KEY, region TEXT NOT NULL, kind TEXT NOT NULL,"
    " value TEXT NOT NULL)"
)

SCHEMA: Final = (
    _TABLE,
    "CREATE INDEX history_of_region ON history (region, kind, id)",
)

MOST: Final = 20
"""Events of one kind that are kept of a region."""

MOST_ROWS: Final = 10_000
"""Of all regions, those that are long gone included: a start reads the whole file once."""

WORDS: Final = 1024
"""Characters of a message, which no refusal exceeds."""

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]
Words: TypeAlias = Annotated[str, msgspec.Meta(max_length=WORDS)]


class HistoryKind(enum.StrEnum):
    """What happened."""

    CLAIMED = "claimed"
    """Allocate granted the region, or its card."""
    RELEASED = "released"
    """The allocation ended; `seconds` is how long it held."""
    PROGRAMMED = "programmed"
    SCRUBBED = "scrubbed"
    REFUSED = "refused"
    KEPT = "kept"
    """Its container failed, and it is kept as it is for debugging; its scrub ends that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEvent:
    """One event of a region.

    Attributes:
        at: Unix time.
        seconds: how long it took, or an allocation lasted; None where that says nothing.
        pod: whose; None where it is not known.
        name: what the pod is called, as namespace and name; empty where it is not known.
        afu_id: what the region's AFU id read afterwards.
        claim: of which ResourceClaim, as namespace and name; empty: of none, or it is not known.
        words: why it failed, or was refused; empty where it was not.
    """

    at: Time
    seconds: Time | None = None
    pod: Uid | None = None
    name: Name = ""
    afu_id: Afu | None = None
    words: Words = ""
    claim: Name = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """An event, of a region."""

    region: RegionId
    kind: HistoryKind
    event: HistoryEvent


# Made at import: see kubernetes/kubelet/checkpoint.py.
_EVENT: Final = msgspec.json.Decoder(HistoryEvent)
_ENCODER: Final = msgspec.json.Encoder()

Statement: TypeAlias = tuple[str, list[dict[str, str | int]]]
"""SQL, and the rows to run it with."""

_TOO_OLD: Final = (
    "DELETE FROM history WHERE region = :region AND kind = :kind AND id <= ("
    "SELECT id FROM history WHERE region = :region AND kind = :kind"
    " ORDER BY id DESC LIMIT 1 OFFSET :most)"
)
_TOO_MANY: Final = "DELETE FROM history WHERE id <= (SELECT max(id) FROM history) - :most"

_MOST_EVENTS: Final = 1 << 60
"""No plugin has had so many: such a number is damage. After the largest one that SQLite has it
numbers rows at random."""


def prepare(db: sqlite3.Connection) -> None:
    """Forget damaged rows, and the oldest beyond all bounds: no reason to doubt the allocations.

    Raises:
        sqlite3.Error: it cannot be read or written.
    """
    db.execute("DELETE FROM history WHERE id NOT BETWEEN 1 AND ?", (_MOST_EVENTS,))
    db.execute(_TOO_MANY, {"most": MOST_ROWS})


def statements(entries: Iterable[Entry]) -> Iterator[Statement]:
    """What makes entries durable, and forgets those that are too old."""
    rows: list[dict[str, str | int]] = [
        {
            "region": entry.region,
            "kind": entry.kind.value,
            "value": _ENCODER.encode(entry.event).decode(),
            "most": MOST,
        }
        for entry in entries
    ]
    yield "INSERT INTO history (region, kind, value) VALUES (:region, :kind, :value)", rows
    yield _TOO_OLD, rows
    yield _TOO_MANY, [{"most": MOST_ROWS}]


def latest(path: str) -> Iterator[Entry]:
    """The events in a journal, the newest first; for any thread.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=1.0)) as db:
        db.text_factory = bytes
        for region, kind, value in db.execute(
            "SELECT region, kind, value FROM history ORDER BY id DESC"
        ):
            try:
                device = parse_device_id(region.decode())
                yield Entry(RegionId(device), HistoryKind(kind.decode()), _EVENT.decode(value))
            except (ValueError, AttributeError, TypeError, RecursionError):
                continue  # nobody's decision depends on it
