"""The system calls that the plugin has no use for, with their numbers and why they are refused.

A list of what is refused, not of what is allowed: Python, glibc and OpenSSL choose their system
calls themselves and choose others with each release (`clone3` for `clone`, `faccessat2` for
`access`), often on a path that runs once a month. An allow list that lacks one turns an update into
an outage. The plugin uses none of the calls listed here, and the loss of capabilities alone does
not take them away. A call that is newer than `LAST_REVIEWED` is answered as by a
kernel that does not have it yet, for which every library has a way around; so what the kernel gains
is not open until somebody has looked at it.

Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

from dataclasses import dataclass
from typing import Final

LAST_REVIEWED: Final = 466
"""removexattrat, Linux 6.13. From 424 on every architecture has the same numbers."""


@dataclass(frozen=True, slots=True)
class SystemCall:
    """A system call that is refused; None: the architecture does not have it."""

    name: str
    x86_64: int | None
    aarch64: int | None


CLONE: Final = SystemCall("clone", 56, 220)
CLONE3: Final = SystemCall("clone3", 435, 435)
SOCKET: Final = SystemCall("socket", 41, 198)
IOCTL: Final = SystemCall("ioctl", 16, 29)

REFUSED: Final[dict[str, tuple[SystemCall, ...]]] = {
    # In a user namespace of its own a process has all capabilities again.
    "a namespace, in which capabilities come back": (
        SystemCall("unshare", 272, 97),
        SystemCall("setns", 308, 268),
    ),
    # What a memory error in a parser or in OpenSSL is most easily made to do.
    "another program or process": (
        SystemCall("fork", 57, None),
        SystemCall("vfork", 58, None),
        SystemCall("execve", 59, 221),
        SystemCall("execveat", 322, 281),
    ),
    # They need no capability, and errors in them have let processes take over the node.
    "large parts of the kernel that are often found broken": (
        SystemCall("bpf", 321, 280),
        SystemCall("perf_event_open", 298, 241),
        SystemCall("userfaultfd", 323, 282),
        SystemCall("io_uring_setup", 425, 425),
        SystemCall("io_uring_enter", 426, 426),
        SystemCall("io_uring_register", 427, 427),
        SystemCall("add_key", 248, 217),
        SystemCall("request_key", 249, 218),
        SystemCall("keyctl", 250, 219),
    ),
}
"""By what they would give to an attacker who has taken the process over.

What asks for a capability is not here (mounts, modules, kexec, the clock, device nodes, memory of
processes that have more): the process has none and, without a namespace of its own, gets none.
"""
