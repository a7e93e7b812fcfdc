"""`make bench`: what is fast, measured on this machine, beside its reference in the same run.

The figures are no tests: nothing fails when one is missed.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import go_peer
import measure
import parts
from claims import claims
from document import around, write
from families import families
from features import memory
from figures import Figure, table
from machine import machine
from node import Node
from reference import Bare, Echo
from runtime import ROOT, runtime

COUNTS = (1, 16, 256)
"""Cards of four regions: a usual node, a large one, and the largest that is designed for."""


def main() -> int:
    """Run all, print, return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="few repetitions: a minute in all")
    parser.add_argument(
        "--cards",
        type=int,
        action="append",
        metavar="N",
        help=f"only nodes of N cards; may be repeated (default: {', '.join(map(str, COUNTS))})",
    )
    parser.add_argument(
        "--pr-seconds", type=float, default=0.05, metavar="S", help="a simulated PR (default: 0.05)"
    )
    parser.add_argument(
        "--write", action="store_true", help="put the figures into docs/performance.md as well"
    )
    arguments = parser.parse_args()
    if arguments.write and arguments.cards:
        parser.error("--write is for all of them: without --cards")
    if arguments.write:
        around()  # before minutes of work: a page that does not take the figures
    effort = measure.QUICK if arguments.quick else measure.FULL
    python = runtime()
    # The plugin watches the directories that lead to its files: these are nobody else's.
    private = ROOT / ".cache" / "bench"
    private.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=private) as name,
        tempfile.TemporaryDirectory(dir=private) as store,
    ):
        folder = Path(name)
        here = machine(folder)
        figures: list[Figure] = []
        for count in arguments.cards or COUNTS:
            figures += _node(
                folder / str(count),
                Path(store) / str(count),
                python,
                count,
                effort,
                pr_seconds=arguments.pr_seconds,
            )
        if not arguments.cards:
            print("memory by feature ...", file=sys.stderr)
            figures += memory(python, folder, Path(store), effort.idle)
            print("two families ...", file=sys.stderr)
            figures += families(python, folder, Path(store), effort)
            print("claims ...", file=sys.stderr)
            figures += claims(effort)
            print("the Go peer ...", file=sys.stderr)
            figures += go_peer.measure(python, effort)
    if arguments.json:
        rows = [figure.as_json() for figure in figures]
        print(json.dumps({"machine": here, "figures": rows}, indent=2))
    else:
        print("\n".join(f"{key:<11} {value}" for key, value in here.items()))
        print(table(figures))
    if arguments.write:
        day = time.strftime("%-d %B %Y", time.gmtime())
        write(here, figures, f"{day} with few repetitions (--quick)" if arguments.quick else day)
    return 0


def _node(
    folder: Path,
    store: Path,
    python: Path,
    count: int,
    effort: measure.Effort,
    *,
    pr_seconds: float,
) -> list[Figure]:
    def say(subject: str) -> None:
        print(f"{count} cards: {subject} ...", file=sys.stderr)

    folder.mkdir()
    node = Node(folder, store / "first", python, count=count, pr_seconds=pr_seconds)
    say("starts")
    figures = measure.starts(node, effort, lambda: Echo(python, folder / "echo.sock"))
    if count == 1:
        figures += parts.start(node, effort)
    (folder / "bare").mkdir()
    with (
        Echo(python, folder / "echo.sock") as echo,
        Bare(python, folder / "bare", pr_seconds) as bare,
        node.start() as plugin,
    ):
        node.wait_clean()
        say("idle")
        figures += measure.idle(node, plugin, effort, echo)
        figures += measure.metrics(node, plugin, effort)
        say("calls")
        figures += measure.calls(node, plugin, effort, echo)
        if count == 1:
            figures += parts.allocate(python, folder / "parts", effort)
        say("release")
        figures += measure.owned(node, plugin, effort)
        figures += measure.release(node, effort)
        say("pods' lives")
        figures += measure.lives(node, effort, bare)
        say("hot-plug")
        figures += measure.hotplug(node, effort)
    node.kubelet.close()
    if count > 1:
        say("calls during a mass scrub")
        (folder / "again").mkdir()
        again = Node(folder / "again", store / "again", python, count=count, pr_seconds=pr_seconds)
        figures += measure.busy(again)
        again.kubelet.close()
    return figures


if __name__ == "__main__":
    sys.exit(main())
