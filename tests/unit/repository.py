"""The repository's own files, for tests that hold them to each other."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]

_HIDDEN_BUT_OURS = {".ci", ".github"}
_MADE = {"__pycache__"}


def module(folder: str, name: str) -> ModuleType:
    """A module of a command in tests/, on the path for as long as it is imported."""
    path = str(ROOT / "tests" / folder)
    sys.path.insert(0, path)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(path)


def texts(*endings: str) -> Iterator[tuple[str, str]]:
    """Each text file's path, from the root on, and its text; of all endings if none is given."""
    for directory, names, files in os.walk(ROOT):
        names[:] = sorted(
            name
            for name in names
            if name not in _MADE and (not name.startswith(".") or name in _HIDDEN_BUT_OURS)
        )
        for name in sorted(files):
            path = Path(directory, name)
            # In a worktree `.git` is a file.
            if name == ".git" or not name.endswith(endings or "") or path.is_symlink():
                continue
            try:
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
