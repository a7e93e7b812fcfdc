"""Which shell an xclbin was built for: the interface that its PARTITION_METADATA names.

The section is a device tree; `/interfaces/*/interface_uuid` are what the image plugs into. Facts
from Xilinx/XRT at 963c58ee, paths below src/runtime_src/core/pcie/driver/linux/xocl/ but for tools:

- The driver compares each with the shell's own as text, and loads an image that names none on any
  shell (xocl_fdt.c, `xocl_fdt_check_uuids`). Such a file is refused here. The field of the header
  at 336 has the same id where the tool wrote it; no driver reads it.
- An image names one: xclbinutil refuses more in a file of mode 1 (tools/xclbinutil/XclBinClass.cxx,
  `updateInterfaceuuid`).
- A shell of two stages lists several. The first line of xclmgmt's `interface_uuids` is that of the
  base (`blp_blob`; mgmtpf/mgmt-sysfs.c), which chooses the second stage: that one's file has to
  name it, too (subdev/icap.c, `icap_download_rp`; xbmgmt lists the fitting stages by it,
  tools/xbmgmt2/ReportPlatform.cpp, `get_installed_partitions`). The further lines, and those of
  xocl, are of the tree that images are compared with (`fdt_blob`): the base's again, and what the
  second stage offers to images. So a fitting image names the one that is not the first line of
  xclmgmt's; where all lines are the same, the shell has one stage and the image names that one.
- The order of the further lines means nothing: each overlay of trees puts new nodes first.

That no image is built for the base's id is inferred from these; the driver would load it.
"""

from fpga_plugin.bitstreams.byte_range import ByteRange
from fpga_plugin.bitstreams.device_tree import nodes
from fpga_plugin.errors import quote
from fpga_plugin.ids import InterfaceId, parse_interface_id

VITIS = "build it with `v++ --link` for the platform of the card"
"""What to do about an xclbin that is none for these cards."""


def read_interface(section: ByteRange) -> InterfaceId:
    """The one interface that the section PARTITION_METADATA names.

    Raises:
        BitstreamError: it names none or several, or cannot be read.
    """
    groups: set[bytes] = set()
    found: list[bytes] = []
    for node in nodes(section):
        if not node.path or node.path[0].partition(b"@")[0] != b"interfaces":
            continue
        groups.add(node.path[0])
        if len(node.path) == 2:  # noqa: PLR2004  # /interfaces/*
            values = [value for name, value in node.properties if name == b"interface_uuid"]
            if len(values) != 1:
                raise section.wrong(f"an interface has {len(values)} interface_uuid, not one")
            found += values
    if not found:
        raise section.wrong(
            "names no interface (/interfaces/*/interface_uuid), so that it would be loaded on any"
            " shell",
            VITIS,
        )
    if len(found) > 1 or len(groups) > 1:
        raise section.wrong(
            f"names {len(found)} interfaces: it is a shell, or for several partitions", VITIS
        )
    return _interface_id(found[0], section)


def _interface_id(value: bytes, section: ByteRange) -> InterfaceId:
    """As shells write it: the driver compares text (`strcmp`)."""
    text = value[:-1].decode("latin-1")
    try:
        interface_id = parse_interface_id(text)
    except ValueError as error:
        raise section.wrong(f"interface_uuid: {quote(text)} is {error}", VITIS) from None
    if value[-1:] != b"\0" or interface_id != text:
        raise section.wrong(
            f"interface_uuid: {quote(text)} is not written as 32 lower-case hex digits and a null"
            " byte",
            f"XRT's driver would not find it in any shell; {VITIS}",
        )
    if len(set(text)) == 1 and text[0] in "0f":
        raise section.wrong(f"interface_uuid: {text} names nothing", VITIS)
    return interface_id
