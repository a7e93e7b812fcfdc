"""Which test touches which lines of the core, and how long it takes.

Measured in a process of its own for each file of tests, and kept in .cache/mutants until the file
changes, or what it shares with others, or what it touches. A test that
fails there is not used: it could not say a mutant apart.
"""

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from core import ROOT, WORK, digest

HELPERS = ("conftest.py", "unit/*_*.py", "doubles/*")
"""Files that tests of other files import, among others."""


@dataclasses.dataclass(frozen=True)
class Touch:
    """What one test does."""

    test: str
    seconds: float
    lines: Mapping[str, frozenset[int]]
    """By file."""


class Tracer:
    """A plugin for pytest: notes the lines that each test runs, in all of its threads."""

    def __init__(self, files: Iterable[str]) -> None:
        self._files = {str(ROOT / file): file for file in files}
        self._seen: set[tuple[str, int]] = set()
        self._failed = False
        self.touches: list[Touch] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._seen, self._failed = set(), False
        begin = time.monotonic()
        threading.settrace(self._call)
        sys.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            lines: dict[str, set[int]] = {}
            for path, line in self._seen:
                lines.setdefault(self._files[path], set()).add(line)
            if not self._failed and lines:
                seconds = time.monotonic() - begin
                frozen = {file: frozenset(numbers) for file, numbers in lines.items()}
                self.touches.append(Touch(item.nodeid, seconds, frozen))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.outcome != "passed"

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        del event, arg
        if frame.f_code.co_filename not in self._files:
            return None
        self._seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        del event, arg
        self._seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def place(test_file: Path) -> Path:
    """Where the touches of a file of tests are kept."""
    return WORK / "touched" / f"{test_file.stem}.json"


def write(test_file: Path, touches: Iterable[Touch]) -> None:
    rows = [
        [each.test, each.seconds, {file: sorted(lines) for file, lines in each.lines.items()}]
        for each in touches
    ]
    files = {file for _, _, lines in rows for file in lines}
    fresh = place(test_file).with_suffix(".new")
    fresh.write_text(json.dumps({"of": _state(test_file, files), "touches": rows}))
    fresh.rename(place(test_file))


def read(test_file: Path) -> list[Touch] | None:
    """None: not known, or the tests, or the files of the core that they touch, have changed."""
    try:
        kept = json.loads(place(test_file).read_text())
    except FileNotFoundError:
        return None
    files = {file for _, _, lines in kept["touches"] for file in lines}
    if kept["of"] != _state(test_file, files):
        return None
    return [
        Touch(test, seconds, {file: frozenset(numbers) for file, numbers in lines.items()})
        for test, seconds, lines in kept["touches"]
    ]


def _state(test_file: Path, files: Iterable[str]) -> str:
    shared = [
        path
        for pattern in HELPERS
        for path in (ROOT / "tests").glob(pattern)
        if path.is_file() and not path.name.startswith("test_")
    ]
    paths = [test_file, *shared, *(ROOT / file for file in files)]
    return digest(*(path.read_bytes() if path.exists() else b"" for path in sorted(paths)))
