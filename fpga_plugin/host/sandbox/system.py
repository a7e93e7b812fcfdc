"""System calls by number, and prctl, as Python functions that raise OSError."""

import ctypes
import os
import threading
from typing import Final

_PR_SET_NO_NEW_PRIVS: Final = 38  # include/uapi/linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

Argument = int | ctypes.Array[ctypes.c_char] | ctypes.Structure | None
"""A number, or memory whose address is meant; None: a null pointer."""


def architecture() -> str:
    """The machine's, as the kernel calls it: `x86_64`, `aarch64`."""
    return os.uname().machine


def syscall(number: int, *arguments: Argument) -> int:
    """Make a system call.

    Raises:
        OSError: it failed.
    """
    # Variadic: a C int would leave the upper half of a register as it is.
    result: int = _libc.syscall(ctypes.c_long(number), *map(_register, arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def forbid_new_privileges() -> None:
    """No program run later gains any; the kernel requires it before it accepts a filter.

    Raises:
        OSError: it failed.
    """
    zero = ctypes.c_ulong(0)
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def require_one_thread() -> None:
    """What is taken away is taken from the calling thread, and from those that it makes later.

    Raises:
        RuntimeError: there are others, which would keep it.
    """
    if threading.active_count() > 1:
        raise RuntimeError("a thread keeps what it has: do this before there is a second one")


def _register(argument: Argument) -> ctypes.c_ulong | ctypes.c_void_p:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, int):
        return ctypes.c_ulong(argument)
    return ctypes.c_void_p(ctypes.addressof(argument))
