"""/dev/vfio of the simulated machine: containers, groups, functions, as drivers/vfio has them."""

import errno
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from fpga_plugin.hardware.kernel import Handle
from fpga_plugin.hardware.simulated import functions
from fpga_plugin.hardware.simulated.board import ALL_ONES, Board
from fpga_plugin.hardware.simulated.faults import SimulatedFault
from fpga_plugin.hardware.simulated.functions import VfioDriver
from fpga_plugin.hardware.simulated.rack import Rack
from fpga_plugin.hardware.simulated.tree import failure

# Numbers of include/uapi/linux/vfio.h, once more and not from the code above this seam.
_SET_IOMMU, _GET_STATUS, _REGION_INFO = 0x3B66, 0x3B67, 0x3B6C
_SET_CONTAINER, _UNSET_CONTAINER, _GET_DEVICE = 0x3B68, 0x3B69, 0x3B6A
_NODE = re.compile(r"/dev/vfio/(vfio|[0-9]{1,9})", re.ASCII)
_PAGE = 4096
_TYPE1V2 = 3


@dataclass(slots=True)
class _File:
    """An open descriptor: of a container (no board), a group, or (`of` a group) a function."""

    board: Board | None = None
    index: int = 0
    of: Handle | None = None
    container: Handle | None = None
    domain: bool = False


class _Registers:
    """Registers of BAR 0, which nobody writes."""

    def __init__(self, board: Board, index: int) -> None:
        self._board = board
        self._index = index

    def read(self, offset: int) -> int:
        """All ones once the card is gone."""
        with self._board.machine.lock:
            if self._board.gone:
                return ALL_ONES
            return functions.registers(self._board, self._index)[offset // 8]

    def write(self, offset: int, value: int) -> None:
        """No effect."""

    def close(self) -> None:
        """Nothing is held."""


class VfioFiles:
    """Descriptors of VFIO's nodes. The caller holds the machine's lock.

    Args:
        rack: the cards.
        driver: of their functions.
        allocate: gives a number that no other descriptor has.
    """

    def __init__(self, rack: Rack, driver: VfioDriver, allocate: Callable[[], Handle]) -> None:
        self._rack = rack
        self._driver = driver
        self._allocate = allocate
        self._files: dict[Handle, _File] = {}

    def __contains__(self, handle: Handle) -> bool:
        return handle in self._files

    @staticmethod
    def is_node(node: str) -> bool:
        """Whether a path is one of VFIO's."""
        return _NODE.fullmatch(node) is not None

    def open(self, node: str) -> Handle:
        """Open the container's node or a group's; a group is opened by one at a time.

        Raises:
            OSError: ENOENT, EBUSY.
        """
        name = node.rpartition("/")[2]
        if name == "vfio":
            return self._new(_File())
        self._rack.look_at_all()
        for board in self._rack.boards.values():
            for index, driver in enumerate(functions.drivers(board)):
                if functions.group(board, index) != int(name) or driver != functions.VFIO:
                    continue
                tenant = (
                    self._rack.machine.faults.armed(board.region(0)) is SimulatedFault.PORT_OPEN
                )
                if tenant or int(name) in self._driver.open:
                    raise failure(errno.EBUSY, node)
                self._driver.open.add(int(name))
                return self._new(_File(board, index))
        raise failure(errno.ENOENT, node)

    def ioctl(self, handle: Handle, request: int, argument: bytes | int) -> int:
        """Those that a plugin needs; EINVAL for the rest."""
        file = self._files[handle]
        if file.board is None:
            if request != _SET_IOMMU or argument != _TYPE1V2 or file.domain:
                raise failure(errno.EINVAL)
            if not any(group.container == handle for group in self._files.values()):
                raise failure(errno.ENODEV)
            file.domain = True
            return 0
        if file.of is None:
            return self._group(handle, file, request, argument)
        raise failure(errno.EINVAL)

    def query(self, handle: Handle, request: int, argument: bytes) -> bytes:
        """Those that fill a struct."""
        file = self._files[handle]
        if file.board is None:
            raise failure(errno.EINVAL)
        if request == _GET_STATUS and file.of is None:
            return struct.pack("<II", 8, 1 | (file.container is not None) << 1)
        if request == _REGION_INFO and file.of is not None:
            index = struct.unpack("<IIIIQQ", argument)[2]
            return struct.pack("<IIIIQQ", 32, 7, index, 0, _PAGE, index << 40)
        raise failure(errno.EINVAL)

    def map(self, handle: Handle) -> "_Registers":
        """BAR 0 of a function."""
        file = self._files[handle]
        if file.board is None or file.of is None:
            raise failure(errno.EINVAL)
        return _Registers(file.board, file.index)

    def close(self, handle: Handle) -> None:
        """Close one; a group that goes leaves its container."""
        file = self._files.pop(handle)
        if file.board is not None and file.of is None:
            self._driver.open.discard(functions.group(file.board, file.index))

    def _group(self, handle: Handle, file: _File, request: int, argument: bytes | int) -> int:
        board = file.board
        assert board is not None, "a group's"
        if request == _SET_CONTAINER and isinstance(argument, bytes) and file.container is None:
            container = Handle(struct.unpack("<i", argument)[0])
            if container not in self._files or self._files[container].board is not None:
                raise failure(errno.EINVAL)
            file.container = container
            return 0
        if request == _UNSET_CONTAINER and file.container is not None:
            if any(other.of == handle for other in self._files.values()):
                raise failure(errno.EBUSY)
            file.container = None
            return 0
        if request == _GET_DEVICE and isinstance(argument, bytes):
            used = None if file.container is None else self._files.get(file.container)
            if used is None or not used.domain:
                raise failure(errno.EINVAL)
            name = argument.removesuffix(b"\0").decode()
            if board.gone or name != str(functions.address(board, file.index)):
                raise failure(errno.ENODEV)
            return self._new(_File(board, file.index, of=handle))
        raise failure(errno.EINVAL)

    def _new(self, file: _File) -> Handle:
        handle = self._allocate()
        self._files[handle] = file
        return handle
