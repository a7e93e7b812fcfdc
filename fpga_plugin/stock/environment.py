"""What a container asks for on a stock kubelet, which sends no environment.

The pod's spec is read from kubelet's Pods API where that is served, else from the API server, and
the request variables are made of it by kubelet's own rules. They are the same for the whole life of
a pod, apart from those made of labels and annotations and those of static pods, so they are kept by
uid: a container restarts although the control plane is away. The status is never kept.

Where the containers that hold the devices ask for different things, `pods.turn` proves which of
them starts; what it needs to know of earlier PreStarts is remembered here, in memory only: after a
restart of the plugin or of kubelet the proof takes one more try of kubelet's.
"""

import asyncio
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from fpga_plugin.claims.environment import Asked
from fpga_plugin.errors import InvalidRequestError, NoSourceError
from fpga_plugin.ids import DeviceId, PodUid
from fpga_plugin.pods.cgroup import PodCgroups
from fpga_plugin.pods.environment import request_variables
from fpga_plugin.pods.identity import Identity
from fpga_plugin.pods.pod import Container, NoSuchPodError, Pod, PodSourceError, Run
from fpga_plugin.pods.podresources import PodResourcesClient
from fpga_plugin.pods.podsapi import PodsApi
from fpga_plugin.pods.requests import FpgaRequest, parse_requests
from fpga_plugin.stock import turn

if TYPE_CHECKING:
    from fpga_plugin.pods.apiserver import ApiServer

log = structlog.get_logger()

KEPT_PODS: Final = 512
"""Pods of which something is remembered; kubelet runs 110 unless told otherwise."""

SETTLE: Final = 2.0
"""Seconds for which a lagging status has to say the same. Kubelet sends a change within
milliseconds; what it sends late is why it has to be waited for."""

PATIENCE: Final = 5.0
"""Seconds for which a lagging status is read again and again; PreStart has 25 for everything."""

POLL: Final = 0.25
"""Seconds between two reads."""

_CONFIGURE: Final = (
    "mount the socket of kubelet's Pods API (FPGA_PLUGIN_PODS_SOCKET), or let the plugin's service"
    " account get pods (or set FPGA_PLUGIN_KUBECONFIG)"
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Wish:
    """What one container asks for, or why that cannot be served."""

    container: turn.Candidate
    env: Mapping[str, str] = field(default_factory=dict)
    requests: tuple[FpgaRequest, ...] = ()
    wrong: tuple[str, str] | None = None

    def same(self, other: "_Wish") -> bool:
        """Whether it makes no difference which of the two starts."""
        return (self.requests, self.wrong) == (other.requests, other.wrong)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is kept of a pod: nothing of its containers' environment but their requests."""

    namespace: str
    name: str
    wishes: tuple[_Wish, ...]


@dataclass(frozen=True, slots=True)
class _Question:
    """Whose containers hold the devices of a PreStart, and all devices that the pod has of us."""

    uid: PodUid
    held: frozenset[str]
    devices: frozenset[DeviceId]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """An answer of a source; `exact`: its status is that of this very PreStart."""

    pod: Pod
    source: str
    exact: bool


@dataclass(slots=True)
class _Trail:
    """What became of a pod's PreStarts, by the devices that they named.

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
        """All begins anew."""
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


class PodEnvSource:
    """Belongs to the event loop (`EnvSource`).

    Args:
        pods_socket: of kubelet's Pods API; None: it is not asked.
        kubeconfig: credentials for the API server; None: the plugin's service account.
        podresources: tells the names of pods; None: the API server cannot be asked for them.
        cgroups: tell whether a pod keeps its sandbox where its status does not; None: nothing does.
        settle: see `SETTLE`.
    """

    def __init__(
        self,
        *,
        pods_socket: str | None,
        kubeconfig: str | None,
        podresources: PodResourcesClient | None,
        cgroups: PodCgroups | None = None,
        settle: float = SETTLE,
    ) -> None:
        self._pods_api = None if pods_socket is None else PodsApi(pods_socket)
        self._kubeconfig = kubeconfig
        self._api_server: ApiServer | None = None
        self._podresources = podresources
        self._cgroups = cgroups
        self._settle = settle
        self._known: OrderedDict[PodUid, _Known] = OrderedDict()
        self._trails: OrderedDict[PodUid, _Trail] = OrderedDict()
        self._told: OrderedDict[PodUid, bool] = OrderedDict()  # by this life of kubelet
        self._lives = 0
        self._answers: Counter[str] = Counter()

    @property
    def answers(self) -> Mapping[str, int]:
        """How often `pods-api`, `api-server` and what was `kept` answered, and `none` did."""
        return self._answers

    async def ask(self, identity: Identity, devices: Sequence[DeviceId], *, fresh: bool) -> Asked:
        """What the container asks for that starts now (`EnvSource`)."""
        if identity.pod is None:
            raise NoSourceError(
                "kubelet sent no environment, and its checkpoint does not tell which pod holds"
                f" {', '.join(devices)}",
                hint="mount kubelet's directory, and set FPGA_PLUGIN_KUBELET_DIR to it; the log has"
                " the details",
            )
        question = _Question(identity.pod, identity.held, frozenset(devices))
        told: _Told | None = None
        known = self._known.get(question.uid)
        if known is None:
            told = await self._read(question, None)
            known = self._learn(question.uid, told)
        else:
            self._known.move_to_end(question.uid)
            self._answers["kept"] += 1
        wishes = [wish for wish in known.wishes if wish.container.name in identity.containers]
        if len(wishes) != len(identity.containers):
            raise NoSourceError(
                f"the spec of pod {known.namespace}/{known.name} lacks containers that kubelet's"
                f" checkpoint has: {', '.join(sorted(identity.containers))}"
            )
        wish, container = wishes[0], ""
        if not all(wish.same(other) for other in wishes):
            holders = [wish.container for wish in wishes]
            container = (turn.first(holders) if fresh else None) or await self._turn(
                question, known, holders, told
            )
            wish = next(wish for wish in wishes if wish.container.name == container)
        if wish.wrong is not None:
            message, hint = wish.wrong
            raise InvalidRequestError(message, hint=hint)
        return Asked(wish.env, container, known.namespace, known.name)

    async def pod(self, uid: PodUid, held: frozenset[str]) -> Pod:
        """A pod as it is now (`EnvSource`)."""
        question = _Question(uid, held, frozenset())
        return (await self._read(question, self._known.get(uid))).pod

    async def ended(self, uid: PodUid) -> bool:
        """Whether a pod is gone or has ended (`EnvSource`).

        A kubelet that waits for its API server knows no pods yet, and some say so of each (1.36:
        pkg/kubelet/apis/pods, GetPod). So its word that there is none counts only of a pod that the
        same life of it has told. The API server takes names, so it is asked of pods only that were
        read before. Static ones are not among them: somebody may delete its copy of such a pod,
        which ends nothing.
        """
        problems = []
        if self._pods_api is not None:
            try:
                return (await self._from_kubelet(self._pods_api, uid)).ended
            except NoSuchPodError as error:
                if uid in self._told:
                    return True
                problems.append(f"{error.message}, nor did it since it started")
            except PodSourceError as error:
                problems.append(error.message)
        known = self._known.get(uid)
        if known is None:
            problems.append("its name is not known, so that the API server cannot be asked")
        else:
            try:
                pod = await (await self._api()).get(known.namespace, known.name)
            except NoSuchPodError:
                return True
            except PodSourceError as error:
                problems.append(error.message)
            else:
                return pod.ended or pod.uid != uid
        raise NoSourceError(
            f"no source tells whether pod {uid} is still there: {'; '.join(problems)}",
            hint=_CONFIGURE,
        )

    def started(self, identity: Identity, devices: Sequence[DeviceId]) -> None:
        """Remember who started, where that may matter (`EnvSource`)."""
        if identity.pod is None or not identity.container:
            return
        trail = self._trail(identity.pod)
        trail.refusals.pop(frozenset(devices), None)
        trail.starts[frozenset(devices)] = turn.Start(
            identity.container, time.time(), trail.before.pop(frozenset(devices), None)
        )

    def refused(self, identity: Identity, devices: Sequence[DeviceId], words: str) -> None:
        """Remember the words, which kubelet will quote (`EnvSource`)."""
        if identity.pod is not None and len(identity.containers) > 1:
            self._trail(identity.pod).refusals[frozenset(devices)] = words

    def new_kubelet(self) -> None:
        """Containers may have started unseen, and kubelet has forgotten its reasons."""
        self._trails.clear()
        self._told.clear()
        self._lives += 1

    def _trail(self, uid: PodUid) -> _Trail:
        return _keep(self._trails, uid, self._trails.get(uid) or _Trail())

    # ---------------------------------------------------------------- whose turn

    async def _turn(
        self,
        question: _Question,
        known: _Known,
        holders: Sequence[turn.Candidate],
        told: _Told | None,
    ) -> str:
        """Whose turn it is among holders that ask for different things.

        Raises:
            NoSourceError: it is not proved; the words are unlike any other refusal's.
        """
        trail = self._trail(question.uid)
        if self._cgroups is not None:
            trail.asked(await asyncio.to_thread(self._cgroups.containers, question.uid))
        else:
            trail.asked(frozenset())
        words, last = trail.words(question.devices), trail.starts.get(question.devices)

        runs: dict[str, Run | None] = {}
        untold = False

        def decide(pod: Pod) -> str | None:
            nonlocal untold
            if pod.sandbox is None and not trail.older:
                pod = replace(pod, sandbox=True)
            untold = pod.sandbox is None
            name = turn.refused(pod, holders, words)
            if name is None and last is not None:
                name = turn.follows(pod, holders, last)
            if name is not None:
                runs[name] = pod.state(name).ended
            return name

        if words or last is not None:
            name = await self._proof(question, known, told, decide)
            if name is not None:
                trail.before[question.devices] = runs[name]
                return name
        if untold:
            trail.forget()
        raise NoSourceError(
            f"containers {', '.join(holder.name for holder in holders[:3])} of pod"
            f" {known.namespace}/{known.name} ask for different bitstreams on"
            f" {', '.join(sorted(question.devices)[:3])}, and it is not known yet which of them"
            f" starts (question {os.urandom(4).hex()})",
            hint="kubelet tries again in about 10 s, and the pod's status names the container then"
            if trail.ran or not untold
            else "this kubelet (before Kubernetes 1.29) does not tell whether the pod has its"
            " sandbox, and its cgroups are not seen (FPGA_PLUGIN_CGROUP_ROOT): let all of its"
            " containers ask for the same",
        )

    async def _proof(
        self,
        question: _Question,
        known: _Known,
        told: _Told | None,
        decide: Callable[[Pod], str | None],
    ) -> str | None:
        """Read the status until it proves something, as long as that can help."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        while True:
            told = told or await self._read(question, known)
            name = decide(told.pod)
            if told.exact:
                return name
            if name is not None:
                await asyncio.sleep(self._settle)
                again = await self._read(question, known)
                if decide(again.pod) == name and again.pod.states == told.pod.states:
                    return name
                told = again
            else:
                await asyncio.sleep(POLL)
                told = None
            if loop.time() >= end:
                return None

    # ---------------------------------------------------------------- sources

    async def _read(self, question: _Question, known: _Known | None) -> _Told:
        """The pod, from the best source that answers.

        Raises:
            NoSourceError: none does.
        """
        problems = []
        if self._pods_api is not None:
            try:
                pod = await self._from_kubelet(self._pods_api, question.uid)
            except PodSourceError as error:
                problems.append(error.message)
            else:
                self._answers["pods-api"] += 1
                return _Told(pod=pod, source="pods-api", exact=True)
        try:
            pod = await self._from_api_server(question, known)
        except NoSourceError as error:
            problems.append(error.message)
        else:
            self._answers["api-server"] += 1
            return _Told(pod=pod, source="api-server", exact=False)
        self._answers["none"] += 1
        raise NoSourceError(
            f"kubelet sent no environment, and no source tells the spec of pod {question.uid}:"
            f" {'; '.join(problems)}",
            hint=_CONFIGURE,
        )

    async def _from_kubelet(self, pods_api: PodsApi, uid: PodUid) -> Pod:
        lives = self._lives
        pod = await pods_api.get(uid)
        if lives == self._lives:
            _keep(self._told, uid, value=True)
        return pod

    async def _from_api_server(self, question: _Question, known: _Known | None) -> Pod:
        if known is None:
            namespace, name = await self._find_name(question)
        else:
            namespace, name = known.namespace, known.name
        pod = await (await self._api()).get(namespace, name)
        if pod.uid != question.uid:
            raise PodSourceError(
                f"the API server's pod {namespace}/{name} is another one ({pod.uid})"
            )
        return pod

    async def _api(self) -> "ApiServer":
        if self._api_server is None:
            self._api_server = await asyncio.to_thread(_make_api_server, self._kubeconfig)
        return self._api_server

    async def _find_name(self, question: _Question) -> tuple[str, str]:
        """The pod's name: PodResources tells it by devices, the checkpoint does not.

        Raises:
            NoSourceError: it does not tell. It never shows plain init containers: a pod in which
                only these hold devices of ours is not found.
        """
        if self._podresources is None:
            raise PodSourceError("kubelet's PodResources API is switched off")
        found = {
            (one.namespace, one.pod)
            for one in await self._podresources.list_devices()
            if one.devices & question.held
        }
        if len(found) != 1:
            raise PodSourceError(
                f"kubelet's PodResources API shows {'several pods' if found else 'no pod'} with the"
                " devices, so that the API server cannot be asked by name"
            )
        return found.pop()

    def _learn(self, uid: PodUid, told: _Told) -> _Known:
        pod = told.pod
        wishes = []
        lasting = not pod.static
        for container in (*pod.init, *pod.containers):
            wish, volatile = _wish(pod, container)
            wishes.append(wish)
            lasting = lasting and not volatile
        known = _Known(pod.namespace, pod.name, tuple(wishes))
        if lasting:
            _keep(self._known, uid, known)
        log.info(
            "pod read",
            source=told.source,
            pod=uid,
            namespace=pod.namespace,
            name=pod.name,
            kept=lasting,
        )
        return known


def _wish(pod: Pod, container: Container) -> tuple[_Wish, bool]:
    """What a container asks for, and whether that may change while the pod lives."""
    (candidate,) = turn.candidates(pod, [container.name])
    volatile = False
    try:
        variables = request_variables(pod, container)
        volatile = variables.volatile
        requests = parse_requests(variables.env)
    except InvalidRequestError as error:
        return _Wish(candidate, wrong=(error.message, error.hint)), volatile
    return _Wish(candidate, variables.env, requests), volatile


def _make_api_server(kubeconfig: str | None) -> "ApiServer":
    from fpga_plugin.pods.apiserver import ApiServer  # imports an HTTP client: only where needed

    return ApiServer(kubeconfig)


def _keep(kept: OrderedDict[PodUid, T], uid: PodUid, value: T) -> T:
    """Remember something of a pod, and forget what was not asked for the longest."""
    kept[uid] = value
    kept.move_to_end(uid)
    if len(kept) > KEPT_PODS:
        kept.popitem(last=False)
    return value
