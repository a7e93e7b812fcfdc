""".ci/run, on a Makefile whose targets fail when they are told to."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from doubles import LIMIT
from repository import ROOT

GOOD = "@echo CI=$$CI SEED=$$SEED"
GOOD_THE_SECOND_TIME = "@[ -e $@.done ] || { touch $@.done; exit 1; }"
BAD = "@exit 1"
MINUTES_OF_ALL = 88
TARGETS = {
    "demo": GOOD,
    "lint": GOOD_THE_SECOND_TIME,
    "test": GOOD,
    "test-kernel": GOOD_THE_SECOND_TIME,
    "test-kubelet": GOOD,
    "test-image": BAD,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> "subprocess.CompletedProcess[str]":
    return _run(tmp_path_factory.mktemp("repository"))


def _run(folder: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    (folder / "Makefile").write_text("".join(f"{t}:\n\t{do}\n" for t, do in TARGETS.items()))
    env = {name: text for name, text in os.environ.items() if name not in {"SEED", "MAKEFLAGS"}}
    return subprocess.run(
        [folder / ".ci" / "run"],
        env=env | more,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )


def minutes() -> dict[str, int]:
    """What each tier may take, in the order in which they run."""
    text = (ROOT / ".ci" / "run").read_text()
    return {name: int(n) for name, n in re.findall(r"^  '([a-z0-9.-]+) (\d+)", text, re.MULTILINE)}


def verdict(run, tier: str) -> str:
    """A tier's line of the table, behind its times."""
    (line,) = [line for line in run.stdout.splitlines() if line.split()[:1] == [tier]]
    return line.partition(" min  ")[2]


def test_a_second_try_is_a_defect_and_said_last(run):
    assert verdict(run, "test-kernel").startswith("ok at the second try")
    defects = [line for line in run.stdout.splitlines() if line.startswith("DEFECT: ")]
    assert [line.split()[1] for line in defects] == ["test-kernel", "test-image"]
    assert run.stdout.endswith(f"{defects[-1]}\n")


def test_of_the_tests_only_those_that_failed_are_tried_again(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    tell = '@echo "$@ with $$PYTEST_ADDOPTS"; [ -e $@.done ] || { touch $@.done; exit 1; }'
    tiers = ("test", "test-kernel", "test-dra")
    (tmp_path / "Makefile").write_text("".join(f"{tier}:\n\t{tell}\n" for tier in tiers))
    run = subprocess.run(
        [tmp_path / ".ci" / "run"], capture_output=True, text=True, check=True, timeout=LIMIT
    )
    told = [line for line in run.stdout.splitlines() if " with " in line]
    assert [line.strip() for line in told] == [
        "test with",
        "test with --last-failed",
        *("test-kernel with",) * 2,
        *("test-dra with",) * 2,
    ]


def test_only_the_tiers_that_run_processes_have_one(run):
    assert verdict(run, "lint") == "FAILED (exit code 2)"


def test_a_tier_that_fails_twice_fails_and_so_does_all(run):
    assert verdict(run, "test-image") == "FAILED (exit code 2)"
    assert run.returncode == 1


def test_every_tier_runs_with_the_same_examples_and_one_that_is_not_there_is_left_out(run):
    assert run.stdout.count("CI=true SEED=20261121\n") == 3
    assert "fuzz" not in run.stdout
    assert verdict(run, "test-kubelet") == "ok"


def test_all_tiers_together_usually_take_less_than_75_minutes():
    assert minutes().keys() >= TARGETS.keys()
    assert sum(minutes().values()) / 2 < 75


def test_no_tier_takes_more_than_is_left(tmp_path):
    run = _run(tmp_path, SECONDS=str((MINUTES_OF_ALL - 1) * 60 + 1))
    assert "of  1 min  ok" in next(x for x in run.stdout.splitlines() if x.startswith("demo  "))
    (tmp_path / "late").mkdir()
    run = _run(tmp_path / "late", SECONDS=str(MINUTES_OF_ALL * 60))
    assert verdict(run, "demo") == "FAILED (no time was left)"
    assert run.returncode == 1


def test_there_is_no_second_try_that_later_tiers_would_pay_for(tmp_path):
    names = list(minutes())
    later = sum(minutes()[name] for name in names[names.index("test-kernel") + 1 :]) // 2
    # bash counts on from where SECONDS says that it is.
    run = _run(tmp_path, SECONDS=str((MINUTES_OF_ALL - later) * 60))
    assert verdict(run, "test-kernel") == "FAILED (exit code 2)"
    assert run.stdout.count("=== test-image ===") == 2, "nothing comes after it"
