"""Debug holds: the region of a container that failed is kept as it left it, for its developer.

A hold is written with the start of a container whose pod asks for it (`begun`). It is pending until
the allocation has ended and the plugin knows whether the container failed. `cards/debugging.py`
decides then: the hold ends (`end`), or is in force until a time (`put`). Nobody owns the region
then, and nobody is given it. Work on the region and another owner end each hold (`ended_by`, asked
at each commit). So do the start of another container, the end of the hardware and a boot.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from fpga_plugin.allocation.journal.records import Change, Condition, DebugHold
from fpga_plugin.allocation.names import card_of
from fpga_plugin.ids import CardId, RegionId

if TYPE_CHECKING:
    from fpga_plugin.allocation.state import State  # ends holds as it commits a change

Holds: TypeAlias = dict[RegionId, DebugHold | None]
"""What a change says of holds; None: they end."""

# -------------------------------------------------------------------- questions


def in_force(state: "State", region: RegionId) -> DebugHold | None:
    """The hold that keeps an unowned region as it is; the region is not given out."""
    hold = state.debug_holds.get(region)
    if hold is None or not hold.until or state.region_allocation(region) is not None:
        return None
    return hold


def all_in_force(state: "State") -> list[DebugHold]:
    """All holds that keep a region as it is."""
    return [hold for r in state.debug_holds if (hold := in_force(state, r)) is not None]


def pending(state: "State", region: RegionId) -> bool:
    """Whether a region is to be kept, should its container fail."""
    return region in state.debug_holds and in_force(state, region) is None


def on(state: "State", card: CardId, *, but: Iterable[RegionId] = ()) -> list[DebugHold]:
    """Holds of a card's unowned regions, in force or pending, `but` of these.

    Until that is decided, the plugin does nothing to the card that would end such a hold.
    """
    mine = set(but)
    return [
        hold
        for region, hold in state.debug_holds.items()
        if card_of(region) == card
        if region not in mine and state.region_allocation(region) is None
    ]


def words(hold: DebugHold) -> str:
    """Why a region under a hold is not given out, for people."""
    whose = f"{hold.namespace}/{hold.name}"
    return f"kept for debugging as pod {whose} left it, whose {hold.failure}"


# -------------------------------------------------------------------- what a step changes


def begun(state: "State", regions: Iterable[RegionId], hold: DebugHold | None) -> Holds:
    """A container starts on these regions: earlier holds end; `hold`: what its pod asks for."""
    if hold is None:
        return ended(state, regions)
    return {region: replace(hold, region=region) for region in regions}


def ended(state: "State", regions: Iterable[RegionId]) -> Holds:
    """The holds on these regions, as a change ends them."""
    return {region: None for region in regions if region in state.debug_holds}


def ended_by(state: "State", change: Change) -> Holds:
    """The holds that a change ends: work begins on their regions, or somebody gets them."""
    over = [r for r, record in change.regions.items() if record.condition is Condition.SCRUBBING]
    for device, allocation in change.allocations.items():
        before = state.allocations.get(device)
        if allocation and (before is None or before.number != allocation.number):
            over += allocation.grants
    return ended(state, over)


def over_at_start(state: "State", *, same_boot: bool) -> Holds:
    """Holds that end: in another boot no region is as left; an owner ends its region's hold."""
    return {
        region: None
        for region, hold in state.debug_holds.items()
        if not same_boot or (hold.until and state.region_allocation(region) is not None)
    }


# -------------------------------------------------------------------- steps


def put(state: "State", hold: DebugHold) -> None:
    """Note what failed, or until when an unowned region is kept as it is."""
    if state.debug_holds[hold.region] != hold:
        state.commit(Change(debug_holds={hold.region: hold}))


def end(state: "State", regions: Iterable[RegionId]) -> None:
    """End holds on these regions, in force or pending: the next scrub cleans them."""
    state.commit(Change(debug_holds=ended(state, regions)))
