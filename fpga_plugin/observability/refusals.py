"""Why pods did not get what they asked for: the last refusal of each, in bounded memory.

A pod that kubelet tries again and again is one line with a count. Refusals of pods that are not
known are kept by their devices.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fpga_plugin.host.bounded import BoundedDict
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import PodName, PodUid

MAX_REFUSALS = 64
"""Pods whose last refusal is remembered; beyond that the oldest is forgotten."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The last time that a pod was refused.

    Attributes:
        at: Unix time.
        since: of the first refusal of this pod that is remembered.
        times: how often it was refused.
        method: the call that was refused.
        devices: of that call.
        status: gRPC status.
        message: why, and what the node's operator can do; the pod's Events have it without commands
            for root.
        pod: None where kubelet's records did not say.
        name: what the pod is called; None where that was not known.
        claim: by which ResourceClaim it asked, as namespace and name; empty: by none.
        over: a later call for one of its devices succeeded.
    """

    at: float
    since: float
    times: int
    method: str
    devices: tuple[DeviceId, ...]
    status: str
    message: str
    pod: PodUid | None = None
    name: PodName | None = None
    claim: str = ""
    over: bool = False


class Refusals:
    """The last refusal of each pod."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last = BoundedDict[object, Refusal](MAX_REFUSALS)
        self._over: set[object] = set()

    def refused(
        self,
        method: str,
        pod: PodUid | None,
        devices: Sequence[DeviceId],
        *,
        status: str,
        message: str,
        name: PodName | None = None,
        claim: str = "",
    ) -> None:
        """A call was refused."""
        key: object = claim or (tuple(devices) if pod is None else pod)
        now = self._clock()
        before = self._last.get(key)
        self._last[key] = Refusal(
            at=now,
            since=now if before is None else before.since,
            times=1 if before is None else before.times + 1,
            method=method,
            devices=tuple(devices),
            status=status,
            message=message,
            pod=pod,
            name=name,
            claim=claim,
        )
        self._over.discard(key)

    def served(self, devices: Sequence[DeviceId], claim: str = "") -> None:
        """A call for these devices, or for this claim, succeeded: no refusal of it is in force."""
        wanted = set(devices)
        self._over.intersection_update(self._last)
        self._over.update(
            k
            for k, one in self._last.items()
            if wanted.intersection(one.devices) or (claim and one.claim == claim)
        )

    def latest(self) -> list[Refusal]:
        """The last refusal of each pod, newest first."""
        kept = ((k in self._over, one) for k, one in reversed(self._last.items()))
        return [replace(one, over=True) if over else one for over, one in kept]
