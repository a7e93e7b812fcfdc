"""Pods that may be using a region: every tenancy, by region, device node and number."""

from collections import defaultdict

from fpga_plugin.allocation.journal.records import Allocation, Tenancy, TenancyKey
from fpga_plugin.ids import RegionId


class Tenancies(dict[TenancyKey, Tenancy]):
    """All tenancies in force. A question's cost depends on its answer, not on their number.

    `change` alone changes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_region: defaultdict[RegionId, dict[TenancyKey, Tenancy]] = defaultdict(dict)
        self._of_way: defaultdict[str, dict[TenancyKey, Tenancy]] = defaultdict(dict)

    def change(self, key: TenancyKey, tenancy: Tenancy | None) -> set[str]:
        """Add, change or (None) remove a tenancy; returns its ways (`Tenancy.ways`)."""
        before = self.pop(key, None)
        ways = set(() if before is None else before.ways)
        self._of_region[key.region].pop(key, None)
        for way in ways:
            del self._of_way[way][key]
        if tenancy is None:
            return ways
        self[key] = self._of_region[key.region][key] = tenancy
        for way in tenancy.ways:
            self._of_way[way][key] = tenancy
        return ways.union(tenancy.ways)

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
