"""What may happen so often only: a message is logged once a minute, Events are few."""

from fpga_plugin.host.rate_limit import RateLimit, TokenBucket


def test_the_first_event_is_told_at_once_and_later_ones_with_their_number():
    now = 0.0
    said = RateLimit(60, clock=lambda: now)
    assert said.happened() == 1
    now = 59.9
    assert [said.happened() for _ in range(3)] == [0, 0, 0]
    now = 60.0
    assert said.happened() == 4
    assert said.happened() == 0


def test_a_bucket_gives_so_many_at_once_and_then_one_in_so_many_seconds():
    now = 0.0

    def taken(most):
        count = 0
        while count < most and bucket.may():
            bucket.take()
            count += 1
        return count

    bucket = TokenBucket(3, 10, clock=lambda: now)
    assert taken(10) == 3
    now = 9.9
    assert taken(10) == 0
    now = 25.0
    assert taken(10) == 2
    now = 1000.0
    assert taken(10) == 3, "no more are kept"
