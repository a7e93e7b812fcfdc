"""docs/messages.md explains each warning and error whose line does not explain itself."""

import ast
import re
from pathlib import Path

import pytest

import fpga_plugin

PACKAGE = Path(fpga_plugin.__file__).parent
ROOT = PACKAGE.parent
PAGE = "docs/messages.md"
DEFECTS = "\n## Defects of the plugin\n"

LEVELS = {"info", "warning", "error", "exception"}
SERIOUS = LEVELS - {"info"}
EXPLAINS = {"hint", "error", "reason", "message", "why"}
"""Values of a line that say what happened and what to do."""

LEFT_OUT = {
    "api/messages": "generated",
    "demo": "logs nothing of its own",
    "hardware/simulated": "no operator of a cluster meets simulated cards",
}

NOT_LITERAL = {
    ("build.py", "warning"): "unknown setting ... has no effect",
}
"""Variables that are logged: (file, name) and the message as it is documented."""

ALL_IS_WELL = {("deviceplugin/servicer.py", "write")}
"""Functions that are a logger's at level info or below: (file, name)."""


def modules() -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(tuple(LEFT_OUT))
    ]


def logger_name(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(attr=name):
            return name
    return ""


def explains_itself(call: ast.Call) -> bool:
    return any(keyword.arg in EXPLAINS for keyword in call.keywords)


def messages(path: Path, *, unexplained: bool = False) -> dict[str, str]:
    """Each message that a module logs at the usual level or above, and where.

    Args:
        path: the module.
        unexplained: of these the warnings and errors that do not explain themselves.
    """
    found: dict[str, str] = {}
    relative = path.relative_to(PACKAGE).as_posix()

    def add(node: ast.expr) -> None:
        where = f"{relative}:{node.lineno}"
        match node:
            case ast.Constant(str(text)):
                found[text] = where
            case ast.IfExp(body=one, orelse=other):
                add(one)
                add(other)
            case ast.Name(name):
                found[NOT_LITERAL[relative, name]] = where
            case _:
                pytest.fail(f"{where}: a message is a literal, so that it can be looked up")

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(value, level)) if level in LEVELS:
                explained = level not in SERIOUS or explains_itself(node)
                if logger_name(value).strip("_") == "log" and not (unexplained and explained):
                    add(node.args[0])
            case ast.Call(func=ast.Name(name)) if (relative, name) in ALL_IS_WELL:
                if not unexplained:
                    add(node.args[0])
    return found


def logged(*, unexplained: bool = False) -> dict[str, str]:
    return {
        text: where
        for path in modules()
        for text, where in messages(path, unexplained=unexplained).items()
    }


def documented() -> tuple[set[str], str]:
    """The messages in the tables and of the defects, and the text of the page."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    names = {name for cell in cells for name in re.findall("`([^`]+)`", cell)}
    return names | defects(text), text


def defects(text: str) -> set[str]:
    """The messages that have a traceback."""
    assert text.count(DEFECTS) == 1
    section = text.partition(DEFECTS)[2].partition("\n## ")[0]
    return {" ".join(name.split()) for name in re.findall("`([^`]+)`", section)} - {"exception"}


def test_each_warning_and_error_that_does_not_explain_itself_is_in_the_operators_table():
    documents = documented()[0]
    needed = logged(unexplained=True)
    assert len(needed) > 25
    missing = {text: where for text, where in needed.items() if text not in documents}
    assert not missing, f"let the line say why, or explain it in {PAGE}"


def test_the_operators_table_has_no_message_that_is_not_logged():
    assert documented()[0] - logged().keys() == set()


def test_no_row_is_there_twice():
    _, text = documented()
    names = re.findall(r"^\| (`[^|]+) \|", text, flags=re.MULTILINE)
    assert len(names) == len(set(names)) > 30


def test_every_exception_is_called_a_defect():
    """What has a traceback is no news for an operator to act on."""
    told = defects(documented()[1])
    tracebacks = {
        node.args[0].value
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "exception"
        and logger_name(node.func.value).strip("_") == "log"
        and isinstance(node.args[0], ast.Constant)
    }
    # These name the work that failed, with a traceback where the reason may be a defect.
    named = {
        "preparation failed",
        "scan failed",
        "a bitstream could not be examined",
        "watching files failed, and is tried again",
        "the policy file cannot be followed",
    }
    assert tracebacks - told == named
