"""A device's owner: a pod with the device plugin API, a ResourceClaim and its pods with DRA.

Names are foreign text: the code that shows them makes them safe for a terminal or a page.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from fpga_plugin.allocation.journal.records import ClaimOwner
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import PodName, PodUid
from fpga_plugin.observability.schema import WhoView

Names = Callable[[PodUid | None], PodName | None]
"""What a pod is called, if that is known."""

UNKNOWN: Final = PodName("", "")
"""Shown for a pod whose name is unknown."""


@dataclass(frozen=True, slots=True)
class Use:
    """A ResourceClaim that has a device, and the known pods that use it."""

    claim: ClaimOwner
    pods: frozenset[PodUid] = frozenset()

    @property
    def only_pod(self) -> PodUid | None:
        """The pod that uses it; None: there are several, or none is known."""
        return next(iter(self.pods)) if len(self.pods) == 1 else None


def by_device(ledger: Ledger) -> dict[DeviceId, Use]:
    """The ResourceClaim of each device that one has."""
    return {
        device: Use(one, ledger.pods_of([device]))
        for one in ledger.claim_owners.values()
        if not one.ended
        for device in one.devices
    }


def who(
    device: DeviceId,
    pod: PodUid | None,
    claims: Mapping[DeviceId, Use],
    names: Names,
) -> WhoView:
    """The owner of a device.

    Args:
        device: which.
        pod: its owner with the device plugin API, if it is known.
        claims: `by_device`.
        names: of pods.
    """
    if (use := claims.get(device)) is None:
        name = names(pod) or UNKNOWN
        return {
            "pod_uid": pod or "",
            "namespace": name.namespace,
            "pod": name.name,
            "claim": "",
            "claim_uid": "",
            "requests": [],
            "pods": [],
        }
    only, owner = use.only_pod, use.claim
    name = names(only) or UNKNOWN
    return {
        "pod_uid": only or "",
        "namespace": owner.namespace,
        "pod": name.name,
        "claim": owner.name,
        "claim_uid": owner.uid,
        "requests": list(owner.requests.get(device, ())),
        "pods": [str(names(uid) or uid) for uid in sorted(use.pods)],
    }
