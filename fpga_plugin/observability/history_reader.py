"""The history as it is shown: read from the journal in a thread, for the commands and the page.

Any client that reaches the page can ask for it, as often as it likes. So a thread of its own reads:
asyncio's are those of PreStartContainer and of the liveness probe. What it has read is kept for a
moment, and others that ask meanwhile are answered from that.
"""

import asyncio
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Final

from fpga_plugin.allocation.journal.history import Entry, HistoryKind, latest
from fpga_plugin.allocation.journal.journal import JOURNAL_FILE
from fpga_plugin.host.keyed_threads import KeyedThreads, LateError
from fpga_plugin.observability.catalogue import Catalogue
from fpga_plugin.observability.schema import EventView
from fpga_plugin.observability.selection import MAX_WORDS

MOST: Final = 500
"""Events of an answer; the newest."""

FRESH: Final = 10.0
"""Seconds for which it is not asked again when a bitstream was last used."""

KEPT: Final = 2.0
"""Seconds for which the whole table is kept: some 6 MiB."""

LATE: Final = 10.0
"""Seconds after which a reading is given up, and nothing is shown."""


class HistoryReader:
    """Reads beside the journal's own connection.

    Args:
        state_dir: where the journal is.
        catalogue: reports bitstreams' names.
    """

    def __init__(self, state_dir: str, catalogue: Catalogue) -> None:
        self._path = os.path.join(state_dir, JOURNAL_FILE)
        self._catalogue = catalogue
        self._threads: KeyedThreads[str] = KeyedThreads("history", most=1)
        self._turn = asyncio.Lock()
        self._kept: Sequence[Entry] | None = None
        self._used: Mapping[str, float] = {}
        self._used_at = float("-inf")

    async def events(self, words: str = "", *, most: int = MOST) -> list[EventView]:
        """The newest events that have the words in their region's or pod's name; newest first."""
        look = words[:MAX_WORDS].strip().lower().replace(":", "-")
        entries = await self._entries(None if look else most)
        found = (entry for entry in entries if _matches(entry, look))
        return [self._view(entry) for entry in islice(found, most)]

    async def last_used(self) -> Mapping[str, float]:
        """When a bitstream was last programmed, by AFU id, as far back as the history goes."""
        if time.monotonic() - self._used_at >= FRESH:
            self._used_at = time.monotonic()
            used: dict[str, float] = {}
            for entry in await self._entries(None):
                if (
                    entry.kind is HistoryKind.PROGRAMMED
                    and entry.event.afu_id
                    and not entry.event.words
                ):
                    used.setdefault(entry.event.afu_id, entry.event.at)
            self._used = used
        return self._used

    async def _entries(self, most: int | None) -> Sequence[Entry]:
        """The newest entries, or all; one read at a time, and all entries are kept for a moment."""
        async with self._turn:
            if self._kept is not None:
                return self._kept
            try:
                entries = await self._threads.run("", lambda: self._read(most), seconds=LATE)
            except LateError:
                return []  # the history's writer reports it
            if most is None:
                self._kept = entries
                asyncio.get_running_loop().call_later(KEPT, self._forget)
            return entries

    def _forget(self) -> None:
        self._kept = None

    def _read(self, most: int | None) -> list[Entry]:
        found: list[Entry] = []
        with suppress(sqlite3.Error):  # the journal's own errors are reported where it is written
            found.extend(islice(latest(self._path), most))
        return _named(found)

    def _view(self, entry: Entry) -> EventView:
        event = entry.event
        return {
            "at": event.at,
            "region": entry.region,
            "event": entry.kind.value,
            "seconds": event.seconds,
            "pod_uid": event.pod or "",
            "pod": event.name,
            "claim": event.claim,
            "afu_id": event.afu_id or "",
            "bitstream": self._catalogue.name(event.afu_id or ""),
            "message": event.words,
        }


def _named(entries: list[Entry]) -> list[Entry]:
    """With the pods' names wherever one entry has it: a restart of the plugin forgets names."""
    names = {one.event.pod: one.event.name for one in entries if one.event.pod and one.event.name}
    return [
        replace(one, event=replace(one.event, name=names[one.event.pod]))
        if not one.event.name and one.event.pod in names
        else one
        for one in entries
    ]


def _matches(entry: Entry, look: str) -> bool:
    event = entry.event
    named = (event.name, event.claim, event.pod or "")
    return look in entry.region or any(look in one.lower() for one in named)
