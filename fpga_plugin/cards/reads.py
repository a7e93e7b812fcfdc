"""Reads cards beside the work on them: a card that does not answer holds up no other.

A read of a sick card's attribute may wait in the kernel for ever. So each card's reads can have a
thread of their own, as its work does (`cards.workers`), and the caller gets an error in time.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from fpga_plugin.errors import CardGoneError, FpgaPluginError, HardwareError
from fpga_plugin.hardware.backend import Backend
from fpga_plugin.hardware.model import Region
from fpga_plugin.host.keyed_threads import KeyedThreads, LateError
from fpga_plugin.ids import AfuId, CardId, RegionId

T = TypeVar("T")

CARD_SECONDS = 10.0
"""How long a card may take to be read; sensors behind a slow bus take a second."""

SILENT = f"the card has not answered within {CARD_SECONDS:.0f} s"
"""Why the regions of a card that hangs are out of service."""

SILENT_HINT = "see the kernel's log; the card may need a reset or a power cycle"


class SilentCardError(HardwareError):
    """A card does not answer."""


class CardReads:
    """Reads cards in threads, so that a card that hangs holds up no other."""

    def __init__(self) -> None:
        self._threads: KeyedThreads[CardId] = KeyedThreads("cards")

    async def run(self, card: CardId, function: Callable[[], T]) -> T:
        """Call a blocking function that reads a card.

        Raises:
            SilentCardError: it takes too long.
        """
        try:
            return await self._threads.run(card, function, seconds=CARD_SECONDS)
        except LateError:
            raise SilentCardError(
                f"card {card}: {SILENT}",
                hint=SILENT_HINT,
            ) from None

    async def each(
        self, cards: Iterable[CardId], function: Callable[[CardId], T]
    ) -> tuple[dict[CardId, T], frozenset[CardId]]:
        """Call a blocking function for many cards, in one thread as long as all of them answer.

        Returns:
            Their answers, and the cards that do not answer. Cards that another call reads at the
            moment are in neither.
        """
        return await self._threads.each(cards, function, seconds=CARD_SECONDS)


def afu_ids(backend: Backend, regions: Iterable[Region]) -> dict[RegionId, AfuId | None] | None:
    """The regions' AFU ids, None for one that cannot be read; for a thread.

    None for all of them: a region went, even if another replaced it.
    """
    observed: dict[RegionId, AfuId | None] = {}
    for region in regions:
        try:
            observed[region.id] = backend.afu_id(region)
        except CardGoneError:
            return None
        except FpgaPluginError:
            observed[region.id] = None
    return observed
