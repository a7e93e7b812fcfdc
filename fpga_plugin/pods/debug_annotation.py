"""What a pod writes to have its region kept after a failure: the annotation `<prefix>/debug`.

`true` asks for the usual time, `90s`, `15m` or `1h` for so long. The text is the
tenant's, so it is read strictly and never reaches anything but this parser.
"""

import re
from typing import Final

_SPAN: Final = re.compile(r"([1-9][0-9]{0,5})([smh])", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}

USUAL: Final = 600.0
"""Seconds for `true`: enough for `fpga-plugin card show`, and nobody misses the region for long."""

MOST: Final = 3600.0
"""Seconds that a pod can have: a region that nobody released is lost to others for so long."""

ALLOWED: Final = "true, or a number with s, m or h behind it, such as 15m"
"""For messages."""


def annotation(prefix: str) -> str:
    """Its name."""
    return f"{prefix}/debug"


def parse_keep(text: str) -> float:
    """For how many seconds a region is to be kept; never longer than `MOST`.

    Raises:
        ValueError: it is something else.
    """
    if text == "true":
        return USUAL
    match = _SPAN.fullmatch(text)
    if match is None:
        raise ValueError(f"write {ALLOWED}")
    return min(float(int(match[1]) * _SECONDS[match[2]]), MOST)
