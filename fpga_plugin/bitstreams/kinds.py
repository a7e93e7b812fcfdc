"""The kinds of bitstream files, and what each says of itself.

Callers need neither know which kind they have, nor trust a name. A further kind is another entry of
`KINDS`; nothing else knows an ending, or how many digits name a file. What its files say that no
other's do is in `Contents.details`, which `Contents.clocks` and `Contents.image` read, and `facts`
for people.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fpga_plugin.bitstreams.aocx import Begin, read_aocx
from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.elf import MAGIC as ELF_MAGIC
from fpga_plugin.bitstreams.gbs import GUID, parse_header
from fpga_plugin.bitstreams.gbs_metadata import Frequency, GbsMetadata
from fpga_plugin.bitstreams.xclbin import MAGIC as XCLBIN_MAGIC
from fpga_plugin.bitstreams.xclbin import XclbinFacts, read_xclbin
from fpga_plugin.hardware.image import Image, RawImage, Xclbin
from fpga_plugin.ids import AfuId, BitstreamId, InterfaceId

BLANK = "blank"
"""The name of a blank bitstream's file, without its ending."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """A format.

    Attributes:
        name: for people.
        ending: of its files in a store.
        digits: of the bitstream id that names its files, hexadecimal.
        named_by: what that id is, for messages.
        magic: how its files begin.
        family: of the cards that it is for, as `Card.family`.
        makes: the kind of image that is programmed of it, which a card's driver reads or not.
        blank: whether a blank bitstream is of this kind.
        read: reads and checks a whole file; `begin` takes the GBS file that is packed in it, if one
            is (`read_aocx`). Raises `BitstreamError`.
    """

    name: str
    ending: str
    digits: int
    named_by: str
    magic: bytes
    family: str
    makes: type[Image]
    blank: bool
    read: Callable[[ByteRange, Begin | None], "Contents"] = field(repr=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Contents:
    """A bitstream file, checked: what it says of itself, whatever its kind.

    Attributes:
        kind: its format.
        bitstream_id: what names it in a store: the AFU id (GBS), the uuid (xclbin), the compiler's
            hash (AOCX). AFU id and uuid are verified against the card after programming; a hash
            proves nothing.
        interface_id: the static part that it fits.
        afu_id: what the region reads once it is programmed; the same for all AOCX files.
        name: of its accelerator, for people; foreign text.
        platform_name: for people; foreign text.
        image_bytes: of what the card is configured with.
        details: what only files of this kind say.
        sections: of an AOCX or xclbin file, name and bytes each; the names are foreign text.
    """

    kind: FileKind
    bitstream_id: BitstreamId
    interface_id: InterfaceId
    afu_id: AfuId
    name: str
    platform_name: str | None
    image_bytes: int
    details: GbsMetadata | XclbinFacts
    sections: tuple[tuple[str, int], ...] = ()

    @property
    def clocks(self) -> tuple[Frequency, Frequency]:
        """The user clock that it was built for, and its half-rate clock.

        An xclbin says neither: XRT's driver sets the clocks that the file itself has.
        """
        if isinstance(self.details, XclbinFacts):
            return None, None
        return self.details.clock_frequency_high, self.details.clock_frequency_low

    def image(self, data: bytes | memoryview) -> Image:
        """What is programmed.

        Args:
            data: the file; of an AOCX file the GBS file that was packed in it.
        """
        if not isinstance(self.details, XclbinFacts):
            return RawImage(data[len(data) - self.image_bytes :])
        facts = self.details
        return Xclbin(
            data=data,
            uuid=facts.uuid,
            interface_id=facts.interface_id,
            kernels=facts.kernels,
            dataflow=facts.dataflow,
            slot_size=facts.slot_size,
            banks=facts.banks,
        )


def _of_gbs(kind: FileKind, metadata: GbsMetadata, *, name: BitstreamId, size: int) -> Contents:
    return Contents(
        kind=kind,
        bitstream_id=name,
        interface_id=metadata.interface_id,
        afu_id=metadata.afu_id,
        name=metadata.clusters[0].name,
        platform_name=metadata.platform_name,
        image_bytes=size,
        details=metadata,
    )


def _read_gbs(file: ByteRange, _begin: Begin | None) -> Contents:
    header = parse_header(file)
    name = BitstreamId(header.metadata.afu_id)
    return _of_gbs(GBS, header.metadata, name=name, size=file.size - header.image_offset)


def _read_aocx(file: ByteRange, begin: Begin | None) -> Contents:
    aocx = read_aocx(file, begin=begin)
    size = aocx.gbs_bytes - aocx.header.image_offset
    contents = _of_gbs(AOCX, aocx.header.metadata, name=aocx.hash, size=size)
    return replace(contents, sections=aocx.sections)


def _read_xclbin(file: ByteRange, _begin: Begin | None) -> Contents:
    facts = read_xclbin(file)
    return Contents(
        kind=XCLBIN,
        bitstream_id=BitstreamId(facts.uuid),
        interface_id=facts.interface_id,
        afu_id=facts.uuid,
        name=facts.name,
        platform_name=facts.platform_name,
        image_bytes=facts.image_bytes,
        details=facts,
        sections=facts.sections,
    )


GBS = FileKind("GBS", "gbs", 32, "AFU id", GUID, "dfl", RawImage, blank=True, read=_read_gbs)
AOCX = FileKind(
    "AOCX", "aocx", 40, "hash", ELF_MAGIC, "dfl", RawImage, blank=False, read=_read_aocx
)
XCLBIN = FileKind(
    "xclbin", "xclbin", 32, "uuid", XCLBIN_MAGIC, "xrt", Xclbin, blank=True, read=_read_xclbin
)
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
