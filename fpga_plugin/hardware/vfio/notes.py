"""What has to be known of a slot and no register reports, in `<state dir>/slots/<region id>`.

Which functions the plugin bound, written before it binds one; what was read in the slot last, since
reading it again means to hold it; and that a PR of it failed, after which the port stays in reset
(of a virtual function's port that is the one thing noted). A note is about one life of the card: it
names the boot, and the instances of port and functions.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.vfio.function import Function
from fpga_plugin.host.atomic_file import replace_file
from fpga_plugin.ids import AfuId, RegionId, parse_afu_id

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_MAX_BYTES = 65536
"""A card has at most 256 virtual functions; each takes some 40 bytes."""


@dataclass(frozen=True, slots=True)
class Note:
    """What is known of one life of a slot.

    Attributes:
        life: the port's.
        afu_id: what was read in it last; None: it was not read since something may have changed.
        failed: a PR of it failed on the way, so that the port stays in reset.
        bound: functions that the plugin gave to vfio-pci: address and instance of each.
    """

    life: str = ""
    afu_id: AfuId | None = None
    failed: bool = False
    bound: frozenset[tuple[str, int]] = field(default_factory=frozenset)


_NOTHING = Note()


class SlotNotes:
    """The notes of all slots. Thread safe.

    Args:
        directory: where they are; made with the first one. None: nothing outlives the process.
        boot_id: of the kernel.
        owner: this process may write them.
    """

    def __init__(
        self, directory: str | None, *, boot_id: Callable[[], str], owner: bool = True
    ) -> None:
        self._directory = directory
        self._boot_id = boot_id
        self._owner = owner
        self._lock = threading.Lock()
        self._notes: dict[RegionId, Note] = {}
        self._unwritten: set[RegionId] = set()
        """Regions whose note is in memory alone: it could not be written."""

    def of(self, region: RegionId, life: int) -> Note:
        """The note of a region's present life; an empty one where there is none."""
        with self._lock:
            return self._of(region, str(life))

    def load(self, region: RegionId) -> None:
        """Read a region's note, if it was not read yet."""
        with self._lock:
            self._load(region)

    def bound(self, region: RegionId, functions: Iterable[Function]) -> tuple[Function, ...]:
        """Those functions that the plugin bound and that are still the ones that it bound.

        Of a note that was loaded. Waits for no file and no lock, so the event loop may ask.
        """
        note = self._notes.get(region, _NOTHING)
        return tuple(f for f in functions if (str(f.address), f.instance) in note.bound)

    def bind(self, region: RegionId, life: int, functions: Iterable[Function]) -> None:
        """The plugin is about to bind these.

        Raises:
            HardwareError: it cannot be written down, so nothing may be bound.
        """
        with self._lock:
            note = self._of(region, str(life))
            new = {(str(f.address), f.instance) for f in functions}
            self._write(region, replace(note, bound=note.bound | new))

    def unbound(self, region: RegionId, life: int) -> None:
        """None of its functions is the plugin's any more."""
        with self._lock:
            self._write(region, replace(self._of(region, str(life)), bound=frozenset()))

    def shows(self, region: RegionId, life: int, afu_id: AfuId | None) -> None:
        """What was read in it; None: it is about to change."""
        with self._lock:
            self._write(region, replace(self._of(region, str(life)), afu_id=afu_id))

    def failed(self, region: RegionId, life: int) -> None:
        """A PR of it failed."""
        with self._lock:
            note = self._of(region, str(life))
            self._write(region, replace(note, afu_id=None, failed=True))

    def _of(self, region: RegionId, life: str) -> Note:
        note = self._load(region)
        return note if note.life == life else Note(life=life, bound=note.bound)

    def _load(self, region: RegionId) -> Note:
        if (note := self._notes.get(region)) is None:
            note = self._notes[region] = self._read(region)
        return note

    def _read(self, region: RegionId) -> Note:
        if self._directory is None:
            return Note()
        try:
            with open(os.path.join(self._directory, region), "rb") as file:
                text = file.read(_MAX_BYTES + 1)
            if len(text) > _MAX_BYTES:
                return Note()
            return _parse(json.loads(text), self._boot_id())
        except FileNotFoundError:
            return Note()
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            # Nothing is known then: the slot is scrubbed, and what is bound stays so.
            log.warning("slot note unusable", region=region, error=str(error)[:200])
            return Note()

    def _write(self, region: RegionId, note: Note) -> None:
        if self._notes.get(region) == note and region not in self._unwritten:
            return
        if self._directory is not None and self._owner:
            path = os.path.join(self._directory, region)
            try:
                os.makedirs(self._directory, mode=0o700, exist_ok=True)
                replace_file(path, [json.dumps(_plain(note, self._boot_id())).encode()])
            except OSError as error:
                # In memory the old one would outlive its truth.
                self._notes[region] = replace(note, afu_id=None)
                self._unwritten.add(region)
                with suppress(OSError):
                    os.unlink(path)
                raise HardwareError(
                    f"what is known of the slot {region} cannot be written to {path}"
                    f" ({error.strerror})",
                    hint="FPGA_PLUGIN_STATE_DIR has to be writable, with room on its disk",
                ) from error
        self._notes[region] = note
        self._unwritten.discard(region)


@dataclass(frozen=True, slots=True)
class PoisonMark:
    """That a region was left in reset, for one whose port does not show it.

    Attributes:
        notes: where that is written.
        region: whose.
        life: of the driver that counts it.
    """

    notes: SlotNotes
    region: RegionId
    life: int

    def set(self) -> None:
        """It may have been left in reset.

        Raises:
            HardwareError: this cannot be written down; until the process ends it is known.
        """
        self.notes.failed(self.region, self.life)

    def stands(self) -> bool:
        """Whether it was, in this life."""
        return self.notes.of(self.region, self.life).failed


def _plain(note: Note, boot_id: str) -> dict[str, Any]:
    return {
        "boot_id": boot_id,
        "life": note.life,
        "afu_id": note.afu_id,
        "failed": note.failed,
        "bound": sorted(map(list, note.bound)),
    }


def _parse(entry: Any, boot_id: str) -> Note:
    """Raises ValueError, TypeError or OverflowError for what `_plain` did not write."""
    if not isinstance(entry, dict):
        raise TypeError("not a JSON object")
    if entry.get("boot_id") != boot_id:
        return Note()
    afu_id = entry.get("afu_id")
    return Note(
        life=str(entry.get("life")),
        afu_id=None if afu_id is None else parse_afu_id(str(afu_id)),
        failed=entry.get("failed") is not False,
        bound=frozenset((str(address), int(number)) for address, number in entry.get("bound", ())),
    )
