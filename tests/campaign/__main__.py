#!/usr/bin/env python3
"""The crash campaign: random lives of many pods, and of a plugin that is killed again and again.

    .venv/bin/python tests/campaign [--seed N] [--portion N] [--kills 200] [--minutes 5]
                                    [--api device-plugin|dra|both] [--kubelet extended|stock|both]
                                    [--calm | --weather NAME] [--bug NAME] [--table] [--short]

A portion is one node with kills after kills; its seed is SEED.PORTION. Each portion adds a line to
.cache/campaign/lives.jsonl; the table sums them by kubelet. Portions that
are there already for the same seed are not run again: the next one is. Exits with 1 on a violation.
"""
# ruff: noqa: T201 - a command prints

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]
for logger in ("grpclib", "asyncio"):
    logging.getLogger(logger).setLevel(logging.CRITICAL)  # calls that a dead plugin leaves

import bugs  # noqa: E402  # found by the line above
import spawn  # noqa: E402
import weather  # noqa: E402
from checker import Violation  # noqa: E402
from claims import ClaimSide  # noqa: E402
from node import Node, portion  # noqa: E402
from pods import PodSide  # noqa: E402
from setup import APIS, CLAIMS, PODS  # noqa: E402

KUBELETS = ("extended", "stock")
KEPT = spawn.ROOT / ".cache" / "campaign" / "lives.jsonl"


def main() -> int:
    """Run what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--portion", type=int, help="which one (default: the next of this seed)")
    parser.add_argument("--kills", type=int, default=200, help="of a portion (200)")
    parser.add_argument("--minutes", type=float, default=5, help="begin nothing after that (5)")
    parser.add_argument("--api", choices=[*APIS, "both"], default="both")
    parser.add_argument("--kubelet", choices=[*KUBELETS, "both"], default="both")
    parser.add_argument("--bug", choices=sorted(bugs.BUGS), help="in a copy of the package")
    parser.add_argument("--calm", action="store_true", help="nothing but kills goes wrong")
    parser.add_argument("--weather", choices=weather.NAMES, default="", help="no other, and often")
    parser.add_argument("--table", action="store_true", help="only sum what was run")
    parser.add_argument("--short", action="store_true", help="no rows of failure points")
    arguments = parser.parse_args()
    if arguments.table:
        table(short=arguments.short)
        return 0
    until = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="fpga-campaign-copy-") as folder:
        package = bugs.copy(arguments.bug, Path(folder)) if arguments.bug else spawn.ROOT
        nursery = spawn.serve_daemons(package)
        try:
            good = run(arguments, until)
        finally:
            nursery.kill()
            nursery.wait()
    if not arguments.bug:
        table(short=arguments.short)
    return 0 if good else 1


def run(arguments: argparse.Namespace, until: float) -> bool:
    """Portions until the time is over; returns whether nothing was found."""
    kubelets = KUBELETS if arguments.kubelet == "both" else (arguments.kubelet,)
    number = next_portion(arguments.seed) if arguments.portion is None else arguments.portion
    good = True
    while good and time.monotonic() < until:
        kubelet = kubelets[number % len(kubelets)]
        begin = time.monotonic()
        node, found = asyncio.run(one(arguments, number, kubelet, until))
        line = {
            "seed": arguments.seed,
            "portion": number,
            "kubelet": kubelet,
            "bug": arguments.bug,
            "seconds": round(time.monotonic() - begin, 1),
            "checks": node.checker.checked,
            "events": len(node.checker.events),
            "violation": str(found) if found else None,
            "said": dict(sorted(node.said.items())),
            "deaths": dict(sorted(Counter(node.checker.deaths).items())),
        }
        print(
            f"{arguments.seed}.{number} {kubelet}: {node.said['kills']} kills in"
            f" {line['seconds']:.0f} s, {node.said['pods']} pods, {node.said['containers']}"
            f" containers, {node.checker.checked} checks"
            + (f"\nVIOLATION {found}" if found else ""),
            flush=True,
        )
        if not arguments.bug:
            KEPT.parent.mkdir(parents=True, exist_ok=True)
            with KEPT.open("a") as file:
                file.write(json.dumps(line) + "\n")
        good = found is None
        if found is not None:
            explain(node, KEPT.parent / f"{arguments.seed}.{number}.log")
        number += 1
        if arguments.portion is not None:
            break
    return good


async def one(
    arguments: argparse.Namespace, number: int, kubelet: str, until: float
) -> tuple[Node, Violation | None]:
    """A portion."""
    rng = random.Random(f"{arguments.seed}.{number}")
    node = Node(
        rng,
        {PODS: partial(PodSide, stock=kubelet == "stock"), CLAIMS: ClaimSide},
        apis=APIS if arguments.api == "both" else (arguments.api,),
        storms=not arguments.calm and os.geteuid() == 0,
        only=arguments.weather,
    )
    return node, await portion(node, kills=arguments.kills, until=until)


def explain(node: Node, file: Path) -> None:
    """What led to a violation: events, uses, the last journal, the logs of the last lives."""
    lines = [
        f"{event.at} {event.kind} {event.target} {event.value}" for event in node.checker.events
    ]
    lines += [str(use) for uses in node.checker.uses.values() for use in uses[-3:]]
    lines.append(str(node.snapshot))
    lines += [f"{setup}, {wind.name}\n{plugin.text}" for setup, wind, plugin in node.past]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines))
    print(f"what led to it: {file}")


def kept() -> list[dict[str, Any]]:
    """What was run."""
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def next_portion(seed: int) -> int:
    """Of a seed, the first that was not run."""
    return max((line["portion"] + 1 for line in kept() if line["seed"] == seed), default=0)


def table(*, short: bool) -> None:
    """Sum what was run; `short`: without weather and failure points."""
    lines = kept()
    print(f"\n{'':34}" + "".join(f"{name:>10}" for name in (*KUBELETS, "all")))
    columns = [*([x for x in lines if x["kubelet"] == one] for one in KUBELETS), lines]

    def row(name: str, values: list[float]) -> None:
        print(f"{name:34}" + "".join(f"{value:10.0f}" for value in values))

    row("portions", [len(each) for each in columns])
    for name in ("seconds", "checks", "events"):
        row(name, [sum(x[name] for x in each) for each in columns])
    for part in ("said",) if short else ("said", "deaths"):
        for name in sorted({name for x in lines for name in x[part]}):
            if short and name.startswith("weather: "):
                continue
            row(name, [sum(x[part].get(name, 0) for x in each) for each in columns])
    row("VIOLATIONS", [sum(x["violation"] is not None for x in each) for each in columns])
    print(f"seeds: {', '.join(sorted({str(x['seed']) for x in lines}))}")


if __name__ == "__main__":
    sys.exit(main())
