"""GetPreferredAllocation: which devices to take, so that whole cards stay whole.

Of all choices that contain what must be included, the best one in this order, each criterion only
among those that the ones before leave equal:

1. fewest devices that are not listed, then fewest Unhealthy ones, then fewest that have an owner
   (what is Healthy and free is clean);
   then, where the operator has a table of neighbours, cards in a row (`neighbours`), and nothing
   of what follows;
2. fewest NUMA nodes, those of what must be included among them;
3. most devices on cards that are partitioned already, or of which a device must be included;
4. fewest cards, those of what must be included among them;
5. the smallest ids, compared as the sorted list of what is chosen beyond what must be included.

The choice is exact but for one bound: where the best number of NUMA nodes leaves more than
`MAX_NODE_SETS` sets of nodes to compare, which needs more nodes than machines with cards have, only
the first ones are compared.

Unknown ids come last and are no error: on an error kubelet fails the pod for good.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.lists import AdvertisedDevice
from fpga_plugin.allocation.names import card_of, is_card
from fpga_plugin.allocation.neighbours import NO_RINGS, Rings, adjacent
from fpga_plugin.ids import CardId, DeviceId, device_order

MAX_NODE_SETS = 200


def preferred(
    ledger: Ledger,
    listed: Sequence[AdvertisedDevice],
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    *,
    rings: Rings = NO_RINGS,
) -> list[str]:
    """Choose `size` of `available`, `must_include` first.

    Returns fewer where there are not enough, and the first of `must_include` where it is longer
    than `size`.
    """
    known = {device.id: device for device in listed}
    taken = list(dict.fromkeys(must_include))[: max(size, 0)]
    offered = [text for text in dict.fromkeys(available) if text not in set(taken)]
    fixed = [known[DeviceId(text)] for text in taken if DeviceId(text) in known]
    opened = {card_of(device.id) for device in fixed}
    opened |= {card_of(device) for device in ledger.allocations if not is_card(device)}
    groups: dict[tuple[bool, bool], list[AdvertisedDevice]] = {}
    for text in offered:
        if (device := known.get(DeviceId(text))) is not None:
            rank = (not device.healthy, device.id in ledger.allocations)
            groups.setdefault(rank, []).append(device)
    for rank in sorted(groups):
        missing = size - len(taken)
        if missing <= 0:
            break
        chosen = groups[rank]
        if len(chosen) > missing:
            row = adjacent(rings, chosen, fixed, missing)
            chosen = _choose(chosen, opened, fixed, missing) if row is None else row
        taken += [device.id for device in sorted(chosen, key=_order)]
        fixed += chosen
    unknown = sorted(text for text in offered if DeviceId(text) not in known)
    return taken + unknown[: max(size - len(taken), 0)]


def _order(device: AdvertisedDevice) -> tuple[object, ...]:
    return device_order(device.id)


def _choose(
    group: Sequence[AdvertisedDevice],
    opened: Collection[CardId],
    fixed: Sequence[AdvertisedDevice],
    missing: int,
) -> list[AdvertisedDevice]:
    """The best `missing` of a group that has more.

    `opened` cards are partitioned, or count as such. What is `fixed` is taken already: its cards
    and NUMA nodes cost nothing more.
    """
    free = {card_of(device.id) for device in fixed}
    group = sorted(group, key=_order)
    choices = []
    for nodes in _node_sets(group, {device.numa_node for device in fixed}, missing):
        there = [device for device in group if device.numa_node in nodes]
        on_open = [device for device in there if card_of(device.id) in opened]
        if len(on_open) >= missing:
            chosen = _from_few_cards(on_open, free, missing)
        else:
            others = [device for device in there if card_of(device.id) not in opened]
            chosen = on_open + _from_few_cards(others, free, missing - len(on_open))
            chosen.sort(key=_order)
        more = len({card_of(device.id) for device in chosen} - free)
        choices.append((-min(len(on_open), missing), more, list(map(_order, chosen)), chosen))
    return min(choices, key=lambda choice: choice[:3])[3]


def _node_sets(
    group: Sequence[AdvertisedDevice], taken: AbstractSet[int | None], missing: int
) -> Iterable[frozenset[int | None]]:
    """The smallest sets of NUMA nodes, beside those that are taken, that can give enough."""
    have = Counter(device.numa_node for device in group)
    left = missing - sum(number for node, number in have.items() if node in taken)
    others = [node for node, _ in have.most_common() if node not in taken]
    fewest = 0
    while left > sum(have[node] for node in others[:fewest]):
        fewest += 1
    # The nodes that have most come first, so the bound never leaves nothing.
    sets = itertools.islice(itertools.combinations(others, fewest), MAX_NODE_SETS)
    for nodes in sets:
        if sum(have[node] for node in nodes) >= left:
            yield frozenset(taken) | frozenset(nodes)


def _from_few_cards(
    devices: Sequence[AdvertisedDevice], free: AbstractSet[CardId], missing: int
) -> list[AdvertisedDevice]:
    """The smallest ids that can be had from the fewest cards, those of `free` not counted.

    Goes through the devices in order and takes each one with which enough can still be had.
    """
    left = Counter(card_of(device.id) for device in devices)
    used = set(free)
    budget = 0
    while missing > _most(left, used, budget):
        budget += 1
    chosen: list[AdvertisedDevice] = []
    for device in devices:
        if len(chosen) == missing:
            break
        card = card_of(device.id)
        with_it = used | {card}
        cost = len(with_it) - len(used)
        if cost <= budget and missing - len(chosen) <= _most(left, with_it, budget - cost):
            chosen.append(device)
            used = with_it
            budget -= cost
        left[card] -= 1
    return chosen


def _most(left: Counter[CardId], used: set[CardId], more: int) -> int:
    """How many devices the used cards and the best `more` others can still give."""
    others = heapq.nlargest(more, (number for card, number in left.items() if card not in used))
    return sum(left[card] for card in used) + sum(others)
