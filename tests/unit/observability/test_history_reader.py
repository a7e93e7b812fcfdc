"""The history as it is shown: however many ask, it is read once, by a thread of its own."""

import asyncio
import threading
from types import SimpleNamespace
from typing import cast

import pytest
from doubles.cards import AFU, device, make_card

from fpga_plugin.allocation.journal.history import Entry, HistoryEvent, HistoryKind
from fpga_plugin.ids import RegionId
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.observability import history_reader
from fpga_plugin.observability.catalogue import Catalogue
from fpga_plugin.observability.history_reader import HistoryReader

CARD = make_card(1, nodes=(0, 1))
R0, R1 = (RegionId(device(CARD, port)) for port in (0, 1))
ENTRIES = [
    Entry(R1, HistoryKind.RELEASED, HistoryEvent(at=3.0, pod=PodUid("pod-b"), name="team/web")),
    Entry(R0, HistoryKind.PROGRAMMED, HistoryEvent(at=2.0, afu_id=AFU, name="team/zzz")),
    Entry(R0, HistoryKind.CLAIMED, HistoryEvent(at=1.0, pod=PodUid("pod-zzz"), name="team/zzz")),
]


class Table:
    """In place of the journal's."""

    def __init__(self) -> None:
        self.readers: list[str] = []
        self.at_once = self.most_at_once = 0
        self.rows_read = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def latest(self, _path):
        self.readers.append(threading.current_thread().name)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        self.go_on.wait()
        for entry in ENTRIES:
            self.rows_read += 1
            yield entry
        self.at_once -= 1


@pytest.fixture
def shown(monkeypatch):
    table = Table()
    monkeypatch.setattr(history_reader, "latest", table.latest)
    return table, HistoryReader("/state", cast("Catalogue", SimpleNamespace(name=lambda _afu: "")))


def test_however_many_search_the_history_it_is_read_once_and_not_by_asyncios_threads(shown):
    table, history = shown

    async def ask():
        table.go_on.clear()
        searches = [asyncio.create_task(history.events(f"zzz{'z' * n}")) for n in range(64)]
        while not table.readers:  # noqa: ASYNC110  # a thread does it
            await asyncio.sleep(0.001)
        try:
            async with asyncio.timeout(30.0):
                await asyncio.to_thread(lambda: None)  # as the liveness probe does
        finally:
            table.go_on.set()
        return await asyncio.gather(*searches)

    first, second, *_ = asyncio.run(ask())
    assert [one["at"] for one in first] == [2.0, 1.0]
    assert second == []
    assert table.readers == ["history"]


def test_what_is_kept_of_the_history_is_for_a_moment(shown, monkeypatch):
    monkeypatch.setattr(history_reader, "KEPT", 0.001)
    table, history = shown

    async def ask():
        await history.events("zzz")
        while len(table.readers) == 1:
            await asyncio.sleep(0.005)
            await history.events("zzz")

    asyncio.run(ask())
    assert len(table.readers) == 2


def test_a_reader_who_has_gone_does_not_make_the_next_one_read_beside_his_thread(shown):
    table, history = shown

    async def ask():
        table.go_on.clear()
        gone = asyncio.create_task(history.events("zzz"))
        while not table.readers:  # noqa: ASYNC110  # a thread does it
            await asyncio.sleep(0.001)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        following = asyncio.create_task(history.events("web"))
        await asyncio.sleep(0.01)
        table.go_on.set()
        return await following

    assert [one["pod"] for one in asyncio.run(ask())] == ["team/web"]
    assert table.most_at_once == 1


def test_the_newest_events_are_read_no_further_than_shown(shown):
    table, history = shown
    (newest,) = asyncio.run(history.events(most=1))
    assert newest["at"] == 3.0
    assert table.rows_read == 1


def test_a_pods_name_is_shown_wherever_one_event_of_it_has_it(shown, monkeypatch):
    _, history = shown
    pod = PodUid("pod-b")
    after = Entry(
        R1, HistoryKind.SCRUBBED, HistoryEvent(at=4.0, pod=pod)
    )  # by a plugin that was restarted
    monkeypatch.setattr(history_reader, "latest", lambda _path: [after, *ENTRIES])
    scrubbed, released = asyncio.run(history.events("team/web"))
    assert (scrubbed["pod"], scrubbed["event"]) == ("team/web", "scrubbed")
    assert (released["pod"], released["event"]) == ("team/web", "released")


def test_a_bitstreams_last_use_is_read_by_the_same_thread(shown):
    table, history = shown
    assert asyncio.run(history.last_used()) == {AFU: 2.0}
    assert table.readers == ["history"]


def test_a_history_that_is_not_read_in_time_shows_nothing(shown, monkeypatch):
    monkeypatch.setattr(history_reader, "LATE", 0.01)
    table, history = shown
    table.go_on.clear()

    async def ask():
        try:
            return await history.events()
        finally:
            table.go_on.set()

    assert asyncio.run(ask()) == []
