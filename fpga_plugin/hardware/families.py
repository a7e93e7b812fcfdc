"""The cards of a node with several families: one backend, which calls those of the families."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager

from fpga_plugin.errors import CardGoneError
from fpga_plugin.hardware.backend import (
    Backend,
    ClockLimits,
    DriverSettings,
    Port,
    UserClock,
)
from fpga_plugin.hardware.grant import DeviceNumber, Path
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


class Families:
    """Implements `fpga_plugin.hardware.backend.Backend`; used from several threads.

    A card is the family's that found it last. PCI addresses are one family's at a time.

    Args:
        backends: of the families; where two claim a card, the first has it.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = tuple(backends)
        self._of_card: dict[CardId, Backend] = {}

    def _of(self, card: CardId) -> Backend:
        """The family of a card.

        Raises:
            CardGoneError: none has it.
        """
        if (known := self._of_card.get(card)) is None:
            self.card_ids()
            known = self._of_card.get(card)
        if known is None:
            raise CardGoneError(f"there is no card {card}", hint="is it in its slot?")
        return known

    def boot_id(self) -> str:
        """The kernel's boot id."""
        return self._backends[0].boot_id()

    def card_ids(self) -> Collection[CardId]:
        """The cards of all families."""
        found: dict[CardId, Backend] = {}
        for backend in self._backends:
            for card in backend.card_ids():
                found.setdefault(card, backend)
        self._of_card |= found
        return tuple(found)

    def scan(self) -> ScanResult:
        """Everything there is."""
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
        """One card, by the first family that has it."""
        for backend in self._backends:
            if (found := backend.scan_card(card)) is not None:
                self._of_card[card] = backend
                return found
        return None

    def open_port(self, card: Card, region: Region) -> AbstractContextManager[Port]:
        """Open a region, as its family does."""
        return self._of(card.id).open_port(card, region)

    def afu_id(self, region: Region) -> AfuId:
        """Which accelerator is in a region."""
        return self._of(region.card).afu_id(region)

    def numbers(self, region: Region) -> Mapping[Path, DeviceNumber]:
        """The device numbers of a held region's nodes."""
        return self._of(region.card).numbers(region)

    def bound_by_plugin(self, region: Region) -> bool:
        """Whether holding the region took something. Asked on the event loop: looks nowhere."""
        known = self._of_card.get(region.card)
        return known is not None and known.bound_by_plugin(region)

    def give_back(self, card: Card, region: Region) -> None:
        """Return what was taken."""
        self._of(card.id).give_back(card, region)

    def functions(self, card: CardId) -> Collection[PciFunction]:
        """A card's PCI functions."""
        return self._of(card).functions(card)

    def make_functions(self, card: CardId, *, make: bool) -> None:
        """Make or remove virtual functions."""
        self._of(card).make_functions(card, make=make)

    def clock_limits(self, card: Card, region: Region) -> ClockLimits | None:
        """Limits of a region's user clock."""
        return self._of(card.id).clock_limits(card, region)

    def user_clock(self, region: Region) -> UserClock:
        """A region's user clock as it runs now."""
        try:
            return self._of(region.card).user_clock(region)
        except CardGoneError as error:
            return UserClock(None, None, error.message)

    def apply_settings(self, card: Card, region: Region, settings: DriverSettings) -> None:
        """Set driver parameters."""
        self._of(card.id).apply_settings(card, region, settings)

    def port_errors(self, region: Region) -> Mapping[str, int]:
        """A region's error registers that are set."""
        return self._of(region.card).port_errors(region)

    def clear_errors(self, card: Card) -> Mapping[str, int]:
        """Clear error registers of a card as a whole."""
        return self._of(card.id).clear_errors(card)

    def clear_memory(self, card: Card) -> None:
        """Clear a card's memory."""
        self._of(card.id).clear_memory(card)

    def reset(self, card: Card) -> None:
        """Reset a card that nobody uses."""
        self._of(card.id).reset(card)

    def guard(self, card: Card, *, left: bool) -> str:
        """Restore what keeps others from changing a card's regions."""
        return self._of(card.id).guard(card, left=left)

    def rebind(self, card: Card) -> None:
        """Mend poisoned regions."""
        self._of(card.id).rebind(card)

    def rebind_advice(self, card: Card) -> str:
        """The operator's way to do it."""
        return self._of(card.id).rebind_advice(card)

    def bind(self, card: CardId) -> None:
        """Finish a rebind or a reset that was interrupted."""
        self._of(card).bind(card)

    def health(self, card: Card) -> CardHealth:
        """What a card's own signals say."""
        return self._of(card.id).health(card)

    def accept_errors(self, card: CardId) -> None:
        """The operator has looked at a card."""
        if (known := self._of_card.get(card)) is not None:
            known.accept_errors(card)

    def assumptions(self, card: CardId) -> tuple[Assumption, ...]:
        """What is taken for granted about a card."""
        try:
            return self._of(card).assumptions(card)
        except CardGoneError:
            return self._backends[0].assumptions(card)

    def readings(self, card: Card) -> Readings:
        """A card's sensors."""
        return self._of(card.id).readings(card)
