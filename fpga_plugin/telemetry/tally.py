"""What is counted while the plugin works: numbers by label, and times by bucket.

Plain dictionaries: counting begins with kubelet's first call, and the library that writes metrics
is imported when they are first asked for, so that a start does not wait for it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Labels = tuple[str, ...]
"""Values of a metric's labels, in the metric's own order. Closed sets only: nothing of a pod's."""


class Tally:
    """A number that only grows, for each combination of labels."""

    def __init__(self) -> None:
        self._numbers: Counter[Labels] = Counter()

    def add(self, *labels: str, number: int = 1) -> None:
        """Count `number` more."""
        self._numbers[labels] += number

    def items(self) -> Iterator[tuple[Labels, int]]:
        """Each combination that was counted, in the order of its labels."""
        return iter(sorted(self._numbers.items()))


@dataclass(slots=True)
class Times:
    """Times of one combination of labels.

    Attributes:
        counts: how many fell into each bucket, the last of which has no upper bound.
        total: sum of the times in seconds.
    """

    counts: list[int]
    total: float = 0.0


@dataclass(slots=True)
class Durations:
    """How long something took, for each combination of labels.

    Attributes:
        bounds: the buckets' upper bounds in seconds, ascending.
    """

    bounds: Sequence[float]
    _times: dict[Labels, Times] = field(default_factory=dict)

    def add(self, seconds: float, *labels: str) -> None:
        """Something took so long."""
        times = self._times.get(labels)
        if times is None:
            times = self._times[labels] = Times([0] * (len(self.bounds) + 1))
        times.counts[bisect_left(self.bounds, seconds)] += 1
        times.total += seconds

    def items(self) -> Iterator[tuple[Labels, Times]]:
        """Each combination that was measured, in the order of its labels."""
        return iter(sorted(self._times.items()))
