"""A container's FPGA_* request variables, made of its pod's spec by kubelet's own rules.

A stock kubelet computes the environment after PreStart, so it has to be computed here (pkg/kubelet,
makeEnvironmentVariables; third_party/forked/golang/expansion): variables in order, a later one of
the same name overrides, `$(NAME)` stands for what is defined so far, `$$` for `$`, a reference is
looked at only where the value is empty.

What lies in Secrets, ConfigMaps and files is not read: that would take the right to read every
tenant's secrets. A variable made of it is known to exist and its value is not; this matters, and is
refused, only where a request variable is made of it. Of `envFrom` not even the names are known. A
container that names requests in `env` is served by these; one that names none, and whose `envFrom`
may hide some, is refused rather than handed a blank region in silence.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from fpga_plugin.allocation.requests.parse import REQUEST_PREFIXES, FpgaRequest
from fpga_plugin.allocation.requests.unknown_variables import PREFIX, requests_in
from fpga_plugin.errors import InvalidRequestError, quote
from fpga_plugin.kubernetes.pod import Container, Pod, Variable

_REFERENCE: Final = re.compile(r"\$(?:\$|\(([^)]*)\))")
"""An escaped `$`, or a reference and its name."""

_SUBSCRIPT: Final = re.compile(r"metadata\.(labels|annotations)\['(.*)'\]", re.DOTALL)

_LONGEST: Final = 4096
"""Characters of a value. No request variable needs as many, and values made of each other grow
without bound: ten of ten of ten."""

_LONGEST_ALL: Final = 4 << 20
"""Characters of all values of a container. The kernel starts nothing with as many (execve(2))."""


@dataclass(frozen=True, slots=True)
class ContainerRequests:
    """What one container asks for, or why that cannot be served.

    Attributes:
        name: of the container.
        passes_on: a plain init container: others may have its devices after it.
        env: its FPGA_* variables, those that mean nothing among them; only names count of these.
        volatile: a label or annotation is in a request: these may change while the pod lives.
        requests: what they ask for.
        wrong: message, hint and `asked` of the error that its variables are; None: there is none.
    """

    name: str
    passes_on: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    volatile: bool = False
    requests: tuple[FpgaRequest, ...] = ()
    wrong: tuple[str, str, str] | None = None

    def same(self, other: "ContainerRequests") -> bool:
        """Whether it makes no difference which of the two starts."""
        return (self.requests, self.wrong) == (other.requests, other.wrong)

    def check(self) -> None:
        """Raises InvalidRequestError where its variables are wrong."""
        if self.wrong is not None:
            message, hint, asked = self.wrong
            raise InvalidRequestError(message, hint=hint, asked=asked)


@dataclass(frozen=True, slots=True)
class _Value:
    """A variable's value.

    Attributes:
        text: the value, if `unknown` is empty.
        unknown: why it is not known.
        volatile: see `ContainerRequests`.
    """

    text: str = ""
    unknown: str = ""
    volatile: bool = False


def container_requests(pod: Pod) -> tuple[tuple[ContainerRequests, ...], bool]:
    """What each container of a pod asks for, in the order of their starts.

    And whether that lasts as long as the pod: not where a label or annotation is in it, which may
    change, nor in a static pod, whose whole spec may.
    """
    found = []
    lasting = not pod.static
    for container in (*pod.init, *pod.containers):
        asks = ContainerRequests(container.name)
        try:
            asks = request_variables(pod, container)
            asks = replace(asks, requests=requests_in(asks.env))
        except InvalidRequestError as error:
            asks = replace(asks, wrong=(error.message, error.hint, error.asked))
        lasting = lasting and not asks.volatile
        passes_on = container in pod.init and not container.restartable
        found.append(replace(asks, passes_on=passes_on))
    return tuple(found), lasting


def request_variables(pod: Pod, container: Container) -> ContainerRequests:
    """The request variables with which kubelet will start a container, not parsed yet.

    Raises:
        InvalidRequestError: one of them, or whether there are any, cannot be known here.
    """
    values: dict[str, _Value] = {}
    length = 0
    for variable in container.env:
        value = values[variable.name] = _value(pod, variable, values)
        length += len(value.text)
        if length > _LONGEST_ALL:
            raise InvalidRequestError(
                f"the variables of container {container.name} have more than {_LONGEST_ALL}"
                " characters together",
                hint="leave out what makes them so long",
            )
    requests = {n: value for n, value in values.items() if n.startswith(REQUEST_PREFIXES)}
    for name, value in requests.items():
        if value.unknown:
            raise InvalidRequestError(
                f"variable {quote(name)} of container {container.name} comes from {value.unknown}",
                hint="write the value itself into the pod's spec",
            )
    if not requests and any(_may_hide(prefix) for prefix in container.env_from):
        raise InvalidRequestError(
            f"container {container.name} names no FPGA_REGION_<n> in env, and takes variables from"
            " a ConfigMap or Secret (envFrom), which is not read",
            hint="write the FPGA_* variables into env",
        )
    return ContainerRequests(
        container.name,
        env={name: value.text for name, value in values.items() if name.startswith(PREFIX)},
        volatile=any(value.volatile for value in requests.values()),
    )


def _may_hide(prefix: str) -> bool:
    """Whether `envFrom` with this prefix can define a request variable."""
    return any(kind.startswith(prefix) or prefix.startswith(kind) for kind in REQUEST_PREFIXES)


def _value(pod: Pod, variable: Variable, so_far: Mapping[str, _Value]) -> _Value:
    if variable.value or variable.source is None:
        return _expand(variable.value, so_far)
    if not variable.source.field:
        return _Value(unknown=f"{variable.source.what}, which is not read")
    return _field(pod, variable.source.field)


def _field(pod: Pod, path: str) -> _Value:
    """A field of the pod, as `fieldRef` gives it."""
    if match := _SUBSCRIPT.fullmatch(path):
        source = pod.labels if match[1] == "labels" else pod.annotations
        return _Value(source.get(match[2], ""), volatile=True)
    fields = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "metadata.uid": pod.uid,
        "spec.nodeName": pod.node,
        "spec.host": pod.node,  # its name in old manifests
        "spec.serviceAccountName": pod.service_account,
    }
    if path in fields:
        return _Value(fields[path])
    what = f"field {quote(path)}, which kubelet knows only when the container starts"
    return _Value(unknown=what)


def _expand(text: str, so_far: Mapping[str, _Value]) -> _Value:
    """Replace `$(NAME)`; what is replaced is not expanded again."""
    parts: list[str] = []
    at = length = 0
    volatile = False
    closed = text.rfind(")") + 1  # a reference that begins later is none
    for found in _REFERENCE.finditer(text, 0, closed):
        name = found[1]
        value = _Value("$") if name is None else so_far.get(name)
        if value is None:
            # Kubelet may have it, from envFrom or as a variable of a Service; else it stays as it
            # is, which is no value of a request variable either.
            what = quote(f"$({name[:_LONGEST]})")
            return _Value(unknown=f"{what}, which env does not define before it")
        if value.unknown:
            return value
        parts += text[at : found.start()], value.text
        volatile = volatile or value.volatile
        at = found.end()
        length += len(parts[-2]) + len(parts[-1])
        if length > _LONGEST:
            break
    result = "".join((*parts, text[at:closed], text[closed:].replace("$$", "$")))
    if len(result) > _LONGEST:
        return _Value(unknown=f"a value of more than {_LONGEST} characters")
    return _Value(result, volatile=volatile)
