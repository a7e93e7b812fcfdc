"""A tree of directories, links and attributes, computed when somebody looks: sysfs without a disk.

Directories are built on first use, because 256 cards of four regions have tens of thousands of
attributes and a scan reads few of them. Real files were measured in its place: 32 cards of eight
regions are 2,008 directories, 5,764 files and 2,112 links. Writing them took 4 to 12 s on a disk
and 0.17 s on tmpfs; looking at all of these cards here takes 0.1 s.
"""

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

_MOST_LINKS = 40
"""Links followed in one path, as in Linux (MAXSYMLINKS, include/linux/namei.h)."""


@dataclass(frozen=True, slots=True)
class Symlink:
    """A symbolic link to an absolute path."""

    target: str


@dataclass(frozen=True, slots=True)
class Attribute:
    """A file of sysfs.

    Attributes:
        show: its text, without the newline; None: write-only. Raises OSError as the driver does.
        store: takes what was written, whole; None: read-only.
    """

    show: Callable[[], str] | None = None
    store: Callable[[str], None] | None = None


class Directory(Protocol):
    """A directory."""

    def names(self) -> list[str]:
        """What is in it."""

    def child(self, name: str) -> "Node | None":
        """One entry of it; None: not there."""


Node = Directory | Symlink | Attribute | str
"""A plain `str` is an attribute that never changes."""


class Fixed:
    """A directory whose entries are known already."""

    __slots__ = ("_children", "child")

    def __init__(self, children: Mapping[str, Node]) -> None:
        self._children = children
        self.child = children.get

    def names(self) -> list[str]:
        """What is in it."""
        return list(self._children)


class Lazy:
    """A directory whose entries are computed once, when first asked for.

    `guard` is called before every look inside; it raises OSError when what the directory stands for
    has gone. `instance` distinguishes it from a later directory of the same path.
    """

    __slots__ = ("_build", "_children", "_guard", "instance")

    def __init__(
        self,
        build: Callable[[], Mapping[str, Node]],
        *,
        guard: Callable[[], None] | None = None,
        instance: int = 0,
    ) -> None:
        self.instance = instance
        self._build = build
        self._guard = guard
        self._children: Mapping[str, Node] | None = None

    def names(self) -> list[str]:
        """What is in it."""
        self.check()
        return list(self._entries())

    def child(self, name: str) -> Node | None:
        """One entry of it."""
        if self._guard is not None:
            self._guard()
        return self._entries().get(name)

    def check(self) -> None:
        """Raise OSError when what the directory stands for has gone."""
        if self._guard is not None:
            self._guard()

    def _entries(self) -> Mapping[str, Node]:
        if self._children is None:
            self._children = self._build()
        return self._children


def resolve(root: Directory, path: str) -> tuple[str, Node]:
    """Follow `path` from `root`, links included; returns the real path and what is there.

    Raises:
        OSError: ENOENT, ENOTDIR or ELOOP, as Linux gives them.
    """
    names: list[str] = []
    here: Node = root
    todo = path.split("/")
    todo.reverse()
    links = 0
    while todo:
        name = todo.pop()
        if name in {"", "."}:
            continue
        if isinstance(here, (str, Attribute, Symlink)):
            raise failure(errno.ENOTDIR, path)
        if name == "..":
            # Rare, so walked again: there are no links in a real path.
            todo.extend(reversed(names[:-1]))
            names, here = [], root
            continue
        node = here.child(name)
        if node is None:
            raise failure(errno.ENOENT, path)
        if isinstance(node, Symlink):
            links += 1
            if links > _MOST_LINKS:
                raise failure(errno.ELOOP, path)
            names, here = [], root
            todo.extend(reversed(node.target.split("/")))
            continue
        names.append(name)
        here = node
    if isinstance(here, Lazy):
        here.check()
    return "/" + "/".join(names), here


def failure(number: int, path: str = "") -> OSError:
    """The OSError that a system call which returns `number` becomes."""
    if path:
        return OSError(number, os.strerror(number), path)
    return OSError(number, os.strerror(number))
