#!/usr/bin/env python3
"""Load: many cards, thousands of pods an hour and hostile clients, while nothing may grow.

    .venv/bin/python tests/load [--api extended|stock|dra] [--minutes 60] [--cards 256]
                                [--hourly 4000] [--clients 8] [--seed 1]

Prints what the plugin holds of the machine, minute by minute, in the form of docs/load.md. Exits
with 1 if something grew, if the plugin ended, or if at the end not every device came back.
"""
# ruff: noqa: T201 - a command prints

import argparse
import asyncio
import logging
import random
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "integration")]
for logger in ("grpclib", "asyncio"):
    logging.getLogger(logger).setLevel(logging.CRITICAL)

import gauges  # noqa: E402  # found by the lines above
from apis import APIS, Node  # noqa: E402
from hostile import Hostile  # noqa: E402

LIFE = 5.0
"""Seconds that a pod runs, on average."""


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--api", choices=sorted(APIS), default="stock")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--cards", type=int, default=256, help="of four regions each")
    parser.add_argument("--hourly", type=float, default=4000, help="pods")
    parser.add_argument("--clients", type=int, default=8, help="hostile ones, at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=60, help="seconds between two samples")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    node = APIS[arguments.api](arguments.cards, rng)
    samples: list[gauges.Sample] = []
    problem = "interrupted"
    try:
        problem = asyncio.run(run(node, arguments, rng, samples))
    except (AssertionError, ExceptionGroup) as error:
        problem = f"{error}"
        if isinstance(error, ExceptionGroup):
            problem += f": {error.exceptions}"
    finally:
        code = node.close(keep=bool(problem))
    print(f"\n{arguments.api}: what came of {sum(node.said.values())} pods")
    for what, number in node.said.most_common(12):
        print(f"{number:7d} {what}")
    found = [problem] if problem else gauges.growth(samples)
    if not problem and code != 0:
        found.append(f"the plugin ended with {code}")
    for each in found:
        print(f"FAILED: {each}")
    return 1 if found else 0


async def run(
    node: Node, arguments: argparse.Namespace, rng: random.Random, samples: list[gauges.Sample]
) -> str:
    """Pods and hostile clients until the time is over; returns what went wrong."""
    begin = time.monotonic()
    async with node.up():
        print(f"{arguments.api}: {arguments.cards} cards were ready after", end=" ")
        print(f"{time.monotonic() - begin:.1f} s; PID {node.process and node.process.pid}")
        print(gauges.table([]), flush=True)
        hostile = Hostile(node.sockets, node.https, rng)
        begin = time.monotonic()
        until = begin + 60 * arguments.minutes
        attacks = asyncio.create_task(hostile.run(arguments.clients, 0.5))
        watch = asyncio.create_task(
            sampled(node, hostile, samples, begin=begin, every=arguments.every)
        )
        async with asyncio.TaskGroup() as pods:
            number = 0
            while time.monotonic() < until:
                await asyncio.sleep(rng.expovariate(arguments.hourly / 3600))
                if node.process is None or node.process.poll() is not None:
                    return "the plugin has ended"
                number += 1
                pods.create_task(node.pod(number, rng.expovariate(1 / LIFE)))
                if attacks.done():
                    return f"the hostile clients ended: {attacks.exception()}"
        for task in (attacks, watch):
            task.cancel()
            await asyncio.wait({task})
        print(f"attacks: {dict(sorted(hostile.done.items()))}")
        await node.all_clean()
    return ""


async def sampled(
    node: Node, hostile: Hostile, samples: list[gauges.Sample], *, begin: float, every: float
) -> None:
    """Look, and tell, until cancelled."""
    while True:
        assert node.process is not None
        sample = gauges.look(
            node.process.pid,
            node.state_dir,
            minute=(time.monotonic() - begin) / 60,
            pods=sum(node.said.values()),
            attacks=sum(hostile.done.values()),
        )
        samples.append(sample)
        print(gauges.table([sample]).splitlines()[-1], flush=True)
        await asyncio.sleep(every)


if __name__ == "__main__":
    sys.exit(main())
