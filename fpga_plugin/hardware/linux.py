"""The real kernel: sysfs and device nodes, wherever they are mounted.

A DaemonSet may see the node's trees at other places than /sys and /dev. The rest of the code uses
the node's own paths, which containers are given too; only this module maps them.
"""

import errno
import fcntl
import mmap
import os

from fpga_plugin.hardware.kernel import Handle

_MAX_ATTRIBUTE = 65536
"""An attribute is at most a page; pages are up to 64 KiB (arm64)."""


class LinuxKernel:
    """Implements `fpga_plugin.hardware.kernel.Kernel`.

    Args:
        sysfs_root: where the node's /sys is.
        dev_root: where the node's /dev is.
    """

    def __init__(self, sysfs_root: str = "/sys", dev_root: str = "/dev") -> None:
        self._roots = {
            "sys": os.path.abspath(sysfs_root).rstrip("/"),
            "dev": os.path.abspath(dev_root).rstrip("/"),
        }

    def boot_id(self) -> str:
        """`/proc/sys/kernel/random/boot_id`; the same in every container of the node."""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()

    def listdir(self, path: str) -> list[str]:
        """Names in a sysfs directory; links are followed."""
        return os.listdir(self._host(path))

    def realpath(self, path: str) -> str:
        """Where a sysfs path leads, all links followed, as a path of the node.

        Links of sysfs are relative, so that they stay in the tree wherever that is mounted. What
        leads out of it leads nowhere: neither to a file of the container's nor into its own /sys.
        """
        found = os.path.realpath(self._host(path), strict=True)
        tree = path.removeprefix("/").partition("/")[0]
        root = os.path.realpath(self._roots[tree] or "/").rstrip("/")
        if found != root and not found.startswith(f"{root}/"):
            raise FileNotFoundError(errno.ENOENT, f"leads out of /{tree}", path)
        return f"/{tree}{found.removeprefix(root)}".rstrip("/")

    def exists(self, path: str) -> bool:
        """Whether a sysfs path leads anywhere."""
        try:
            self.realpath(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def instance(self, path: str) -> int:
        """The directory's inode number.

        sysfs numbers its nodes upwards, and when it begins again it raises the number's upper half
        (fs/kernfs/dir.c, __kernfs_new_node; before Linux 5.5 the same number may come again after
        2^31 others). The times of a directory say nothing: they are those of its cached inode.
        """
        return os.stat(self._host(path)).st_ino

    def read(self, path: str) -> str:
        """A sysfs attribute, without the newline at its end."""
        descriptor = os.open(self._host(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, _MAX_ATTRIBUTE).decode(errors="replace")
        finally:
            os.close(descriptor)
        return text.removesuffix("\n")

    def write(self, path: str, text: str) -> None:
        """Write a sysfs attribute in one write: its store function sees exactly `text`."""
        descriptor = os.open(self._host(path), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def open(self, node: str, flags: int) -> Handle:
        """Open a device node; it is never inherited by a child process."""
        return Handle(os.open(self._host(node), flags | os.O_CLOEXEC))

    def ioctl(self, handle: Handle, request: int, argument: bytes | int) -> int:
        """One ioctl, its return value.

        It may take seconds. fcntl.ioctl lets other threads run meanwhile only for an integer or for
        a buffer that it copies, which are those up to 1024 bytes (CPython, Modules/fcntlmodule.c).
        A mutable one, for of an immutable one it returns the contents and not the result.
        """
        if isinstance(argument, int):
            return fcntl.ioctl(handle, request, argument)
        result: int = fcntl.ioctl(handle, request, bytearray(argument), True)
        return result

    def map(self, handle: Handle, length: int) -> "MappedRegisters":
        """Map the beginning of an open device node; outlives its handle."""
        return MappedRegisters(handle, length)

    def query(self, handle: Handle, request: int, argument: bytes) -> bytes:
        """One ioctl that fills the struct that it is given."""
        buffer = bytearray(argument)
        fcntl.ioctl(handle, request, buffer, True)
        return bytes(buffer)

    def close(self, handle: Handle) -> None:
        """Close a device node."""
        os.close(handle)

    def _host(self, path: str) -> str:
        """Where this process finds a path of the node."""
        tree, slash, rest = path.removeprefix("/").partition("/")
        if (root := self._roots.get(tree)) is None:
            raise FileNotFoundError(errno.ENOENT, "neither below /sys nor below /dev", path)
        return f"{root}{slash}{rest}" or "/"


class MappedRegisters:
    """Implements `fpga_plugin.hardware.kernel.Registers`.

    An item of a memoryview of 64-bit words is copied as a whole (CPython, Objects/memoryobject.c,
    unpack_single and pack_single), which is one load or store on 64-bit machines.
    """

    def __init__(self, handle: Handle, length: int) -> None:
        try:
            self._mapping = mmap.mmap(handle, length)
        except ValueError:  # Python looks at a file's size before the kernel is asked
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO)) from None
        self._words = memoryview(self._mapping).cast("Q")

    def read(self, offset: int) -> int:
        """The register's value."""
        return self._words[offset // 8]

    def write(self, offset: int, value: int) -> None:
        """Set it."""
        self._words[offset // 8] = value

    def close(self) -> None:
        """Remove the mapping."""
        self._words.release()
        self._mapping.close()
