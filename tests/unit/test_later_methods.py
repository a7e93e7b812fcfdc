"""Dataclasses whose methods are compiled at their first call."""

import copy
import dataclasses
import pickle
import subprocess
import sys
import threading
import types

import pytest

from fpga_plugin.process.later_methods import later_methods

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="dataclasses compiles all methods at once"
)

with later_methods():

    @dataclasses.dataclass(frozen=True, slots=True, order=True)
    class Slotted:
        number: int
        names: list[str] = dataclasses.field(default_factory=list, compare=False)

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        number: int = 3

        def __post_init__(self):
            if self.number < 0:
                raise ValueError("below zero")

    @dataclasses.dataclass
    class Below:
        number: int
        text: str = "a"

    @dataclasses.dataclass(frozen=True)
    class Derived(Frozen):
        more: int = 4


def test_a_class_does_what_it_does_anyway():
    assert Slotted(1) == Slotted(1, ["x"]) != Slotted(2)
    assert hash(Frozen()) == hash(Frozen(3)) != hash(Frozen(4))
    assert Slotted(1) < Slotted(2)
    assert min(Slotted(2), Slotted(1)).number == 1
    assert repr(Slotted(1, ["x"])) == "Slotted(number=1, names=['x'])" == repr(Slotted(1, ["x"]))
    assert dataclasses.replace(Slotted(1), number=2).number == 2
    assert copy.copy(Slotted(1)) == pickle.loads(pickle.dumps(Slotted(1)))
    assert Derived(1, 2) == Derived(1, more=2)
    assert repr(Derived()) == "Derived(number=3, more=4)"
    below = Below(1)
    below.text = "b"
    assert dataclasses.asdict(below) == {"number": 1, "text": "b"}
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'number'"):
        Slotted()
    with pytest.raises(ValueError, match="below zero"):
        Frozen(-1)


@pytest.mark.parametrize("one", [Slotted(1), Frozen(), Derived()])
def test_what_is_frozen_refuses_to_be_changed(one):
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.number = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.number
    assert one.number != 5


def test_a_method_is_compiled_once_and_is_then_an_ordinary_one():
    with later_methods():

        @dataclasses.dataclass
        class Fresh:
            number: int

    assert not isinstance(vars(Fresh)["__eq__"], types.FunctionType)
    assert Fresh(1) == Fresh(1)
    method = vars(Fresh)["__eq__"]
    assert isinstance(method, types.FunctionType)
    assert method.__qualname__.endswith("Fresh.__eq__")
    assert Fresh(1) == Fresh(1)
    assert vars(Fresh)["__eq__"] is method


def test_afterwards_and_after_an_error_classes_are_made_as_ever():
    with pytest.raises(RuntimeError), later_methods():
        raise RuntimeError

    @dataclasses.dataclass
    class Usual:
        number: int

    assert isinstance(vars(Usual)["__init__"], types.FunctionType)


def test_threads_may_be_the_first_to_call_at_once():
    for _ in range(50):
        with later_methods():

            @dataclasses.dataclass(frozen=True)
            class Fresh:
                number: int

        start, made = threading.Barrier(4), []

        def make(start=start, made=made, kind=Fresh):
            start.wait()
            made.append(kind(1))

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made == [Fresh(1)] * 4


def test_the_daemon_is_imported_so():
    code = (
        "import types; from fpga_plugin.cli import _import_daemon; _import_daemon()\n"
        "from fpga_plugin.ledger.records import Claim\n"
        "assert not isinstance(vars(Claim)['__eq__'], types.FunctionType)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
