"""Whether a decoded message has the types that its definition promises.

betterproto2 takes a field as the wire has it: a number where the definition says text, or a group
where it says a number. Whatever is behind the edge relies on the types, so the edge checks them.
"""

import dataclasses
import functools
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {"string": str, "bytes": bytes}
_NUMBERS = (int, float)
"""What all other kinds of fields are: integers of any size, truths, enumerations, floats."""


def well_typed(message: Any) -> bool:
    """Whether every field of a message, and of those in it, has a value of its type."""
    # mypy takes a type's __hash__ for that of its instances
    for name, kind, absent, parts in _fields(type(message)):  # type: ignore[arg-type]
        value = getattr(message, name)
        if parts:
            if not all(_fits(parts[0], k) and _fits(parts[1], v) for k, v in value.items()):
                return False
        elif type(value) is list:
            if not all(_fits(kind, each) for each in value):
                return False
        elif not (_fits(kind, value) or (value is None and absent)):
            return False
    return True


def _fits(kind: str, value: Any) -> bool:
    if kind == "message":
        return dataclasses.is_dataclass(value) and well_typed(value)
    return isinstance(value, _TYPES.get(kind, _NUMBERS))


@functools.cache
def _fields(message_type: type[object]) -> tuple[tuple[str, str, bool, tuple[str, ...]], ...]:
    """Each field's name and kind, whether it may be None, of a map the kinds of its two parts."""
    found = []
    for field in dataclasses.fields(message_type):  # type: ignore[arg-type]  # generated: a dataclass
        if (known := field.metadata.get("betterproto")) is not None:
            parts = tuple(part.proto_type for part in known.map_meta or ())
            absent = known.optional or known.proto_type == "message"
            found.append((field.name, known.proto_type, absent, parts))
    return tuple(found)
