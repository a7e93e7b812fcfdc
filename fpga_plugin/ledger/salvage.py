"""What is left of a journal in which rows make no sense: less is believed, nobody is forgotten.

SQLite has no checksums, so a damaged disk may turn one row into another. Rows that are recognised
as nonsense are left out. What else is wrong nobody knows; so no condition counts that would let a
region be given out unscrubbed, as after a reboot, and kubelet's records are asked for owners whose
claims were lost, as without a journal. Any region may hold a former owner's image, also one whose
rows were left out (`Epoch.LOST`). A claim may lack its last PreStart, and with it a container that
runs: none counts as unused, nor as one whose containers have all stopped. What would take something
away from somebody stays: claims, drained cards, memory debts, FAULTED regions, former owners. The
pods of a ResourceClaim that lost a device's claim count among these, until kubelet's record tells
that they still have it.
"""

from collections.abc import Sequence
from dataclasses import replace

from fpga_plugin.ids import CardId
from fpga_plugin.ledger.names import card_of, is_card
from fpga_plugin.ledger.records import (
    Change,
    Claim,
    Condition,
    Epoch,
    RegionRecord,
    TenantImage,
)
from fpga_plugin.ledger.rows import Loaded


def salvaged(loaded: Loaded) -> Loaded:
    """A journal's content without what cannot be; the same object where all of it can."""
    told = loaded.snapshot
    claims = [claim for claim in told.claims.values() if claim is not None]
    impossible = _impossible(claims)
    left_out = (
        *loaded.left_out,
        *(
            f"claims on card {card}: as a whole and by region at the same time"
            for card in sorted(impossible)
        ),
    )
    if not left_out:
        return loaded
    kept = {
        claim.device: replace(claim, exposed=True)
        for claim in claims
        if card_of(claim.device) not in impossible
    }
    snapshot = replace(
        told,
        epochs=told.epochs | {Epoch.LOST: "rows of the journal"},
        claims={**kept},
        regions={region: _doubted(record) for region, record in told.regions.items()},
        images=told.images | {TenantImage(region, None): True for region in told.regions},
    )
    return replace(loaded, snapshot=snapshot, left_out=left_out)


def untold(loaded: Loaded, *, lost: str) -> Change:
    """What has to be added to a journal that is whole, where it cannot tell of owners' images.

    Args:
        loaded: the journal's content.
        lost: what became of the one before it; empty: nothing, or there was none.

    One without a count of its transactions is of a version that noted no images. What it calls
    BLANK was read as the blank bitstream; any other region may hold an owner's.
    """
    if lost:
        return Change(epochs={Epoch.LOST: lost})
    if loaded.commits:
        return Change()
    regions = loaded.snapshot.regions.values()
    unsure = [r.region for r in regions if r.condition is not Condition.BLANK]
    return Change(images={TenantImage(region, None): True for region in unsure})


def _impossible(claims: Sequence[Claim]) -> set[CardId]:
    """Cards that are claimed as a whole and by region (invariant 1)."""
    whole = {card_of(claim.device) for claim in claims if is_card(claim.device)}
    return whole & {card_of(claim.device) for claim in claims if not is_card(claim.device)}


def _doubted(record: RegionRecord) -> RegionRecord:
    if record.condition is Condition.FAULTED:
        return record
    return replace(record, condition=Condition.DIRTY, reason="the journal was damaged", afu_id=None)
