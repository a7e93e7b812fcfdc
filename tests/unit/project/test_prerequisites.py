"""A test whose prerequisite is missing is skipped with the reason, and fails with CI=true."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[2] / "conftest.py"

TESTS = """
import pytest

@pytest.mark.needs("umockdev")
def test_with_hardware():
    raise AssertionError("must not run")

def test_without():
    pass
"""


def run_pytest(directory: Path, tests: str, *, ci: str) -> str:
    shutil.copy(CONFTEST, directory)
    (directory / "test_it.py").write_text(tests)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = needs(what): as in pyproject\n")
    environ = {**os.environ, "CI": ci, "PATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "."]
    result = subprocess.run(
        command, cwd=directory, env=environ, capture_output=True, text=True, check=False
    )
    return result.stdout + result.stderr


def test_a_missing_prerequisite_is_skipped_with_the_reason(tmp_path):
    output = run_pytest(tmp_path, TESTS, ci="")
    assert "1 passed, 1 skipped" in output
    assert "umockdev-wrapper is not installed (make deps)" in output


def test_a_missing_prerequisite_fails_in_ci(tmp_path):
    output = run_pytest(tmp_path, TESTS, ci="true")
    assert "1 passed, 1 error" in output  # an error of the set-up: pytest ends with 1
    assert "umockdev-wrapper is not installed (make deps)" in output
    assert "must not run" not in output


def test_an_unknown_prerequisite_is_an_error(tmp_path):
    output = run_pytest(tmp_path, TESTS.replace("umockdev", "umockdef"), ci="")
    assert "needs 'umockdef': see tests/conftest.py" in output
