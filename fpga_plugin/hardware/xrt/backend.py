"""Cards that XRT's drivers serve, real or simulated: the kernel below is a parameter."""

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from fpga_plugin.errors import CardGoneError, HardwareError, RefusedError
from fpga_plugin.hardware import pci
from fpga_plugin.hardware.aer import AerCounters
from fpga_plugin.hardware.backend import ClockLimits, DriverSettings, UserClock
from fpga_plugin.hardware.boot import read_boot_id
from fpga_plugin.hardware.grant import DeviceNumber, Path
from fpga_plugin.hardware.image import MemoryBank, Xclbin
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
from fpga_plugin.hardware.xrt import defs, discovery
from fpga_plugin.hardware.xrt.handles import (
    Functions,
    check_instance,
    directories,
    functions_of,
    instance,
)
from fpga_plugin.hardware.xrt.health import health, readings, unguarded
from fpga_plugin.hardware.xrt.load import opened
from fpga_plugin.hardware.xrt.mask import set_mask
from fpga_plugin.hardware.xrt.memory import clear
from fpga_plugin.hardware.xrt.port import XrtPort, errors, read_afu_id
from fpga_plugin.hardware.xrt.reset import advice, finish, hot_reset
from fpga_plugin.ids import AfuId, CardId, PciAddress, RegionId

TURN_SECONDS = 60.0
"""Until a reset does not wait for another any more, nor does any after it.

One takes about 3 s, and 20 s more if PF0's answer is lost (`reset`).
"""


class XrtBackend:
    """Implements `fpga_plugin.hardware.backend.Backend`.

    Args:
        kernel: where the trees and the device nodes are.
        tenant_loads: owners that name no bitstream may load what they bring.
    """

    def __init__(self, kernel: Kernel, *, tenant_loads: bool = False) -> None:
        self._kernel = kernel
        self._tenant_loads = tenant_loads
        self._aer = AerCounters()
        self._one_reset = threading.Lock()
        self._resetting: dict[CardId, Card] = {}
        self._banks: dict[RegionId, tuple[MemoryBank, ...]] = {}

    def boot_id(self) -> str:
        """The kernel's boot id."""
        return read_boot_id(self._kernel)

    def card_ids(self) -> Collection[CardId]:
        """Which cards there are, with drivers or without."""
        return discovery.card_ids(self._kernel)

    def scan(self) -> ScanResult:
        """All cards, and the problems of those that cannot be served."""
        cards: dict[CardId, Card] = {}
        problems: dict[CardId, CardProblem] = {}
        for card_id in self.card_ids():
            match self.scan_card(card_id):
                case Card() as card:
                    cards[card_id] = card
                case CardProblem() as problem:
                    problems[card_id] = problem
        return ScanResult(cards, problems)

    def scan_card(self, card: CardId) -> Card | CardProblem | None:
        """One card; while the plugin resets it, as it was before."""
        if (before := self._resetting.get(card)) is not None:
            return before
        found = discovery.scan_card(self._kernel, card)
        if (before := self._resetting.get(card)) is not None:
            return before  # the reset began while it was read
        if not isinstance(found, Card):
            self._aer.forget(card)
            return found
        return replace(found, owner_loads=self._tenant_loads)

    def open_port(self, card: Card, region: Region) -> XrtPort:
        """A region, held by the tenancies alone: there is no exclusive open."""
        check_instance(self._kernel, region)
        return XrtPort(self._kernel, card, region, self._loaded)

    def _loaded(self, region: Region, xclbin: Xclbin | None) -> None:
        if xclbin is None:
            self._banks.pop(region.id, None)
        else:
            self._banks[region.id] = tuple(one for one in xclbin.banks if one.clearable)

    def afu_id(self, region: Region) -> AfuId:
        """The uuid of the xclbin that is loaded, by the driver's record."""
        return read_afu_id(self._kernel, region)

    def numbers(self, region: Region) -> Mapping[Path, DeviceNumber]:
        """The device number of the render node as it is now."""
        try:
            return discovery.numbers(self._kernel, region)
        except OSError as error:
            raise HardwareError(
                f"the device number of region {region.id} cannot be read ({error.strerror})",
                hint="see the kernel's log",
            ) from error

    def bound_by_plugin(self, region: Region) -> bool:  # noqa: ARG002 - of the interface
        """Nothing is taken of the node."""
        return False

    def give_back(self, card: Card, region: Region) -> None:
        """Nothing was taken."""

    def functions(self, card: CardId) -> Collection[PciFunction]:
        """PF0 and PF1."""
        return pci.functions(self._kernel, card)

    def make_functions(self, card: CardId, *, make: bool) -> None:  # noqa: ARG002 - of the interface
        """It has two physical ones, and cannot have others.

        Raises:
            RefusedError: always.
        """
        raise RefusedError(f"card {card} has no virtual functions, and can have none")

    def clock_limits(self, card: Card, region: Region) -> ClockLimits | None:  # noqa: ARG002 - of the interface
        """None: the xclbin brings its clocks, and the driver sets them when it is loaded."""
        return None

    def user_clock(self, region: Region) -> UserClock:  # noqa: ARG002 - of the interface
        """Not told: xocl shows what was asked for alone."""
        return UserClock(None, None, "the driver sets the clocks that the xclbin names")

    def apply_settings(self, card: Card, region: Region, settings: DriverSettings) -> None:  # noqa: ARG002 - of the interface
        """There is none to set.

        Raises:
            RefusedError: a clock is asked for.
        """
        if settings.clock is not None:
            raise RefusedError(
                f"region {region.id} has no documented way to set its clock",
                hint="leave `clock` out of FPGA_DRIVER_PARAMS: an xclbin names its own clocks",
            )

    def port_errors(self, region: Region) -> Mapping[str, int]:
        """What the drivers know of trouble."""
        functions = functions_of(region)
        try:
            return errors(self._kernel, functions.management, functions.user)
        except OSError as error:
            raise HardwareError(
                f"region {region.id} cannot be read ({error.strerror})", hint="see the kernel's log"
            ) from error

    def clear_errors(self, card: Card) -> Mapping[str, int]:  # noqa: ARG002 - of the interface
        """None can be cleared but by a reset."""
        return {}

    def clear_memory(self, card: Card) -> None:
        """Write zeros over all banks that the image on the card reaches."""
        for region in card.regions:
            if (banks := self._banks.get(region.id)) is None:
                raise HardwareError(
                    f"which memory of card {card.id} can be cleared is not known: nothing was"
                    " loaded since the plugin's start",
                    hint="its next scrub loads the blank bitstream, which tells it",
                )
            with opened(self._kernel, region) as handle:
                clear(self._kernel, handle, card.id, banks)

    def reset(self, card: Card) -> None:
        """Reset a card that nobody uses."""
        functions = functions_of(card)
        with self._turn():
            for region in card.regions:
                check_instance(self._kernel, region)
                self._banks.pop(region.id, None)
            self._resetting[card.id] = card
            try:
                hot_reset(self._kernel, card.id, functions)
            finally:
                self._aer.forget(card.id)  # a reset of the link counts as an error of it
                del self._resetting[card.id]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Resets go one at a time a node, except past one that takes too long.

        All cards' nodes get the lowest minor that is free: of two cards that are down together one
        may come back with the other's. A pod that was given the former node is refused then
        (invariant 10). That is less than what a card that hangs would cost the others.
        """
        while not (turn := self._one_reset).acquire(timeout=TURN_SECONDS):
            if self._one_reset is turn:
                self._one_reset = threading.Lock()
        try:
            yield
        finally:
            turn.release()

    def rebind(self, card: Card) -> None:
        """A reset is what mends a card here."""
        self.reset(card)

    def rebind_advice(self, card: Card) -> str:
        """The command, and when it is safe."""
        return advice(card.address)

    def bind(self, card: CardId) -> None:
        """Finish a reset that was interrupted or failed; a card that is up is left as it is."""
        address = PciAddress.parse(card)
        if not discovery.is_card(self._kernel, address):
            raise CardGoneError(f"card {card} is gone", hint="is it still in its slot?")
        management, user = directories(address)
        try:
            functions = Functions(management, user, instance(self._kernel, user))
            with self._turn():
                finish(self._kernel, card, functions)
        except OSError as error:
            raise HardwareError(
                f"card {card} cannot be put online ({error.strerror})",
                hint="are xclmgmt and xocl bound to its two functions?",
            ) from error

    def guard(self, card: Card, *, left: bool) -> str:
        """Mask a card's requests again where that was lost, as when xclmgmt was bound again."""
        functions = functions_of(card)
        mask = defs.MASK_WHILE_LOADING if left else defs.MASK
        if missing := unguarded(self._kernel, functions, mask):
            set_mask(self._kernel, card.id, functions, mask)
        return missing

    def health(self, card: Card) -> CardHealth:
        """What the card's own signals say now."""
        return health(self._kernel, card, self._aer)

    def accept_errors(self, card: CardId) -> None:
        """What its error counters say at the next look counts as well."""
        self._aer.forget(card)

    def assumptions(self, card: CardId) -> tuple[Assumption, ...]:
        """What is taken for granted about a card, by what sysfs shows of it."""
        from fpga_plugin.hardware.xrt.assumptions import assumptions  # for one command alone

        return assumptions(self._kernel, PciAddress.parse(card))

    def readings(self, card: Card) -> Readings:
        """Its sensors and error states."""
        return readings(self._kernel, card)
