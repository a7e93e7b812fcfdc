"""Adopts what kubelet's records show and the journal does not: owners of cards.

A lost journal, a card that was put in, a claim that another plugin made: kubelet's checkpoint tells
of them. Until it was read nothing of such a card is given out (`Ledger.unreconciled`).
"""

import structlog

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import CardId, DeviceId, is_device_id
from fpga_plugin.ledger.journal import JournalError
from fpga_plugin.ledger.ledger import Ledger, card_of
from fpga_plugin.pods.checkpoint import Checkpoint
from fpga_plugin.pods.identity import granted_nodes
from fpga_plugin.stock.foreign import entries_of, foreign_entries

log = structlog.get_logger()


class Adoption:
    """Belongs to the event loop.

    Args:
        ledger: gets the claims.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._not_adopted: dict[CardId, str] = {}

    def card_changed(self, card: CardId) -> None:
        """What stood in the way may be gone."""
        self._not_adopted.pop(card, None)

    @property
    def new_cards(self) -> bool:
        """Whether there is a card of which kubelet's records were not read yet."""
        present = self._ledger.unreconciled & self._ledger.cards.keys()
        return bool(present - self._not_adopted.keys())

    @property
    def doubtful(self) -> bool:
        """Whether kubelet's records name somebody who keeps a card from being given out."""
        return bool(self._ledger.foreign or self._not_adopted)

    def adopt(self, checkpoint: Checkpoint) -> None:
        """Make the claims that kubelet's records show and the journal lost.

        A stale entry is released later. What cannot become a claim keeps its card from being given
        out, and is tried again until it can, or kubelet has forgotten it.

        Raises:
            JournalError: they cannot be written down.
        """
        ledger = self._ledger
        cards = ledger.unreconciled & ledger.cards.keys()
        known = ledger.reconciled_cards()
        problems: dict[CardId, str] = {}
        for entry in checkpoint.entries:
            for device in sorted(map(DeviceId, filter(is_device_id, entry.devices))):
                # Of a card that is not there yet the pod holds nodes, which another card may get.
                if device not in ledger.claims and card_of(device) not in known:
                    try:
                        ledger.adopt(entry.resource, device, entry.pod_uid, granted_nodes(entry))
                    except JournalError:
                        raise
                    except FpgaPluginError as error:
                        if card_of(device) in cards:  # else it is asked about when it comes
                            problems[card_of(device)] = f"{device} of pod {entry.pod_uid}: {error}"
                    else:
                        log.warning("claim adopted", device=device, pod=entry.pod_uid)
        for card, problem in problems.items():
            if self._not_adopted.get(card) != problem:
                log.warning("claim not adopted", card=card, error=problem)
        self._not_adopted = problems
        ledger.reconciled(cards - problems.keys())
        self._look_for_foreign(checkpoint)

    def _look_for_foreign(self, checkpoint: Checkpoint) -> None:
        """Keep back the cards of which another plugin's pods may have devices."""
        foreign = foreign_entries(checkpoint)
        cards: dict[CardId, str] = {}
        for card in self._ledger.cards.values():
            if entries := entries_of(card, foreign):
                # Kubelet writes them in another order each time.
                resource, pod = min((entry.resource, entry.pod_uid) for entry in entries)
                cards[card.id] = (
                    f"pod {pod} holds devices of {resource} that another plugin gave it; drain the"
                    " node of such pods"
                )
        if cards != self._ledger.foreign:
            for card_id, reason in cards.items():
                log.warning("card left alone", card=card_id, reason=reason)
            self._ledger.set_foreign(cards)
