"""From the bytes of a workloads file to `Workloads`, strictly: what is not understood is refused.

PyYAML is imported for it, so this module is imported only where there is such a file.
"""

import re
from collections.abc import Callable
from typing import Final, Literal, TypeVar

import msgspec

from fpga_plugin.errors import FpgaPluginError, quote
from fpga_plugin.hardware.grant import Mount
from fpga_plugin.ids import parse_interface_id
from fpga_plugin.operator_files.strict import one_line, structured
from fpga_plugin.workloads.paths import (
    NOTHING,
    Guarded,
    check_container_path,
    check_host_path,
    check_node,
)
from fpga_plugin.workloads.rules import Extras, Workload, Workloads

MAX_ENTRIES: Final = 100
MAX_ITEMS: Final = 50
"""In one list of one entry."""
MAX_VALUE: Final = 4096
"""Characters of a variable's value."""

_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_VALUE: Final = re.compile(r"[ -~]*", re.ASCII)
_RESOURCE: Final = re.compile(r"(region|fpga|af)-[A-Za-z0-9]([A-Za-z0-9._-]{0,60}[A-Za-z0-9_])?")
_OURS: Final = "FPGA_"
_HELP: Final = "docs/workloads.md describes the file"

T = TypeVar("T")


class WorkloadsError(FpgaPluginError):
    """A workloads file cannot be read or is wrong; the message says where."""


class _Mount(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A mount as it is written."""

    host_path: str
    container_path: str | None = None
    read_only: Literal["true", "false"] | bool = True


class _Workload(msgspec.Struct, forbid_unknown_fields=True):
    """An entry as it is written."""

    name: str
    resources: list[str] | None = None
    interfaces: list[str] | None = None
    mounts: list[_Mount] = []
    env: dict[str, str] = {}
    devices: list[str] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The file as it is written."""

    version: Literal["1"]
    workloads: list[_Workload]


# Made at import: see pods/checkpoint.py.
_FILE: Final = msgspec.json.Decoder(_File)


def parse_workloads(raw: bytes, *, as_json: bool = False, guarded: Guarded = NOTHING) -> Workloads:
    """Read a workloads file.

    Args:
        raw: the file's bytes.
        as_json: JSON; else YAML.
        guarded: directories of the plugin and of kubelet.

    Raises:
        WorkloadsError: it is too large, no YAML or JSON, or says something that is not understood
            or must not be.
    """
    try:
        return _workloads(structured(raw, _FILE, as_json=as_json), guarded)
    except ValueError as error:
        raise WorkloadsError(one_line(str(error)), hint=_HELP) from error


def _workloads(file: _File, guarded: Guarded) -> Workloads:
    if len(file.workloads) > MAX_ENTRIES:
        raise ValueError(f"more than {MAX_ENTRIES} workloads")
    entries: dict[str, Workload] = {}
    for number, written in enumerate(file.workloads, 1):
        if not _NAME.fullmatch(written.name):
            raise ValueError(
                f"workload {number}: {quote(written.name)} is no name (at most 63 letters, digits,"
                " '.', '_', '-')"
            )
        if written.name in entries:
            raise ValueError(f"workload {number}: there is another workload {written.name}")
        try:
            entry = _workload(written, guarded)
            for other in entries.values():
                _check_pair(entry, other)
        except ValueError as error:
            raise ValueError(f"workload {written.name}: {error}") from None
        entries[written.name] = entry
    return Workloads(tuple(entries.values()))


def _workload(written: _Workload, guarded: Guarded) -> Workload:
    resources = _some("resources", written.resources, _parse_resource)
    interfaces = _some("interfaces", written.interfaces, parse_interface_id)
    mounts = tuple(_mount(mount, guarded) for mount in _few("mounts", written.mounts))
    places = [mount.container_path for mount in mounts]
    if twice := sorted({place for place in places if places.count(place) > 1}):
        raise ValueError(f"mounts: two of them at {twice[0]}")
    for name, value in _few("env", written.env).items():
        _check_variable(name, value)
    extras = Extras(mounts, dict(written.env), _each("devices", written.devices, check_node))
    if not (extras.mounts or extras.env or extras.nodes):
        raise ValueError("adds nothing: it has no mounts, no env and no devices")
    return Workload(name=written.name, resources=resources, interfaces=interfaces, extras=extras)


def _parse_resource(text: str) -> str:
    if not _RESOURCE.fullmatch(text):
        raise ValueError("not region-..., fpga-... or af-..., the name without its domain")
    return text


def _mount(written: _Mount, guarded: Guarded) -> Mount:
    read_only = written.read_only in {True, "true"}
    place = written.host_path if written.container_path is None else written.container_path
    try:
        host_path = check_host_path(written.host_path, read_only=read_only, guarded=guarded)
    except ValueError as error:
        raise ValueError(f"mounts: hostPath {quote(written.host_path)}: {error}") from None
    try:
        return Mount(host_path, check_container_path(place), read_only)
    except ValueError as error:
        raise ValueError(f"mounts: containerPath {quote(place)}: {error}") from None


def _check_variable(name: str, value: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"env: {quote(name)} is no name of a variable")
    if name.upper().startswith(_OURS):
        raise ValueError(f"env: {quote(name)}: {_OURS}* are the pod's and the plugin's own")
    if len(value) > MAX_VALUE or not _VALUE.fullmatch(value):
        raise ValueError(f"env: {name} is no line of at most {MAX_VALUE} ASCII characters")


def _check_pair(entry: Workload, other: Workload) -> None:
    """Whether what two entries add to one container can be there together.

    Raises:
        ValueError: it cannot.
    """
    if not entry.meets(other):
        return
    theirs = {mount.container_path: mount for mount in other.extras.mounts}
    for mount in entry.extras.mounts:
        if theirs.get(mount.container_path, mount) != mount:
            raise ValueError(f"mounts something else at {mount.container_path} than {other.name}")
    for name, value in entry.extras.env.items():
        if other.extras.env.get(name, value) != value:
            raise ValueError(f"sets {name} to something else than {other.name}")


def _some(key: str, entries: list[str] | None, parse: Callable[[str], T]) -> frozenset[T] | None:
    if entries is None:
        return None
    if not entries:
        raise ValueError(f"{key} is empty, which matches nothing; leave it out to match everything")
    return frozenset(_each(key, entries, parse))


def _each(key: str, entries: list[str], parse: Callable[[str], T]) -> tuple[T, ...]:
    parsed = []
    for entry in _few(key, entries):
        try:
            parsed.append(parse(entry))
        except ValueError as error:
            raise ValueError(f"{key}: {quote(entry)}: {error}") from None
    return tuple(dict.fromkeys(parsed))


Items = TypeVar("Items", list[str], list[_Mount], dict[str, str])


def _few(key: str, items: Items) -> Items:
    if len(items) > MAX_ITEMS:
        raise ValueError(f"{key} has more than {MAX_ITEMS} entries")
    return items
