"""The log line about the work on a region, and the pods that had the region before."""

from contextlib import suppress
from types import SimpleNamespace

from doubles.cards import make_card
from ledger_support import make_ledger
from structlog.testing import capture_logs

from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.cards.reports import Report, ReportStep

REGION = make_card().regions[0].id


def make_operations(*former):
    ledger = SimpleNamespace(
        record=lambda _: SimpleNamespace(condition="blank"),
        tenancies=SimpleNamespace(left=lambda _: [SimpleNamespace(pod=pod) for pod in former]),
    )
    told = []
    observer = SimpleNamespace(reported=told.append)
    return CardOperations(ledger, None, None, None, None, observer), told


def test_a_scrub_is_logged_with_its_times_and_notes() -> None:
    operations, told = make_operations()
    steps = [ReportStep("verify", 1.23456789), ReportStep("quiesce", 2.0, "it was busy")]
    report = Report(REGION, scrubbed=True, steps=steps)
    with capture_logs() as lines:
        operations.report(report)
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("region scrubbed", "info")
    assert line["steps"] == {"verify": 1.234568, "quiesce": 2.0}
    assert line["notes"] == ["it was busy"]
    assert line["error"] is None
    assert told == [report]


def test_a_failure_is_a_warning_that_says_it_once() -> None:
    operations, told = make_operations()
    report = Report(REGION, steps=[ReportStep("verify", 1.0, "it hangs")], error="it hangs")
    with capture_logs() as lines:
        operations.report(report)
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("region not prepared", "warning")
    assert (line["error"], line["notes"]) == ("it hangs", [])
    assert told == [report]


def test_former_pods_are_those_whose_names_are_known() -> None:
    operations, _ = make_operations("pod-a", None)
    assert operations.former(REGION) == {"pod-a"}


def test_work_that_left_nothing_undone_ends_as_it_ended_though_the_journal_is_full() -> None:
    """Else a full disk takes the error's place, and the report is lost."""
    ledger, journal = make_ledger(make_card())
    journal.failing = 9
    with suppress(JournalError):
        ledger.work.dirty([REGION], "so")
    writes = journal.failing
    CardOperations(ledger, None, None, None, None, None).settle([REGION])
    assert journal.failing == writes
