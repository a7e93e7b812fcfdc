"""Kubelet's Pods API: one pod by uid, from kubelet itself.

The best source where it is served (KEP-4188: Kubernetes 1.37, in 1.36 by the gate PodsAPI): local,
no rights in the API server, static pods too. Its status is exact at PreStart: kubelet sets it at
the beginning of the very synchronisation that then starts containers (pkg/kubelet, SyncPod:
SetPodStatus comes before the runtime's SyncPod; pkg/kubelet/apis/pods, GetPod).

Each call has a connection of its own, as in `podresources`, and for the same reasons.
"""

import asyncio

from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from fpga_plugin.errors import quote
from fpga_plugin.kubernetes.grpc.wire import typed
from fpga_plugin.kubernetes.messages import core_v1, v1alpha1
from fpga_plugin.kubernetes.names import PodUid
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

SOURCE_ANNOTATION = "kubernetes.io/config.source"
"""Where kubelet has a pod from; `api` unless it is a static one. Kubelet writes it itself, over
whatever a tenant wrote there (pkg/kubelet/config/config.go, updatePodsFunc)."""

CALL_SECONDS = 3.0
"""Kubelet answers from memory, in milliseconds."""


class PodsApi:
    """Asks one kubelet. Calls may overlap.

    Args:
        socket_path: `/var/lib/kubelet/pods-api/pods-api.sock`, as this process sees it: so the
            kubelet of 1.36.3 has it (the KEP's text names `pods/kubelet.sock`, which none serves).
        call_seconds: how long a call may take, connecting included.
    """

    def __init__(self, socket_path: str, *, call_seconds: float = CALL_SECONDS) -> None:
        self._path = socket_path
        self._call_seconds = call_seconds

    async def get(self, uid: PodUid) -> Pod:
        """The pod with this uid.

        Raises:
            NoSuchPodError: kubelet has no such pod, or (1.36) does not have its pods yet.
            PodSourceError: kubelet does not say it.
        """
        try:
            async with asyncio.timeout(self._call_seconds):
                raw = await self._ask(uid)
            pod = decode(raw)
        except TimeoutError:
            raise PodSourceError(
                f"kubelet did not answer at {self._path} within {self._call_seconds:g} s"
            ) from None
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise PodSourceError(f"{self._path} is not served ({why})") from error
        except GRPCError as error:
            raise self._refusal(uid, error) from error
        except Exception as error:  # h2, grpclib and betterproto2 raise many types
            why = f"{type(error).__name__}: {quote(error)}"
            raise PodSourceError(
                f"the answer of kubelet at {self._path} is not understood ({why})"
            ) from error
        if pod.uid != uid:
            raise PodSourceError(f"kubelet at {self._path} answered with another pod: {pod.uid}")
        return pod

    async def _ask(self, uid: PodUid) -> bytes:
        channel = Channel(path=self._path)
        try:
            answer = await v1alpha1.PodsStub(channel).get_pod(v1alpha1.GetPodRequest(pod_uid=uid))
        finally:
            channel.close()
        return answer.pod

    def _refusal(self, uid: PodUid, error: GRPCError) -> PodSourceError:
        if error.status is Status.NOT_FOUND:
            return NoSuchPodError(f"kubelet at {self._path} knows no pod {uid}")
        if error.status is Status.FAILED_PRECONDITION:
            return PodSourceError(f"kubelet at {self._path} is still starting")
        if error.status is Status.UNIMPLEMENTED:
            return PodSourceError(f"kubelet at {self._path} does not have this call")
        told = f"{error.status.name} {quote(error.message or '')}"
        return PodSourceError(f"kubelet at {self._path} answered {told}")


def decode(raw: bytes) -> Pod:
    """A core/v1 Pod, serialised as protobuf.

    Raises:
        ValueError: it has no name, or a field is of another type.
        Exception: of many kinds, where `raw` is no protobuf.
    """
    pod = typed(core_v1.Pod.parse(raw))
    metadata = pod.metadata or core_v1.ObjectMeta()
    spec = pod.spec or core_v1.PodSpec()
    status = pod.status or core_v1.PodStatus()
    namespace, name, uid = parse_identity(metadata.namespace, metadata.name, metadata.uid)
    conditions = {one.type: one.status == "True" for one in status.conditions}
    return Pod(
        namespace=namespace,
        name=name,
        uid=uid,
        labels=dict(metadata.labels),
        annotations=dict(metadata.annotations),
        node=spec.node_name,
        service_account=spec.service_account_name,
        init=tuple(_container(one) for one in spec.init_containers),
        containers=tuple(_container(one) for one in spec.containers),
        states={
            one.name: _state(one)
            for one in (*status.init_container_statuses, *status.container_statuses)
        },
        ended=status.phase in ENDED_PHASES,
        sandbox=conditions.get(SANDBOX_CONDITION),
        static=metadata.annotations.get(SOURCE_ANNOTATION, "api") != "api",
    )


def _container(container: core_v1.Container) -> Container:
    return Container(
        container.name,
        tuple(
            Variable(
                one.name, one.value, None if one.value_from is None else _source(one.value_from)
            )
            for one in container.env
        ),
        tuple(one.prefix for one in container.env_from),
        container.restart_policy == "Always",
    )


def _source(source: core_v1.EnvVarSource) -> Reference:
    if source.field_ref is not None:
        return Reference(field=source.field_ref.field_path)
    if source.resource_field_ref is not None:
        return resource_field(source.resource_field_ref.resource)
    if source.config_map_key_ref is not None:
        return config_map_key(*_key(source.config_map_key_ref))
    if source.secret_key_ref is not None:
        return secret_key(*_key(source.secret_key_ref))
    if source.file_key_ref is not None:
        file = source.file_key_ref
        return file_key(file.volume_name, file.path, file.key)
    return UNKNOWN_REFERENCE


def _key(selector: core_v1.KeySelector) -> tuple[str, str]:
    reference = selector.local_object_reference
    return "" if reference is None else reference.name, selector.key


def _state(status: core_v1.ContainerStatus) -> ContainerState:
    now = status.state or core_v1.ContainerState()
    if now.running is not None:
        began = now.running.started_at
        return ContainerState(Phase.RUNNING, started=0 if began is None else began.seconds)
    if now.terminated is not None:
        return ContainerState(Phase.TERMINATED, ended=_run(now.terminated))
    last = status.last_state or core_v1.ContainerState()
    return ContainerState(
        Phase.WAITING,
        "" if now.waiting is None else now.waiting.message,
        None if last.terminated is None else _run(last.terminated),
    )


def _run(ended: core_v1.ContainerStateTerminated) -> Run:
    return Run(ended.exit_code, 0 if ended.started_at is None else ended.started_at.seconds)
