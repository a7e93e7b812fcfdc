"""Opens the first FPGA region that the container was given, and says which accelerator is there.

For regions behind a port of Linux' DFL drivers; `hello_fpga.c` also opens VFIO groups.
"""

import ctypes
import fcntl
import mmap
import os
import struct

PORT_GET_REGION_INFO = 0xB642
"""DFL_FPGA_PORT_GET_REGION_INFO of <linux/fpga-dfl.h>."""

REGION_INFO = struct.Struct("<IIIIQQ")
"""struct dfl_fpga_port_region_info: argsz, flags, index (0: the AFU), padding, size, offset."""


def open_port(path: str) -> mmap.mmap:
    """The registers of the accelerator behind a port."""
    port = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        info = bytearray(REGION_INFO.pack(REGION_INFO.size, 0, 0, 0, 0, 0))
        fcntl.ioctl(port, PORT_GET_REGION_INFO, info)
        _, _, _, _, size, offset = REGION_INFO.unpack(info)
        return mmap.mmap(port, size, offset=offset)
    finally:
        os.close(port)


def main() -> None:
    """Say which accelerator the first region has."""
    path = os.environ["FPGA_DEVICE_1"]
    # Every AFU begins with its header and its id, the id's lower half first; read in 64 bits.
    registers = (ctypes.c_uint64 * 3).from_buffer(open_port(path))
    print(f"{path}: accelerator {registers[2]:016x}{registers[1]:016x}")  # noqa: T201  # what the program is for


main()
