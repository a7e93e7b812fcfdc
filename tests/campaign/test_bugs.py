# ruff: noqa: T201 - what a run says is asked for with -rP
"""Each deliberate bug (`bugs`) is found, by the campaign's checker or by a state machine.

Minutes of kills, by chance: `make campaign-bugs` runs them, CI does not. That the
bugs still fit the code is a unit test (tests/unit/project/test_campaign.py). That nothing is found
where there is no bug show the campaign and the state machines themselves.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

from bugs import BUGS, ROOT, copy  # noqa: E402  # found by the line above


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if not bug.machine])
def test_the_checker_finds_a_deliberate_bug(name: str) -> None:
    bug = BUGS[name]
    if bug.weather and os.geteuid() != 0:
        pytest.skip("only root mounts the file systems of the weather")
    for portion in range(4):
        command = [sys.executable, str(HERE), "--bug", name]
        command += ["--api", bug.apis, "--kubelet", bug.kubelet]
        command += ["--weather", bug.weather] if bug.weather else ["--calm"]
        command += ["--portion", str(portion), "--kills", "300", "--minutes", "3"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        print(done.stdout)  # after how many kills, and by what
        if found := re.search(r"^VIOLATION (\d+):", done.stdout, re.MULTILINE):
            assert found[1] in bug.breaks, done.stdout
            return
        assert done.returncode == 0, done.stdout
    pytest.fail(f"{name} was not found")


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.machine])
def test_a_state_machine_finds_a_deliberate_bug(name: str, tmp_path: Path) -> None:
    # -P: else the directory in which this runs comes before the copy.
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--hypothesis-seed=1", str(ROOT / "tests/unit/allocation" / BUGS[name].machine)]
    env = {"PYTHONPATH": str(copy(name, tmp_path)), "HYPOTHESIS_PROFILE": "bugs"}
    done = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=900, check=False
    )
    print(done.stdout)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "@reproduce_failure" in done.stdout, done.stdout
