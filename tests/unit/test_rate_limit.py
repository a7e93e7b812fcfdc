"""A message that comes again and again is logged once a minute."""

from fpga_plugin.telemetry.rate_limit import RateLimit


def test_the_first_event_is_told_at_once_and_later_ones_with_their_number():
    now = 0.0
    said = RateLimit(60, clock=lambda: now)
    assert said.happened() == 1
    now = 59.9
    assert [said.happened() for _ in range(3)] == [0, 0, 0]
    now = 60.0
    assert said.happened() == 4
    assert said.happened() == 0
