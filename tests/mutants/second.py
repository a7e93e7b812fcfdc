"""The second tier: what the fast tests left alive, against the plugin as a process.

A copy of the repository in .cache/mutants/tree gets the mutated module, and the integration tests
of its area run there, side by side, until one fails. That takes minutes for a mutant that lives, so
it is asked for (`--integration`), and `--minutes` and `--sample` limit it.

These tests have times and processes, and one of them may fail by the machine's doing: what fails is
asked again alone, and only what fails again has noticed the mutant.
"""
# ruff: noqa: T201 - a command prints

import ast
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

import pytest
from core import ROOT, WORK, Result, digest, keep
from mutations import Mutant, mutated

TREE = WORK / "tree"
WORKERS = 2 * (os.cpu_count() or 1)
"""Tests at a time, as `make test` has it: they wait more than they compute."""
GRACE = 120
"""Seconds that the tests of a mutant may take beyond five times what they took without one: one
that hangs has been noticed."""

SUMMARY = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\])?)(?= - |$)", re.MULTILINE)
"""What pytest says in the end of a test, or a file, that failed."""

TESTS = {
    "ledger": ("life", "orders", "restart", "draining", "former_owners", "by_hand"),
    "allocations": ("life", "orders", "requests_life", "pod_sources"),
    "regions": ("life", "orders", "faults", "recovery", "exclusive", "kept_regions", "by_hand"),
    "port": ("umockdev", "umockdev_life"),
    "stock": ("stock_release", "stock_walk", "who_lives", "pod_sources"),
    "policy": ("policy_life",),
    "trust": ("trust", "images"),
    "dra": ("dra", "claim_owners", "slot_allocations", "functions"),
}
"""By area, those of tests/integration that go through it, fast and general ones first."""


def try_all(
    found: dict[str, list[Mutant]], known: dict[str, Result], minutes: float, sample: int, seed: int
) -> int:
    """Try what lives; returns 1 if the tests fail without a mutant."""
    end = time.monotonic() + 60 * minutes
    for area, mutants in found.items():
        alive = [each for each in mutants if (r := known.get(each.key)) and not r.dead]
        if sample and len(alive) > sample:
            alive = random.Random(seed).sample(alive, sample)
        if not alive:
            continue
        files = [f"tests/integration/test_{name}.py" for name in TESTS[area]]
        _copy()
        begin = time.monotonic()
        if failed := _failing(files):
            print(f"{area}: {failed} fails without a mutant", file=sys.stderr)
            return 1
        seconds = time.monotonic() - begin
        print(f"{area}: {seconds:.0f} s without a mutant", flush=True)
        limit = GRACE + 5 * seconds
        for mutant in alive:
            if time.monotonic() > end:
                print("the time is up: the same command goes on from here")
                return 0
            try_one(mutant, files, known[mutant.key], limit)
    return 0


def try_one(mutant: Mutant, files: Sequence[str], last: Result, limit: float) -> None:
    """Try one, unless it lived under these very tests before; in doubt, nothing is noted."""
    tests = digest(*((ROOT / file).read_bytes() for file in files))
    if last.integration == tests:
        return
    source = (ROOT / mutant.file).read_text()
    path = TREE / mutant.file
    path.write_text(ast.unparse(mutated(source, mutant)))
    begin = time.monotonic()
    try:
        failed = _failing(files, limit)
        alone = _failing([failed], limit) if "::" in failed else failed
    finally:
        path.write_text(source)
    if failed and not alone:
        print(f"doubtful {mutant.key}: {failed} fails, but not alone", flush=True)
        return
    what = "killed" if failed else last.what
    keep(Result(mutant.key, last.source, what, failed, last.tests, tests))
    by = f" by {failed}" if failed else ""
    print(f"{what:8} {mutant.key}{by} ({time.monotonic() - begin:.0f} s)", flush=True)


def _copy() -> None:
    """What git knows of the repository, as it is now."""
    shutil.rmtree(TREE, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name, follow_symlinks=False)


def _failing(files: Iterable[str], limit: float | None = None) -> str:
    """The first test (or file) that fails in the copy, or what took too long; empty: none."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    command += ["-n", str(WORKERS), "--dist", "worksteal"]
    env = os.environ | {"PYTHONPATH": str(TREE), "PYTHONDONTWRITEBYTECODE": "1"}
    running = subprocess.Popen(
        [*command, "-rfE", *files],
        cwd=TREE,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = running.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, 9)
        running.communicate()
        return "a test that does not end"
    if running.returncode == 0:
        return ""
    if told := SUMMARY.search(output):
        return told[1]
    if running.returncode not in {pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR}:
        raise RuntimeError(f"pytest was ended ({running.returncode}):\n{output[-2000:]}")
    return "what cannot be loaded"
