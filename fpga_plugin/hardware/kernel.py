"""The seam between hardware code and a kernel: the real one, or the one that simulated cards play.

Paths are those of a node (`/sys/...`, `/dev/...`); an implementation maps them onto wherever it
finds the trees. Everything raises `OSError` with the errno that Linux gives. All of it blocks.
"""

from typing import NewType, Protocol

Handle = NewType("Handle", int)
"""An open device node."""


class Registers(Protocol):
    """Registers of a device, mapped; each access is one of 64 bits, at a multiple of 8."""

    def read(self, offset: int) -> int:
        """The register's value."""

    def write(self, offset: int, value: int) -> None:
        """Set it."""

    def close(self) -> None:
        """Remove the mapping."""


class Kernel(Protocol):
    """What hardware code asks of a kernel."""

    def boot_id(self) -> str:
        """`/proc/sys/kernel/random/boot_id`."""

    def listdir(self, path: str) -> list[str]:
        """Names in a sysfs directory; links are followed."""

    def realpath(self, path: str) -> str:
        """Where a sysfs path leads, all links followed.

        Raises:
            FileNotFoundError: it leads nowhere.
        """

    def exists(self, path: str) -> bool:
        """Whether a sysfs path leads anywhere."""

    def instance(self, path: str) -> int:
        """A number that a sysfs directory shares with no later one of the same path."""

    def read(self, path: str) -> str:
        """A sysfs attribute, without the newline at its end."""

    def write(self, path: str, text: str) -> None:
        """Write a sysfs attribute in one write."""

    def open(self, node: str, flags: int) -> Handle:
        """Open a device node (`os.O_*`)."""

    def ioctl(self, handle: Handle, request: int, argument: bytes | int) -> int:
        """One ioctl; `argument` is a struct in the kernel's layout, or an integer.

        A struct may hold the address of a buffer of this process.
        """

    def map(self, handle: Handle, length: int) -> Registers:
        """Map the beginning of an open device node; outlives its handle."""

    def query(self, handle: Handle, request: int, argument: bytes) -> bytes:
        """One ioctl that fills the struct that it is given."""

    def close(self, handle: Handle) -> None:
        """Close a device node."""
