"""Which devices lie beside each other, by the operator's table: cards that are cabled to rings.

The ports of Alveo cards lead from card to card past the host, and no register tells which cables
are there. A pod that asks for several cards for such a program wants neighbours: with the ring
A B C D, two cards of A and B, of D and A, not of A and C.
"""

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from fpga_plugin.allocation.lists import AdvertisedDevice
from fpga_plugin.allocation.names import card_of
from fpga_plugin.ids import CardId, device_order

Rings: TypeAlias = tuple[tuple[CardId, ...], ...]
"""Cards in the order in which they are cabled; the last is the first one's neighbour, too."""

NO_RINGS: Final[Rings] = ()


def adjacent(
    rings: Rings,
    group: Sequence[AdvertisedDevice],
    fixed: Sequence[AdvertisedDevice],
    missing: int,
) -> list[AdvertisedDevice] | None:
    """The best `missing` of a group on cards in a row, beside those that are `fixed`.

    The shortest row counts, then that with the smallest ids. None: no row has so many, or a fixed
    one lies elsewhere, or one card alone is asked for.
    """
    choices = []
    for row in _rows(rings):
        there = [device for device in group if card_of(device.id) in row]
        there = sorted(there, key=lambda d: (row.index(card_of(d.id)), device_order(d.id)))
        chosen = there[:missing]
        cards = {card_of(device.id) for device in (*chosen, *fixed)}
        if len(chosen) == missing and cards == set(row):  # of fewer cards there is a shorter row
            choices.append((len(row), sorted(device_order(d.id) for d in chosen), chosen))
    return min(choices, key=lambda choice: choice[:2])[2] if choices else None


def _rows(rings: Rings) -> Iterator[tuple[CardId, ...]]:
    """Every row of cards that lie in a ring one after the other."""
    for ring in rings:
        for length in range(2, len(ring) + 1):
            for first in range(len(ring)):
                yield tuple(ring[(first + step) % len(ring)] for step in range(length))
