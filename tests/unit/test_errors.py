"""What a user or an operator is told always arrives: it is short, and it can be encoded."""

import ast
import asyncio
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
from grpclib.exceptions import GRPCError

import fpga_plugin
from fpga_plugin.bitstreams.index import StoreIndex
from fpga_plugin.bitstreams.library import Library
from fpga_plugin.bitstreams.reader import HEADERS, StoreReader
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.errors import (
    ASK_THE_OPERATOR,
    MAX_MESSAGE_BYTES,
    BitstreamError,
    FpgaPluginError,
    HardwareError,
    PortInUseError,
    RefusedError,
    SlotUnusableError,
    WrongImageError,
    quote,
)
from fpga_plugin.kubernetes.grpc.unary import statuses
from fpga_plugin.settings.settings import TrustMode


@pytest.mark.parametrize("text", ["/s/\udcff.gbs", "\ud800", "a\udc80" * 1000])
def test_a_name_that_is_not_utf8_makes_a_printable_error(text):
    error = FpgaPluginError(f"{text}: what", hint=text)
    for told in (str(error), error.message, error.hint, quote(text)):
        assert told.encode()


@pytest.mark.parametrize("character", ["a", "\u20ac", "\U0001f600", "\udcff"])
def test_a_message_stays_under_one_kib_whatever_it_is_made_of(character):
    told = str(FpgaPluginError(character * 5000, hint=character * 5000)).encode()
    assert len(told) <= MAX_MESSAGE_BYTES + 3


def every_error() -> list[type[FpgaPluginError]]:
    for module in pkgutil.walk_packages(fpga_plugin.__path__, "fpga_plugin."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, new = {FpgaPluginError}, [FpgaPluginError]
    while new:
        below = [each for each in new.pop().__subclasses__() if each not in found]
        found.update(below)
        new += below
    return sorted((each for each in found if each.__module__.startswith("fpga_plugin.")), key=str)


def test_each_error_can_have_other_words_and_is_else_the_same():
    errors = every_error()
    assert len(errors) > 40
    for kind in errors:
        wanted = {
            name: f"its {name}"
            for name, one in inspect.signature(kind).parameters.items()
            if one.default is inspect.Parameter.empty
        }
        error = kind(**wanted)
        error.message, error.hint, error.tenant = "m", "h", "t"
        told = error.reworded(str.upper)
        assert (type(told), str(told), str(error), told.args) == (kind, "M: H", "m: h", error.args)
        rest = {**error.__dict__, "message": "M", "hint": "H", "tenant": "T"}
        assert told.__dict__ == rest


@pytest.mark.parametrize("kind", [HardwareError, PortInUseError, SlotUnusableError])
def test_what_helps_hardware_is_the_operators_unless_the_error_says_otherwise(kind):
    error = kind("m", hint="as root: echo 1 > reset")
    assert str(error) == "m: as root: echo 1 > reset"
    assert str(error.for_tenant()) == f"m: {ASK_THE_OPERATOR}"
    assert str(kind("m", hint="h", tenant="").for_tenant()) == "m: h"
    assert str(kind("m", hint="h", tenant="delete the pod").for_tenant()) == "m: delete the pod"
    for plain in (RefusedError, WrongImageError, BitstreamError):
        assert str(plain("m", hint="h").for_tenant()) == "m: h"


def test_kubelet_is_sent_the_tenants_words():
    with pytest.raises(GRPCError) as sent, statuses("PreStartContainer"):
        raise HardwareError("m", hint="as root: echo 1 > reset")
    assert sent.value.message == f"m: {ASK_THE_OPERATOR}"
    assert str(sent.value.__cause__) == "m: as root: echo 1 > reset"


OPERATORS = ("as root", "fuser", "kernel's log", "fpga-plugin card", "module")
"""What a hint has that only somebody on the node can do."""

OPERATORS_OWN = {"rebind.py", "functions.py"}
"""A rebind's errors go to the log alone; virtual functions are made by an operator's command."""


def test_no_hint_of_the_hardware_that_only_root_can_follow_reaches_a_tenant():
    kinds = {kind.__name__: kind for kind in every_error()}
    seen = 0
    for path in (Path(fpga_plugin.__path__[0]) / "hardware").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            given = {one.arg: ast.unparse(one.value) for one in call.keywords}
            words = given.get("hint", "")
            if call.func.id not in kinds or not any(one in words for one in OPERATORS):
                continue
            seen += 1
            where = f"{path.name}:{call.lineno}: {words}"
            if "tenant" in given:
                assert given["tenant"] != "''", where
            elif not kinds[call.func.id].for_tenant_unless_said:
                assert path.name in OPERATORS_OWN, where
    assert seen > 30


def index(tmp_path) -> tuple[StoreIndex, Library]:
    root = tmp_path / "store"
    (root / ("a" * 32)).mkdir(parents=True)
    trust = Trust(str(root), TrustMode.ANY, None)
    library = Library(
        str(root),
        directory=str(tmp_path / "verified"),
        limit=1 << 20,
        trust=trust,
        guarded=False,
    )
    return StoreIndex(StoreReader(library), lambda _: None), library


async def examined(found: StoreIndex, library: Library, monkeypatch) -> list[str]:
    """Which files were looked at, once all were."""
    seen: list[str] = []
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    examine, tidy = library.examine, library.tidy

    def look(relative: str):
        seen.append(relative)
        return examine(relative)

    def tidied(present) -> None:
        tidy(present)
        loop.call_soon_threadsafe(done.set)

    monkeypatch.setattr(library, "examine", look)
    monkeypatch.setattr(library, "tidy", tidied)
    task = asyncio.create_task(found.run())
    await asyncio.wait({task, asyncio.create_task(done.wait())}, return_when="FIRST_COMPLETED")
    if task.done():
        task.result()
    task.cancel()
    return seen


def test_a_file_whose_name_is_no_utf8_does_not_end_the_index(tmp_path, monkeypatch):
    found, library = index(tmp_path)
    directory = str(tmp_path / "store" / ("a" * 32)).encode()
    for name in (b"\xff\xfe.gbs", b"z.gbs"):
        with open(directory + b"/" + name, "wb") as file:
            file.write(b"x")
    seen = asyncio.run(examined(found, library, monkeypatch))
    assert len(seen) == 2


def test_a_file_that_cannot_be_examined_at_all_does_not_end_the_index(tmp_path, monkeypatch):
    found, library = index(tmp_path)
    for name in ("x.gbs", "y.gbs"):
        (tmp_path / "store" / ("a" * 32) / name).write_bytes(b"x")
    examine = library.examine

    def failing(relative: str):
        if relative.endswith("x.gbs"):
            raise MemoryError
        return examine(relative)

    monkeypatch.setattr(library, "examine", failing)
    seen = asyncio.run(examined(found, library, monkeypatch))
    assert [name[-5:] for name in seen] == ["x.gbs", "y.gbs"]


def test_a_root_error_has_a_message_and_a_hint():
    assert str(BitstreamError("m", hint="h")) == "m: h"
    assert str(BitstreamError("m")) == "m"


def test_headers_that_were_late_are_no_file_to_be_verified(tmp_path):
    made, _ = index(tmp_path)
    made._answered(HEADERS)
    assert made._changes == set()
    made._answered("")
    assert made._changes == {None}
