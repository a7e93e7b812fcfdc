"""How the DFL backend finds a card and a region again: what `Card.handle` and `Region.handle` are.

Paths are those of a node (`kernel`).
"""

from dataclasses import dataclass

from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.hardware.vfio.function import Function


@dataclass(frozen=True, slots=True)
class Fme:
    """A card's FPGA Management Engine.

    Attributes:
        node: its device node; an open descriptor of it is the right to program.
        sysfs: its directory below the root of sysfs (`/sys/devices/.../dfl-fme.0`).
    """

    node: str
    sysfs: str


@dataclass(frozen=True, slots=True)
class PortDevice:
    """A region's port.

    Attributes:
        node: its device node (`/dev/dfl-port.3`).
        sysfs: its directory below the root of sysfs (`/sys/devices/.../dfl-port.3`).
        instance: distinguishes the port from a later one that has the same id, node and directory:
            a card that went and came back, or whose driver was rebound, has ports of other
            instances.
        physical: of a virtual function's port: to which run of the physical function's driver it
            belongs. That driver counts failed PRs of it, and the port does not show them
            (dfl-afu-main.c: the port that was released has a count of its own).
    """

    node: str
    sysfs: str
    instance: int
    physical: int | None = None


@dataclass(frozen=True, slots=True)
class SlotDevice(PortDevice):
    """A region whose AFU is not behind its port but in PCI functions of their own (OFS).

    The port has registers to reset it and no AFU; containers get the functions.

    Attributes:
        functions: all that are behind the slot, in the rule's order; never another one.
    """

    functions: tuple[Function, ...] = ()


def slot_of(region: Region) -> SlotDevice | None:
    """The slot of a region that this backend found; None: its AFU is behind its port."""
    return region.handle if isinstance(region.handle, SlotDevice) else None


def functions_of(region: Region) -> tuple[Function, ...]:
    """The PCI functions behind a region's slot; none where its AFU is behind its port."""
    return () if (slot := slot_of(region)) is None else slot.functions


def fme_of(card: Card) -> Fme:
    """The FME of a card that this backend found."""
    assert isinstance(card.handle, Fme), "a card of another backend"
    return card.handle


def port_of(region: Region) -> PortDevice:
    """The port of a region that this backend found."""
    assert isinstance(region.handle, PortDevice), "a region of another backend"
    return region.handle
