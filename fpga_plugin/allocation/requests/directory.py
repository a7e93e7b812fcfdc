"""Finds the pod that has given devices, and reads it. All questions about pods go through here.

It has four sources:

- kubelet's checkpoint: by devices, the pod's uid and its containers, init containers too;
- PodResources: by devices, the pod's name; never that of a pod in which only plain init containers
  have devices. It must not be asked inside Allocate, whose devices it would free;
- kubelet's Pods API: by uid, the pod;
- the API server: by name, the pod, whose uid has to be the one that was asked about.

It keeps, in bounded memory, the pods' names by uid, and what their containers ask for if that lasts
as long as the pod: so a container restarts although the control plane is away. It keeps neither a
status nor the rest of an environment. It polls nothing.

The sources of whole pods cost memory and time to import, so each is imported at the first question
to it, in a thread.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog

from fpga_plugin.allocation.requests.environment import ContainerRequests, container_requests
from fpga_plugin.allocation.requests.identity import Gone, Identity, identify
from fpga_plugin.errors import FpgaPluginError, NoSourceError
from fpga_plugin.host.bounded import BoundedDict
from fpga_plugin.ids import DeviceId, ours
from fpga_plugin.kubernetes.kubelet.checkpoint import (
    FILE_NAME,
    Checkpoint,
    Stamp,
    read_checkpoint,
    read_stamp,
)
from fpga_plugin.kubernetes.kubelet.podresources import PodResourcesClient
from fpga_plugin.kubernetes.names import PodName, PodUid, ResourceName
from fpga_plugin.kubernetes.pod import NoSuchPodError, Pod, PodSourceError

if TYPE_CHECKING:
    from fpga_plugin.kubernetes.apiserver.pods import ApiServer
    from fpga_plugin.kubernetes.kubelet.podsapi import PodsApi

log = structlog.get_logger()

KEPT_PODS: Final = 1024
"""Pods of which something is remembered; kubelet runs 110 unless told otherwise."""

_HINT: Final = (
    "mount the socket of kubelet's Pods API (FPGA_PLUGIN_PODS_SOCKET), or let the plugin's service"
    " account get pods (or set FPGA_PLUGIN_KUBECONFIG)"
)


@dataclass(frozen=True, slots=True)
class KnownPod:
    """What is known of a pod for as long as it lives.

    Attributes:
        name: what it is called.
        requests: what each of its containers asks for; None where nobody read its spec, or where
            that may change.
    """

    name: PodName
    requests: tuple[ContainerRequests, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAnswer:
    """A pod as a source told it just now.

    Attributes:
        pod: spec and status.
        source: `pods-api` or `api-server`.
        exact: its status is that of the synchronisation in which kubelet calls PreStart; else it
            may lag.
    """

    pod: Pod
    source: str
    exact: bool


class PodDirectory:
    """Answers every question about pods.

    Args:
        kubelet_dir: where kubelet's checkpoint lies.
        prefix: of our resources.
        podresources: asks kubelet's PodResources; None: it is not asked.
        pods_socket: of kubelet's Pods API; None: it is not asked.
        kubeconfig: credentials for the API server; None: the plugin's service account.

    Attributes:
        podresources: see above.
        answers: how often `pods-api`, `api-server` and what was `kept` told what a container asks
            for, or its status, and how often `none` did.
    """

    def __init__(
        self,
        *,
        kubelet_dir: str,
        prefix: str,
        podresources: PodResourcesClient | None = None,
        pods_socket: str | None = None,
        kubeconfig: str | None = None,
    ) -> None:
        self.podresources = podresources
        self.answers: Counter[str] = Counter()
        self._checkpoint = os.path.join(kubelet_dir, FILE_NAME)
        self._ours = ours(prefix)
        self._pods_socket = pods_socket
        self._pods_api: PodsApi | None = None
        self._kubeconfig = kubeconfig
        self._api_server: ApiServer | None = None
        self._known = BoundedDict[PodUid, KnownPod](KEPT_PODS)
        self.new_kubelet()

    def new_kubelet(self) -> None:
        """Another kubelet instance, which has told no pod yet."""
        self._told = BoundedDict[PodUid, None](KEPT_PODS)

    # ---------------------------------------------------------------- kubelet's checkpoint

    async def checkpoint(self) -> Checkpoint:
        """Kubelet's records of our resources; a missing file has no entries.

        Raises:
            NoSourceError: the file is there and cannot be read.
        """
        return await asyncio.to_thread(read_checkpoint, self._checkpoint, self._ours)

    def stamp(self) -> Stamp | None:
        """The checkpoint's stamp, for one system call; None: there is no file.

        Raises:
            NoSourceError: not even that can be said.
        """
        return read_stamp(self._checkpoint)

    async def identify(
        self, resource: ResourceName, devices: Sequence[DeviceId], gone: Gone
    ) -> Identity:
        """The pod and containers that a PreStart is for, by the checkpoint.

        Raises:
            NoSourceError: as of `identify`.
        """
        try:
            checkpoint = await self.checkpoint()
        except FpgaPluginError as error:
            log.warning("kubelet's checkpoint cannot be read", error=str(error))
            return Identity()
        return await asyncio.to_thread(identify, checkpoint, resource, devices, gone)

    # ---------------------------------------------------------------- names

    def known(self, uid: PodUid | None) -> PodName | None:
        """What a pod is called, if it is known already."""
        known = None if uid is None else self._known.get(uid)
        return None if known is None else known.name

    def learn(self, uid: PodUid, name: PodName) -> None:
        """What a pod is called. Say so only of the pod that had the devices all the while.

        PodResources knows no uids: a name that it reports is that of the pod which has the devices
        by then.
        """
        self._known[uid] = replace(self._known.get(uid, KnownPod(name)), name=name)

    async def name(
        self, identity: Identity, devices: Sequence[DeviceId], same: Callable[[], None]
    ) -> PodName:
        """The name of the pod that asks; it is asked for once a pod.

        Args:
            identity: who asks.
            devices: of the call.
            same: raises when the devices' allocations are no longer those of the call.

        Raises:
            NoSourceError: nothing reports it.
        """
        if identity.pod is not None and (known := self._known.get(identity.pod)) is not None:
            self._known.move_to_end(identity.pod)
            return known.name
        name = await self._ask_name(identity, devices)
        same()  # else it may be the name of another pod that has the devices by now
        if identity.pod is not None:
            self.learn(identity.pod, name)
        return name

    async def _ask_name(self, identity: Identity, devices: Sequence[DeviceId]) -> PodName:
        problems = []
        if identity.pod is not None:
            try:
                return (await self._from_kubelet(identity.pod)).full_name
            except NoSourceError as error:
                problems.append(error.message)
        try:
            return await self.holder(identity.held.union(devices))
        except NoSourceError as error:
            raise NoSourceError("; ".join([*problems, error.message])) from error

    async def holders(self) -> Mapping[str, frozenset[PodName]]:
        """The names of the pods that have each device now, by PodResources.

        Raises:
            NoSourceError: it does not say.
        """
        if self.podresources is None:
            raise NoSourceError("kubelet's PodResources API is switched off")
        found: dict[str, frozenset[PodName]] = {}
        for one in (await self.podresources.snapshot()).devices:
            for device in one.devices:
                names = found.get(device, frozenset())
                found[device] = names | {PodName(one.namespace, one.pod)}
        return found

    async def holder(self, devices: Iterable[str]) -> PodName:
        """The name of the pod that has one of these devices now, by PodResources.

        Raises:
            NoSourceError: it does not say one pod.
        """
        held = await self.holders()
        found = frozenset[PodName]().union(*(held.get(device, ()) for device in devices))
        if len(found) != 1:
            raise NoSourceError(
                f"kubelet's PodResources API shows {'several pods' if found else 'no pod'} with the"
                " devices"
            )
        (name,) = found
        return name

    # ---------------------------------------------------------------- pods

    async def pod(self, uid: PodUid, held: frozenset[str]) -> Pod:
        """A pod as it is now.

        Args:
            uid: of the pod.
            held: all our devices that it holds; kubelet finds its name by them.

        Raises:
            NoSourceError: nothing reports it.
        """
        return (await self.read(uid, held)).pod

    async def read(self, uid: PodUid, held: frozenset[str]) -> PodAnswer:
        """A pod as it is now, from the best source that answers (`pod`).

        Raises:
            NoSourceError: none does.
        """
        problems = []
        try:
            pod = await self._from_kubelet(uid)
            return self._answer(PodAnswer(pod=pod, source="pods-api", exact=True))
        except NoSourceError as error:
            problems.append(error.message)
        try:
            name = self.known(uid) or await self.holder(held)
        except NoSourceError as error:
            problems.append(f"{error.message}, so that the API server cannot be asked by name")
        else:
            try:
                pod = await self._from_api_server(uid, name)
                return self._answer(PodAnswer(pod=pod, source="api-server", exact=False))
            except NoSourceError as error:
                problems.append(error.message)
                if uid in self._known and self._known[uid].requests is None:
                    del self._known[uid]  # the name may be another pod's: ask for it again
        self.answers["none"] += 1
        raise NoSourceError(
            f"kubelet sent no environment, and no source reports the spec of pod {uid}:"
            f" {'; '.join(problems)}",
            hint=_HINT,
        )

    async def requests(
        self, uid: PodUid, held: frozenset[str]
    ) -> tuple[KnownPod, PodAnswer | None]:
        """What a pod's containers ask for, and the answer of which it was made, if just now.

        Raises:
            NoSourceError: nothing reports it.
        """
        known = self._known.get(uid)
        if known is not None and known.requests is not None:
            self._known.move_to_end(uid)
            self.answers["kept"] += 1
            return known, None
        answer = await self.read(uid, held)
        requests, lasting = container_requests(answer.pod)
        known = KnownPod(answer.pod.full_name, requests)
        if lasting:
            self._known[uid] = known
        log.info(
            "pod read",
            source=answer.source,
            pod=uid,
            namespace=known.name.namespace,
            name=known.name.name,
            kept=lasting,
        )
        return known, answer

    async def ended(self, uid: PodUid) -> bool:
        """Whether a pod is gone or has ended; its processes may still be there.

        A kubelet that waits for its API server knows no pods yet, and some say so of each (1.36:
        pkg/kubelet/apis/pods, GetPod). So its word that there is none counts only of a pod that the
        same life of it has told.

        The API server needs names, so it is asked only about pods whose spec was read, and lasts.
        Static ones are not among them: somebody may delete its copy of such a pod, which ends
        nothing.

        Raises:
            NoSourceError: it is unknown.
        """
        problems = []
        try:
            return (await self._from_kubelet(uid)).ended
        except NoSuchPodError as error:
            if uid in self._told:
                return True
            problems.append(f"{error.message}, and has not since it started")
        except PodSourceError as error:
            problems.append(error.message)
        known = self._known.get(uid)
        if known is None or known.requests is None:
            problems.append("its name is not known, so that the API server cannot be asked")
        else:
            try:
                return (await self._from_api_server(uid, known.name)).ended
            except NoSuchPodError:
                return True
            except PodSourceError as error:
                problems.append(error.message)
        raise NoSourceError(
            f"no source reports whether pod {uid} is still there: {'; '.join(problems)}",
            hint=_HINT,
        )

    def _answer(self, answer: PodAnswer) -> PodAnswer:
        self.answers[answer.source] += 1
        self.learn(answer.pod.uid, answer.pod.full_name)
        return answer

    async def _from_kubelet(self, uid: PodUid) -> Pod:
        """The pod, by kubelet's Pods API.

        Raises:
            NoSuchPodError: kubelet has no such pod, or (1.36) does not have its pods yet.
            PodSourceError: it does not say it, or is not asked.
        """
        if self._pods_socket is None:
            raise PodSourceError("kubelet's Pods API is switched off")
        told = self._told  # by the instance that is asked
        if self._pods_api is None:
            self._pods_api = await asyncio.to_thread(_pods_api, self._pods_socket)
        pod = await self._pods_api.get(uid)
        told[uid] = None
        return pod

    async def _from_api_server(self, uid: PodUid, name: PodName) -> Pod:
        """The pod, by the API server.

        Raises:
            NoSuchPodError: it has no pod of this name, or the name is another pod's by now.
            PodSourceError: it does not say it.
        """
        if self._api_server is None:
            self._api_server = await asyncio.to_thread(_api_server, self._kubeconfig)
        pod = await self._api_server.get(*name)
        if pod.uid != uid:
            raise NoSuchPodError(f"the API server's pod {name} is another one ({pod.uid})")
        return pod


def _pods_api(socket: str) -> "PodsApi":
    from fpga_plugin.kubernetes.kubelet.podsapi import PodsApi  # only where needed

    return PodsApi(socket)


def _api_server(kubeconfig: str | None) -> "ApiServer":
    from fpga_plugin.kubernetes.apiserver.pods import ApiServer  # only where needed

    return ApiServer(kubeconfig)
