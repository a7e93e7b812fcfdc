"""What is measured, one function a subject. Each returns figures; none judges them."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from figures import Figure, Goal, median, percentile
from kubelet import healthy, listed
from node import CARDS, PORTS, REGIONS, Node
from plugin import Plugin
from reference import Bare, Echo

from fpga_plugin.settings.settings import Settings

RESOURCES = 2
"""Both kinds of devices of one interface id."""

CLIENTS = (1, 16)
"""Who calls at the same time."""

BLOCK = 25
"""Calls of a client before it is the other server's turn."""

PAUSE = 0.005
"""Seconds between two calls that do not follow each other at once."""

SIZES = (1, 8, 32)
"""MiB of an image; 32 is about the largest of the cards that are supported."""

WITHIN = 1.2
"""The aim: Allocate's median in medians of the bare stack."""

BARE_STACK = "reference: the bare stack"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        starts: starts of the process.
        idle: seconds that the idle process is watched.
        calls: calls of Allocate.
        rounds: rounds of everything that takes tens of milliseconds.
        claims: prepared ResourceClaims, beside which one more is looked at.
    """

    starts: int
    idle: float
    calls: int
    rounds: int
    claims: int


FULL = Effort(starts=15, idle=60.0, calls=2000, rounds=20, claims=1024)
QUICK = Effort(starts=3, idle=5.0, calls=300, rounds=3, claims=64)


def starts(node: Node, effort: Effort, echo: Callable[[], Echo]) -> list[Figure]:
    """The first start, on cards of an unknown history, then starts on clean idle cards."""
    cards = f"{len(node.cards)}x{PORTS}"
    with node.start() as plugin:
        first = node.kubelet.wait_registered(RESOURCES)[-1] - plugin.began
        clean = node.wait_clean() - plugin.began
        lists = node.kubelet.messages(plugin.began)
        peak = plugin.peak()
    bare: list[float] = []
    bare_cpu: list[float] = []
    registered: list[float] = []
    complete: list[float] = []
    cpu: list[float] = []
    ends: list[float] = []
    for _ in range(effort.starts):
        with echo() as reference:
            bare.append(reference.ready)
            bare_cpu.append(reference.cpu())
        with node.start() as plugin:
            times = node.kubelet.wait_registered(RESOURCES)
            registered.append(times[0] - plugin.began)
            complete.append(times[-1] - plugin.began)
            cpu.append(plugin.cpu())
            node.wait_clean()
            ends.append(plugin.stop())
    count = effort.starts
    goal = Goal(150, 1020)
    prs = f"{PORTS} PRs of {node.pr_seconds:g} s one after the other on each card"
    name = "start to registered, first resource"
    return [
        Figure(cards, name, _ms(registered), "ms", goal, _ms(bare), count, BARE_STACK),
        Figure(
            cards,
            "the fastest of these",
            min(registered) * 1000,
            "ms",
            goal,
            min(bare) * 1000,
            count,
        ),
        Figure(
            cards, "start to registered, all resources", _ms(complete), "ms", goal, samples=count
        ),
        Figure(cards, "CPU of the plugin until then", _ms(cpu), "ms", Goal(), _ms(bare_cpu), count),
        Figure(cards, "end (SIGTERM)", _ms(ends), "ms", Goal(None, 9), samples=count),
        Figure(cards, "first start ever, all resources", first * 1000, "ms", Goal(None, 1020)),
        Figure(cards, "first start ever until all is scrubbed", clean * 1000, "ms", note=prs),
        Figure(cards, "lists sent meanwhile", sum(lists.values()), "", note="of both resources"),
        Figure(cards, "highest RSS meanwhile", peak, "MiB"),
    ]


def idle(node: Node, plugin: Plugin, effort: Effort, echo: Echo) -> list[Figure]:
    """The plugin with kubelet connected and nothing owned, after a start on clean cards."""
    cards = f"{len(node.cards)}x{PORTS}"
    time.sleep(1)
    begun = plugin.memory()[0]
    wakeups = plugin.wakeups(effort.idle)
    rss, pss = plugin.memory()
    bare, bare_pss = echo.memory()
    note = f"voluntary context switches of all threads in {effort.idle:g} s"
    return [
        Figure(cards, "RSS at once", begun, "MiB", Goal(32, 32), bare, 1, BARE_STACK),
        Figure(cards, f"RSS after {effort.idle:g} s", rss, "MiB", Goal(32, 32), bare),
        Figure(cards, "PSS", pss, "MiB", Goal(), bare_pss, note=f"{plugin.threads()} threads"),
        Figure(cards, "idle wake-ups", wakeups, "/min", Goal(0, 300), note=note),
    ]


def owned(node: Node, plugin: Plugin, effort: Effort) -> list[Figure]:
    """How often it wakes while a pod has a region and kubelet does not stream its pods.

    Beside a look at kubelet's records every FPGA_PLUGIN_RECONCILE_INTERVAL, and nothing else.
    """
    cards = f"{len(node.cards)}x{PORTS}"
    node.kubelet.held[REGIONS] = {node.regions[0]}
    node.allocate(REGIONS, node.regions[0])
    time.sleep(1)
    wakeups = plugin.wakeups(effort.idle)
    node.deallocate(REGIONS, node.regions[0])
    node.kubelet.held.clear()
    node.kubelet.wait_list(CARDS, listed(node.cards[0], healthy=True))
    looks = 60 / Settings().reconcile_interval
    note = "a pod has a region; reference: one for each look at kubelet's records"
    return [Figure(cards, "wake-ups without WatchPods", wakeups, "/min", Goal(), looks, note=note)]


def metrics(node: Node, plugin: Plugin, effort: Effort) -> list[Figure]:
    """What being watched costs: scrapes as Prometheus makes them, and memory afterwards."""
    cards = f"{len(node.cards)}x{PORTS}"
    took = [plugin.scrape() for _ in range(effort.rounds)]
    rss, pss = plugin.memory()
    count = len(took)
    return [
        Figure(cards, "scrape of the metrics, first", took[0] * 1000, "ms"),
        Figure(cards, "scrape of the metrics", _ms(took[1:]), "ms", samples=count - 1),
        Figure(cards, "idle RSS, scraped", rss, "MiB", Goal(32, 32)),
        Figure(cards, "idle PSS, scraped", pss, "MiB"),
    ]


def calls(node: Node, plugin: Plugin, effort: Effort, echo: Echo) -> list[Figure]:
    """Allocate and Deallocate of regions on a card that stays partitioned: no list changes.

    In turn with as many calls of the bare stack.
    """
    cards = f"{len(node.cards)}x{PORTS}"
    held = node.regions[0]
    node.kubelet.held[REGIONS] = {held}
    node.allocate(REGIONS, held)
    node.kubelet.wait_list(CARDS, _without(node.cards[0]))
    others = node.regions[1:PORTS]
    figures = []
    for clients in CLIENTS:
        name = f"{clients} client{'s' if clients > 1 else ''}"
        took = _in_turn(node, plugin, echo, others, clients=clients, calls=effort.calls)
        p50, p99 = (percentile(took.allocate, percent) * 1000 for percent in (50, 99))
        bare50, bare99 = (percentile(took.bare, percent) * 1000 for percent in (50, 99))
        goal = Goal(WITHIN * bare50, 0.3 if clients == 1 else None)
        count = len(took.allocate)
        figures += [
            Figure(cards, f"Allocate, p50, {name}", p50, "ms", goal, bare50, count, BARE_STACK),
            Figure(cards, f"Allocate, p99, {name}", p99, "ms", Goal(), bare99, count),
            Figure(
                cards,
                f"Deallocate, p50, {name}",
                percentile(took.deallocate, 50) * 1000,
                "ms",
                Goal(),
                bare50,
                count,
            ),
            Figure(
                cards, f"CPU a call, {name}", took.cpu * 1000, "ms", Goal(), took.bare_cpu * 1000
            ),
        ]
    figures.append(_paced(node, effort, echo, others[0]))
    node.deallocate(REGIONS, held)
    node.kubelet.held.clear()
    node.kubelet.wait_list(CARDS, listed(node.cards[0], healthy=True))
    return figures


def _paced(node: Node, effort: Effort, echo: Echo, region: str) -> Figure:
    """Allocate as kubelet calls it: what is done after an answer is done before the next call."""
    took: list[float] = []
    bare: list[float] = []
    for _ in range(max(effort.calls // 5, BLOCK)):
        time.sleep(PAUSE)
        took.append(node.allocate(REGIONS, region))
        time.sleep(PAUSE)
        node.deallocate(REGIONS, region)
        time.sleep(PAUSE)
        bare.append(echo.allocate())
    p50, bare50 = (percentile(seconds, 50) * 1000 for seconds in (took, bare))
    name = f"Allocate, p50, {PAUSE * 1000:g} ms after the last call"
    cards = f"{len(node.cards)}x{PORTS}"
    return Figure(cards, name, p50, "ms", Goal(WITHIN * bare50), bare50, len(took), BARE_STACK)


@dataclass(slots=True)
class _Took:
    """Seconds of each call; CPU of the servers a call."""

    allocate: list[float] = field(default_factory=list)
    deallocate: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    cpu: float = 0.0
    bare_cpu: float = 0.0


def _in_turn(
    node: Node, plugin: Plugin, echo: Echo, regions: Sequence[str], *, clients: int, calls: int
) -> _Took:
    """Blocks of calls, to the plugin and to the bare stack in turn, by so many clients."""
    took = _Took()
    rounds = max(1, calls // (BLOCK * clients))

    def plugins(client: int) -> None:
        region = regions[client % len(regions)]
        for _ in range(BLOCK):
            took.allocate.append(node.allocate(REGIONS, region))
            took.deallocate.append(node.deallocate(REGIONS, region))

    def bare(_client: int) -> None:
        for _ in range(2 * BLOCK):
            took.bare.append(echo.allocate())

    with ThreadPoolExecutor(clients) as threads:
        for warm in (True, False):
            for _ in range(1 if warm else rounds):
                before, bare_before = plugin.cpu(), echo.cpu()
                list(threads.map(plugins, range(clients)))
                list(threads.map(bare, range(clients)))
                took.cpu += plugin.cpu() - before
                took.bare_cpu += echo.cpu() - bare_before
            if warm:
                took = _Took()
    count = 2 * len(took.allocate)
    took.cpu, took.bare_cpu = took.cpu / count, took.bare_cpu / count
    return took


def lives(node: Node, effort: Effort, bare: Bare) -> list[Figure]:
    """A pod's life, from Allocate until the card is Healthy again, beside the two PRs in it.

    And PreStartContainer on a clean region, beside one.
    """
    cards = f"{len(node.cards)}x{PORTS}"
    card, region = node.cards[0], node.regions[0]
    figures = []
    for number, size in enumerate(SIZES, start=2):
        afu_id = f"{number:032x}"
        node.add_bitstream(afu_id, size)
        prestarts: list[float] = []
        beyond_each: list[float] = []
        whole: list[float] = []
        hardware: list[float] = []
        for round_ in range(effort.rounds + 1):
            began = time.monotonic()
            node.allocate(REGIONS, region)
            prestart = node.prestart(REGIONS, region, afu_id)
            node.deallocate(REGIONS, region)
            again = node.kubelet.wait_list(CARDS, listed(card, healthy=True), since=began)
            node.kubelet.trim()
            program = bare.program(size)
            blank = bare.program(1) if size != 1 else program
            if round_:  # the first one finds nothing warm
                prestarts.append(prestart)
                beyond_each.append(prestart - program)
                whole.append(again - began - program - blank)
                hardware.append(program)
        beyond = f"beyond the bare hardware's {_ms(hardware):.1f} ms"
        count = effort.rounds
        figures += [
            Figure(
                cards,
                f"PreStart with {size} MiB",
                _ms(beyond_each),
                "ms",
                Goal(4),
                samples=count,
                note=beyond,
            ),
            Figure(
                cards,
                f"the fastest with {size} MiB beyond the fastest",
                (min(prestarts) - min(hardware)) * 1000,
                "ms",
                Goal(4),
                samples=count,
            ),
        ]
        if size == SIZES[0]:
            note = "Allocate, PreStart, Deallocate, scrub; beyond the bare hardware's two PRs"
            figures.append(
                Figure(cards, "a pod's life", _ms(whole), "ms", samples=count, note=note)
            )
    return figures


def release(node: Node, effort: Effort) -> list[Figure]:
    """From Deallocate to the lists that show the card again, and that show it Healthy."""
    cards = f"{len(node.cards)}x{PORTS}"
    card, region = node.cards[0], node.regions[0]
    afu_id = f"{1:032x}"
    node.add_bitstream(afu_id, 1)
    gone: list[float] = []
    back: list[float] = []
    clean: list[float] = []
    for _ in range(effort.rounds):
        node.kubelet.trim()
        began = time.monotonic()
        node.allocate(REGIONS, region)
        gone.append(node.kubelet.wait_list(CARDS, _without(card), since=began) - began)
        node.prestart(REGIONS, region, afu_id)
        began = time.monotonic()
        node.deallocate(REGIONS, region)
        back.append(node.kubelet.wait_list(CARDS, listed(card), since=began) - began)
        clean.append(
            node.kubelet.wait_list(CARDS, listed(card, healthy=True), since=began)
            - began
            - node.pr_seconds
        )
    count = effort.rounds
    pr = f"without the {node.pr_seconds:g} s of the PR"
    return [
        Figure(
            cards, "Allocate to the list without the whole card", _ms(gone), "ms", samples=count
        ),
        Figure(cards, "Deallocate to the list with the whole card", _ms(back), "ms", samples=count),
        Figure(cards, "Deallocate to Healthy again", _ms(clean), "ms", samples=count, note=pr),
    ]


def hotplug(node: Node, effort: Effort) -> list[Figure]:
    """Cards that are unplugged and plugged in; the last one, and with it no owner."""
    cards = f"{len(node.cards)}x{PORTS}"
    card = node.cards[-1]
    went: list[float] = []
    came: list[float] = []
    for _ in range(effort.rounds):
        went.append(node.unplug(card))
        came.append(node.plug(card))
        node.kubelet.wait_list(REGIONS, lambda data: healthy(data) == len(node.regions))
    goal = Goal(50, 5000)
    return [
        Figure(cards, "card plugged in to its list", _ms(came), "ms", goal, samples=effort.rounds),
        Figure(cards, "slowest of these", max(came) * 1000, "ms", goal, samples=effort.rounds),
        Figure(cards, "card unplugged to its list", _ms(went), "ms", goal, samples=effort.rounds),
    ]


def busy(node: Node) -> list[Figure]:
    """Allocate while every region is scrubbed after a first start: nothing may hold it up."""
    cards = f"{len(node.cards)}x{PORTS}"
    took: list[float] = []
    region = node.regions[0]
    with node.start():
        node.kubelet.wait_registered(RESOURCES)
        node.kubelet.wait_list(REGIONS, listed(region, healthy=True))
        node.kubelet.held[REGIONS] = {region}
        while not node.kubelet.last(REGIONS, lambda data: healthy(data) == len(node.regions)):
            took.append(node.allocate(REGIONS, region))
            node.deallocate(REGIONS, region)
            time.sleep(0.005)
        node.kubelet.held.clear()
    return _calls(cards, "Allocate during a mass scrub", took)


def _calls(cards: str, name: str, seconds: list[float]) -> list[Figure]:
    count = len(seconds)
    return [
        Figure(cards, f"{name}, p50", percentile(seconds, 50) * 1000, "ms", samples=count),
        Figure(cards, f"{name}, p99", percentile(seconds, 99) * 1000, "ms", samples=count),
    ]


def _without(device: str) -> Callable[[bytes], bool]:
    there = listed(device)
    return lambda data: not there(data)


def _ms(seconds: list[float]) -> float:
    return median(seconds) * 1000
