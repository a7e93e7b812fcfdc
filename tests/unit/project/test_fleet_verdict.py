"""When `make fleet` fails, and what it says of a run that was cut short."""

import json
import subprocess
import sys

import pytest
from repository import ROOT

RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import fleet
print(fleet.failed(json.loads(sys.argv[2]), may_be_cut_short=sys.argv[3] == "cut"))
"""
FOUND = {"asked": 200, "begun": 200, "pods": 200, "lost": [], "all_mib": 100.0}


@pytest.mark.parametrize(
    ("change", "cut", "failed"),
    [
        ({}, "", False),
        ({"begun": 90, "pods": 90}, "", True),
        ({"begun": 90, "pods": 90}, "cut", False),
        ({"begun": 90, "pods": 89}, "cut", True),
        ({"lost": ["a claim"]}, "cut", True),
    ],
)
def test_a_run_that_did_less_than_was_asked_fails_unless_it_was_told_when_to_end(
    change, cut, failed
):
    command = [sys.executable, "-c", RUN, ROOT / "tests/dra", json.dumps(FOUND | change), cut]
    assert subprocess.check_output(command, text=True).strip() == str(failed)
