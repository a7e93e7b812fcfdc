"""GitHub's workflows, by the real actionlint: `make test-deploy`."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ACTIONLINT = ROOT / ".cache/deploy/actionlint"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))

pytestmark = pytest.mark.skipif(
    not ACTIONLINT.exists(), reason="actionlint is not built: make test-deploy"
)


def judged(*paths: Path) -> subprocess.CompletedProcess[str]:
    # Without shellcheck and pyflakes, which a machine may have or not.
    command = [ACTIONLINT, "-no-color", "-shellcheck=", "-pyflakes=", *paths]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_actionlint_finds_nothing() -> None:
    done = judged(*WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("runs-on: ubuntu-24.04", "runs-on: ubuntu-9", "ubuntu-9"),
        ("timeout-minutes:", "timeout:", "timeout"),
        ("matrix.python", "matrix.pyhton", "pyhton"),
    ],
)
def test_actionlint_would_find_a_slip(tmp_path: Path, right: str, wrong: str, said: str) -> None:
    text = (ROOT / ".github/workflows/checks.yml").read_text()
    slip = tmp_path / "slip.yml"
    slip.write_text(text.replace(right, wrong, 1))
    assert slip.read_text() != text
    done = judged(slip)
    assert done.returncode == 1
    assert said in done.stdout
