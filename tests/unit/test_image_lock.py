"""The image's packages are those that pyproject.toml names, each pinned with its hashes."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "deploy/image/requirements.lock").read_text()
PINS = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", LOCK, re.MULTILINE))


def dependencies() -> list[Requirement]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return [Requirement(line) for line in tomllib.load(file)["project"]["dependencies"]]


def test_the_lock_has_a_fitting_version_of_each_dependency():
    for dependency in dependencies():
        pin = PINS.get(canonicalize_name(dependency.name))
        assert pin, f"{dependency.name} is not in the lock: make lock"
        assert dependency.specifier.contains(pin), f"{dependency} but {pin} in the lock: make lock"


def test_everything_in_the_lock_has_hashes_and_names_no_index():
    entries = re.split(r"\n(?=\S)", LOCK.strip())
    assert len(entries) == len(PINS)
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+==\S+ ", entry), entry
        assert "--hash=sha256:" in entry
    assert "://" not in LOCK


def test_pydantic_is_not_in_the_image():
    assert not {"pydantic", "pydantic-core"} & PINS.keys(), "8 MiB, through betterproto2"


def test_the_dockerfile_has_no_base_of_its_own_and_names_no_registry():
    text = (ROOT / "Dockerfile").read_text()
    assert set(re.findall(r"^ARG (\S+)$", text, re.MULTILINE)) == {"BASE", "REVISION"}
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}", "scratch"]
    assert "--require-hashes" in text


@pytest.mark.parametrize(
    "base", ["", "debian:bookworm-slim", "debian@sha256:abc", f"debian@sha256:{'g' * 64}"]
)
def test_no_image_is_built_on_a_base_without_a_digest(base: str):
    done = subprocess.run(
        ["make", "--no-print-directory", "image"],
        cwd=ROOT,
        env=os.environ | {"BASE": base},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "BASE has to name a Debian release with its digest" in done.stderr


@pytest.mark.parametrize(("changes", "revision"), [("", "1f" * 20), (" M Makefile", "")])
def test_an_image_is_built_on_the_base_that_is_named_and_says_of_which_commit(
    tmp_path: Path, changes: str, revision: str
):
    """Of none where the clone has changes: `make release` refuses it then."""
    base = f"debian:bookworm-slim@sha256:{'0' * 64}"
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "$@"\n')
    docker.chmod(0o755)
    git = tmp_path / "git"
    git.write_text(f'#!/bin/sh\n[ "$1" = status ] && echo "{changes}" || echo {"1f" * 20}\n')
    git.chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", "image"],
        cwd=ROOT,
        env=os.environ | {"BASE": base, "IMAGE": "x", "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        done.stdout == f"build --build-arg BASE={base} --build-arg REVISION={revision} --tag x .\n"
    )
