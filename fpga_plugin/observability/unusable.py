"""Free regions that no pod can be given until an operator acts, and why: an empty store above all.

Not among them: regions that failed (`failed`), that an operator took out of service or refuses by a
setting of exposure, that are kept for debugging, and those whose scrub is under way or waits for a
earlier tenant.
"""

from enum import Enum

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.obstacles import FAILED, ObstacleKind
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.plugin import Plugin
from fpga_plugin.settings.settings import ScrubPolicy


class Unusable(Enum):
    """Why; the value is for people, the name in lower case is the metric's label."""

    NO_BLANK_BITSTREAM = "no blank bitstream"
    HELD_BY_ANOTHER_PLUGIN = "another plugin's pods hold the card"
    NOT_REPROGRAMMABLE = "the card cannot be reprogrammed"
    NO_FUNCTION = "the image on it is an earlier tenant's, and no function"


def unusable(plugin: Plugin, scrub: ScrubPolicy, region: Region) -> Unusable | None:
    """Why a free region cannot be given to any pod; None where it can, or it is not free."""
    ledger = plugin.ledger
    card = ledger.cards.get(region.card)
    if card is None or _has_another_state(ledger, card, region):
        return None
    if card.id in ledger.foreign:
        return Unusable.HELD_BY_ANOTHER_PLUGIN
    if ledger.naming.serves_functions:
        return Unusable.NO_FUNCTION if ledger.naming.withheld(region.id) else None
    if not card.reprogrammable:
        return Unusable.NOT_REPROGRAMMABLE
    dirty = ledger.record(region.id).condition is not Condition.BLANK
    if dirty and scrub is ScrubPolicy.REQUIRED and plugin.blanks.problem(card.interface_id):
        return Unusable.NO_BLANK_BITSTREAM
    return None


def _has_another_state(ledger: Ledger, card: Card, region: Region) -> bool:
    """Whether it is owned, drained, kept or failed, or its card is withheld on purpose."""
    return (
        ledger.region_allocation(region.id) is not None
        or card.id in ledger.drained
        or any(one.kind in FAILED | {ObstacleKind.KEPT} for one in ledger.obstacles.of(region.id))
        or bool(ledger.obstacles.exposure.refusal(card, whole=True))
    )
