"""What there is: cards and their regions, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fpga_plugin.hardware.faults import Fault
from fpga_plugin.ids import CardId, InterfaceId, PciAddress, RegionId, region_id


@dataclass(frozen=True, slots=True)
class Region:
    """One partial-reconfiguration slot of a card: one DFL port.

    Attributes:
        card: the card that it belongs to.
        port_id: the port's number on the card; stable, unlike the node's number.
        node: the port's device node as containers see it (`/dev/dfl-port.3`).
        sysfs: the port's directory below the root of sysfs (`/sys/devices/.../dfl-port.3`).
        instance: tells the port from a later one that has the same id, node and directory: a card
            that went and came back, or whose driver was rebound, has ports of other instances.
    """

    card: CardId
    port_id: int
    node: str
    sysfs: str
    instance: int = 0

    @property
    def id(self) -> RegionId:
        """`<card id>-p<port id>`."""
        return region_id(self.card, self.port_id)


@dataclass(frozen=True, slots=True)
class Card:
    """One FPGA board: one FME with its ports.

    Attributes:
        address: the PCI function that has the FME.
        interface_id: what a bitstream must be built for.
        numa_node: None where the kernel does not know it.
        regions: ports whose driver is bound, by port id.
        ports: how many ports the FME implements; a whole card needs all of them.
        fme_node: the FME's device node; an open descriptor of it is the right to program.
        fme_sysfs: the FME's directory below the root of sysfs.
        clears_memory: the card has documented knobs that clear its on-card memory.
        description: PCI ids or a product's name, for people.
    """

    address: PciAddress
    interface_id: InterfaceId
    numa_node: int | None
    regions: tuple[Region, ...]
    ports: int
    fme_node: str
    fme_sysfs: str
    clears_memory: bool
    description: str = ""

    @property
    def id(self) -> CardId:
        """The card's device id."""
        return self.address.card_id

    @property
    def complete(self) -> bool:
        """Whether every port that the FME implements is there."""
        return len(self.regions) == self.ports


@dataclass(frozen=True, slots=True)
class CardProblem:
    """A card that cannot be served, and why."""

    address: PciAddress
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class ScanResult:
    """The result of a scan. A card is in one of the two, never in both."""

    cards: Mapping[CardId, Card] = field(default_factory=dict)
    problems: Mapping[CardId, CardProblem] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CardHealth:
    """What the hardware's own signals say now.

    Attributes:
        failed: regions that must not be given out, each with what is wrong. A failure of the card
            as a whole names every region.
        degraded: worth a log line, no reason to take anything away.
    """

    failed: Mapping[RegionId, Fault] = field(default_factory=dict)
    degraded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Readings:
    """A card's sensors and error registers at one instant; what it does not have is not in them.

    Attributes:
        temperatures: in degrees Celsius, by sensor.
        power: in watts, by sensor.
        errors: error registers of card and ports, by name; 0: no error.
    """

    temperatures: Mapping[str, float] = field(default_factory=dict)
    power: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
