"""Nothing below fpga_plugin changes a module of others, and one module reaches into grpclib."""

import ast

import pytest
from repository import ROOT

PACKAGE = ROOT / "fpga_plugin"
SOURCES = {
    str(path.relative_to(PACKAGE)): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
    if "messages" not in path.parts
}

ALLOWED = {
    (
        "commands/main.py",
        "sys.stdout",
    ),  # a closed one is replaced; sys documents that it may be assigned
    ("commands/main.py", "sys.stderr"),
}

CHANGES = {"setattr", "delattr"}
"""Functions that change their first argument."""

METHODS = {"update", "setdefault", "pop", "clear", "append", "insert", "extend", "remove"}
"""Of what a module has: `sys.modules`, `sys.meta_path`."""


def foreign(tree: ast.AST) -> set[str]:
    """Names that stand for others' modules, and for what is in them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] != "fpga_plugin":
                    names.add(each.asname or each.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("fpga_plugin"):
            names |= {each.asname or each.name for each in node.names}
    return names


def root(node: ast.AST) -> str | None:
    """`sys` of `sys.modules["ssl"].x`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def changes(source: str) -> set[str]:
    """What of others' modules a source assigns, deletes or changes, as it is written there."""
    tree = ast.parse(source)
    names = foreign(tree)
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(ctx=ast.Store() | ast.Del())
                | ast.Subscript(ctx=ast.Store() | ast.Del())
            ):
                found.add(node)
            case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in CHANGES:
                found.add(first)
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Attribute() as changed)) if (
                name in METHODS
            ):
                found.add(changed)
    return {ast.unparse(node) for node in found if root(node) in names}


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.modules['ssl'] = None",
        "import sys; del sys.modules['ssl']",
        "import sys as s; s.modules.pop('ssl')",
        "import sys\ndef f(): sys.meta_path.insert(0, None)",
        "import os; os.environ['A'] = 'b'",
        "import dataclasses; dataclasses._create_fn = None",
        "import dataclasses; setattr(dataclasses, '_create_fn', None)",
        "import grpclib.server; grpclib.server.Server.close = None",
        "from grpclib.server import Server; Server.close = None",
        "from grpclib import server; server.log: object = None",
    ],
)
def test_a_change_of_a_module_is_found(source):
    assert changes(source)


@pytest.mark.parametrize(
    "source",
    [
        "from fpga_plugin import errors; import sys\nx = {}; x['a'] = sys.argv[0]; errors.x = 1",
        "class A:\n def f(self): self.sys = 1; setattr(self, 'a', 1)",
    ],
)
def test_what_is_ours_may_change(source):
    assert not changes(source)


def test_nothing_of_ours_changes_a_module_of_others():
    found = {(path, what) for path, source in SOURCES.items() for what in changes(source)}
    assert found == ALLOWED


def test_one_module_reaches_into_grpclib():
    reach = {
        path
        for path, source in SOURCES.items()
        if {"grpclib", "h2"} & {name.partition(".")[0] for name in imported(source)}
        and ("SLF001" in source or "grpclib.protocol" in imported(source))
    }
    assert reach == {"kubernetes/grpc/server.py"}


def imported(source: str) -> set[str]:
    """The modules that a source imports."""
    tree = ast.walk(ast.parse(source))
    return {str(node.module) for node in tree if isinstance(node, ast.ImportFrom)}
