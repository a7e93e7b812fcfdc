"""Names lead somewhere: a test lies where its module's does; a class has a name of its own."""

import ast
from pathlib import Path

import pytest
from repository import ROOT

PACKAGE, UNIT = ROOT / "fpga_plugin", ROOT / "tests" / "unit"
FILES = sorted(UNIT.rglob("test_*.py"))


def leads(file: Path) -> bool:
    """Whether its name begins with that of its folder, or of a module or package in that one."""
    folder = PACKAGE / file.parent.relative_to(UNIT)
    inside = folder.glob("*.py" if folder == PACKAGE else "**/*")
    found = [path for path in (folder, *inside) if path.suffix == ".py" or path.is_dir()]
    subject = file.stem.removeprefix("test_") + "_"
    return any(subject.startswith(f"{path.stem}_") for path in found if path.stem[0] != "_")


def test_each_test_lies_where_its_modules_name_leads() -> None:
    project = UNIT / "project"
    wrong = [file.relative_to(ROOT) for file in FILES if file.parent != project and not leads(file)]
    assert not wrong, "move or rename them: docs/testing.md says where"


@pytest.mark.parametrize(
    "wrong", ["test_old.py", "dra/test_old.py", "dra/test_dfl_port.py", "old/test_old.py"]
)
def test_a_test_elsewhere_is_found(wrong: str) -> None:
    assert not leads(UNIT / wrong)


def test_no_two_files_of_one_run_have_the_same_name() -> None:
    """Pytest imports them by it: `make test` has these folders."""
    files = [*FILES, *(ROOT / "tests" / "integration").rglob("test_*.py")]
    assert len({file.name for file in files}) == len(files)


def test_no_two_classes_of_the_package_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "messages" in path.parts:
            continue
        for one in ast.parse(path.read_text()).body:
            if isinstance(one, ast.ClassDef) and not one.name.startswith("_"):
                places.setdefault(one.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
