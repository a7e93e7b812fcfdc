"""A lease on allocations: whether they are still those that somebody began to work for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fpga_plugin.allocation.journal.records import Allocation
from fpga_plugin.allocation.names import DELETE_THE_POD
from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import DeviceId


def allocation_ended(*devices: DeviceId) -> RefusedError:
    """The refusal of a container whose devices are no longer its pod's."""
    return RefusedError(
        f"the allocation of {', '.join(devices)} ended before its container started",
        hint=DELETE_THE_POD,
    )


@dataclass(frozen=True, slots=True)
class Lease:
    """Allocations as they were when it was taken.

    Two leases are equal if they are on the same allocations.
    A device that changes hands gets an allocation of another generation, whoever has it then; what
    else changes about an allocation (its pod is learnt, it is used) leaves the lease as it is.

    Attributes:
        numbers: of each allocation.
        allocations: as they were.
    """

    numbers: frozenset[tuple[DeviceId, int]]
    allocations: tuple[Allocation, ...] = field(compare=False)
    _present: Mapping[DeviceId, Allocation] = field(compare=False, repr=False)

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """Whose allocations they are, in the order of the question."""
        return tuple(allocation.device for allocation in self.allocations)

    @property
    def holds(self) -> bool:
        """Whether none of the allocations ended."""
        return not any(map(self._ended, self.allocations))

    def check(self) -> None:
        """Refuse to go on for an owner that is no longer one.

        Raises:
            RefusedError: an allocation ended, whoever has its device now.
        """
        for allocation in filter(self._ended, self.allocations):
            raise allocation_ended(allocation.device)

    def _ended(self, allocation: Allocation) -> bool:
        present = self._present.get(allocation.device)
        return present is None or present.number != allocation.number
