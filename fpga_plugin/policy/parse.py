"""From the bytes of a policy file to a `Policy`, strictly: what is not understood is refused.

All scalars of the YAML are read as text. Ids of digits only, and namespaces called `on` or `1e3`,
therefore mean what they say, which YAML's own types would not let them. A key that is there twice,
an unknown key and a reference (`*anchor`, which can make a small file a huge policy) are errors.

PyYAML is imported here, so this module is imported only where there is a policy.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NoReturn, TypeVar

import msgspec
import yaml

from fpga_plugin.errors import FpgaPluginError, quote
from fpga_plugin.ids import BitstreamId, ResourceKind, parse_bitstream_id, parse_interface_id
from fpga_plugin.policy.rules import Action, Policy, Rule, parse_pattern

MAX_BYTES: Final = 256 * 1024
"""Of a policy file; a ConfigMap has at most 1 MiB, and a rule takes about 200 bytes."""

MAX_RULES: Final = 500
MAX_ENTRIES: Final = 1000
"""In one list of one rule."""
_MAX_DEPTH: Final = 8

BLANK: Final = "blank"
"""In `bitstreams`: devices without a bitstream."""

_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_HELP: Final = "docs/policy.md describes the file"

T = TypeVar("T")

# The C parser where libyaml is there (as in all wheels): thirty times faster.
_Base: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


class PolicyError(FpgaPluginError):
    """A policy file cannot be read or is wrong; the message says where."""


class _Loader(_Base):  # type: ignore[misc]  # the base is chosen where the module is imported
    """Text everywhere, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:  # noqa: ARG002, FBT001, FBT002  # PyYAML's
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                _wrong_at(key.start_mark, "a key that is no text")
            if key.value in keys:
                _wrong_at(key.start_mark, f"key {quote(key.value)} is there twice")
            keys.add(key.value)
        return dict(super().construct_mapping(node, deep=True))


def _wrong_at(mark: Any, what: str) -> NoReturn:
    raise ValueError(f"line {mark.line + 1}: {what}")


class _Rule(msgspec.Struct, forbid_unknown_fields=True):
    """A rule as it is written."""

    name: str
    action: Literal["allow", "deny"]
    namespaces: list[str] | None = None
    interfaces: list[str] | None = None
    bitstreams: list[str] | None = None
    devices: list[Literal["region", "whole"]] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A policy as it is written."""

    version: Literal["1"]
    default: Literal["allow", "deny"]
    rules: list[_Rule] = []


def parse_policy(raw: bytes, *, as_json: bool = False) -> Policy:
    """Read a policy.

    Args:
        raw: the file's bytes.
        as_json: JSON; else YAML.

    Raises:
        PolicyError: it is too large, no YAML or JSON, or says something that is not understood.
    """
    if len(raw) > MAX_BYTES:
        raise PolicyError(f"the policy has more than {MAX_BYTES} bytes", hint=_HELP)
    try:
        text = raw.decode()
        data = _load_json(text) if as_json else _load_yaml(text)
        if data in (None, ""):
            raise PolicyError("the file is empty", hint=_HELP)
        return _policy(msgspec.convert(data, _File))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "no YAML"
        raise PolicyError(f"{where}{quote(problem)}", hint=_HELP) from error
    except UnicodeDecodeError as error:
        raise PolicyError("it is not UTF-8 text", hint=_HELP) from error
    except RecursionError as error:
        raise PolicyError("it is nested too deeply", hint=_HELP) from error
    except msgspec.ValidationError as error:
        raise PolicyError(_bounded(str(error)), hint=_HELP) from error
    except ValueError as error:
        raise PolicyError(_bounded(str(error)), hint=_HELP) from error


def _bounded(text: str) -> str:
    """Msgspec quotes whole keys; a message is one line of what can be printed."""
    shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:300])
    return shown + ("..." if len(text) > len(shown) else "")


def _load_yaml(text: str) -> object:
    depth = documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            _wrong_at(event.start_mark, "references (*) are not supported")
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            _wrong_at(event.start_mark, "a second document")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            _wrong_at(event.start_mark, "nested too deeply")
    return yaml.load(text, Loader=_Loader)  # noqa: S506  # of CBaseLoader: it makes text only


def _load_json(text: str) -> object:
    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(items)
        if len(result) != len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"key {quote(twice)} is there twice")
        return result

    return json.loads(text, object_pairs_hook=pairs, parse_int=str)


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
