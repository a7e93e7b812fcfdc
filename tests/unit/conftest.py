"""Fixtures that many of the fast tests share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Makes scenes (`ledger_scene.Scene`), of which the last one's threads run."""
    from ledger_scene import scenes  # not where no test of these is collected

    with scenes() as make:
        yield make
