"""`make bench-apis`: both APIs on one node, with the real kubelet, beside a pod without a device.

Runs on the node of the tests (`pods_namespace.py`). Pods of one api take turns with pods without a
device, so that what slows the machine slows both. A container's begin and end are when the runtime
read the first and the last line that it wrote: kubelet's own look, once a second, is not in them.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("", "integration", "kubelet")]

from daemon_support import AFU, CARD, CARDS, request
from machine import LIMIT, Runtime, until
from node import Pod
from node import container as by_limits
from pods_node import Cluster, Node, by_template, container
from records import allocatable

PR_SECONDS = 0.05
"""What a simulated PR takes: one in a start, one in a scrub."""

SPEAKS = "trap 'echo ended; exit 0' TERM; echo began; sleep 2147483 & wait"
"""The command of every container."""

LOOK = 0.01
"""Seconds between two looks at whether a region is free: the error of that figure."""

NO_DEVICE = "no device"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to ask, and what it took.

    Attributes:
        name: of it.
        ask: makes a pod of this name.
        free: whether the region of the pod that ended is to be had again.
        starts: seconds from the pod's creation to its container's begin.
        ends: seconds from its container's end to `free`.
    """

    name: str
    ask: Callable[[str], Pod]
    free: Callable[[], bool]
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def turn(self, number: int) -> None:
        """One pod, from begin to end."""
        began = time.time()
        pod = self.ask(f"bench-{number}")
        self.starts.append(_written(pod, "began") - began)
        pod.until_running()
        pod.delete()
        ended = _written(pod, "ended")
        while not self.free():
            assert time.time() < ended + LIMIT, "the region is not to be had again"
            time.sleep(LOOK)
        self.ends.append(time.time() - ended)
        pod.until_gone()


def _written(pod: Pod, text: str) -> float:
    """When a container wrote this line, as seconds of the clock."""

    def line() -> str:
        logs = Path("/var/log/pods").glob(f"*_{pod.uid}/main/*.log")
        lines = [line for log in logs for line in log.read_text().splitlines()]
        return next((line for line in lines if line.endswith(f" {text}")), "")

    stamp = until(line, f"{pod.name} writes {text}").split(" ", 1)[0]
    # Of nine digits datetime takes six.
    whole, _, rest = stamp.partition(".")
    zone = rest.lstrip("0123456789").replace("Z", "+00:00")
    return datetime.fromisoformat(f"{whole}.{rest[:6].ljust(6, '0')}{zone}").timestamp()


def _plain(node: Node) -> Way:
    return Way(
        NO_DEVICE,
        lambda name: node.pod(name, by_limits(command=SPEAKS, resources={})),
        lambda: True,
    )


def _limits(node: Node, name: str, free: Callable[[], bool]) -> Way:
    env = request(AFU)
    return Way(name, lambda pod: node.pod(pod, by_limits(command=SPEAKS, env=env)), free)


def _first(node: Node) -> list[Way]:
    return [
        _plain(node),
        _limits(node, "by limits", lambda: allocatable().get(CARDS) == {CARD}),
    ]


def _second(node: Node) -> list[Way]:
    template = node.template("bench", bitstream=AFU)
    asking = container("") | {"command": ["sh", "-c", SPEAKS]}

    def ask(name: str) -> Pod:
        return node.pod(name, asking, resourceClaims=[by_template(template)])

    def free() -> bool:
        return not node.allocated()

    return [_plain(node), Way("by template", ask, free), _limits(node, "by limits", free)]


def _measure(node: Node, rounds: int, ways: Callable[[Node], Sequence[Way]]) -> Sequence[Way]:
    node.up()
    every = ways(node)
    for number in range(rounds):
        for at, way in enumerate(every):
            way.turn(number * len(every) + at)
    with contextlib.redirect_stdout(io.StringIO()):  # the logs, which a test would show
        node.close()
    node.cluster.clear()
    return every


def main() -> int:
    """Run all, print, return the exit code."""
    parser = argparse.ArgumentParser(prog="apis", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="pods of each way (default: 15)")
    parser.add_argument("--json", action="store_true", help="all measurements, in seconds")
    arguments = parser.parse_args()
    runtime = Runtime()
    cluster = Cluster()
    common = {"simulated_pr_seconds": str(PR_SECONDS)}
    first = common | {"mode": "device-plugin", "reconcile_interval": "2"}
    apis: dict[str, tuple[Callable[[], Node], Callable[[Node], Sequence[Way]]]] = {
        "device plugin, reconciling each 2 s": (
            lambda: Node(runtime, "1x2", cluster, gates={"PodsAPI": False}, **first),
            _first,
        ),
        "device plugin, kubelet streams its pods": (
            lambda: Node(runtime, "1x2", cluster, gates={"PodsAPI": True}, **first),
            _first,
        ),
        "DRA": (lambda: Node(runtime, "1x2", cluster, **common), _second),
    }
    try:
        figures = {
            api: _measure(node(), arguments.rounds, ways) for api, (node, ways) in apis.items()
        }
    finally:
        cluster.end()
        runtime.process.end()
    text = _as_json(figures) if arguments.json else _table(figures, arguments.rounds)
    print(text)  # noqa: T201  # it is what was asked for
    return 0


def _as_json(figures: dict[str, Sequence[Way]]) -> str:
    rows = [
        {"api": api, **{k: v for k, v in asdict(way).items() if k not in {"ask", "free"}}}
        for api, ways in figures.items()
        for way in ways
    ]
    return json.dumps(rows, indent=2)


def _table(figures: dict[str, Sequence[Way]], rounds: int) -> str:
    lines = [f"{'ms: median (least, most)':<42}{'created to begun':>24}{'ended to free':>24}"]
    for api, ways in figures.items():
        lines += ["", api]
        for way in ways:
            end = "-" if way.name == NO_DEVICE else _told(way.ends)
            lines.append(f"  {way.name:<40}{_told(way.starts):>24}{end:>24}")
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    lines += ["", f"{rounds} pods each; a simulated PR takes {1000 * PR_SECONDS:g}; load {load}"]
    return "\n".join(lines)


def _told(values: list[float]) -> str:
    least, middle, most = (1000 * f(values) for f in (min, statistics.median, max))
    return f"{middle:,.0f} ({least:,.0f}, {most:,.0f})"


if __name__ == "__main__":
    sys.exit(main())
