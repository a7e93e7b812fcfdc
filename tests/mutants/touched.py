"""Which test touches which lines of the core, and how long it takes.

Measured in a process of its own for each file of tests, and kept in .cache/mutants until the file
or the plugin changes. A test that fails there is not used: it could not tell a mutant apart.
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
from core import PACKAGE, ROOT, WORK, digest

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


def place(test_file: Path, shared: str) -> Path:
    """Where the touches of a file of tests are kept: another file if it, or the plugin, changed."""
    name = digest(test_file.read_bytes(), shared)
    return WORK / "touched" / f"{test_file.stem}-{name}.json"


def shared() -> str:
    """The plugin, and what tests share: all that a test file does not say itself."""
    files = [*PACKAGE.rglob("*.py")]
    for pattern in HELPERS:
        files += [
            path
            for path in (ROOT / "tests").glob(pattern)
            if path.is_file() and not path.name.startswith("test_")
        ]
    return digest(*(path.read_bytes() for path in sorted(files)))


def write(path: Path, touches: Iterable[Touch]) -> None:
    rows = [
        [each.test, each.seconds, {file: sorted(lines) for file, lines in each.lines.items()}]
        for each in touches
    ]
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(rows))
    fresh.rename(path)


def read(path: Path) -> list[Touch]:
    return [
        Touch(test, seconds, {file: frozenset(numbers) for file, numbers in lines.items()})
        for test, seconds, lines in json.loads(path.read_text())
    ]
