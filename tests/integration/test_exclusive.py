"""A card is given out as a whole or by region, never both, whoever asks at the same time."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from daemon_support import (
    AFU,
    BLANK,
    CARDS,
    HEALTHY,
    REGIONS,
    Node,
    Refused,
    request,
)

ROUNDS = 25
REGIONS_PER_CARD = 3


def grant(node: Node, start: threading.Barrier, device: str, resource: str) -> tuple[str, bool]:
    start.wait()
    try:
        node.kubelet.allocate(device, resource=resource)
    except Refused as refused:
        assert refused.code == "FAILED_PRECONDITION"  # noqa: PT017  # another error fails the test
        return device, False
    return device, True


def test_concurrent_allocates_from_both_endpoints_never_give_out_both_modes():
    with Node(f"2x{REGIONS_PER_CARD}").up() as node, ThreadPoolExecutor(16) as threads:
        cards = list(node.kubelet.listed(CARDS))
        calls = [(card, CARDS) for card in cards for _ in range(REGIONS_PER_CARD)]
        calls += [(region, REGIONS) for region in node.kubelet.listed(REGIONS)]
        modes = set()
        order = random.Random(1)
        for _ in range(ROUNDS):
            order.shuffle(calls)
            start = threading.Barrier(len(calls))
            asked = [threads.submit(grant, node, start, *call) for call in calls]
            granted = {device for ask in asked for device, ok in [ask.result()] if ok}
            for card in cards:
                of_card = {device for device in granted if device.startswith(card)}
                whole = card in of_card
                assert of_card, "somebody has to get it"
                assert of_card == {card} if whole else len(of_card) == REGIONS_PER_CARD
                modes.add(whole)
            for device, resource in dict.fromkeys(calls):
                if device in granted:
                    node.kubelet.deallocate(device, resource=resource)
        assert modes == {True, False}, "the race had only one winner: it tests nothing"
        # Claims that never started leave their regions as they were.
        node.settled()
        assert {node.afu(region) for region in node.state()} == {BLANK}


def life(node: Node, device: str, resource: str, turns: int) -> int:
    """A tenant that comes and goes; returns how often it was let in."""
    let_in = 0
    for _ in range(turns):
        try:
            node.kubelet.allocate(device, resource=resource)
        except Refused:
            continue
        node.kubelet.prestart(device, env=request(AFU), resource=resource)
        held = [name for name in node.state() if name.startswith(device)]
        assert node.afu(held[0]) == AFU
        let_in += 1
        node.kubelet.deallocate(device, resource=resource)
    return let_in


def test_tenants_of_both_modes_come_and_go_and_each_finds_its_own_image():
    with Node("1x2", simulated_pr_seconds="0.001").up() as node, ThreadPoolExecutor(3) as threads:
        (card,) = node.kubelet.listed(CARDS)
        devices = [(card, CARDS), *((region, REGIONS) for region in node.kubelet.listed(REGIONS))]
        lives = [threads.submit(life, node, device, kind, 20) for device, kind in devices]
        assert sum(each.result() for each in lives) > 0
        node.kubelet.until(CARDS, {card: HEALTHY})
        node.settled()
        assert {node.afu(region) for region in node.state()} == {BLANK}
