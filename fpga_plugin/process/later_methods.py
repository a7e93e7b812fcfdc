"""Dataclasses whose methods are compiled when they are first called.

A dataclass writes its methods as text and compiles each when the class is made: 750 of them were a
quarter of the CPU until kubelet hears of the plugin, and most are never called (a frozen class has
two that only refuse). While the `with` block lasts, a class gets a descriptor in the place of each,
which makes the method as ever and puts it in its own place.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

_CREATE = "_create_fn"
"""What dataclasses makes a method with, until Python 3.12. Later ones compile all of a class's
methods at once, and are left as they are."""


class _Later:
    """A method that is not made yet."""

    __slots__ = ("__name__", "_make", "_method")

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.__name__ = name
        self._make = make
        self._method: Any = None

    def __get__(self, instance: object, owner: type) -> Any:
        method = self._made()
        for each in owner.__mro__:
            if vars(each).get(self.__name__) is self:
                method.__qualname__ = f"{each.__qualname__}.{self.__name__}"
                setattr(each, self.__name__, method)
        return method.__get__(instance, owner)

    def __call__(self, instance: object) -> Any:
        """Of `__repr__`, which dataclasses wraps."""
        return self._made()(instance)

    def _made(self) -> Any:
        if self._method is None:  # two threads may both make it: the same
            self._method = self._make()
        return self._method


@contextlib.contextmanager
def later_methods() -> Iterator[None]:
    """The dataclasses that are made in this block compile a method at its first call."""
    import dataclasses  # here: who imports this module may still want a stand-in for `inspect`

    create = getattr(dataclasses, _CREATE, None)
    if create is None:
        yield
        return

    def later(name: str, *arguments: Any, **named: Any) -> _Later:
        return _Later(name, partial(create, name, *arguments, **named))

    setattr(dataclasses, _CREATE, later)
    try:
        yield
    finally:
        setattr(dataclasses, _CREATE, create)
