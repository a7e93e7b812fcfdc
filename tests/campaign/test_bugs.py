# ruff: noqa: T201 - what a run says is asked for with -rP
"""Each deliberate bug (`bugs`) is found, and nothing is where there is none.

Minutes of kills, by chance: `make campaign-bugs` runs them, CI does not. That the
bugs still fit the code is a unit test (tests/unit/project/test_campaign.py).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

from bugs import BUGS  # noqa: E402  # found by the line above


@pytest.mark.long
@pytest.mark.parametrize("name", BUGS)
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
