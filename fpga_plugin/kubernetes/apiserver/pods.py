"""The API server: one pod by namespace and name.

For clusters whose kubelet does not serve the Pods API. It needs one right, `get` on pods. Its copy
of the status lags behind kubelet's, usually by milliseconds and without any bound; callers have
to allow for that.

The credentials are read again for each question, since service account tokens and certificates are
replaced while the plugin runs.
"""

import asyncio
from dataclasses import dataclass
from datetime import datetime

import msgspec

from fpga_plugin.errors import NoSourceError, quote
from fpga_plugin.kubernetes.apiserver.rest import ApiServerError, decoded, session
from fpga_plugin.kubernetes.pod import (
    ENDED_PHASES,
    SANDBOX_CONDITION,
    UNKNOWN_REFERENCE,
    Container,
    ContainerState,
    NoSuchPodError,
    Phase,
    Pod,
    PodSourceError,
    Reference,
    Run,
    Variable,
    config_map_key,
    file_key,
    parse_identity,
    resource_field,
    secret_key,
)

MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""On the API server's copy of a static pod: the uid under which kubelet runs it, which is another
(pkg/kubelet/types, ConfigMirrorAnnotationKey)."""

CALL_SECONDS = 5.0
"""PreStart has 25 s for everything."""

_NOT_FOUND = "NotFound"
"""`reason` of the API server's own 404; a proxy's or another server's has none."""

_WHY_NOT = {
    401: "the API server does not accept the plugin's credentials",
    403: "the API server does not allow the plugin to get pods",
}


class _Part(msgspec.Struct, rename="camel"):
    """The fields of a core/v1 Pod that are read; a field that the API server omits is None."""


class _Owner(_Part):
    api_version: str
    kind: str
    name: str
    controller: bool | None = None


class _Metadata(_Part):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[_Owner] | None = None


class _Field(_Part):
    field_path: str


class _Resource(_Part):
    resource: str


class _Key(_Part):
    key: str
    name: str = ""


class _File(_Part):
    volume_name: str
    path: str
    key: str


class _Source(_Part):
    field_ref: _Field | None = None
    resource_field_ref: _Resource | None = None
    config_map_key_ref: _Key | None = None
    secret_key_ref: _Key | None = None
    file_key_ref: _File | None = None


class _Variable(_Part):
    name: str
    value: str = ""
    value_from: _Source | None = None


class _AllOf(_Part):
    prefix: str = ""


class _Container(_Part):
    name: str
    env: list[_Variable] | None = None
    env_from: list[_AllOf] | None = None
    restart_policy: str = ""


class _Spec(_Part):
    node_name: str = ""
    service_account_name: str = ""
    init_containers: list[_Container] | None = None
    containers: list[_Container] | None = None


class _Running(_Part):
    started_at: datetime | None = None


class _Waiting(_Part):
    message: str = ""


class _Terminated(_Part):
    exit_code: int
    started_at: datetime | None = None


class _ContainerState(_Part):
    running: _Running | None = None
    waiting: _Waiting | None = None
    terminated: _Terminated | None = None


class _ContainerStatus(_Part):
    name: str
    state: _ContainerState = msgspec.field(default_factory=_ContainerState)
    last_state: _ContainerState = msgspec.field(default_factory=_ContainerState)


class _Condition(_Part):
    type: str
    status: str


class _Mapping(_Part):
    container_name: str
    request_name: str


class _Extended(_Part):
    resource_claim_name: str
    request_mappings: list[_Mapping]


class _Status(_Part):
    phase: str = ""
    conditions: list[_Condition] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None
    container_statuses: list[_ContainerStatus] | None = None
    extended_resource_claim_status: _Extended | None = None


class ApiPod(_Part):
    """The fields of a core/v1 Pod (k8s.io/api core/v1) that are read."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


_pod = msgspec.json.Decoder(ApiPod)


@dataclass(frozen=True, slots=True)
class ExtendedClaim:
    """A ResourceClaim that stands for a pod's extended resources (KEP-5004).

    Attributes:
        claim: its name.
        requests: pairs of a container and its request of the claim.
    """

    claim: str
    requests: tuple[tuple[str, str], ...]


class ApiServer:
    """Asks one API server. Calls may overlap.

    Args:
        kubeconfig: path of a file with credentials; None: the pod's service account.
        call_seconds: how long a question may take, connecting included.
    """

    def __init__(self, kubeconfig: str | None, *, call_seconds: float = CALL_SECONDS) -> None:
        self._kubeconfig = kubeconfig
        self._call_seconds = call_seconds

    async def check(self) -> None:
        """Whether it answers and lets the plugin get pods, whichever they are.

        Raises:
            PodSourceError: it does not.
        """
        try:
            await self.get("default", "fpga-plugin-looks-whether-it-may")
        except NoSuchPodError:
            return

    async def get(self, namespace: str, name: str) -> Pod:
        """The pod of this name.

        Raises:
            NoSuchPodError: the API server itself says that there is none.
            PodSourceError: the API server does not say it.
        """
        return (await self.get_extended(namespace, name))[0]

    async def get_extended(self, namespace: str, name: str) -> tuple[Pod, ExtendedClaim | None]:
        """The pod, and the claim that the scheduler made for its extended resources.

        Raises:
            NoSuchPodError: the API server itself says that there is none.
            PodSourceError: the API server does not say it.
        """
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        try:
            async with (
                asyncio.timeout(self._call_seconds),
                session(self._kubeconfig, seconds=self._call_seconds) as server,
            ):
                pod = decoded(_pod, await server.call("GET", path), path)
            return convert(pod), _extended(pod)
        except TimeoutError:
            raise PodSourceError(
                f"the API server did not answer within {self._call_seconds:g} s"
            ) from None
        except ApiServerError as error:
            if error.reason == _NOT_FOUND:
                raise NoSuchPodError(f"the API server knows no pod {namespace}/{name}") from error
            why = _WHY_NOT.get(error.code, error.why)
            raise PodSourceError(why, hint=error.hint) from error
        except NoSourceError as error:
            raise PodSourceError(error.message, hint=error.hint) from error
        except ValueError as error:
            raise PodSourceError(
                f"the API server's answer is not understood ({quote(error)})"
            ) from error


def convert(pod: ApiPod) -> Pod:
    """The pod, of what the API server says of it.

    Raises:
        ValueError: it has no name.
    """
    metadata, spec, status = pod.metadata, pod.spec, pod.status
    original = _original(metadata, spec)
    namespace, name, uid = parse_identity(
        metadata.namespace, metadata.name, original or metadata.uid
    )
    conditions = {one.type: one.status == "True" for one in status.conditions or ()}
    return Pod(
        namespace=namespace,
        name=name,
        uid=uid,
        labels=metadata.labels or {},
        annotations=metadata.annotations or {},
        node=spec.node_name,
        service_account=spec.service_account_name,
        init=tuple(_container(one) for one in spec.init_containers or ()),
        containers=tuple(_container(one) for one in spec.containers or ()),
        states={
            one.name: _state(one)
            for one in (
                *(status.init_container_statuses or ()),
                *(status.container_statuses or ()),
            )
        },
        ended=status.phase in ENDED_PHASES,
        sandbox=conditions.get(SANDBOX_CONDITION),
        static=original is not None,
    )


def _extended(pod: ApiPod) -> ExtendedClaim | None:
    told = pod.status.extended_resource_claim_status
    if told is None:
        return None
    requests = ((one.container_name, one.request_name) for one in told.request_mappings)
    return ExtendedClaim(told.resource_claim_name, tuple(requests))


def _original(metadata: _Metadata, spec: _Spec) -> str | None:
    """Kubelet's uid of the static pod that this one mirrors; None: it is no mirror.

    Anybody who creates a pod may write the annotation, and so take the place of another pod. A
    mirror that kubelet made has one owner besides, the node on which it runs
    (pkg/kubelet/pod/mirror_client.go), and from kubelets the API server takes no others
    (plugin/pkg/admission/noderestriction). A pod that names a Node of another uid as its owner is
    removed by the garbage collector.
    """
    told = (metadata.annotations or {}).get(MIRROR_ANNOTATION)
    owners = metadata.owner_references or ()
    if told is None or len(owners) != 1:
        return None
    (owner,) = owners
    of_node = (owner.api_version, owner.kind, owner.name) == ("v1", "Node", spec.node_name)
    return told if of_node and owner.controller else None


def _container(container: _Container) -> Container:
    return Container(
        container.name,
        tuple(
            Variable(
                one.name,
                one.value,
                None if one.value_from is None else _source(one.value_from),
            )
            for one in container.env or ()
        ),
        tuple(one.prefix for one in container.env_from or ()),
        container.restart_policy == "Always",
    )


def _source(source: _Source) -> Reference:
    if source.field_ref is not None:
        return Reference(field=source.field_ref.field_path)
    if source.resource_field_ref is not None:
        return resource_field(source.resource_field_ref.resource)
    if (config_map := source.config_map_key_ref) is not None:
        return config_map_key(config_map.name, config_map.key)
    if (secret := source.secret_key_ref) is not None:
        return secret_key(secret.name, secret.key)
    if (file := source.file_key_ref) is not None:
        return file_key(file.volume_name, file.path, file.key)
    return UNKNOWN_REFERENCE


def _state(status: _ContainerStatus) -> ContainerState:
    now, last = status.state, status.last_state
    if now.running is not None:
        return ContainerState(Phase.RUNNING, started=_seconds(now.running.started_at))
    if now.terminated is not None:
        return ContainerState(Phase.TERMINATED, ended=_run(now.terminated))
    return ContainerState(
        Phase.WAITING,
        "" if now.waiting is None else now.waiting.message,
        None if last.terminated is None else _run(last.terminated),
    )


def _run(ended: _Terminated) -> Run:
    return Run(ended.exit_code, _seconds(ended.started_at))


def _seconds(when: datetime | None) -> int:
    return 0 if when is None else int(when.timestamp())
