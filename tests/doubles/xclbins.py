"""xclbin files as Vitis writes them, made by code; and their parts, whatever is in them.

Nothing of AMD's is in them. XRT's own drivers load them on a fake card; a real one refuses them.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from xml.sax.saxutils import quoteattr

from fpga_plugin.ids import AfuId, InterfaceId

ALVEO = InterfaceId("5b1a0d1e0c2f4a6e9d3b7c8f2e4a6b10")
"""The interface id of the shell of simulated Alveo cards."""

VADD = AfuId("a7c1e2d34b5f46889a0b1c2d3e4f5061")
PLATFORM = "xilinx_u55c_gen3x16_xdma_base_3"

BITSTREAM, METADATA, TOPOLOGY, LAYOUT, PARTITION = 0, 2, 6, 8, 20
DDR4, DRAM, STREAM, HBM = 1, 2, 3, 6
KERNEL = 1

Tree = tuple[str, Mapping[str, bytes], Sequence["Tree"]]
"""A node of a device tree: name, properties, nodes inside."""

BANKS = (
    (HBM, 1, 256 << 10, 0, "HBM[0]"),
    (HBM, 0, 256 << 10, 256 << 20, "HBM[1]"),
    (DRAM, 1, 128, 512 << 30, "PLRAM[0]"),
    (DRAM, 1, 16 << 20, 1 << 45, "HOST[0]"),
)
"""Type, used, KiB, base and tag of each."""

ARGUMENTS = (("in", 0, 0x10, 8), ("out", 1, 0x1C, 8), ("size", 2, 0x28, 4))
"""Name, id, offset and size of each."""


def device_tree(root: Tree, *, version: int = 17) -> bytes:
    """A flattened device tree."""
    strings = b""
    words = bytearray()

    def padded(data: bytes) -> bytes:
        return data + bytes(-len(data) % 4)

    def put(node: Tree) -> None:
        nonlocal strings
        name, properties, inside = node
        words.extend(struct.pack(">I", 1) + padded(name.encode() + b"\0"))
        for key, value in properties.items():
            words.extend(struct.pack(">III", 3, len(value), len(strings)) + padded(value))
            strings += key.encode() + b"\0"
        for one in inside:
            put(one)
        words.extend(struct.pack(">I", 2))

    put(root)
    words.extend(struct.pack(">I", 9))
    at = 40 + 16  # the header, and the end of a list of reserved memory
    sizes = (at + len(words) + len(strings), at, at + len(words), 40, version, 16, 0)
    header = struct.pack(">10I", 0xD00DFEED, *sizes, len(strings), len(words))
    return header + bytes(16) + bytes(words) + strings


def interfaces(*uuids: str | bytes) -> Tree:
    """The node with the interfaces that an image plugs into."""
    values = [uuid.encode() + b"\0" if isinstance(uuid, str) else uuid for uuid in uuids]
    nodes: list[Tree] = [(f"@{n}", {"interface_uuid": value}, ()) for n, value in enumerate(values)]
    return "interfaces", {}, nodes


def partition(*uuids: str | bytes) -> bytes:
    """PARTITION_METADATA."""
    of_image: Tree = (
        "ep_user_00",
        {
            "pcie_physical_function": struct.pack(">I", 1),
            "pcie_bar_mapping": struct.pack(">I", 0),
            "reg": struct.pack(">QQ", 0x100000, 0x1000),
        },
        (),
    )
    version = {"major": struct.pack(">I", 1), "minor": struct.pack(">I", 0)}
    inside: tuple[Tree, ...] = (
        ("schema_version", version, ()),
        interfaces(*uuids),
        ("addressable_endpoints", {}, (of_image,)),
    )
    return device_tree(("", {}, inside))


def memory(*banks: tuple[int, int, int, int, str]) -> bytes:
    """MEM_TOPOLOGY."""
    entries = [struct.pack("<BB6xQQ16s", *bank[:4], bank[4].encode()) for bank in banks]
    return struct.pack("<i4x", len(banks)) + b"".join(entries)


def units(*found: tuple[int, int, int, str]) -> bytes:
    """IP_LAYOUT: type, properties, base and name of each."""
    entries = [struct.pack("<IIQ64s", *unit[:3], unit[3].encode()) for unit in found]
    return struct.pack("<i4x", len(found)) + b"".join(entries)


def element(tag: str, inside: str = "", /, **attributes: object) -> str:
    """An element of XML."""
    text = "".join(f" {key}={quoteattr(str(value))}" for key, value in attributes.items())
    return f"<{tag}{text}>{inside}</{tag}>"


def kernel(
    name: str = "vadd",
    arguments: Iterable[tuple[str, object, object, object]] = ARGUMENTS,
    *,
    instances: int = 1,
    registers: object = "0x1000",
    **attributes: object,
) -> str:
    """A kernel's element."""
    ports = element("port", name="M_AXI", mode="master", range="0xFFFFFFFFFFFFFFFF")
    if registers is not None:
        ports += element("port", name="S_AXI", mode="slave", range=registers)
    args = "".join(
        element("arg", name=arg, addressQualifier=1, id=index, port="M_AXI", size=size,
                offset=offset, hostOffset="0x0", hostSize=size, type="int*")
        for arg, index, offset, size in arguments
    )  # fmt: skip  # one argument, its attributes
    bases = {f"{name}_{n}": f"{n + 1:#x}0000" for n in range(instances)}
    made = "".join(
        element("instance", element("addrRemap", base=base), name=instance)
        for instance, base in bases.items()
    )
    return element("kernel", ports + args + made, name=name, language="c", **attributes)


def metadata(*kernels: str, name: str = "vadd") -> bytes:
    """EMBEDDED_METADATA."""
    core = element("core", "".join(kernels), name="OCL_REGION_0", target="hw", type="clc_region")
    device = element("device", core, name="fpga0")
    platform = element("platform", element("version", major=0) + device, vendor="xilinx")
    project = element("project", platform, name=name)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{project}'.encode()


def bits(payload: bytes) -> bytes:
    """BITSTREAM: the header of a .bit file, which the driver reads, and what is streamed."""
    head = struct.pack(">H", 9) + b"\x0f\xf0" * 4 + b"\0" + struct.pack(">H", 1)
    for tag, text in zip(b"abcd", (b"ulp", b"xcu55c", b"2026/11/28", b"03:00:00"), strict=True):
        head += bytes([tag]) + struct.pack(">H", len(text) + 1) + text + b"\0"
    return head + b"e" + struct.pack(">I", len(payload)) + payload


def axlf(
    sections: Iterable[tuple[int, str, bytes]],
    uuid: str = VADD,
    *,
    mode: int = 1,
    signature: int = -1,
    platform: str = PLATFORM,
    version: tuple[int, int, int] = (2, 19, 0),
    length: int | None = None,
    count: int | None = None,
) -> bytes:
    """A file of sections (kind, name, content), whatever is in them."""
    found = list(sections)
    start = 456 + 40 * len(found)
    body, table = bytearray(), b""
    for kind, name, content in found:
        body.extend(bytes(-(start + len(body)) % 8))
        table += struct.pack("<I16s4xQQ", kind, name.encode(), start + len(body), len(content))
        body.extend(content)
    total = start + len(body) if length is None else length
    major, minor, patch = version
    header = struct.pack(
        "<QQQHBBHH16s64s16s16sI4x",
        *(total, 1_700_000_000, 0, patch, major, minor, mode, 0, bytes(16), platform.encode()),
        *(bytes.fromhex(uuid), b"", len(found) if count is None else count),
    )
    top = b"xclbin2\0" + struct.pack("<i", signature) + b"\xff" * 28 + bytes(256 + 8)
    return top + header + table + bytes(body)


def parts(
    *,
    image: bytes = b"logic",
    xml: bytes | None = None,
    interface: bytes | None = None,
    banks: bytes | None = None,
    layout: bytes | None = None,
) -> dict[int, tuple[int, str, bytes]]:
    """The sections of a good file, by kind."""
    vadd = units((KERNEL, 0, 0x10000, "vadd:vadd_0"))
    named = {
        BITSTREAM: ("BITSTREAM", bits(image)),
        METADATA: ("EMBEDDED_METADATA", metadata(kernel()) if xml is None else xml),
        LAYOUT: ("IP_LAYOUT", vadd if layout is None else layout),
        TOPOLOGY: ("MEM_TOPOLOGY", memory(*BANKS) if banks is None else banks),
        PARTITION: ("PARTITION_METADATA", partition(ALVEO) if interface is None else interface),
    }  # fmt: skip  # a section a line
    return {kind: (kind, *section) for kind, section in named.items()}


def xclbin(uuid: str = VADD, *, interface: str = ALVEO, image: bytes = b"logic") -> bytes:
    """A good file."""
    return axlf(parts(interface=partition(interface), image=image).values(), uuid)
