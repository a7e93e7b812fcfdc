"""The kinds of cards that the DFL drivers serve, and what only their use can show of each.

What a card's owner can only take on trust differs from kind to kind: of a card that is never
programmed nothing need be said of a programming, and only a slot has functions beside its port.
"""

import enum
from collections.abc import Iterator

from fpga_plugin.hardware.model import Assumption, AssumptionVerdict


class CardKind(enum.Enum):
    """How the accelerators of a card are reached, and how they come there; the text is shown."""

    PORTS = "accelerators behind its ports, reconfigured one by one (as a PAC with Arria 10 GX)"
    SLOT = "a slot that is reconfigured, its accelerator in PCI functions of their own (OFS)"
    FIXED = "accelerators behind its ports that come with its whole image, in flash (as an N3000)"
    FLAT = "PCI functions whose accelerators come with its whole image (an OFS FIM built `flat`)"
    UNKNOWN = "not of a kind that sysfs lets tell: it shows no FME, no port, or no FPGA manager"


_IMAGE = ("the blank image runs nothing", "it is the vendor's")

_ATS = (
    "it does not pass the IOMMU by translations of its own (ATS)",
    "lspci -vv shows it: `Address Translation Service`, and whether it is enabled",
)
_INTERRUPTS = (
    "the IOMMU remaps interrupts, so that its DMA raises none but its own",
    "the kernel's log shows it: DMAR-IR, or AMD-Vi",
)

_ON_TRUST = {
    CardKind.PORTS: (
        ("the port's AFU id follows the image", "only a programming shows it"),
        (
            "PORT_RESET stops the accelerator and its DMA",
            "the reset's acknowledgement is all there is",
        ),
        _ATS,
        _INTERRUPTS,
        _IMAGE,
    ),
    CardKind.SLOT: (
        (
            "the functions above are all that the slot has, and none of them is a static one",
            "no register says: the documentation of its FIM does, or FPGA_PLUGIN_SLOT_FUNCTIONS",
        ),
        (
            "one of these functions shows the id of the image",
            "only a programming shows it; it is read through vfio-pci",
        ),
        ("the port's reset stops all of its functions and their DMA", "only a reset shows it"),
        (
            "a PR while its virtual functions are there harms nothing",
            "OFS' own guides program before these are made",
        ),
        (
            "the IOMMU remaps interrupts",
            "else VFIO refuses them, which only a start shows",
        ),
        (
            "a plugin that is killed while it holds the slot leaves it running",
            "what becomes of the reset at the last close of the port is told nowhere",
        ),
        (
            "a reset that timed out left the slot in reset",
            "it may have been on its way out; the slot is not used until its driver is rebound",
        ),
        _ATS,
        _IMAGE,
    ),
    CardKind.FIXED: (
        (
            "the AFU id that a port shows says what its accelerator does",
            "it is the image's own word, and nothing is programmed",
        ),
        (
            "PORT_RESET stops the accelerator and its DMA, and what it held of a tenant is gone",
            "the reset's acknowledgement is all there is; on-chip RAM is not cleared by it",
        ),
        _ATS,
        _INTERRUPTS,
    ),
    CardKind.FLAT: (),
    CardKind.UNKNOWN: (),
}

_NEIGHBOURS = (
    "a PR of one port leaves the others alone",
    "the driver checks nothing of an image",
)


def on_trust(kind: CardKind, *, ports: int) -> Iterator[Assumption]:
    """What is taken on trust of a card of this kind that has so many ports."""
    several = (_NEIGHBOURS,) if kind is CardKind.PORTS and ports > 1 else ()
    for says, why in (*several, *_ON_TRUST[kind]):
        yield Assumption(says, AssumptionVerdict.UNKNOWN, why)
