"""Writes the table of obstacles into docs/architecture.md, from the code: `make docs`."""

import ast
import inspect
import pathlib
import sys

from fpga_plugin.allocation.obstacles import ObstacleKind, Stops

BEGIN, END = "<!-- obstacles -->\n", "<!-- end of obstacles -->\n"


def meanings() -> dict[str, str]:
    """What each kind means: the docstring below it in the source, which Python does not keep."""
    found: dict[str, str] = {}
    name = ""
    for node in ast.walk(ast.parse(inspect.getsource(ObstacleKind))):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case ast.Expr(value=ast.Constant(value=str(text))) if name in ObstacleKind.__members__:
                found.setdefault(name, text)
    return found


def table() -> str:
    """A row for each kind."""
    means = meanings()
    rows = ["| obstacle | what is so | what it stops | taint (DRA) |", "|---|---|---|---|"]
    for kind in ObstacleKind:
        stops = ", ".join(word(one) for one in Stops if one in kind.stops)
        taint = f"`{kind.taint}`" if kind.taint else ""
        rows.append(f"| {word(kind)} | {means[kind.name]} | {stops} | {taint} |")
    return "\n".join(rows) + "\n"


def word(one: ObstacleKind | Stops) -> str:
    """As people write it."""
    assert one.name is not None
    return one.name.lower().replace("_", " ")


def rewritten(text: str) -> str:
    """The document with the table of today."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[1])
    path.write_text(rewritten(path.read_text()))
