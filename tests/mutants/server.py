"""A pytest that has collected the fast tests, and forks a process for each mutant.

To collect them takes ten seconds, a fork ten milliseconds. The child puts the mutated function in
the place of the one that is loaded, whoever imported it; runs the tests that touch the changed
lines until one fails; and ends. What a test starts as a program of its own is not mutated.
"""

import contextlib
import gc
import importlib
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import TypeVar

import pytest
import touched
from core import ROOT, Result, core_files, digest, keep
from mutations import Mutant, mutated
from touched import Touch

SURVIVED, KILLED, IMPOSSIBLE, BROKEN = range(4)

GRACE = 15
"""Seconds that a test may take beyond ten times what it took before."""

Run = Callable[["Child"], int]
T = TypeVar("T")


class Child:
    """A process that runs tests: what it is there, and what its parent sees of it."""

    def __init__(self, run: Run, limits: list[float]) -> None:
        self.folder = tempfile.mkdtemp(prefix="mutant-")
        self.output, self._input = os.pipe()
        self._limits = limits
        self._text = ""
        self.late = False
        self.pid = os.fork()
        if self.pid == 0:
            self._live(run)
        os.close(self._input)
        self._deadline = time.monotonic() + GRACE

    def _live(self, run: Run) -> None:
        try:
            os.setpgid(0, 0)
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nothing, descriptor)
            code = run(self)
        except BaseException:  # noqa: BLE001 - nothing of the child returns into its parent's code
            self.say(traceback.format_exc())
            code = BROKEN
        self.say("end")
        os._exit(code)

    def say(self, text: str) -> None:
        os.write(self._input, f"{text}\n".encode())

    def read(self) -> bool:
        """Take what it says; returns whether it goes on."""
        data = os.read(self.output, 1 << 16)
        self._text += data.decode(errors="replace")
        if self._text.endswith("end\n"):  # what it started may still hold the pipe
            return False
        begun = self._text.count("begin\n")
        limit = self._limits[begun - 1] if begun else 0
        self._deadline = time.monotonic() + GRACE + 10 * limit
        return bool(data)

    def is_late(self) -> bool:
        self.late = time.monotonic() > self._deadline
        return self.late

    def end(self) -> tuple[int, str]:
        """End it and all that it started: its exit code, and the test that failed or was late."""
        if not self.late:
            _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.late:
            os.waitpid(self.pid, 0)
            status = KILLED << 8
        os.close(self.output)
        shutil.rmtree(self.folder, ignore_errors=True)
        lines = self._text.splitlines()
        failed = [line.removeprefix("fail ") for line in lines if line.startswith("fail ")]
        begun = [line.removeprefix("test ") for line in lines if line.startswith("test ")]
        code = os.waitstatus_to_exitcode(status)
        if code == BROKEN:
            sys.__stderr__.write(self._text)  # type: ignore[union-attr]
        if code not in {SURVIVED, IMPOSSIBLE, BROKEN}:  # by a signal, too
            return KILLED, (failed or begun[-1:] or [""])[0]
        return code, ""


class Server:
    """The pytest plugin that takes the place of its loop over the tests."""

    def __init__(
        self, mutants: list[Mutant], before: dict[str, Result], *, minutes: float, processes: int
    ) -> None:
        self._mutants = mutants
        self._before = before
        self._minutes = minutes
        self._processes = processes
        self._files = core_files()  # all, so that what tests touch is measured once
        self._sources = {file: (ROOT / file).read_text() for file in self._files}
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        self._killers: dict[tuple[str, str], list[str]] = defaultdict(list)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        self._find_functions()
        gc.collect()
        gc.freeze()  # what is there already stays shared with the children
        self._touches = self._measured()
        self._try_all()
        return True

    def _find_functions(self) -> None:
        for file in self._files:
            name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            importlib.import_module(name)
        paths = {str(ROOT / file): file for file in self._files}
        for thing in gc.get_objects():
            if type(thing) is FunctionType and thing.__code__.co_filename in paths:
                code = thing.__code__
                key = (paths[code.co_filename], code.co_qualname, code.co_firstlineno)
                self._functions[key].append(thing)

    # what each test touches

    def _measured(self) -> list[Touch]:
        """What all tests touch; runs those of which it is not known."""
        begin = time.monotonic()
        by_file: dict[Path, list[pytest.Item]] = defaultdict(list)
        for item in self._items.values():
            by_file[item.path].append(item)
        known = {path: touched.read(path) for path in by_file}
        unknown = sum(touches is None for touches in known.values())

        def children() -> Iterator[tuple[Path, Child]]:
            for path, touches in known.items():
                if touches is None:
                    items = by_file[path]
                    yield path, Child(self._measuring(items, path), [60.0] * len(items))

        for path, child in self._side_by_side(children()):
            child.end()
            known[path] = touched.read(path)
            say(f"measured {path.name}" + (": FAILED" if known[path] is None else ""))
        say(f"measured {unknown} files of tests in {time.monotonic() - begin:.0f} s")
        return [each for touches in known.values() for each in touches or ()]

    def _measuring(self, items: list[pytest.Item], path: Path) -> Run:
        def run(child: Child) -> int:
            tracer = touched.Tracer(self._files)
            self._session.config.pluginmanager.register(tracer)
            self._run(items, child, stop=False)
            touched.write(path, tracer.touches)
            return SURVIVED

        return run

    # the mutants

    def _try_all(self) -> None:
        begin, done = time.monotonic(), 0
        before = _computed()  # by what measured
        self._end = begin + 60 * self._minutes
        for result, child in self._side_by_side(self._children()):
            code, by = child.end()
            if code == BROKEN:
                say(f"BROKEN   {result.key}")
                continue
            what = "slow" if child.late else ["survived", "killed", "impossible"][code]
            if by:
                file, function, _ = result.key.split("::", 2)
                self._killers[file, function].insert(0, by)
            keep(Result(result.key, result.source, what, by, result.tests))
            done += 1
            if what == "survived":
                say(f"survived {result.key}")
            if done % 100 == 0:
                say(f"{done} mutants in {time.monotonic() - begin:.0f} s")
        cost = _computed() - before
        say(f"tried {done} mutants in {time.monotonic() - begin:.0f} s, {cost:.0f} s of computing")

    def _children(self) -> Iterator[tuple[Result, Child]]:
        """A process for each mutant whose result is not known."""
        paths = {item.path for item in self._items.values()}
        files = {path: digest(path.read_bytes()) for path in paths}
        for mutant in self._mutants:
            if time.monotonic() > self._end:
                say("the time is up: the same command goes on from here")
                return
            _, first, last = mutant.outermost
            lines = self._sources[mutant.file].splitlines()[first - 1 : last]
            tests = self._tests(mutant)
            kind = digest(
                *sorted(f"{each.test} {files[self._items[each.test].path]}" for each in tests)
            )
            result = Result(mutant.key, digest(*lines), "untouched", tests=kind)
            last_time = self._before.get(mutant.key)
            if last_time and last_time.still_holds(result):
                continue
            if tests:
                items = [self._items[each.test] for each in tests]
                yield result, Child(self._trying(mutant, items), [each.seconds for each in tests])
            else:
                keep(result)

    def _tests(self, mutant: Mutant) -> list[Touch]:
        """Those that touch it: first who killed others of the function, then the fast ones."""
        lines = range(mutant.lines[0], mutant.lines[1] + 1)
        killers = self._killers[mutant.file, mutant.function][:5]
        found = [
            each
            for each in self._touches
            if each.test in self._items
            and not each.lines.get(mutant.file, frozenset()).isdisjoint(lines)
        ]
        return sorted(found, key=lambda each: (each.test not in killers, each.seconds))

    def _trying(self, mutant: Mutant, items: list[pytest.Item]) -> Run:
        def run(child: Child) -> int:
            if not self._apply(mutant):
                return IMPOSSIBLE
            return KILLED if self._run(items, child, stop=True) else SURVIVED

        return run

    def _apply(self, mutant: Mutant) -> bool:
        """Put the mutant in the place of the function that is loaded."""
        tree = mutated(self._sources[mutant.file], mutant)
        module = compile(tree, str(ROOT / mutant.file), "exec", dont_inherit=True)
        name, first, _ = mutant.outermost
        code = next(
            each
            for each in _codes(module)
            if each.co_qualname == name and each.co_firstlineno == first
        )
        functions = self._functions[mutant.file, name, first]
        try:
            for function in functions:
                function.__code__ = code
        except ValueError:  # it has other free variables
            return False
        return bool(functions)

    # processes

    def _side_by_side(self, children: Iterator[tuple[T, Child]]) -> Iterator[tuple[T, Child]]:
        """Those that ended, or took too long."""
        running: dict[int, tuple[T, Child]] = {}
        more = True
        while more or running:
            while more and len(running) < self._processes:
                if (following := next(children, None)) is None:
                    more = False
                else:
                    running[following[1].output] = following
            ready, _, _ = select.select(list(running), [], [], 1)
            for output, (what, child) in list(running.items()):
                if (output in ready and not child.read()) or child.is_late():
                    del running[output]
                    yield what, child

    def _run(self, items: list[pytest.Item], child: Child, *, stop: bool) -> bool:
        """In the child: run tests; returns whether one failed."""
        config = self._session.config
        config._tmp_path_factory._basetemp = Path(child.folder)  # type: ignore[attr-defined]
        reporter = _Reporter(child)
        config.pluginmanager.register(reporter)
        for item, following in zip(items, [*items[1:], None], strict=True):
            child.say(f"test {item.nodeid}\nbegin")
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if stop and reporter.failed:
                break
        return reporter.failed


class _Reporter:
    def __init__(self, child: Child) -> None:
        self._child = child
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._child.say(f"fail {report.nodeid}")
            self.failed = True


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _computed() -> float:
    """Seconds of a processor that the children which have ended took."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime
