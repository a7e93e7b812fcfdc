"""What a target is."""

from collections.abc import Callable
from typing import NamedTuple


class Target(NamedTuple):
    """A reader under test.

    Attributes:
        run: takes any bytes and returns; any other error than the reader's documented one, a hang,
            or memory beyond the limit of the run is a finding.
        seeds: inputs made by code, from which the search begins.
        words: what the search may put in: names of fields, the beginnings of values.
    """

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()


def pairs(data: bytes) -> dict[str, str]:
    """Names and values as os.environ has them: any bytes but NUL, decoded with surrogates."""
    lines = data.decode(errors="surrogateescape").split("\0")
    return dict((*line.split("=", 1), "")[:2] for line in lines)
