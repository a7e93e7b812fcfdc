"""Fixtures that many of the fast tests share, and the way to what a test of another room has."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# pytest adds the room of each test that it collects: alone, a test finds only its own room's.
sys.path += sorted(str(room) for room in Path(__file__).parent.glob("[a-z]*/"))


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Makes scenes (`ledger_scene.Scene`), of which the last one's threads run."""
    from ledger_scene import scenes  # not where no test of these is collected

    with scenes() as make:
        yield make
