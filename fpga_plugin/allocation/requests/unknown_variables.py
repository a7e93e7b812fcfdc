"""FPGA_* variables that mean nothing: most are misspelt, and their container gets a blank FPGA.

A variable without effect is no error of the plugin's, but whoever wrote it expects one. So it is
told, with the name that was probably meant.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fpga_plugin.allocation.requests.parse import (
    REQUEST_PREFIXES,
    FpgaRequest,
    parse_requests,
)
from fpga_plugin.errors import MAX_QUOTED, InvalidRequestError, quote
from fpga_plugin.settings.service_links import is_service_link

PREFIX: Final = "FPGA_"

KNOWN_PREFIXES: Final = (
    *REQUEST_PREFIXES,
    *("FPGA_DEVICE", "FPGA_FUNCTIONS", "FPGA_REQUEST", "FPGA_PLUGIN_"),
)
"""What names with a meaning begin with: requests, what Allocate answers, what DRA adds, the
plugin's own settings."""

_MAX_TOLD: Final = 8
"""Unknown variables of a container that are named."""

_ALIKE: Final = 0.6
"""How much two names have in common that may be mistaken for each other; difflib's own measure."""


@dataclass(frozen=True, slots=True)
class UnknownVariable:
    """One variable without effect.

    Attributes:
        name: as it may be shown: printable, in quotes, at most 64 characters.
        meant: the known name that is nearest; empty: none is near.
    """

    name: str
    meant: str

    def __str__(self) -> str:
        return f"{self.name} (did you mean {self.meant}?)" if self.meant else self.name


def unknown_variables(env: Mapping[str, str]) -> tuple[tuple[UnknownVariable, ...], int]:
    """The first few of a container's variables that mean nothing, in order; and how many there are.

    `env`: all its variables, or those that begin with FPGA_.
    """
    names = sorted(
        name
        for name, value in env.items()
        if name.startswith(PREFIX)
        and not name.startswith(KNOWN_PREFIXES)
        and not is_service_link(name, value, prefix=PREFIX)
    )
    first = (UnknownVariable(quote(name), _meant(name)) for name in names[:_MAX_TOLD])
    return tuple(first), len(names)


def requests_in(env: Mapping[str, str]) -> tuple[FpgaRequest, ...]:
    """What a container asks for; `env` as for `unknown_variables`.

    Raises:
        InvalidRequestError: as `parse_requests`; where a variable is missing, the hint names those
            that were probably meant to be it.
    """
    try:
        return parse_requests(env)
    except InvalidRequestError as error:
        near = [
            str(one)
            for one in unknown_variables(env)[0]
            if one.meant and one.meant in error.message
        ]
        if not near:
            raise
        hint = f"{', '.join(near)} has no effect; {error.hint}"
        raise InvalidRequestError(error.message, hint=hint, asked=error.asked) from None


def _meant(name: str) -> str:
    """The request variable that a name resembles most: FPGA_REGION_1 for FPGA_REGON1."""
    import difflib  # needed for a mistake only; costs 5 ms

    if len(name) > MAX_QUOTED:
        return ""
    bare = name.removeprefix(PREFIX)
    digits = len(bare) - len(bare.rstrip("0123456789"))
    stem, _, word = bare.rpartition("_")
    # A suffix is a number, with or without its underscore, or the word after the last underscore.
    readings = {(bare[: len(bare) - digits].rstrip("_"), bare[len(bare) - digits :])}
    if stem and re.fullmatch(r"[A-Za-z0-9]+", word, re.ASCII):
        readings.add((stem, word))
    best, meant = _ALIKE, ""
    for kind in REQUEST_PREFIXES:
        for stem, suffix in sorted(readings):
            alike = difflib.SequenceMatcher(
                None, stem.upper(), kind.removeprefix(PREFIX).rstrip("_")
            ).ratio()
            if alike > best:
                best, meant = alike, f"{kind}{suffix or '1'}"
    return meant
