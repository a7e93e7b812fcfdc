"""Which of the node's paths an entry may add to containers.

The file is the operator's, who can give a pod anything by other means. What is refused here is what
would undo the plugin's own work in the hands of every tenant, and is hardly ever meant: the nodes
that program cards, other tenants' regions, the node's memory, the kernel's trees, and the
directories by which kubelet and the plugin are spoken to.
"""

import os
import re
from dataclasses import dataclass
from typing import Final

_PATH: Final = re.compile(r"/[!-~]{1,254}", re.ASCII)

_FPGA_NODES: Final = re.compile(r"/dev/(dfl-|intel-fpga-|vfio(/|$)|fpga\d|uio\d|xclmgmt)", re.ASCII)
"""Nodes that lead to a card: FMEs and ports of both drivers, VFIO groups, user-space registers."""

_MEMORY_NODES: Final = frozenset({"/dev/mem", "/dev/kmem", "/dev/port"})

_ALLOWED_IN_DEV: Final = ("/dev/hugepages", "/dev/shm")  # noqa: S108  # names, not used here
"""File systems that are mounted there: what OPAE and others have their buffers in."""

_CLOSED: Final = ("/dev", "/proc", "/sys", "/run", "/var/run")
"""Never mounted, nor what is below, nor what is above."""

_CLOSED_IN_CONTAINERS: Final = ("/dev", "/proc", "/sys")
"""The container's own; the runtime makes them."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """Directories that settings name.

    Attributes:
        private: what no container may see: kubelet's sockets, the plugin's state.
        kept: what no container may write: the store.
    """

    private: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


NOTHING: Final = Guarded()


def check_path(text: str) -> str:
    """An absolute path in its one form.

    Raises:
        ValueError: it is relative, has `..`, `//` or a `/` at its end, or is too long to be shown.
    """
    if not _PATH.fullmatch(text) or os.path.normpath(text) != text or text.startswith("//"):
        msg = "not an absolute path without '..', '//', blanks and a '/' at its end"
        raise ValueError(msg)
    if any(character in text for character in ":,"):
        msg = "':' and ',' separate paths elsewhere"
        raise ValueError(msg)
    return text


def check_node(text: str) -> str:
    """A device node that containers may get.

    Raises:
        ValueError: it is no path below `/dev`, or leads to a card or to the node's memory.
    """
    path = check_path(text)
    if not path.startswith("/dev/"):
        msg = "no path below /dev"
        raise ValueError(msg)
    if _FPGA_NODES.match(path):
        msg = "leads to a card: the plugin alone gives out regions, and nobody an FME"
        raise ValueError(msg)
    if path in _MEMORY_NODES:
        msg = "leads to the node's memory"
        raise ValueError(msg)
    return path


def check_host_path(text: str, *, read_only: bool, guarded: Guarded) -> str:
    """What of the node a container may see.

    Args:
        text: the path.
        read_only: whether containers only read it.
        guarded: directories of the plugin and of kubelet.

    Raises:
        ValueError: it must not be mounted.
    """
    path = check_path(text)
    if any(_within(path, allowed) for allowed in _ALLOWED_IN_DEV):
        return path
    for closed in (*_CLOSED, *guarded.private):
        if _meets(path, closed):
            msg = f"is, has, or is in {closed}, which no container may see"
            raise ValueError(msg)
    for closed in () if read_only else ("/etc", *guarded.kept):
        if _meets(path, closed):
            msg = f"is, has, or is in {closed}, which no container may write"
            raise ValueError(msg)
    return path


def check_container_path(text: str) -> str:
    """Where containers may see it.

    Raises:
        ValueError: the container's runtime has something else there.
    """
    path = check_path(text)
    if any(_within(path, allowed) for allowed in _ALLOWED_IN_DEV):
        return path
    for closed in _CLOSED_IN_CONTAINERS:
        if _within(path, closed):
            msg = f"is in {closed}, which the container's runtime makes"
            raise ValueError(msg)
    return path


def _meets(one: str, other: str) -> bool:
    return _within(one, other) or _within(other, one)


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
