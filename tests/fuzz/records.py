"""What the plugin itself wrote, and a disk or a person made something else of: its journal."""

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress

import msgspec
from doubles.cards import AFU, PREFIX, REGIONS, WHOLE, make_card
from target import Target

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import DeviceId, PodUid
from fpga_plugin.ledger import rows
from fpga_plugin.ledger.journal import Journal, JournalError
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.ledger.records import Change, Claim, Condition, RegionRecord

# Memory, where there is some: a journal is opened some hundred times a second.
_SCRATCH = tempfile.TemporaryDirectory(
    prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
)
_PATH = os.path.join(_SCRATCH.name, "journal.sqlite3")
_SOUND = os.path.join(_SCRATCH.name, "sound.sqlite3")


_OURS, _OTHER = (
    make_card(bus, nodes=(16 + bus, 17 + bus), clears_memory=True) for bus in (0, 0x10)
)
"""The card whose rows are anything, and the one whose rows are never touched."""

_KEPT = tuple(
    Claim(
        device=DeviceId(region.id),
        resource=REGIONS,
        nodes=((region.id, region.node),),
        started=True,
        pod=PodUid("pod-a"),
    )
    for region in _OTHER.regions[:1]
)


def _make_sound() -> bytes:
    journal = Journal(_SOUND)
    journal.set_boot_id("boot")
    free, faulted = _OURS.regions[0].id, _OTHER.regions[1].id
    journal.write(
        Change(
            claims={claim.device: claim for claim in _KEPT},
            regions={
                free: RegionRecord(free, Condition.BLANK, afu_id=AFU),
                faulted: RegionRecord(faulted, Condition.FAULTED, "broken"),
            },
            debts={_OTHER.id: True},
            drained={_OTHER.id: True},
            resources={REGIONS},
            epoch="1",
            unreconciled={_OTHER.id: True},
        )
    )
    journal.close()
    with open(_SOUND, "rb") as file:
        return file.read()


_GOOD = _make_sound()


def _clear() -> None:
    for entry in os.scandir(_SCRATCH.name):
        if entry.path != _SOUND:
            os.unlink(entry.path)


def _use(journal: Journal) -> None:
    """A short life upon what was read; then it is read again as it was written."""
    ledger = Ledger(prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot")
    journal.set_boot_id("boot")
    for card in (_OURS, _OTHER):
        ledger.card_found(card, {region.id: AFU for region in card.regions}, AFU)
        kinds = {claim.device == card.id for claim in ledger.claims_on(card.id)}
        assert len(kinds) < 2, "a whole claim beside one of a region"
    region, whole = DeviceId(_OURS.regions[0].id), DeviceId(_OURS.id)
    for step in (
        lambda: ledger.kubelet_epoch("2"),
        lambda: ledger.reconciled([_OURS.id, _OTHER.id]),
        lambda: ledger.prestart_seen([region, whole]),
        lambda: ledger.poststop_seen([region, whole]),
        lambda: ledger.allocate(REGIONS, [region]),
        lambda: ledger.release([region, whole]),
        lambda: ledger.allocate(WHOLE, [whole]),
        lambda: ledger.adopt(REGIONS, region, PodUid("pod-b"), {}),
    ):
        try:
            step()
        except JournalError:
            raise
        except FpgaPluginError:
            pass
    remembered = set(ledger.claims)
    journal.close()
    with closing(again := Journal(_PATH)):
        assert not again.left_out
        assert again.set_aside is None
        assert {claim.device for claim in again.snapshot.claims} == remembered


def _rows(data: bytes) -> None:
    """JSON, `{table: [row, ...]}`: rows of anything but the other card.

    Text that begins with `b:` is a blob of the rest, `t:` text of those bytes, UTF-8 or not.
    """
    try:
        tables = msgspec.json.decode(data, type=dict[str, list[list[int | float | str | None]]])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return
    _clear()
    shutil.copyfile(_SOUND, _PATH)
    with closing(sqlite3.connect(_PATH)) as db:
        for table in tables.keys() & rows._COLUMNS.keys():
            for row in tables[table]:
                if row and not str(row[0]).startswith(("schema", _OTHER.id)):
                    with suppress(sqlite3.Error, OverflowError, UnicodeError):
                        _insert(db, table, row)
        db.commit()
    journal = Journal(_PATH)
    assert journal.set_aside is None or journal.left_out
    kept = {claim.device: claim for claim in journal.snapshot.claims}
    assert all(kept[claim.device] == claim for claim in _KEPT)
    assert _OTHER.id in journal.snapshot.drained & journal.snapshot.debts
    conditions = {record.region: record.condition for record in journal.snapshot.regions}
    assert conditions[_OTHER.regions[1].id] is Condition.FAULTED
    _use(journal)


def _insert(db: sqlite3.Connection, table: str, row: Sequence[object]) -> None:
    marks, values = [], []
    for value in row:
        kind, rest = (value[:2], value[2:]) if isinstance(value, str) else ("", "")
        marks.append("CAST(? AS TEXT)" if kind == "t:" else "?")
        values.append(rest.encode("latin-1") if kind in {"t:", "b:"} else value)
    db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join(marks)})", values)


def _file(data: bytes) -> None:
    """A database file; or, where it is none, what three bytes each write into a sound one."""
    if data[:6] != _GOOD[:6]:
        damaged = bytearray(_GOOD)
        for at in range(0, len(data) - 2, 3):
            damaged[int.from_bytes(data[at : at + 2]) % len(damaged)] = data[at + 2]
        data = bytes(damaged)
    _clear()
    with open(_PATH, "wb") as file:
        file.write(data)
    try:
        journal = Journal(_PATH)
    except JournalError as error:
        if "has schema" in error.message:  # another plugin's, it seems
            return
        raise
    _use(journal)


_ROW = {
    "claims": [
        [
            *(_OURS.regions[0].id, REGIONS, f'[["{_OURS.regions[0].id}", "/dev/dfl-port.16"]]'),
            *(1, 1, 0, "pod", "1", 1, 0),
        ]
    ],
    "regions": [[_OURS.regions[1].id, "BLANK", "", AFU, '["pod"]']],
    "debts": [[_OURS.id]],
    "strays": [[_OURS.regions[0].id, 2]],
    "since": [[_OURS.regions[0].id, 1.5]],
    "rebinding": [[_OURS.id]],
    "resources": [[WHOLE]],
    "meta": [["epoch", "2"], ["boot_id", "boot"]],
    "unreconciled": [[_OURS.id]],
    "loans": [["pod", _OURS.regions[0].id, "/dev/dfl-port.16"]],
}
_WHOLE_ROW = {
    "claims": [
        *_ROW["claims"],
        [_OURS.id, WHOLE, f'[["{_OURS.regions[0].id}", "/a"]]', 0, 0, 0, None, "", 0, 9],
    ],
    "drained": [["t:\u00ff"], ["b:x"], [None], [9e99]],
}

TARGETS = {
    "journal-rows": Target(
        _rows,
        (json.dumps(_ROW).encode(), json.dumps(_WHOLE_ROW).encode(), b"{}"),
        tuple(
            f'"{word}"'.encode()
            for word in (*rows._COLUMNS, *Condition, _OURS.id, *(r.id for r in _OURS.regions))
        ),
    ),
    "journal-file": Target(
        _file, (_GOOD[:4096], b"\0\x10\1", b"\x10\0\xff", b"\x20\x05\xff\x30\x05\0")
    ),
}
