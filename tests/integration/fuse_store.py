"""A directory as a file system in user space whose server can be told not to answer any more.

What a network file system does when its server is gone, for one file or for all: the kernel's
calls wait, in every process, until the server answers or goes. `FuseStore` is the test's side; run
as a program this file is the server, which speaks the kernel's protocol (linux/fuse.h, 7.31) itself
and knows just enough of it to show a directory read only.
"""

import contextlib
import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

_LOOKUP, _FORGET, _GETATTR, _READLINK = 1, 2, 3, 5
_OPEN, _READ, _STATFS, _RELEASE, _FLUSH, _INIT = 14, 15, 17, 18, 25, 26
_OPENDIR, _READDIR, _RELEASEDIR, _ACCESS, _INTERRUPT, _BATCH_FORGET = 27, 28, 29, 34, 36, 42
_UNANSWERED = {_FORGET, _INTERRUPT, _BATCH_FORGET}
_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_DIRECT_IO = 1  # FOPEN_DIRECT_IO: every read reaches the server
_PARALLEL_DIROPS = 1 << 18  # FUSE_PARALLEL_DIROPS: a name that hangs holds up no other
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_DETACH = 2

EVERYTHING = "*"
CONTENTS = "/"
"""Everything but what its own directory is like."""


def why_not() -> str:
    """Why there can be no such file system here; empty where there can."""
    if os.geteuid() != 0:
        return "only root mounts a file system"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return ""


class FuseStore:
    """A directory, shown at another place by a server that hangs on demand."""

    def __init__(self, source: Path, mountpoint: Path) -> None:
        mountpoint.mkdir()
        self._mountpoint = mountpoint
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(source), str(mountpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answered()

    def hang(self, name: str) -> None:
        """Do not open or read files of this name any more; `EVERYTHING`: answer nothing at all."""
        self._tell(f"hang {name}")

    def answer(self) -> None:
        """Answer everything, what was asked meanwhile included."""
        self._tell("answer")

    def waiting(self) -> int:
        """How many calls of the kernel, each of a thread, wait for an answer."""
        return self._tell("count")

    def _tell(self, command: str) -> int:
        assert self._server.stdin is not None
        self._server.stdin.write(f"{command}\n")
        self._server.stdin.flush()
        return self._answered()

    def _answered(self) -> int:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the file system is not there"
        return int(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _umount(str(self._mountpoint))
        self._server.kill()  # the kernel answers for it: ENOTCONN
        self._server.wait()
        for pipe in (self._server.stdin, self._server.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def _umount(mountpoint: str) -> None:
    ctypes.CDLL(None).umount2(mountpoint.encode(), _MNT_DETACH)


class _Server:
    def __init__(self, source: str, mountpoint: str) -> None:
        self._paths = {1: source}
        self._numbers = {source: 1}
        self._lock = threading.Lock()
        self._hung: set[str] = set()
        self._waiting: list[bytes] = []
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other"
        libc = ctypes.CDLL(None, use_errno=True)
        flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
        if libc.mount(b"store", mountpoint.encode(), b"fuse", flags, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), mountpoint)

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, 1 << 20)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno not in {errno.ENOENT, errno.EINTR}:
                    raise
                continue
            if self._interrupts(request):
                continue
            with self._lock:
                if self._is_hung(request):
                    self._waiting.append(request)
                    continue
            self._reply(request)

    def command(self, line: str) -> int:
        word, _, name = line.strip().partition(" ")
        answered: list[bytes] = []
        with self._lock:
            if word == "hang":
                self._hung.add(name)
            elif word == "answer":
                self._hung.clear()
                answered, self._waiting = self._waiting, []
            count = len(self._waiting)
        for request in answered:
            self._reply(request)
        return count

    def _interrupts(self, request: bytes) -> bool:
        """As on a hard NFS mount, whoever is killed while he waits can die."""
        _, opcode, *_ = _IN.unpack_from(request)
        if opcode != _INTERRUPT:
            return False
        (unique,) = struct.unpack_from("<Q", request, _IN.size)
        with self._lock:
            given_up = [each for each in self._waiting if _IN.unpack_from(each)[2] == unique]
            self._waiting = [each for each in self._waiting if each not in given_up]
        for _ in given_up:
            with contextlib.suppress(OSError):
                os.write(self._device, _OUT.pack(_OUT.size, -errno.EINTR, unique))
        return True

    def _is_hung(self, request: bytes) -> bool:
        _, opcode, _, node, *_ = _IN.unpack_from(request)
        if opcode in {_INIT, _FORGET, _INTERRUPT, _BATCH_FORGET}:
            return False
        if opcode in {_FLUSH, _RELEASE, _RELEASEDIR}:  # no signal ends the wait for these, and
            return False  # closing what was only read asks the server of an NFS mount nothing
        name = os.path.basename(self._paths.get(node, ""))
        if CONTENTS in self._hung and not (node == 1 and opcode in {_GETATTR, _ACCESS}):
            return True
        return EVERYTHING in self._hung or (opcode in {_OPEN, _READ} and name in self._hung)

    def _reply(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = _IN.unpack_from(request)
        if opcode in _UNANSWERED:
            return
        failed, data = 0, b""
        try:
            data = self._answer(opcode, node, request[_IN.size :])
        except OSError as error:
            failed = -(error.errno or errno.EIO)
        with contextlib.suppress(OSError):  # whoever asked was killed
            os.write(self._device, _OUT.pack(_OUT.size + len(data), failed, unique) + data)

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes:  # noqa: PLR0911  # a table
        path = self._paths.get(node, "/nowhere")
        match opcode:
            case 26:  # _INIT
                return struct.pack(
                    "<IIIIHHIIHHI28x", 7, 31, 0, _PARALLEL_DIROPS, 12, 9, 1 << 16, 1, 0, 0, 0
                )
            case 1:  # _LOOKUP
                return self._entry(os.path.join(path, body[:-1].decode()))
            case 3:  # _GETATTR
                return struct.pack("<QII", 0, 0, 0) + _attributes(path, node)
            case 5:  # _READLINK
                return os.readlink(path).encode()
            case 14 | 27:  # _OPEN, _OPENDIR
                os.stat(path)
                return struct.pack("<QII", 0, _DIRECT_IO if opcode == _OPEN else 0, 0)
            case 15:  # _READ
                _, offset, size = struct.unpack_from("<QQI", body)
                with open(path, "rb") as file:
                    return os.pread(file.fileno(), size, offset)
            case 28:  # _READDIR
                _, offset, size = struct.unpack_from("<QQI", body)
                return _entries(path, offset, size)
            case 17:  # _STATFS
                return bytes(80)
            case 18 | 25 | 29:  # _RELEASE, _FLUSH, _RELEASEDIR
                return b""
            case _:
                raise OSError(errno.ENOSYS, "not needed")

    def _entry(self, path: str) -> bytes:
        os.lstat(path)
        number = self._numbers.setdefault(path, len(self._numbers) + 1)
        self._paths[number] = path
        # Valid for no time at all: each call of the kernel's reaches us.
        return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + _attributes(path, number)


def _attributes(path: str, number: int) -> bytes:
    found = os.lstat(path)
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    return _ATTR.pack(
        number,
        found.st_size,
        found.st_blocks,
        *(each // 10**9 for each in times),
        *(each % 10**9 for each in times),
        found.st_mode,
        found.st_nlink,
        found.st_uid,
        found.st_gid,
        0,
        4096,
        0,
    )


def _entries(path: str, offset: int, size: int) -> bytes:
    data = b""
    for number, name in enumerate(sorted(os.listdir(path))[offset:], offset + 1):
        kind = stat.S_IFMT(os.lstat(os.path.join(path, name)).st_mode) >> 12
        encoded = name.encode()
        entry = struct.pack("<QQII", number + 1, number, len(encoded), kind) + encoded
        entry += bytes(-len(entry) % 8)
        if len(data) + len(entry) > size:
            break
        data += entry
    return data


def main(source: str, mountpoint: str) -> None:
    """The server: a command a line, and for each how many calls wait."""
    server = _Server(source, mountpoint)
    threading.Thread(target=server.serve, daemon=True).start()
    print(0, flush=True)  # noqa: T201  # the protocol with the test
    for line in sys.stdin:
        print(server.command(line), flush=True)  # noqa: T201  # as above
    _umount(mountpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
