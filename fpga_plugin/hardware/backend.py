"""The interface between the plugin and a kind of hardware.

Every method of `Backend` and `Port` blocks: call them from a thread, those that touch a card from
that card's own thread. They raise `fpga_plugin.errors` only. `EventSource` belongs to the loop.

A new kind of hardware implements these three; nothing above this module knows sysfs or ioctls.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from fpga_plugin.hardware.grant import DeviceNumber, Path
from fpga_plugin.hardware.image import Image
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
from fpga_plugin.ids import AfuId, CardId

BIND_DRIVERS: Final = (
    "their drivers have to be bound to them (dfl-pci; xclmgmt and xocl): lspci -k -d ::1200"
)
"""What helps where no family finds a card."""


class Port(Protocol):
    """A region, opened exclusively: nobody else has it open, and nobody can open it.

    Held through scrub and programming. Closing it makes the kernel reset the port once more
    (dfl-afu-main.c, afu_release).
    """

    def reset(self) -> None:
        """Quiesce: soft-reset the AFU and wait until outstanding requests have drained.

        Raises:
            HardwareError: the port did not acknowledge.
        """

    def clear_errors(self) -> Mapping[str, int]:
        """Clear the port's error registers; returns those that were set, by name.

        Raises:
            HardwareError: an error cannot be cleared (AP6, thermal).
        """

    def program(self, image: Image) -> None:
        """Program an image into the region, uninterruptibly.

        The kernel need not check anything of it; the caller has compared the interface id. Success
        of this call alone proves nothing: compare `afu_id` afterwards.

        Raises:
            RefusedError: the image is of a kind that this family does not read.
            ProgrammingError: the ioctl failed, or the FPGA manager reports an error for it.
        """

    def leave(self) -> None:
        """Let the region's owner load what it brings; of a card whose `owner_loads`.

        The next programming of the plugin's ends that.

        Raises:
            HardwareError: the driver refused.
        """

    def afu_id(self, expected: AfuId | None = None) -> AfuId:
        """The id of the accelerator in the region.

        Args:
            expected: counts where the region shows several ids, one in each of its PCI functions,
                and this is one of them.

        Raises:
            PortPoisonedError: the port is held in reset by an earlier failed PR.
            HardwareError: it cannot be read, or is no id (all ones).
        """


@dataclass(frozen=True, slots=True)
class ClockLimits:
    """User clock limits in MHz, both ends allowed."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class UserClock:
    """A region's user clock, as it runs now.

    Attributes:
        high: MHz; None: it is unknown.
        low: its half-rate clock in MHz; None: it is unknown, or is not there.
        source: by what it was measured, or why it cannot be; for people.
    """

    high: float | None
    low: float | None
    source: str


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """Driver parameters of a region that overrode the defaults.

    Attributes:
        clock: user clock in MHz; None: the default.
        debug: log port errors during the allocation.
    """

    clock: int | None = None
    debug: bool = False


class Backend(Protocol):
    """A kind of hardware."""

    def boot_id(self) -> str:
        """The kernel's boot id: what was true of the hardware in another boot is not known now."""

    def card_ids(self) -> Collection[CardId]:
        """Which cards there are, sound or not; touches none of them."""

    def scan(self) -> ScanResult:
        """Everything there is. One card that cannot be read is a problem of that card only."""

    def scan_card(self, card: CardId) -> Card | CardProblem | None:
        """One card again; None when it is gone."""

    def open_port(self, card: Card, region: Region) -> AbstractContextManager[Port]:
        """Open a region exclusively.

        Raises:
            PortInUseError: a process has it open, or memory of it mapped.
            CardGoneError: the region is gone, or is another instance than `region` by now.
            NotFinishedError: the plugin or the node is out of descriptors or memory.
        """

    def afu_id(self, region: Region) -> AfuId:
        """Like `Port.afu_id`, without opening the port; says nothing during a PR (EBUSY).

        Waits for no PR, so any thread may ask.

        Raises:
            CardGoneError: the region is gone, or is another instance than `region` by now.
        """

    def numbers(self, region: Region) -> Mapping[Path, DeviceNumber]:
        """The device numbers that the grant's nodes have now; as of `Region.numbers`.

        Of a region that is held: holding it may have bound the drivers that give it some.

        Raises:
            HardwareError: they cannot be read.
        """

    def bound_by_plugin(self, region: Region) -> bool:
        """Whether holding the region took something that `give_back` returns.

        Of a region that was scanned. Touches nothing and does not block: the event loop asks.
        """

    def give_back(self, card: Card, region: Region) -> None:
        """Return what `open_port` took of the node: drivers that it bound to PCI functions.

        For a region without an owner or work in progress; harmless where nothing was taken.

        Raises:
            PortInUseError: a process has it open.
            CardGoneError: the region is gone, or is another instance than `region` by now.
        """

    def functions(self, card: CardId) -> Collection[PciFunction]:
        """The card's PCI functions, for people; reads no device.

        Raises:
            CardGoneError: there is no such card.
            HardwareError: they cannot be listed.
        """

    def make_functions(self, card: CardId, *, make: bool) -> None:
        """Make all virtual functions that a card can have, or remove those that it has.

        Nothing of the card may be open. It may be a card that cannot be served: nothing is removed
        that a program or a virtual machine may be using.

        Raises:
            RefusedError: it can have none, the driver makes none in its present state, or one
                may be in use.
            HardwareError: one cannot be looked at.
        """

    def clock_limits(self, card: Card, region: Region) -> ClockLimits | None:
        """Limits of the region's user clock; None where there is no documented way to set it."""

    def user_clock(self, region: Region) -> UserClock:
        """What the region's user clock is now; never raises for what the hardware answers."""

    def apply_settings(self, card: Card, region: Region, settings: DriverSettings) -> None:
        """Set driver parameters; `DriverSettings()` restores the defaults.

        Raises:
            HardwareError: the driver refused.
        """

    def port_errors(self, region: Region) -> Mapping[str, int]:
        """The port's error registers that are set, by name; reading changes nothing.

        Raises:
            HardwareError: they cannot be read.
        """

    def clear_errors(self, card: Card) -> Mapping[str, int]:
        """Clear error registers of the card as a whole; returns those that were, by name.

        For the card's thread: waits for a PR. Never raises for what the card answers: an error
        that stays is seen by `health`.
        """

    def clear_memory(self, card: Card) -> None:
        """Clear the card's on-card memory, of all its regions at once; up to 5 s a bank.

        Raises:
            HardwareError: it failed or timed out.
        """

    def reset(self, card: Card) -> None:
        """Bring a card that nobody uses to where no owner's image runs; of one that `resets`.

        Seconds, and nothing can interrupt it. A process that still has a node of it is ended. The
        card has to be scanned again afterwards: its nodes may have other numbers. If it fails, or
        the plugin dies meanwhile, `bind` finishes it.

        Raises:
            PortInUseError: a process has a node and does not end.
            CardGoneError: the card or a driver of it is gone.
            HardwareError: it failed.
        """

    def guard(self, card: Card, *, left: bool) -> str:
        """Restore what keeps others from changing the regions, where that was lost.

        Of a card whose regions the plugin made what they are; `left`: one may be left to its owner
        (`Port.leave`). Returns what was missing, for people;
        empty: nothing was.

        Raises:
            CardGoneError: the card or a driver of it is gone.
            HardwareError: it is missing, and cannot be restored.
        """

    def rebind(self, card: Card) -> None:
        """Take the card's driver off and put it on again, which un-poisons its ports.

        Every port is opened exclusively and closed again first: no process may have one open. The
        card has to be scanned again afterwards.

        Raises:
            RefusedError: it must not be done now; nothing was touched.
            HardwareError: the card has no driver now; the message says what helps.
        """

    def rebind_advice(self, card: Card) -> str:
        """The operator's way to do what `rebind` does, with the command; reads nothing."""

    def bind(self, card: CardId) -> None:
        """Finish what a `rebind` or a `reset` left half done; any other card is left as it is.

        Raises:
            CardGoneError: there is no such card.
            HardwareError: it failed, or a reset has not ended yet.
        """

    def health(self, card: Card) -> CardHealth:
        """Read the hardware's health signals; never raises for what a dying card answers."""

    def accept_errors(self, card: CardId) -> None:
        """The operator has looked: the error counters' values at the next look count as healthy."""

    def assumptions(self, card: CardId) -> tuple[Assumption, ...]:
        """What is taken for granted about a card, sound or not.

        Opens no device node, writes nothing, and never raises for what the card answers.
        """

    def readings(self, card: Card) -> Readings:
        """Sensors and error registers, for those who watch; never raises, waits for no PR."""


class EventSource(Protocol):
    """Reports to the event loop when cards come, go, or fail."""

    def start(self, changed: Callable[[CardId | None], None]) -> None:
        """Begin to call `changed` on the running loop.

        It gets the card that may have changed, or None when events were lost or cannot be told
        apart: then everything is to be scanned again. Events may come in bursts and for cards
        that did not change.
        """

    def close(self) -> None:
        """Stop; no call comes after this."""
