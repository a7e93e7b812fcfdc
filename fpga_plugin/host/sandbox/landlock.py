"""Landlock rules: which files this process reaches from now on, whatever their modes say.

Root needs no capability to write what its file modes let it write: `/proc/sys`, where
`core_pattern` names a program that the kernel runs as root of the node; most of sysfs; kubelet's
records. So reading, writing, making, removing and running files is forbidden, but for what a rule
allows beneath a directory. The rest stays as it was: looking at a file (stat), changing its mode,
owner or times, connecting to a socket, and what was opened before. Ioctls are `seccomp`'s to
refuse, and processes and abstract sockets outside are out of reach by the pod's namespaces.

A rule belongs to a directory as it is now, not to its name: what takes its place later has none. So
where something may come later, the rule is on a directory that stays.

Kernels before 6.2 know no right to truncate (the ABI: landlock(7)); they are not asked for it.
"""

import contextlib
import ctypes
import enum
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from fpga_plugin.host.sandbox import system

# The same numbers everywhere (include/uapi/asm-generic/unistd.h).
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446

_VERSION: Final = 1 << 0  # LANDLOCK_CREATE_RULESET_VERSION
_PATH_BENEATH: Final = 1  # LANDLOCK_RULE_PATH_BENEATH


class Right(enum.IntFlag):
    """LANDLOCK_ACCESS_FS_* of include/uapi/linux/landlock.h."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    TRUNCATE = 1 << 14


READ: Final = Right.READ_FILE | Right.READ_DIR
WRITE: Final = Right.WRITE_FILE | Right.TRUNCATE
OWN: Final = (
    READ
    | WRITE
    | Right.MAKE_REG
    | Right.MAKE_DIR
    | Right.MAKE_SOCK
    | Right.REMOVE_FILE
    | Right.REMOVE_DIR
)
"""Of a directory that belongs to the plugin. A file is never moved to another directory: without a
rule for it (LANDLOCK_ACCESS_FS_REFER) every kernel refuses that."""
DEVICES: Final = Right.READ_FILE | Right.WRITE_FILE | Right.READ_DIR

_OF_FILES: Final = Right.EXECUTE | Right.READ_FILE | WRITE
"""What a rule on a file, not a directory, may have; the kernel refuses others."""

_FIRST: Final = Right((1 << 13) - 1)
"""All rights of the first version."""
_ABI_OF_TRUNCATE: Final = 3


class _Attributes(ctypes.Structure):
    """The first member of struct landlock_ruleset_attr, which all kernels know."""

    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _layout_ = "ms"  # what packing means; Python 3.14 warns unless it is said
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


@dataclass(frozen=True, slots=True)
class Restricted:
    """What holds.

    Attributes:
        abi: what the kernel knows.
        left_out: paths whose rules the kernel did not take, and why: they are not reached.
    """

    abi: int
    left_out: tuple[str, ...] = ()


def restrict(rules: Mapping[str, Right]) -> Restricted:
    """Allow what the rules say and nothing else, for good.

    Args:
        rules: what is allowed beneath a directory, or of a file. Those that are not there are left
            out.

    Raises:
        OSError: the kernel has no Landlock, or the process's starter forbids it.
        RuntimeError: there are other threads.
    """
    system.require_one_thread()
    abi = system.syscall(_CREATE_RULESET, None, 0, _VERSION)
    handled = _FIRST | Right.TRUNCATE if abi >= _ABI_OF_TRUNCATE else _FIRST
    left_out: list[str] = []
    with _ruleset(handled) as ruleset:
        for path, allowed in rules.items():
            try:
                _allow(ruleset, path, allowed & handled)
            except FileNotFoundError:
                continue
            except OSError as error:
                left_out.append(f"{path}: {error.strerror}")
        system.forbid_new_privileges()
        system.syscall(_RESTRICT_SELF, ruleset, 0)
    return Restricted(abi, tuple(left_out))


@contextlib.contextmanager
def _ruleset(handled: Right) -> Iterator[int]:
    attributes = _Attributes(handled.value)
    descriptor = system.syscall(_CREATE_RULESET, attributes, ctypes.sizeof(attributes), 0)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _allow(ruleset: int, path: str, allowed: Right) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            allowed &= _OF_FILES
        system.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, _Beneath(allowed.value, descriptor), 0)
    finally:
        os.close(descriptor)
