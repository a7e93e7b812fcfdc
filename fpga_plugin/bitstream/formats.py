"""One interface to the formats of bitstreams: what is it for, what does it hold, the raw image.

A GBS file and an AOCX file, which has a GBS file inside, differ in what names them and in how much
must be read to know what they hold. Callers need neither know which they have, nor trust a name.
"""

import enum
import io
from dataclasses import dataclass, field

from fpga_plugin.bitstream.aocx import Begin, read_aocx
from fpga_plugin.bitstream.byte_range import ByteRange
from fpga_plugin.bitstream.elf import MAGIC as ELF_MAGIC
from fpga_plugin.bitstream.gbs import HEAD_BYTES, parse_header
from fpga_plugin.bitstream.metadata import Metadata
from fpga_plugin.ids import AfuId, BitstreamId, InterfaceId


class Kind(enum.StrEnum):
    """A format; the value is the ending of its files in a store."""

    GBS = "gbs"
    AOCX = "aocx"


@dataclass(frozen=True, slots=True)
class Contents:
    """A bitstream file, checked.

    Attributes:
        kind: its format.
        bitstream_id: what names it in a store: the AFU id (GBS), the compiler's hash (AOCX). The
            AFU id is verified against the card after programming; a hash proves nothing.
        metadata: what the file says of its image.
        image_bytes: of the raw image.
        image: the raw image; empty where it was not asked for.
        sections: of an AOCX file, name and bytes each; the names are foreign text.
    """

    kind: Kind
    bitstream_id: BitstreamId
    metadata: Metadata
    image_bytes: int
    image: bytes | memoryview = field(repr=False)
    sections: tuple[tuple[str, int], ...] = ()

    @property
    def interface_id(self) -> InterfaceId:
        """The static part that it fits."""
        return self.metadata.interface_id

    @property
    def afu_id(self) -> AfuId:
        """What the port reads once it is programmed; the same for all AOCX files."""
        return self.metadata.afu_id


def kind_of(head: bytes) -> Kind:
    """The format by the first bytes; what is none that is known counts as a (wrong) GBS file."""
    return Kind.AOCX if head.startswith(ELF_MAGIC) else Kind.GBS


def parse(data: bytes, *, where: str, keep_image: bool = True) -> Contents:
    """Read a whole bitstream file of any format.

    Args:
        data: the file's content.
        where: the file, for the message.
        keep_image: False: the image is checked like all else, and does not stay in memory.

    Raises:
        BitstreamError: it is none that can be used; the message says what, where, and what to do.
    """
    if kind_of(data) is Kind.AOCX:
        unpacked = io.BytesIO()
        begin: Begin | None = (lambda _size: unpacked.write) if keep_image else None
        aocx = read_aocx(ByteRange.of_bytes(data, where), where=where, begin=begin)
        offset = aocx.header.image_offset
        image = unpacked.getbuffer()[offset:] if keep_image else b""
        size = aocx.gbs_bytes - offset
        return Contents(Kind.AOCX, aocx.hash, aocx.header.metadata, size, image, aocx.sections)
    header = parse_header(data[:HEAD_BYTES], size=len(data), where=where)
    image = data[header.image_offset :] if keep_image else b""
    size = len(data) - header.image_offset
    return Contents(Kind.GBS, BitstreamId(header.metadata.afu_id), header.metadata, size, image)
