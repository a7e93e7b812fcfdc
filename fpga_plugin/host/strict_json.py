"""JSON without what two readers may understand differently: a name that is there twice, or a NaN.

msgspec, which reads everything else here, keeps the last of two equal names and reports no error.
"""

import json
from typing import NoReturn

from fpga_plugin.errors import quote


class RepeatedNameError(ValueError):
    """An object has a name twice.

    Attributes:
        name: quoted.
    """

    def __init__(self, name: str) -> None:
        self.name = quote(name)
        super().__init__(f"key {self.name} is there twice")


class NotANumberError(ValueError):
    """A NaN or an infinity, which JSON lacks."""


def load(text: str, *, numbers_as_text: bool = False) -> object:
    """Read one document.

    Args:
        text: all of it.
        numbers_as_text: leave numbers as they are written.

    Raises:
        RepeatedNameError, NotANumberError: see there.
        json.JSONDecodeError: it is no JSON.
        ValueError: it has an integer of thousands of digits (CPython's limit of int()).
        RecursionError: it is nested too deeply.
    """
    number = str if numbers_as_text else None
    return json.loads(
        text,
        object_pairs_hook=_unique,
        parse_int=number,
        parse_float=number,
        parse_constant=_no_constant,
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for name, value in pairs:
        if name in result:
            raise RepeatedNameError(name)
        result[name] = value
    return result


def _no_constant(name: str) -> NoReturn:
    raise NotANumberError(f"{name} is no JSON")
