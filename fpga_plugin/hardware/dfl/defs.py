"""Numbers of the DFL user interface and registers, each with the source that defines it.

Linux names the ioctls in include/uapi/linux/fpga-dfl.h (magic 0xB6) and the registers in
drivers/fpga/dfl.h, dfl-fme-error.c and dfl-afu-error.c; the bits of the error registers that the
kernel passes through unnamed are those that OPAE's fpgad watches (fpgad-xfpga.c).
"""

import struct

from fpga_plugin.ids import PciAddress

PORT_RESET = 0xB640
"""DFL_FPGA_PORT_RESET: no argument; returns when the port has acknowledged (at most 1 ms)."""

FME_PORT_PR = 0xB680
"""DFL_FPGA_FME_PORT_PR: streams an image into a port; takes `PORT_PR`."""

PORT_PR = struct.Struct("<IIIIQ")
"""struct dfl_fpga_fme_port_pr: argsz, flags (0), port_id, buffer_size, buffer_address."""

MAX_IMAGE_BYTES = 2**32 - 4
"""`buffer_size` is a u32 that the kernel rounds up to words: more would become 0 (dfl-fme-pr.c,
ALIGN). Size 0 makes the kernel warn (vmalloc of nothing): it is never sent."""

ALL_ONES_64 = 2**64 - 1
"""What a 64-bit register reads as when the card no longer answers on the bus."""

ALL_ONES_ID = "f" * 32
"""The same for a 128-bit id."""

PORT_AP6_EVENT = 1 << 50
"""PORT_ERROR, Ap6Event: the card has shut the port down; only cooling and a power cycle help."""

CATFATAL_BITS = {
    0: "KtiLinkFatalErr",
    1: "TagCchFatalErr",
    2: "CciFatalErr",
    3: "KtiProtoFatalErr",
    4: "DramFatalErr",
    5: "IommuFatalErr",
    6: "FabricFatalErr",
    7: "PciePoisonErr",
    9: "CrcCatastErr",
    10: "ThermCatastErr",
}
"""RAS_CATFAT_ERROR without the two bits that only somebody's error injection sets."""

CATFATAL_INJECTED = 1 << 8 | 1 << 11
"""InjectedFatalErr and InjectedCatastErr: a test of the error path, not an error."""

CATFATAL_THERMAL = 1 << 10

NONFATAL_FAILED = {
    9: ("thermal", "TempThreshAP6"),
}
"""RAS_NONFAT_ERROR: "non-fatal" to the host, yet the card's ports are unusable. Class and name."""

NONFATAL_CURABLE = {
    2: ("pcie", "PcieError"),
}
"""RAS_NONFAT_ERROR: `pcie*_errors` are set, by requests that a tenant's image may have sent.

The bit stays until those are cleared.
"""

NONFATAL_DEGRADED = {
    0: ("thermal", "TempThreshAP1"),
    1: ("thermal", "TempThreshAP2"),
    3: ("port", "PortFatalErr"),
    10: ("power", "PowerThreshAP1"),
    11: ("power", "PowerThreshAP2"),
}
"""RAS_NONFAT_ERROR: the card throttles and works on, or a port's own `errors` are set."""

PCIE_ERRORS = ("pcie0_errors", "pcie1_errors")
"""Of the FME, cleared by writing what was read (dfl-fme-error.c)."""

POWER_AP6 = 0x6
"""`power_state` of a port that the card has shut down (PORT_STS bits 11:8, dfl.h)."""

POWER_ALL_ONES = 0xF
"""`power_state` of a port that does not answer: PORT_STS reads all ones."""

POWER_THROTTLED = {0x1: "AP1", 0x2: "AP2"}

PRODUCTS: dict[tuple[str, ...], str] = {
    ("8086", "bcbd"): "Intel integrated FPGA 5.x",
    ("8086", "bcc0"): "Intel integrated FPGA 6.x",
    ("8086", "09c4"): "Intel PAC A10 GX",
    ("8086", "0b30"): "Intel PAC N3000",
    ("8086", "0b2b"): "Intel PAC D5005",
    ("8086", "bcce", "8086", "138d"): "OFS D5005",
    ("8086", "bcce", "8086", "1770"): "OFS N6000",
    ("8086", "bcce", "8086", "1771"): "OFS N6001",
    ("8086", "bcce", "8086", "17d4"): "OFS C6100",
    ("1c2c", "1000"): "Silicom N5010",
    ("1c2c", "1001"): "Silicom N5011",
}
"""Physical functions in dfl-pci's id table: vendor and device, and where it matters subsystem."""

VENDORS = {"8086": "intel", "1c2c": "silicom"}
"""By PCI vendor id, in a word."""

WITHOUT_PR = frozenset({("8086", "0b30")})
"""Cards whose FME shows an interface id although nothing can be programmed through it.

PAC N3000: its accelerator is part of the image in the card's flash (N3000 Data Sheet, chapter 6).
"""


PCI_DRIVER = "/sys/bus/pci/drivers/dfl-pci"
"""Where the cards' PCI driver is bound and unbound."""


def rebind_command(address: PciAddress) -> str:
    """What an operator types to take a card out of its driver and back.

    The one thing that un-poisons a port. With any process holding a port of the card open or mapped
    the kernel crashes (Linux 6.1, afu_release after the port's removal), hence the words around it.
    """
    return f"echo {address} > {PCI_DRIVER}/unbind; echo {address} > {PCI_DRIVER}/bind"
