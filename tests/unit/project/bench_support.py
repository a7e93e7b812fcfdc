"""Imports of what is in benchmarks/, whose modules have names of their own there."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@contextlib.contextmanager
def bench_module(name: str) -> Iterator[ModuleType]:
    """One of its modules. Those of tests/ with the same names (node, kubelet) are put back."""
    names = {path.stem for path in BENCHMARKS.glob("*.py")} - {"__main__"}
    others = {each: sys.modules.pop(each) for each in names & sys.modules.keys()}
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
        for each in names:
            sys.modules.pop(each, None)
        sys.modules.update(others)
