"""The GBS container: a header with metadata, then the raw image that the card takes.

    0   16 bytes  GUID "XeonFPGA" 0xb7 "GBSv001"
    16  u32 LE    length of the metadata in bytes
    20  JSON      the metadata
    ..  to EOF    the raw image (RBF); no trailer, no checksum

Everything is checked before anything is believed: on a card the kernel checks nothing of an image
(drivers/fpga/dfl-fme-pr.c, fme_pr). Any bytes give a value or a `BitstreamError`.
"""

import re

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.contents import Begin, Contents, FileKind
from fpga_plugin.bitstreams.gbs_metadata import parse_metadata
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.ids import BitstreamId

GUID = b"XeonFPGA\xb7GBSv001"
"""The first 16 bytes."""

HEADER_BYTES = 20
"""GUID and length of the metadata."""

MAX_METADATA_BYTES = 8191
"""OPAE accepts less than 8192 (METADATA_MAX_LEN, libraries/plugins/xfpga/bitstream.c)."""

HEAD_BYTES = HEADER_BYTES + MAX_METADATA_BYTES + len(GUID)
"""As much of a file as `read_gbs` may need: the header, and how the image begins."""

_FOREIGN = (
    (
        b"\x80\x86\x1f\x1d",
        "a legacy GBS without metadata (magic 0x1d1f8680)",
        "it does not name its AFU; pack its image again with OPAE's packager",
    ),
    (
        b"\x19\xfd\xea\xb6",
        "signed with PACSign (magic 0xb6eafd19)",
        "take the GBS file from before the signing; fpgasupdate is what loads a signed one",
    ),
    (
        b"xclbin2\0",
        "an xclbin, the format of XRT",
        "a GBS file is expected here; a store has xclbin files for Alveo cards, by themselves",
    ),
    (
        b"\x7fELF",
        "an ELF file (AOCX, as the OpenCL compiler writes it)",
        "a GBS file is expected here: AOCX files are used as they are, and hold GBS, not AOCX",
    ),
    (
        b"\x1f\x8b\x08",
        "a file compressed with gzip",
        "unpack it with `gunzip`; only AOCX files have one inside",
    ),
)

_TEXT_BYTES = 64
"""So many bytes of plain text at the start, or nothing else, are no image of a card."""
_TEXT = re.compile(rb"[\t\r\n -~]+")


def _container_of(data: bytes) -> str | None:
    """What kind of container `data` begins like; None: none that is known, a raw image maybe."""
    known = ((GUID, "a GBS file", ""), *_FOREIGN)
    return next((what for magic, what, _ in known if data.startswith(magic)), None)


def read_gbs(file: ByteRange, _begin: Begin | None = None) -> Contents:
    """Read the header of a GBS file; of the rest only how it begins.

    Raises:
        BitstreamError: this is not a GBS file that can be used; the message says what and where.
    """
    head = file.read(0, HEAD_BYTES)
    for magic, what, hint in _FOREIGN:
        if head.startswith(magic):
            raise file.wrong(f"not a GBS file but {what}", hint)
    if file.size < HEADER_BYTES:
        raise file.wrong(
            f"too short for a GBS file: {file.size} bytes, the header alone has {HEADER_BYTES}"
        )
    if not head.startswith(GUID):
        raise file.wrong(
            f"not a GBS file: byte 0 begins {head[:16].hex()}, not the GUID {GUID.hex()}",
            "it is a text: an error page of a server, or the pointer of a file in Git LFS?"
            if _TEXT.fullmatch(head[:_TEXT_BYTES])
            else "if this is a raw image (RBF), pack it with OPAE's packager",
        )
    length = int.from_bytes(head[16:HEADER_BYTES], "little")
    end = HEADER_BYTES + length
    if not 1 <= length <= MAX_METADATA_BYTES:
        raise file.wrong(
            f"the length of the metadata at byte 16 is {length};"
            f" 1 to {MAX_METADATA_BYTES} is allowed"
        )
    if end > file.size:
        raise file.wrong(
            f"the metadata would end at byte {end}, but the file has {file.size} bytes"
        )
    metadata = parse_metadata(file.part(HEADER_BYTES, length))
    if end == file.size:
        raise file.wrong(f"no image follows the metadata at byte {end}")
    if container := _container_of(head[end:]):
        # No card takes that as logic: its PR would fail, and leave the port poisoned.
        raise file.wrong(
            f"the image at byte {end} is no raw one but {container}",
            "it was packed twice, or signed inside; pack the raw image (RBF) again",
        )
    return Contents(
        kind=GBS,
        bitstream_id=BitstreamId(metadata.afu_id),
        interface_id=metadata.interface_id,
        afu_id=metadata.afu_id,
        name=metadata.accelerators[0].name,
        platform_name=metadata.platform_name,
        image_bytes=file.size - end,
        details=metadata,
    )


GBS = FileKind("GBS", "gbs", 32, "AFU id", GUID, "dfl", RawImage, blank=True, read=read_gbs)
