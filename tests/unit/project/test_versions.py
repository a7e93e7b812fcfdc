"""pyproject.toml has the version. Whatever else names it says the same."""

import re
import tomllib

import pytest
from repository import ROOT, texts

VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

PLACES = {
    "the package": r'^__version__ = "([^"]+)"',
    "the chart": r"^(?:version|appVersion): (\d+\.\S*)",
    "labels": r'app\.kubernetes\.io/version: "?(\d[^"\s]*)',
    "the kustomization's example": r"newTag: (\d[^\s}]*)",
    "the image": r"\bfpga-plugin:(\d[\w.+-]*)",
}


def named(pattern: str) -> dict[str, str]:
    """Each place outside of the tests where a version is named, and the version."""
    return {
        f"{path}:{text.count(chr(10), 0, found.start()) + 1}": found[1]
        for path, text in texts()
        if not path.startswith("tests/") and path != "CHANGELOG.md"
        for found in re.finditer(pattern, text, re.MULTILINE)
    }


@pytest.mark.parametrize("place", PLACES)
def test_every_place_that_names_a_version_names_pyprojects(place):
    found = named(PLACES[place])
    assert found
    wrong = {where: version for where, version in found.items() if version != VERSION}
    assert not wrong, f"pyproject.toml has {VERSION}"


def test_the_changelog_begins_with_what_is_unreleased_or_with_this_version():
    sections = re.findall(r"(?m)^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text())
    assert sections[0] in {"Unreleased", VERSION}
