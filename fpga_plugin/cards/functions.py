"""Messages about cards and regions that are not served because of what is on them."""

import structlog

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import FUNCTIONS_HINT
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import CardId, RegionId

log = structlog.get_logger()


def note(ledger: Ledger, card: Card) -> str:
    """Why a card's regions are not advertised, for people; empty if they are."""
    if not ledger.naming.serves_functions:
        return "" if card.reprogrammable else f"cannot be reprogrammed: {FUNCTIONS_HINT}"
    if of := _withheld(ledger, card):
        return f"{', '.join(of)} not advertised: an owner's image, which is no function"
    return ""


class FunctionNews:
    """Logs it, once until it changes."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._told: dict[CardId, str] = {}

    def found(self, card: Card) -> None:
        """A card was found, and the ledger knows what is on it."""
        now = note(self._ledger, card)
        if self._told.get(card.id, "") == now:
            return
        self._told[card.id] = now
        if now and self._ledger.naming.serves_functions:
            log.warning(
                "an earlier tenant's image is no function",
                card=card.id,
                regions=_withheld(self._ledger, card),
                hint="these regions are not advertised until FPGA_PLUGIN_ADVERTISE=region has"
                " blanked them (docs/functions.md)",
            )
        elif now:
            log.warning(
                "card cannot be reprogrammed",
                card=card.id,
                description=card.description,
                hint=FUNCTIONS_HINT,
            )


def _withheld(ledger: Ledger, card: Card) -> list[RegionId]:
    return [region.id for region in card.regions if ledger.naming.withheld(region.id)]
