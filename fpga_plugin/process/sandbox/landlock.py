"""Landlock rules: which files this process reaches from now on, whatever their modes say.

Everything that Landlock knows to forbid is forbidden, but for what a rule allows beneath a
directory. What it does not know to forbid stays as it was: looking at a file (stat), changing its
mode, owner or times, connecting to a socket, and what was opened before.

A rule belongs to a directory as it is now, not to its name: what takes its place later has none. So
where something may come later, the rule is on a directory that stays.

Kernels differ in what they know (the ABI: landlock(7)); each right that one lacks is left out.
"""

import contextlib
import ctypes
import enum
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from fpga_plugin.process.sandbox import system

# The same numbers everywhere (include/uapi/asm-generic/unistd.h).
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446

_VERSION: Final = 1 << 0  # LANDLOCK_CREATE_RULESET_VERSION
_PATH_BENEATH: Final = 1  # LANDLOCK_RULE_PATH_BENEATH
_SCOPES: Final = 1 << 0 | 1 << 1
"""LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET and _SIGNAL: neither reaches a process outside."""


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
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


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
"""Of a directory that belongs to the plugin. No right to move a file to another directory (REFER):
the oldest kernels have none to give, and it replaces files only within one."""
DEVICES: Final = Right.READ_FILE | Right.WRITE_FILE | Right.READ_DIR | Right.IOCTL_DEV

_OF_FILES: Final = Right.EXECUTE | Right.READ_FILE | WRITE | Right.IOCTL_DEV
"""What a rule on a file, not a directory, may have; the kernel refuses others."""

_LATER: Final = ((2, Right.REFER), (3, Right.TRUNCATE), (5, Right.IOCTL_DEV))
"""Rights that came after the first version, and with which."""
_ABI_OF_SCOPES: Final = 6


class _Attributes(ctypes.Structure):
    """struct landlock_ruleset_attr. Of the network nothing is forbidden: the ports of API servers
    and proxies are not ours to know, and a NetworkPolicy says it better."""  # noqa: D205, D209

    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _Beneath(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
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
        OSError: the kernel has no Landlock, or whoever started the process does not allow it.
        RuntimeError: there are other threads.
    """
    system.require_one_thread()
    abi = system.syscall(_CREATE_RULESET, None, 0, _VERSION)
    handled = _handled(abi)
    left_out: list[str] = []
    with _ruleset(abi, handled) as ruleset:
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


def _handled(abi: int) -> Right:
    """All rights that a kernel knows."""
    unknown = Right(0)
    for first, right in _LATER:
        if abi < first:
            unknown |= right
    return ~unknown


@contextlib.contextmanager
def _ruleset(abi: int, handled: Right) -> Iterator[int]:
    scoped = _SCOPES if abi >= _ABI_OF_SCOPES else 0
    try:
        descriptor = _create(handled, scoped)
    except OSError as error:
        # Kernels of RHEL 9 (5.14.0-603.el9 and later) say version 6 and have no scopes: seen by xz.
        if error.errno != errno.EINVAL or not scoped:
            raise
        descriptor = _create(handled, 0)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _create(handled: Right, scoped: int) -> int:
    attributes = _Attributes(handled.value, 0, scoped)
    # A kernel that does not know the later members takes a structure that has only zeros there.
    return system.syscall(_CREATE_RULESET, attributes, ctypes.sizeof(attributes), 0)


def _allow(ruleset: int, path: str, allowed: Right) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            allowed &= _OF_FILES
        system.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, _Beneath(allowed.value, descriptor), 0)
    finally:
        os.close(descriptor)
