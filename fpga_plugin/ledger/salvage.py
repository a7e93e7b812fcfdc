"""What is left of a journal in which rows make no sense: less is believed, nobody is forgotten.

SQLite has no checksums, so a damaged disk may turn one row into another. Rows that are recognised
as nonsense are left out. What else is wrong nobody knows; so no condition counts that would let a
region be given out unscrubbed, as after a reboot, and kubelet's records are asked for owners whose
claims were lost, as without a journal. What would take something away from somebody stays: claims,
drained cards, memory debts, FAULTED regions, former owners.
"""

from collections.abc import Iterable
from dataclasses import replace

from fpga_plugin.ids import CardId
from fpga_plugin.ledger.names import card_of, is_card
from fpga_plugin.ledger.records import Claim, Condition, RegionRecord
from fpga_plugin.ledger.rows import Loaded


def salvaged(loaded: Loaded) -> Loaded:
    """A journal's content without what cannot be; the same object where all of it can."""
    left_out = list(loaded.left_out)
    impossible = _impossible(loaded.snapshot.claims)
    left_out += [
        f"claims on card {card}: as a whole and by region at the same time"
        for card in sorted(impossible)
    ]
    if not left_out:
        return loaded
    snapshot = replace(
        loaded.snapshot,
        claims=tuple(c for c in loaded.snapshot.claims if card_of(c.device) not in impossible),
        regions=tuple(_doubted(record) for record in loaded.snapshot.regions),
        unreconciled=frozenset(
            {
                *(card_of(record.region) for record in loaded.snapshot.regions),
                *(card_of(claim.device) for claim in loaded.snapshot.claims),
                *loaded.snapshot.unreconciled,
            }
        ),
    )
    return Loaded(snapshot, tuple(left_out))


def _impossible(claims: Iterable[Claim]) -> set[CardId]:
    """Cards that are claimed as a whole and by region (invariant 1)."""
    kinds: dict[CardId, set[bool]] = {}
    for claim in claims:
        kinds.setdefault(card_of(claim.device), set()).add(is_card(claim.device))
    return {card for card, found in kinds.items() if len(found) > 1}


def _doubted(record: RegionRecord) -> RegionRecord:
    if record.condition is Condition.FAULTED:
        return record
    return replace(record, condition=Condition.DIRTY, reason="the journal was damaged", afu_id=None)
