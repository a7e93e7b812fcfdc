"""What there is: cards and their regions, as values."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from fpga_plugin.hardware.faults import Fault
from fpga_plugin.hardware.grant import DeviceNumber, Grant, Path
from fpga_plugin.hardware.image import Image, RawImage
from fpga_plugin.ids import CardId, InterfaceId, PciAddress, RegionId, region_id


class Iommu(enum.Enum):
    """What stands between a card's DMA and the host's memory."""

    TRANSLATE = "translate"
    """An IOMMU: the card reaches what was mapped for it."""

    SHARED = "shared"
    """An IOMMU, and a device of somebody else's in the card's group: these two reach each other's
    registers and memory on their way to it."""

    IDENTITY = "identity"
    """An IOMMU that lets everything through: the card reaches all of the host's memory."""

    NONE = "none"
    """No IOMMU: the same."""

    UNKNOWN = "unknown"
    """The kernel does not say."""


@dataclass(frozen=True, slots=True)
class Region:
    """One partial-reconfiguration slot of a card.

    Attributes:
        card: the card that it belongs to.
        port_id: its number on the card, which never changes.
        grant: what a container gets of it.
        handle: how its backend finds it again; means nothing to anybody else but that another one
            is another region: one that went and came back, however short its absence, has another.
        numbers: the device number that each of the grant's nodes has now; without those that have
            none, as an IOMMU group before VFIO has a function of it.
        id: `<card id>-p<port id>`.
    """

    card: CardId
    port_id: int
    grant: Grant
    handle: object = None
    numbers: Mapping[Path, DeviceNumber] = field(default_factory=dict, compare=False)
    id: RegionId = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Made once: an Allocate asks for ids some forty times."""
        object.__setattr__(self, "id", region_id(self.card, self.port_id))


@dataclass(frozen=True, slots=True)
class Card:
    """One FPGA board.

    Attributes:
        address: the PCI function by which it is programmed.
        family: whose drivers serve it: `dfl` or `xrt`, which `Settings.prefix_of` knows.
        interface_id: what a bitstream must be built for.
        numa_node: None where the kernel does not know it.
        regions: those that can be used now, by port id.
        ports: how many the hardware has; a whole card needs all of them.
        clears_memory: the card has documented knobs that clear its on-card memory.
        some_memory_stays: besides these it has memory that no knob clears; of a card with `memory`,
            which its blank bitstream does not reach.
        memory: bytes of on-card memory that are cleared through the blank bitstream, which has to
            reach all of them. 0: the driver's knobs clear it, or nothing does.
        iommu: what limits its DMA; the weakest, where its functions differ.
        description: PCI ids or a product's name, for people.
        handle: how its backend finds it again, as `Region.handle`.
        reprogrammable: its regions can be programmed one by one; else what is on them came with the
            card's whole image.
        pcie_root: the root complex that it hangs from, as sysfs names it (`pci0000:3a`); empty
            where that is not known.
        firmware: which static part (FIM) it has loaded, as its registers tell it; empty where they
            do not. Cards of one interface id may differ in it.
        untested: what the plugin does with such cards that nobody has seen on one, for people.
        vendor: of the card in a word, as `intel`.
        vendor_resource: the resource by which the vendor's own device plugin gives such cards out;
            empty where there is none.
        model: the product's name, where it is known.
        serial: the board's serial number, where its drivers show it.
        resets: between two owners the card is reset as a whole (`Backend.reset`), which takes its
            regions away for seconds.
        takes: the kind of image that its driver programs.
        owner_loads: an owner that names no bitstream may load what it brings (`Port.leave`).
        guarded: device numbers of nodes that no container may have: who has one programs the card,
            or resets a slot.
        id: the card's device id.
    """

    address: PciAddress
    family: str
    interface_id: InterfaceId
    numa_node: int | None
    regions: tuple[Region, ...]
    ports: int
    clears_memory: bool
    description: str = ""
    handle: object = None
    some_memory_stays: bool = False
    memory: float = 0
    iommu: Iommu = Iommu.UNKNOWN
    reprogrammable: bool = True
    pcie_root: str = ""
    firmware: str = ""
    untested: str = ""
    vendor: str = ""
    model: str = ""
    serial: str = ""
    resets: bool = False
    owner_loads: bool = False
    vendor_resource: str = ""
    takes: type[Image] = RawImage
    guarded: frozenset[DeviceNumber] = field(default=frozenset(), compare=False)
    id: CardId = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Made once, as a region's."""
        object.__setattr__(self, "id", self.address.card_id)

    @property
    def never_cleared(self) -> bool:
        """Whether its on-card memory, or a part of it, stays uncleared between two owners."""
        return not self.clears_memory or self.some_memory_stays

    @property
    def complete(self) -> bool:
        """Whether every region that the hardware has is there."""
        return len(self.regions) == self.ports


@dataclass(frozen=True, slots=True)
class CardProblem:
    """A card that cannot be served, and why.

    Attributes:
        address: where it is.
        message: what is wrong.
        hint: what the operator can do.
        passing: no event tells when it has passed: the card is looked at again from time to time.
        interrupted: a reset of the card began and did not end; `Backend.bind` ends it.
    """

    address: PciAddress
    message: str
    hint: str = ""
    passing: bool = False
    interrupted: bool = False


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
        unguarded: what keeps others from changing the card's regions is missing (`Backend.guard`):
            what, for people. Of a card that the plugin never worked on it says nothing.
    """

    failed: Mapping[RegionId, Fault] = field(default_factory=dict)
    degraded: tuple[str, ...] = ()
    unguarded: str = ""


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


class AssumptionVerdict(enum.Enum):
    """Whether an assumption about a card holds."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNKNOWN = "cannot be told"
    """Without touching the card, or at all: it is taken on trust."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something that the plugin takes for granted about a card.

    Attributes:
        says: what.
        verdict: whether it holds, by reading alone.
        seen: where that was read and what it said, or why it is unknown.
    """

    says: str
    verdict: AssumptionVerdict
    seen: str


@dataclass(frozen=True, slots=True)
class PciFunction:
    """A PCI function of a card, for people.

    Attributes:
        address: where it is.
        role: `card`: the one by which the card is programmed; `virtual`, or `physical`.
        driver: empty: none.
        group: its IOMMU group; None: no IOMMU.
        translation: the type of that group.
    """

    address: PciAddress
    role: str
    driver: str
    group: int | None
    translation: str
