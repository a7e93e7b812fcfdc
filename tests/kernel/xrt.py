"""AMD's drivers and programs for Alveo cards, as Debian packages them, and our fake cards as
modules of Debian's kernel.

The drivers are built unmodified, once. That needs some minutes, in which the guest runs the
tests of other cards: those of Alveo cards come last, and wait for a file that says what was built.
The fake cards are a module of their own, so that a change of it builds nothing else.
"""

import hashlib
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import backports
from modules import with_dependencies
from sources import CannotRunError, Sources, run

SUITE = "trixie"
SOURCE, TOOLS = "xrt-xocl-dkms", "libxrt-utils-alveo"
"""Packages in its backports: the drivers' source; xrt-smi and xbmgmt."""

DRIVERS = {"xclmgmt": "mgmtpf", "xocl": "userpf"}
"""Modules, and where each lies below the package's driver/xocl."""

OWN = Path(__file__).parent / "fakealveo"
_BEFORE = ("crc32c_generic", "libcrc32c", "drm")
"""The kernel's own: what AMD's drivers need, and the checksum that libcrc32c asks for by name."""


class Building:
    """The build, in the background.

    Attributes:
        told: the file that appears when it has ended: the modules' paths in the order in which they
            are loaded, one a line; or, if it failed, one line that is no path, and says why.
    """

    def __init__(self, cache: Path, sources: Sources) -> None:
        self._folder = cache / "xrt"
        self._folder.mkdir(exist_ok=True)
        self.told = self._folder / "modules"
        self.told.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._run, args=[sources])
        self._thread.start()

    def _run(self, sources: Sources) -> None:
        begin = time.monotonic()
        try:
            text = "\n".join(map(str, _build(self._folder, sources)))
        except CannotRunError as error:
            text = f"AMD's drivers are missing: {' '.join(str(error).split())}"
        new = self.told.with_suffix(".new")
        new.write_text(f"{text}\n")
        new.replace(self.told)
        sys.stderr.write(f"test-kernel: AMD's drivers: {time.monotonic() - begin:.0f} s\n")

    def wait(self) -> None:
        """Until it has ended: the next run finds it done."""
        self._thread.join()


def _build(folder: Path, sources: Sources) -> list[Path]:
    for program in ("gcc", "make", "strip"):
        if shutil.which(program) is None:
            raise CannotRunError(f"{program} is missing (make deps DEPS=kernel)")
    built = _drivers(folder, sources)
    _tools(folder)
    return [*with_dependencies(sources, list(_BEFORE)), _fake(folder, sources), *built]


def _drivers(folder: Path, sources: Sources) -> list[Path]:
    built = [folder / f"{name}.ko" for name in DRIVERS]
    stamp = folder / "drivers"
    if stamp.exists() and stamp.read_text() == sources.release:
        return built
    stamp.unlink(missing_ok=True)
    unpacked = folder / "package"
    backports.unpack(SOURCE, SUITE, to=unpacked)
    (tree,) = unpacked.glob("usr/src/xrt-*/driver/xocl")
    for target, (name, where) in zip(built, DRIVERS.items(), strict=True):
        # By default its Makefile takes the caller's folder for its own.
        here = tree / where
        _make("-C", str(here), f"module_path={here}", f"KERNEL_SRC={sources.headers}")
        # Debug information is nine tenths of the file.
        run("strip", "--strip-debug", "-o", str(target), str(here / f"{name}.ko"))
    shutil.rmtree(unpacked)
    stamp.write_text(sources.release)
    return built


def _tools(folder: Path) -> None:
    """AMD's programs in a root of their own, `tools`, which the guest's tests change to."""
    stamp, tools = folder / "tools.done", folder / "tools"
    if not stamp.exists():
        backports.unpack(TOOLS, SUITE, to=tools, whole=True)
        for name in ("proc", "sys", "dev", "tmp"):  # what the guest mounts there
            (tools / name).mkdir(exist_ok=True)
        for name in ("bin", "lib", "lib64"):  # base-files would bring them
            if not (tools / name).exists():
                (tools / name).symlink_to(f"usr/{name}")
        stamp.touch()


def _fake(folder: Path, sources: Sources) -> Path:
    own = sorted(OWN.iterdir())
    key = hashlib.sha256(b"".join(path.read_bytes() for path in own)).hexdigest()
    key += sources.release
    work, stamp = folder / "fake", folder / "fake/stamp"
    target = work / "fakealveo.ko"
    if stamp.exists() and stamp.read_text() == key:
        return target
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(OWN, work)
    _make("-C", str(sources.headers), f"M={work}", "modules")
    stamp.write_text(key)
    return target


def _make(*arguments: str) -> None:
    # With less priority than the guest has, which runs beside it.
    run("nice", "-n", "15", "make", f"-j{os.cpu_count() or 1}", *arguments)
