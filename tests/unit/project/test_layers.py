"""The rules of the layout hold: who imports whom, and who may read the environment."""

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "fpga_plugin"
# Settings; whether the terminal wants colours; where the state directory is.
MAY_READ_THE_ENVIRONMENT = {"commands", "demo", "probe"}


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def layers() -> list[set[str]]:
    """Modules of each layer, the top one first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contract = next(one for one in settings["contracts"] if one["type"] == "layers")
    return [
        {module.strip().removeprefix("fpga_plugin.") for module in layer.split("|")}
        for layer in contract["layers"]
    ]


def test_imports_go_one_way():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ids.py", "import fpga_plugin.errors"),
        ("hardware/model.py", "from fpga_plugin.allocation import names"),
        ("allocation/lists.py", "import fpga_plugin.kubernetes.messages"),
        ("host/locks.py", "import fpga_plugin.settings.settings"),
    ],
)
def test_an_import_the_wrong_way_is_found(module, line, tmp_path):
    copy = tmp_path / "fpga_plugin"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (copy / module).open("a") as file:
        file.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout


def test_the_picture_of_the_layers_is_the_contract():
    text = (ROOT / "docs" / "architecture.md").read_text()
    picture = text.partition("## The layers")[2].split("```")[1].strip()
    shown = [set(line.split("  ")[0].split(" · ")) for line in picture.splitlines()]
    assert shown == layers()


def test_every_module_has_its_layer():
    there = {
        path.stem if path.suffix else path.name
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    } - {"__init__"}
    assert there == {module.partition(".")[0] for module in set().union(*layers())}


def reads_of_the_environment(source: str) -> list[int]:
    """Lines that use os.environ, os.getenv and their like."""
    names = {"environ", "environb", "getenv", "getenvb"}
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names})
    ]


def test_only_commands_and_the_demo_read_the_environment():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        # The generator of messages is a tool of the developer's: the plugin never imports it.
        if inside.parts[0].removesuffix(".py") in MAY_READ_THE_ENVIRONMENT:
            continue
        if inside == Path("kubernetes/generate.py"):
            continue
        found += [f"{inside}:{line}" for line in reads_of_the_environment(path.read_text())]
    assert found == []


def test_reads_of_the_environment_are_seen():
    for line in (
        "import os; os.environ['A']",
        "import os; os.getenv('A')",
        "from os import environ as e",
    ):
        assert reads_of_the_environment(line) == [1]
    assert reads_of_the_environment("def f(environ): return environ['A']") == []
