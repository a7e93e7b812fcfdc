"""What a figure was measured on: without that it says nothing."""

import os
import platform
import re
from pathlib import Path


def machine(folder: Path) -> dict[str, object]:
    """The machine, with the disk that `folder` lies on."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "disk": _disk(folder),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def _cpu() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _disk(folder: Path) -> str:
    """Device, file system, and the disk's model where it has one."""
    number = os.stat(folder).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    kind = device = "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # Fields as in Documentation/filesystems/proc.rst: the third is major:minor; behind the
        # dash come the file system's type and its source.
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            kind, device = right.split()[:2]
            break
    queue = Path("/sys/class/block") / Path(device).name
    words = [device, kind]
    for name in ("device/model", "queue/rotational", "../queue/rotational"):
        try:
            text = (queue / name).read_text().strip()
        except OSError:
            continue
        words.append({"0": "no rotating disk", "1": "reported as rotating"}.get(text, text))
    return ", ".join(dict.fromkeys(words))
