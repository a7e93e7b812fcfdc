#!/usr/bin/env python3
"""Small changes of the core, one at a time: does a fast test notice?

    .venv/bin/python tests/mutants [AREA ...] [--only TEXT] [--minutes N] [--sample N] [--table]
    .venv/bin/python tests/mutants [AREA ...] --integration [--minutes N] [--sample N]

The second form tries those that lived against the integration tests of their area.

Results stay in .cache/mutants: the same command goes on where it ended, and tries again what
survived as soon as a test that touches it has changed. Ends with 1 if a mutant lives that
tests/mutants/equivalent.toml does not judge, or if that judges one that is not there any more.
"""
# ruff: noqa: T201 - a command prints

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable

import pytest
import second
from core import AREAS, ROOT, WORK, Result, chosen, equivalent, results, stale
from mutations import Mutant


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("areas", nargs="*", help=", ".join(AREAS))
    arguments.add_argument("--only", action="append", default=[], help="part of a mutant's name")
    arguments.add_argument("--tests", action="append", default=[], help="instead of tests/unit")
    arguments.add_argument("--minutes", type=float, default=600, help="begin no mutant after that")
    arguments.add_argument("--processes", type=int, default=os.cpu_count() or 2)
    arguments.add_argument("--integration", action="store_true", help="the second tier")
    arguments.add_argument("--sample", type=int, default=0, help="so many of those of an area")
    arguments.add_argument("--seed", type=int, default=0, help="which ones")
    arguments.add_argument("--again", action="store_true", help="believe no earlier result")
    arguments.add_argument("--table", action="store_true", help="only print what is known")
    arguments.add_argument("--list", action="store_true", help="only print the names")
    options = arguments.parse_args()
    if unknown := sorted(set(options.areas) - set(AREAS)):
        arguments.error(f"no such area: {', '.join(unknown)}")
    WORK.mkdir(parents=True, exist_ok=True)
    (WORK / "touched").mkdir(exist_ok=True)
    found = chosen(options.areas, options.only)
    if options.list:
        print(*(each.key for mutants in found.values() for each in mutants), sep="\n")
        return 0
    judged = equivalent()
    gone = stale(judged)
    for key in gone:
        print(f"judged, and not there any more: {key}")
    wanted = [each for mutants in found.values() for each in mutants if each.key not in judged]
    if options.sample and not options.integration:
        wanted = sample(found, judged, options.sample, options.seed)
    if not options.table:
        code = second_tier(wanted, options) if options.integration else run(wanted, options)
        if code:
            return code
    known = results()
    print(table(found, known, judged))
    alive = [each.key for each in wanted if each.key in known and not known[each.key].dead]
    return 1 if alive or gone else 0


def sample(
    found: dict[str, list[Mutant]], judged: dict[str, str], most: int, seed: int
) -> list[Mutant]:
    """So many of those of each area that are not judged equivalent, in their order."""
    chance = random.Random(seed)
    chosen = []
    for mutants in found.values():
        here = [each for each in mutants if each.key not in judged]
        picked = set(chance.sample(range(len(here)), min(most, len(here))))
        chosen += [each for number, each in enumerate(here) if number in picked]
    return chosen


def run(wanted: list[Mutant], options: argparse.Namespace) -> int:
    """Pytest, whose loop tries the mutants."""
    from server import Server

    os.chdir(ROOT)
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    os.environ["PYTHONHASHSEED"] = "0"
    os.nice(10)
    before = {} if options.again else results()
    server = Server(wanted, before, minutes=options.minutes, processes=options.processes)
    settings = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler"]
    settings += ["--hypothesis-seed=0", *(options.tests or ["tests/unit"])]
    return int(pytest.main(settings, plugins=[server]))


def second_tier(wanted: list[Mutant], options: argparse.Namespace) -> int:
    """What the fast tests left alive, against the plugin as a process."""
    os.nice(10)
    by_area = {
        area: [each for each in wanted if each in mutants]
        for area, mutants in chosen(options.areas, options.only).items()
    }
    return second.try_all(by_area, results(), options.minutes, options.sample, options.seed)


def table(found: dict[str, list[Mutant]], known: dict[str, Result], judged: dict[str, str]) -> str:
    """By module: mutants, killed, equivalent, survived, and those that no fast test touches."""
    lines = [
        "| module | mutants | killed | equivalent | survived | untouched | of those tried |",
        "|---|---|---|---|---|---|---|",
    ]
    for area, mutants in found.items():
        files = sorted({each.file for each in mutants})
        for file in files:
            name = file.removeprefix("fpga_plugin/").removesuffix(".py")
            lines.append(_row(name, (each for each in mutants if each.file == file), known, judged))
        lines.append(_row(f"**{area}**", mutants, known, judged))
    everything = [each for mutants in found.values() for each in mutants]
    return "\n".join([*lines, _row("**all**", everything, known, judged)])


def _row(
    name: str, mutants: Iterable[Mutant], known: dict[str, Result], judged: dict[str, str]
) -> str:
    counts: Counter[str] = Counter()
    for each in mutants:
        counts["all"] += 1
        result = known.get(each.key)
        if each.key in judged:
            counts["equivalent"] += 1
        elif result is not None:
            counts["killed" if result.dead else result.what] += 1
    tried = counts["killed"] + counts["survived"] + counts["untouched"]
    share = f"{100 * counts['killed'] / tried:.1f} %" if tried else ""
    numbers = (counts[each] for each in ("all", "killed", "equivalent", "survived", "untouched"))
    return f"| {name} | {' | '.join(map(str, numbers))} | {share} |"


if __name__ == "__main__":
    sys.exit(main())
