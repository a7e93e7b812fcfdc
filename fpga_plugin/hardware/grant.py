"""What a container gets of a region. The backend makes it; the core hands it out and keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from msgspec import Meta

Path: TypeAlias = Annotated[str, Meta(pattern=r"^/[!-~]{1,254}\Z")]
"""A path on the node that can be a word of an environment variable and of a log line."""


DeviceNumber: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9]{1,8}:[0-9]{1,8}\Z")]
"""A character device as sysfs' `dev` and cgroups' device rules name it: `major:minor`."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or directory of the node that containers see.

    Attributes:
        host_path: where it is on the node.
        container_path: where containers see it.
        read_only: whether they only read it.
    """

    host_path: Path
    container_path: Path
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Grant:
    """What a container gets of one region.

    Kubelet keeps what Allocate answered for as long as the pod lives, over restarts and reboots,
    while the kernel's numbers of nodes move (invariant 10). So the ledger keeps the grant too, and
    compares it with the one that the backend makes for the region as it is now.

    Attributes:
        nodes: device nodes that lead to this region and to no other; they identify the grant. A
            container gets them at the same path, to read and write, and finds them in
            `FPGA_DEVICE_<REGION ID>`.
        shared: device nodes that containers of other regions get as well (`/dev/vfio/vfio`).
        mounts: files and directories that it needs.
        env: variables that it needs, besides `FPGA_DEVICE_<REGION ID>`.
    """

    nodes: Annotated[tuple[Path, ...], Meta(min_length=1)]
    shared: tuple[Path, ...] = ()
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, text: str) -> "Grant":
        """The grant that `str` wrote, with the fields that it has."""
        return cls(nodes=tuple(dict.fromkeys(text.split(","))))

    def __str__(self) -> str:
        """Its own nodes, separated by commas: the value of `FPGA_DEVICE_<REGION ID>`."""
        return ",".join(self.nodes)

    def reaches(self, other: "Grant") -> bool:
        """Whether both lead to the same region."""
        return set(self.nodes) == set(other.nodes)
