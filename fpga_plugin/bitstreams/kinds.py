"""The kinds of bitstream files, and what each says of itself.

Callers need neither know which kind they have, nor trust a name. A further kind is another entry of
`KINDS`; nothing else knows an ending, or how many digits name a file.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field

from fpga_plugin.bitstreams.aocx import Begin, read_aocx
from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.elf import MAGIC as ELF_MAGIC
from fpga_plugin.bitstreams.gbs import GUID, HEAD_BYTES, parse_header
from fpga_plugin.bitstreams.metadata import Metadata
from fpga_plugin.ids import AfuId, BitstreamId, InterfaceId

BLANK = "blank"
"""The name of a blank bitstream's file, without its ending."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A format.

    Attributes:
        ending: of its files in a store.
        digits: of the bitstream id that names its files, hexadecimal.
        named_by: what that id is, for messages.
        magic: how its files begin.
        blank: whether a blank bitstream is of this kind.
        read: reads and checks a whole file; `begin` takes the GBS file that is packed in it, if one
            is (`read_aocx`). Raises `BitstreamError`.
    """

    ending: str
    digits: int
    named_by: str
    magic: bytes
    blank: bool
    read: Callable[[ByteRange, Begin | None], "Contents"] = field(repr=False)

    def __str__(self) -> str:
        return self.ending.upper()


@dataclass(frozen=True, slots=True)
class Contents:
    """A bitstream file, checked.

    Attributes:
        kind: its format.
        bitstream_id: what names it in a store: the AFU id (GBS), the compiler's hash (AOCX). The
            AFU id is verified against the card after programming; a hash proves nothing.
        metadata: what the file says of its image.
        image_bytes: of the raw image.
        sections: of an AOCX file, name and bytes each; the names are foreign text.
    """

    kind: Kind
    bitstream_id: BitstreamId
    metadata: Metadata
    image_bytes: int
    sections: tuple[tuple[str, int], ...] = ()

    @property
    def interface_id(self) -> InterfaceId:
        """The static part that it fits."""
        return self.metadata.interface_id

    @property
    def afu_id(self) -> AfuId:
        """What the port reads once it is programmed; the same for all AOCX files."""
        return self.metadata.afu_id


def _read_gbs(file: ByteRange, _begin: Begin | None) -> Contents:
    header = parse_header(file.read(0, HEAD_BYTES), size=file.size, where=file.where)
    size = file.size - header.image_offset
    return Contents(GBS, BitstreamId(header.metadata.afu_id), header.metadata, size)


def _read_aocx(file: ByteRange, begin: Begin | None) -> Contents:
    aocx = read_aocx(file, where=file.where, begin=begin)
    size = aocx.gbs_bytes - aocx.header.image_offset
    return Contents(AOCX, aocx.hash, aocx.header.metadata, size, aocx.sections)


GBS = Kind("gbs", 32, "AFU id", GUID, blank=True, read=_read_gbs)
AOCX = Kind("aocx", 40, "hash", ELF_MAGIC, blank=False, read=_read_aocx)
KINDS = (GBS, AOCX)


def kind_of(file: ByteRange) -> Kind | None:
    """The kind by the first bytes; None: none that is known."""
    head = file.read(0, max(len(kind.magic) for kind in KINDS))
    return next((kind for kind in KINDS if head.startswith(kind.magic)), None)


def read(file: ByteRange, begin: Begin | None = None) -> Contents:
    """Read a whole bitstream file of any kind; what is of none that is known is a wrong GBS file.

    Args:
        file: its bytes; of a GBS file only the header is read.
        begin: takes the GBS file that is packed in it.

    Raises:
        BitstreamError: it is none that can be used; the message says what, where, and what to do.
    """
    return (kind_of(file) or GBS).read(file, begin)


def read_data(data: bytes, where: str) -> Contents:
    """Read a bitstream file that is in memory; raises as `read`."""
    return read(ByteRange.of_bytes(data, where))


def image_of(data: bytes, where: str) -> tuple[Contents, memoryview]:
    """A bitstream file that is in memory, and its raw image; raises as `read`."""
    unpacked = io.BytesIO()
    contents = read(ByteRange.of_bytes(data, where), lambda _size: unpacked.write)
    gbs = unpacked.getbuffer() or memoryview(data)
    return contents, gbs[len(gbs) - contents.image_bytes :]
