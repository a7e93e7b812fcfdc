"""What the plugin itself wrote, and a disk or a person made something else of: its journal."""

import json
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import msgspec
from doubles.cards import AFU, PREFIX, REGIONS, WHOLE, make_card
from target import Target

from fpga_plugin.allocation.journal import rows
from fpga_plugin.allocation.journal.journal import Journal, JournalError
from fpga_plugin.allocation.journal.marker import MARKER_FILE
from fpga_plugin.allocation.journal.records import Allocation, Change, Condition, Fact, RegionRecord
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import PodUid, ResourceName

# Memory, where there is some: a journal is opened some hundred times a second.
_SCRATCH = tempfile.TemporaryDirectory(
    prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
)
_PATH = os.path.join(_SCRATCH.name, "journal.sqlite3")
_MARKER = os.path.join(_SCRATCH.name, MARKER_FILE)
_SOUND = os.path.join(_SCRATCH.name, "sound.sqlite3")


_OURS, _OTHER = (
    make_card(bus, nodes=(16 + bus, 17 + bus), clears_memory=True) for bus in (0, 0x10)
)
"""The card whose rows are anything, and the one whose rows are never touched."""

_KEPT = tuple(
    Allocation(
        device=DeviceId(region.id),
        resource=REGIONS,
        grants={region.id: region.grant},
        started=True,
        pod=PodUid("pod-a"),
    )
    for region in _OTHER.regions[:1]
)


def _make_sound() -> bytes:
    journal = Journal(_SOUND)
    free, faulted = _OURS.regions[0].id, _OTHER.regions[1].id
    journal.write(
        Change(
            allocations={claim.device: claim for claim in _KEPT},
            regions={
                free: RegionRecord(free, Condition.BLANK, afu_id=AFU),
                faulted: RegionRecord(faulted, Condition.FAULTED, "broken"),
            },
            memory_clear_pending={_OTHER.id: True},
            drained={_OTHER.id: True},
            resources={REGIONS: True},
            facts={Fact.BOOT: "boot", Fact.KUBELET: "1"},
        )
    )
    journal.close()
    with open(_SOUND, "rb") as file:
        return file.read()


_GOOD = _make_sound()


with open(_MARKER, "rb") as marker:
    _MARK = marker.read()


def _clear() -> None:
    """No journal is there, and the marker is that of the sound one."""
    for entry in os.scandir(_SCRATCH.name):
        if entry.path != _SOUND:
            os.unlink(entry.path)
    with open(_MARKER, "wb") as file:
        file.write(_MARK)


def _use(journal: Journal) -> None:
    """A short life upon what was read; then it is read again as it was written."""
    ledger = Ledger(prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot")
    for card in (_OURS, _OTHER):
        ledger.hardware.card_found(card, {region.id: AFU for region in card.regions}, AFU)
        kinds = {claim.device == card.id for claim in ledger.allocations_on(card.id)}
        assert len(kinds) < 2, "a whole claim beside one of a region"
    region, whole = DeviceId(_OURS.regions[0].id), DeviceId(_OURS.id)
    for step in (
        lambda: ledger.device_plugin.kubelet_found("2"),
        lambda: ledger.reconciled([_OURS.id, _OTHER.id]),
        lambda: ledger.device_plugin.prestart_seen([region, whole]),
        lambda: ledger.device_plugin.poststop_seen([region, whole]),
        lambda: ledger.device_plugin.allocate(REGIONS, [region]),
        lambda: ledger.device_plugin.release([region, whole]),
        lambda: ledger.device_plugin.allocate(WHOLE, [whole]),
        lambda: ledger.device_plugin.adopt(REGIONS, region, PodUid("pod-b"), {}),
    ):
        try:
            step()
        except JournalError:
            raise
        except FpgaPluginError:
            pass
    remembered = set(ledger.allocations)
    journal.close()
    with closing(again := Journal(_PATH)):
        assert not again.doubt
        assert again.snapshot.allocations.keys() == remembered


def _rows(data: bytes) -> None:
    """JSON, `[[kind, key, value], ...]`: rows of anything but the other card.

    Text that begins with `b:` is a blob of the rest, `t:` text of those bytes, UTF-8 or not. What
    is no text is written as JSON.
    """
    try:
        found = msgspec.json.decode(data, type=list[tuple[str, str, Any]])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return
    _clear()
    shutil.copyfile(_SOUND, _PATH)
    with closing(sqlite3.connect(_PATH)) as db:
        for kind, key, value in found:
            if not key.startswith(_OTHER.id):
                with suppress(sqlite3.Error, UnicodeError):
                    _insert(db, kind, key, value)
        db.commit()
    journal = Journal(_PATH)
    assert bool(journal.set_aside) == bool(journal.doubt)
    for claim in _KEPT:  # of a journal in doubt none counts as unused
        doubted = replace(claim, missed_prestart=claim.missed_prestart or bool(journal.doubt))
        assert journal.snapshot.allocations[claim.device] == doubted
    assert _OTHER.id in journal.snapshot.drained
    assert _OTHER.id in journal.snapshot.memory_clear_pending
    assert journal.snapshot.regions[_OTHER.regions[1].id].condition is Condition.FAULTED
    _use(journal)


def _insert(db: sqlite3.Connection, kind: str, key: str, value: object) -> None:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    marks, values = [], []
    for each in (kind, key, text):
        form, rest = each[:2], each[2:]
        marks.append("CAST(? AS TEXT)" if form == "t:" else "?")
        values.append(rest.encode("latin-1") if form in {"t:", "b:"} else each)
    db.execute(f"INSERT OR REPLACE INTO journal VALUES ({', '.join(marks)})", values)


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
    _use(Journal(_PATH))


def _claim(device: str, resource: str, **fields: object) -> list[object]:
    region = _OURS.regions[0]
    claim = Allocation(DeviceId(device), ResourceName(resource), grants={region.id: region.grant})
    return ["allocations", device, msgspec.to_builtins(claim) | fields]


_REGION = _OURS.regions[0].id
_ROWS: list[list[object]] = [
    _claim(
        _REGION, REGIONS, started=True, prestart_seen=True, pod="pod", instance="1", prestarts=1
    ),
    ["regions", _REGION, msgspec.to_builtins(RegionRecord(_REGION, Condition.BLANK, "", AFU))],
    ["memory_clear_pending", _OURS.id, True],
    ["pending_poststops", _REGION, 2],
    ["rebinding", _OURS.id, True],
    ["resources", WHOLE, True],
    ["facts", "kubelet", '"2"'],
]
_WHOLE_ROWS = [
    *_ROWS[:1],
    _claim(_OURS.id, WHOLE, poststops=9),
    *(["drained", key, True] for key in ("t:\u00ff", "b:x", "", _OURS.id)),
]

TARGETS = {
    "journal-rows": Target(
        _rows,
        (json.dumps(_ROWS).encode(), json.dumps(_WHOLE_ROWS).encode(), b"[]"),
        tuple(
            f'"{word}"'.encode()
            for word in (*rows._KINDS, *Condition, _OURS.id, *(r.id for r in _OURS.regions))
        ),
    ),
    "journal-file": Target(
        _file, (_GOOD[:4096], b"\0\x10\1", b"\x10\0\xff", b"\x20\x05\xff\x30\x05\0")
    ),
}
