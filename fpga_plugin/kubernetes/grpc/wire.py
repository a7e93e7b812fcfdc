"""Whether a decoded message has the types that its definition promises.

betterproto2 accepts a field as the wire has it: a number where the definition says text, a group
where it says a number, and a whole list for a single number whose record is written as a packed
list is. The code behind the edge relies on the types, so the edge checks them.
"""

import dataclasses
import functools
from typing import Any, Final, TypeVar

M = TypeVar("M")

_TYPES: Final[dict[str, type | tuple[type, ...]]] = {"string": str, "bytes": bytes}
_NUMBERS: Final = (int, float)
"""What all other kinds of fields are: integers of any size, truths, enumerations, floats."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """A field as its definition has it; `parts`: of a map, the kinds of its keys and values."""

    name: str
    kind: str
    repeated: bool
    optional: bool
    parts: tuple[str, ...]

    def fits(self, value: Any) -> bool:
        """Whether a value is of the field's type."""
        if self.parts:
            key, content = self.parts
            return isinstance(value, dict) and all(
                _fits(key, k) and _fits(content, v) for k, v in value.items()
            )
        if self.repeated:
            return isinstance(value, list) and all(_fits(self.kind, each) for each in value)
        return _fits(self.kind, value) or (value is None and self.optional)


def typed(message: M) -> M:
    """The message itself, whose fields have the types of its definition.

    Raises:
        ValueError: one has not.
    """
    if not well_typed(message):
        raise ValueError("a field is of another type")
    return message


def well_typed(message: Any) -> bool:
    """Whether every field of a message, and of those in it, has a value of its type."""
    # mypy takes a type's __hash__ for that of its instances
    fields = _fields(type(message))  # type: ignore[arg-type]
    return all(field.fits(getattr(message, field.name)) for field in fields)


def _fits(kind: str, value: Any) -> bool:
    if kind == "message":
        return dataclasses.is_dataclass(value) and well_typed(value)
    return isinstance(value, _TYPES.get(kind, _NUMBERS))


@functools.cache
def _fields(message_type: type[object]) -> tuple[_Field, ...]:
    return tuple(
        _Field(
            name=field.name,
            kind=known.proto_type,
            repeated=known.repeated,
            optional=known.optional or known.proto_type == "message",
            parts=tuple(part.proto_type for part in known.map_meta or ()),
        )
        for field in dataclasses.fields(message_type)  # type: ignore[arg-type]  # generated: a dataclass
        if (known := field.metadata.get("betterproto")) is not None
    )
