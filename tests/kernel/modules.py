"""Builds the DFL drivers and our fake cards as modules of Debian's kernel, and orders modules."""

import hashlib
import os
import re
import shutil
from pathlib import Path

from sources import DRIVERS, CannotRunError, Sources, run

OWN = Path(__file__).parent / "fakedfl"

ORDER = (
    "fpga-mgr",
    "fpga-bridge",
    "fpga-region",
    "dfl",
    "dfl-fme-mgr",
    "dfl-fme-br",
    "dfl-fme-region",
    "dfl-fme",
    "dfl-afu",
    "dfl-emif",
    "intel-m10-bmc-hwmon",
    "fakedfl",  # its probes are on the drivers above, and dfl-pci is to find its cards
    "dfl-pci",
)


def build(cache: Path, sources: Sources) -> list[Path]:
    """Build the modules where they changed; returns them in the order in which they are loaded.

    Raises:
        CannotRunError: there is no compiler, or it failed.
    """
    folder = cache / "build"
    built = [folder / f"{name}.ko" for name in ORDER]
    own = sorted(OWN.iterdir())
    key = hashlib.sha256(b"".join(path.read_bytes() for path in own)).hexdigest()
    key += sources.release
    stamp = folder / "stamp"
    if stamp.exists() and stamp.read_text() == key:
        return built
    for program in ("gcc", "make"):
        if shutil.which(program) is None:
            raise CannotRunError(f"{program} is missing (make deps DEPS=kernel)")
    folder.mkdir(exist_ok=True)
    stamp.unlink(missing_ok=True)
    fpga = sources.drivers / "drivers/fpga"
    others = [sources.drivers / path for path in DRIVERS if "*" not in path]
    for path in [*fpga.glob("dfl*.[ch]"), *fpga.glob("fpga-*.c"), *others, *own]:
        shutil.copy(path, folder)
    jobs = f"-j{os.cpu_count() or 1}"
    run("nice", "make", jobs, "-C", str(sources.headers), f"M={folder}", "modules")
    stamp.write_text(key)
    return built


def with_dependencies(sources: Sources, names: list[str]) -> list[Path]:
    """The kernel's own modules of these names, each after those that it depends on."""
    files = {path.stem.replace("-", "_"): path for path in sources.modules.rglob("*.ko")}
    ordered: list[Path] = []

    def add(name: str) -> None:
        path = files.get(name.replace("-", "_"))
        if path is None or path in ordered:
            return  # built into the kernel
        depends = re.search(rb"\0depends=([^\0]*)\0", path.read_bytes())
        for other in filter(None, depends[1].decode().split(",") if depends else []):
            add(other)
        ordered.append(path)

    for name in names:
        add(name)
    return ordered
