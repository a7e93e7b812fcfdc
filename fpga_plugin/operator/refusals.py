"""Why pods did not get what they asked for: the last refusal of each, in bounded memory.

A pod that kubelet tries again and again is one line with a count. What can be said of a pod is
said by its uid, and by its name where somebody told it; refusals of pods that are not known are
kept by their devices.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fpga_plugin.ids import DeviceId, PodUid

MAX_REFUSALS = 64
"""Pods whose last refusal is remembered; beyond that the oldest is forgotten."""

MAX_NAMES = 1024
"""Pods whose name is remembered."""


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
        message: what kubelet was told, so what the pod's Events say.
        pod: None where kubelet's records did not tell.
    """

    at: float
    since: float
    times: int
    method: str
    devices: tuple[DeviceId, ...]
    status: str
    message: str
    pod: PodUid | None = None


@dataclass(frozen=True, slots=True)
class PodName:
    """What a pod is called; both may be empty."""

    namespace: str = ""
    name: str = ""


class Refusals:
    """Belongs to the event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last: OrderedDict[object, Refusal] = OrderedDict()
        self._names: OrderedDict[PodUid, PodName] = OrderedDict()

    def refused(
        self,
        method: str,
        pod: PodUid | None,
        devices: Sequence[DeviceId],
        *,
        status: str,
        message: str,
    ) -> None:
        """A call was refused."""
        key: object = tuple(devices) if pod is None else pod
        now = self._clock()
        before = self._last.pop(key, None)
        self._last[key] = Refusal(
            at=now,
            since=now if before is None else before.since,
            times=1 if before is None else before.times + 1,
            method=method,
            devices=tuple(devices),
            status=status,
            message=message,
            pod=pod,
        )
        while len(self._last) > MAX_REFUSALS:
            self._last.popitem(last=False)

    def named(self, pod: PodUid, namespace: str, name: str) -> None:
        """Somebody told what a pod is called."""
        self._names.pop(pod, None)
        self._names[pod] = PodName(namespace, name)
        while len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)

    def name(self, pod: PodUid | None) -> PodName:
        """What a pod is called, as far as it is known."""
        return PodName() if pod is None else self._names.get(pod, PodName())

    def latest(self) -> list[Refusal]:
        """The last refusal of each pod, newest first."""
        return list(reversed(self._last.values()))
