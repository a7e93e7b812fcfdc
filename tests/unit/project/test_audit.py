"""`make audit` never calls something checked that was not."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PINS = {"anyio": "4.16.0", "h11": "0.16.0"}
BAD, UNKNOWN = 1, 3


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "deploy/image/audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checked(name: str, *ids: str) -> dict[str, Any]:
    """As pip-audit 2.10 writes a package that it asked about."""
    vulns = [{"id": each, "fix_versions": ["9"], "aliases": [], "description": ""} for each in ids]
    return {"name": name, "version": PINS[name], "vulns": vulns}


def skipped(name: str) -> dict[str, Any]:
    return {"name": name, "skip_reason": f"Dependency not found and could not be audited: {name}"}


def test_packages_without_a_known_vulnerability_are_good(audit: ModuleType):
    verdict = audit.judge_vulnerabilities({"dependencies": list(map(checked, PINS))}, PINS)
    assert (verdict.code, verdict.lines) == (0, ("2 packages, no known vulnerability",))


@pytest.mark.parametrize("dependencies", [[skipped("anyio"), checked("h11")], [checked("h11")], []])
def test_packages_that_the_index_says_nothing_of_are_no_success(
    audit: ModuleType, dependencies: list[dict[str, Any]]
):
    verdict = audit.judge_vulnerabilities({"dependencies": dependencies}, PINS)
    assert verdict.code == UNKNOWN
    assert "anyio" in verdict.lines[0]


def test_a_known_vulnerability_is_named_and_outweighs_what_is_not_known(audit: ModuleType):
    report = {"dependencies": [skipped("anyio"), checked("h11", "GHSA-x")]}
    verdict = audit.judge_vulnerabilities(report, PINS)
    assert verdict.code == BAD
    assert verdict.lines[0] == "known vulnerability: h11 0.16.0: GHSA-x, fixed in 9"


def component(name: str, version: str, *, hashed: bool = True) -> dict[str, Any]:
    hashes = [{"alg": "SHA-256", "content": "00"}] if hashed else []
    return {"name": name, "version": version, "externalReferences": [{"hashes": hashes}]}


@pytest.mark.parametrize(
    ("components", "code"),
    [
        ([component("anyio", "4.16.0"), component("h11", "0.16.0")], 0),
        ([component("anyio", "4.16.0"), component("h11", "0.15.0")], BAD),
        ([component("anyio", "4.16.0"), component("h11", "0.16.0", hashed=False)], BAD),
        ([component("anyio", "4.16.0")], BAD),
        ([], BAD),
    ],
)
def test_a_bill_of_materials_has_every_package_with_version_and_hashes(
    audit: ModuleType, components: list[dict[str, Any]], code: int
):
    assert audit.judge_sbom({"components": components}, PINS).code == code


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((0, UNKNOWN), UNKNOWN), ((UNKNOWN, BAD), BAD)]
)
def test_the_worst_of_all_is_the_exit_code(audit: ModuleType, codes: tuple[int, ...], code: int):
    assert audit.worst(iter(codes)) == code


def test_every_pin_of_the_lock_is_looked_at(audit: ModuleType):
    lock = (ROOT / "deploy/image/requirements.lock").read_text()
    assert len(audit.pins(lock)) == len(re.findall(r"^\S", lock, re.MULTILINE))


def test_packages_of_other_systems_are_not_asked_about(audit: ModuleType):
    lock = """\
anyio==4.16.0 ; sys_platform != 'emscripten' \\
    --hash=sha256:00
h11==0.16.0 \\
    --hash=sha256:00
winsomething==1 ; sys_platform == 'win32' \\
    --hash=sha256:00
"""
    assert audit.installed(lock) == PINS
    assert "winsomething" in audit.pins(lock)
