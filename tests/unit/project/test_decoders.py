"""msgspec learns a type when it first decodes one, and two threads that do so at once crash it.

Seen with msgspec 0.22.0 and Python 3.11: twelve PreStarts at once, each reading the checkpoint
in a thread, ended the daemon with SIGSEGV; one in twenty starts, so no test would see it reliably.
"""

import ast
from pathlib import Path

import pytest

import fpga_plugin

SOURCES = sorted(Path(fpga_plugin.__file__).parent.rglob("*.py"))


def decodes_a_type(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"msgspec.json.decode", "json.decode", "msgspec.yaml.decode"}
        and any(keyword.arg == "type" for keyword in node.keywords)
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_types_are_decoded_by_decoders_that_were_made_at_import(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert [ast.unparse(node) for node in ast.walk(tree) if decodes_a_type(node)] == []
