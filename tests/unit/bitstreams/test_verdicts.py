"""What is remembered of the store's files: nothing refused, nothing doubted."""

import threading
from typing import Any

import pytest
from msgspec.structs import replace

from fpga_plugin.bitstreams.files import Content
from fpga_plugin.bitstreams.verdicts import FileVerdict, Verdicts
from fpga_plugin.errors import NotPermittedError

FILE, OTHER = "a/b.gbs", "a/c.gbs"
CONTENT = Content("d" * 64, 5)
GOOD = FileVerdict((1, 2, 3), "signed", CONTENT, "c" * 64)
BAD = FileVerdict((1, 2, 3), "signed", CONTENT, "e" * 64, problem=NotPermittedError("not signed"))


@pytest.fixture
def verdicts(tmp_path):
    return Verdicts(str(tmp_path / "verified.json"))


@pytest.mark.parametrize("happens", ["doubt_all", "forget"])
def test_what_changed_while_the_store_was_asked_is_not_confirmed(verdicts, happens):
    """A copy that is confirmed is programmed though the store does not answer: it must not be one
    of a file that was replaced meanwhile."""
    before = verdicts.changes
    verdicts.doubt_all() if happens == "doubt_all" else verdicts.forget(FILE)
    verdicts.learn(FILE, GOOD, before)
    assert verdicts.get(FILE) == GOOD
    assert verdicts.confirmed(FILE) is None
    verdicts.learn(FILE, GOOD, verdicts.changes)
    assert verdicts.confirmed(FILE) == GOOD


@pytest.mark.parametrize("how", ["forget", "only"])
def test_a_file_that_went_is_not_confirmed_by_a_late_answer(verdicts, how):
    """Somebody asked the store long ago, and hears of a file that was removed meanwhile."""
    late = verdicts.changes
    verdicts.doubt_all()
    verdicts.learn(FILE, GOOD, verdicts.changes)
    verdicts.forget(FILE) if how == "forget" else verdicts.only([OTHER])
    assert verdicts.get(FILE) is None
    verdicts.learn(FILE, GOOD, late)
    assert verdicts.confirmed(FILE) is None


def test_what_was_refused_is_neither_kept_nor_good_after_a_restart(verdicts, tmp_path):
    verdicts.learn(FILE, GOOD, 0)
    verdicts.learn(OTHER, BAD, 0)
    assert verdicts.cached() == {GOOD.cached}, "the copies of others are removed"
    verdicts.save()
    after = Verdicts(str(tmp_path / "verified.json"))
    assert after.get(FILE) == GOOD
    assert after.get(OTHER) is None
    assert after.confirmed(FILE) is None, "the store is asked first"


def test_a_directory_that_cannot_be_written_costs_the_memory_alone(verdicts, tmp_path):
    verdicts.learn(FILE, GOOD, 0)
    tmp_path.rmdir()
    verdicts.save()
    assert verdicts.get(FILE) == GOOD


def test_threads_change_what_is_known_one_after_the_other(verdicts):
    """A doubt between the two halves of `learn` would be lost: what it doubted counts as known."""
    lock = verdicts._lock = threading.Lock()
    looks = []

    def looked(name: str) -> None:
        looks.append(name)
        assert lock.locked(), f"{name} without the lock"

    class Confirmed(set[str]):
        def __getattribute__(self, name: str) -> Any:
            looked(name)
            return super().__getattribute__(name)

        def __contains__(self, one: object) -> bool:
            looked("in")
            return super().__contains__(one)

        def __iand__(self, others: Any) -> Any:
            looked("&=")
            return Confirmed(set(self) & set(others))

    class Known(dict[str, FileVerdict]):
        def items(self) -> Any:
            looked("items")
            return super().items()

        def values(self) -> Any:
            looked("values")
            return super().values()

        def pop(self, *of: Any) -> Any:
            looked("pop")
            return super().pop(*of)

    steps = [
        lambda: verdicts.learn(FILE, GOOD, verdicts.changes),
        lambda: verdicts.confirmed(FILE),
        lambda: verdicts.doubt(FILE),
        verdicts.doubt_all,
        verdicts.cached,
        verdicts.save,
        lambda: verdicts.forget(FILE),
        lambda: verdicts.only([FILE]),
    ]
    for step in steps:
        verdicts._confirmed, verdicts._known = (
            Confirmed(verdicts._confirmed),
            Known(verdicts._known),
        )
        looks.clear()
        step()
        assert looks


@pytest.mark.parametrize("cached", ["", "../journal.sqlite3", "C" * 64, "c" * 64 + "\n"])
def test_a_record_that_names_no_file_of_the_cache_is_not_taken(verdicts, tmp_path, cached):
    """The name becomes a path, and a copy that is not what its name says is removed."""
    verdicts.learn(FILE, replace(GOOD, cached=cached), 0)
    verdicts.save()
    assert Verdicts(str(tmp_path / "verified.json")).get(FILE) is None
