"""Waiting for what a card's drivers do by themselves."""

import errno
from collections.abc import Iterator

import pytest
from doubles.alveo import Clock

from fpga_plugin.hardware.xrt import waiting
from fpga_plugin.hardware.xrt.waiting import holds, until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    return clock


def unreadable() -> bool:
    raise OSError(errno.ENODEV, "No such device")


@pytest.mark.parametrize("answer", [True, False])
def test_what_can_be_read_is_as_it_is_read(*, answer: bool):
    assert holds(lambda: answer) is answer


def test_what_cannot_be_read_is_not_so():
    assert not holds(unreadable)


def test_a_wait_ends_as_soon_as_it_is_so(clock: Clock):
    answers: Iterator[bool] = iter([False, False, True])
    assert until(lambda: next(answers), 10)
    assert clock.now == 2 * waiting.POLL_SECONDS


def test_what_is_so_already_costs_no_time(clock: Clock):
    assert until(lambda: True, 0)
    assert clock.now == 0


def test_a_wait_ends_with_its_time(clock: Clock):
    assert not until(unreadable, 10)
    assert 10 <= clock.now < 10 + 2 * waiting.POLL_SECONDS


def test_without_time_there_is_one_look(clock: Clock):
    assert not until(lambda: False, 0)
    assert clock.now == 0
