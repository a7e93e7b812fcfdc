#!/usr/bin/env python3
"""Fuzzes every reader of foreign bytes, as many side by side as there are cores; one line each.

    .venv/bin/python tests/fuzz [--seconds 20] [--keep] [TARGET ...]

Exits with 1 on a finding, whose input stays in .cache/fuzz/findings; once mended it belongs into
tests/fuzz/found (one input a line, in hex). A search begins with the target's seeds, with those,
with what is kept in tests/fuzz/corpus, and with what earlier searches in this clone came to;
`--keep` writes the least of all that which reaches as much code into tests/fuzz/corpus.
With SEED in the environment every search takes the same way each time (CI: a change is judged by
the same inputs); without it each is another one.
Where atheris has no wheel (Python after 3.13, machines other than x86-64) it says so and does
nothing; tests/unit/project/test_fuzz_seeds.py replays seeds, corpus and findings everywhere.
"""
# ruff: noqa: T201 - a command prints

import argparse
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from target import Target

HERE = Path(__file__).resolve().parent
PATH = (str(HERE.parents[1]), str(HERE.parent))
"""Where the plugin and `doubles` are."""
KEPT = HERE / "corpus"
FOUND = HERE / "found"
WORK = HERE.parents[1] / ".cache" / "fuzz"
SIDE_BY_SIDE = max(2, os.cpu_count() or 2)
MAX_KEPT_BYTES = 1024
"""Of one input that is kept; what longer ones reach, the next search finds again."""
GRACE = 240
"""Seconds beyond a target's own, for the start and the instrumentation."""
OPTIONS = ("-timeout=5", "-rss_limit_mb=1024", "-max_len=16384", "-print_final_stats=1")


def fuzz(name: str, target: "Target", seconds: int) -> bool:
    """Fuzz a target; returns whether nothing was found."""
    corpus, findings = unpacked(name, target), WORK / "findings"
    findings.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE / "one.py"), name, *OPTIONS]
    command += [f"-max_total_time={seconds}", f"-artifact_prefix={findings}/{name}-"]
    if seed := os.environ.get("SEED"):
        command.append(f"-seed={seed}")
    if target.words:
        words = WORK / f"{name}.words"
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
        command.append(f"-dict={words}")
    command.append(str(corpus))
    try:
        done = subprocess.run(
            command, env=_env(), capture_output=True, timeout=seconds + GRACE, check=False
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


def unpacked(name: str, target: "Target") -> Path:
    """The directory of a target's inputs, with the seeds and what is kept in it."""
    corpus = WORK / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.hex" for folder in (KEPT, FOUND)]
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    for number, data in enumerate((*target.seeds, *map(bytes.fromhex, lines))):
        (corpus / f"kept-{number}").write_bytes(data)
    return corpus


def keep(name: str, target: "Target") -> bool:
    """Write a target's corpus again; returns whether that went well."""
    corpus = unpacked(name, target)
    with tempfile.TemporaryDirectory() as least:
        command = [sys.executable, str(HERE / "one.py"), name, *OPTIONS, "-set_cover_merge=1"]
        command += [f"-max_len={MAX_KEPT_BYTES}", least, str(corpus)]
        done = subprocess.run(command, env=_env(), capture_output=True, check=False)
        inputs = {path.read_bytes() for path in Path(least).iterdir()}
    if done.returncode or not inputs:
        print(f"{name}: cannot be kept\n{done.stderr.decode(errors='replace')[-2000:]}")
        return False
    inputs = {data for data in inputs if data and len(data) <= MAX_KEPT_BYTES} - {*target.seeds}
    lines = [data.hex() for data in sorted(inputs, key=lambda data: (len(data), data))]
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{name}.hex").write_text("".join(f"{line}\n" for line in lines))
    print(f"{name}: {len(lines)} inputs, {sum(map(len, inputs))} bytes", flush=True)
    return True


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(PATH)}


def _escaped(word: bytes) -> str:
    """As libFuzzer's dictionaries have it."""
    return "".join(f"\\x{byte:02x}" for byte in word)


def main() -> int:
    """Run the targets."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--keep", action="store_true", help="do not search: keep what was found")
    parser.add_argument("targets", nargs="*")
    args = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("fuzzing skipped: atheris has no wheel for this Python or machine")
        return 0
    sys.path[:0] = [str(HERE), *PATH]
    # Imported here, after the path is set: the targets import the plugin.
    from targets import TARGETS

    unknown = set(args.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        work = keep if args.keep else functools.partial(fuzz, seconds=args.seconds)
        results = pool.map(lambda name: work(name, TARGETS[name]), args.targets or TARGETS)
        return 0 if all(list(results)) else 1


if __name__ == "__main__":
    sys.exit(main())
