"""The image's packages are those that pyproject.toml names, each pinned with its hashes."""

import re
import tomllib
from pathlib import Path

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


def test_the_dockerfile_names_a_release_and_no_registry():
    text = (ROOT / "Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"[a-z]+:[a-z0-9.-]+", base)
    assert "latest" not in base
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}", "scratch"]
    assert "--require-hashes" in text
