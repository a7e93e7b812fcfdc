"""The system calls that the plugin has no use for, with their numbers and why they are refused.

A list of what is refused, not of what is allowed: Python, glibc and OpenSSL choose their system
calls themselves and choose others with each release (`clone3` for `clone`, `faccessat2` for
`access`), often on a path that runs once a month. An allow list that lacks one turns an update into
an outage; these are calls of which none has a part in what the plugin does. A call that is newer
than `LAST_REVIEWED` is answered as by a kernel that does not have it yet, for which every library
has a way around; so what the kernel gains is not open until somebody has looked at it.

Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

from dataclasses import dataclass
from typing import Final

LAST_REVIEWED: Final = 466
"""removexattrat, Linux 6.13. From 424 on every architecture has the same numbers."""


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that is refused; None: the architecture does not have it."""

    name: str
    x86_64: int | None
    aarch64: int | None


CLONE: Final = Call("clone", 56, 220)
CLONE3: Final = Call("clone3", 435, 435)
SOCKET: Final = Call("socket", 41, 198)
IOCTL: Final = Call("ioctl", 16, 29)

REFUSED: Final[dict[str, tuple[Call, ...]]] = {
    "another program or process": (
        Call("fork", 57, None),
        Call("vfork", 58, None),
        Call("execve", 59, 221),
        Call("execveat", 322, 281),
    ),
    "a namespace, in which capabilities come back": (
        Call("unshare", 272, 97),
        Call("setns", 308, 268),
    ),
    "another view of the file system": (
        Call("mount", 165, 40),
        Call("umount2", 166, 39),
        Call("pivot_root", 155, 41),
        Call("chroot", 161, 51),
        Call("open_tree", 428, 428),
        Call("move_mount", 429, 429),
        Call("fsopen", 430, 430),
        Call("fsconfig", 431, 431),
        Call("fsmount", 432, 432),
        Call("fspick", 433, 433),
        Call("mount_setattr", 442, 442),
    ),
    "files other than by a path, and device nodes": (
        Call("open_by_handle_at", 304, 265),
        Call("name_to_handle_at", 303, 264),
        Call("fanotify_init", 300, 262),
        Call("mknod", 133, None),
        Call("mknodat", 259, 33),
    ),
    "memory and files of another process": (
        Call("ptrace", 101, 117),
        Call("process_vm_readv", 310, 270),
        Call("process_vm_writev", 311, 271),
        Call("process_madvise", 440, 440),
        Call("pidfd_getfd", 438, 438),
        Call("kcmp", 312, 272),
        Call("move_pages", 279, 239),
        Call("migrate_pages", 256, 238),
    ),
    "the kernel itself, the clock and the machine": (
        Call("init_module", 175, 105),
        Call("finit_module", 313, 273),
        Call("delete_module", 176, 106),
        Call("create_module", 174, None),
        Call("query_module", 178, None),
        Call("get_kernel_syms", 177, None),
        Call("kexec_load", 246, 104),
        Call("kexec_file_load", 320, 294),
        Call("reboot", 169, 142),
        Call("swapon", 167, 224),
        Call("swapoff", 168, 225),
        Call("acct", 163, 89),
        Call("quotactl", 179, 60),
        Call("quotactl_fd", 443, 443),
        Call("nfsservctl", 180, 42),
        Call("syslog", 103, 116),
        Call("vhangup", 153, 58),
        Call("sethostname", 170, 161),
        Call("setdomainname", 171, 162),
        Call("settimeofday", 164, 170),
        Call("clock_settime", 227, 112),
        Call("adjtimex", 159, 171),
        Call("clock_adjtime", 305, 266),
        Call("iopl", 172, None),
        Call("ioperm", 173, None),
        Call("modify_ldt", 154, None),
        Call("personality", 135, 92),
        Call("uselib", 134, None),
        Call("_sysctl", 156, None),
        Call("sysfs", 139, None),
        Call("ustat", 136, None),
        Call("lookup_dcookie", 212, 18),
        Call("lsm_set_self_attr", 460, 460),
    ),
    "large parts of the kernel that are often found broken": (
        Call("bpf", 321, 280),
        Call("perf_event_open", 298, 241),
        Call("userfaultfd", 323, 282),
        Call("io_uring_setup", 425, 425),
        Call("io_uring_enter", 426, 426),
        Call("io_uring_register", 427, 427),
        Call("add_key", 248, 217),
        Call("request_key", 249, 218),
        Call("keyctl", 250, 219),
        Call("vmsplice", 278, 75),
        Call("remap_file_pages", 216, 234),
        Call("memfd_secret", 447, 447),
    ),
}
"""By what they would give to whoever has taken the process over."""
