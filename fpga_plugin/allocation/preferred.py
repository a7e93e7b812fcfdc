"""GetPreferredAllocation: which devices to take, so that whole cards stay whole.

Order: what must be included, healthy and clean first, one NUMA node, cards already partitioned,
fewest cards, id. Ids that the plugin does not know come last and are no error: kubelet fails the
pod on an error, for ever.
"""

from collections.abc import Mapping, Sequence

from fpga_plugin.allocation.devices import AdvertisedDevice
from fpga_plugin.allocation.ledger import Ledger, card_of
from fpga_plugin.allocation.records import Mode
from fpga_plugin.ids import CardId, DeviceId, PciAddress, device_order

Offers = Mapping[int | None, Sequence[AdvertisedDevice]]
"""What each NUMA node can give."""


def preferred(
    ledger: Ledger,
    listed: Sequence[AdvertisedDevice],
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
) -> list[str]:
    """Choose `size` of `available`, `must_include` first.

    Returns fewer where there are not enough.
    """
    known = {device.id: device for device in listed}
    taken = list(dict.fromkeys(must_include))[: max(size, 0)]
    candidates = [
        known[DeviceId(text)]
        for text in dict.fromkeys(available)
        if text not in taken and DeviceId(text) in known
    ]
    unknown = [t for t in dict.fromkeys(available) if t not in taken and DeviceId(t) not in known]
    fixed = [known[DeviceId(text)] for text in taken if DeviceId(text) in known]
    for healthy in (True, False):
        group = [device for device in candidates if device.healthy is healthy]
        missing = size - len(taken)
        if missing <= 0 or not group:
            continue
        chosen = _choose(ledger, group, fixed, missing)
        taken += [device.id for device in chosen]
        fixed += chosen
    taken += sorted(unknown)[: max(size - len(taken), 0)]
    return taken


def _choose(
    ledger: Ledger,
    group: Sequence[AdvertisedDevice],
    fixed: Sequence[AdvertisedDevice],
    missing: int,
) -> list[AdvertisedDevice]:
    """Take from the NUMA node that serves best, then from the next best."""
    fixed_nodes = {device.numa_node for device in fixed}
    nodes: dict[int | None, list[AdvertisedDevice]] = {}
    for device in sorted(group, key=lambda d: device_order(d.id)):
        nodes.setdefault(device.numa_node, []).append(device)
    chosen: list[AdvertisedDevice] = []
    while nodes and len(chosen) < missing:
        left = missing - len(chosen)
        offers = {
            node: _from_cards(ledger, devices, fixed, left) for node, devices in nodes.items()
        }

        def rank(node: int | None, offers: Offers = offers) -> tuple[object, ...]:
            offer = offers[node]
            cards = [card_of(device.id) for device in offer]
            partitioned = sum(ledger.mode(card) is Mode.PARTITIONED for card in cards)
            return (
                bool(fixed_nodes) and node not in fixed_nodes,
                -len(offer),  # who can give all comes first, else who gives most
                -partitioned,
                len(set(cards)),
                [device_order(device.id) for device in offer],
            )

        best = min(nodes, key=rank)
        chosen += offers[best]
        del nodes[best]
    return chosen


def _from_cards(
    ledger: Ledger,
    devices: Sequence[AdvertisedDevice],
    fixed: Sequence[AdvertisedDevice],
    missing: int,
) -> list[AdvertisedDevice]:
    by_card: dict[CardId, list[AdvertisedDevice]] = {}
    for device in devices:
        by_card.setdefault(card_of(device.id), []).append(device)
    fixed_cards = {card_of(device.id) for device in fixed}
    chosen: list[AdvertisedDevice] = []
    while by_card and len(chosen) < missing:
        left = missing - len(chosen)

        def rank(card: CardId, left: int = left) -> tuple[bool, bool, int, PciAddress]:
            have = len(by_card[card])
            return (
                card not in fixed_cards and ledger.mode(card) is not Mode.PARTITIONED,
                card not in fixed_cards,
                0 if have >= left else left - have,  # who suffices alone, else who gives most
                device_order(card)[0],
            )

        chosen += by_card.pop(min(by_card, key=rank))[:left]
    return chosen
