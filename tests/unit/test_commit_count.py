"""The count of transactions beside the journal: what is no number says nothing.

Each of these broke without a fast test noticing (`make mutants`): the table of docs/proof.md. What
a journal that lacks transactions leads to is in test_journal.py.
"""

import os

import pytest
from structlog.testing import capture_logs

from fpga_plugin.ledger.commits import CommitCount


def test_what_was_written_is_found_by_the_next_life(tmp_path):
    path = str(tmp_path / "journal.commits")
    count = CommitCount(path)
    assert count.found is None
    for number in (1, 12345, 7):
        count.write(number)
        assert CommitCount(path).found == number


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"0" * 19 + b"7",
        b"0" * 21,
        b"0" * 20 + b"7\n",
        b"0" * 19 + b"x\n",
        b"-" + b"0" * 18 + b"7\n",
        b" " * 19 + b"7\n",
        b"0" * 20 + b"\n0",
    ],
)
def test_what_is_no_count_is_none(tmp_path, raw):
    """A count that is too low hides a loss: then a damaged journal would be believed."""
    (tmp_path / "journal.commits").write_bytes(raw)
    assert CommitCount(str(tmp_path / "journal.commits")).found is None


def test_what_keeps_it_from_being_written_is_told_once_each_time(tmp_path):
    folder = tmp_path / "state"
    count = CommitCount(str(folder / "journal.commits"))

    def told() -> int:
        with capture_logs() as lines:
            count.write(1)
        return len(lines)

    assert [told(), told()] == [1, 0]
    folder.mkdir()
    assert told() == 0
    (folder / "journal.commits").unlink()
    folder.rmdir()
    assert [told(), told()] == [1, 0], "it is another failure"


def test_no_descriptor_is_left_behind(tmp_path):
    """It is opened at each transaction, for as long as the plugin runs."""
    count = CommitCount(str(tmp_path / "journal.commits"))
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        count.write(number)
        CommitCount(count.path)
    assert len(os.listdir("/proc/self/fd")) == before
