"""A node's random life: pods, kills, kubelet restarts, pulled cards and faults, one after another.

What has to hold at each step is known to the test from kubelet's side alone: which pod was given
which device, what its last successful PreStart asked for, and what was broken on purpose.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    CARDS,
    HEALTHY,
    LIMIT,
    NO_REQUEST,
    REGIONS,
    Node,
    Refused,
    eventually,
    request,
)

STEPS = 70
SEEDS = range(200 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 3)
CARDS_LIKE = {"": 2, "+ofs": 1}
"""Kinds of simulated cards, with the regions of each; a slot's is behind PCI functions."""


def card_of(device: str) -> str:
    return device.partition("-p")[0]


def resource_of(device: str) -> str:
    return CARDS if device == card_of(device) else REGIONS


class Walk:
    """The walk, and what is known.

    Attributes:
        held: each device that a pod has, with what its regions have to hold; None: not known.
        pulled: cards.
        faults: regions, with the word.
    """

    def __init__(self, node: Node, seed: int, regions: int) -> None:
        self.random = random.Random(seed)
        self.regions_per_card = regions
        self.node = node
        self.kubelet = node.kubelet
        self.cards = list(self.kubelet.listed(CARDS))
        self.regions = [region for card in self.cards for region in self.regions_of(card)]
        self.held: dict[str, dict[str, str | None]] = {}
        self.pulled: set[str] = set()
        self.moved: set[str] = set()  # those that were pulled, wherever they are now
        self.faults: dict[str, str] = {}
        self.steps: dict[Callable[[], None], float] = {
            self.admit: 8,
            self.start: 10,
            self.stop: 5,
            self.end: 6,
            self.succeed: 2,
            self.kill: 1,
            self.kill_while_one_starts: 2,
            self.end_while_one_starts: 2,
            self.restart_kubelet: 1,
            self.pull: 1,
            self.pull_while_one_starts: 1,
            self.plug: 3,
            self.break_something: 2,
            self.mend: 3,
            self.settle: 3,
        }

    def run(self) -> None:
        for number in range(STEPS):
            (step,) = self.random.choices(list(self.steps), list(self.steps.values()))
            print(number, step.__name__)  # noqa: T201  # pytest shows it with a failure
            step()
            self.check()
        self.finish()

    def regions_of(self, device: str) -> list[str]:
        if device != card_of(device):
            return [device]
        return [f"{device}-p{port}" for port in range(self.regions_per_card)]

    # ---------------------------------------------------------------- what holds

    def in_trouble(self, device: str) -> bool:
        return card_of(device) in self.pulled or any(
            r in self.faults for r in self.regions_of(device)
        )

    def check(self) -> None:
        """Nobody but its own PreStarts changes what a pod's region holds."""
        state = self.node.state()
        for device, regions in self.held.items():
            if card_of(device) not in self.pulled:
                for region, afu in regions.items():
                    assert afu is None or state[region]["afu_id"] == afu

    def unknown(self, device: str) -> dict[str, str | None]:
        return dict.fromkeys(self.regions_of(device))

    def lose_sight_of(self, card: str) -> None:
        for device in self.held:
            if card_of(device) == card:
                self.held[device] = self.unknown(device)

    def pick(self) -> str | None:
        return self.random.choice(list(self.held)) if self.held else None

    # ---------------------------------------------------------------- pods

    def admit(self) -> None:
        lists = self.kubelet.listed(REGIONS) | self.kubelet.listed(CARDS)
        free = [d for d, health in lists.items() if health == HEALTHY and d not in self.held]
        if not free:
            return
        device = self.random.choice(free)
        others = [d for d in self.held if card_of(d) == card_of(device)]
        try:
            self.kubelet.allocate(device, resource=resource_of(device))
        except Refused as refused:
            # The list that kubelet has may be older than what it reports.
            if refused.code == "FAILED_PRECONDITION":
                return
            # One that is back may be one that the plugin just saw go; `finish` waits for it.
            if refused.code == "NOT_FOUND" and card_of(device) in self.moved:
                return
            raise
        assert all(resource_of(other) == resource_of(device) for other in others), "both modes"
        self.held[device] = self.unknown(device)

    def succeed(self) -> None:
        """Another pod gets a device, and nobody reports that the one before is gone."""
        device = self.pick()
        if device is None:
            return
        with contextlib.suppress(Refused):
            self.kubelet.allocate(device, resource=resource_of(device))
            self.held[device] = self.unknown(device)

    def start(self) -> None:
        device = self.pick()
        if device is None:
            return
        first, *rest = self.regions_of(device)
        afu = self.random.choice([AFU, AFU_2, AFU_3, BLANK])
        env = NO_REQUEST if afu == BLANK else request(afu)
        self.held[device] = self.unknown(device)
        hurry = self.random.random() < 0.2
        try:
            self.kubelet.prestart(
                device, env=env, resource=resource_of(device), timeout=0.1 if hurry else LIMIT
            )
        except Refused as refused:
            words = ("is gone", "went while", "numbering changed", "also in the hands")
            if hurry or self.in_trouble(device) or any(word in str(refused) for word in words):
                return
            raise
        if not self.in_trouble(device):
            self.held[device] = {first: afu} | dict.fromkeys(rest, BLANK)

    def stop(self) -> None:
        if (device := self.pick()) is not None:
            self.held[device] = self.unknown(device)
            self.kubelet.poststop(device, resource=resource_of(device))

    def end(self) -> None:
        if (device := self.pick()) is not None:
            del self.held[device]
            for _ in range(self.random.choice([1, 1, 2])):
                self.kubelet.deallocate(device, resource=resource_of(device))

    @contextlib.contextmanager
    def one_starts(self) -> Iterator[None]:
        """Something happens at a random moment of a PreStart."""
        device = self.pick()
        if device is None:
            yield
            return
        self.held[device] = self.unknown(device)
        env = request(self.random.choice([AFU, AFU_2]))
        call = self.kubelet.begin_prestart(device, env=env, resource=resource_of(device))
        time.sleep(self.random.random() * self.random.choice([0.003, 0.03]))
        yield
        with contextlib.suppress(grpc.FutureCancelledError):
            call.exception()

    # ---------------------------------------------------------------- accidents

    def kill(self) -> None:
        self.node.again()
        self.check_first_lists()

    def kill_while_one_starts(self) -> None:
        with self.one_starts():
            self.kill()

    def end_while_one_starts(self) -> None:
        with self.one_starts():
            self.end()

    def pull_while_one_starts(self) -> None:
        with self.one_starts():
            self.pull()

    def restart_kubelet(self) -> None:
        self.kubelet.restart()
        for resource in (REGIONS, CARDS):
            self.kubelet.signal.until(
                lambda resource=resource: self.kubelet.has_list(resource), resource
            )
        self.check_first_lists()

    def check_first_lists(self) -> None:
        """Kubelet re-admits its pods against the first list that it gets."""
        poisoned = {name for name, region in self.node.state().items() if region["poisoned"]}
        for device in self.held:
            listed = self.kubelet.endpoints[resource_of(device)].lists[0]
            assert device in listed
            if not self.in_trouble(device) and poisoned.isdisjoint(self.regions_of(device)):
                self.kubelet.until_health(device, HEALTHY, resource_of(device))

    def pull(self) -> None:
        card = self.random.choice(self.cards)
        if card in self.pulled:
            return
        self.moved.add(card)
        self.node.unplug(card)
        self.pulled.add(card)
        self.lose_sight_of(card)
        eventually(lambda: f"{card}-p0" not in self.node.state())

    def plug(self) -> None:
        if self.pulled:
            card = self.random.choice(sorted(self.pulled))
            self.node.plug(card)
            eventually(lambda: f"{card}-p0" in self.node.state())
            self.pulled.discard(card)

    def break_something(self) -> None:
        region = self.random.choice(self.regions)
        if region not in self.faults and card_of(region) not in self.pulled:
            word = self.random.choice(["thermal", "fatal", "port-open", "pr-error"])
            self.node.arm(region, word)
            self.faults[region] = word
            self.lose_sight_of(card_of(region))

    def mend(self) -> None:
        if not self.faults:
            return
        region = self.random.choice(sorted(self.faults))
        card = card_of(region)
        (self.node.simulated / "faults" / region).unlink(missing_ok=True)
        if self.faults[region] == "pr-error" and card not in self.pulled:
            # A poisoned port takes a rebind, or a card that comes back.
            self.lose_sight_of(card)
            self.moved.add(card)
            self.node.unplug(card)
            eventually(lambda: region not in self.node.state())
            self.node.plug(card)
            eventually(lambda: region in self.node.state())
        del self.faults[region]
        if card not in self.pulled:
            self.until_well(region)

    def until_well(self, region: str) -> None:
        for device in self.held:
            if region in self.regions_of(device) and not self.in_trouble(device):
                self.kubelet.until_health(device, HEALTHY, resource_of(device))

    # ---------------------------------------------------------------- peace

    def settle(self) -> None:
        """What is free and well becomes blank; unless a moved node keeps it back."""
        state = self.node.state()
        if [region["node"] for _, region in sorted(state.items())] != [*range(len(self.regions))]:
            return
        free = [
            region
            for region in self.regions
            if not self.held.keys() & {region, card_of(region)} and region not in self.faults
        ]
        for region in free:
            self.kubelet.until_health(region, HEALTHY)
        eventually(lambda: all(self.node.afu(region) == BLANK for region in free))

    def finish(self) -> None:
        """Everything is mended and given back: then nothing is lost."""
        while self.pulled:
            self.plug()
        while self.faults:
            self.mend()
        while self.held:
            self.end()
        self.node.settled()
        eventually(lambda: {self.node.afu(region) for region in self.regions} == {BLANK})
        self.kubelet.until(REGIONS, dict.fromkeys(self.regions, HEALTHY))
        self.kubelet.until(CARDS, dict.fromkeys(self.cards, HEALTHY))
        for life in self.node.lives:
            assert [line for line in life.lines if "exception" in line or "text" in line] == []


@pytest.mark.long
@pytest.mark.parametrize("kind", CARDS_LIKE, ids=["PAC A10", "OFS"])
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_no_region_is_lost_shared_or_given_out_dirty(seed: int, kind: str) -> None:
    pr_seconds = ("0.001", "0.02", "0.1")[seed % 3]
    regions = CARDS_LIKE[kind]
    with Node(f"2x{regions}{kind}", simulated_pr_seconds=pr_seconds).up() as node:
        Walk(node, seed, regions).run()
