"""Loading an xclbin through PF1: the one way after which both functions know what is loaded.

A load through PF0 works under any mask and leaves PF1's record as it was. PF1 takes a file whose
uuid it believes to have for loaded; so every load is forced (userpf/xocl_ioctl.c).
"""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from fpga_plugin.errors import (
    ASK_THE_OPERATOR,
    CardGoneError,
    HardwareError,
    PortInUseError,
    ProgrammingError,
)
from fpga_plugin.hardware.image import ComputeKernel as XclbinKernel
from fpga_plugin.hardware.image import Xclbin
from fpga_plugin.hardware.kernel import Handle, Kernel
from fpga_plugin.hardware.model import Region
from fpga_plugin.hardware.sysfs import optional
from fpga_plugin.hardware.xrt import defs
from fpga_plugin.hardware.xrt.discovery import node_of
from fpga_plugin.hardware.xrt.handles import check_instance
from fpga_plugin.ids import RegionId

_NAME_BYTES = 64

_FAILURES = {
    errno.EINVAL: (
        "the driver refused the file: its shell, its version or its uuid",
        "build it for the interface id that `fpga-plugin card list` shows",
    ),
    errno.EOPNOTSUPP: (
        "the file is for another platform, by its time stamp",
        "build it for the platform that the card has",
    ),
    errno.EDEADLK: ("the driver has the card in a bad state", "a reset of the card ends that"),
    errno.EKEYREJECTED: (
        "the card takes signed files alone (icap's sec_level), and this one is not",
        "sign it, or set sec_level to 0",
    ),
    errno.ETIMEDOUT: (
        "the card did not answer, or PF0's mask forbids loads",
        "see the kernel's log on the node",
    ),
    errno.ENOMEM: ("the kernel had no memory for a copy of the file", "free memory on the node"),
    errno.ENODEV: ("the card is offline", "is it being reset? See the kernel's log"),
}
"""What the errno of READ_AXLF means and what helps (userpf/xocl_ioctl.c, subdev/icap.c)."""


@contextmanager
def opened(kernel: Kernel, region: Region) -> Iterator[Handle]:
    """A region's node, opened for the time of the context and no longer: a reset ends who has it.

    The node is looked up again, since a reset may have moved it, and once more when it is open: a
    minor that went to another card in between leads there.

    Raises:
        CardGoneError: it is not there.
        HardwareError: it cannot be opened, or its driver is another, or too old.
    """
    node = _looked_up(kernel, region)
    try:
        handle = kernel.open(node, os.O_RDWR)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENXIO, errno.ENODEV}:
            raise CardGoneError(
                f"{node} (region {region.id}) is not there: the card was removed or is being reset",
                hint="see `fpga-plugin card list` and the kernel's log",
                tenant=ASK_THE_OPERATOR,
            ) from error
        raise HardwareError(
            f"{node} (region {region.id}) cannot be opened ({error.strerror})",
            hint="see the kernel's log",
        ) from error
    try:
        check_driver(kernel, handle, node)
        if _looked_up(kernel, region) != node:
            raise CardGoneError(
                f"{node} is no longer the node of region {region.id}", hint="it is tried again"
            )
        yield handle
    finally:
        kernel.close(handle)


def _looked_up(kernel: Kernel, region: Region) -> str:
    check_instance(kernel, region)
    try:
        return node_of(kernel, region)
    except OSError as error:
        raise HardwareError(
            f"the node of region {region.id} cannot be looked up ({error.strerror})",
            hint="see the kernel's log",
        ) from error


def check_driver(kernel: Kernel, handle: Handle, node: str) -> None:
    """Make sure that an open node's driver understands the plugin's requests.

    Raises:
        HardwareError: it is another driver, or one before XRT 2.15.
    """
    name = ctypes.create_string_buffer(_NAME_BYTES)
    request = defs.VERSION_OF.pack(len(name), ctypes.addressof(name))
    try:
        answer = kernel.query(handle, defs.DRM_VERSION, request)
    except OSError as error:
        raise HardwareError(f"{node} does not tell its driver ({error.strerror})") from error
    major, minor, length = defs.VERSION.unpack(answer)
    driver = name.raw[: min(length, len(name))].decode("ascii", "replace")
    if driver != defs.USER_DRIVER or (major, minor) < defs.OLDEST_DRIVERS:
        raise HardwareError(
            f"{node} is not of {defs.USER_DRIVER} 2.15 or later, but of"
            f" {driver if driver.isalnum() else 'another driver'} {major}.{minor}",
            hint="device numbers moved, or the drivers are too old: see `fpga-plugin card list`",
        )


def load(kernel: Kernel, handle: Handle, region: RegionId, user: str, xclbin: Xclbin) -> None:
    """Load a file by force; up to a minute or more, and nothing can interrupt it.

    Raises:
        PortInUseError: a process has a context of the image that is there.
        ProgrammingError: it failed; what the card holds then is not known.
    """
    kernels = b"".join(map(_kernel, xclbin.kernels))
    keep = ctypes.create_string_buffer(kernels)
    bits = defs.KDS_ERT | defs.KDS_CU_DMA
    if xclbin.dataflow:
        bits |= defs.KDS_DATAFLOW
    data, address = _in_memory(xclbin.data)
    argument = defs.AXLF.pack(
        address, len(kernels), ctypes.addressof(keep), xclbin.slot_size, bits, defs.AXLF_FORCE
    )
    try:
        kernel.ioctl(handle, defs.READ_AXLF, argument)
    except OSError as error:
        code = error.errno
        assert code is not None, "a kernel gives one"
        if code == errno.EBUSY:
            raise PortInUseError(
                f"region {region} is in use: {holders(kernel, user)}",
                hint="`fuser -v` on its render node names who has it",
            ) from error
        what, hint = _FAILURES.get(code, (os.strerror(code), "see the kernel's log"))
        name = errno.errorcode.get(code, f"errno {code}")
        raise ProgrammingError(
            f"loading an xclbin into region {region} failed ({name}): {what}", hint=hint
        ) from error
    finally:
        del data, keep  # a caught error has this frame, and who frees the file finds it in use


def _in_memory(data: bytes | memoryview) -> tuple[object, int]:
    """What keeps a file where it is while the kernel reads it, and its address."""
    if isinstance(data, bytes):
        held = ctypes.c_char_p(data)
        address = ctypes.cast(held, ctypes.c_void_p).value
        assert address is not None, "c_char_p of bytes is never null"
        return held, address
    mapped = ctypes.c_char.from_buffer(data)
    return mapped, ctypes.addressof(mapped)


def _kernel(kernel: XclbinKernel) -> bytes:
    """What the driver has to know of a kernel: it reads no XML (shim.cpp, xclPrepareAxlf)."""
    head = defs.KERNEL_INFO.pack(
        kernel.name.encode(),
        kernel.address_range,
        len(kernel.arguments),
        defs.KERNEL_SOFTWARE_RESET * kernel.software_reset,
    )
    return head + b"".join(
        defs.ARGUMENT_INFO.pack(one.name.encode(), one.offset, one.size, defs.ARGUMENT_INPUT)
        for one in kernel.arguments
    )


def holders(kernel: Kernel, user: str) -> str:
    """Who has a context, as PF1's driver tells it, for people; openers without one it omits."""
    try:
        text = optional(kernel, f"{user}/kdsstat") or ""
    except OSError:
        text = ""
    pids = [word for word in text.partition("client pid:")[2].split() if word.isdigit()][:8]
    return f"process {', '.join(pids)} has a context" if pids else "a process has a context"
