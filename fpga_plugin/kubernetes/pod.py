"""A pod as a source reports it: its containers' environments, and which of them run.

Two sources tell it (`podsapi`, `apiserver`), in two encodings of the same core/v1 Pod; from here on
there is one. Values of variables are a tenant's own and may be secrets: a `Pod` lives for the time
of one question, is never logged, and only FPGA_* request variables outlast it.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from fpga_plugin.errors import NoSourceError, quote
from fpga_plugin.kubernetes.names import PodName, PodUid, parse_name, parse_pod_uid

SANDBOX_CONDITION: Final = "PodReadyToStartContainers"
"""False while kubelet is about to make a sandbox; on by default since Kubernetes 1.29."""


ENDED_PHASES: Final = frozenset({"Succeeded", "Failed"})
"""None of the pod's containers starts again (core/v1, PodPhase)."""


class PodSourceError(NoSourceError):
    """A source of pods gave no answer; nothing follows from that for any pod."""


class NoSuchPodError(PodSourceError):
    """It answers, and has no such pod."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a variable's value comes from, if not from the spec itself.

    Attributes:
        field: path of a field of the pod; empty: it is something else.
        what: the source in words, for messages; foreign names in it are quoted.
    """

    field: str = ""
    what: str = ""


@dataclass(frozen=True, slots=True)
class Variable:
    """One entry of a container's `env`.

    Attributes:
        name: the tenant's, unchecked.
        value: as written; `$(NAME)` in it is not expanded.
        source: looked at only where `value` is empty, as kubelet does.
    """

    name: str
    value: str = field(default="", repr=False)
    source: Reference | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """A container of a pod's spec.

    Attributes:
        name: unique in the pod.
        env: in order.
        env_from: the prefix of each `envFrom` entry; what the entries define cannot be seen here.
        restartable: an init container that keeps running (a sidecar).
    """

    name: str
    env: tuple[Variable, ...] = ()
    env_from: tuple[str, ...] = ()
    restartable: bool = False


class Phase(enum.Enum):
    """What a container does."""

    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a container that ended.

    Attributes:
        exit_code: 0 is success.
        started: seconds since the epoch by the node's clock, rounded down.
    """

    exit_code: int
    started: int


@dataclass(frozen=True, slots=True)
class ContainerState:
    """What kubelet says of a container.

    Attributes:
        phase: what it does.
        message: why it waits, in kubelet's words: the error of its last start. Empty unless it
            waits.
        ended: its latest run that ended: the present state of a terminated container, the last
            state of a waiting one. None while it runs.
        started: when the present run began, as in `Run`; 0: it does not run.
    """

    phase: Phase = Phase.WAITING
    message: str = ""
    ended: Run | None = None
    started: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod, spec and status.

    Attributes:
        uid: under which kubelet runs it.
        labels: the tenant's own, as annotations are: they say nothing that the plugin may believe.
        annotations: see `labels`.
        init: init containers in order, sidecars among them.
        containers: app containers in order.
        states: what kubelet says of each container; a missing one waits.
        ended: its phase is one that no pod leaves; its containers may still be on their way out.
        sandbox: whether the pod has its sandbox, so that init containers that completed stay
            completed; None: this kubelet does not say (before Kubernetes 1.29).
        static: kubelet has it from a file or URL: its spec may change while its uid does not.
    """

    namespace: str
    name: str
    uid: PodUid
    labels: Mapping[str, str] = field(default_factory=dict, repr=False)
    annotations: Mapping[str, str] = field(default_factory=dict, repr=False)
    node: str = ""
    service_account: str = ""
    init: tuple[Container, ...] = ()
    containers: tuple[Container, ...] = ()
    states: Mapping[str, ContainerState] = field(default_factory=dict)
    ended: bool = False
    sandbox: bool | None = None
    static: bool = False

    @property
    def full_name(self) -> PodName:
        """With the namespace."""
        return PodName(self.namespace, self.name)

    def state(self, container: str) -> ContainerState:
        """What kubelet says of a container; it waits where kubelet says nothing."""
        return self.states.get(container, ContainerState())


def parse_identity(namespace: str, name: str, uid: str) -> tuple[str, str, PodUid]:
    """Parse a pod's identity, before anything is logged or asked with it.

    Raises:
        ValueError: one of them is no such name.
    """
    return parse_name(namespace), parse_name(name), parse_pod_uid(uid)


def config_map_key(name: str, key: str) -> Reference:
    """`configMapKeyRef`."""
    return Reference(what=f"key {quote(key)} of ConfigMap {quote(name)}")


def secret_key(name: str, key: str) -> Reference:
    """`secretKeyRef`."""
    return Reference(what=f"key {quote(key)} of Secret {quote(name)}")


def resource_field(resource: str) -> Reference:
    """`resourceFieldRef`."""
    return Reference(what=f"resource field {quote(resource)}")


def file_key(volume: str, path: str, key: str) -> Reference:
    """`fileKeyRef`."""
    return Reference(what=f"key {quote(key)} of file {quote(path)} in volume {quote(volume)}")


UNKNOWN_REFERENCE: Final = Reference(what="a kind of source that this plugin does not know")
"""`valueFrom` of a later Kubernetes."""
