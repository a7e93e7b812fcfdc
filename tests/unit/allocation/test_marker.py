"""The marker beside the lock: what is no marker says nothing.

What a journal that lacks transactions, or another life wrote, leads to is in test_journal.py.
"""

import os
import stat

import pytest
from structlog.testing import capture_logs

from fpga_plugin.allocation.journal.marker import Marker, Served

NOW = Served("dra", "/var/lib/fpga-plugin")


def marked(path: str, count: int = 0) -> Marker:
    marker = Marker(path, NOW)
    marker.begin("0123", count, claims=False)
    return marker


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "marker")


def test_the_next_life_finds_what_served_last_and_how_far_it_came(path: str) -> None:
    assert Marker(path).last is None
    marker = marked(path, 7)
    for number in (8, 12345, 9):
        marker.count(number)
        found = Marker(path, Served("device-plugin"))
        assert (found.last, found.counted) == (Served(*NOW_NAMES, journal="0123"), number)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


NOW_NAMES = (NOW.api, NOW.state_dir)


def test_until_a_life_begins_it_says_what_the_last_one_was(path: str) -> None:
    """A plugin that dies before it took in the last life's journal leaves it to the next."""
    marked(path, 7)
    Marker(path, Served("device-plugin"))
    assert Marker(path).last == Served(*NOW_NAMES, journal="0123")


SOUND = b"0" * 19 + b"7\n" + b'{"api":"dra","journal":"0123"}\n'


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        SOUND[1:],
        b"0" + SOUND,
        b"x" + SOUND[1:],
        b"-" + SOUND[1:],
        b" " + SOUND[1:],
        SOUND[:21],
        SOUND[:-2],
        SOUND.replace(b'"dra"', b"7"),
        SOUND.replace(b"dra", b"\xff"),
        b"[" * 70000,
    ],
)
def test_what_is_no_marker_says_nothing(path: str, raw: bytes) -> None:
    """A count that is too low hides a loss: then a damaged journal would be believed."""
    with open(path, "wb") as file:
        file.write(SOUND)
    assert Marker(path).counted == 7
    with open(path, "wb") as file:
        file.write(raw)
    found = Marker(path)
    assert (found.last, found.counted) == (None, 0)


def test_what_keeps_it_from_being_written_is_said_once_each_time(tmp_path) -> None:
    folder = tmp_path / "kubelet"
    folder.mkdir()
    marker = marked(str(folder / "marker"))

    def said() -> int:
        with capture_logs() as lines:
            marker.count(1)
        return len(lines)

    def away() -> None:
        (folder / "marker").unlink()
        folder.rmdir()

    away()
    assert [said(), said()] == [1, 0]
    folder.mkdir()
    assert said() == 0
    assert Marker(marker.path).last == Served(*NOW_NAMES, journal="0123"), "all of it is put back"
    away()
    assert [said(), said()] == [1, 0], "it is another failure"


def test_what_cannot_be_read_says_nothing_and_a_link_is_not_followed(tmp_path) -> None:
    (tmp_path / "other").write_bytes(SOUND)
    (tmp_path / "marker").symlink_to(tmp_path / "other")
    assert Marker(str(tmp_path / "marker")).last is None
    marked(str(tmp_path / "marker"))
    assert (tmp_path / "other").read_bytes() == SOUND
    (tmp_path / "folder").mkdir()
    marker = Marker(str(tmp_path / "folder"))
    with capture_logs() as lines:
        marker.begin("0123", 1, claims=False)
    assert [line["file"] for line in lines] == [str(tmp_path / "folder")]


def test_no_descriptor_is_left_behind(path: str) -> None:
    """It is opened at each transaction, for as long as the plugin runs."""
    marker = marked(path)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        marker.count(number)
        marker.begin("4567", number, claims=False)
        Marker(path)
    assert len(os.listdir("/proc/self/fd")) == before
