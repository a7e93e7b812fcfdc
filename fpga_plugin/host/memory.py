"""How much memory this process may have: its control group's limit, else the machine's memory.

A plugin that exceeds its pod's limit is killed, again at each start. So code that may need much
memory asks here first.
"""

import contextlib
import os
from collections.abc import Iterator

from fpga_plugin.host.kernel_files import lines_of

_V1_FILE, _V2_FILE = "memory.limit_in_bytes", "memory.max"

UNKNOWN = 256 << 20
"""The limit where nothing can be read."""


def memory_limit(*, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """The least of the limits that hold for this process, in bytes.

    A container sees its own group as the root of `cgroups` or, where it shares the node's cgroup
    namespace, by the path that `/proc/self/cgroup` reports (cgroups(7)). Each group above limits
    too.
    """
    limits = [*_group_limits(proc, cgroups), *_machine(proc)]
    return min(limits, default=UNKNOWN)


def _group_limits(proc: str, cgroups: str) -> Iterator[int]:
    for line in lines_of(os.path.join(proc, "self/cgroup")):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from _upwards(cgroups, path, _V2_FILE)
        elif "memory" in controllers.split(","):
            yield from _upwards(os.path.join(cgroups, "memory"), path, _V1_FILE)


def _upwards(root: str, path: str, name: str) -> Iterator[int]:
    """The limits of a group and of all above it; a part of the path may not be seen from here."""
    parts = [part for part in path.split("/") if part not in {"", ".", ".."}]
    for count in range(len(parts), -1, -1):
        for line in lines_of(os.path.join(root, *parts[:count], name)):
            with contextlib.suppress(ValueError):  # "max"
                yield int(line)


def _machine(proc: str) -> Iterator[int]:
    for line in lines_of(os.path.join(proc, "meminfo")):
        if line.startswith("MemTotal:"):
            with contextlib.suppress(ValueError, IndexError):
                yield int(line.split()[1]) << 10


def lies_in_memory(path: str, *, proc: str = "/proc") -> bool:
    """Whether a directory's file system keeps its files in memory (tmpfs, ramfs).

    What is written there counts against the memory limit and cannot be given back.
    """
    try:
        device = os.stat(path).st_dev
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines_of(os.path.join(proc, "self/mountinfo")):
        mount, _, rest = line.partition(" - ")  # proc_pid_mountinfo(5)
        fields = mount.split()
        if len(fields) > 2 and fields[2] == number:  # noqa: PLR2004  # mount id, parent, device
            return rest.split(" ", 1)[0] in {"tmpfs", "ramfs"}
    return False
