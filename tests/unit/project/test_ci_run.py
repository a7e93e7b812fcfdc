""".ci/run, on a Makefile whose targets fail when they are told to."""

import os
import re
import shlex
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
OURS = {"SEED", "MAKEFLAGS", "MINUTE", "PYTEST_ARGS", "PYTEST_ADDOPTS"}
ENV = {name: text for name, text in os.environ.items() if name not in OURS}
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
    # What a test starts as a process has to find nothing of it: so not PYTEST_ADDOPTS.
    tell = (
        "@echo $@ with $$PYTEST_ARGS$$PYTEST_ADDOPTS; [ -e $@.done ] || { touch $@.done; exit 1; }"
    )
    targets = dict.fromkeys(("test", "test-kernel", "test-dra"), tell)
    run = _run(tmp_path, targets=targets, PYTEST_ARGS="-v")
    told = re.findall("^test.* with.*$", run.stdout, re.MULTILINE)
    # The second tries come last.
    assert sorted(told[:3]) == ["test with -v", "test-dra with -v", "test-kernel with -v"]
    assert told[3:] == ["test with -v --last-failed", "test-dra with -v", "test-kernel with -v"]
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


def test_the_plugin_is_killed_at_every_door_for_five_minutes_of_the_same_seed(tmp_path):
    run = _run(tmp_path, targets={"campaign": "@echo asked: $$CAMPAIGN_ARGS"}, CAMPAIGN_ARGS="")
    (asked,) = re.findall("^asked: (.*)$", run.stdout, re.MULTILINE)
    assert asked == "--seed 20261121 --minutes 5 --kills 30 --short"


def test_a_real_kubelet_and_what_computes_run_side_by_side_and_their_output_is_not_mixed(tmp_path):
    # Each waits until the other is there: one after the other, none would end.
    meet = "@echo $@ begins; touch $@.there; until [ -e {}.there ]; do sleep 0.1; done; echo ends"
    pair = {
        "test-kubelet": meet.format("test-kernel"),
        "test-kernel": meet.format("test-kubelet"),
        # The one after the kubelet's waits for the one after what computes.
        "test-alveo": "@test -e test-kernel.there && ! test -e test-dra.there; code=$$?;"
        " touch $@.there; exit $$code",
        "test-dra": "@until [ -e test-alveo.there ]; do sleep 0.1; done; touch $@.there",
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
    told = dict(re.findall(r"^=== (\S+) ===\n(\d+)$", run.stdout, re.MULTILINE))
    less = str(min(own + 10, 19))
    assert told == {"test": str(own), "test-dra": str(own), "test-kernel": less}


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
    assert computed["test"] in range(1, 10)  # parts of a second do not count; starting it does
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


def test_what_was_said_and_how_far_it_came_is_shown_before_the_tiers_have_ended(tmp_path):
    """Who stops it may kill it soon after, and a tier takes its time to end."""
    wait = "while :; do sleep 0.1; done"
    slow = f"trap 'sleep 1; echo bye; exit 1' TERM; echo hello; echo $$$$ >pid; {wait}"
    _prepare(tmp_path, {"demo": GOOD, "test": f"@exec bash -c {shlex.quote(slow)}"})
    with subprocess.Popen(
        [tmp_path / ".ci/run"], env=ENV, stdout=subprocess.PIPE, text=True
    ) as process:
        _told(tmp_path / "pid")
        process.terminate()
        said, _ = process.communicate(timeout=LIMIT)
    _, _, stopped = said.partition("=== test, which was stopped ===\nhello\n")
    table, _, end = stopped.partition("=== test, at its end ===\n")
    assert "=== tiers ===\ndemo " in table
    assert "bye\n" in end


def test_while_tiers_run_what_each_said_last_is_told_once_a_minute(tmp_path):
    wait = "@echo $@ is here; echo; until grep -q . told; do sleep 0.1; done"
    _prepare(tmp_path, {"test-dra": wait, "test-kernel": wait})
    (tmp_path / "told").touch()
    with subprocess.Popen(
        [tmp_path / ".ci/run"], env=ENV | {"MINUTE": "3"}, stdout=subprocess.PIPE, text=True
    ) as process:
        told: dict[str, str] = {}
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.fullmatch(r"--- (\S+) since (\d+) min: (.+)\n", line):
                told[found[1]] = found[3]
            if len(told) == 2:
                (tmp_path / "told").write_text("yes")
    assert told == {"test-dra": "test-dra is here", "test-kernel": "test-kernel is here"}
    assert process.returncode == 0


def test_a_tier_that_is_not_done_in_its_minutes_is_told_so(tmp_path):
    """Also one that has to be killed, which timeout reports by another exit code."""
    for name, end in (("gentle", "exit 1"), ("hard", "")):
        stay = f"trap '{end}' TERM; while :; do sleep 0.1; done"
        targets = {"demo": f"@exec bash -c {shlex.quote(stay)}"}
        run = _run(tmp_path / name, targets=targets, MINUTE="2")
        assert verdict(run, "demo") == "FAILED (not done after 2 minutes)", name
    run = _run(tmp_path / "soon", targets={"demo": "@kill -9 $$PPID"}, MINUTE="60")
    assert verdict(run, "demo") == "FAILED (exit code 137)"


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
