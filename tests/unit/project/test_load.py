"""What `make load` judges by: a gauge that grows is told, and one that swings is not.

The command itself is tests/load.
"""

import os
from dataclasses import replace

import pytest
from repository import module

gauges = module("load", "gauges")
FLAT = [
    gauges.Sample(
        minute=minute,
        rss=90 + minute % 3,
        anonymous=80 + minute % 3 / 10,
        descriptors=25 + minute % 5,
        threads=7 + minute % 2,
        journal=6_000 + minute % 3 * 5_000,
        cpu=minute * 8,
        pods=minute * 60,
        attacks=minute * 300,
    )
    for minute in range(20)
]


def test_what_swings_does_not_grow():
    assert gauges.growth(FLAT) == []


@pytest.mark.parametrize(
    ("gauge", "a_minute"),
    [("anonymous", 0.5), ("descriptors", 3), ("threads", 1), ("journal", 4_000)],
)
def test_what_grows_from_minute_to_minute_is_told(gauge, a_minute):
    growing = [replace(one, **{gauge: getattr(one, gauge) + one.minute * a_minute}) for one in FLAT]
    (told,) = gauges.growth(growing)
    assert told.startswith(f"{gauge} grew from ")


def test_what_grows_until_its_bound_at_the_beginning_is_no_leak():
    filling = [replace(one, anonymous=40 + min(one.minute, 8) * 5) for one in FLAT]
    assert gauges.growth(filling) == []


def test_a_run_that_is_too_short_shows_nothing():
    assert gauges.growth(FLAT[:1]) != []


def test_a_process_is_read_as_the_kernel_tells_it(tmp_path):
    (tmp_path / "journal.sqlite3").write_bytes(bytes(2048))
    (tmp_path / "journal.sqlite3-wal").write_bytes(bytes(1024))
    found = gauges.look(os.getpid(), tmp_path, minute=1.04, pods=2, attacks=3)
    assert (found.minute, found.pods, found.attacks, found.journal) == (1.0, 2, 3, 3.0)
    assert 0 < found.anonymous <= found.rss
    assert found.descriptors > 2
    assert found.threads >= 1
    assert found.cpu > 0
    assert gauges.table([found]).splitlines()[2].startswith("| 1 | 2 | 3 | ")
