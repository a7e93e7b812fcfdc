""".ci/run, on a Makefile whose targets fail when they are told to."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from doubles import LIMIT
from repository import ROOT

GOOD = "@echo CI=$$CI SEED=$$SEED"
GOOD_THE_SECOND_TIME = "@[ -e $@.done ] || { touch $@.done; exit 1; }"
BAD = "@exit 1"
MINUTES_OF_ALL = 88
ENV = {name: text for name, text in os.environ.items() if name not in {"SEED", "MAKEFLAGS"}}
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


def _prepare(folder: Path, targets: Mapping[str, str]) -> None:
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    (folder / "Makefile").write_text("".join(f"{t}:\n\t{do}\n" for t, do in targets.items()))


def _run(
    folder: Path, targets: Mapping[str, str] = TARGETS, **more: str
) -> "subprocess.CompletedProcess[str]":
    _prepare(folder, targets)
    return subprocess.run(
        [folder / ".ci" / "run"],
        env=ENV | more,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )


def _told(file: Path) -> str:
    deadline = time.monotonic() + LIMIT
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return file.read_text().strip()


def minutes() -> dict[str, dict[str, int]]:
    """What each tier of each lane may take, in the order in which they run."""
    text = (ROOT / ".ci" / "run").read_text()
    lanes = re.findall(r"^([a-z]+)=\(\n((?:  '.*\n)+)\)$", text, re.MULTILINE)
    return {
        lane: {name: int(n) for name, n in re.findall(r"^  '(\S+) (\d+)", tiers, re.MULTILINE)}
        for lane, tiers in lanes
    }


def verdict(run, tier: str) -> str:
    """A tier's line of the table, behind its times."""
    (line,) = [line for line in run.stdout.splitlines() if line.split()[:1] == [tier]]
    return line.partition(" min  ")[2]


def test_a_second_try_is_a_defect_and_said_last(run):
    assert verdict(run, "test-kernel").startswith("ok at the second try")
    defects = [line for line in run.stdout.splitlines() if line.startswith("DEFECT: ")]
    assert [line.split()[1] for line in defects] == ["test-image", "test-kernel"]
    assert run.stdout.endswith(f"{defects[-1]}\n")


def test_of_the_tests_only_those_that_failed_are_tried_again(tmp_path):
    tell = '@echo "$@ with $$PYTEST_ADDOPTS"; [ -e $@.done ] || { touch $@.done; exit 1; }'
    run = _run(tmp_path, targets=dict.fromkeys(("test", "test-kernel", "test-dra"), tell))
    told = [line for line in run.stdout.splitlines() if " with" in line]
    # The second tries come last.
    assert sorted(told[:3]) == ["test with ", "test-dra with ", "test-kernel with "]
    assert told[3:] == ["test with --last-failed", "test-dra with ", "test-kernel with "]
    assert run.returncode == 0


def test_only_the_tiers_that_run_processes_have_one(run):
    assert verdict(run, "lint") == "FAILED (exit code 2)"


def test_a_tier_that_fails_twice_fails_and_so_does_all(run):
    assert verdict(run, "test-image") == "FAILED (exit code 2)"
    assert run.returncode == 1


def test_every_tier_runs_with_the_same_examples_and_one_that_is_not_there_is_left_out(run):
    assert run.stdout.count("CI=true SEED=20261121\n") == 3
    assert "fuzz" not in run.stdout
    assert verdict(run, "test-kubelet") == "ok"


def test_a_real_kubelet_and_what_computes_run_side_by_side_and_their_output_is_not_mixed(tmp_path):
    # Each waits until the other is there: one after the other, none would end.
    meet = "@echo $@ begins; touch $@.there; until [ -e {}.there ]; do sleep 0.1; done; echo ends"
    pair = {
        "test-kubelet": meet.format("test-kernel"),
        "test-kernel": meet.format("test-kubelet"),
        "fuzz": "@test -e test-kernel.there && ! test -e test-dra.there",
        "test-dra": "@sleep 2; touch $@.there",
        "test": "@! ls *.there 2>/dev/null",
    }
    run = _run(tmp_path, targets=pair)
    assert run.returncode == 0, run.stdout
    for tier in ("test-kubelet", "test-kernel"):
        assert f"=== {tier} ===\n{tier} begins\nends\n" in run.stdout


def test_one_kubelet_at_a_time(tmp_path):
    alone = "@mkdir kubelet; sleep 0.3; rmdir kubelet"
    tiers = ("test-kubelet", "test-kubelet-1.32", "test-dra", "test-image")
    run = _run(tmp_path, targets=dict.fromkeys(tiers, alone))
    assert run.returncode == 0, run.stdout


def test_what_computes_gives_way_to_what_waits(tmp_path):
    run = _run(tmp_path, targets=dict.fromkeys(("test", "test-dra", "test-kernel"), "@nice"))
    own = int(subprocess.check_output(["nice"]))
    assert run.stdout.count(f"===\n{own}\n") == 2
    assert f"=== test-kernel ===\n{min(own + 10, 19)}\n" in run.stdout


def test_the_table_tells_what_a_tier_computed(tmp_path):
    burn = """@python3 -c 'while __import__("time").process_time() < 2.5: pass'"""
    run = _run(tmp_path, targets={"test": burn, "fuzz": "@sleep 1"})
    assert run.returncode == 0, run.stdout
    computed = {
        tier: int(
            re.search(rf"^{tier} +\d+ s, +(\d+) s of a processor", run.stdout, re.MULTILINE)[1]
        )
        for tier in ("test", "fuzz")
    }
    assert computed["test"] in {1, 2, 3}  # parts of a second do not count
    assert computed["fuzz"] == 0


def test_ctrl_c_is_not_ignored_in_a_tier(tmp_path):
    tell = "@sed -n 's/^SigIgn:.*\\(.\\)$$/ignored: \\1/p' /proc/self/status"
    run = _run(tmp_path, targets={"test": tell})
    (ignored,) = re.findall(r"^ignored: (.)$", run.stdout, re.MULTILINE)
    assert int(ignored, 16) & 0b0110 == 0, "SIGINT and SIGQUIT"


def test_who_stops_it_stops_its_tiers_and_is_told_what_they_said(tmp_path):
    _prepare(tmp_path, {"test": "@echo hello; echo $$$$ >pid; exec sleep 1000"})
    with subprocess.Popen(
        [tmp_path / ".ci/run"], env=ENV, stdout=subprocess.PIPE, text=True
    ) as process:
        pid = _told(tmp_path / "pid")
        process.terminate()
        said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 143
    assert "=== test, which was stopped ===\nhello\n" in said
    assert not Path("/proc", pid).exists()


def test_all_tiers_together_usually_take_less_than_75_minutes():
    alone, *lanes = (sum(tiers.values()) / 2 for tiers in minutes().values())
    assert len(lanes) == 2
    assert alone + max(lanes) < 75
    assert {name for tiers in minutes().values() for name in tiers} >= TARGETS.keys()


def test_no_tier_takes_more_than_is_left(tmp_path):
    run = _run(tmp_path, SECONDS=str((MINUTES_OF_ALL - 1) * 60 + 1))
    assert "of  1 min  ok" in next(x for x in run.stdout.splitlines() if x.startswith("demo  "))
    run = _run(tmp_path / "late", SECONDS=str(MINUTES_OF_ALL * 60))
    assert verdict(run, "demo") == "FAILED (no time was left)"
    assert run.returncode == 1


def test_there_is_no_second_try_that_would_not_be_done_in_time(tmp_path):
    # bash counts on from where SECONDS says that it is.
    run = _run(tmp_path, SECONDS=str((MINUTES_OF_ALL - 1) * 60))
    assert verdict(run, "test-kernel") == "FAILED (exit code 2)"
    assert run.stdout.count("=== test-image ===") == 1
