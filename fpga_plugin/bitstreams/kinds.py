"""The kinds of bitstream files: callers need neither know which kind they have, nor trust a name.

A further kind is another entry of `KINDS`; nothing else knows an ending, or how many digits name a
file. What its files say that no other's do is in `Contents.details`, which `Contents.clocks` and
`Contents.image` read, and `facts` for people.
"""

import io

from fpga_plugin.bitstreams.aocx import AOCX
from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.contents import Begin, Contents, FileKind
from fpga_plugin.bitstreams.gbs import GBS
from fpga_plugin.bitstreams.xclbin import XCLBIN
from fpga_plugin.hardware.image import Image

BLANK = "blank"
"""The name of a blank bitstream's file, without its ending."""

KINDS = (GBS, AOCX, XCLBIN)


def kind_of(file: ByteRange) -> FileKind | None:
    """The kind by the first bytes; None: none that is known."""
    head = file.read(0, max(len(kind.magic) for kind in KINDS))
    return next((kind for kind in KINDS if head.startswith(kind.magic)), None)


def read(file: ByteRange, begin: Begin | None = None) -> Contents:
    """Read a whole bitstream file of any kind; what is of none that is known is a wrong GBS file.

    Args:
        file: its bytes; of a GBS file only the header is read, of an xclbin only the tables.
        begin: takes the GBS file that is packed in it.

    Raises:
        BitstreamError: it is none that can be used; the message says what, where, and what to do.
    """
    return (kind_of(file) or GBS).read(file, begin)


def read_data(data: bytes | memoryview, where: str) -> Contents:
    """Read a bitstream file that is in memory; raises as `read`."""
    return read(ByteRange.of_bytes(data, where))


def image_of(data: bytes, where: str) -> tuple[Contents, Image]:
    """A bitstream file that is in memory, and what is programmed of it; raises as `read`."""
    unpacked = io.BytesIO()
    contents = read(ByteRange.of_bytes(data, where), lambda _size: unpacked.write)
    return contents, contents.image(unpacked.getbuffer() or memoryview(data))
