"""From the bytes of an operator's file to its structure: what is not understood is refused.

All scalars of the YAML are read as text. Ids of digits only, and namespaces called `on` or `1e3`,
therefore mean what they say, which YAML's own types would not let them. A key that is there twice,
an unknown key and a reference (`*anchor`, which can make a small file huge) are errors.

PyYAML is imported here, so this module is imported only where there is such a file.
"""

from typing import Any, Final, NoReturn, TypeVar

import msgspec
import yaml

from fpga_plugin.errors import quote
from fpga_plugin.host import strict_json

MAX_BYTES: Final = 256 * 1024
"""Of a file; a ConfigMap has at most 1 MiB, and a rule of a policy takes about 200 bytes."""

_MAX_DEPTH: Final = 8

T = TypeVar("T")

# The C parser where libyaml is there (as in all wheels): thirty times faster.
_Base: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


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


def structured(raw: bytes, decoder: msgspec.json.Decoder[T], *, as_json: bool) -> T:
    """Read a file.

    Args:
        raw: its bytes.
        decoder: of what it may say; made at import (kubernetes/kubelet/checkpoint.py says why).
        as_json: JSON; else YAML.

    Raises:
        ValueError: it is too large, no YAML or JSON, or says something that is not understood. The
            text is one line that can be printed.
    """
    if len(raw) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    try:
        return decoder.decode(msgspec.json.encode(_load(raw.decode(), as_json=as_json)))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "no YAML"
        raise ValueError(f"{where}{quote(problem)}") from error
    except UnicodeError as error:
        raise ValueError("it is not UTF-8 text") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:  # msgspec's own among them
        raise ValueError(one_line(str(error))) from error


def one_line(text: str) -> str:
    """Msgspec quotes whole keys; a message is one line of what can be printed."""
    shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:300])
    return shown + ("..." if len(text) > len(shown) else "")


def _load(text: str, *, as_json: bool) -> object:
    data = strict_json.load(text, numbers_as_text=True) if as_json else _load_yaml(text)
    if data in (None, ""):
        raise ValueError("the file is empty")
    return data


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
