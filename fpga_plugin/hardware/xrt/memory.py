"""Clearing on-card memory: zeros written by address, over the banks of the image that is loaded.

Any opener of the render node may write all of the card's memory by its address
(userpf/xocl_bo.c, xocl_pwrite_unmgd_ioctl: there is no bounds check). That goes through memory
controllers, which the loaded image brings: a bank that it lacks cannot be reached, and keeps what
it has. Samples are read back. Nobody has tried this on hardware yet.
"""

import ctypes
import mmap
from collections.abc import Iterable, Iterator

from fpga_plugin.errors import HardwareError, printable_ascii
from fpga_plugin.hardware.image import MemoryBank
from fpga_plugin.hardware.kernel import Handle, Kernel
from fpga_plugin.hardware.xrt import defs
from fpga_plugin.ids import CardId

CHUNK = 16 << 20
"""Bytes written at once: the driver pins the pages that it reads from (xocl_init_unmgd)."""

SAMPLE = 4096
SAMPLES = 16
"""Read back of each bank, its first and last bytes among them."""


def clear(kernel: Kernel, handle: Handle, card: CardId, banks: Iterable[MemoryBank]) -> None:
    """Write zeros over banks, and read samples back.

    Raises:
        HardwareError: a bank cannot be written or read, or a sample is not zero.
    """
    with mmap.mmap(-1, CHUNK) as zeros, mmap.mmap(-1, SAMPLE) as sample:
        source, target = _address(zeros), _address(sample)
        for bank in banks:
            for offset in range(0, bank.size, CHUNK):
                size = min(CHUNK, bank.size - offset)
                _move(kernel, handle, defs.PWRITE_UNMGD, card, bank, offset, size, source)
            size = min(SAMPLE, bank.size)
            for offset in _sampled(bank.size):
                sample[:size] = b"\xff" * size  # what a driver that reads nothing leaves there
                _move(kernel, handle, defs.PREAD_UNMGD, card, bank, offset, size, target)
                if sample[:size].strip(b"\0"):
                    raise HardwareError(
                        f"memory bank {_tag(bank)} of card {card} is not clear at"
                        f" {bank.base + offset:#x}",
                        hint="what the last user left may still be in it",
                    )


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _sampled(size: int) -> Iterator[int]:
    last = max(size - SAMPLE, 0)
    steps = min(SAMPLES - 1, last)
    yield from sorted({last * step // steps for step in range(steps + 1)} if steps else {0})


def _move(  # noqa: PLR0917  # the fields of one request
    kernel: Kernel,
    handle: Handle,
    request: int,
    card: CardId,
    bank: MemoryBank,
    offset: int,
    size: int,
    address: int,
) -> None:
    try:
        kernel.ioctl(handle, request, defs.UNMANAGED.pack(bank.base + offset, size, address))
    except OSError as error:
        what = "written" if request == defs.PWRITE_UNMGD else "read back"
        raise HardwareError(
            f"memory bank {_tag(bank)} of card {card} cannot be {what} at"
            f" {bank.base + offset:#x} ({error.strerror})",
            hint="what the last user left may still be in it; see the kernel's log",
        ) from error


def _tag(bank: MemoryBank) -> str:
    return printable_ascii(bank.tag)
