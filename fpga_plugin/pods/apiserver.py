"""The API server: one pod by namespace and name.

For clusters whose kubelet does not serve the Pods API. It takes one right, `get` on pods. Its copy
of the status lags behind kubelet's, usually by milliseconds and without any bound; who uses it has
to reckon with that.

lightkube is imported with this module, 50 to 100 ms and 10 MiB: import it only where it is needed,
and not on the event loop. The credentials are read anew for each question, since service account
tokens and certificates are replaced while the plugin runs.
"""

import asyncio
from dataclasses import dataclass

from httpx2 import HTTPError, HTTPStatusError
from lightkube.core.exceptions import ApiError
from lightkube.models import core_v1
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod as ApiPod

from fpga_plugin.api.server import CredentialsError, connect, reason
from fpga_plugin.errors import quote
from fpga_plugin.pods.pod import (
    ENDED_PHASES,
    SANDBOX_CONDITION,
    UNKNOWN_REFERENCE,
    Container,
    NoSuchPodError,
    Phase,
    Pod,
    PodSourceError,
    Reference,
    Run,
    State,
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

_UNAUTHORIZED = 401
_FORBIDDEN = 403
_NOT_FOUND = "NotFound"
"""`reason` of the API server's own 404; a proxy's or another server's has none."""


@dataclass(frozen=True, slots=True)
class ExtendedClaim:
    """A ResourceClaim that stands for a pod's extended resources (KEP-5004).

    Attributes:
        claim: its name.
        requests: of which container which request of the claim is.
    """

    claim: str
    requests: tuple[tuple[str, str], ...]


class ApiServer:
    """Asks one API server. Belongs to the event loop; calls may overlap.

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
            PodSourceError: the API server does not tell it.
        """
        return (await self.get_extended(namespace, name))[0]

    async def get_extended(self, namespace: str, name: str) -> tuple[Pod, ExtendedClaim | None]:
        """The pod, and the claim that the scheduler made for its extended resources.

        Raises:
            NoSuchPodError: the API server itself says that there is none.
            PodSourceError: the API server does not tell it.
        """
        try:
            async with asyncio.timeout(self._call_seconds):
                client = await asyncio.to_thread(
                    connect, self._kubeconfig, seconds=self._call_seconds
                )
                try:
                    pod = await client.get(ApiPod, name, namespace=namespace)
                finally:
                    await client.close()
            return convert(pod), _extended(pod)
        except CredentialsError as error:
            raise PodSourceError(error.message) from error
        except TimeoutError:
            raise PodSourceError(
                f"the API server did not answer within {self._call_seconds:g} s"
            ) from None
        except HTTPStatusError as error:
            raise _refused(namespace, name, error) from error
        except HTTPError as error:
            raise PodSourceError(f"the API server cannot be asked ({reason(error)})") from None
        except PermissionError as error:
            raise PodSourceError(
                f"the program that {self._kubeconfig} names for credentials cannot be run"
                f" ({error.strerror}): a token or a certificate in its place can be used, or"
                " FPGA_PLUGIN_SANDBOX=off"
            ) from error
        except Exception as error:  # lightkube and msgspec raise many types for odd answers
            raise PodSourceError(
                f"the API server's answer is not understood ({_what(error)})"
            ) from error


def _what(error: Exception) -> str:
    return f"{type(error).__name__}: {quote(error)}"


def _refused(namespace: str, name: str, error: HTTPStatusError) -> PodSourceError:
    code = error.response.status_code
    if isinstance(error, ApiError) and error.status.reason == _NOT_FOUND:
        return NoSuchPodError(f"the API server knows no pod {namespace}/{name}")
    if code == _FORBIDDEN:
        return PodSourceError("the API server does not allow the plugin to get pods")
    if code == _UNAUTHORIZED:
        return PodSourceError("the API server does not accept the plugin's credentials")
    return PodSourceError(f"the API server answered {code} {quote(error)}")


def convert(pod: ApiPod) -> Pod:
    """A core/v1 Pod, as lightkube has it.

    Raises:
        ValueError: it has no name.
    """
    metadata = pod.metadata or ObjectMeta()
    spec = pod.spec or core_v1.PodSpec(containers=[])
    status = pod.status or core_v1.PodStatus()
    original = _original(metadata, spec)
    namespace, name, uid = parse_identity(
        metadata.namespace or "", metadata.name or "", original or metadata.uid or ""
    )
    conditions = {one.type: one.status == "True" for one in status.conditions or ()}
    return Pod(
        namespace=namespace,
        name=name,
        uid=uid,
        labels=metadata.labels or {},
        annotations=metadata.annotations or {},
        node=spec.nodeName or "",
        service_account=spec.serviceAccountName or "",
        init=tuple(_container(one) for one in spec.initContainers or ()),
        containers=tuple(_container(one) for one in spec.containers or ()),
        states={
            one.name: _state(one)
            for one in (
                *(status.initContainerStatuses or ()),
                *(status.containerStatuses or ()),
            )
        },
        ended=status.phase in ENDED_PHASES,
        sandbox=conditions.get(SANDBOX_CONDITION),
        static=original is not None,
    )


def _extended(pod: ApiPod) -> ExtendedClaim | None:
    told = None if pod.status is None else pod.status.extendedResourceClaimStatus
    if told is None:
        return None
    requests = ((one.containerName, one.requestName) for one in told.requestMappings)
    return ExtendedClaim(told.resourceClaimName, tuple(requests))


def _original(metadata: ObjectMeta, spec: core_v1.PodSpec) -> str | None:
    """Kubelet's uid of the static pod of which this is the mirror; None: it is no mirror.

    Anybody who creates a pod may write the annotation, and so take the place of another pod. A
    mirror that kubelet made has one owner besides, the node on which it runs
    (pkg/kubelet/pod/mirror_client.go), and from kubelets the API server takes no others
    (plugin/pkg/admission/noderestriction). A pod that names a Node of another uid as its owner is
    removed by the garbage collector.
    """
    told = (metadata.annotations or {}).get(MIRROR_ANNOTATION)
    owners = metadata.ownerReferences or ()
    if told is None or len(owners) != 1:
        return None
    (owner,) = owners
    of_node = (owner.apiVersion, owner.kind, owner.name) == ("v1", "Node", spec.nodeName)
    return told if of_node and owner.controller else None


def _container(container: core_v1.Container) -> Container:
    return Container(
        container.name,
        tuple(
            Variable(
                one.name,
                one.value or "",
                None if one.valueFrom is None else _source(one.valueFrom),
            )
            for one in container.env or ()
        ),
        tuple(one.prefix or "" for one in container.envFrom or ()),
        container.restartPolicy == "Always",
    )


def _source(source: core_v1.EnvVarSource) -> Reference:
    if source.fieldRef is not None:
        return Reference(field=source.fieldRef.fieldPath)
    if source.resourceFieldRef is not None:
        return resource_field(source.resourceFieldRef.resource)
    if source.configMapKeyRef is not None:
        return config_map_key(source.configMapKeyRef.name or "", source.configMapKeyRef.key)
    if source.secretKeyRef is not None:
        return secret_key(source.secretKeyRef.name or "", source.secretKeyRef.key)
    if source.fileKeyRef is not None:
        file = source.fileKeyRef
        return file_key(file.volumeName, file.path, file.key)
    return UNKNOWN_REFERENCE


def _state(status: core_v1.ContainerStatus) -> State:
    now = status.state or core_v1.ContainerState()
    if now.running is not None:
        began = now.running.startedAt
        return State(Phase.RUNNING, started=0 if began is None else int(began.timestamp()))
    if now.terminated is not None:
        return State(Phase.TERMINATED, ended=_run(now.terminated))
    last = status.lastState or core_v1.ContainerState()
    return State(
        Phase.WAITING,
        "" if now.waiting is None else now.waiting.message or "",
        None if last.terminated is None else _run(last.terminated),
    )


def _run(ended: core_v1.ContainerStateTerminated) -> Run:
    started = ended.startedAt
    return Run(ended.exitCode, 0 if started is None else int(started.timestamp()))
