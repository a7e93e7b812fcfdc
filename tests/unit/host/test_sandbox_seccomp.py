"""Which system calls the filter refuses: as the kernel runs it, and for both architectures."""

import errno
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fpga_plugin.hardware.xrt.defs import IOCTLS
from fpga_plugin.host.sandbox import refused_calls, seccomp
from fpga_plugin.host.sandbox.refused_calls import REFUSED

ALLOWED = 0
ARCHITECTURES = sorted(seccomp._AUDIT_ARCH)


def verdict(architecture: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """The errno that the filter answers with, run here as the kernel would."""
    data = {0: number, 4: seccomp._AUDIT_ARCH[architecture] if audit is None else audit}
    for index in range(6):
        value = arguments[index] if index < len(arguments) else 0
        data[16 + 8 * index] = value & 0xFFFFFFFF
    lines = seccomp.program(architecture)
    at = accumulator = 0
    while True:
        code, true, false, value = lines[at]
        at += 1
        match code:
            case seccomp._LOAD:
                accumulator = data[value]
            case seccomp._EQUAL:
                at += true if accumulator == value else false
            case seccomp._GREATER:
                at += true if accumulator > value else false
            case seccomp._ANY_BIT:
                at += true if accumulator & value else false
            case seccomp._AND:
                accumulator &= value
            case seccomp._SHIFT:
                accumulator >>= value
            case seccomp._RETURN:
                return ALLOWED if value == seccomp._ALLOW else value & 0xFFFF
            case _:
                raise AssertionError(code)


def number(call: refused_calls.SystemCall, architecture: str) -> int:
    found = getattr(call, architecture)
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_call_of_the_list_is_refused(architecture: str):
    calls = [call for group in REFUSED.values() for call in group]
    for call in calls:
        if getattr(call, architecture) is not None:
            assert verdict(architecture, getattr(call, architecture)) == errno.EPERM, call.name
    numbers = [n for call in calls if (n := getattr(call, architecture)) is not None]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_thread_is_made_and_neither_a_process_nor_a_namespace(architecture: str):
    clone = number(refused_calls.CLONE, architecture)
    # As glibc 2.36 makes threads and processes (sysdeps/unix/sysv/linux/createthread.c, clone.c).
    assert verdict(architecture, clone, 0x3D0F00) == ALLOWED
    assert verdict(architecture, clone, 0x01200011) == errno.EPERM
    for bit in (0x20000, *(1 << shift for shift in range(25, 31))):
        assert verdict(architecture, clone, 0x3D0F00 | bit) == errno.EPERM
    assert verdict(architecture, number(refused_calls.CLONE3, architecture)) == errno.ENOSYS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_numbers_of_other_architectures_and_of_newer_kernels_mean_nothing(architecture: str):
    other = next(a for a in ARCHITECTURES if a != architecture)
    assert verdict(architecture, 0, audit=seccomp._AUDIT_ARCH[other]) == errno.ENOSYS
    assert verdict(architecture, 0, audit=0x40000003) == errno.ENOSYS  # i386
    assert verdict(architecture, 0x40000000) == errno.ENOSYS  # x32
    last = refused_calls.LAST_REVIEWED
    assert [verdict(architecture, n) for n in (last, last + 1)] == [ALLOWED, errno.ENOSYS]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sockets_are_of_the_families_that_the_plugin_speaks(architecture: str):
    call = number(refused_calls.SOCKET, architecture)
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
        assert verdict(architecture, call, family, 1, 0) == ALLOWED
    for family in (socket.AF_PACKET, socket.AF_VSOCK, socket.AF_ALG, socket.AF_CAN):
        assert verdict(architecture, call, family, 1, 0) == errno.EAFNOSUPPORT
    netlink = {n for n in range(32) if verdict(architecture, call, socket.AF_NETLINK, 3, n) == 0}
    assert netlink == {0, 15}  # NETLINK_ROUTE, NETLINK_KOBJECT_UEVENT


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ioctls_are_those_of_files_sockets_and_cards(architecture: str):
    call = number(refused_calls.IOCTL, architecture)
    allowed = {
        "FIONBIO": 0x5421, "FIOCLEX": 0x5451, "FIONREAD": 0x541B, "TCGETS": 0x5401,
        "TCGETS2": 0x802C542A, "TIOCGWINSZ": 0x5413, "SIOCGIFINDEX": 0x8933,
        "DFL_FPGA_FME_PORT_PR": 0xB680, "DFL_FPGA_PORT_RESET": 0xB640,
        "DFL_FPGA_PORT_GET_INFO": 0xB641,
        **{f"XRT {request:#x}": request for request in IOCTLS},
    }  # fmt: skip
    refused = {
        "BLKGETSIZE": 0x1260, "SG_IO": 0x2285, "NVME_IOCTL_ADMIN_CMD": 0xC0484E41,
        "KVM_CREATE_VM": 0xAE01, "FS_IOC_SETFLAGS": 0x40086602,
        "DRM_IOCTL_MODE_CREATE_DUMB": 0xC02064B2, "DRM_IOCTL_XOCL_HOT_RESET": 0x6455,
        "DRM_IOCTL_XOCL_CTX": 0xC0206448,
    }  # fmt: skip
    for name, request in allowed.items():
        assert verdict(architecture, call, 3, request) == ALLOWED, name
    for name, request in refused.items():
        assert verdict(architecture, call, 3, request) == errno.EPERM, name


GENERIC = Path("/usr/include/asm-generic/unistd.h")
X86_64 = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


@pytest.mark.parametrize(("architecture", "header"), [("x86_64", X86_64), ("aarch64", GENERIC)])
def test_the_numbers_are_the_kernels(architecture: str, header: Path):
    if not header.exists():
        pytest.skip(f"{header} is not there (linux-libc-dev)")
    found = re.findall(
        r"^#define __NR(?:3264)?_(\w+)[ \t]+(\d+)$", header.read_text(), re.MULTILINE
    )
    numbers = {name: int(value) for name, value in found}
    calls = [call for group in REFUSED.values() for call in group]
    special = [refused_calls.CLONE, refused_calls.CLONE3, refused_calls.SOCKET, refused_calls.IOCTL]
    for call in [*calls, *special]:
        assert numbers.get(call.name) == getattr(call, architecture), call.name
    assert numbers["seccomp"] == seccomp._SYS_SECCOMP[architecture]


TRY = """
import ctypes, errno, fcntl, json, os, socket, sys, threading
from fpga_plugin.host.sandbox import seccomp
libc = ctypes.CDLL(None, use_errno=True)

def call(function, *arguments):
    ctypes.set_errno(0)
    return errno.errorcode.get(ctypes.get_errno()) if function(*arguments) < 0 else "done"

def attempt(function):
    try:
        return function() and "done"
    except OSError as error:
        return errno.errorcode[error.errno]

seccomp.restrict()
threads = []
thread = threading.Thread(target=lambda: threads.append(attempt(lambda: os.fork() or True)))
thread.start()
thread.join()
with open("/proc/self/status") as file:
    status = dict(line.split(":\\t", 1) for line in file)
print(json.dumps({
    "unshare": call(libc.unshare, 0x10000000),
    "fork": attempt(lambda: os.fork() or True),
    "fork in a thread": threads[0],
    "exec": attempt(lambda: os.execv("/bin/true", ["true"])),
    "packet": attempt(lambda: socket.socket(socket.AF_PACKET)),
    "inet": attempt(socket.socket),
    "unix": attempt(lambda: socket.socket(socket.AF_UNIX)),
    "addresses": attempt(lambda: socket.getaddrinfo("localhost", 80)),
    "winsize": attempt(lambda: fcntl.ioctl(os.openpty()[0], 0x5413, bytes(8))),
    "Seccomp": status["Seccomp"].strip(),
    "NoNewPrivs": status["NoNewPrivs"].strip(),
}))
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernel_refuses_what_the_plugin_has_no_use_for_and_nothing_else():
    assert json.loads(run(TRY)) == {
        "unshare": "EPERM",
        "fork": "EPERM",
        "fork in a thread": "EPERM",
        "exec": "EPERM",
        "packet": "EAFNOSUPPORT",
        "inet": "done",
        "unix": "done",
        "addresses": "done",
        "winsize": "done",
        "Seccomp": "2",
        "NoNewPrivs": "1",
    }


def test_the_filter_is_refused_where_another_thread_would_stay_unconfined():
    assert "second" in run("""
import threading
from fpga_plugin.host.sandbox import seccomp
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
try:
    seccomp.restrict()
except RuntimeError as error:
    print(error)
stop.set()
thread.join()
""")


def test_an_unknown_architecture_has_no_filter(monkeypatch):
    monkeypatch.setattr("fpga_plugin.host.sandbox.system.architecture", lambda: "riscv64")
    with pytest.raises(OSError, match="no system calls are known of riscv64"):
        seccomp.restrict()
