"""Reads the manifest of a Pod, or of what makes Pods, as far as devices and variables go.

What the API server would refuse is refused here, in words that say where. What only a cluster
knows (`valueFrom`, `$(VAR)`) is refused for FPGA_* variables, which the demo needs. Other variables
with it are left out.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import yaml

from fpga_plugin.demo.pod import DemoContainer, DemoPod
from fpga_plugin.errors import FpgaPluginError, quote
from fpga_plugin.kubernetes.names import ResourceName

T = TypeVar("T")

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_POD_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?", re.ASCII)
_COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)
_FPGA = "FPGA_"

_TEMPLATES = {
    "Pod": (),
    "PodTemplate": ("template",),
    "ReplicationController": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
"""Where each kind has the Pod that it makes."""

_VERSIONS = {"Pod": "v1", "Job": "batch/v1", "CronJob": "batch/v1"} | dict.fromkeys(
    ("ReplicaSet", "Deployment", "StatefulSet", "DaemonSet"), "apps/v1"
)

_MAX_BYTES = 3 * 512 * 1024
"""The API server takes no larger object (etcd's limit of 1.5 MiB)."""


class ManifestError(FpgaPluginError):
    """The file is no Pod manifest, or one that the API server would refuse."""


@dataclass(frozen=True, slots=True)
class PodManifest:
    """A Pod, and what the demo makes of it.

    Attributes:
        pod: what it asks for.
        restart_policy: as written; kubelet's default is Always.
        notes: what is left out, one sentence each.
    """

    pod: DemoPod
    restart_policy: str
    notes: tuple[str, ...] = ()


def read_manifest(path: str, *prefixes: str) -> PodManifest:
    """Read a Pod from a YAML or JSON file.

    Args:
        path: the file.
        prefixes: domains of the resources that matter (`fpga.intel.com`).

    Raises:
        ManifestError: there is no Pod in it that kubelet would be given.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ManifestError(
            f"{path}: cannot be read: {error.strerror}", hint="--pod takes a file with a Pod"
        ) from error
    if len(text) > _MAX_BYTES:
        raise ManifestError(f"{path}: larger than the API server takes (1.5 MiB)")
    return _Reader(path, *prefixes).manifest(_documents(path, text))


def _documents(path: str, text: bytes) -> list[Any]:
    try:
        return [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = error.problem or error.context or "not understood"
        raise ManifestError(f"{path}{where}: not valid YAML: {problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).partition("\n")[0]
        raise ManifestError(f"{path}: not valid YAML: {first}") from error


class _Reader:
    """One file's way to a `PodManifest`; every message names the file and the field."""

    def __init__(self, path: str, *prefixes: str) -> None:
        self._path = path
        self._prefixes = tuple(f"{prefix}/" for prefix in prefixes)
        self._notes: list[str] = []
        self._claims = False

    def manifest(self, documents: list[Any]) -> PodManifest:
        """The first Pod among the file's documents that asks for an FPGA, else the first one."""
        every = [one for document in documents for one in _items(document)]
        found = [d for d in every if _one_of(d.get("kind"), _TEMPLATES)]
        if not found:
            instead = [quote(d["kind"]) for d in every if "kind" in d]
            if instead:
                raise self._error(
                    f"has no Pod, but {', '.join(instead[:3])}",
                    f"--pod takes one of {', '.join(_TEMPLATES)}",
                )
            raise self._error("has no Pod", "--pod takes a YAML or JSON file with a Pod")
        made = [self._pod(document) for document in found]
        asking = [m for m in made if any(c.devices for c in m.pod.all_containers)]
        if self._claims and not asking:
            raise self._error(
                "the Pod asks by resourceClaims, and the demo plays the device plugin API only",
                "docs/dra.md says how to ask so in a cluster; in the demo ask by resources.limits",
            )
        shown = (asking or made)[0]
        if more := [m.pod.name for m in asking[1:]]:
            note = f"{shown.pod.name} is shown; {', '.join(more[:3])} asks for an FPGA too"
            return replace(shown, notes=(note, *shown.notes))
        return shown

    def _pod(self, document: dict[Any, Any]) -> PodManifest:
        """The Pod that one document is, or makes."""
        self._notes = []
        kind = document["kind"]
        right = _VERSIONS.get(kind, "v1")
        if document.get("apiVersion") != right:
            given = quote(document.get("apiVersion"))
            raise self._error(f"apiVersion is {given}", f"a {kind}'s is {right}")
        metadata = self._mapping(document.get("metadata"), "metadata")
        template, at = document, ""
        for name in _TEMPLATES[kind]:
            template = self._mapping(template.get(name), f"{at}{name}")
            at += f"{name}."
        if at:
            self._notes += _of_many(document)
        spec = self._mapping(template.get("spec"), f"{at}spec")
        init = self._containers(spec.get("initContainers"), f"{at}spec.initContainers")
        app = self._containers(spec.get("containers"), f"{at}spec.containers")
        self._claims = self._claims or bool(spec.get("resourceClaims"))
        if not app:
            raise self._error(f"{at}spec.containers is missing or empty", "a Pod has containers")
        names = [container.name for container in init + app]
        if twice := {name for name in names if names.count(name) > 1}:
            raise self._error(f"the container {quote(min(twice))} is there twice")
        policy = spec.get("restartPolicy") or "Always"
        if not _one_of(policy, ("Always", "OnFailure", "Never")):
            raise self._error(
                f"{at}spec.restartPolicy is {quote(policy)}", "it is Always, OnFailure or Never"
            )
        pod = DemoPod(
            name=self._pod_name(metadata),
            namespace=self._name(metadata.get("namespace") or "default", "metadata.namespace"),
            init_containers=init,
            containers=app,
        )
        return PodManifest(pod, policy, tuple(self._notes))

    def _error(self, problem: str, hint: str = "") -> ManifestError:
        return ManifestError(f"{self._path}: {problem}", hint=hint)

    def _mapping(self, value: Any, where: str) -> dict[Any, Any]:
        return self._of_type(dict, value, where)

    def _of_type(self, kind: type[T], value: Any, where: str) -> T:
        """The value; an empty one where there is none."""
        if value is None:
            return kind()
        if not isinstance(value, kind):
            raise self._error(f"{where} is {_kind(value)}, not {_KINDS[kind]}")
        return value

    def _name(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise self._error(
                f"{where} is {quote(value)}",
                "a name has a-z, 0-9 and -, at most 63 of them; write numbers in quotes",
            )
        return value

    def _pod_name(self, metadata: Mapping[Any, Any]) -> str:
        name = metadata.get("name")
        if name is None and isinstance(generate := metadata.get("generateName"), str):
            name = f"{generate}demo"
        if not isinstance(name, str) or not _POD_NAME.fullmatch(name):
            what = "is missing" if name is None else f"is {quote(name)}"
            raise self._error(f"metadata.name {what}", "a Pod's name has a-z, 0-9, - and .")
        return name

    def _containers(self, value: Any, where: str) -> tuple[DemoContainer, ...]:
        containers = []
        for index, item in enumerate(self._of_type(list, value, where)):
            at = f"{where}[{index}]"
            spec = self._mapping(item, at)
            restart = spec.get("restartPolicy")
            containers.append(
                DemoContainer(
                    name=self._name(spec.get("name"), f"{at}.name"),
                    devices=self._devices(spec.get("resources"), f"{at}.resources"),
                    env=self._env(spec, at),
                    restartable=restart == "Always" and where.endswith("initContainers"),
                )
            )
        return tuple(containers)

    def _devices(self, value: Any, where: str) -> dict[ResourceName, int]:
        resources = self._mapping(value, where)
        limits = self._counts(resources.get("limits"), f"{where}.limits")
        requests = self._counts(resources.get("requests"), f"{where}.requests")
        for resource, count in requests.items():
            if resource not in limits:
                raise self._error(
                    f"{where}.requests has {resource}, {where}.limits does not",
                    "limits must be set for extended resources; requests may be left out",
                )
            if limits[resource] != count:
                raise self._error(
                    f"{where}: requests and limits of {resource} differ",
                    "they must be equal for extended resources; requests may be left out",
                )
        return {resource: count for resource, count in limits.items() if count}

    def _counts(self, value: Any, where: str) -> dict[ResourceName, int]:
        counts = {}
        for name, quantity in self._mapping(value, where).items():
            if not isinstance(name, str) or not name.startswith(self._prefixes):
                continue
            text = str(quantity)
            if isinstance(quantity, bool) or not _COUNT.fullmatch(text):
                raise self._error(
                    f"{where}: {quote(name)} is {quote(quantity)}",
                    "devices are counted in whole numbers",
                )
            counts[ResourceName(name)] = int(text)
        return counts

    def _env(self, spec: Mapping[Any, Any], where: str) -> dict[str, str]:
        if spec.get("envFrom"):
            self._notes.append(f"{where}.envFrom is left out: the demo has no cluster to ask")
        variables = spec.get("env")
        if isinstance(variables, dict):
            # The KEP's own example is written so; the API server wants the list.
            variables = [{"name": name, "value": value} for name, value in variables.items()]
        env: dict[str, str] = {}
        for index, item in enumerate(self._of_type(list, variables, f"{where}.env")):
            at = f"{where}.env[{index}]"
            variable = self._mapping(item, at)
            name, value = variable.get("name"), variable.get("value")
            if not isinstance(name, str) or not name or "=" in name or not name.isprintable():
                raise self._error(f"{at}.name is {quote(name)}", "a variable needs a name")
            needed = name.startswith(_FPGA)
            if variable.get("valueFrom") is not None:
                if needed:
                    raise self._error(
                        f"{at}: {quote(name)} has valueFrom, and the demo has no cluster to ask",
                        "write its value for the demo",
                    )
                self._notes.append(f"{at}: {quote(name)} is left out: it has valueFrom")
                continue
            if not isinstance(value, str | None):
                raise self._error(
                    f"{at}: the value of {quote(name)} is {_kind(value)}, not a string",
                    "write it in quotes",
                )
            if needed and value and "$(" in value:
                raise self._error(
                    f"{at}: {quote(name)} refers to other variables, which the demo does not do",
                    "write its value for the demo",
                )
            env[name] = value or ""
        return env


def _items(document: Any) -> list[dict[Any, Any]]:
    """A document, or those of a List."""
    if not isinstance(document, dict):
        return []
    if document.get("kind") == "List" and isinstance(items := document.get("items"), list):
        return [item for item in items if isinstance(item, dict)]
    return [document]


def _one_of(value: Any, names: Collection[str]) -> bool:
    """Whether it is one of these words; a mapping or a list, which cannot be looked up, is none."""
    return isinstance(value, str) and value in names


def _of_many(document: Mapping[Any, Any]) -> list[str]:
    """That one of several Pods is shown."""
    spec = document.get("spec")
    count = spec.get("replicas", spec.get("parallelism")) if isinstance(spec, dict) else None
    several = isinstance(count, int) and not isinstance(count, bool) and count > 1
    return [f"one of its {count} Pods is shown"] if several else []


_KINDS: dict[type, str] = {
    type(None): "nothing",
    bool: "a boolean",
    str: "a string",
    list: "a list",
    dict: "a mapping",
}


def _kind(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"the number {quote(value)}"
    return _KINDS.get(type(value), f"a {type(value).__name__}")
