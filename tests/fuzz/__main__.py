#!/usr/bin/env python3
"""Fuzzes every reader of foreign bytes, two side by side; one line each.

    .venv/bin/python tests/fuzz [--seconds 20] [TARGET ...]

Exits with 1 on a finding, whose input stays in .cache/fuzz/findings. Where atheris has no wheel
(Python after 3.13, machines other than x86-64) it says so and does nothing.
"""
# ruff: noqa: T201 - a command prints

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from target import Target

HERE = Path(__file__).resolve().parent
WORK = HERE.parents[1] / ".cache" / "fuzz"
SIDE_BY_SIDE = 2
GRACE = 60
"""Seconds beyond a target's own, for the start and the instrumentation."""
OPTIONS = ("-timeout=5", "-rss_limit_mb=1024", "-max_len=16384", "-print_final_stats=1")


def fuzz(name: str, target: "Target", seconds: int) -> bool:
    """Fuzz a target; returns whether nothing was found."""
    corpus, findings, kept = WORK / "corpus" / name, WORK / "findings", HERE / "corpus" / name
    for directory in (corpus, findings):
        directory.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    command = [sys.executable, str(HERE / "one.py"), name, *OPTIONS]
    command += [f"-max_total_time={seconds}", f"-artifact_prefix={findings}/{name}-"]
    if target.words:
        words = WORK / f"{name}.words"
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
        command.append(f"-dict={words}")
    command += [str(corpus)] + ([str(kept)] if kept.is_dir() else [])
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, timeout=seconds + GRACE, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{name}: did not end in time")
        return False
    text = done.stderr.decode(errors="replace") + done.stdout.decode(errors="replace")
    runs = re.findall(r"number_of_executed_units:\s*(\d+)", text)
    coverage = re.findall(r"cov: (\d+)", text)
    peak = re.findall(r"peak_rss_mb:\s*(\d+)", text)
    good = done.returncode == 0 and bool(runs)
    print(
        f"{name}: {runs[-1] if runs else '?'} executions, coverage"
        f" {coverage[-1] if coverage else '?'}, peak {peak[-1] if peak else '?'} MiB,"
        f" {'nothing found' if good else 'FOUND SOMETHING'}",
        flush=True,
    )
    if not good:
        print(text[-4000:])
    return good


def _escaped(word: bytes) -> str:
    """As libFuzzer's dictionaries have it."""
    return "".join(f"\\x{byte:02x}" for byte in word)


def main() -> int:
    """Run the targets."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("targets", nargs="*")
    args = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("fuzzing skipped: atheris has no wheel for this Python or machine")
        return 0
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]
    # Imported here, after the path is set: the targets import the plugin.
    from targets import TARGETS

    unknown = set(args.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        results = pool.map(
            lambda name: fuzz(name, TARGETS[name], args.seconds), args.targets or TARGETS
        )
        return 0 if all(list(results)) else 1


if __name__ == "__main__":
    sys.exit(main())
