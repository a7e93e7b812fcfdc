"""What xocl does with READ_AXLF (userpf/xocl_ioctl.c, subdev/icap.c), as it was seen.

Numbers and offsets stand here once more and do not come from the code above this seam: a slip there
must not meet the same slip here.
"""

import ctypes
import errno
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fpga_plugin.hardware.simulated.alveo.board import LOAD_BIT, AlveoBoard
from fpga_plugin.hardware.simulated.faults import SimulatedFault
from fpga_plugin.hardware.simulated.tree import failure
from fpga_plugin.ids import AfuId

_AXLF = struct.Struct("<Qi4xQIII4x")
_FORCE = 1
_LARGEST = 1 << 30
_PARTITION_METADATA = 20


@dataclass(frozen=True, slots=True)
class _File:
    """An xclbin as the driver reads it."""

    uuid: AfuId
    flat: bool
    interfaces: bytes | None


def parse(address: int) -> _File:
    """Read the file at an address of this process.

    Raises:
        OSError: EFAULT, there is none; EINVAL, it is no xclbin.
    """
    if not address:
        raise failure(errno.EFAULT)
    if ctypes.string_at(address, 8) != b"xclbin2\0":
        raise failure(errno.EINVAL)
    (length,) = struct.unpack("<Q", ctypes.string_at(address + 304, 8))
    if not 496 <= length <= _LARGEST:  # noqa: PLR2004  # the header's size with one section
        raise failure(errno.EINVAL)
    data = ctypes.string_at(address, length)
    (mode,) = struct.unpack_from("<H", data, 332)
    uuid = AfuId(data[416:432].hex())
    if not int(uuid, 16):
        raise failure(errno.EINVAL)
    blob = next((body for kind, body in _sections(data) if kind == _PARTITION_METADATA), None)
    return _File(uuid, flat=mode == 0, interfaces=blob)


def _sections(data: bytes) -> Iterator[tuple[int, bytes]]:
    (count,) = struct.unpack_from("<I", data, 448)
    for index in range(min(count, 64)):
        kind, offset, size = struct.unpack_from("<I20xQQ", data, 456 + 40 * index)
        yield kind, data[offset : offset + size]


def _fits(file: _File, board: AlveoBoard) -> bool:
    """Whether the shell has the interfaces that a file names; one that names none passes."""
    named = file.interfaces is not None and b"interface_uuid" in file.interfaces
    return not named or board.shape.interface_id.encode() in (file.interfaces or b"")


def load(
    board: AlveoBoard,
    argument: bytes,
    *,
    wait: Callable[[float], None],
    pr_seconds: float,
    stuck_seconds: float,
) -> int:
    """One READ_AXLF. `wait` lets the machine's lock go for so many seconds.

    Raises:
        OSError: as the driver says it.
    """
    address, kernel_bytes, kernels, _, _, flags = _AXLF.unpack(argument)
    if kernel_bytes:
        ctypes.string_at(kernels, kernel_bytes)  # the driver copies them: a bad address crashes
    file = parse(address)
    if not _fits(file, board):
        raise failure(errno.EINVAL, board.card)
    if board.state.bad == SimulatedFault.BAD_STATE:
        raise failure(errno.EDEADLK, board.card)
    fault = board.fault()
    if fault is SimulatedFault.PORT_OPEN:  # a process has a context
        raise failure(errno.EBUSY, board.card)
    if board.state.record == file.uuid and not flags & _FORCE:
        return 0  # nothing is streamed
    if board.copy & LOAD_BIT:
        board.fails(image_stays=True)
        raise failure(errno.ETIMEDOUT, board.card)
    if board.state.mask & LOAD_BIT or not board.state.management:
        wait(stuck_seconds)  # PF0 drops the request
        board.fails(image_stays=True)
        raise failure(errno.ETIMEDOUT, board.card)
    if fault in {SimulatedFault.PR_ERROR, SimulatedFault.PR_STUCK}:
        board.fails(image_stays=False)  # before its time is over: a load outlives the process
        board.use_up()
        wait(stuck_seconds if fault is SimulatedFault.PR_STUCK else pr_seconds)
        raise failure(errno.ETIMEDOUT, board.card)
    board.loads(file.uuid, flat=file.flat)
    wait(pr_seconds)
    return 0
