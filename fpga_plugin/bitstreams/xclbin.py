"""xclbin: what AMD's Vitis builds for an Alveo card, and XRT's driver loads as a whole.

Little endian; layout: `struct axlf` in src/runtime_src/core/include/xrt/detail/xclbin.h of
Xilinx/XRT at 963c58ee, from which the facts here are:

    0    8 bytes   `xclbin2` and a null byte
    8    s32       bytes of a signature at the end, -1: none
    304  u64       bytes of the file
    332  u16       mode; 1: for a partial region, 0: flat, for the whole device
    352  64 bytes  platform (vendor, board, name, version)
    416  16 bytes  uuid: names the image, and is what the driver shows once it is loaded
    448  u32       sections
    456  ...       40 bytes a section: u32 kind, 20 not used here, u64 offset, u64 bytes

Of the sections BITSTREAM is programmed, PARTITION_METADATA names the shell (`xclbin_shell`),
EMBEDDED_METADATA has the kernels (`xclbin_kernels`), IP_LAYOUT the compute units and MEM_TOPOLOGY
the memories (`xclbin_tables`).

Everything is checked before it is believed, and no image is read: only the tables, and each
has a limit. Any bytes give a value or a `BitstreamError`.
"""

import struct
from collections.abc import Sequence

from fpga_plugin.bitstreams.byte_range import DAMAGED, ByteRange
from fpga_plugin.bitstreams.contents import Begin, Contents, FileKind, XclbinDetails
from fpga_plugin.bitstreams.xclbin_kernels import read_kernels
from fpga_plugin.bitstreams.xclbin_shell import VITIS, read_interface
from fpga_plugin.bitstreams.xclbin_tables import has_dataflow, printable, read_banks
from fpga_plugin.hardware.image import Xclbin
from fpga_plugin.ids import AfuId, BitstreamId

MAGIC = b"xclbin2\0"

HEADER_BYTES = 456
"""What is before the table of sections."""

MAX_SECTIONS = 256
"""A file has some twenty; the format allows 65536."""

_SIGNATURE = struct.Struct("<i")
_SIGNATURE_AT = 8
_NO_SIGNATURE = -1
_HEADER = struct.Struct("<QQQHBBHH16s64s16s16sI")
_HEADER_AT = 304
_SECTION = struct.Struct("<I20xQQ")

_PR_MODE = 1
_MODES = {
    0: "flat: it is for the whole device, and XRT's driver would program nothing",
    2: "tandem: it is the second half of a shell",
    3: "tandem: it is the second half of a shell",
    4: "hardware emulation",
    5: "software emulation",
    6: "hardware emulation",
}
"""`enum XCLBIN_MODE`."""

_KINDS = (
    "BITSTREAM", "CLEARING_BITSTREAM", "EMBEDDED_METADATA", "FIRMWARE", "DEBUG_DATA",
    "SCHED_FIRMWARE", "MEM_TOPOLOGY", "CONNECTIVITY", "IP_LAYOUT", "DEBUG_IP_LAYOUT",
    "DESIGN_CHECK_POINT", "CLOCK_FREQ_TOPOLOGY", "MCS", "BMC", "BUILD_METADATA",
    "KEYVALUE_METADATA", "USER_METADATA", "DNA_CERTIFICATE", "PDI", "BITSTREAM_PARTIAL_PDI",
    "PARTITION_METADATA", "EMULATION_DATA", "SYSTEM_METADATA", "SOFT_KERNEL", "ASK_FLASH",
    "AIE_METADATA", "ASK_GROUP_TOPOLOGY", "ASK_GROUP_CONNECTIVITY",
)  # fmt: skip  # as the header has it
"""`enum axlf_section_kind`, by number; later ones are for other devices."""

_VERSAL = frozenset({"PDI", "BITSTREAM_PARTIAL_PDI"})

_APPENDED = (
    "take the file from before `xclbinutil --add-signature`, which appends to it; or it is damaged"
)

_Sections = Sequence[tuple[str, ByteRange]]
"""Those that have content: the name of the kind, or its number, and where the bytes are."""


def read_xclbin(file: ByteRange, _begin: Begin | None = None) -> Contents:
    """Read an xclbin's header, tables and metadata.

    Raises:
        BitstreamError: this is no xclbin that can be used; the message says what and where.
    """
    head = file.read(0, HEADER_BYTES)
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        raise file.wrong(
            f"no xclbin: {file.size} bytes that begin {head[:8].hex()}; the header alone has"
            f" {HEADER_BYTES}, and begins {MAGIC.hex()}"
        )
    (signature,) = _SIGNATURE.unpack_from(head, _SIGNATURE_AT)
    length, _, _, patch, major, minor, mode, _, _, platform, uuid, _, count = _HEADER.unpack_from(
        head, _HEADER_AT
    )
    if signature != _NO_SIGNATURE:
        raise file.wrong(
            f"has a signature of {signature} bytes inside, which only the driver of a card can"
            " check",
            "take the file from before `xclbinutil --private-key`, and sign it with"
            " `fpga-plugin bitstream sign`",
        )
    if length != file.size:
        raise file.wrong(
            f"says that it has {length} bytes, and has {file.size}",
            DAMAGED if length > file.size else _APPENDED,
        )
    if mode != _PR_MODE:
        raise file.wrong(f"its mode is {mode}, {_MODES.get(mode, 'unknown')}", VITIS)
    if len(set(uuid)) == 1 and uuid[0] in {0x00, 0xFF}:
        raise file.wrong(f"the uuid at byte 416 is {uuid.hex()}, which names nothing", VITIS)
    sections = _sections(file, count)
    image = _section(file, sections, "BITSTREAM")
    units, banks = (_only(file, sections, kind) for kind in ("IP_LAYOUT", "MEM_TOPOLOGY"))
    kernels = read_kernels(_section(file, sections, "EMBEDDED_METADATA"))
    return Contents(
        kind=XCLBIN,
        bitstream_id=BitstreamId(uuid.hex()),
        interface_id=read_interface(_section(file, sections, "PARTITION_METADATA")),
        afu_id=AfuId(uuid.hex()),
        name=kernels.name,
        platform_name=printable(platform),
        image_bytes=image.size,
        details=XclbinDetails(
            xrt_version=f"{major}.{minor}.{patch}",
            kernels=kernels.kernels,
            slot_size=kernels.slot_size,
            dataflow=units is not None and has_dataflow(units),
            memory_banks=() if banks is None else read_banks(banks),
        ),
        sections=tuple((kind, content.size) for kind, content in sections),
    )


def _sections(file: ByteRange, count: int) -> _Sections:
    """The sections that have content, in the table's order; none reaches into another."""
    if not 1 <= count <= MAX_SECTIONS:
        raise file.wrong(f"would have {count} sections; 1 to {MAX_SECTIONS} are read")
    begin = HEADER_BYTES + count * _SECTION.size
    table = file.read(HEADER_BYTES, count * _SECTION.size)
    if len(table) < count * _SECTION.size:
        raise file.wrong("ends inside its table of sections")
    found = []
    for number, offset, size in _SECTION.iter_unpack(table):
        if not size:
            continue
        kind = _KINDS[number] if number < len(_KINDS) else f"of kind {number}"
        if not begin <= offset <= offset + size <= file.size:
            raise file.wrong(
                f"section {kind} would be at byte {offset}, {size} bytes, and there is content"
                f" from {begin} to {file.size}"
            )
        found.append((kind, file.part(offset, size, kind)))
    end = file.start + begin
    for kind, content in sorted(found, key=lambda one: one[1].start):
        if content.start < end:
            raise file.wrong(f"section {kind} begins inside another")
        end = content.start + content.size
    return found


def _only(file: ByteRange, sections: _Sections, kind: str) -> ByteRange | None:
    """The one section of a kind; None: there is none."""
    found = [content for name, content in sections if name == kind]
    if len(found) > 1:
        raise file.wrong(
            f"has {len(found)} sections {kind}",
            "XRT's driver would use the first: build a file with one partition",
        )
    return found[0] if found else None


def _section(file: ByteRange, sections: _Sections, kind: str) -> ByteRange:
    """The one section of a kind."""
    if (found := _only(file, sections, kind)) is not None:
        return found
    if kind == "BITSTREAM" and any(name in _VERSAL for name, _ in sections):
        raise file.wrong(
            "is for a Versal device (it has a PDI in place of a bitstream)",
            "cards with UltraScale+ devices are served: U50, U55C, U200, U250, U280",
        )
    raise file.wrong(f"has no section {kind}", VITIS)


XCLBIN = FileKind(
    "xclbin", "xclbin", 32, "uuid", MAGIC, "xrt", Xclbin, blank=True, read=read_xclbin
)
