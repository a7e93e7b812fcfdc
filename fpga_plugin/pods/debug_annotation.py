"""What a pod writes to have its region kept after a failure: the annotation `<prefix>/debug`.

`true` asks for as long as the operator allows, `90s`, `15m` or `1h` for so long. The text is the
tenant's, so it is read strictly and never reaches anything but this parser.
"""

import re
from typing import Final

_SPAN: Final = re.compile(r"([1-9][0-9]{0,5})([smh])", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}

ALLOWED: Final = "true, or a number with s, m or h behind it, such as 15m"
"""For messages."""


def annotation(prefix: str) -> str:
    """Its name."""
    return f"{prefix}/debug"


def parse_keep(text: str, *, most: float) -> float:
    """For how many seconds a region is to be kept; never longer than `most`.

    Raises:
        ValueError: it is something else.
    """
    if text == "true":
        return most
    match = _SPAN.fullmatch(text)
    if match is None:
        raise ValueError(f"write {ALLOWED}")
    return min(float(int(match[1]) * _SECONDS[match[2]]), most)
