"""Counting: what falls into which bucket."""

import pytest

from fpga_plugin.host.instruments import Counter, Histogram


def test_a_counter_counts_each_combination_of_labels_apart():
    counter = Counter()
    counter.add("a", "x")
    counter.add("a", "y", number=3)
    counter.add("a", "x")
    assert dict(counter.items()) == {("a", "x"): 2, ("a", "y"): 3}


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.1, 0), (0.11, 1), (1.0, 1), (1.1, 2)])
def test_a_time_falls_into_the_bucket_whose_bound_it_does_not_exceed(seconds, bucket):
    histogram = Histogram((0.1, 1.0))
    histogram.add(seconds, "m")
    ((labels, times),) = histogram.items()
    assert labels == ("m",)
    assert times.counts == [int(i == bucket) for i in range(3)]
    assert times.total == seconds
