"""From the bytes of a policy file to a `Policy`, strictly: what is not understood is refused.

PyYAML is imported for it, so this module is imported only where there is a policy.
"""

import re
from collections.abc import Callable, Iterable
from typing import Final, Literal, TypeVar

import msgspec

from fpga_plugin.errors import FpgaPluginError, quote
from fpga_plugin.host.strict_yaml import one_line, structured
from fpga_plugin.ids import BitstreamId, ResourceKind, parse_bitstream_id, parse_interface_id
from fpga_plugin.policy.rules import Action, Policy, Rule, parse_pattern

MAX_RULES: Final = 500
MAX_ENTRIES: Final = 1000
"""In one list of one rule."""

BLANK: Final = "blank"
"""In `bitstreams`: devices without a bitstream."""

_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_HELP: Final = "docs/policy.md describes the file"

T = TypeVar("T")


class PolicyError(FpgaPluginError):
    """A policy file cannot be read or is wrong; the message says where."""


class _Rule(msgspec.Struct, forbid_unknown_fields=True):
    """A rule as it is written."""

    name: str
    action: Literal["allow", "deny"]
    namespaces: list[str] | None = None
    interfaces: list[str] | None = None
    bitstreams: list[str] | None = None
    devices: list[Literal["region", "whole", "af"]] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A policy as it is written."""

    version: Literal["1"]
    default: Literal["allow", "deny"]
    rules: list[_Rule] = []


# Made at import: see kubernetes/kubelet/checkpoint.py.
_FILE: Final = msgspec.json.Decoder(_File)


def parse_policy(raw: bytes, *, as_json: bool = False) -> Policy:
    """Read a policy.

    Args:
        raw: the file's bytes.
        as_json: JSON; else YAML.

    Raises:
        PolicyError: it is too large, no YAML or JSON, or says something that is not understood.
    """
    try:
        return _policy(structured(raw, _FILE, as_json=as_json))
    except ValueError as error:
        raise PolicyError(one_line(str(error)), hint=_HELP) from error


def _policy(file: _File) -> Policy:
    if len(file.rules) > MAX_RULES:
        raise ValueError(f"more than {MAX_RULES} rules")
    rules: dict[str, Rule] = {}
    for number, written in enumerate(file.rules, 1):
        if not _NAME.fullmatch(written.name):
            raise ValueError(
                f"rule {number}: {quote(written.name)} is no name (at most 63 letters, digits,"
                " '.', '_', '-')"
            )
        if written.name in rules:
            raise ValueError(f"rule {number}: there is another rule {written.name}")
        try:
            rules[written.name] = _rule(written)
        except ValueError as error:
            raise ValueError(f"rule {written.name}: {error}") from None
    return Policy(Action(file.default), tuple(rules.values()))


def _rule(written: _Rule) -> Rule:
    namespaces = _entries("namespaces", written.namespaces, parse_pattern)
    interfaces = _entries("interfaces", written.interfaces, parse_interface_id)
    bitstreams = _entries("bitstreams", written.bitstreams, _parse_bitstream)
    devices = _entries("devices", written.devices, ResourceKind)
    return Rule(
        name=written.name,
        action=Action(written.action),
        namespaces=namespaces,
        interfaces=_set(interfaces),
        bitstreams=_set(bitstreams),
        devices=_set(devices),
    )


def _parse_bitstream(text: str) -> BitstreamId | None:
    return None if text == BLANK else parse_bitstream_id(text)


def _entries(
    key: str, entries: Iterable[str] | None, parse: Callable[[str], T]
) -> tuple[T, ...] | None:
    if entries is None:
        return None
    parsed = []
    for entry in entries:
        try:
            parsed.append(parse(entry))
        except ValueError as error:
            raise ValueError(f"{key}: {quote(entry)}: {error}") from None
    if not parsed:
        raise ValueError(f"{key} is empty, which matches nothing; leave it out to match everything")
    if len(parsed) > MAX_ENTRIES:
        raise ValueError(f"{key} has more than {MAX_ENTRIES} entries")
    return tuple(dict.fromkeys(parsed))


def _set(entries: tuple[T, ...] | None) -> frozenset[T] | None:
    return None if entries is None else frozenset(entries)
