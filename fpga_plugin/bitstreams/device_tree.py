"""Flattened device trees, as far as an xclbin's PARTITION_METADATA needs them.

Own code and not a library, because a walk over nodes and properties is all that is needed, and the
blob is foreign: libraries build a whole tree of whatever they find. Layout: Devicetree
Specification 0.4, chapter 5; version 16 and later, big endian. Any bytes give nodes or a
`BitstreamError`, in time and memory that grow with the blob only.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.errors import BitstreamError

MAX_BYTES = 1 << 20
"""Of a blob. A partition's has some ten KiB."""

MAX_DEPTH = 16
"""Of nodes in nodes. A partition's has 4."""

_MAGIC = 0xD00DFEED
_HEADER = struct.Struct(">10I")
_OLDEST, _COMPATIBLE = 16, 17
"""Versions of the layout: the first with the sizes that are used here, the last that is known."""

_WORD = 4
_BEGIN_NODE, _END_NODE, _PROP, _NOP, _END = 1, 2, 3, 4, 9
"""Tokens (Devicetree Specification, 5.4.1)."""


@dataclass(frozen=True, slots=True)
class DeviceTreeNode:
    """A node with what is in it.

    Attributes:
        path: names from the root's children down; empty: the root.
        properties: names and values, in order; a name may be there twice.
    """

    path: tuple[bytes, ...]
    properties: list[tuple[bytes, bytes]] = field(default_factory=list)


def nodes(section: ByteRange) -> Iterator[DeviceTreeNode]:
    """The nodes of a tree, each when it ends, so that those inside it come before it.

    Args:
        section: the whole section; it may be longer than the tree.

    Raises:
        BitstreamError: it is no device tree.
    """
    if section.size > MAX_BYTES:
        raise section.wrong(f"has {section.size} bytes; at most {MAX_BYTES} are read")
    yield from _Reader(section).nodes()


class _Reader:
    """One walk over one blob."""

    def __init__(self, section: ByteRange) -> None:
        self._section = section
        blob = section.read()
        if len(blob) < _HEADER.size:
            raise self._damaged(f"{len(blob)} bytes are too few")
        magic, total, at, strings, _, version, compatible, _, strings_size, size = (
            _HEADER.unpack_from(blob)
        )
        if magic != _MAGIC:
            raise self._damaged(f"begins {blob[:4].hex()}, not {_MAGIC:x}")
        if version < _OLDEST or compatible > _COMPATIBLE:
            raise self._damaged(f"version {version}, compatible with {compatible}, is not read")
        if not _HEADER.size <= total <= len(blob):
            raise self._damaged(f"says that it has {total} bytes, and there are {len(blob)}")
        if version < _COMPATIBLE:
            size = total - at  # the field is not there yet
        if at % _WORD or not _HEADER.size <= at <= at + size <= total:
            raise self._damaged(f"its structure would be at byte {at}, {size} bytes")
        if not _HEADER.size <= strings <= strings + strings_size <= total:
            raise self._damaged(f"its strings would be at byte {strings}, {strings_size} bytes")
        self._tree = blob[at : at + size]
        self._strings = blob[strings : strings + strings_size]
        self._at = 0

    def nodes(self) -> Iterator[DeviceTreeNode]:
        open_: list[DeviceTreeNode] = []
        ended = False
        while (token := self._word()) != _END:
            if token == _NOP:
                continue
            if token == _BEGIN_NODE:
                if ended or len(open_) > MAX_DEPTH:
                    raise self._damaged("has a second root, or nodes too deep in each other")
                name = self._text(self._tree, self._at)
                self._skip(len(name) + 1)
                open_.append(DeviceTreeNode((*open_[-1].path, name) if open_ else ()))
            elif token == _END_NODE and open_:
                yield open_.pop()
                ended = not open_
            elif token == _PROP and open_:
                size, name_at = self._word(), self._word()
                value = self._tree[self._at : self._at + size]
                self._skip(size)
                open_[-1].properties.append((self._text(self._strings, name_at), value))
            else:
                raise self._damaged(f"token {token} at byte {self._at - _WORD} of its structure")
        if not ended:
            raise self._damaged("ends inside a node")

    def _word(self) -> int:
        at = self._at
        self._skip(_WORD)
        return int.from_bytes(self._tree[at : self._at], "big")

    def _skip(self, size: int) -> None:
        """Pass bytes, and those that fill the word."""
        self._at += -(-size // _WORD) * _WORD
        if self._at > len(self._tree):
            raise self._damaged("its structure ends early")

    def _text(self, data: bytes, at: int) -> bytes:
        end = data.find(b"\0", at)
        if end < 0 or at > len(data):
            raise self._damaged("a name does not end")
        return data[at:end]

    def _damaged(self, what: str) -> BitstreamError:
        return self._section.wrong(f"no device tree: {what}")
