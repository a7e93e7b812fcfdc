"""What `make mutants` changes, and that the list of equivalent mutants fits the code.

The tool is tests/mutants.
"""

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from repository import module

TOOL = Path(__file__).parents[2] / "mutants"


mutations, core = module("mutants", "mutations"), module("mutants", "core")


def changes(body: str, returns: str = "None") -> list[str]:
    source = f"def f(a, b) -> {returns}:\n{textwrap.indent(body, '    ')}\n"
    return [each.text for each in mutations.mutants(source, "f.py")]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a.write(b)", ["a.write(b) -> pass"]),
        ("a.b = 1.5", ["a.b = 1.5 -> pass"]),
        ("a[b] += 1", ["a[b] += 1 -> pass", "1 -> 2"]),
        ("raise E('text')", ["raise E('text') -> pass"]),
        ("if a < b:\n    ...", ["if a < b -> True", "if a < b -> False", "a < b -> a <= b"]),
        ("if not a:\n    ...", ["if not a -> True", "if not a -> False"]),
        ("while a.more:\n    ...", ["while a.more -> False"]),
        (
            "c = a and not b",
            ["a and (not b) -> a or not b", "a and (not b) -> a", "a and (not b) -> not b"],
        ),
        ("c = a in b", ["a in b -> a not in b"]),
        ("c = a - b", ["a - b -> a + b"]),
        (
            "c = any(x for x in a if x)",
            [
                "any((x for x in a if x)) -> all((x for x in a if x))",
                "(x for x in a if x) -> (x for x in a)",
            ],
        ),
        ("with a.lock:\n    b.c = 2.5", ["with a.lock: -> its body", "b.c = 2.5 -> pass"]),
        ("c = a if b else 2.5", ["a if b else 2.5 -> a", "a if b else 2.5 -> 2.5"]),
        ("log.warning('text', a=1)", []),
        ("c = f'{a + 1}'", []),
        ("assert a", []),
    ],
)
def test_a_mistake_that_somebody_may_make_is_a_mutant(body, expected):
    assert changes(body) == expected


def test_what_a_function_returns_is_changed_where_its_type_allows_another():
    assert changes("return a.b()", "bool") == ["return a.b() -> return not a.b()"]
    assert changes("return a.b()", "int | None") == ["return a.b() -> return None"]
    assert changes("return a.b()", "int") == []


def test_a_mutant_is_made_again_by_its_name_though_the_code_around_it_moved():
    source = "class C:\n    @property\n    def p(self) -> int:\n        return self.a + 1\n"
    (first, _), (moved, _) = (
        mutations.mutants(text, "c.py") for text in (source, "import os\n\n" + source)
    )
    assert first.key == moved.key == "c.py::C.p::self.a + 1 -> self.a - 1"
    assert first.outermost == ("C.p", 2, 4)
    assert "return self.a - 1" in ast.unparse(mutations.mutated(source, first))


def test_the_same_change_twice_in_a_function_has_two_names():
    keys = [each.key for each in mutations.mutants("def f(a):\n    a()\n    a()\n", "f.py")]
    assert keys == ["f.py::f::a() -> pass", "f.py::f::a() -> pass #1"]


def test_each_judgement_is_about_the_core_and_has_a_reason():
    judged = core.equivalent()
    assert {key.split("::")[0] for key in judged} <= set(core.core_files())
    assert all(len(why) > 20 for why in judged.values())


def test_a_judgement_about_what_is_no_longer_there_is_told(monkeypatch):
    there = next(iter(core.chosen(["policy"], ["Policy.judge"])["policy"])).key
    assert core.stale({there: "so"}) == []
    assert core.stale({there + " once": "so"}) == [there + " once"]


@pytest.mark.parametrize(("there", "code"), [(True, 0), (False, 1)])
def test_a_judgement_about_what_is_no_longer_there_fails(there, code, tmp_path):
    key = next(iter(core.chosen(["policy"], ["Policy.judge"])["policy"])).key
    judged = {key if there else f"{key} once": "a reason that is long enough"}
    run = (
        f"import sys, runpy; sys.path.insert(0, {str(TOOL)!r}); import core\n"
        f"core.equivalent = lambda: {judged!r}\n"
        "sys.argv = ['mutants', '--table', 'policy']\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')"
    )
    environment = {**os.environ, "MUTANTS_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", run], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert ("judged, and not there any more: " in done.stdout) != there


DOUBLES = "def test_it(): assert double(2) == 4"
UNLUCKY = """
def test_it():  # fails the first time
    from pathlib import Path
    been = Path("been")
    assert been.exists() or been.touch()
"""
NO_SET_UP = """
import pytest
@pytest.fixture
def doubled(): assert double(2) == 4
@pytest.mark.parametrize("name", ["a name - of two"])
def test_it(doubled, name): pass
"""
KILLED_PYTEST = "import os; os.kill(os.getpid(), 9)"
TIMES, NEVER = "a * 2 -> a // 2", "if a > 2 ** 40 -> False"
IT = "tests/integration/test_it.py::test_it"


@pytest.fixture
def try_one(tmp_path, monkeypatch):
    """Tries a mutant by one integration test; returns what is noted, twice."""
    second = module("mutants", "second")
    source = "def double(a):\n    if a > 2**40:\n        return 0\n    return a * 2\n"
    kept = []
    monkeypatch.setattr(second, "ROOT", tmp_path / "root")
    monkeypatch.setattr(second, "TREE", tmp_path / "tree")
    monkeypatch.setattr(second, "WORKERS", 0)
    monkeypatch.setattr(second, "keep", kept.append)

    def try_one(change, test):
        for top in ("root", "tree"):
            (tmp_path / top / "fpga_plugin").mkdir(parents=True)
            (tmp_path / top / "fpga_plugin" / "__init__.py").touch()
            (tmp_path / top / "fpga_plugin" / "thing.py").write_text(source)
            (tmp_path / top / "tests" / "integration").mkdir(parents=True)
            file = tmp_path / top / "tests" / "integration" / "test_it.py"
            file.write_text(f"from fpga_plugin.thing import double\n{test}\n")
        mutant = next(
            each
            for each in mutations.mutants(source, "fpga_plugin/thing.py")
            if each.key.endswith(change)
        )
        last = core.Result(mutant.key, "source", "survived", "", "tests")
        for _ in range(2):
            second.try_one(mutant, ["tests/integration/test_it.py"], last, 300)
            assert (tmp_path / "tree" / "fpga_plugin" / "thing.py").read_text() == source
            last = kept[-1] if kept else last
        return kept, last

    return try_one


@pytest.mark.parametrize(
    ("change", "test", "what", "by"),
    [
        (TIMES, DOUBLES, "killed", IT),
        (TIMES, NO_SET_UP, "killed", f"{IT}[a name - of two]"),
        (NEVER, DOUBLES, "survived", ""),
    ],
    ids=["a test fails", "a fixture fails", "none fails"],
)
def test_what_the_fast_tests_leave_alive_is_tried_in_a_copy_of_the_repository(
    try_one, change, test, what, by
):
    kept, last = try_one(change, test)
    assert kept == [last], "these tests do not try it again"
    assert (last.what, last.by) == (what, by)
    assert last.still_holds(last), "nor does a run of the fast ones"


def test_a_test_that_fails_by_the_machines_doing_has_noticed_nothing(try_one):
    kept, last = try_one(NEVER, UNLUCKY)
    assert kept == [last], "the second try is the one that counts"
    assert last.what == "survived"


def test_a_run_that_somebody_ends_has_noticed_nothing(try_one):
    with pytest.raises(RuntimeError, match="pytest was ended"):
        try_one(NEVER, KILLED_PYTEST)


@pytest.mark.long
def test_a_mutant_is_tried_by_the_tests_that_touch_it(tmp_path):
    command = [sys.executable, str(TOOL), "policy", "--only", "Policy.judge"]
    command += ["--tests", "tests/unit/policy/test_policy.py", "--processes", "1"]
    environment = {**os.environ, "MUTANTS_DIR": str(tmp_path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert results, done.stdout + done.stderr
    assert {each["what"] for each in results} == {"killed"}, done.stdout
