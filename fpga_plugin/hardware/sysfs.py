"""Reading sysfs as the DFL code needs it: a feature may be absent, and a value may be nonsense."""

import re
from collections.abc import Iterator

from fpga_plugin.errors import HardwareError, quote
from fpga_plugin.hardware.kernel import Kernel

_NUMBER = re.compile(r"0x[0-9a-f]{1,16}|[0-9]{1,20}", re.ASCII)
_BARE_HEX = re.compile(r"[0-9a-f]{1,16}", re.ASCII)


def children(kernel: Kernel, directory: str, pattern: str) -> Iterator[str]:
    """Paths of the entries whose whole name matches, numbers in their order; none if it is absent.

    Raises:
        OSError: the directory cannot be listed.
    """
    try:
        names = kernel.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    expression = re.compile(pattern, re.ASCII)
    for name in sorted(filter(expression.fullmatch, names), key=lambda name: (len(name), name)):
        yield f"{directory}/{name}"


def optional(kernel: Kernel, path: str) -> str | None:
    """An attribute's text, None when the card or its driver does not have it.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        return kernel.read(path).strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def number(path: str, text: str) -> int:
    """The value of an attribute that the kernel writes in decimal, or in hex with `0x`.

    Raises:
        HardwareError: it is no number.
    """
    if not _NUMBER.fullmatch(text):
        raise HardwareError(f"{path} says {quote(text)} where a number belongs")
    return int(text, 16) if text.startswith("0x") else int(text)


def bare_hex(path: str, text: str) -> int:
    """The value of an attribute that the kernel writes in hex without `0x` (ap1_event: `%x`).

    Raises:
        HardwareError: it is no number.
    """
    if not _BARE_HEX.fullmatch(text.removeprefix("0x")):
        raise HardwareError(f"{path} says {quote(text)} where a hex number belongs")
    return int(text, 16)
