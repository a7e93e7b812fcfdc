"""The kernels of an xclbin's XML: what XRT's library passes to the driver, and what it cannot read.

The expected values are worked out by hand from that library's source (`xclbin_kernels` names it).
"""

import tracemalloc

import pytest
from doubles.xclbins import element, kernel, metadata
from hypothesis import given
from hypothesis import strategies as st

from fpga_plugin.bitstreams import xclbin_kernels
from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.xclbin_kernels import Kernels, read_kernels
from fpga_plugin.errors import BitstreamError
from fpga_plugin.hardware.image import KernelArgument


def read(xml: bytes) -> Kernels:
    return read_kernels(ByteRange.of_bytes(xml, "f: EMBEDDED_METADATA"))


def one(*arguments, **attributes):
    (found,) = read(metadata(kernel("k", arguments, **attributes))).kernels
    return found


def refusal(xml: bytes) -> str:
    with pytest.raises(BitstreamError) as refused:
        read(xml)
    assert refused.value.message.startswith("f: EMBEDDED_METADATA: ")
    return refused.value.message


# ------------------------------------------------------------------ arguments


def test_arguments_are_in_the_order_of_their_ids_those_without_one_last():
    found = one(("c", 2, 0x30, 4), ("x", "", 0x40, 4), ("a", 0, 0x10, 8), ("b", 1, 0x1C, 8))
    assert [argument.name for argument in found.arguments] == ["a", "b", "c", "x"]
    assert found.arguments[1] == KernelArgument("b", 0x1C, 8)


def test_parts_of_one_argument_are_put_together():
    """As of an OpenCL kernel's `global_size`: sizes add, the lowest offset counts."""
    found = one(("a", 0, 0x20, 4), ("b", 1, 0x30, 4), ("a_y", 0, 0x10, 4), ("a_z", 0, 0x28, 4))
    assert found.arguments == (KernelArgument("a", 0x10, 12), KernelArgument("b", 0x30, 4))


def test_arguments_without_an_id_are_not_put_together():
    found = one(("x", "", 0x10, 4), ("y", "", 0x18, 4))
    assert [argument.name for argument in found.arguments] == ["x", "y"]


def test_a_gap_in_the_ids_is_refused():
    assert "lack the id 1" in refusal(metadata(kernel("k", [("a", 0, 0, 4), ("c", 2, 4, 4)])))


@pytest.mark.parametrize(
    ("text", "value"), [("0x1c", 28), ("0X1C", 28), ("28", 28), ("034", 28), ("", 0), ("0", 0)]
)
def test_numbers_are_written_as_in_c(text, value):
    assert one(("a", "", text, 4)).arguments[0].offset == value


@pytest.mark.parametrize("text", ["-1", "1 ", " 1", "09", "0x", "1e3", "x", "٣", "0x1_0", "+1"])
def test_what_is_no_number_is_refused(text):
    assert "no number" in refusal(metadata(kernel("k", [("a", 0, text, 4)])))


@pytest.mark.parametrize("text", ["0x100000000", "4294967296", "99999999999999999999"])
def test_numbers_that_the_drivers_fields_cut_off_are_refused(text):
    assert "above 0xffffffff" in refusal(metadata(kernel("k", [("a", 0, text, 4)])))


# ------------------------------------------------------------------ kernels


def test_the_address_range_is_that_of_the_first_slave_port_else_64_kib():
    assert one(registers="0x2000").address_range == 0x2000
    assert one(registers=None).address_range == 0x10000
    ports = element("port", mode="slave", range=256) + element("port", mode="slave", range=4096)
    (found,) = read(metadata(element("kernel", ports, name="k"))).kernels
    assert found.address_range == 256


def test_a_register_behind_the_address_range_is_refused():
    one(("a", 0, 0xFF8, 8))
    assert "ends at 0x1001" in refusal(metadata(kernel("k", [("a", 0, 0xFF9, 8)])))


@pytest.mark.parametrize(
    ("attributes", "resets"),
    [
        ({}, False),
        ({"swReset": "true"}, True),
        ({"swReset": "True"}, False),
        ({"swReset": 1}, False),
    ],
)
def test_software_reset_is_an_attribute(attributes, resets):
    assert one(**attributes).software_reset is resets


def test_an_address_range_may_be_as_large_as_the_drivers_field():
    assert one(registers="0xFFFFFFFF").address_range == 0xFFFFFFFF


def test_two_kernels_of_one_name_are_refused():
    assert "has two kernels 'k'" in refusal(metadata(kernel("k"), kernel("k")))


@pytest.mark.parametrize("name", ["k" * 63, "ä" * 31 + "k"])
def test_a_name_of_63_bytes_fits_the_drivers_field(name):
    assert read(metadata(kernel(name))).kernels[0].name == name


@pytest.mark.parametrize("name", ["", "k" * 64, "ä" * 32])
def test_a_name_that_does_not_fit_is_refused(name):
    assert "a name has 1 to 63 bytes" in refusal(metadata(kernel(name)))
    assert "a name has 1 to 63 bytes" in refusal(metadata(kernel("k", [(name, 0, 0, 4)])))


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        (element("kernel"), "a kernel has no attribute name"),
        (element("kernel", element("arg", id=0), name="k"), "no attribute name"),
        (element("kernel", element("arg", name="a"), name="k"), "no attribute id"),
        (element("kernel", element("arg", name="a", id=0, size=1), name="k"), "attribute offset"),
        (element("kernel", element("arg", name="a", id=0, offset=1), name="k"), "attribute size"),
        (element("kernel", element("port", range=1), name="k"), "no attribute mode"),
        (element("kernel", element("port", mode="slave"), name="k"), "no attribute range"),
        (
            element("kernel", element("instance", element("addrRemap")), name="k"),
            "no attribute base",
        ),
    ],
)
def test_an_attribute_that_the_library_needs_and_does_not_find_is_refused(inside, words):
    assert words in refusal(metadata(inside))


def test_only_what_is_directly_in_the_core_counts():
    """`module` and the like have elements of the same names deep inside."""
    module = element("module", element("arg") + element("port") + element("kernel"), name="m")
    inside = element("kernel", module + element("arg", name="a", id="", offset=0, size=4), name="k")
    (found,) = read(metadata(inside + element("other", element("kernel")))).kernels
    assert found.name == "k"
    assert len(found.arguments) == 1


def test_of_each_element_on_the_way_the_first_counts():
    def project(*devices: str) -> bytes:
        return element("project", "".join(devices)).encode()

    def device(name: str) -> str:
        return element("device", element("core", kernel(name)))

    first = element("platform", element("board") + device("a") + device("b"))
    found = read(project(first, element("platform", device("c"))))
    assert [one.name for one in found.kernels] == ["a"]
    empty = project(element("platform"), element("platform", device("c")))
    assert "has no element project/platform/device/core" in refusal(empty)
    nested = project(element("platform", element("platform", device("c"))))
    assert "has no element" in refusal(nested)


@pytest.mark.parametrize(("base", "good"), [("0xFFFFFFFFFFFFFFFF", True), (str(1 << 64), False)])
def test_a_compute_units_base_is_an_address_of_64_bits(base, good):
    xml = metadata(
        element("kernel", element("instance", element("addrRemap", base=base)), name="k")
    )
    assert read(xml).kernels if good else "base is" in refusal(xml)


def test_a_core_without_kernels_is_a_blank():
    assert read(metadata()).kernels == ()


# ------------------------------------------------------------------ the command queue


@pytest.mark.parametrize(
    ("instances", "slot"),
    [
        (0, 4096),  # 16 slots at least
        (7, 4096),  # 15 are asked for
        (8, 2048),  # 17: 32, the next multiple
        (16, 1024),  # 33: 64
        (31, 1024),  # 63: 64
        (32, 682),  # 65: 96
        (48, 512),  # 97: 128
        (128, 512),  # at most 128
    ],
)
def test_slots_are_two_a_compute_unit_and_one_more(instances, slot):
    assert read(metadata(kernel(instances=instances))).slot_size == slot


@pytest.mark.parametrize(
    ("end", "instances", "slot"),
    [
        (0x2000, 1, 8192),  # 8 slots
        (0x1800, 1, 6553),  # 10
        (0x1001, 0, 4369),  # 15
        (0x401, 48, 1024),  # 63: 64
        (0x10000, 1, 65536),
    ],
)
def test_a_slot_holds_the_registers_of_the_largest_kernel(end, instances, slot):
    small = kernel("small", instances=instances)
    large = kernel("large", [("a", 0, end - 4, 4)], registers="0x100000", instances=0)
    assert read(metadata(large, small)).slot_size == slot


def test_a_kernel_that_needs_more_than_the_queue_is_refused():
    """XRT's library divides by zero."""
    large = kernel("large", [("a", 0, 0x10000, 4)], registers="0x100000")
    assert "registers end at byte 65540" in refusal(metadata(large))


# ------------------------------------------------------------------ XML


@pytest.mark.parametrize(
    "declaration",
    [
        "<!DOCTYPE project>",
        '<!DOCTYPE project SYSTEM "file:///etc/passwd">',
        '<!DOCTYPE project [<!ENTITY a "b">]>',
        '<!DOCTYPE project [<!ENTITY a SYSTEM "file:///etc/passwd">]>',
    ],
)
def test_document_types_and_so_entities_are_refused(declaration):
    assert "has a document type" in refusal(f'{declaration}<project name="a"/>'.encode())


def test_an_entity_without_a_document_type_is_no_xml():
    assert "is not XML: undefined entity" in refusal(b'<project name="&a;"/>')


@pytest.mark.parametrize("encoding", ["utf-8", "UTF-8", "us-ascii"])
def test_utf_8_is_read(encoding):
    assert read(metadata(kernel()).replace(b"UTF-8", encoding.encode())).name == "vadd"


@pytest.mark.parametrize("encoding", ["utf-16", "iso-8859-1", "ebcdic", ""])
def test_another_encoding_is_refused(encoding):
    assert "EMBEDDED_METADATA" in refusal(metadata().replace(b"UTF-8", encoding.encode()))


@pytest.mark.parametrize(
    "xml",
    [
        b"text",
        b"<project>",
        b"<a/><b/>",
        metadata().replace(b"vadd", b"\xff"),
        metadata().decode().encode("utf-16"),
        metadata()[:-4] + b"\0t>",
    ],
)
def test_what_is_no_xml_is_refused(xml):
    assert "is not XML" in refusal(xml)


def test_null_bytes_at_the_end_do_not_count():
    assert read(metadata(kernel()) + bytes(9)) == read(metadata(kernel()))


@pytest.mark.parametrize("xml", [b"", bytes(100)])
def test_an_empty_section_is_refused(xml):
    assert "has 0 bytes" in refusal(xml)


# ------------------------------------------------------------------ limits


def test_a_section_beyond_the_limit_is_refused_unread():
    file = ByteRange(lambda _at, count: b" " * count, 0, 1 << 40, "f: EMBEDDED_METADATA")
    with pytest.raises(BitstreamError, match=f"1 to {xclbin_kernels.MAX_BYTES} are read"):
        read_kernels(file)


def test_too_many_kernels_or_arguments_are_refused():
    many = [element("kernel", name=f"k{n}") for n in range(xclbin_kernels.MAX_KERNELS + 1)]
    assert len(read(metadata(*many[1:])).kernels) == xclbin_kernels.MAX_KERNELS
    assert "more than 1024 kernels" in refusal(metadata(*many))
    argument = element("arg", name="a", id="", offset=0, size=4)
    inside = argument * xclbin_kernels.MAX_ARGUMENTS
    (most,) = read(metadata(element("kernel", inside, name="k"))).kernels
    assert len(most.arguments) == xclbin_kernels.MAX_ARGUMENTS
    inside += argument
    assert "more than 16384 arguments" in refusal(metadata(element("kernel", inside, name="k")))


def test_elements_are_not_followed_without_end():
    deep = b"<a>" * xclbin_kernels.MAX_DEPTH
    assert "no element project" in refusal(deep + deep.replace(b"<", b"</"))
    assert "deeper than 64" in refusal(b"<a>" + deep + deep.replace(b"<", b"</") + b"</a>")


@pytest.mark.parametrize(
    "hostile",
    [
        b"<a>" * 1_000_000,
        b'<a b="' + b"c" * 3_900_000 + b'"/>',
        b"<a " + b" ".join(b'b%d=""' % n for n in range(300_000)) + b"/>",
        b"<" + b"a" * 3_900_000 + b"/>",
        b"<a>" + b"<!-- " + b"c" * 3_900_000 + b" --></a>",
        b"<a>" + b"c" * 3_900_000 + b"</a>",
        b"<a><![CDATA[" + b"c" * 3_900_000 + b"]]></a>",
    ],
    ids=["depth", "value", "attributes", "name", "comment", "text", "cdata"],
)
def test_hostile_xml_takes_no_memory(hostile):
    tracemalloc.start()
    try:
        refusal(hostile)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=20))
def test_any_bytes_give_kernels_or_a_refusal(at, noise):
    good = metadata(kernel(), kernel("other", instances=3))
    for xml in (good[:at] + noise + good[at + len(noise) :], good[:at], noise):
        try:
            found = read(xml)
        except BitstreamError:
            continue
        assert 512 <= found.slot_size <= 65536
