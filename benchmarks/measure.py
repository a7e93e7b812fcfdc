"""What is measured, one function a subject. Each returns figures; none judges them."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc  # type: ignore[import-untyped]  # ships no types
from figures import Figure, Goal, median, percentile
from kubelet import healthy, listed
from node import CARDS, PORTS, REGIONS, Node
from plugin import Plugin, cpu_of

from fpga_plugin.api.messages import v1beta1

RESOURCES = 2
"""Both kinds of devices of one interface id."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        starts: starts of the process.
        idle: seconds that the idle process is watched.
        calls: calls of Allocate.
        rounds: rounds of everything that takes tens of milliseconds.
    """

    starts: int
    idle: float
    calls: int
    rounds: int


FULL = Effort(starts=15, idle=60.0, calls=2000, rounds=20)
QUICK = Effort(starts=3, idle=5.0, calls=300, rounds=3)


def starts(node: Node, effort: Effort) -> list[Figure]:
    """The first start, on cards of an unknown history, then starts on clean idle cards."""
    cards = f"{len(node.cards)}x{PORTS}"
    with node.start() as plugin:
        first = node.kubelet.wait_registered(RESOURCES)[-1] - plugin.began
        clean = node.wait_clean() - plugin.began
        lists = node.kubelet.messages(plugin.began)
        peak = plugin.peak()
    registered: list[float] = []
    complete: list[float] = []
    cpu: list[float] = []
    ends: list[float] = []
    for _ in range(effort.starts):
        with node.start() as plugin:
            times = node.kubelet.wait_registered(RESOURCES)
            registered.append(times[0] - plugin.began)
            complete.append(times[-1] - plugin.began)
            cpu.append(plugin.cpu())
            node.wait_clean()
            ends.append(plugin.stop())
    count = effort.starts
    goal = Goal(150, 1020)
    return [
        Figure(cards, "start to registered, first resource", _ms(registered), "ms", goal, count),
        Figure(cards, "start to registered, all resources", _ms(complete), "ms", goal, count),
        Figure(cards, "CPU of the plugin until then", _ms(cpu), "ms", samples=count),
        Figure(cards, "end (SIGTERM)", _ms(ends), "ms", Goal(None, 9), count),
        Figure(cards, "first start ever, all resources", first * 1000, "ms", Goal(None, 1020)),
        Figure(
            cards,
            "first start ever until all is scrubbed",
            clean * 1000,
            "ms",
            note=f"{PORTS} PRs of {node.pr_seconds:g} s one after the other on each card",
        ),
        Figure(cards, "lists sent meanwhile", sum(lists.values()), "", note="of both resources"),
        Figure(cards, "highest RSS meanwhile", peak, "MiB"),
    ]


def idle(node: Node, plugin: Plugin, effort: Effort) -> list[Figure]:
    """The plugin with kubelet connected and nothing owned."""
    cards = f"{len(node.cards)}x{PORTS}"
    time.sleep(1)
    wakeups = plugin.wakeups(effort.idle)
    rss, pss = plugin.memory()
    return [
        Figure(cards, "idle RSS", rss, "MiB", Goal(32, 32)),
        Figure(cards, "idle PSS", pss, "MiB", note=f"{plugin.threads()} threads"),
        Figure(
            cards,
            "idle wake-ups",
            wakeups,
            "/min",
            Goal(0, 300),
            note=f"voluntary context switches of all threads in {effort.idle:g} s",
        ),
    ]


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


def calls(node: Node, plugin: Plugin, effort: Effort) -> list[Figure]:
    """Allocate and Deallocate of regions on a card that stays partitioned: no list changes."""
    cards = f"{len(node.cards)}x{PORTS}"
    held = node.regions[0]
    node.kubelet.held[REGIONS] = {held}
    node.allocate(REGIONS, held)
    node.kubelet.wait_list(CARDS, _without(node.cards[0]))
    others = node.regions[1:PORTS]
    allocate: list[float] = []
    deallocate: list[float] = []
    cpu = plugin.cpu()
    for number in range(effort.calls + 50):
        region = others[number % len(others)]
        allocate.append(node.allocate(REGIONS, region))
        deallocate.append(node.deallocate(REGIONS, region))
    cpu = (plugin.cpu() - cpu) / (2 * len(allocate))
    node.deallocate(REGIONS, held)
    node.kubelet.held.clear()
    node.kubelet.wait_list(CARDS, listed(node.cards[0], healthy=True))
    goal = Goal(0.3, 0.3)
    return [
        *_calls(cards, "Allocate", allocate[50:], goal),
        *_calls(cards, "Deallocate", deallocate[50:], Goal()),
        Figure(cards, "CPU of the plugin a call, of these", cpu * 1000, "ms"),
    ]


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


def prestart(node: Node, effort: Effort) -> list[Figure]:
    """PreStartContainer on a clean region, beyond the PR itself."""
    cards = f"{len(node.cards)}x{PORTS}"
    card, region = node.cards[0], node.regions[0]
    figures = []
    for number, size in enumerate((1, 8, 32), start=2):
        afu_id = f"{number:032x}"
        node.add_bitstream(afu_id, size)
        took: list[float] = []
        for _ in range(min(effort.rounds, 10)):
            node.allocate(REGIONS, region)
            took.append(node.prestart(REGIONS, region, afu_id) - node.pr_seconds)
            began = time.monotonic()
            node.deallocate(REGIONS, region)
            node.kubelet.wait_list(CARDS, listed(card, healthy=True), since=began)
            node.kubelet.trim()
        name = f"PreStart with {size} MiB"
        note = f"without the {node.pr_seconds:g} s of the PR"
        figures.append(Figure(cards, name, _ms(took), "ms", samples=len(took), note=note))
    return figures


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
        Figure(cards, "card plugged in to its list", _ms(came), "ms", goal, effort.rounds),
        Figure(cards, "slowest of these", max(came) * 1000, "ms", goal, effort.rounds),
        Figure(cards, "card unplugged to its list", _ms(went), "ms", goal, effort.rounds),
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
    return _calls(cards, "Allocate during a mass scrub", took, Goal())


def floor(python: Path, folder: Path, effort: Effort) -> list[Figure]:
    """The same calls to a bare grpclib server."""
    with _echo(python, folder / "echo.sock") as (call, pid):
        request = bytes(
            v1beta1.AllocateRequest(
                container_requests=[
                    v1beta1.ContainerAllocateRequest(devices_ids=["0000-10-00.0-p0"])
                ]
            )
        )
        took = []
        cpu = cpu_of(pid)
        for _ in range(effort.calls + 50):
            began = time.perf_counter()
            call(request)
            took.append(time.perf_counter() - began)
        cpu = (cpu_of(pid) - cpu) / len(took)
    name = "a bare grpclib server, for comparison"
    return [
        *_calls(name, "Allocate", took[50:], Goal()),
        Figure(name, "CPU of the server a call", cpu * 1000, "ms"),
    ]


@contextmanager
def _echo(python: Path, path: Path) -> Iterator[tuple[grpc.UnaryUnaryMultiCallable, int]]:
    script = Path(__file__).with_name("echo.py")
    process = subprocess.Popen([python, script, path], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with grpc.insecure_channel(f"unix:{path}") as channel:
            yield channel.unary_unary("/v1beta1.DevicePlugin/Allocate"), process.pid
    finally:
        process.kill()
        process.communicate()


def _calls(cards: str, name: str, seconds: list[float], goal: Goal) -> list[Figure]:
    count = len(seconds)
    return [
        Figure(cards, f"{name}, p50", percentile(seconds, 50) * 1000, "ms", goal, count),
        Figure(cards, f"{name}, p99", percentile(seconds, 99) * 1000, "ms", samples=count),
    ]


def _without(device: str) -> Callable[[bytes], bool]:
    there = listed(device)
    return lambda data: not there(data)


def _ms(seconds: list[float]) -> float:
    return median(seconds) * 1000
