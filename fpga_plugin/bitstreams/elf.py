"""The section table of an ELF file, which is all that an AOCX file uses of that format.

Own code and not a library, because a table of names, offsets and sizes is all that is needed:
pyelftools reads symbols and debug information too, and leaves it to its caller that every offset
lies inside the file. Layout: elf.h (System V ABI, chapter 4); 32 and 64 bits, little endian.
Any bytes give a value or a `BitstreamError`, in time and memory that grow with the table only.
"""

import struct

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.errors import quote

MAGIC = b"\x7fELF"
"""The first four bytes (EI_MAG0 to EI_MAG3)."""

MAX_SECTIONS = 1024
"""An AOCX file has a few dozen."""

MAX_NAME_BYTES = 128
"""The longest section name that is read."""

_LITTLE_ENDIAN = 1
_SHT_NOBITS = 8
_SHF_COMPRESSED = 0x800

_LAYOUTS = {
    1: (struct.Struct("<32xI10xHHH"), struct.Struct("<IIIIII16x")),
    2: (struct.Struct("<40xQ10xHHH"), struct.Struct("<IIQQQQ24x")),
}
"""By EI_CLASS (ELFCLASS32, ELFCLASS64): the file's header with e_shoff, e_shentsize, e_shnum and
e_shstrndx, and of a section's header name, type, flags, addr, offset and size."""

_SHORTEST_HEADER, _LONGEST_HEADER = (header.size for header, _ in _LAYOUTS.values())


def sections(file: ByteRange) -> dict[str, ByteRange]:
    """The sections of an ELF file that have content, by name, in the order of its table.

    Names are foreign text, printable ASCII; what the sections have is not read.

    Args:
        file: the whole file; its header, its table and the names are read.

    Raises:
        BitstreamError: it is no ELF file, or a table or section lies outside it, or a name is
            there twice.
    """
    head = file.read(0, _LONGEST_HEADER)
    header, entry = _layout(file, head)
    start, entry_bytes, count, names_at = header.unpack_from(head)
    if not 1 <= count <= MAX_SECTIONS:
        raise file.wrong(f"{count} ELF sections; 1 to {MAX_SECTIONS} are read")
    if entry_bytes != entry.size:
        raise file.wrong(f"ELF section headers of {entry_bytes} bytes instead of {entry.size}")
    if (end := start + count * entry_bytes) > file.size:
        raise file.wrong(
            f"the ELF section table would end at byte {end}, but there are {file.size} bytes"
        )
    if names_at >= count:
        raise file.wrong(f"the ELF section of names is number {names_at} of {count}")
    table = file.read(start, count * entry_bytes)
    entries = list(entry.iter_unpack(table))
    names = _content(file, entries[names_at], names_at)
    found: dict[str, ByteRange] = {}
    for number, fields in enumerate(entries):
        # Number 0 is reserved (SHN_UNDEF); no bytes in the file: .bss and the like.
        if number == 0 or fields[1] == _SHT_NOBITS:
            continue
        content = _content(file, fields, number)
        name = _name(file, names, fields[0], number)
        if name in found:
            raise file.wrong(
                f"the ELF section {quote(name)} is there twice",
                hint="readers would disagree on which one counts; build the file again",
            )
        if fields[2] & _SHF_COMPRESSED:
            raise file.wrong(f"the ELF section {quote(name)} is compressed by ELF", hint="")
        found[name] = content.part(0, content.size, name)
    return found


def _layout(file: ByteRange, head: bytes) -> tuple[struct.Struct, struct.Struct]:
    if head[:4] != MAGIC:
        raise file.wrong(f"not an ELF file: it begins {head[:4].hex()!r}")
    if len(head) < _SHORTEST_HEADER:
        raise file.wrong(f"{len(head)} bytes, an ELF header has at least {_SHORTEST_HEADER}")
    if (layout := _LAYOUTS.get(head[4])) is None:
        raise file.wrong(f"ELF class {head[4]} is neither 32 (1) nor 64 bits (2)")
    if head[5] != _LITTLE_ENDIAN:
        raise file.wrong(f"ELF byte order {head[5]}; only little endian (1) is read")
    if len(head) < layout[0].size:
        raise file.wrong(f"{len(head)} bytes, this ELF header has {layout[0].size}")
    return layout


def _content(file: ByteRange, fields: tuple[int, ...], number: int) -> ByteRange:
    start, size = fields[4], fields[5]
    if start + size > file.size:
        raise file.wrong(
            f"ELF section {number} would end at byte {start + size}, but there are"
            f" {file.size} bytes"
        )
    return file.part(start, size)


def _name(file: ByteRange, names: ByteRange, at: int, number: int) -> str:
    raw, end, _ = names.read(at, MAX_NAME_BYTES + 1).partition(b"\0")
    if not end:
        raise file.wrong(
            f"the name of ELF section {number} does not end within {MAX_NAME_BYTES} bytes"
        )
    name = raw.decode(errors="replace")
    if not (name.isascii() and (name.isprintable() or not name)):
        raise file.wrong(f"ELF section {number} has a name of other than ASCII")
    return name
