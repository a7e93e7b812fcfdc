"""What image and `.ci/setup` install: what pyproject.toml names, pinned with hashes."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS = PYPROJECT["dependency-groups"]
LOCKS = {
    "deploy/image/requirements.lock": PYPROJECT["project"]["dependencies"],
    ".ci/build.lock": [*PYPROJECT["build-system"]["requires"], *GROUPS["build"]],
    ".ci/dev.lock": GROUPS["dev"],
}


def pins(lock: str) -> dict[str, str]:
    text = (ROOT / lock).read_text()
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE))


PINS = pins("deploy/image/requirements.lock")


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_a_fitting_version_of_each_dependency(lock: str):
    for dependency in map(Requirement, LOCKS[lock]):
        pin = pins(lock).get(canonicalize_name(dependency.name))
        assert pin, f"{dependency.name} is not in {lock}: make lock"
        assert dependency.specifier.contains(pin), f"{dependency} but {pin} in {lock}: make lock"


@pytest.mark.parametrize("lock", LOCKS)
def test_everything_in_a_lock_has_hashes_and_names_no_index(lock: str):
    text = (ROOT / lock).read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) == len(pins(lock))
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+==\S+ ", entry), entry
        assert "--hash=sha256:" in entry
    assert "://" not in text


def test_no_two_locks_have_another_version_of_one_package():
    """They are installed into one environment: the tests run on what the image has."""
    versions: dict[str, set[str]] = {}
    for lock in LOCKS:
        for name, version in pins(lock).items():
            versions.setdefault(name, set()).add(version)
    assert not {name: found for name, found in versions.items() if len(found) > 1}


def test_the_set_up_installs_nothing_without_a_hash():
    text = (ROOT / ".ci/setup").read_text()
    installs = re.findall(r"^ *install '[^']*' (.*)$", text, re.MULTILINE)
    fetched = [one for one in installs if "--editable ." not in one]
    assert len(fetched) == 2
    assert all(one.startswith("--require-hashes ") for one in fetched)
    (own,) = (one for one in installs if "--editable ." in one)
    assert own == "--no-deps --no-build-isolation --editable .", "the build would fetch its tools"
    assert text.count("pip install") == 1, "what `install` calls"


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


def test_the_tool_that_builds_the_image_can_be_chosen(tmp_path: Path):
    """`make release` pushes what buildah has, and docker's images are not there."""
    for name in ("docker", "buildah"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name}\n")
        (tmp_path / name).chmod(0o755)
    base = f"debian:bookworm-slim@sha256:{'0' * 64}"
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["make", "--no-print-directory", "image", "TOOL=buildah"],
        cwd=ROOT,
        env=os.environ | {"BASE": base, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "buildah\n"
