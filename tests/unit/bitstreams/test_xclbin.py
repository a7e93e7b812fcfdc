"""xclbin files: what is read of them, and with which words others are refused."""

import struct
import tracemalloc
from pathlib import Path

import pytest
from doubles import xclbins
from doubles.xclbins import (
    ALVEO,
    BITSTREAM,
    DDR4,
    DRAM,
    HBM,
    KERNEL,
    LAYOUT,
    METADATA,
    PARTITION,
    STREAM,
    TOPOLOGY,
    VADD,
    axlf,
    kernel,
    memory,
    metadata,
    partition,
    parts,
    units,
)
from hypothesis import given
from hypothesis import strategies as st

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.contents import Contents
from fpga_plugin.bitstreams.xclbin import HEADER_BYTES, MAX_SECTIONS, read_xclbin
from fpga_plugin.errors import BitstreamError
from fpga_plugin.hardware.image import MemoryBank

GOOD = axlf(parts().values())


def read(data: bytes) -> Contents:
    return read_xclbin(ByteRange.of_bytes(data, "/srv/x.xclbin"))


def refusal(data: bytes) -> str:
    with pytest.raises(BitstreamError) as refused:
        read(data)
    assert refused.value.message.startswith("/srv/x.xclbin: ")
    return str(refused.value)


def changed(at: int, value: bytes) -> bytes:
    return GOOD[:at] + value + GOOD[at + len(value) :]


def without(kind: int) -> bytes:
    return axlf(section for section in parts().values() if section[0] != kind)


# ------------------------------------------------------------------ what is read


def test_a_file_says_which_image_it_is_for_which_shell_and_what_the_driver_is_told():
    facts = read(GOOD)
    assert (facts.afu_id, facts.interface_id) == (VADD, ALVEO)
    assert facts.name == "vadd"
    assert facts.platform_name == "xilinx_u55c_gen3x16_xdma_base_3"
    assert facts.details.xrt_version == "2.19.0"
    assert [kernel.name for kernel in facts.details.kernels] == ["vadd"]
    assert facts.details.slot_size == 4096
    assert not facts.details.dataflow
    assert facts.image_bytes == len(xclbins.bits(b"logic"))
    assert dict(facts.sections)["PARTITION_METADATA"] == len(partition(ALVEO))


def test_a_file_that_amds_own_tool_wrote_is_read():
    """By xclbinutil 2.25.0 of Debian, of sections of our own; it adds data outside of sections."""
    facts = read(Path(__file__).with_name("xclbinutil.xclbin").read_bytes())
    assert facts.afu_id == "08bce739e6cc793575ed9b7f02ef9ddf"
    assert (facts.interface_id, facts.details.xrt_version) == (ALVEO, "2.25.0")
    assert (facts.name, facts.platform_name) == ("of xclbinutil", "xilinx_u55c_simulated_1")
    assert facts.details.dataflow
    assert [kernel.name for kernel in facts.details.kernels] == ["vadd"]
    assert [(bank.tag, bank.used, bank.base) for bank in facts.details.memory_banks] == [
        ("HBM[0]", True, 0),
        ("HBM[1]", False, 256 << 20),
        ("PLRAM[0]", True, 512 << 30),
    ]
    assert [kind for kind, _ in facts.sections][-1] == "ASK_GROUP_TOPOLOGY"


def test_the_uuid_is_read_in_the_files_order_of_bytes():
    assert read(axlf(parts().values(), "00112233445566778899aabbccddeeff")).afu_id.startswith(
        "0011"
    )


def test_memories_are_those_of_the_topology_in_bytes():
    first, second, plram, host = read(GOOD).details.memory_banks
    assert first == MemoryBank("HBM[0]", "HBM", used=True, on_card=True, base=0, size=256 << 20)
    assert second.size == 256 << 20
    assert not second.clearable, "the image does not reach it"
    assert (plram.type, plram.base, plram.clearable) == ("DRAM", 512 << 30, True)
    assert not host.clearable, "the host's memory is not the card's, whatever its type"


@pytest.mark.parametrize(
    ("bank", "clearable"),
    [
        ((DDR4, 1, 1, 0, "bank0"), True),
        ((DDR4, 0, 1, 0, "bank0"), False),
        ((DDR4, 1, 0, 0, "bank0"), False),
        ((STREAM, 1, 7, 7, "stream0"), False),
        ((9, 1, 7, 7, "stream1"), False),
        ((10, 1, 7, 0, "h"), False),
        ((11, 1, 7, 0, "ps"), False),
        ((5, 1, 7, 0, "aurora"), False),
        ((HBM, 1, 7, 0, "host[0]"), False),
        ((99, 1, 7, 0, "new"), False),
        ((STREAM, 1, 1 << 63, 1 << 63, "stream2"), False),
        ((DDR4, 1, 1 << 52, (1 << 64) - (1 << 62), "bank0"), True),
    ],
)
def test_only_used_memory_of_the_card_with_addresses_can_be_cleared(bank, clearable):
    (found,) = read(axlf(parts(banks=memory(bank)).values())).details.memory_banks
    assert found.clearable is clearable
    if not found.on_card:
        assert (found.base, found.size) == (0, 0), "a stream's fields are no addresses"


def test_a_file_without_memories_or_compute_units_is_read():
    facts = read(axlf(parts()[kind] for kind in (BITSTREAM, METADATA, PARTITION)))
    assert (facts.details.memory_banks, facts.details.dataflow) == ((), False)


@pytest.mark.parametrize(
    ("unit", "dataflow"),
    [
        ((KERNEL, 0x0100, 0, "vadd:vadd_0"), True),
        ((KERNEL, 0x01FF, 0, "vadd:vadd_0"), True),
        ((KERNEL, 0x0001, 0, "vadd:vadd_0"), False),
        ((KERNEL, 0x0201, 0, "free:free_0"), False),
        ((7, 0x0100, 0, "ps"), True),
        ((5, 0x0100, 0, "memory"), False),
    ],
)
def test_dataflow_is_a_compute_units_control_protocol(unit, dataflow):
    layout = units((KERNEL, 0, 0x20000, "other:other_0"), unit)
    assert read(axlf(parts(layout=layout).values())).details.dataflow is dataflow


def test_an_image_of_hundreds_of_mebibytes_is_not_read_into_memory():
    size = 1 << 40
    at = 1 << 20  # of the file is there; the image would be behind it
    sections = [section for section in parts().values() if section[0] != BITSTREAM]
    data = axlf([*sections, (BITSTREAM, "BITSTREAM", b"image")], length=at + size)
    entry = HEADER_BYTES + 40 * 4
    data = data[: entry + 24] + struct.pack("<QQ", at, size) + data[entry + 40 :]
    file = ByteRange(lambda start, count: data[start : start + count], 0, at + size, "f")
    tracemalloc.start()
    try:
        assert read_xclbin(file).image_bytes == size
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("size", [0, 7, 8, HEADER_BYTES - 1])
def test_a_file_without_a_whole_header_is_refused(size):
    assert f"no xclbin: {size} bytes" in refusal(GOOD[:size])


def test_another_magic_is_refused():
    assert "begins 78636c62696e3200" in refusal(b"xclbin0\0" + GOOD[8:])


@pytest.mark.parametrize("size", [0, 100, -2])
def test_a_signature_inside_is_refused_with_what_to_do(size):
    assert f"a signature of {size} bytes inside" in refusal(axlf(parts().values(), signature=size))


@pytest.mark.parametrize(
    ("data", "hint"), [(GOOD[:-1], "copy or build it again"), (GOOD + b"\0", "--add-signature")]
)
def test_a_file_of_another_length_than_it_says_is_refused(data, hint):
    assert f"says that it has {len(GOOD)} bytes, and has {len(data)}" in refusal(data)
    assert hint in refusal(data)


@pytest.mark.parametrize(
    ("mode", "words"),
    [(0, "its mode is 0, flat"), (2, "tandem"), (4, "emulation"), (5, "emulation"), (7, "unknown")],
)
def test_only_an_image_for_a_partial_region_is_taken(mode, words):
    assert words in refusal(axlf(parts().values(), mode=mode))


@pytest.mark.parametrize("uuid", ["0" * 32, "f" * 32])
def test_a_uuid_that_names_nothing_is_refused(uuid):
    assert "names nothing" in refusal(axlf(parts().values(), uuid))


@pytest.mark.parametrize("count", [0, MAX_SECTIONS + 1, 0xFFFFFFFF])
def test_a_number_of_sections_beyond_the_limit_is_refused(count):
    assert f"would have {count} sections" in refusal(axlf(parts().values(), count=count))


def test_as_many_sections_as_are_read_are_read():
    more = [(16, "USER_METADATA", b"x")] * (MAX_SECTIONS - len(parts()))
    assert len(read(axlf([*parts().values(), *more])).sections) == MAX_SECTIONS


def test_a_file_may_be_a_part_of_another():
    file = ByteRange.of_bytes(b"before it" + GOOD + b"behind it", "f").part(9, len(GOOD))
    assert read_xclbin(file) == read(GOOD)


def test_a_table_of_sections_that_is_cut_off_is_refused():
    assert "inside its table" in refusal(axlf([], count=1))


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (HEADER_BYTES + 40 * 5 - 1, 1),  # in the table
        (len(GOOD), 1),
        (len(GOOD) - 1, 2),
        (2**64 - 1, 2),
        (2**64 - 1, 2**64 - 1),
    ],
)
def test_a_section_that_is_not_in_the_file_is_refused(offset, size):
    data = changed(HEADER_BYTES + 24, struct.pack("<QQ", offset, size))
    assert f"section BITSTREAM would be at byte {offset}, {size} bytes" in refusal(data)


def test_a_section_inside_another_is_refused():
    (offset,) = struct.unpack_from("<Q", GOOD, HEADER_BYTES + 40 + 24)
    data = changed(HEADER_BYTES + 24, struct.pack("<Q", offset + 1))
    assert "begins inside another" in refusal(data)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (BITSTREAM, "BITSTREAM"),
        (METADATA, "EMBEDDED_METADATA"),
        (PARTITION, "PARTITION_METADATA"),
    ],
)
def test_a_file_without_a_section_that_is_needed_is_refused(kind, name):
    assert f"has no section {name}" in refusal(without(kind))
    empty = {**parts(), kind: (kind, name, b"")}
    assert f"has no section {name}" in refusal(axlf(empty.values()))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (BITSTREAM, "BITSTREAM"),
        (METADATA, "EMBEDDED_METADATA"),
        (PARTITION, "PARTITION_METADATA"),
        (TOPOLOGY, "MEM_TOPOLOGY"),
        (LAYOUT, "IP_LAYOUT"),
    ],
)
def test_a_section_that_is_there_twice_is_refused(kind, name):
    data = axlf([*parts().values(), parts()[kind]])
    assert f"has 2 sections {name}" in refusal(data)


def test_an_image_for_versal_is_told_as_that():
    sections = [(18, "PDI", b"pdi"), *(one for one in parts().values() if one[0] != BITSTREAM)]
    assert "for a Versal device" in refusal(axlf(sections))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", None),
        (b"\0" * 7, "has 7 bytes and says -1 entries"),
        (struct.pack("<i4x", -1), "says -1 entries"),
        (struct.pack("<i4x", 1), "says 1 entries"),
        (memory(*xclbins.BANKS)[:-1], "says 4 entries"),
        (memory(*xclbins.BANKS) + b"\0", "says 4 entries"),
        (struct.pack("<i4x", 2000) + bytes(40 * 2000), "at most 1024 are read"),
        (memory((DRAM, 1, 1 << 54, 1, "bank0")), "no 64-bit addresses"),
    ],
)
def test_a_memory_topology_of_another_length_than_it_says_is_refused(content, words):
    data = axlf({**parts(), TOPOLOGY: (TOPOLOGY, "MEM_TOPOLOGY", content)}.values())
    if words is None:
        assert read(data).details.memory_banks == ()
    else:
        assert words in refusal(data)


def test_a_layout_of_another_length_than_it_says_is_refused():
    data = axlf(parts(layout=units((KERNEL, 0, 0, "a:a"))[:-1]).values())
    assert "IP_LAYOUT: has 87 bytes and says 1 entries" in refusal(data)


# ------------------------------------------------------------------ which shell


def of_interfaces(*uuids) -> bytes:
    return axlf(parts(interface=partition(*uuids)).values())


def test_an_image_that_names_no_interface_is_refused_for_it_would_go_on_any_shell():
    assert "names no interface" in refusal(of_interfaces())
    bare = xclbins.device_tree(("", {}, ()))
    assert "names no interface" in refusal(axlf(parts(interface=bare).values()))


def test_an_image_for_several_partitions_is_refused():
    assert "names 2 interfaces" in refusal(of_interfaces(ALVEO, "1" * 31 + "2"))
    nodes = (xclbins.interfaces(ALVEO), ("interfaces@1", {}, xclbins.interfaces(ALVEO)[2]))
    tree = xclbins.device_tree(("", {}, nodes))
    assert "names 2 interfaces" in refusal(axlf(parts(interface=tree).values()))


def test_an_empty_second_group_of_interfaces_is_refused_as_well():
    """libfdt finds whichever is first."""
    tree = xclbins.device_tree(("", {}, (xclbins.interfaces(ALVEO), ("interfaces@1", {}, ()))))
    assert "several partitions" in refusal(axlf(parts(interface=tree).values()))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "is not"),
        (b"\0", "is not"),
        (ALVEO.encode(), "is not"),
        (ALVEO.encode()[:-1] + b"\0", "is not"),
        (ALVEO.encode() + b"\0\0", "is not"),
        (ALVEO.upper().encode() + b"\0", "not written as 32 lower-case hex digits"),
        (b"5b1a0d1e-0c2f-4a6e-9d3b-7c8f2e4a6b10\0", "not written as 32 lower-case hex digits"),
        (b"0" * 32 + b"\0", "names nothing"),
        (b"f" * 32 + b"\0", "names nothing"),
        (b"\xff" * 32 + b"\0", "is not"),
    ],
)
def test_an_interface_that_is_not_written_as_shells_write_it_is_refused(value, words):
    assert words in refusal(of_interfaces(value))


def test_an_interface_of_one_digit_is_one_if_it_is_neither_0_nor_f():
    assert read(of_interfaces("1" * 32)).interface_id == "1" * 32


def test_an_interface_without_a_uuid_or_with_two_is_refused():
    for nodes in (
        [("@0", {}, ())],
        [("@0", {"interface_uuid": ALVEO.encode() + b"\0"}, ()), ("@1", {"other": b""}, ())],
    ):
        tree = xclbins.device_tree(("", {}, [("interfaces", {}, nodes)]))
        assert "has 0 interface_uuid" in refusal(axlf(parts(interface=tree).values()))


def test_interfaces_elsewhere_in_the_tree_are_no_interfaces():
    elsewhere = ("other", {}, [xclbins.interfaces("1" * 31 + "2")])
    inside = ("x", {"interface_uuid": b""}, ())
    deeper = ("@0", {"interface_uuid": ALVEO.encode() + b"\0"}, [inside])
    tree = xclbins.device_tree(("", {}, [elsewhere, ("interfaces", {}, [deeper])]))
    assert read(axlf(parts(interface=tree).values())).interface_id == ALVEO


def test_a_partition_beyond_the_limit_is_refused_unread():
    data = axlf(parts(interface=bytes((1 << 20) + 1)).values())
    assert "at most 1048576 are read" in refusal(data)


# ------------------------------------------------------------------ any bytes


@given(st.binary(max_size=600))
def test_any_bytes_give_facts_or_a_refusal(noise):
    for data in (noise, GOOD[:8] + noise, changed(HEADER_BYTES, noise[:200])):
        try:
            facts = read(data)
        except BitstreamError:
            continue
        assert facts.interface_id == ALVEO


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_any_byte_may_be_wrong(at, value):
    try:
        facts = read(changed(at, bytes([value])))
    except BitstreamError:
        return
    assert len(facts.afu_id) == 32


def test_kernels_come_from_the_xml():
    data = axlf(parts(xml=metadata(kernel("a"), kernel("b"), name="two & more")).values())
    facts = read(data)
    assert [one.name for one in facts.details.kernels] == ["a", "b"]
    assert facts.name == "two & more"
