"""Whose a device is: a pod's by the first door, a ResourceClaim's and its pods' by the second.

Names are foreign text; whoever shows them makes them safe for a terminal or a page.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from fpga_plugin.ids import DeviceId, PodUid
from fpga_plugin.ledger.records import Holder
from fpga_plugin.operator.schema import WhoView
from fpga_plugin.pods.names import PodName

Names = Callable[[PodUid | None], PodName | None]
"""What a pod is called, if that is known."""

UNKNOWN: Final = PodName("", "")
"""What a pod is called whose name nobody told."""


def by_device(holders: Iterable[Holder]) -> dict[DeviceId, Holder]:
    """The ResourceClaim of each device that one has."""
    return {device: one for one in holders if not one.ended for device in one.devices}


def who(
    device: DeviceId,
    pod: PodUid | None,
    holders: Mapping[DeviceId, Holder],
    names: Names,
) -> WhoView:
    """The owner of a device.

    Args:
        device: which.
        pod: its owner by the first door, if it is known.
        holders: `by_device`.
        names: of pods.
    """
    if (holder := holders.get(device)) is None:
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
    only = only_pod(holder)
    name = names(only) or UNKNOWN
    return {
        "pod_uid": only or "",
        "namespace": holder.namespace,
        "pod": name.name,
        "claim": holder.name,
        "claim_uid": holder.uid,
        "requests": list(holder.requests.get(device, ())),
        "pods": [str(names(uid) or uid) for uid in sorted(holder.pods)],
    }


def only_pod(holder: Holder) -> PodUid | None:
    """The pod that uses a claim; None: there are several, or none is known."""
    return next(iter(holder.pods)) if len(holder.pods) == 1 else None
