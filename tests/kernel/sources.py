"""Debian's kernel, its headers and its source, unpacked into the clone and installed nowhere.

All are of one version: what `linux-image-amd64` stands for in the system's package lists. Of the
source only the drivers of DFL cards are unpacked, which Debian's kernel is built without.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

DRIVERS = (
    "drivers/fpga/*",
    "drivers/memory/dfl-emif.c",
    "drivers/hwmon/intel-m10-bmc-hwmon.c",
)
"""Paths in the kernel's source."""


class CannotRunError(Exception):
    """Something that this machine lacks; the message says what helps."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What was unpacked.

    Attributes:
        release: the kernel's, such as `6.1.0-56-amd64`.
        root: where the packages are unpacked, as if it were `/`.
        drivers: the kernel's source tree, drivers only.
    """

    release: str
    root: Path
    drivers: Path

    @property
    def headers(self) -> Path:
        """What modules are built against."""
        return self.root / "usr/src" / f"linux-headers-{self.release}"

    @property
    def vmlinuz(self) -> Path:
        """The kernel."""
        return self.root / "boot" / f"vmlinuz-{self.release}"

    @property
    def modules(self) -> Path:
        """The kernel's own modules."""
        return self.root / "lib/modules" / self.release / "kernel"

    @property
    def busybox(self) -> Path:
        """A static one."""
        return self.root / "bin/busybox"


def run(*command: str, cwd: Path | None = None, **more: object) -> str:
    """Run a command; returns what it wrote to standard output."""
    try:
        done = subprocess.run(  # type: ignore[call-overload]
            command, cwd=cwd, check=True, capture_output=True, text=True, **more
        )
    except subprocess.CalledProcessError as error:
        raise CannotRunError(f"{' '.join(command)}:\n{error.stdout}{error.stderr}") from error
    return str(done.stdout)


def fetch(cache: Path) -> Sources:
    """Download and unpack, where that was not done before.

    Raises:
        CannotRunError: this is no Debian on amd64, or packages cannot be had.
    """
    stamp = cache / "release"
    if not (stamp.exists() and all(any((cache / "source").glob(each)) for each in DRIVERS)):
        for program in ("apt-get", "apt-cache", "dpkg-deb", "xz"):
            if shutil.which(program) is None:
                raise CannotRunError(f"{program} is missing: this needs Debian's packages (amd64)")
        try:
            release = _fetch(cache)
        except CannotRunError:
            # No package lists, or lists that are older than the archive.
            try:
                run("apt-get", "update", "-qq")
            except CannotRunError as error:
                raise CannotRunError(f"the package lists are too old: {error}") from error
            release = _fetch(cache)
        stamp.write_text(release)
    release = stamp.read_text()
    return Sources(release, cache / "root", cache / "source")


def _fetch(cache: Path) -> str:
    depends = run("apt-cache", "depends", "--no-recommends", "linux-image-amd64")
    if (found := re.search(r"Depends: linux-image-((\d+\.\d+)\S*-amd64)\n", depends)) is None:
        raise CannotRunError("there is no linux-image-amd64 in the package lists")
    release, series = found[1], found[2]
    shown = run("apt-cache", "show", "--no-all-versions", f"linux-image-{release}")
    version = re.search(r"^Version: (\S+)$", shown, re.MULTILINE)
    headers = run("apt-cache", "depends", f"linux-headers-{release}")
    common = re.search(r"Depends: (linux-headers-\S+-common)", headers)
    kbuild = re.search(r"Depends: (linux-kbuild-\S+)", headers)
    if version is None or common is None or kbuild is None:
        raise CannotRunError(f"the package lists do not know linux-headers-{release}")
    packages = [
        f"linux-image-{release}",
        f"linux-headers-{release}",
        common[1],
        kbuild[1],
        f"linux-source-{series}",
    ]
    debs = cache / "debs"
    for leftover in (debs, cache / "root", cache / "source"):
        shutil.rmtree(leftover, ignore_errors=True)
        leftover.mkdir(parents=True)
    wanted = [f"{package}={version[1]}" for package in packages]
    run("apt-get", "download", "-q", *wanted, "busybox-static", cwd=debs)
    for deb in sorted(debs.iterdir()):
        if deb.name.startswith("linux-source"):
            _unpack_drivers(deb, cache / "source")
        else:
            run("dpkg-deb", "-x", str(deb), str(cache / "root"))
    makefile = cache / "root/usr/src" / f"linux-headers-{release}" / "Makefile"
    makefile.write_text(makefile.read_text().replace("/usr/src/", f"{cache}/root/usr/src/"))
    shutil.rmtree(debs)
    return release


def _unpack_drivers(deb: Path, to: Path) -> None:
    """Only the drivers: the tree has more than a gigabyte."""
    wildcards = " ".join(f"'*/{name}'" for name in DRIVERS)
    run(
        "bash",
        "-euo",
        "pipefail",
        "-c",
        f'dpkg-deb --fsys-tarfile "$1" | tar -xO --wildcards -f - "./usr/src/*.tar.xz"'
        f' | tar -xJ --strip-components=1 -C "$2" --wildcards {wildcards}',
        "unpack",
        str(deb),
        str(to),
    )
