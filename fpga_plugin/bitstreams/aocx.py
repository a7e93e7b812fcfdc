"""AOCX: what Intel's OpenCL compiler writes; a GBS file packed thrice.

    ELF
      .acl.rand_hash     40 hex digits, the name of the file in a store
      .acl.fpga.bin      an ELF file
        .acl.gbs.gz      gzip of a GBS file
      .acl.board, .acl.target, .acl.version, ...   about the build; not used

These are the sections that the Intel plugin reads and the name that it gives the file
(intel-device-plugins-for-kubernetes, pkg/fpga/bitstream/aocx.go). By its section's name the hash is
a random number, not a digest: a file shows which name it claims, and cannot prove that its content
is what once had that name. A manifest or a signature can (`fpga_plugin.bitstreams.trust`).
All AOCX files have one AFU id, so that of a port does not say which of them is on it.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.contents import Begin, Contents, FileKind, Write
from fpga_plugin.bitstreams.elf import MAGIC, sections
from fpga_plugin.bitstreams.gbs import HEAD_BYTES, read_gbs
from fpga_plugin.errors import quote
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.ids import BitstreamId

HASH_SECTION = ".acl.rand_hash"
BINARY_SECTION = ".acl.fpga.bin"
GBS_SECTION = ".acl.gbs.gz"

MAX_GBS_BYTES = 1 << 30
"""Of the unpacked GBS file, the same as of one that lies in a store as it is."""

_GZIP = b"\x1f\x8b\x08"
_GZIP_LEAST = 18
"""Bytes of a gzip member without content: header 10, trailer 8 (RFC 1952)."""
_GZIP_WINDOW = 31
"""zlib.h, inflateInit2: 16 for a gzip header, 15 for the largest window."""

_PIECE_IN = 64 << 10
"""Bytes unpacked in one go: zlib hands back what it did not take of them as a copy."""
_PIECE_OUT = 1 << 20

_HASH = re.compile(rb"[0-9a-fA-F]{40}")


def read_aocx(
    file: ByteRange, begin: Begin | None = None, *, limit: int = MAX_GBS_BYTES
) -> Contents:
    """Read a whole AOCX file, a piece at a time.

    Args:
        file: the file's content.
        begin: takes the GBS file inside, once its header is known to be good; None: it is unpacked
            and checked only. What it got is the file only when this function has returned.
        limit: bytes that the GBS file inside may have.

    Raises:
        BitstreamError: this is not an AOCX file that can be used; the message says what and where.
    """
    outer = sections(file)
    claimed = _section(file, outer, HASH_SECTION).read(0, 64).rstrip(b"\0\n")
    if not _HASH.fullmatch(claimed):
        raise file.wrong(
            f"{HASH_SECTION}: {quote(claimed.decode('latin-1'))} is not 40 hex digits",
            hint="it names the file in the store; build the file again",
        )
    binary = _section(file, outer, BINARY_SECTION)
    packed = _section(binary, sections(binary), GBS_SECTION)
    return replace(
        _unpack(packed, f"{file.where}: the GBS file inside", limit, begin),
        kind=AOCX,
        bitstream_id=BitstreamId(claimed.decode("ascii").lower()),
        sections=tuple((name, content.size) for name, content in outer.items()),
    )


def _section(file: ByteRange, found: Mapping[str, ByteRange], name: str) -> ByteRange:
    if name not in found:
        raise file.wrong(
            f"has no ELF section {name}",
            hint="not an AOCX file for these cards: emulator and library builds have no image",
        )
    return found[name]


def _unpack(packed: ByteRange, where: str, limit: int, begin: Begin | None) -> Contents:
    """The GBS file of one gzip member, no longer than it says itself.

    The header is read before the rest is unpacked, and only a piece is in memory at a time: a small
    file can unpack to a thousand times its size.
    """
    magic = packed.read(0, len(_GZIP))
    if packed.size < _GZIP_LEAST or magic != _GZIP:
        raise packed.wrong(f"not gzip: begins {magic.hex()!r}")
    size = int.from_bytes(packed.read(packed.size - 4), "little")  # RFC 1952, ISIZE
    if size > limit:
        raise packed.wrong(f"would unpack to {size} bytes; at most {limit} are read")
    head = b""
    found: Contents | None = None
    write: Write | None = None
    done = 0
    for piece in _pieces(packed):
        done += len(piece)
        if done > size:
            raise packed.wrong(f"unpacks to more than the {size} bytes that it says")
        if found is None:
            head += piece
            if len(head) < HEAD_BYTES and done < size:
                continue
            found = read_gbs(ByteRange.of_bytes(head, where, size=size))
            write = begin(size) if begin is not None else None
            piece, head = head, b""  # noqa: PLW2901  # all that was held back
        if write is not None:
            write(piece)
    return found or read_gbs(ByteRange.of_bytes(head, where))  # nothing came out: it says so


def _pieces(packed: ByteRange) -> Iterator[bytes]:
    """What a gzip member unpacks to, a piece at a time; its checksum and size are compared."""
    unpacker = zlib.decompressobj(_GZIP_WINDOW)
    taken = 0
    for source in packed.pieces(_PIECE_IN):
        taken += len(source)
        rest = source
        while not unpacker.eof:
            try:
                piece = unpacker.decompress(rest, _PIECE_OUT)
            except zlib.error as error:
                raise packed.wrong(f"cannot be unpacked: {error}") from None
            if piece:
                yield piece
            rest = unpacker.unconsumed_tail
            if not rest and len(piece) < _PIECE_OUT:
                break
        if unpacker.eof and (unpacker.unused_data or taken < packed.size):
            raise packed.wrong(
                "more than one gzip member, or bytes after it",
                hint="readers would disagree on what counts; build the file again",
            )
    if not unpacker.eof:
        raise packed.wrong("the gzip data ends early")


AOCX = FileKind("AOCX", "aocx", 40, "hash", MAGIC, "dfl", RawImage, blank=False, read=read_aocx)
