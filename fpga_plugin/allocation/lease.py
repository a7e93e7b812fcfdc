"""A lease on claims: whether they are still those that somebody began to work for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fpga_plugin.allocation.journal.records import Claim
from fpga_plugin.allocation.names import DELETE_THE_POD
from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import DeviceId


def claim_ended(*devices: DeviceId) -> RefusedError:
    """The refusal of a container whose devices are no longer its pod's."""
    return RefusedError(
        f"the claim of {', '.join(devices)} ended before its container started",
        hint=DELETE_THE_POD,
    )


@dataclass(frozen=True, slots=True)
class Lease:
    """Claims as they were when it was taken. Two leases are equal if they are on the same claims.

    A device that changes hands gets a claim of another generation, whoever has it then; what else
    changes about a claim (its pod is learnt, it is used) leaves the lease as it is.

    Attributes:
        generations: of each claim.
        claims: as they were.
    """

    generations: frozenset[tuple[DeviceId, int]]
    claims: tuple[Claim, ...] = field(compare=False)
    _present: Mapping[DeviceId, Claim] = field(compare=False, repr=False)

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """Whose claims they are, in the order of the question."""
        return tuple(claim.device for claim in self.claims)

    @property
    def holds(self) -> bool:
        """Whether none of the claims ended."""
        return not any(map(self._ended, self.claims))

    def check(self) -> None:
        """Refuse to go on for an owner that is no longer one.

        Raises:
            RefusedError: a claim ended, whoever has its device now.
        """
        for claim in filter(self._ended, self.claims):
            raise claim_ended(claim.device)

    def _ended(self, claim: Claim) -> bool:
        present = self._present.get(claim.device)
        return present is None or present.generation != claim.generation
