"""What is programmed into a region: a value between the store, which reads files, and the families.

The store makes it of a file that it verified; a family's driver reads one of the kinds. Bytes are a
private mapping of a file that is never written: they are in memory once, and only the parts that
are read.
"""

from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import AfuId, InterfaceId, RegionId


@dataclass(frozen=True, slots=True)
class RawImage:
    """A configuration stream without a container, as the FPGA manager of the kernel writes it.

    Attributes:
        files: what it is made of.
        data: all of it.
    """

    files: ClassVar[str] = "GBS and AOCX files"

    data: bytes | memoryview = field(repr=False)

    def __str__(self) -> str:
        return "a raw image"


@dataclass(frozen=True, slots=True)
class KernelArgument:
    """An argument of a kernel, as its control registers have it.

    Attributes:
        name: at most 63 bytes; foreign text.
        offset: of its register in the kernel's address range, in bytes.
        size: in bytes.
    """

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class ComputeKernel:
    """A kernel of an xclbin, as XRT's driver needs it.

    Attributes:
        name: at most 63 bytes; foreign text.
        address_range: bytes of its control registers.
        software_reset: it can be reset by its control register.
        arguments: in the order of their index; those without an index are last.
    """

    name: str
    address_range: int
    software_reset: bool
    arguments: tuple[KernelArgument, ...]


@dataclass(frozen=True, slots=True)
class MemoryBank:
    """A memory that an xclbin's logic reaches, as its memory topology has it.

    Attributes:
        tag: what the platform calls it (`HBM[0]`, `bank1`); foreign text.
        type: `DDR4`, `HBM`, and so on; a number where it is unknown.
        used: whether the image reaches it. Of another one nothing else is known.
        on_card: memory of the card that has addresses: neither the host's, nor a stream.
        base: its first address on the card.
        size: in bytes.
    """

    tag: str
    type: str
    used: bool
    on_card: bool
    base: int
    size: int

    @property
    def clearable(self) -> bool:
        """Whether it can be overwritten by address while the image is on the card."""
        return self.used and self.on_card and self.size > 0


@dataclass(frozen=True, slots=True)
class Xclbin:
    """An xclbin file, and what its loader has to pass to XRT's driver beside it.

    Attributes:
        files: what it is made of.
        data: the whole file.
        uuid: what the driver shows once it is loaded.
        interface_id: the shell that it was built for.
        kernels: in the file's order.
        dataflow: a compute unit of it works in dataflow mode (`drm_xocl_kds.dataflow`).
        slot_size: bytes of a slot of the command queue (`drm_xocl_kds.slot_size`).
        banks: in the order of the file's memory topology.
    """

    files: ClassVar[str] = "xclbin files"

    data: bytes | memoryview = field(repr=False)
    uuid: AfuId
    interface_id: InterfaceId
    kernels: tuple[ComputeKernel, ...]
    dataflow: bool
    slot_size: int
    banks: tuple[MemoryBank, ...]

    @property
    def clearable(self) -> int:
        """Bytes of on-card memory that can be overwritten while it is on the card."""
        return sum(bank.size for bank in self.banks if bank.clearable)

    def __str__(self) -> str:
        return "an xclbin"


Image = RawImage | Xclbin

ImageT = TypeVar("ImageT", bound=Image)


def expect(image: Image, kind: type[ImageT], region: RegionId) -> ImageT:
    """The image, of the kind that a region's driver reads.

    Raises:
        RefusedError: it is of another kind.
    """
    if not isinstance(image, kind):
        raise RefusedError(
            f"region {region} cannot be programmed with {image}",
            hint=f"its driver reads {kind.files}: put one of these into the store in its place",
        )
    return image
