"""What a bitstream's file says of itself, checked, and what is programmed of it, whatever its kind.

The reader of each format makes it. What only its files say is in `details`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.gbs_metadata import Frequency, GbsMetadata
from fpga_plugin.hardware.image import ComputeKernel, Image, MemoryBank, RawImage, Xclbin
from fpga_plugin.ids import AfuId, BitstreamId, InterfaceId

Write = Callable[[bytes], object]
"""Takes the next bytes of a file; it must take them all."""

Begin = Callable[[int], Write]
"""Gets how many bytes a file has, and gives what writes them."""


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
class XclbinDetails:
    """What only an xclbin says of itself.

    Attributes:
        xrt_version: of the XRT that it was built with (`2.19.0`); 0 where the tool wrote none.
        kernels, slot_size, dataflow: as `hardware.image.Xclbin` has them.
        memory_banks: its `banks`.
    """

    xrt_version: str
    kernels: tuple[ComputeKernel, ...]
    slot_size: int
    dataflow: bool
    memory_banks: tuple[MemoryBank, ...]


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
    details: GbsMetadata | XclbinDetails
    sections: tuple[tuple[str, int], ...] = ()

    @property
    def clocks(self) -> tuple[Frequency, Frequency]:
        """The user clock that it was built for, and its half-rate clock.

        An xclbin says neither: XRT's driver sets the clocks that the file itself has.
        """
        if isinstance(self.details, XclbinDetails):
            return None, None
        return self.details.clock_frequency_high, self.details.clock_frequency_low

    def image(self, data: bytes | memoryview) -> Image:
        """What is programmed.

        Args:
            data: the file; of an AOCX file the GBS file that was packed in it.
        """
        details = self.details
        if not isinstance(details, XclbinDetails):
            return RawImage(data[len(data) - self.image_bytes :])
        return Xclbin(
            data=data,
            uuid=self.afu_id,
            interface_id=self.interface_id,
            kernels=details.kernels,
            dataflow=details.dataflow,
            slot_size=details.slot_size,
            banks=details.memory_banks,
        )
