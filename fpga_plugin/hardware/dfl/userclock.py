"""Measures a region's user clock: by its driver's files, or by the two registers of its counter.

The FIM has a counter. Its command register (CMD1) selects the clock to count, and its status
register (STS1) shows the frequency in units of 10 kHz. Where these registers are depends on
the card (OPAE's libraries/plugins/xfpga/usrclk and, for the second, its older user_clk_pgm_uclock):

    dfl*/userclk/frequency             "low high" in kHz, one file: the out-of-tree driver
    dfl_dev.*, feature 0x14, uio_dfl   CMD1 at 0x10, STS1 at 0x20 of the feature's registers
    userclk_freqcntr{cmd,sts}          the same two registers as files: ports of the first revision

Measuring changes nothing that an accelerator sees.
"""

import os
import re
import time
from collections.abc import Callable
from contextlib import closing

from fpga_plugin.errors import FpgaPluginError, HardwareError, quote
from fpga_plugin.hardware.backend import UserClock
from fpga_plugin.hardware.dfl.handles import port_of
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Region
from fpga_plugin.hardware.sysfs import children, number, optional

USER_CLOCK_FEATURE = 0x14
"""Id of the port's private feature (OPAE, opae_drv.h, PORT_FEATURE_ID_USER_CLOCK)."""

_COMMAND, _PLL, _STATUS = 0x10, 0x18, 0x20
_ALL_ONES = (1 << 64) - 1
_FEATURE = (1 << 12) - 1
"""Bits 11:0 of a feature's header."""
_LOCKED = 1 << 60
"""STS0: the clock's PLL has locked."""
_HIGH = 1 << 32
"""CMD1: count the user clock; 0: its half-rate clock."""
_COUNT = (1 << 17) - 1
"""STS1 bits 16:0."""
_COUNTS_PER_MHZ = 100
_SETTLING = 0.01
"""Seconds: the counter takes 2.6 ms for a count; OPAE waits 8 ms."""
_KHZ_PER_MHZ = 1000
_TWO = re.compile(r"([0-9]{1,9})[ \t]+([0-9]{1,9})", re.ASCII)
_MAX_MHZ = 2000
"""Faster than any FPGA's fabric: a register that says so was not read from one."""


def user_clock(kernel: Kernel, region: Region) -> UserClock:
    """What a region's user clock is now, in MHz.

    Never raises for what the hardware answers: what cannot be measured is reported in `source`.
    """
    for measure in (_by_vendors_driver, _by_uio, _by_files):
        try:
            if (clock := measure(kernel, port_of(region).sysfs)) is not None:
                return clock
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            return UserClock(None, None, f"its counter cannot be read: {error.strerror}{where}")
        except FpgaPluginError as error:
            return UserClock(None, None, error.message)
    return UserClock(None, None, "the port's driver has no counter for it")


def userclk_features(kernel: Kernel, port: str) -> list[str]:
    """Devices of the port that are its user clock.

    Raises:
        OSError: sysfs cannot be read.
        HardwareError: a feature's id is no number.
    """
    found = []
    for device in children(kernel, port, r"dfl_dev\.[0-9]{1,9}"):
        path = f"{device}/feature_id"
        text = optional(kernel, path)
        if text is not None and number(path, text) == USER_CLOCK_FEATURE:
            found.append(device)
    return found


def _by_vendors_driver(kernel: Kernel, port: str) -> UserClock | None:
    for device in children(kernel, port, r"dfl[-_.a-z0-9]{0,60}"):
        path = f"{device}/userclk/frequency"
        if (text := optional(kernel, path)) is None:
            continue
        if (match := _TWO.fullmatch(text)) is None:
            raise HardwareError(f"{path} says {quote(text)} where two frequencies belong")
        low, high = (int(part) / _KHZ_PER_MHZ for part in match.groups())
        return _checked(high, low, path)
    return None


def _by_uio(kernel: Kernel, port: str) -> UserClock | None:
    devices = userclk_features(kernel, port)
    if not devices:
        return None
    if (uio := next(children(kernel, f"{devices[0]}/uio", r"uio[0-9]{1,6}"), None)) is None:
        return UserClock(None, None, "its counter has no driver: load the module uio_dfl")
    return _counted_by_uio(kernel, uio)


def _counted_by_uio(kernel: Kernel, uio: str) -> UserClock:
    """By the first mapping of a UIO device; its registers need not begin at a page."""
    values = {}
    for name in ("offset", "size"):
        path = f"{uio}/maps/map0/{name}"
        values[name] = number(path, optional(kernel, path) or "")
    offset, size = values["offset"], values["size"]
    if offset % 8 or not offset + _STATUS + 8 <= size <= 1 << 24:
        raise HardwareError(f"{uio}/maps/map0 is {size} bytes with registers at {offset}")
    node = f"/dev/{uio.rpartition('/')[2]}"
    instance = kernel.instance(uio)
    handle = kernel.open(node, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = kernel.map(handle, size)
    finally:
        kernel.close(handle)
    with closing(mapped) as registers:
        # The node's number is given again when its device goes. While its directory is the one that
        # was looked at, it is this device's; and nothing is written to what is no clock.
        if kernel.instance(uio) != instance:
            raise HardwareError(f"{node} became another device's while it was opened")
        header = registers.read(offset)
        if header == _ALL_ONES or header & _FEATURE != USER_CLOCK_FEATURE:
            raise HardwareError(f"{node} shows no user clock, but 0x{header:x}")
        if not registers.read(offset + _PLL) & _LOCKED:
            raise HardwareError(f"the user clock's PLL is not locked ({node})")

        def count(select: int) -> int:
            registers.write(offset + _COMMAND, select)
            time.sleep(_SETTLING)
            return registers.read(offset + _STATUS)

        return _counted(count, node)


def _by_files(kernel: Kernel, port: str) -> UserClock | None:
    command, status = f"{port}/userclk_freqcntrcmd", f"{port}/userclk_freqcntrsts"
    if not kernel.exists(command) or not kernel.exists(status):
        return None

    def count(select: int) -> int:
        kernel.write(command, f"{select:#x}")
        time.sleep(_SETTLING)
        return number(status, kernel.read(status).strip())

    return _counted(count, status)


def _counted(count: Callable[[int], int], source: str) -> UserClock:
    high, low = count(_HIGH), count(0)
    if _ALL_ONES in {high, low}:
        raise HardwareError(f"the counter of the user clock reads all ones ({source})")
    return _checked(
        (high & _COUNT) / _COUNTS_PER_MHZ, (low & _COUNT) / _COUNTS_PER_MHZ or None, source
    )


def _checked(high: float, low: float | None, source: str) -> UserClock:
    if not 0 < high <= _MAX_MHZ:
        raise HardwareError(f"the user clock reads as {high:g} MHz, which is no clock ({source})")
    return UserClock(high, low, f"measured ({source})")
