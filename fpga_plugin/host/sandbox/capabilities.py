"""Capabilities: the process gives up all of them once it has what it needs.

The pod has to be privileged: nothing less lets a container open the FME's device node, which no
other device plugin can hand it (docs/security.md, "Privileges"). But privileged means every
capability of the kernel, and what the plugin does for the rest of its life takes none of them: the
device nodes, sysfs attributes and directories that it opens belong to root, who it stays, and the
DFL drivers ask for nothing but the file's mode (drivers/fpga of Linux 6.1 has no capable()). So
they are dropped, from the bounding set too, so that no program run later could have them, and with
no_new_privs, so that no setuid program gives them back. One may stay: CAP_DAC_OVERRIDE, where
something that the plugin has to read or write is not root's, such as a clone in a user's home.

What else keeps them from coming back is `seccomp`: in a user namespace of its own a process has all
of them again. Sources: capabilities(7), prctl(2), include/uapi/linux/capability.h and prctl.h.
"""

import ctypes
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.host.sandbox import system

CAP_DAC_OVERRIDE: Final = 1
"""To read and write files in spite of their modes."""

_CAP_SETPCAP: Final = 8

_VERSION_3: Final = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3: each set is two words of 32 bits."""

_PR_CAPBSET_READ: Final = 23
_PR_CAPBSET_DROP: Final = 24
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4

_READ: Final = os.R_OK | os.X_OK
_WRITE: Final = os.R_OK | os.W_OK | os.X_OK


class PrivilegesError(FpgaPluginError):
    """The kernel refuses to take privileges away, which it does not do without a filter."""


class _Header(ctypes.Structure):
    """struct __user_cap_header_struct; pid 0 is the calling thread."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Word(ctypes.Structure):
    """struct __user_cap_data_struct: 32 bits of each set."""

    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class Privileges:
    """What is left of them.

    Attributes:
        capabilities: their numbers.
        foreign: directories that need CAP_DAC_OVERRIDE; that is why it was kept.
    """

    capabilities: frozenset[int]
    foreign: tuple[str, ...]


def drop_privileges(*, readable: Iterable[str], writable: Iterable[str] = ()) -> Privileges:
    """Give up every capability, for good; call it before the first thread is made.

    Args:
        readable: directories that are read afterwards. Those that are not there do not count.
        writable: directories in which files are made afterwards.

    Raises:
        PrivilegesError: the kernel refuses.
        RuntimeError: there are threads already, which would keep theirs.
    """
    system.require_one_thread()
    libc = ctypes.CDLL(None, use_errno=True)
    permitted = _permitted(libc)
    try:
        system.forbid_new_privileges()
    except OSError as error:
        raise _refused("prctl", error) from error
    _prctl(libc, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    if _CAP_SETPCAP in permitted:
        _empty_bounding_set(libc)
    # What is only permitted does not help to open a file: without it effective, the modes decide.
    _set(libc, permitted=permitted & {CAP_DAC_OVERRIDE}, effective=())
    needs = [(path, _READ) for path in readable] + [(path, _WRITE) for path in writable]
    foreign = tuple(path for path, mode in needs if not _may(path, mode))
    keep = permitted & {CAP_DAC_OVERRIDE} if foreign else frozenset[int]()
    _set(libc, permitted=keep, effective=keep)
    return Privileges(keep, foreign if keep else ())


def _permitted(libc: ctypes.CDLL) -> frozenset[int]:
    words = (_Word * 2)()
    _check(libc.capget(ctypes.byref(_Header(_VERSION_3, 0)), words), "capget")
    return frozenset(
        32 * index + bit
        for index, word in enumerate(words)
        for bit in range(32)
        if word.permitted & 1 << bit
    )


def _set(libc: ctypes.CDLL, *, permitted: Collection[int], effective: Collection[int]) -> None:
    words = (_Word * 2)()
    for capability in permitted:
        words[capability // 32].permitted |= 1 << capability % 32
    for capability in effective:
        words[capability // 32].effective |= 1 << capability % 32
    _check(libc.capset(ctypes.byref(_Header(_VERSION_3, 0)), words), "capset")


def _empty_bounding_set(libc: ctypes.CDLL) -> None:
    """All that this kernel knows; reading one that it does not know fails."""
    capability = 0
    while libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        _prctl(libc, _PR_CAPBSET_DROP, capability)
        capability += 1


def _prctl(libc: ctypes.CDLL, option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)  # variadic: an int would leave the upper half of the register as it is
    _check(libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero), f"prctl({option})")


def _check(result: int, call: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise _refused(call, OSError(code, os.strerror(code)))


def _refused(call: str, error: OSError) -> PrivilegesError:
    return PrivilegesError(
        f"privileges cannot be given up ({call}: {error.strerror})",
        hint="let the container's seccomp profile allow capset and prctl",
    )


def _may(directory: str, mode: int) -> bool:
    """Whether its mode allows it; one that is not there allows everything."""
    # With effective_ids: access(2) alone would lend root what is only permitted.
    return os.access(directory, mode, effective_ids=True) or not os.path.lexists(directory)
