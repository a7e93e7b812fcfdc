"""Finds which container of a pod starts now, if several with the devices ask for different things.

`turn` has the proofs. This module remembers what they need of earlier PreStarts, in memory only:
after a restart of the plugin or of kubelet, kubelet needs one more try.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from fpga_plugin.allocation.requests.directory import PodAnswer, PodDirectory
from fpga_plugin.allocation.requests.environment import ContainerRequests
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.deviceplugin import turn
from fpga_plugin.errors import NoSourceError
from fpga_plugin.host.bounded import BoundedDict
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.cgroup import PodCgroups
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.kubernetes.pod import Pod, Run

KEPT_PODS: Final = 512
"""Pods whose PreStarts are remembered; kubelet runs 110 unless told otherwise."""

PATIENCE: Final = 5.0
"""Seconds for which a lagging status is read again and again; PreStart has 25 for everything."""

POLL: Final = 0.25
"""Seconds between two reads."""


@dataclass(slots=True)
class _Trail:
    """The outcomes of a pod's PreStarts, by the devices that they named.

    Attributes:
        starts: the last that succeeded.
        before: the container's latest run that had ended when its turn was proved.
        refusals: the words of the last that was refused.
        ran: cgroups of the pod's containers, its sandbox's among them, at the last question.
        older: some of this may be of an older sandbox than the last question's.
    """

    starts: dict[frozenset[DeviceId], turn.Start] = field(default_factory=dict)
    before: dict[frozenset[DeviceId], Run | None] = field(default_factory=dict)
    refusals: dict[frozenset[DeviceId], str] = field(default_factory=dict)
    ran: frozenset[str] = frozenset()
    older: bool = False

    def forget(self) -> None:
        """All begins again."""
        self.starts.clear()
        self.before.clear()
        self.refusals.clear()
        self.older = False

    def asked(self, running: frozenset[str]) -> None:
        """Note what runs at a question.

        While one of the cgroups of the question before is still there, so is its sandbox: kubelet
        ends all containers before it makes a new one (pkg/kubelet/kuberuntime, SyncPod).
        """
        if running.isdisjoint(self.ran) and (self.starts or self.refusals):
            self.older = True
        self.ran = running

    def words(self, devices: frozenset[DeviceId]) -> tuple[str, ...]:
        """The last refusals: for these devices, then for others of the pod."""
        own = [text for key, text in self.refusals.items() if key == devices]
        return (*own, *(text for key, text in self.refusals.items() if key != devices))


@dataclass(slots=True)
class _Proof:
    """What may prove whose turn it is.

    Attributes:
        holders: in the order of their starts.
        words: of the last refusals.
        last: the last PreStart that succeeded for these devices.
        trail: knows whether the pod may have another sandbox since.
        untold: no source shows whether the pod still has its sandbox.
    """

    holders: Sequence[ContainerRequests]
    words: Sequence[str]
    last: turn.Start | None
    trail: _Trail
    untold: bool = False

    def by(self, pod: Pod) -> str | None:
        """The container that starts, if the pod's status proves it."""
        if pod.sandbox is None and not self.trail.older:
            pod = replace(pod, sandbox=True)
        self.untold = pod.sandbox is None
        name = turn.refused(pod, self.holders, self.words)
        if name is None and self.last is not None:
            name = turn.follows(pod, self.holders, self.last)
        return name


class NextContainer:
    """Finds out which container of a pod starts now.

    Args:
        pods: reads pods.
        cgroups: show whether a pod keeps its sandbox if its status does not; None: unknown then.
        settle: seconds for which a lagging status has to say the same.
    """

    def __init__(self, pods: PodDirectory, cgroups: PodCgroups | None, settle: float) -> None:
        self._pods = pods
        self._cgroups = cgroups
        self._settle = settle
        self._trails = BoundedDict[PodUid, _Trail](KEPT_PODS)

    def started(self, identity: Identity, devices: Sequence[DeviceId]) -> None:
        """Remember which container started, if that may matter."""
        if identity.pod is None or not identity.container:
            return
        trail = self._trail(identity.pod)
        trail.refusals.pop(frozenset(devices), None)
        trail.starts[frozenset(devices)] = turn.Start(
            identity.container, time.time(), trail.before.pop(frozenset(devices), None)
        )

    def refused(self, identity: Identity, devices: Sequence[DeviceId], words: str) -> None:
        """Remember the words, which kubelet will quote."""
        if identity.pod is not None and len(identity.containers) > 1:
            self._trail(identity.pod).refusals[frozenset(devices)] = words

    def new_kubelet(self) -> None:
        """Containers may have started unseen, and kubelet has forgotten its reasons."""
        self._trails.clear()

    def _trail(self, uid: PodUid) -> _Trail:
        trail = self._trails[uid] = self._trails.get(uid) or _Trail()
        return trail

    async def find(
        self,
        identity: Identity,
        devices: Sequence[DeviceId],
        holders: Sequence[ContainerRequests],
        answer: PodAnswer | None,
        *,
        fresh: bool,
    ) -> ContainerRequests:
        """The container that starts now.

        Args:
            identity: of the devices' owner; its pod and the pod's name are known.
            devices: of the PreStart.
            holders: the containers that have these, in the order of their starts.
            answer: the pod, if it was read just now.
            fresh: see `StockEnvironment.ask`.

        Raises:
            NoSourceError: it is not proved; the message differs from every other refusal's.
        """
        assert identity.pod is not None, "looked at before"
        name = turn.first(holders) if fresh else None
        if name is None:
            trail, key = self._trail(identity.pod), frozenset(devices)
            running = frozenset[str]()
            if self._cgroups is not None:
                running = await asyncio.to_thread(self._cgroups.containers, identity.pod)
            trail.asked(running)
            proof = _Proof(holders, trail.words(key), trail.starts.get(key), trail)
            pod = None
            if proof.words or proof.last is not None:  # else no status can prove anything
                name, pod = await self._prove(proof, identity.pod, identity.held, answer)
            if name is None or pod is None:
                if proof.untold:
                    trail.forget()
                raise _unproved(
                    identity, key, holders, sandbox_seen=bool(trail.ran) or not proof.untold
                )
            trail.before[key] = pod.state(name).ended
        return next(holder for holder in holders if holder.name == name)

    async def _prove(
        self, proof: _Proof, uid: PodUid, held: frozenset[str], answer: PodAnswer | None
    ) -> tuple[str | None, Pod]:
        """Read the status until it proves something, as long as that can help.

        Returns the container, and the status that names it, or the last that names none.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        while True:
            answer = answer or await self._pods.read(uid, held)
            pod = answer.pod
            name = proof.by(pod)
            if answer.exact:
                return name, pod
            if name is not None:
                await asyncio.sleep(self._settle)
                again = await self._pods.read(uid, held)
                if proof.by(again.pod) == name and again.pod.states == pod.states:
                    return name, again.pod
                answer = again
            else:
                await asyncio.sleep(POLL)
                answer = None
            if loop.time() >= end:
                return None, pod


def _unproved(
    identity: Identity,
    devices: frozenset[DeviceId],
    holders: Sequence[ContainerRequests],
    *,
    sandbox_seen: bool,
) -> NoSourceError:
    return NoSourceError(
        f"containers {', '.join(holder.name for holder in holders[:3])} of pod {identity.name} ask"
        f" for different bitstreams on {', '.join(sorted(devices)[:3])}, and it is not known yet"
        f" which of them starts (question {os.urandom(4).hex()})",
        hint="kubelet tries again in about 10 s, and the pod's status names the container then"
        if sandbox_seen
        else "this kubelet (before Kubernetes 1.29) does not say whether the pod has its"
        " sandbox, and its cgroups are not seen (FPGA_PLUGIN_CGROUP_ROOT): let all of its"
        " containers ask for the same",
    )
