"""What becomes of an image's user clock: set, checked, or said to be neither."""

import asyncio
from dataclasses import dataclass, field
from unittest.mock import Mock

import pytest
from doubles.cards import AFU, INTERFACE, make_card

from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards.clocks import ClockState, built_for, check_asked, plan_clock
from fpga_plugin.cards.operations import CardOperations, Work
from fpga_plugin.cards.reports import Report
from fpga_plugin.cards.workers import CardWorkers
from fpga_plugin.errors import RefusedError
from fpga_plugin.hardware.backend import ClockLimits, DriverSettings, UserClock
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.ids import BitstreamId

CARD = make_card(1)
REGION = CARD.regions[0]
UNREAD = UserClock(None, None, "no counter")


@dataclass
class Clocked:
    """A backend's part that is about clocks."""

    limits: ClockLimits | None = None
    now: UserClock = field(default_factory=lambda: UNREAD)

    def clock_limits(self, card, region):
        return self.limits

    def user_clock(self, region):
        return self.now


def image(high=None, low=None):
    return Bitstream("x.gbs", INTERFACE, BitstreamId(AFU), AFU, RawImage(b"x"), high, low)


def plan(backend, image, **asked):
    return plan_clock(backend, CARD, REGION, image, DriverSettings(**asked))


@pytest.mark.parametrize(
    ("high", "low", "built"),
    [
        (312.5, 156.25, 312.5),
        (None, 100, 200),
        (400, 100, 200),
        ("auto", 100, 200),
        ("auto-300", None, None),
        (1, None, 1),
        (0, 0, None),
        (None, None, None),
    ],
)
def test_what_an_image_was_built_for_is_what_it_states_in_numbers(high, low, built):
    assert built_for(image(high, low)) == built


@pytest.mark.parametrize(("built", "clock"), [(312.5, 312), (300, 300), (2000, 600)])
def test_where_the_clock_can_be_set_it_is_set_to_no_more_than_the_image_was_built_for(built, clock):
    made = plan(Clocked(ClockLimits(10, 600)), image(built), debug=True)
    assert made.state is ClockState.SET
    assert made.settings == DriverSettings(clock=clock, debug=True)
    assert f"{clock} MHz" in made.detail
    assert f"{built:g} MHz" in made.detail


def test_an_image_that_was_built_for_the_slowest_clock_gets_it():
    assert plan(Clocked(ClockLimits(10, 600)), image(10)).settings.clock == 10


def test_a_half_rate_clock_of_which_an_image_says_nothing_is_none_of_its_business():
    made = plan(Clocked(now=UserClock(200.0, 100.0, "a counter")), image(200))
    assert made.state is ClockState.CHECKED


def test_a_function_whose_clock_is_asked_for_gets_it():
    backend = Clocked(ClockLimits(10, 600))
    assert plan(backend, AFU, clock=100).settings == DriverSettings(clock=100)
    assert plan(backend, AFU).state is ClockState.NOT_STATED
    assert plan(backend, AFU).settings == DriverSettings()
    assert plan(backend, AFU).detail.startswith("a preprogrammed function does not say")


def test_an_image_that_is_slower_than_the_slowest_clock_is_refused():
    with pytest.raises(RefusedError, match="no lower than 10 MHz"):
        plan(Clocked(ClockLimits(10, 600)), image(9.5))


@pytest.mark.parametrize(
    ("now", "refused"),
    [
        (UserClock(300, 150, "measured"), False),
        (UserClock(301.4, 150.7, "measured"), False),  # what the counter's time base may be off
        (UserClock(302, 150, "measured"), True),
        (UserClock(300, 152, "measured"), True),
        (UserClock(300, None, "measured"), False),
        (UserClock(250, 125, "measured"), False),
    ],
)
def test_where_it_can_only_be_measured_an_image_that_is_too_slow_for_it_is_refused(now, refused):
    backend = Clocked(now=now)
    if refused:
        with pytest.raises(RefusedError, match="built for 300 MHz"):
            plan(backend, image(300, 150))
        return
    made = plan(backend, image(300, 150), debug=True)
    assert made.state is ClockState.CHECKED
    assert made.settings == DriverSettings(debug=True)


def test_where_it_cannot_be_read_that_is_said():
    made = plan(Clocked(), image(300))
    assert made.state is ClockState.NOT_CHECKED
    assert "no counter" in made.detail
    assert made.settings == DriverSettings()


@pytest.mark.parametrize("backend", [Clocked(), Clocked(ClockLimits(10, 600))])
def test_an_image_that_states_nothing_keeps_the_default(backend):
    made = plan(backend, image("auto"))
    assert made.state is ClockState.NOT_STATED
    assert made.detail.startswith("the bitstream does not say")
    assert made.settings == DriverSettings()


def test_a_clock_that_is_asked_for_is_set_if_the_image_was_built_for_it():
    backend = Clocked(ClockLimits(10, 600))
    assert plan(backend, image(300), clock=300).settings == DriverSettings(clock=300)
    assert plan(backend, image(), clock=600).state is ClockState.SET
    with pytest.raises(RefusedError, match="at 301 MHz"):
        plan(backend, image(300), clock=301)
    with pytest.raises(RefusedError, match=r"built for 312\.5 MHz"):
        check_asked(REGION.id, 313, image(312.5))


def test_what_is_asked_above_the_image_is_in_the_report():
    ledger, report = Mock(), Report(REGION.id)
    operations = CardOperations(ledger, Mock(), Mock(), CardWorkers(), Mock(), Mock())
    work = Work(operations, CARD, {REGION.id: Mock()}, {REGION.id: report}, lambda: None)
    with pytest.raises(RefusedError, match="built for 200 MHz"):
        asyncio.run(work.program(REGION, image(200, 100), DriverSettings(clock=300)))
    assert "built for 200 MHz" in report.error
    ledger.work.working.assert_not_called()
