"""Counting: what falls into which bucket."""

import pytest

from fpga_plugin.telemetry.tally import Durations, Tally


def test_a_tally_counts_each_combination_of_labels_apart():
    tally = Tally()
    tally.add("a", "x")
    tally.add("a", "y", number=3)
    tally.add("a", "x")
    assert dict(tally.items()) == {("a", "x"): 2, ("a", "y"): 3}


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.1, 0), (0.11, 1), (1.0, 1), (1.1, 2)])
def test_a_time_falls_into_the_bucket_whose_bound_it_does_not_exceed(seconds, bucket):
    durations = Durations((0.1, 1.0))
    durations.add(seconds, "m")
    ((labels, times),) = durations.items()
    assert labels == ("m",)
    assert times.counts == [int(i == bucket) for i in range(3)]
    assert times.total == seconds
