"""The tests that the kernel tier chooses and leaves out by name are there under these names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[2]


def assigned(path: Path, name: str) -> ast.expr:
    """The value of a module's constant, without importing what only the guest can."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    raise AssertionError(f"{path} has no {name}")


def named_in(*paths: Path) -> Iterator[str]:
    for path in paths:
        yield from re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)


def test_what_is_left_out_in_the_guest_begins_like_a_test_that_is_there():
    left_out = ast.literal_eval(assigned(TESTS / "kernel/guest/on_real_cards.py", "NOT_HERE"))
    known = tuple(
        named_in(*TESTS.glob("integration/test_*.py"), *TESTS.glob("kernel/guest/test_*.py"))
    )
    assert [name for name in left_out if not any(one.startswith(name) for one in known)] == []


def test_what_is_chosen_of_a_file_is_in_it():
    chosen = ast.literal_eval(assigned(TESTS / "kernel/__main__.py", "_CHOSEN"))
    missing = {
        file: set(names) - set(named_in(TESTS / "integration" / file))
        for file, names in chosen.items()
    }
    assert {file: names for file, names in missing.items() if names} == {}
