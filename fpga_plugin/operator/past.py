"""The history as it is shown: read from the journal in a thread, for the commands and the page."""

import asyncio
import os
import sqlite3
import time
from collections.abc import Mapping
from typing import Final

from fpga_plugin.ledger.history import Entry, Kind, latest
from fpga_plugin.ledger.journal import JOURNAL_FILE
from fpga_plugin.operator.catalogue import Catalogue
from fpga_plugin.operator.schema import EventView
from fpga_plugin.operator.selection import MAX_WORDS

MOST: Final = 500
"""Events of an answer; the newest."""

FRESH: Final = 10.0
"""Seconds for which it is not asked again when a bitstream was last used."""


class Past:
    """Belongs to the event loop; reads beside the journal's own connection.

    Args:
        state_dir: where the journal is.
        catalogue: tells bitstreams' names.
    """

    def __init__(self, state_dir: str, catalogue: Catalogue) -> None:
        self._path = os.path.join(state_dir, JOURNAL_FILE)
        self._catalogue = catalogue
        self._used: Mapping[str, float] = {}
        self._used_at = float("-inf")

    async def events(self, words: str = "", *, most: int = MOST) -> list[EventView]:
        """The newest events that have the words in their region's or pod's name; newest first."""
        look = words[:MAX_WORDS].strip().lower().replace(":", "-")
        entries = await asyncio.to_thread(self._read, look, most)
        return [self._view(entry) for entry in entries]

    async def last_used(self) -> Mapping[str, float]:
        """When a bitstream was last programmed, by AFU id, as far back as the history goes."""
        if time.monotonic() - self._used_at >= FRESH:
            self._used_at = time.monotonic()
            self._used = await asyncio.to_thread(self._read_used)
        return self._used

    def _read(self, look: str, most: int) -> list[Entry]:
        found: list[Entry] = []
        try:
            for entry in latest(self._path):
                if _matches(entry, look):
                    found.append(entry)
                    if len(found) == most:
                        break
        except sqlite3.Error:
            return found  # the journal's own errors are told where it is written
        return found

    def _read_used(self) -> Mapping[str, float]:
        used: dict[str, float] = {}
        try:
            for entry in latest(self._path):
                if entry.kind is Kind.PROGRAMMED and entry.event.afu_id and not entry.event.words:
                    used.setdefault(entry.event.afu_id, entry.event.at)
        except sqlite3.Error:
            return used
        return used

    def _view(self, entry: Entry) -> EventView:
        event = entry.event
        return {
            "at": event.at,
            "region": entry.region,
            "event": entry.kind.value,
            "seconds": event.seconds,
            "pod_uid": event.pod or "",
            "pod": event.name,
            "afu_id": event.afu_id or "",
            "bitstream": self._catalogue.name(event.afu_id or ""),
            "message": event.words,
        }


def _matches(entry: Entry, look: str) -> bool:
    event = entry.event
    return look in entry.region or look in event.name.lower() or look in (event.pod or "").lower()
