"""AOCX files: ELF in ELF, with a gzip'd GBS; and the one interface to all formats."""

import gzip
import random
import tracemalloc

import pytest
from doubles.bitstreams import AFU, GBS, HASH, IMAGE, INTERFACE, aocx, elf, gbs
from hypothesis import given
from hypothesis import strategies as st

from fpga_plugin.bitstreams import gbs as gbs_module
from fpga_plugin.bitstreams.aocx import AOCX, MAX_GBS_BYTES, read_aocx
from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.elf import MAX_SECTIONS, sections
from fpga_plugin.bitstreams.kinds import image_of, read_data
from fpga_plugin.errors import BitstreamError


def refusal(data: bytes, **options: int) -> str:
    with pytest.raises(BitstreamError) as caught:
        read_aocx(ByteRange.of_bytes(data, "/s/a.aocx"), **options)
    assert caught.value.message.startswith("/s/a.aocx: ")
    return str(caught.value)


@pytest.mark.parametrize("bits", [32, 64])
def test_an_aocx_file_is_read_whole(bits):
    read, image = image_of(aocx(bits=bits), "a")
    assert read.kind is AOCX
    assert read.bitstream_id == HASH
    assert (read.interface_id, read.afu_id, image.data) == (INTERFACE, AFU, IMAGE)
    assert (".acl.rand_hash", 40) in read.sections


def test_a_gbs_file_comes_through_the_same_interface():
    read, image = image_of(GBS, "a")
    assert (read.kind, read.bitstream_id, image.data) == (gbs_module.GBS, AFU, IMAGE)


@pytest.mark.parametrize(
    "name", [HASH.upper().encode(), HASH.encode() + b"\0", HASH.encode() + b"\n"]
)
def test_the_hash_is_read_in_any_case_and_with_its_terminator(name):
    assert read_aocx(ByteRange.of_bytes(aocx(name=name), "a")).bitstream_id == HASH


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"../" * 13 + b"x",
        HASH.encode()[:-1],
        HASH.encode() + b"0",
        b"\xd9\xa0" * 20,
        b"\0" * 40,
    ],
)
def test_a_name_that_is_no_hash_is_refused(name):
    assert ".acl.rand_hash: '" in refusal(aocx(name=name))
    assert "is not 40 hex digits" in refusal(aocx(name=name))


def with_bytes(at: int, put: bytes) -> bytes:
    data = aocx()
    return data[:at] + put + data[at + len(put) :]


PACKED = gzip.compress(GBS, mtime=0)
INNER = elf((".acl.gbs.gz", PACKED))
NAME = (".acl.rand_hash", HASH.encode())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "not an ELF file: it begins ''"),
        (b"\x7fELF", "4 bytes, an ELF header has at least 52"),
        (aocx()[:60], "60 bytes, this ELF header has 64"),
        (aocx()[:-1], "the ELF section table would end at byte"),
        (with_bytes(4, b"\3"), "ELF class 3 is neither"),
        (with_bytes(5, b"\2"), "ELF byte order 2"),
        (with_bytes(40, b"\xff" * 8), "would end at byte 18446744073709551871"),
        (with_bytes(58, b"\x28\0"), "section headers of 40 bytes instead of 64"),
        (with_bytes(60, b"\0\0"), f"0 ELF sections; 1 to {MAX_SECTIONS} are read"),
        (with_bytes(60, b"\xff\xff"), "65535 ELF sections"),
        (with_bytes(62, b"\xff\xff"), "the ELF section of names is number 65535 of 4"),
        (elf(NAME), "has no ELF section .acl.fpga.bin"),
        (elf((".acl.fpga.bin", INNER)), "has no ELF section .acl.rand_hash"),
        (elf(NAME, (".acl.fpga.bin", b"x" * 99)), ".acl.fpga.bin: not an ELF file"),
        (elf(NAME, (".acl.fpga.bin", elf())), "has no ELF section .acl.gbs.gz"),
        (aocx(more=(NAME,)), "'.acl.rand_hash' is there twice"),
        (aocx(more=(("n" * 200, b""),)), "does not end within 128 bytes"),
        (aocx(more=(("\n", b""),)), "has a name of other than ASCII"),
        (aocx(b""), ".acl.gbs.gz: not gzip: begins ''"),
        (aocx(GBS), ".acl.gbs.gz: not gzip: begins '58656f'"),
        (aocx(PACKED[:-9] + PACKED[-8:]), ".acl.gbs.gz: cannot be unpacked"),
        (aocx(PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:]), "incorrect data check"),
        (aocx(PACKED + PACKED), "more than one gzip member"),
        (aocx(PACKED + PACKED[-4:]), "more than one gzip member, or bytes after it"),
        (aocx(PACKED[:-4] + b"\1\0\0\0"), "incorrect length check"),
        (aocx(PACKED[:-4] + b"\xff\xff\xff\xff"), "would unpack to 4294967295 bytes"),
        (aocx(gzip.compress(b"", mtime=0)), "the GBS file inside: too short for a GBS file"),
        (aocx(gzip.compress(aocx(), mtime=0)), "the GBS file inside: not a GBS file but an ELF"),
        (aocx(gzip.compress(GBS[:-33], mtime=0)), "the GBS file inside: no image follows"),
    ],
)
def test_a_malformed_file_is_refused_with_what_is_wrong(data, expected):
    assert expected in refusal(data)


def test_what_would_unpack_to_more_than_the_limit_is_not_unpacked():
    assert f"would unpack to {len(GBS)} bytes; at most 100 are read" in refusal(aocx(), limit=100)
    assert MAX_GBS_BYTES == 1 << 30


def test_a_bomb_that_lies_about_its_size_gives_no_more_than_it_says():
    bomb = bytearray(gzip.compress(bytes(64 << 20), mtime=0))
    bomb[-4:] = (1000).to_bytes(4, "little")
    assert "unpacks to more than the 1000 bytes that it says" in refusal(aocx(bytes(bomb)))


HEAD = len(GBS) - len(IMAGE)
MIB = 1 << 20


@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 7])
@pytest.mark.parametrize("content", [bytes, random.Random(1).randbytes])
def test_an_image_of_any_size_comes_out_whole(size, content):
    image = content(size - HEAD)
    data = aocx(gzip.compress(gbs(image), 1, mtime=0))
    whole, unpacked = image_of(data, "a")
    assert unpacked.data == image
    assert read_data(data, "a") == whole
    # Each of a member's last bytes counts, whatever the size of the pieces.
    trailer = data.index(size.to_bytes(4, "little"), data.index(b"\x1f\x8b\x08\0"))
    for at in range(trailer - 4, trailer + 4):
        broken = bytearray(data)
        broken[at] ^= 1
        assert parses(bytes(broken)) is False


def parses(data: bytes) -> bool:
    try:
        read_data(data, "a")
    except BitstreamError:
        return False
    return True


def peak(work) -> int:
    """Bytes that a piece of work had in memory at the most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_is_no_gbs_file_is_not_unpacked_to_its_end():
    bomb = aocx(gzip.compress(bytes(64 * MIB), 1, mtime=0))
    assert peak(lambda: parses(bomb)) < 8 * MIB


def test_an_image_that_nobody_asked_for_is_not_in_memory_and_one_that_is_only_once():
    data = aocx(gzip.compress(gbs(bytes(64 * MIB)), 1, mtime=0))
    assert peak(lambda: read_data(data, "a")) < 8 * MIB
    assert peak(lambda: image_of(data, "a")) < 80 * MIB


@given(st.integers(0, len(aocx()) - 1), st.binary(max_size=9), st.integers(0, 9))
def test_a_damaged_file_gives_a_value_or_a_bitstream_error(at, put, cut):
    data = aocx()
    try:
        _, image = image_of(data[:at] + put + data[at + cut :], "a")
    except BitstreamError:
        return
    assert image.data


@given(st.binary(max_size=200))
def test_any_bytes_give_sections_or_a_bitstream_error(rest):
    try:
        sections(ByteRange.of_bytes(b"\x7fELF" + rest, "a"))
    except BitstreamError:
        return
