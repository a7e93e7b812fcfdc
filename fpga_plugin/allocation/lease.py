"""A lease on allocations: tells later whether they are still those that work began for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fpga_plugin.allocation.journal.records import Allocation
from fpga_plugin.allocation.names import DELETE_THE_POD
from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import DeviceId


def allocation_ended(*devices: DeviceId) -> RefusedError:
    """The error for a container whose pod no longer has its devices."""
    return RefusedError(
        f"the allocation of {', '.join(devices)} ended before its container started",
        hint=DELETE_THE_POD,
    )


@dataclass(frozen=True, slots=True)
class Lease:
    """Allocations as they were when the lease was made.

    Two leases are equal if they are on the same allocations. A device that changes hands gets an
    allocation with another number. Other changes of an allocation (its pod becomes known, it is
    used) do not affect the lease.

    Attributes:
        numbers: of each allocation.
    """

    numbers: frozenset[tuple[DeviceId, int]]
    allocations: tuple[Allocation, ...] = field(compare=False)
    _present: Mapping[DeviceId, Allocation] = field(compare=False, repr=False)

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """The devices of the allocations, in the order given to `State.lease`."""
        return tuple(allocation.device for allocation in self.allocations)

    @property
    def holds(self) -> bool:
        """Whether all the allocations are still in force."""
        return not any(map(self._ended, self.allocations))

    def check(self) -> None:
        """Refuse to go on once an allocation ended.

        Raises:
            RefusedError: an allocation ended, even if its pod has the device again.
        """
        for allocation in filter(self._ended, self.allocations):
            raise allocation_ended(allocation.device)

    def _ended(self, allocation: Allocation) -> bool:
        present = self._present.get(allocation.device)
        return present is None or present.number != allocation.number
