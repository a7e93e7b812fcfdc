"""The kernel that simulated Alveo cards run under: sysfs, render nodes and their ioctls."""

import ctypes
import errno
import re
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from fpga_plugin.hardware.kernel import Handle, Registers
from fpga_plugin.hardware.simulated.alveo import loading
from fpga_plugin.hardware.simulated.alveo.board import AlveoBoard
from fpga_plugin.hardware.simulated.alveo.rack import AlveoRack
from fpga_plugin.hardware.simulated.kernel import SimulatedKernel
from fpga_plugin.hardware.simulated.pr import STUCK_SECONDS
from fpga_plugin.hardware.simulated.tree import Attribute, Lazy, Node, Symlink, failure, resolve

_NODE = re.compile(r"/dev/dri/renderD([0-9]{1,6})", re.ASCII)

# Once more and not from the code above this seam (include/xocl_ioctl.h, drm.h).
_VERSION, _READ_AXLF, _PREAD, _PWRITE = 0xC0406400, 0xC0286454, 0xC020644E, 0xC020644F
_HOT_RESET = 0x6455
_VERSION_ARGUMENT = struct.Struct("<iii4xQQQQQQ")
_UNMANAGED = struct.Struct("<I4xQQQ")


@dataclass(slots=True)
class _Open:
    """An open render node; dead once the node of its time is gone."""

    board: AlveoBoard
    opening: int

    @property
    def alive(self) -> bool:
        return not self.board.gone and self.board.openings == self.opening


class SimulatedXrtKernel:
    """Implements `fpga_plugin.hardware.kernel.Kernel`. Thread safe.

    Args:
        machine: the kernel of the DFL drivers' cards, which has the directory.
        pr_seconds: how long a load takes.
        stuck_seconds: how long one takes that is never answered.
        sleep: waits for a load; cannot be interrupted.
        now: the clock.
    """

    def __init__(
        self,
        machine: SimulatedKernel,
        *,
        pr_seconds: float = 0.05,
        stuck_seconds: float = STUCK_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine = machine
        self._owner = machine.owner
        self._lock = machine.rack.lock
        self._pr_seconds = pr_seconds
        self._stuck_seconds = stuck_seconds
        self._sleep = sleep
        self._open: dict[Handle, _Open] = {}
        self._next = 3
        with self._lock:
            self.rack = AlveoRack(machine.rack, now=now, tell=machine.tell, owner=machine.owner)
        machine.note_removal.append(self.rack.note_removal)

    def boot_id(self) -> str:
        """The machine's."""
        return self._machine.boot_id()

    def listdir(self, path: str) -> list[str]:
        """Names in a sysfs directory."""
        with self._lock:
            node = self._resolve(path)[1]
            if isinstance(node, (str, Attribute, Symlink)):
                raise failure(errno.ENOTDIR, path)
            return node.names()

    def realpath(self, path: str) -> str:
        """Where a sysfs path leads."""
        with self._lock:
            return self._resolve(path)[0]

    def exists(self, path: str) -> bool:
        """Whether a sysfs path leads anywhere."""
        try:
            self.realpath(path)
        except OSError:
            return False
        return True

    def instance(self, path: str) -> int:
        """Of a directory as of the DFL drivers'; of PF1's `shutdown` which life of xocl it is."""
        with self._lock:
            real, node = self._resolve(path)
            if isinstance(node, Lazy):
                return node.instance
            boards = self.rack.boards.values()
            return next((b.lives for b in boards if f"/{b.user_address}/" in real), 0)

    def read(self, path: str) -> str:
        """A sysfs attribute."""
        with self._lock:
            match self._resolve(path)[1]:
                case str() as text:
                    return text
                case Attribute(show=show) if show is not None:
                    return show().removesuffix("\n")
                case Attribute():
                    raise failure(errno.EACCES, path)
                case _:
                    raise failure(errno.EISDIR, path)

    def write(self, path: str, text: str) -> None:
        """Write a sysfs attribute."""
        with self._lock:
            match self._resolve(path)[1]:
                case Attribute(store=store) if store is not None and self._owner:
                    store(text)
                case str() | Attribute():
                    raise failure(errno.EACCES, path)
                case _:
                    raise failure(errno.EISDIR, path)

    def open(self, node: str, flags: int) -> Handle:
        """Open a render node; O_EXCL always fails, other opens are not limited."""
        match = _NODE.fullmatch(node)
        with self._lock:
            self.rack.look()
            board = None if match is None else self.rack.by_minor(int(match[1]))
            if board is None:
                raise failure(errno.ENOENT, node)
            if not self._owner:
                raise failure(errno.EACCES, node)
            if flags & 0o200:  # O_EXCL
                raise failure(errno.EBUSY, node)
            handle = Handle(self._next)
            self._next += 1
            self._open[handle] = _Open(board, board.openings)
            return handle

    def ioctl(self, handle: Handle, request: int, argument: bytes | int) -> int:
        """The ioctls that a plugin or a tenant needs; EINVAL for the rest."""
        with self._lock:
            file = self._file(handle)
            if request == _HOT_RESET:
                raise failure(errno.EOPNOTSUPP if file.board.copy & 1 << 5 else errno.EINVAL)
            if isinstance(argument, int):
                raise failure(errno.EFAULT)
            if request == _READ_AXLF:
                return loading.load(
                    file.board,
                    argument,
                    wait=self._wait,
                    pr_seconds=self._pr_seconds,
                    stuck_seconds=self._stuck_seconds,
                )
            if request in {_PREAD, _PWRITE}:
                _, address, size, buffer = _UNMANAGED.unpack(argument)
                if request == _PWRITE:
                    file.board.write_memory(
                        address, memoryview((ctypes.c_char * size).from_address(buffer))
                    )
                else:
                    ctypes.memmove(buffer, file.board.read_memory(address, size), size)
                return 0
            raise failure(errno.EINVAL)

    def query(self, handle: Handle, request: int, argument: bytes) -> bytes:
        """DRM_IOCTL_VERSION."""
        with self._lock:
            self._file(handle)
            if request != _VERSION:
                raise failure(errno.EINVAL)
            _, _, _, room, name, *rest = _VERSION_ARGUMENT.unpack(argument)
            ctypes.memmove(name, b"xocl"[:room], min(room, 4))
            return _VERSION_ARGUMENT.pack(2, 25, 0, 4, name, *rest)

    def map(self, handle: Handle, length: int) -> Registers:  # noqa: ARG002 - of the interface
        """No registers are played."""
        raise failure(errno.ENODEV)

    def close(self, handle: Handle) -> None:
        """Close a render node."""
        with self._lock:
            if (file := self._open.pop(handle, None)) is None:
                raise failure(errno.EBADF)
            if not file.board.gone:
                file.board.save()

    def _wait(self, seconds: float) -> None:
        """Let others look while a load runs."""
        self._lock.release()
        try:
            self._sleep(seconds)
        finally:
            self._lock.acquire()

    def _file(self, handle: Handle) -> _Open:
        self.rack.look()
        if (file := self._open.get(handle)) is None:
            raise failure(errno.EBADF)
        if not file.alive:
            raise failure(errno.ENODEV, file.board.card)
        return file

    def _resolve(self, path: str) -> tuple[str, Node]:
        self.rack.look()
        return resolve(self.rack.root, path)
