"""Counters and histograms: what is counted while the plugin works, by label.

Plain dictionaries: counting begins with kubelet's first call, and the library that writes metrics
is imported when they are first asked for, so that a start does not wait for it.
"""

import collections
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Labels = tuple[str, ...]
"""Values of a metric's labels, in the metric's own order. Closed sets only: nothing of a pod's."""


class Counter:
    """A number that only grows, for each combination of labels."""

    def __init__(self) -> None:
        self._numbers: collections.Counter[Labels] = collections.Counter()

    def add(self, *labels: str, number: int = 1) -> None:
        """Count `number` more."""
        self._numbers[labels] += number

    def items(self) -> Iterator[tuple[Labels, int]]:
        """Each combination that was counted, in the order of its labels."""
        return iter(sorted(self._numbers.items()))


@dataclass(slots=True)
class Buckets:
    """How often something took how long, for one combination of labels.

    Attributes:
        counts: how many fell into each bucket; the last one has no upper bound.
        total: sum of the times in seconds.
    """

    counts: list[int]
    total: float = 0.0


@dataclass(slots=True)
class Histogram:
    """How long something took, for each combination of labels.

    Attributes:
        bounds: the buckets' upper bounds in seconds, ascending.
    """

    bounds: Sequence[float]
    _buckets: dict[Labels, Buckets] = field(default_factory=dict)

    def add(self, seconds: float, *labels: str) -> None:
        """Something took so long."""
        buckets = self._buckets.get(labels)
        if buckets is None:
            buckets = self._buckets[labels] = Buckets([0] * (len(self.bounds) + 1))
        buckets.counts[bisect_left(self.bounds, seconds)] += 1
        buckets.total += seconds

    def items(self) -> Iterator[tuple[Labels, Buckets]]:
        """Each combination that was measured, in the order of its labels."""
        return iter(sorted(self._buckets.items()))
