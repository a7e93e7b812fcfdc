"""The second tier: what the fast tests left alive, against the plugin as a process.

A copy of the repository in .cache/mutants/tree gets the mutated module, and the integration tests
of its area run there until one fails. That takes a minute for a mutant that lives, so it is asked
for (`--integration`), and `--minutes` and `--sample` limit it.
"""
# ruff: noqa: T201 - a command prints

import ast
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from core import ROOT, WORK, Result, digest, keep
from mutations import Mutant, mutated

TREE = WORK / "tree"
GRACE = 120
"""Seconds that the tests of a mutant may take beyond five times what they took without one: one
that hangs has been noticed."""

TESTS = {
    "ledger": ("life", "orders", "restart", "draining", "former_owners", "by_hand"),
    "claims": ("life", "orders", "requests_life", "pod_sources"),
    "regions": ("life", "orders", "faults", "recovery", "exclusive", "kept_regions", "by_hand"),
    "port": ("umockdev", "umockdev_life"),
    "stock": ("stock_release", "stock_walk", "who_lives", "pod_sources"),
    "policy": ("policy_life",),
    "trust": ("trust", "images"),
    "dra": ("dra", "claim_owners", "slot_claims", "functions"),
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
    """Try one, unless it lived under these very tests before."""
    tests = digest(*((ROOT / file).read_bytes() for file in files))
    if last.integration == tests:
        return
    source = (ROOT / mutant.file).read_text()
    path = TREE / mutant.file
    path.write_text(ast.unparse(mutated(source, mutant)))
    begin = time.monotonic()
    try:
        failed = _failing(files, limit)
    finally:
        path.write_text(source)
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
    """The first test that fails in the copy, or what took longer than so long; empty: none."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    env = os.environ | {"PYTHONPATH": str(TREE), "PYTHONDONTWRITEBYTECODE": "1"}
    running = subprocess.Popen(
        [*command, "-rf", *files],
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
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split()[1] if lines else "what cannot be collected"
