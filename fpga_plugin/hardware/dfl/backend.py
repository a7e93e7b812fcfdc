"""Cards that the DFL drivers serve, real or simulated: the kernel below is a parameter."""

from collections.abc import Collection, Mapping

import structlog

from fpga_plugin.errors import HardwareError, RefusedError
from fpga_plugin.hardware.aer import AerCounters
from fpga_plugin.hardware.backend import ClockLimits, DriverSettings, UserClock
from fpga_plugin.hardware.boot import read_boot_id
from fpga_plugin.hardware.dfl import discovery, numbers
from fpga_plugin.hardware.dfl.fme_errors import clear_pcie_errors
from fpga_plugin.hardware.dfl.functions import make_functions
from fpga_plugin.hardware.dfl.handles import port_of, slot_of
from fpga_plugin.hardware.dfl.health import health
from fpga_plugin.hardware.dfl.memory import clear_memory
from fpga_plugin.hardware.dfl.port import (
    DflPort,
    open_port,
    read_afu_id,
    read_errors,
    rebind_hint,
)
from fpga_plugin.hardware.dfl.rebind import bind, rebind
from fpga_plugin.hardware.dfl.sensors import readings
from fpga_plugin.hardware.dfl.slot import OfsSlot, give_back, open_slot, read_note
from fpga_plugin.hardware.dfl.slot_functions import SlotRule
from fpga_plugin.hardware.dfl.userclock import user_clock
from fpga_plugin.hardware.grant import DeviceNumber, Path
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import (
    Assumption,
    Card,
    CardHealth,
    CardProblem,
    PciFunction,
    Readings,
    Region,
    ScanResult,
)
from fpga_plugin.hardware.pci import functions
from fpga_plugin.hardware.vfio.notes import PoisonMark, SlotNotes
from fpga_plugin.ids import AfuId, CardId, PciAddress

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class DflBackend:
    """Implements `fpga_plugin.hardware.backend.Backend`.

    Args:
        kernel: where the trees and the device nodes are.
        rule: which functions are behind the slots of OFS cards.
        slots: the directory of their notes; None: nothing outlives the process.
        owner: this process may write them.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        rule: SlotRule | None = None,
        slots: str | None = None,
        owner: bool = True,
    ) -> None:
        self._kernel = kernel
        self._rule = rule or SlotRule()
        self._notes = SlotNotes(slots, boot_id=kernel.boot_id, owner=owner)
        self._skipped: set[tuple[str, str]] = set()
        self._aer = AerCounters()

    def boot_id(self) -> str:
        """The kernel's boot id."""
        return read_boot_id(self._kernel)

    def card_ids(self) -> Collection[CardId]:
        """Which cards there are, as the kernel's directories show."""
        return discovery.card_ids(self._kernel, self._skip)

    def scan(self) -> ScanResult:
        """All cards, and the problems of those that cannot be served."""
        found = discovery.scan(self._kernel, self._skip, self._rule)
        for card in found.cards.values():
            self._load_notes(card)
        return found

    def scan_card(self, card: CardId) -> Card | CardProblem | None:
        """One card again; None when it is gone."""
        found = discovery.scan_card(self._kernel, card, self._skip, self._rule)
        if isinstance(found, Card):
            self._load_notes(found)
        else:
            self._aer.forget(card)
        return found

    def open_port(self, card: Card, region: Region) -> DflPort | OfsSlot:
        """Open a region exclusively, at once; leaving the context closes it."""
        if (slot := slot_of(region)) is not None:
            return open_slot(self._kernel, self._notes, card, region, slot)
        return open_port(self._kernel, card, region, self._mark(region))

    def afu_id(self, region: Region) -> AfuId:
        """The id of the accelerator in a region, without opening its port.

        Of a slot it is what was read when the plugin held it last.
        """
        if (slot := slot_of(region)) is not None:
            return read_note(self._kernel, self._notes, region, slot)
        return read_afu_id(self._kernel, region, self._mark(region))

    def numbers(self, region: Region) -> Mapping[Path, DeviceNumber]:
        """The device numbers of a held region's nodes, as sysfs shows them."""
        try:
            return numbers.granted(self._kernel, port_of(region))
        except OSError as error:
            raise HardwareError(
                f"the device numbers of region {region.id} cannot be read ({error.strerror})",
                hint="see the kernel's log",
            ) from error

    def bound_by_plugin(self, region: Region) -> bool:
        """Whether the plugin bound functions of a slot to vfio-pci."""
        slot = slot_of(region)
        return slot is not None and bool(self._notes.bound(region.id, slot.functions))

    def give_back(self, card: Card, region: Region) -> None:  # noqa: ARG002 - of the interface
        """Take these functions off vfio-pci again."""
        if (slot := slot_of(region)) is not None:
            give_back(self._kernel, self._notes, region, slot)

    def functions(self, card: CardId) -> Collection[PciFunction]:
        """The card's PCI functions, for people."""
        return functions(self._kernel, card)

    def make_functions(self, card: CardId, *, make: bool) -> None:
        """Make all virtual functions that a card can have, or remove those that it has."""
        make_functions(self._kernel, card, make=make)

    def clock_limits(self, card: Card, region: Region) -> ClockLimits | None:  # noqa: ARG002 - of the interface
        """None: Linux has no documented way to set a user clock (dfl-afu-main.c: raw commands)."""
        return None

    def user_clock(self, region: Region) -> UserClock:
        """What a region's user clock is now, by the counter that its driver offers."""
        return user_clock(self._kernel, region)

    def apply_settings(
        self,
        card: Card,  # noqa: ARG002 - of the interface
        region: Region,
        settings: DriverSettings,
    ) -> None:
        """Refuse a user clock; `debug` is the plugin's own affair and changes no hardware."""
        if settings.clock is not None:
            raise RefusedError(
                f"region {region.id} has no documented way to set its clock",
                hint="leave `clock` out of FPGA_DRIVER_PARAMS",
            )

    def port_errors(self, region: Region) -> Mapping[str, int]:
        """The port's error registers that are set, by attribute."""
        return read_errors(self._kernel, region)

    def clear_errors(self, card: Card) -> Mapping[str, int]:
        """Clear the PCI Express errors that the card's FME has noted."""
        return clear_pcie_errors(self._kernel, card)

    def clear_memory(self, card: Card) -> None:
        """Clear all banks of a card's memory."""
        clear_memory(self._kernel, card)

    def rebind(self, card: Card) -> None:
        """Take the card's PCI driver off and put it on again."""
        rebind(self._kernel, card, hold=self.open_port)

    def rebind_advice(self, card: Card) -> str:
        """The command, and when it is safe."""
        return rebind_hint(card.address)

    def bind(self, card: CardId) -> None:
        """Put the PCI driver on a card that has none."""
        bind(self._kernel, PciAddress.parse(card))

    def reset(self, card: Card) -> None:
        """Does nothing: the regions of such a card are reset one by one."""

    def guard(self, card: Card, *, left: bool) -> str:  # noqa: ARG002 - of the interface
        """Nothing to restore: programming needs the FME's node, which no container gets."""
        return ""

    def health(self, card: Card) -> CardHealth:
        """What the card's own signals say now."""
        return health(self._kernel, card, self._aer, afu_id=self.afu_id)

    def accept_errors(self, card: CardId) -> None:
        """Its error counters' values at the next look count as healthy."""
        self._aer.forget(card)

    def assumptions(self, card: CardId) -> tuple[Assumption, ...]:
        """What is taken for granted about a card, by what sysfs shows of it."""
        from fpga_plugin.hardware.dfl.assumptions import assumptions  # for one command alone

        return assumptions(self._kernel, PciAddress.parse(card), self._rule)

    def readings(self, card: Card) -> Readings:
        """Its sensors and error registers."""
        return readings(self._kernel, card)

    def _mark(self, region: Region) -> PoisonMark | None:
        """Of a virtual function's port, which does not show that a PR of it failed."""
        physical = port_of(region).physical
        return None if physical is None else PoisonMark(self._notes, region.id, physical)

    def _load_notes(self, card: Card) -> None:
        """Here, in a thread: `bound_by_plugin` is asked on the event loop."""
        for region in card.regions:
            if slot_of(region) is not None:
                self._notes.load(region.id)

    def _skip(self, path: str, why: str) -> None:
        """Say once that something that looks like a card is left out."""
        if (path, why) not in self._skipped:
            self._skipped.add((path, why))
            log.warning("an FPGA region is ignored", path=path, why=why)
