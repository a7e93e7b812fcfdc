"""Modules that others import and the plugin never needs: a stand-in takes their place.

A tenth of what an idle plugin has in memory, and a twentieth of the CPU until kubelet hears of it,
were such modules of the standard library: imported by asyncio, dataclasses, structlog, msgspec or
grpclib for a function that nobody calls here. While those are imported, each of these modules is a
stand-in that knows the few names that are used at import. Asked for any other name, now or later,
it imports the module itself: a library does the same as ever, only later. (But msgspec knows no
decimals and UUIDs. And a name that another thread binds meanwhile, it keeps: one of the few that
are known is then the stand-in's for good.) As soon as the `with` block ends, everybody else who
imports the module gets the module.
"""

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

_ABSENT: Final = ("ssl", "rich", "pydantic")
"""Whose import fails meanwhile, as where they are not installed. asyncio and grpclib then do
without ssl: 4 MiB, and all connections of theirs are unix sockets here. structlog and betterproto2
take rich and pydantic where they find them, 8 MiB each."""


class StandIn(types.ModuleType):
    """A module that is imported when a name is asked of it that it was not given.

    Args:
        name: of the module.
        known: the names that it has at once.
    """

    def __init__(self, name: str, known: Mapping[str, object]) -> None:
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:  # whatever the module has there
        # Names with underscores are asked by the machinery of imports, to see what it has there.
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(_real(self.__name__), name)
        self.__dict__[name] = found
        return found


@contextlib.contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """What is imported in this block gets stand-ins for what nobody needs.

    Modules that were imported before stay what they are.

    Args:
        names: only these modules; none given: all that `run` does without.
    """
    known = _known()
    stand_ins = {name: StandIn(name, known.get(name, {})) for name in names or known}
    with in_place(stand_ins if names else {**stand_ins, **dict.fromkeys(_ABSENT)}):
        yield


@contextlib.contextmanager
def in_place(modules: Mapping[str, StandIn | None]) -> Iterator[None]:
    """Who imports one of these modules in this block gets the stand-in; None: cannot import it.

    Modules that were imported before stay what they are.
    """
    hidden = {name: module for name, module in modules.items() if name not in sys.modules}
    for name, stand_in in hidden.items():
        _put(name, stand_in)
    try:
        yield
    finally:
        for name, stand_in in hidden.items():
            _take(name, stand_in)


def _put(name: str, stand_in: StandIn | None) -> None:
    sys.modules[name] = stand_in  # type: ignore[assignment]  # None is what imports look for, too
    package, _, last = name.rpartition(".")
    if package in sys.stdlib_module_names:  # another package is not to be imported for this
        setattr(importlib.import_module(package), last, stand_in)


def _real(name: str) -> Any:
    """The module itself, whether or not a stand-in has its place."""
    if isinstance(stand_in := sys.modules.get(name), StandIn):
        _take(name, stand_in)
    return importlib.import_module(name)


def _take(name: str, stand_in: object) -> None:
    # A package keeps the stand-in as its attribute, for whoever imported the module by it.
    if sys.modules.get(name) is stand_in:
        del sys.modules[name]


def _known() -> Mapping[str, Mapping[str, object]]:
    """Who is stood in for, and what is asked of it at import; KiB are of Python 3.11."""
    return {
        # dataclasses and asyncio: 1,200, with ast and dis. A dataclass without a docstring gets
        # one; asyncio looks at a signal's new handler, and makes a text of the last one.
        "inspect": {
            "signature": _signature,
            "iscoroutinefunction": _is_coroutine_function,
            "isfunction": lambda thing: isinstance(thing, types.FunctionType),
            "unwrap": lambda function: function,
        },
        # asyncinotify looks for libc by running ldconfig: 800, with shutil, lzma and tempfile.
        # Without a path it takes what the process has loaded.
        "ctypes.util": {"find_library": _find_library},
        # structlog, to say that a logger cannot be pickled: 420.
        "pickle": {"PicklingError": TypeError},
        # msgspec, as types that it could read and write: 370 and 130. No message here has one.
        "decimal": {"Decimal": type("Decimal", (), {})},
        "uuid": {"UUID": type("UUID", (), {}), "SafeUUID": types.SimpleNamespace(unknown=None)},
        # grpclib, to write hosts: 260. A unix socket's host is `127.0.0.1` to it.
        "ipaddress": {"IPv6Address": _ipv6_address, "AddressValueError": ValueError},
        # betterproto2 and msgspec, for what typing has since Python 3.11: 280.
        "typing_extensions": _typing(),
        # betterproto2 asks for its own version: 1,500, with all of email, for a directory's name.
        "importlib.metadata": {"version": _version},
    }


def _signature(thing: Any) -> Any:
    """As `inspect.signature`; nothing of a class, where it would be a generated docstring."""
    if isinstance(thing, type):
        return ""
    return _real("inspect").signature(thing)


def _is_coroutine_function(function: object) -> bool:
    """As `inspect.iscoroutinefunction`, of functions and methods."""
    flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
    return bool(flags & 0x80)  # CO_COROUTINE, Include/cpython/code.h


def _find_library(name: str) -> Any:
    """As `ctypes.util.find_library`, but libc is whichever the process has; runs no program."""
    if name == "c":
        return None
    return _real("ctypes.util").find_library(name)


def _ipv6_address(host: str) -> object:
    """As `ipaddress.IPv6Address`.

    Raises:
        ValueError: it is none.
    """
    if ":" not in host:
        raise ValueError(host)
    return _real("ipaddress").IPv6Address(host)


def _typing() -> Mapping[str, object]:
    import typing

    names = ("NotRequired", "Protocol", "Required", "Self", "get_type_hints")
    return {name: getattr(typing, name) for name in names}


def _version(package: str) -> str:
    """An installed package's version, by the name of its directory."""
    from importlib.util import find_spec

    spec = find_spec(package)
    begin, end = f"{package}-", ".dist-info"
    if spec is not None and spec.origin is not None:
        names = os.listdir(os.path.dirname(os.path.dirname(spec.origin)))
        found = [n for n in names if n.startswith(begin) and n.endswith(end)]
        if len(found) == 1:
            return found[0][len(begin) : -len(end)]
    return str(_real("importlib.metadata").version(package))
