"""The section table of an ELF file, which is all that an AOCX file uses of that format.

Own code and not a library, because a table of names, offsets and sizes is all that is needed:
pyelftools reads symbols and debug information too, and leaves it to its caller that every offset
lies inside the file. Layout: elf.h (System V ABI, chapter 4); 32 and 64 bits, little endian.
Any bytes give a value or a `BitstreamError`, in time and memory that grow with the table only.
"""

import struct
from dataclasses import dataclass, field

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.errors import BitstreamError, quote

MAGIC = b"\x7fELF"
"""The first four bytes (EI_MAG0 to EI_MAG3)."""

MAX_SECTIONS = 1024
"""An AOCX file has a few dozen."""

MAX_NAME_BYTES = 128
"""The longest section name that is read."""

_LITTLE_ENDIAN = 1
_SHT_NOBITS = 8
_SHF_COMPRESSED = 0x800
_DAMAGED = "the file is cut off or damaged; copy or build it again"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the fields of one ELF class stand.

    Attributes:
        header_bytes: of the file's header (e_ehsize).
        offset: of e_shoff, and its format.
        table: offset of e_shentsize, e_shnum, e_shstrndx.
        entry: of a section header: name, type, flags, addr, offset, size.
        entry_bytes: of a section header (e_shentsize).
    """

    header_bytes: int
    offset: tuple[int, str]
    table: int
    entry: str
    entry_bytes: int


_LAYOUTS = {
    1: _Layout(52, (32, "<I"), 46, "<IIIIII", 40),
    2: _Layout(64, (40, "<Q"), 58, "<IIQQQQ", 64),
}
"""By EI_CLASS: ELFCLASS32, ELFCLASS64."""
_LONGEST_HEADER = max(layout.header_bytes for layout in _LAYOUTS.values())


@dataclass(frozen=True, slots=True)
class ElfSection:
    """A section with content.

    Attributes:
        name: foreign text, printable ASCII.
        content: where its bytes are; they are not read.
    """

    name: str
    content: ByteRange = field(repr=False)


def sections(file: ByteRange, *, where: str) -> tuple[ElfSection, ...]:
    """The sections of an ELF file that have content, in the order of its table.

    Args:
        file: the whole file; its header, its table and the names are read.
        where: the file, for the message.

    Raises:
        BitstreamError: it is no ELF file, or a table or section lies outside it, or a name is
            there twice.
    """
    head = file.read(0, _LONGEST_HEADER)
    layout = _layout(head, where)
    (start,) = struct.unpack_from(layout.offset[1], head, layout.offset[0])
    entry_bytes, count, names_at = struct.unpack_from("<HHH", head, layout.table)
    if not 1 <= count <= MAX_SECTIONS:
        raise BitstreamError(f"{where}: {count} ELF sections; 1 to {MAX_SECTIONS} are read")
    if entry_bytes != layout.entry_bytes:
        raise BitstreamError(
            f"{where}: ELF section headers of {entry_bytes} bytes instead of {layout.entry_bytes}",
            hint=_DAMAGED,
        )
    if start + count * entry_bytes > file.size:
        raise BitstreamError(
            f"{where}: the ELF section table would end at byte {start + count * entry_bytes},"
            f" but there are {file.size} bytes",
            hint=_DAMAGED,
        )
    if names_at >= count:
        raise BitstreamError(
            f"{where}: the ELF section of names is number {names_at} of {count}", hint=_DAMAGED
        )
    table = file.read(start, count * entry_bytes)
    headers = [
        struct.unpack_from(layout.entry, table, number * entry_bytes) for number in range(count)
    ]
    names = _content(file, headers[names_at], names_at, where)
    found: dict[str, ElfSection] = {}
    for number, header in enumerate(headers):
        # Number 0 is reserved (SHN_UNDEF); no bytes in the file: .bss and the like.
        if number == 0 or header[1] == _SHT_NOBITS:
            continue
        content = _content(file, header, number, where)
        name = _name(names, header[0], number, where)
        if name in found:
            raise BitstreamError(
                f"{where}: the ELF section {quote(name)} is there twice",
                hint="readers would disagree on which one counts; build the file again",
            )
        if header[2] & _SHF_COMPRESSED:
            raise BitstreamError(f"{where}: the ELF section {quote(name)} is compressed by ELF")
        found[name] = ElfSection(name, content)
    return tuple(found.values())


def _layout(head: bytes, where: str) -> _Layout:
    if head[:4] != MAGIC:
        raise BitstreamError(f"{where}: not an ELF file: it begins {head[:4].hex()!r}")
    shortest = _LAYOUTS[1].header_bytes
    if len(head) < shortest:
        raise BitstreamError(
            f"{where}: {len(head)} bytes, an ELF header has at least {shortest}", hint=_DAMAGED
        )
    layout = _LAYOUTS.get(head[4])
    if layout is None:
        raise BitstreamError(f"{where}: ELF class {head[4]} is neither 32 (1) nor 64 bits (2)")
    if head[5] != _LITTLE_ENDIAN:
        raise BitstreamError(f"{where}: ELF byte order {head[5]}; only little endian (1) is read")
    if len(head) < layout.header_bytes:
        raise BitstreamError(
            f"{where}: {len(head)} bytes, this ELF header has {layout.header_bytes}", hint=_DAMAGED
        )
    return layout


def _content(file: ByteRange, header: tuple[int, ...], number: int, where: str) -> ByteRange:
    start, size = header[4], header[5]
    if start + size > file.size:
        raise BitstreamError(
            f"{where}: ELF section {number} would end at byte {start + size}, but there are"
            f" {file.size} bytes",
            hint=_DAMAGED,
        )
    return file.part(start, size)


def _name(names: ByteRange, at: int, number: int, where: str) -> str:
    raw, end, _ = names.read(at, MAX_NAME_BYTES + 1).partition(b"\0")
    if not end:
        raise BitstreamError(
            f"{where}: the name of ELF section {number} does not end within {MAX_NAME_BYTES} bytes",
            hint=_DAMAGED,
        )
    name = raw.decode(errors="replace")
    if not (name.isascii() and (name.isprintable() or not name)):
        raise BitstreamError(f"{where}: ELF section {number} has a name of other than ASCII")
    return name
