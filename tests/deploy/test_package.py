"""The Python package, from the source distribution to a demo: `make test-deploy`."""

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "bitstreams"

pytestmark = pytest.mark.skipif(
    not (ROOT / ".cache/deploy/helm").exists(), reason="downloads the builder: make test-deploy"
)


def pip(*arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source distribution of this tree, and the wheel that pip makes of it alone."""
    folder = tmp_path_factory.mktemp("package")
    lock = ROOT / ".ci/build.lock"
    pip("install", "--target", folder / "builder", "--require-hashes", "--requirement", lock)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", folder],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(folder / "builder")},
        check=True, capture_output=True,
    )  # fmt: skip
    (source,) = folder.glob("*.tar.gz")
    pip("wheel", "--no-deps", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    return source, wheel


def files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(folder).as_posix()


def test_an_installed_package_plays_the_demo(packages: tuple[Path, Path], tmp_path: Path) -> None:
    _, wheel = packages
    pip("install", "--no-deps", "--target", tmp_path / "installed", wheel)
    program = (
        "import sys; from fpga_plugin.commands import main as m;"
        " print(m.__file__); sys.exit(m.main())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "demo", "--quiet"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    where, *told = done.stdout.splitlines()
    assert where.startswith(str(tmp_path / "installed"))
    assert "Served" in " ".join(told)


def test_the_store_is_the_repositorys_in_both(packages: tuple[Path, Path]) -> None:
    source, wheel = packages
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2]: name for name in archive.getnames()}
        for name in files(SAMPLES):
            taken = archive.extractfile(inside[f"bitstreams/{name}"])
            assert taken is not None
            assert taken.read() == (SAMPLES / name).read_bytes(), name
    with zipfile.ZipFile(wheel) as archive:
        for name in files(SAMPLES):
            there = archive.read(f"fpga_plugin/demo/bitstreams/{name}")
            assert there == (SAMPLES / name).read_bytes(), name


def test_what_an_index_shows_has_no_link_that_it_cannot_follow(
    packages: tuple[Path, Path],
) -> None:
    _, wheel = packages
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        told = email.message_from_bytes(archive.read(name))
    shown = str(told.get_payload())
    assert "# fpga-plugin" in shown
    assert "docs/install.md" in shown, "where it is, as text"
    assert "](" not in shown.replace("](http", "")
    for field in ("Author", "Keywords", "Classifier"):
        assert told.get_all(field), field
