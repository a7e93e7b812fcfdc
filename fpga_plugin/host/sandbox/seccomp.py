"""A seccomp filter: which system calls the kernel refuses to this process from now on.

Refused are the calls of `refused_calls`, new processes, sockets of families that the plugin does
not speak, and ioctls of drivers that are not its business. The filter is a program of the kernel's
classic BPF, which sees a call's number and arguments but no memory: so `clone3`, whose flags lie in
memory, is answered with ENOSYS, after which glibc makes its threads with `clone`.

A call is refused with EPERM and not with the death of the process: what a library tries and can do
without must not end a plugin that tenants rely on.

Sources: seccomp(2), include/uapi/linux/seccomp.h, filter.h, audit.h, bpf_common.h.
"""

import ctypes
import errno
import socket
import struct
from collections.abc import Iterator
from typing import Final

from fpga_plugin.host.sandbox import refused_calls, system
from fpga_plugin.host.sandbox.refused_calls import SystemCall

_SYS_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_SET_MODE_FILTER: Final = 1
_FLAG_TSYNC: Final = 1 << 0
_FLAG_SPEC_ALLOW: Final = 1 << 2
"""Before Linux 5.16 a filter also switched speculative execution off, against untrusted code in the
same process (Documentation/userspace-api/spec_ctrl.rst); here there is none, and it costs speed."""

_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000

# struct seccomp_data: where a call's number, its architecture and the lower half of each argument
# are. Both architectures are little-endian.
_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_ARGUMENTS: Final = 16

# BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGT|K, BPF_JMP|JSET|K, BPF_ALU|AND|K, BPF_ALU|RSH|K, BPF_RET
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _AND, _SHIFT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x74, 0x06

_CLONE_THREAD: Final = 0x00010000
_NAMESPACES: Final = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET (linux/sched.h)."""

_FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
_NETLINK_ROUTE: Final = 0  # glibc looks there which addresses this machine has (getaddrinfo)
_NETLINK_KOBJECT_UEVENT: Final = 15

_IOCTL_TYPES: Final = (
    0x3B,  # VFIO_TYPE of linux/vfio.h
    0x54,  # 'T': files, pipes and terminals (FIONBIO, FIOCLEX, FIONREAD, TCGETS)
    0x89,  # sockets (SIOCGIFINDEX)
    0xB6,  # DFL_FPGA_MAGIC of linux/fpga-dfl.h
)
"""Bits 8 to 15 of a request: which driver it is for."""

_IOCTLS: Final = (
    0xC0406400,  # DRM_IOCTL_VERSION of drm/drm.h
    0xC020644E,  # DRM_IOCTL_XOCL_PREAD_UNMGD, PWRITE_UNMGD and READ_AXLF of XRT's xocl_ioctl.h
    0xC020644F,
    0xC0286454,
)
"""Requests of a type that is not allowed as a whole: DRM's is that of every graphics card."""

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, value."""


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def restrict() -> str:
    """Install the filter, for good; returns what holds, for people.

    Raises:
        OSError: the kernel has no seccomp, or the process's starter forbids it. For
            an architecture whose calls are not known here, ENOSYS.
        RuntimeError: there are other threads.
    """
    system.require_one_thread()
    architecture = system.architecture()
    if architecture not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no system calls are known of {architecture}")
    code = b"".join(struct.pack("=HBBI", *one) for one in program(architecture))
    buffer = ctypes.create_string_buffer(code, len(code))
    described = _Program(len(code) // 8, ctypes.addressof(buffer))
    system.forbid_new_privileges()
    system.syscall(
        _SYS_SECCOMP[architecture], _SET_MODE_FILTER, _FLAG_TSYNC | _FLAG_SPEC_ALLOW, described
    )
    return f"{sum(1 for _ in _refused(architecture))} system calls refused"


def program(architecture: str) -> list[Instruction]:
    """The filter for an architecture."""
    last = refused_calls.LAST_REVIEWED
    lines: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT_ARCH[architecture]),
        _refuse(errno.ENOSYS),  # 32-bit programs' numbers mean other calls
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER, 0, 1, last),  # so are those of x32, from 2**30 on
        _refuse(errno.ENOSYS),
    ]
    for call, block in (
        (refused_calls.CLONE3, [_refuse(errno.ENOSYS)]),
        (refused_calls.CLONE, _clone()),
        (refused_calls.SOCKET, _socket()),
        (refused_calls.IOCTL, _ioctl()),
    ):
        lines += [(_EQUAL, 0, len(block), _number(call, architecture)), *block]
    for number in _refused(architecture):
        lines += [(_EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


def _refused(architecture: str) -> Iterator[int]:
    for calls in refused_calls.REFUSED.values():
        for call in calls:
            number = call.x86_64 if architecture == "x86_64" else call.aarch64
            if number is not None:
                yield number


def _number(call: SystemCall, architecture: str) -> int:
    number = call.x86_64 if architecture == "x86_64" else call.aarch64
    assert number is not None, f"{architecture} has {call.name}"
    return number


def _refuse(code: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


def _argument(index: int) -> Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _clone() -> list[Instruction]:
    """A thread, and neither a process nor a namespace."""
    return [
        _argument(0),
        (_ANY_BIT, 1, 0, _NAMESPACES),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        _refuse(errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _socket() -> list[Instruction]:
    """Kubelet's sockets, HTTP and the API server; of netlink, the two that are listened to.

    Other families (AF_ALG, AF_VSOCK, AF_TIPC) need no capability: their errors have let processes
    take over the node.
    """
    lines = [_argument(0)]
    for family in _FAMILIES:
        lines += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
    return [
        *lines,
        (_EQUAL, 1, 0, socket.AF_NETLINK),
        _refuse(errno.EAFNOSUPPORT),
        _argument(2),
        (_EQUAL, 2, 0, _NETLINK_ROUTE),
        (_EQUAL, 1, 0, _NETLINK_KOBJECT_UEVENT),
        _refuse(errno.EPROTONOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _ioctl() -> list[Instruction]:
    """Of the node's other devices, which he can open, an attacker controls none."""
    lines = [_argument(1)]
    for request in _IOCTLS:
        lines += [(_EQUAL, 0, 1, request), (_RETURN, 0, 0, _ALLOW)]
    lines += [(_SHIFT, 0, 0, 8), (_AND, 0, 0, 0xFF)]
    for kind in _IOCTL_TYPES:
        lines += [(_EQUAL, 0, 1, kind), (_RETURN, 0, 0, _ALLOW)]
    return [*lines, _refuse(errno.EPERM)]
