"""Pods that may be using a region: every tenancy, by region, device node and number."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from fpga_plugin.allocation.journal.records import Allocation, Tenancy, TenancyKey
from fpga_plugin.ids import RegionId

_K = TypeVar("_K")


class Tenancies(Mapping[TenancyKey, Tenancy]):
    """All tenancies in force. A question's cost depends on its answer, not on their number."""

    def __init__(self) -> None:
        self._all: dict[TenancyKey, Tenancy] = {}
        self._of_region: dict[RegionId, dict[TenancyKey, Tenancy]] = {}
        self._of_way: dict[str, dict[TenancyKey, Tenancy]] = {}

    def __getitem__(self, key: TenancyKey) -> Tenancy:
        return self._all[key]

    def __iter__(self) -> Iterator[TenancyKey]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def set(self, key: TenancyKey, tenancy: Tenancy | None) -> set[str]:
        """Add, change or (None) remove a tenancy; returns its ways (`Tenancy.ways`)."""
        before = self._all.pop(key, None)
        ways: set[str] = set()
        for one, now in ((before, None), (tenancy, tenancy)):
            for way in () if one is None else one.ways:
                _put(self._of_way, way, key, now)
                ways.add(way)
        _put(self._of_region, key.region, key, tenancy)
        if tenancy is not None:
            self._all[key] = tenancy
        return ways

    def of(self, region: RegionId) -> list[Tenancy]:
        """Tenancies of a region whose processes may still run."""
        return list(self._of_region.get(region, {}).values())

    def left(self, region: RegionId) -> list[Tenancy]:
        """Tenancies of a region that ended for kubelet; their processes may run on."""
        return [one for one in self.of(region) if one.left]

    def users(self, allocation: Allocation) -> list[Tenancy]:
        """Tenancies of an allocation."""
        return [
            one
            for region in allocation.grants
            for one in self.of(region)
            if one.key.allocation == allocation.number
        ]

    def by(self, way: str) -> list[Tenancy]:
        """Tenancies that have this node or device number."""
        return list(self._of_way.get(way, {}).values())


def _put(
    index: dict[_K, dict[TenancyKey, Tenancy]], at: _K, key: TenancyKey, tenancy: Tenancy | None
) -> None:
    """Set or remove one entry of an index."""
    entries = index.setdefault(at, {})
    entries.pop(key, None)
    if tenancy is not None:
        entries[key] = tenancy
    if not entries:
        del index[at]
