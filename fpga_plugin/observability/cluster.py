"""All nodes of a cluster at a glance: each plugin's own status, by way of the API server.

No service of its own: the pods are listed, and each is asked for /status.json through the API
server's proxy (`pods/proxy`), a few at a time. A node that does not answer is reported, and
the others are shown. What a node answers is bounded and parsed as untrusted input.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import quote as quoted

import msgspec

from fpga_plugin.errors import FpgaPluginError, quote
from fpga_plugin.kubernetes.apiserver.rest import ApiServerError, Session

SELECTOR: Final = "app.kubernetes.io/part-of=fpga-plugin"
"""On every plugin's pod, the chart's and the kustomize base's, whatever the release is called."""

AT_ONCE: Final = 16
"""Nodes that are asked at the same time."""

PAGE: Final = "250"
"""Pods of one answer."""

MOST_PAGES: Final = 100
"""A list that does not end by then is none."""

MAX_STATUS: Final = 8 << 20
"""Bytes of a node's status. Every pod with the label is asked, also one that is no plugin's."""

PORT: Final = 9102
"""Where nothing in the pod's spec says otherwise (FPGA_PLUGIN_HTTP_ADDRESS' default)."""

_HOST: Final = "fpga-plugin"
"""The API server's proxy hands the client's Host on, and a node does not accept a
cluster's public name (`observability/hosts.py`). It accepts a name of one label."""

_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Port(msgspec.Struct):
    containerPort: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]  # noqa: N815  # the API's name
    name: str = ""


class _Container(msgspec.Struct):
    ports: list[_Port] = []


class _Spec(msgspec.Struct):
    nodeName: _Text = ""  # noqa: N815  # the API's name
    containers: list[_Container] = []


class _PodStatus(msgspec.Struct):
    phase: _Text = ""


class _Metadata(msgspec.Struct):
    name: _Text
    namespace: _Text


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _ListMetadata(msgspec.Struct, rename={"more": "continue"}):
    more: str = ""


class _Pods(msgspec.Struct):
    items: list[_Pod]
    metadata: _ListMetadata = msgspec.field(default_factory=_ListMetadata)


class NodeTrouble(msgspec.Struct, frozen=True):
    """One kind of trouble of a node, as in `TroubleView`."""

    refused: _Count
    drained: _Count
    failed: _Count
    never_cleared: _Count
    kept: _Count = 0  # a plugin of before does not say
    unusable: dict[_Text, _Count] = {}  # the same


class _Region(msgspec.Struct, frozen=True):
    healthy: bool
    owner: dict[str, Any] | None = None


class _Card(msgspec.Struct, frozen=True):
    regions: list[_Region]


class Summary(msgspec.Struct, frozen=True):
    """What the table shows of a status."""

    version: _Text
    ready: bool
    cards: list[_Card]
    trouble: NodeTrouble
    not_ready: list[_Text] = []

    @property
    def regions(self) -> int:
        """Of all cards."""
        return sum(len(card.regions) for card in self.cards)

    @property
    def used(self) -> int:
        """Regions that pods have."""
        return sum(one.owner is not None for card in self.cards for one in card.regions)

    @property
    def free(self) -> int:
        """Regions that the next pod may get."""
        return sum(one.owner is None and one.healthy for card in self.cards for one in card.regions)


# Made at import: see kubernetes/kubelet/checkpoint.py.
_PODS: Final = msgspec.json.Decoder(_Pods)
_SUMMARY: Final = msgspec.json.Decoder(Summary)


class FleetError(FpgaPluginError):
    """The pods cannot be listed."""


@dataclass(frozen=True, slots=True)
class PluginPod:
    """A plugin's pod.

    Attributes:
        namespace: of the pod.
        pod: its name.
        node: on which it is; empty while it is on none.
        port: on which it serves its page.
        phase: as its status has it.
    """

    namespace: str
    pod: str
    node: str
    port: int
    phase: str

    @property
    def path(self) -> str:
        """Of its status, at the API server."""
        pod = quoted(f"{self.pod}:{self.port}", safe=":")
        return f"/api/v1/namespaces/{quoted(self.namespace, safe='')}/pods/{pod}/proxy/status.json"


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What a node said.

    Attributes:
        place: the plugin's pod that was asked.
        error: why there is no status; else empty.
        summary: None where there is an error.
        status: all of it, as the node says it.
    """

    place: PluginPod
    error: str = ""
    summary: Summary | None = None
    status: Any = None


async def plugins(session: Session, namespace: str, selector: str) -> list[PluginPod]:
    """The plugins' pods, in order of their nodes.

    Args:
        session: with the API server.
        namespace: empty: all.
        selector: of their labels.

    Raises:
        FleetError: they cannot be listed.
    """
    where = f"namespaces/{quoted(namespace, safe='')}/pods" if namespace else "pods"
    found: list[PluginPod] = []
    more = ""
    try:
        for _ in range(MOST_PAGES):
            params = {"labelSelector": selector, "limit": PAGE}
            answer = await session.call(
                "GET", f"/api/v1/{where}", params=params | ({"continue": more} if more else {})
            )
            pods = _PODS.decode(answer)
            found += map(_place, pods.items)
            more = pods.metadata.more
            if not more:
                return sorted(found, key=lambda place: (place.node, place.namespace, place.pod))
    except ApiServerError as error:
        raise FleetError(
            f"the plugins' pods cannot be listed: {error.message}",
            hint="it needs the rights to list pods and to get pods/proxy",
        ) from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FleetError(
            f"the API server's list of pods is not understood: {quote(error)}"
        ) from None
    raise FleetError("the API server's list of pods does not end")


def _place(pod: _Pod) -> PluginPod:
    ports = [port for container in pod.spec.containers for port in container.ports]
    http = [port.containerPort for port in ports if port.name == "http"]
    return PluginPod(
        pod.metadata.namespace,
        pod.metadata.name,
        pod.spec.nodeName,
        http[0] if http else PORT,
        pod.status.phase,
    )


async def statuses(
    session: Session, places: Sequence[PluginPod], told: Callable[[int], None]
) -> list[NodeStatus]:
    """What each of them says, in their order; `told` gets how many have answered."""
    turn = asyncio.Semaphore(AT_ONCE)
    answered = 0

    async def one(place: PluginPod) -> NodeStatus:
        nonlocal answered
        async with turn:
            status = await _ask(session, place)
        answered += 1
        told(answered)
        return status

    return list(await asyncio.gather(*map(one, places)))


async def _ask(session: Session, place: PluginPod) -> NodeStatus:
    if place.phase != "Running":
        return NodeStatus(place, f"the pod does not run: it is {quote(place.phase or 'unknown')}")
    try:
        answer = await session.call("GET", place.path, host=_HOST, most=MAX_STATUS)
    except ApiServerError as error:
        return NodeStatus(place, _why(error))
    try:
        return NodeStatus(place, summary=_SUMMARY.decode(answer), status=json.loads(answer))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return NodeStatus(
            place, f"its answer is not understood; it may be of another version: {quote(error)}"
        )


def _why(error: ApiServerError) -> str:
    """With what to do about it, where that is known."""
    hints = {
        403: "it needs the right to get pods/proxy",
        404: "its page is off: set FPGA_PLUGIN_STATUS_PAGE=true",
        421: "FPGA_PLUGIN_HTTP_HOSTS of that node refuses the name",
        503: "the API server does not reach it: does a NetworkPolicy keep it out?",
    }
    hint = hints.get(error.code, "")
    return f"{error.message}{f': {hint}' if hint else ''}"
