"""What a container asks for on a stock kubelet, which sends no environment.

The request variables are made of the pod's spec by kubelet's own rules
(`allocation.requests.environment`). Where the containers that hold the devices ask for different
things, `turn` has the proofs which of them starts. What these need of earlier PreStarts is in
memory only: after a restart of the plugin or of kubelet, kubelet needs one more try.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from fpga_plugin.kubernetes.pod import Pod

KEPT_PODS: Final = 512
"""Pods whose PreStarts are remembered; kubelet runs 110 unless told otherwise."""

PATIENCE: Final = 5.0
"""Seconds for which a lagging status is read again and again; PreStart has 25 for everything."""

POLL: Final = 0.25
"""Seconds between two reads of a status that proves nothing."""

SETTLE: Final = 2.0
"""Seconds for which a lagging status has to say the same. Kubelet sends a change within
milliseconds; what it sends late is why it has to be waited for."""


class StockEnvironment:
    """Makes a container's request variables from its pod's spec.

    Args:
        pods: reads pods.
        cgroups: show whether a pod keeps its sandbox if its status does not; None: unknown then.
        settle: see `SETTLE`.
    """

    def __init__(
        self, pods: PodDirectory, *, cgroups: PodCgroups | None = None, settle: float = SETTLE
    ) -> None:
        self._pods = pods
        self._cgroups = cgroups
        self._settle = settle
        self._trails = BoundedDict[PodUid, turn.Trail](KEPT_PODS)

    async def ask(
        self, identity: Identity, devices: Sequence[DeviceId], *, fresh: bool
    ) -> tuple[Identity, Mapping[str, str]]:
        """Find what the container that starts now asks for.

        Args:
            identity: of the devices' owner.
            devices: of the PreStart.
            fresh: no container has started, or may have, since these devices were allocated.

        Returns:
            The pod, with the container if those with the devices ask for different things, and the
            container's FPGA_* variables: those of requests, and those that mean nothing.

        Raises:
            NoSourceError: it is not known, or not yet.
            InvalidRequestError: a request variable cannot be known outside the container.
        """
        if identity.pod is None:
            raise NoSourceError(
                "kubelet sent no environment, and its checkpoint does not say which pod holds"
                f" {', '.join(devices)}",
                hint="mount kubelet's directory, and set FPGA_PLUGIN_KUBELET_DIR to it; the log has"
                " the details",
            )
        known, answer = await self._pods.requests(identity.pod, identity.held)
        identity = replace(identity, name=known.name)
        holders = [one for one in known.requests or () if one.name in identity.containers]
        if len(holders) != len(identity.containers):
            raise NoSourceError(
                f"the spec of pod {known.name} lacks containers that kubelet's checkpoint has:"
                f" {', '.join(sorted(identity.containers))}"
            )
        asks, container = holders[0], ""
        if not all(asks.same(other) for other in holders):
            first = turn.first(holders) if fresh else None
            container = first or await self._by_status(
                identity, frozenset(devices), holders, answer
            )
            asks = next(holder for holder in holders if holder.name == container)
        asks.check()
        others = {} if container else {k: v for one in holders for k, v in one.env.items()}
        return replace(identity, container=container), {**others, **asks.env}

    def started(self, identity: Identity, devices: Sequence[DeviceId]) -> None:
        """A PreStart is answered with OK; `identity` is what `ask` returned."""
        if identity.pod is None or not identity.container:
            return
        trail, key = self._trail(identity.pod), frozenset(devices)
        trail.refusals.pop(key, None)
        trail.starts[key] = turn.Start(identity.container, time.time(), trail.before.pop(key, None))

    def refused(self, identity: Identity, devices: Sequence[DeviceId], words: str) -> None:
        """A PreStart is refused in these words, which kubelet will quote."""
        if identity.pod is not None and len(identity.containers) > 1:
            self._trail(identity.pod).refusals[frozenset(devices)] = words

    def new_kubelet(self) -> None:
        """Another kubelet instance: it starts containers without PreStart until we register.

        It has forgotten its reasons, too.
        """
        self._pods.new_kubelet()
        self._trails.clear()

    def _trail(self, uid: PodUid) -> turn.Trail:
        trail = self._trails[uid] = self._trails.get(uid) or turn.Trail()
        return trail

    async def _by_status(
        self,
        identity: Identity,
        devices: frozenset[DeviceId],
        holders: Sequence[ContainerRequests],
        answer: PodAnswer | None,
    ) -> str:
        """The container that starts now, by what its pod's status proves.

        Args:
            identity: of the devices' owner; its pod and the pod's name are known.
            devices: of the PreStart.
            holders: the containers that have these, in the order of their starts.
            answer: the pod, if it was read just now.

        Raises:
            NoSourceError: it is not proved; the message differs from every other refusal's.
        """
        assert identity.pod is not None, "looked at before"
        trail, running = self._trail(identity.pod), frozenset[str]()
        if self._cgroups is not None:
            running = await asyncio.to_thread(self._cgroups.containers, identity.pod)
        trail.asked(running)
        words, last = trail.words(devices), trail.starts.get(devices)

        def proved(pod: Pod) -> str | None:
            if pod.sandbox is None and not trail.older:
                pod = replace(pod, sandbox=True)
            return turn.refused(pod, holders, words) or turn.follows(pod, holders, last)

        name, pod = None, None
        if words or last is not None:  # else no status can prove anything
            name, pod = await self._prove(proved, identity.pod, identity.held, answer)
        if name is None or pod is None:
            untold = pod is not None and pod.sandbox is None and trail.older
            if untold:
                trail.forget()
            raise _unproved(identity, devices, holders, sandbox_seen=bool(trail.ran) or not untold)
        trail.before[devices] = pod.state(name).ended
        return name

    async def _prove(
        self,
        proved: Callable[[Pod], str | None],
        uid: PodUid,
        held: frozenset[str],
        answer: PodAnswer | None,
    ) -> tuple[str | None, Pod]:
        """Read the status until it proves something, twice or as long as that can help.

        Returns the container, and the status that names it, or the last that names none.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        before = None
        while True:
            pod = (answer := answer or await self._pods.read(uid, held)).pod
            seen = name, _ = proved(pod), pod.states
            if answer.exact or (name is not None and seen == before):
                return name, pod
            if before is not None and loop.time() >= end:
                return None, pod
            before, answer = seen, None
            await asyncio.sleep(POLL if name is None else self._settle)


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
