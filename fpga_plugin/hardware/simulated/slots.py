"""Which simulated cards there are: the setting, the files of `cards/`, and what was known before.

A card is plugged while `cards/<card id>` exists. The setting only says which cards to create the
first time and what shape they have: a known card whose file is missing was unplugged by somebody,
and stays so over restarts of the daemon.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from fpga_plugin.errors import quote
from fpga_plugin.hardware.simulated import files
from fpga_plugin.ids import CardId, InterfaceId, PciAddress
from fpga_plugin.settings.settings import SimulatedGroup, SimulatedKind

_log = structlog.get_logger(__name__)

_FIRST_BUS = 0x10
_BUSES = 0x100 - _FIRST_BUS


@dataclass(frozen=True, slots=True)
class Shape:
    """What a card is made of."""

    regions: int
    interface_id: InterfaceId
    kinds: frozenset[SimulatedKind] = frozenset()


class CardFile(NamedTuple):
    """Identity of a card's file: a card that was taken out and put back has another one.

    Attributes:
        inode: of the file; often used again at once for the next file of the directory.
        changed: the file's ctime in ns. It shows a new file with an old inode, but changes by
            `touch` too: it counts only where a removal was seen.
    """

    inode: int
    changed: int


def card_at(index: int) -> CardId:
    """The id of the setting's card number `index`, from 0: buses 10 to ff, domain after domain."""
    domain, bus = divmod(index, _BUSES)
    return PciAddress(domain, _FIRST_BUS + bus, 0, 0).card_id


class Slots:
    """The slots of the simulated machine.

    Attributes:
        cards_directory: the folder of the cards' files.
        shapes: the cards of the setting.
    """

    def __init__(self, directory: str, groups: Sequence[SimulatedGroup], *, owner: bool) -> None:
        self._directory = directory
        self.cards_directory = os.path.join(directory, "cards")
        shapes = [
            Shape(group.regions, group.interface_id, group.kinds)
            for group in groups
            for _ in range(group.cards)
        ]
        if not shapes:
            msg = "simulated cards need at least one group of one card"
            raise ValueError(msg)
        self.shapes: Mapping[CardId, Shape] = {
            card_at(index): shape for index, shape in enumerate(shapes)
        }
        self._last = shapes[-1]
        self._path = os.path.join(directory, "known.json")
        self._known = self._load()
        self._warned: set[str] = set()
        new = [card for card in self.shapes if card not in self._known]
        # A reader of a directory that no daemon has filled yet shows the cards as they would be.
        self._would_be = frozenset() if owner else frozenset(new)
        if owner:
            self._create(new)

    def shape(self, card: CardId) -> Shape:
        """The setting's, or the last group's for a card that is not in the setting."""
        return self.shapes.get(card, self._last)

    def known(self, card: CardId) -> int | None:
        """The inode of the card's file when it was last seen; None: not known, or unplugged."""
        return self._known.get(card)

    def is_known(self, card: CardId) -> bool:
        """Whether the card was ever there."""
        return card in self._known

    def remember(self, card: CardId, inode: int | None) -> bool:
        """Note that a card is plugged or unplugged; returns whether that is new."""
        if card in self._known and self._known[card] == inode:
            return False
        self._known[card] = inode
        return True

    def save(self) -> None:
        """Write down what is known."""
        entries = ",\n".join(
            f'"{card}": {"null" if inode is None else inode}'
            for card, inode in sorted(self._known.items())
        )
        files.replace(self._path, f'{{"cards": {{\n{entries}\n}}}}\n')

    def look(self, card: CardId) -> CardFile | None:
        """The card's file as it is now; None: unplugged."""
        try:
            found = os.stat(f"{self.cards_directory}/{card}")
        except OSError:
            return CardFile(0, 0) if card in self._would_be else None
        return CardFile(found.st_ino, found.st_ctime_ns)

    def plugged(self) -> list[CardId]:
        """Every card that has a file, in order. Other names are ignored with one warning each."""
        try:
            names = set(os.listdir(self.cards_directory))
        except OSError:
            names = set()
        cards = {card for name in names if (card := self.parse(name)) is not None}
        return sorted(cards | self._would_be)

    def parse(self, name: str) -> CardId | None:
        """The card that a file of `cards/` stands for."""
        try:
            card = PciAddress.parse(name).card_id
        except ValueError:
            card = None
        if card == name:
            return card
        if name not in self._warned:
            self._warned.add(name)
            _log.warning(
                "simulated-card-ignored",
                file=quote(name),
                hint="names in cards/ are card ids, such as 0000-10-00.0",
            )
        return None

    def _create(self, cards: Sequence[CardId]) -> None:
        for path in (self.cards_directory, os.path.join(self._directory, "faults")):
            os.makedirs(path, exist_ok=True)
        for card in cards:
            # Mode "a" leaves alone what is there: its contents do not matter.
            with open(os.path.join(self.cards_directory, card), "a", encoding="ascii"):
                pass

    def _load(self) -> dict[CardId, int | None]:
        cards = (files.load_object(self._path) or {}).get("cards")
        if not isinstance(cards, dict):
            return {}
        return {
            CardId(card): inode if type(inode) is int else None for card, inode in cards.items()
        }
