"""docs/status.png: whether the page is still drawn by the code that it is a picture of.

The picture has a mark of that code in it. It changes with the style sheet and with what draws the
page's upper part, the one that the picture shows; a picture's own bytes would change with the
browser and its fonts.
"""

import hashlib
import inspect
import zlib

from fpga_plugin.operator import page
from fpga_plugin.operator.style import STYLE

_KEYWORD = b"drawn-by\0"
_HEAD = 8 + 25
"""PNG's signature and its IHDR chunk."""


def drawn_by() -> str:
    """The mark of today's code."""
    parts = (page._find, page._header, page._trouble, page._card, page._tile, page._reason)
    code = [STYLE, *map(inspect.getsource, parts)]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()


def marked(png: bytes) -> bytes:
    """A picture, with the mark as a text of its own."""
    content = b"tEXt" + _KEYWORD + drawn_by().encode()
    length = len(content) - 4
    chunk = length.to_bytes(4, "big") + content + zlib.crc32(content).to_bytes(4, "big")
    return png[:_HEAD] + chunk + png[_HEAD:]


def mark(png: bytes) -> str:
    """What drew a picture; empty: it does not say."""
    _, there, rest = png.partition(b"tEXt" + _KEYWORD)
    return rest[:64].decode() if there else ""


def size(png: bytes) -> tuple[int, int]:
    """Its width and height."""
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
