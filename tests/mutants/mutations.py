"""Which small changes of a module are tried, and what each is called.

A mutant stands for a mistake that somebody may make in the core: a step that is left out, a
condition that looks at one thing too few, a comparison that is off by one. Texts are left alone
(messages, names, log calls), and so are floating point numbers: most are pauses and time limits.
What is not inside of a function is left alone, too.

A mutant is known by its file, its function and its text, not by its line: it keeps its name while
the code around it moves (`tests/mutants/equivalent.toml` names them so).
"""

import ast
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator

LOGGERS = frozenset({"log", "_log", "logger", "_logger", "LOG"})
LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LEFT_OUT = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Break, ast.Continue)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change. `text` and `nth` name it in its function."""

    file: str
    function: str
    text: str
    nth: int
    index: int
    """Which of the module's changes it is: how it is made again."""
    lines: tuple[int, int]
    """Of the statement, without the body that it may have."""
    outermost: tuple[str, int, int]
    """The function that is replaced, with all that is defined in it: its qualified name, and its
    first and last line, decorators included."""

    @property
    def key(self) -> str:
        again = f" #{self.nth}" if self.nth else ""
        return f"{self.file}::{self.function}::{self.text}{again}"


@dataclasses.dataclass(frozen=True)
class _Edit:
    function: str
    outermost: tuple[str, int, int]
    before: str
    after: str
    lines: tuple[int, int]
    apply: Callable[[], None]


def mutants(source: str, file: str) -> list[Mutant]:
    """All mutants of a module."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for index, edit in enumerate(_Edits().of(ast.parse(source))):
        text = f"{edit.before} -> {edit.after}"
        nth = seen[edit.function, text]
        seen[edit.function, text] += 1
        found.append(Mutant(file, edit.function, text, nth, index, edit.lines, edit.outermost))
    return found


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """The module's tree with the change made."""
    tree = ast.parse(source)
    list(_Edits().of(tree))[mutant.index].apply()
    return ast.fix_missing_locations(tree)


class _Edits:
    """Walks a tree and yields what may be changed in it."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._returns: list[str] = []
        self._outermost: tuple[str, int, int] | None = None
        self._lines = (0, 0)
        self._decided: set[int] = set()
        """Conditions, and parts of them, that other changes leave out."""

    def of(self, tree: ast.Module) -> Iterator[_Edit]:
        return self._children(tree)

    def _edit(self, before: str, after: str, apply: Callable[[], None]) -> _Edit:
        assert self._outermost is not None
        return _Edit(".".join(self._names), self._outermost, before, after, self._lines, apply)

    def _children(self, node: ast.AST) -> Iterator[_Edit]:
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                for place, child in enumerate(value):
                    if isinstance(child, ast.AST):
                        yield from self._node(child, _place(value, place))
            elif isinstance(value, ast.AST):
                yield from self._node(value, _attribute(node, field))

    def _node(self, node: ast.AST, put: Callable[[ast.AST], None]) -> Iterator[_Edit]:
        if isinstance(node, ast.ClassDef):
            yield from self._named(node, node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self._function(node)
        elif self._outermost is None:
            if isinstance(node, ast.stmt):  # `if` around definitions
                yield from self._children(node)
        elif isinstance(node, ast.stmt):
            yield from self._statement(node, put)
        elif isinstance(node, ast.expr):
            yield from self._expression(node, put)
        else:  # handlers, comprehensions, keywords, cases
            yield from self._children(node)

    def _named(self, node: ast.ClassDef, body: list[ast.stmt]) -> Iterator[_Edit]:
        self._names.append(node.name)
        for place, child in enumerate(body):
            yield from self._node(child, _place(body, place))
        self._names.pop()

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[_Edit]:
        before = self._outermost, self._lines
        self._names.append(node.name)
        self._returns.append(ast.unparse(node.returns) if node.returns else "")
        if self._outermost is None:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            self._outermost = (".".join(self._names), first, node.end_lineno or first)
        for place, child in enumerate(node.body):
            yield from self._node(child, _place(node.body, place))
        self._names.pop()
        self._returns.pop()
        self._outermost, self._lines = before

    def _statement(self, node: ast.stmt, put: Callable[[ast.AST], None]) -> Iterator[_Edit]:
        outer = self._lines
        self._lines = _header(node)
        if not _spared(node):
            yield from self._left_out(node, put)
            yield from self._decision(node, put)
            if not isinstance(node, ast.Raise):
                yield from self._children(node)
        self._lines = outer

    def _left_out(self, node: ast.stmt, put: Callable[[ast.AST], None]) -> Iterator[_Edit]:
        """The statement is not there."""
        if isinstance(node, ast.Assign) and any(isinstance(x, ast.Name) for x in node.targets):
            return  # what follows would stumble over the name
        if isinstance(node, LEFT_OUT):
            yield self._edit(_text(node), "pass", lambda: put(ast.Pass()))
        elif isinstance(node, ast.Return) and (
            node.value is None or "None" in self._returns[-1].split(" | ")
        ):
            if node.value is None:
                yield self._edit("return", "pass", lambda: put(ast.Pass()))
            elif not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield self._edit(_text(node), "return None", lambda: put(ast.Return(None)))
        elif isinstance(node, ast.With | ast.AsyncWith) and all(
            item.optional_vars is None for item in node.items
        ):
            block = ast.If(ast.Constant(value=True), node.body, [])
            yield self._edit(_text(node), "its body", lambda: put(block))

    def _decision(self, node: ast.stmt, put: Callable[[ast.AST], None]) -> Iterator[_Edit]:
        """A condition that is always, or never, so. A `while` that never ends says nothing."""
        if isinstance(node, ast.If | ast.While):
            word = "if" if isinstance(node, ast.If) else "while"
            constant = isinstance(node.test, ast.Constant)
            self._decided.add(id(node.test))
            for value in (True, False) if word == "if" else (False,):
                if not constant:
                    yield self._edit(
                        f"{word} {_text(node.test)}", str(value), _set_test(node, value=value)
                    )
        elif (
            isinstance(node, ast.Return)
            and self._returns[-1] == "bool"
            and isinstance(node.value, ast.Call | ast.Name | ast.Attribute | ast.Await)
        ):
            opposite = ast.UnaryOp(ast.Not(), copy.deepcopy(node.value))
            yield self._edit(
                _text(node), f"return {_text(opposite)}", lambda: put(ast.Return(opposite))
            )

    def _expression(self, node: ast.expr, put: Callable[[ast.AST], None]) -> Iterator[_Edit]:
        if isinstance(node, ast.JoinedStr):
            return
        for new in _changed(node):
            if _negates(node, new) and id(node) in self._decided:
                continue  # what notices that it is left out, or constant, notices that it is turned
            yield self._edit(_text(node), _text(new), lambda new=new: put(new))  # type: ignore[misc]
        if isinstance(node, ast.BoolOp):
            self._decided.update(map(id, node.values))
        yield from self._children(node)


def _changed(node: ast.expr) -> Iterator[ast.expr]:  # noqa: C901, PLR0912 - a list of cases
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators)
        case ast.Compare():  # a < b < c
            for place, operator in enumerate(node.ops):
                ops = [*node.ops[:place], COMPARISONS[type(operator)](), *node.ops[place + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)
        case ast.BoolOp(values=[_, _]):
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
            yield from node.values
        case ast.BoolOp():
            for place in range(len(node.values)):
                yield ast.BoolOp(node.op, [*node.values[:place], *node.values[place + 1 :]])
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.BinOp(op=operator) if type(operator) in OPERATORS and not _textual(node):
            yield ast.BinOp(node.left, OPERATORS[type(operator)](), node.right)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(value=not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value=value + 1)
        case ast.IfExp() if not any(map(_is_text, (node.body, node.orelse))):
            yield node.body
            yield node.orelse
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield ast.Call(ast.Name(CALLS[name], ast.Load()), node.args, node.keywords)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            for place, generator in enumerate(node.generators):
                if generator.ifs:
                    new = copy.deepcopy(node)
                    new.generators[place].ifs = []
                    yield new


def _negates(old: ast.expr, new: ast.expr) -> bool:
    if isinstance(old, ast.UnaryOp):
        return True
    return isinstance(old, ast.Compare) and isinstance(
        new.ops[0] if isinstance(new, ast.Compare) else None,
        ast.Eq | ast.NotEq | ast.In | ast.NotIn | ast.Is | ast.IsNot,
    )


def _spared(node: ast.stmt) -> bool:
    """Documentation, what is only logged, and what states what is so anyway."""
    if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.Pass):
        return True
    if not isinstance(node, ast.Expr):
        return False
    call = node.value
    if isinstance(call, ast.Constant):
        return True
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in LOG_METHODS
        and ast.unparse(call.func.value).split("(")[0].split(".")[-1] in LOGGERS
    )


def _textual(node: ast.BinOp) -> bool:
    """Text, or types: `str | None`."""
    return any(
        _is_text(side) or (isinstance(side, ast.Constant) and side.value is None)
        for side in (node.left, node.right)
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _header(node: ast.stmt) -> tuple[int, int]:
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    if not body:
        return node.lineno, node.end_lineno or node.lineno
    first = body[0].pattern if isinstance(body[0], ast.match_case) else body[0]
    return node.lineno, max(node.lineno, first.lineno - 1)


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split("\n")[0].split())
    return text if len(text) <= 160 else f"{text[:157]}..."


def _place(values: list[ast.AST], place: int) -> Callable[[ast.AST], None]:
    def put(new: ast.AST) -> None:
        values[place] = new

    return put


def _attribute(node: ast.AST, field: str) -> Callable[[ast.AST], None]:
    return lambda new: setattr(node, field, new)


def _set_test(node: ast.If | ast.While, *, value: bool) -> Callable[[], None]:
    return lambda: setattr(node, "test", ast.Constant(value=value))
