"""How the DFL backend finds a card and a region again: what `Card.handle` and `Region.handle` are.

Paths are those of a node (`kernel`).
"""

from dataclasses import dataclass

from fpga_plugin.hardware.model import Card, Region


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
        instance: tells the port from a later one that has the same id, node and directory: a card
            that went and came back, or whose driver was rebound, has ports of other instances.
    """

    node: str
    sysfs: str
    instance: int


def fme_of(card: Card) -> Fme:
    """The FME of a card that this backend found."""
    assert isinstance(card.handle, Fme), "a card of another backend"
    return card.handle


def port_of(region: Region) -> PortDevice:
    """The port of a region that this backend found."""
    assert isinstance(region.handle, PortDevice), "a region of another backend"
    return region.handle
