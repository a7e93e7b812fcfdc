"""What the fuzzers begin with, and what they once found, in every run of the tests.

Without atheris: on each input each reader gives a value or its documented error.
"""

import importlib
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"


@pytest.fixture(scope="module")
def targets():
    """The fuzzers' modules, on the path for as long as they are imported."""
    sys.path.insert(0, str(FUZZ))
    try:
        return importlib.import_module("targets").TARGETS
    finally:
        sys.path.remove(str(FUZZ))


def inputs(name: str) -> list[bytes]:
    """A target's corpus and what was found with it: one input a line, in hex."""
    files = [FUZZ / folder / f"{name}.hex" for folder in ("corpus", "found")]
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return [bytes.fromhex(line) for line in lines]


NAMES = sorted({path.stem for path in FUZZ.glob("*/*.hex")})


def test_every_target_has_a_corpus_and_every_corpus_a_target(targets):
    assert sorted(targets) == NAMES
    assert all(inputs(name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_input_gives_a_value_or_the_documented_error(targets, name):
    target = targets[name]
    for data in (b"", *target.seeds, *inputs(name)):
        target.run(data)
