"""The history: what is written of a region's life, how much is kept, and what it cannot harm."""

import asyncio
import sqlite3
from contextlib import closing

import pytest
from doubles.cards import AFU, PREFIX, REGIONS, WHOLE, device, make_card
from ledger_support import found, hold, scrub, start
from test_debug_holds import POD as DEBUGGED
from test_debug_holds import started
from test_dra_steps import A, owner

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal import history
from fpga_plugin.allocation.journal.history import MOST, Entry, HistoryEvent, HistoryKind, latest
from fpga_plugin.allocation.journal.journal import Journal, JournalError
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.cards.reports import Report, ReportStep
from fpga_plugin.ids import DeviceId, RegionId
from fpga_plugin.kubernetes.names import PodName, PodUid
from fpga_plugin.observability import history_writer
from fpga_plugin.observability.history_writer import HistoryWriter

CARD = make_card(1, nodes=(0, 1), clears_memory=True)
OTHER = make_card(2, nodes=(2, 3))
P0, P1 = device(CARD, 0), device(CARD, 1)
R0, R1 = RegionId(P0), RegionId(P1)
POD = PodUid("pod-a")


@pytest.fixture
def journal(tmp_path):
    journal = Journal(str(tmp_path / "journal.sqlite3"))
    yield journal
    journal.close()


class Scene:
    def __init__(self, journal):
        self.journal, self.now = journal, 100.0
        self.ledger = Ledger(
            prefix=PREFIX, journal=journal, snapshot=journal.snapshot, boot_id="boot"
        )
        self.history_writer = HistoryWriter(
            self.ledger,
            lambda pod: PodName("team", "compress") if pod == POD else None,
            journal,
            clock=lambda: self.now,
        )
        found(self.ledger, CARD)

    def told(self):
        """Oldest first."""
        self.history_writer.close()
        entries = reversed(list(latest(self.journal.path)))
        return [(one.region, one.kind.value, one.event) for one in entries]


@pytest.fixture
def scene(journal):
    scene = Scene(journal)
    scrub(scene.ledger, CARD)
    return scene


def test_a_claim_is_told_with_its_pod_and_how_long_it_held(scene):
    scene.ledger.device_plugin.allocate(REGIONS, [P0])
    scene.ledger.device_plugin.bind_pod([P0], POD)
    start(scene.ledger, P0)
    claim = scene.ledger.allocations[P0]
    scene.now = claim.since + 30.0
    scene.ledger.device_plugin.release([P0])
    (_, claimed, one), (_, released, other) = scene.told()
    assert (claimed, released) == ("claimed", "released")
    assert (other.pod, other.name) == (POD, "team/compress")
    assert other.seconds == pytest.approx(30.0)
    assert one.at == 100.0


def test_a_claim_is_told_once_whatever_becomes_of_it(scene):
    scene.ledger.device_plugin.allocate(REGIONS, [P0])
    scene.ledger.device_plugin.bind_pod([P0], POD)
    start(scene.ledger, P0)
    ((_, kind, event),) = scene.told()
    assert kind == "claimed"
    assert (event.pod, event.name) == (POD, "team/compress"), "known by the time it is written"


def test_a_whole_card_is_told_for_each_region(scene):
    scene.ledger.device_plugin.allocate(WHOLE, [device(CARD)])
    assert [(region, kind) for region, kind, _ in scene.told()] == [
        (R0, "claimed"),
        (R1, "claimed"),
    ]


@pytest.mark.parametrize("restarted", [False, True])
def test_the_end_of_a_claim_over_two_cards_is_told_with_its_claim_on_both(scene, restarted):
    found(scene.ledger, OTHER)
    scrub(scene.ledger, OTHER)
    scene.ledger.dra.take(owner(A, P0, device(OTHER, 0)), [POD])
    if restarted:
        scene.history_writer = HistoryWriter(scene.ledger, lambda _: None, scene.journal)
    scene.ledger.dra.end_claim(A)
    told = [event for _, kind, event in scene.told() if kind == "released"]
    assert [(event.claim, event.pod) for event in told] == [("n/c", POD)] * 2


def test_a_region_that_is_kept_for_debugging_is_told_once_with_its_failure(journal):
    scene = Scene(journal)
    scrub(scene.ledger, CARD)
    started(ledger=scene.ledger)
    scene.ledger.device_plugin.release([P0])
    hold(scene.ledger, R0, failure="container 'app' ended with exit code 3")
    hold(scene.ledger, R0, until=1000.0)
    hold(scene.ledger, R0, until=500.0)  # the setting was made shorter
    again = HistoryWriter(scene.ledger, lambda _: None, journal)  # a restart
    hold(scene.ledger, R0, until=400.0)
    again.close()
    kept = [(region, event) for region, kind, event in scene.told() if kind == "kept"]
    ((region, event),) = kept
    assert region == R0
    assert event.pod == DEBUGGED
    assert event.words == "container 'app' ended with exit code 3"
    debug_holds.end(scene.ledger, [R0])
    assert [kind for _, kind, _ in scene.told()].count("kept") == 1


def test_a_restart_tells_no_claim_again(scene, journal):
    scene.ledger.device_plugin.allocate(REGIONS, [P0])
    assert len(scene.told()) == 1
    journal.close()
    again = Scene(Journal(journal.path))
    assert len(again.told()) == 1
    again.ledger.device_plugin.release([P0])
    assert [kind for _, kind, _ in again.told()] == ["claimed", "released"]
    again.journal.close()


def test_a_scrub_and_a_programming_of_one_report_are_two_events_with_their_times(scene):
    steps = [
        ReportStep("quiesce", 0.5),
        ReportStep("program blank", 1.0),
        ReportStep("program", 2.0),
    ]
    scene.history_writer.reported(
        Report(R0, scrubbed=True, steps=steps, afu_id=AFU, pod=POD, former=frozenset({"old"}))
    )
    (_, first, scrubbed), (_, second, programmed) = scene.told()
    assert (first, second) == ("scrubbed", "programmed")
    assert (scrubbed.seconds, scrubbed.pod) == (1.5, "old")
    assert (programmed.seconds, programmed.pod, programmed.afu_id) == (2.0, POD, AFU)


def test_what_failed_says_why(scene):
    scene.history_writer.reported(
        Report(
            R0, scrubbed=True, steps=[ReportStep("quiesce", 0.5)], error="x" * 5000, failure="io"
        )
    )
    ((_, kind, event),) = scene.told()
    assert kind == "scrubbed"
    assert event.words == "x" * history.WORDS


def test_refusals_alike_in_a_row_are_one(scene):
    for words in ("no", "no", "other", "no"):
        scene.history_writer.refused(POD, [P0], words)
    scene.history_writer.reported(Report(R0, steps=[ReportStep("program", 1.0)]))
    scene.history_writer.refused(POD, [P0], "no")
    kinds = [event.words for _, kind, event in scene.told() if kind == "refused"]
    assert kinds == ["no", "other", "no", "no"]


def test_a_refusal_of_devices_that_are_not_there_is_nobodys(scene):
    scene.history_writer.refused(None, [DeviceId("0000-99-00.0-p0"), DeviceId("\x1b[2J")], "no")
    assert scene.told() == []


def test_the_last_of_each_kind_are_kept_and_no_more(journal):
    def entries(region, kind, count):
        return [Entry(region, kind, HistoryEvent(at=float(i))) for i in range(count)]

    journal.remember(entries(R1, HistoryKind.SCRUBBED, 3))
    for _ in range(5):
        journal.remember(entries(R0, HistoryKind.REFUSED, MOST + 7))
    journal.remember(entries(R0, HistoryKind.CLAIMED, 1))
    kept = list(latest(journal.path))
    assert len(kept) == MOST + 4
    refused = [one.event.at for one in kept if one.kind is HistoryKind.REFUSED]
    assert refused == [float(i) for i in reversed(range(7, MOST + 7))], "the newest, newest first"


def test_ids_go_on_after_a_restart(journal):
    journal.remember([Entry(R0, HistoryKind.CLAIMED, HistoryEvent(at=1.0))])
    journal.close()
    again = Journal(journal.path)
    again.remember([Entry(R0, HistoryKind.CLAIMED, HistoryEvent(at=2.0))])
    assert [one.event.at for one in latest(again.path)] == [2.0, 1.0]
    again.close()


def test_all_regions_together_keep_no_more_than_a_start_can_read(journal, monkeypatch):
    monkeypatch.setattr(history, "MOST_ROWS", 4)
    for number in range(9):
        region = RegionId(f"{CARD.id}-p{number}")
        journal.remember([Entry(region, HistoryKind.CLAIMED, HistoryEvent(at=float(number)))])
    assert [one.event.at for one in latest(journal.path)] == [8.0, 7.0, 6.0, 5.0]


def test_what_is_older_than_all_bounds_goes_at_a_start(journal, monkeypatch):
    journal.remember([Entry(R0, HistoryKind.CLAIMED, HistoryEvent(at=float(i))) for i in range(9)])
    journal.close()
    monkeypatch.setattr(history, "MOST_ROWS", 4)
    again = Journal(journal.path)
    assert [one.event.at for one in latest(again.path)] == [8.0, 7.0, 6.0, 5.0]
    again.close()


def execute(path, *statements):
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


@pytest.mark.parametrize(
    "row",
    [
        "(5, 'x', 'claimed', '{\"at\": 1.0}')",
        f"(5, '{R0}', 'stolen', '{{\"at\": 1.0}}')",
        f"(5, '{R0}', 'claimed', '{{\"at\": -1.0}}')",
        f"(5, '{R0}', 'claimed', '{{\"at\": 1.0, \"words\": \"{'x' * 2000}\"}}')",
        f"(5, '{R0}', 'claimed', '{'[' * 100000}')",
        f"(5, '{R0}', 'claimed', x'ff')",
        f"(5, '{R0}', x'ff', 7)",
        f"(9223372036854775807, '{R0}', 'claimed', '{{\"at\": 1.0}}')",
        f"(-5, '{R0}', 'claimed', '{{\"at\": -1.0}}')",
    ],
    ids=range(9),
)
def test_a_row_that_makes_no_sense_costs_no_claim_and_no_further_history(scene, journal, row):
    scene.ledger.device_plugin.allocate(REGIONS, [P0])
    journal.close()
    execute(journal.path, f"INSERT INTO history VALUES {row}")
    again = Journal(journal.path)
    assert again.set_aside is None
    assert not again.left_out
    assert set(again.snapshot.allocations) == {P0}
    again.remember([Entry(R1, HistoryKind.SCRUBBED, HistoryEvent(at=2.0))])
    assert list(latest(again.path)) == [Entry(R1, HistoryKind.SCRUBBED, HistoryEvent(at=2.0))]
    again.close()


def test_a_history_that_cannot_be_written_holds_up_nothing(scene, journal):
    journal.close()
    with pytest.raises(JournalError):
        journal.remember([Entry(R0, HistoryKind.CLAIMED, HistoryEvent(at=1.0))])
    scene.history_writer.refused(POD, [P0], "no")
    scene.history_writer.close()


def test_it_is_written_while_the_plugin_serves(scene, journal, monkeypatch):
    monkeypatch.setattr(history_writer, "DELAY", 0.0)

    async def serve():
        task = asyncio.create_task(scene.history_writer.run())
        for number in range(200):
            scene.history_writer.refused(POD, [P0, P1], f"no {number}")
        async with asyncio.timeout(60):
            while len(list(latest(journal.path))) < 2 * MOST:  # noqa: ASYNC110  # nothing reports it
                await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(serve())


def test_allocates_own_step_writes_no_history(scene, journal):
    scene.ledger.device_plugin.allocate(REGIONS, [P0])
    assert list(latest(journal.path)) == []
