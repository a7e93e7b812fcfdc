"""Flattened device trees, as an xclbin has them."""

import struct

import pytest
from doubles.xclbins import device_tree
from hypothesis import given
from hypothesis import strategies as st

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.device_tree import MAX_DEPTH, nodes
from fpga_plugin.errors import BitstreamError

TREE = device_tree(
    ("", {"a": b"1"}, [("b@0", {"c": b"", "d": b"12345"}, [("e", {}, ())]), ("f", {"a": b"2"}, ())])
)
HEADER = ("magic", "total", "tree", "strings", "reserved", "version", "compatible", "cpu",
          "strings_size", "size")  # fmt: skip  # in the order of the header


def walk(blob: bytes) -> list[tuple[tuple[bytes, ...], list[tuple[bytes, bytes]]]]:
    return [(node.path, node.properties) for node in nodes(ByteRange.of_bytes(blob, "f: tree"))]


def refusal(blob: bytes) -> str:
    with pytest.raises(BitstreamError) as refused:
        walk(blob)
    assert refused.value.message.startswith("f: tree: no device tree: ")
    return refused.value.message


def header(**fields: int) -> bytes:
    values = dict(zip(HEADER, struct.unpack_from(">10I", TREE), strict=True)) | fields
    return struct.pack(">10I", *values.values()) + TREE[40:]


def of_words(*words: int) -> bytes:
    """A tree of any structure, with the string `n` at 0."""
    body = struct.pack(f">{len(words)}I", *words)
    sizes = (56 + len(body) + 2, 56, 56 + len(body), 40, 17, 16, 0, 2, len(body))
    return struct.pack(">10I", 0xD00DFEED, *sizes) + bytes(16) + body + b"n\0"


def test_nodes_come_with_their_paths_and_properties_those_inside_first():
    assert walk(TREE) == [
        ((b"b@0", b"e"), []),
        ((b"b@0",), [(b"c", b""), (b"d", b"12345")]),
        ((b"f",), [(b"a", b"2")]),
        ((), [(b"a", b"1")]),
    ]


def test_what_is_behind_the_tree_does_not_count():
    assert walk(TREE + b"more") == walk(TREE)


def test_structure_and_strings_may_be_right_behind_the_header_and_end_with_the_blob():
    body = struct.pack(">7I", 1, 0, 3, 0, 0, 2, 9)
    for before, behind in ((body, b"n\0\0\0"), (b"n\0\0\0", body)):
        tree, strings = (40, 40 + len(body)) if before is body else (44, 40)
        sizes = (40 + len(before) + len(behind), tree, strings, 40, 17, 16, 0, 4, len(body))
        blob = struct.pack(">10I", 0xD00DFEED, *sizes) + before + behind
        assert walk(blob) == [((), [(b"n", b"")])]


def test_an_older_layout_has_no_size_of_its_structure():
    assert walk(header(version=16, size=0)) == walk(TREE)


def test_nothing_is_between_words():
    """NOP, in place of a node that was removed."""
    assert walk(of_words(4, 1, 0, 4, 2, 4, 9)) == [((), [])]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"magic": 0xD00DFEEE}, "begins d00dfeee"),
        ({"version": 15}, "version 15"),
        ({"version": 18, "compatible": 18}, "compatible with 18"),
        ({"total": len(TREE) + 1}, f"has {len(TREE) + 1} bytes, and there are {len(TREE)}"),
        ({"total": 39}, "says that it has 39"),
        ({"tree": 58}, "structure would be at byte 58"),
        ({"tree": 36}, "structure would be at byte 36"),
        ({"tree": 0xFFFFFFFC}, "structure would be at"),
        ({"size": 0xFFFFFFFF}, "structure would be at"),
        ({"strings": 0xFFFFFFFF}, "strings would be at"),
        ({"strings_size": 0xFFFFFFFF}, "strings would be at"),
        ({"strings": 0}, "strings would be at byte 0"),
        ({"strings_size": 0}, "a name does not end"),
    ],
)
def test_a_header_that_leads_out_of_the_blob_is_refused(fields, words):
    assert words in refusal(header(**fields))


@pytest.mark.parametrize("size", [0, 39])
def test_a_blob_without_a_header_is_refused(size):
    assert f"{size} bytes are too few" in refusal(TREE[:size])


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ((), "ends early"),
        ((9,), "ends inside a node"),
        ((1, 0, 9), "ends inside a node"),
        ((1, 0, 2), "ends early"),
        ((2, 9), "token 2"),
        ((3, 0, 0, 9), "token 3"),
        ((1, 0, 7, 9), "token 7 at byte 8"),
        ((1, 0, 2, 1, 0, 2, 9), "a second root"),
        ((1, 0, 3, 16, 0, 0, 2, 9), "ends early"),
        ((1, 0, 3, 0xFFFFFFFF, 0, 2, 9), "ends early"),
        ((1, 0, 3, 0, 2, 2, 9), "a name does not end"),
        ((1, 0, 3, 0, 0xFFFFFFFF, 2, 9), "a name does not end"),
        ((1, 0x41414141, 0x41414141), "a name does not end"),
    ],
)
def test_a_structure_that_is_none_is_refused(tree, words):
    assert words in refusal(of_words(*tree))


def test_nodes_are_not_followed_without_end():
    def nested(depth: int) -> bytes:
        return of_words(*[1, 0] * depth, *[2] * depth, 9)

    assert len(walk(nested(MAX_DEPTH + 1))) == MAX_DEPTH + 1
    assert "too deep" in refusal(nested(MAX_DEPTH + 2))


@given(st.integers(0, len(TREE) - 1), st.binary(min_size=1, max_size=8))
def test_any_bytes_give_nodes_or_a_refusal(at, noise):
    for blob in (TREE[:at] + noise + TREE[at + len(noise) :], TREE[:at], noise + TREE):
        try:
            walk(blob)
        except BitstreamError:
            continue
