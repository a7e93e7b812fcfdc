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
    taken = {card_of(device.id) for device in fixed}
    best: tuple[tuple[object, ...], list[AdvertisedDevice]] | None = None
    for row in _rows(rings):
        if not taken <= set(row):
            continue
        there = [device for device in group if card_of(device.id) in row]
        if len(there) < missing:
            continue
        chosen = sorted(there, key=lambda d: (row.index(card_of(d.id)), device_order(d.id)))
        chosen = chosen[:missing]
        if len({card_of(device.id) for device in (*chosen, *fixed)}) < len(row):
            continue  # a shorter row has them, too
        rank = (len(row), sorted(device_order(device.id) for device in chosen))
        if len(row) > 1 and (best is None or rank < best[0]):
            best = rank, chosen
    return None if best is None else best[1]


def _rows(rings: Rings) -> Iterator[tuple[CardId, ...]]:
    """Every row of cards that lie in a ring one after the other."""
    for ring in rings:
        for length in range(2, len(ring) + 1):
            for first in range(len(ring)):
                yield tuple(ring[(first + step) % len(ring)] for step in range(length))
