"""AMD's drivers and programs for Alveo cards, as Debian packages them, and our fake cards as
modules of Debian's kernel.

The drivers are built unmodified, once: that needs some minutes. The fake cards are a module of
their own, so that a change of it builds nothing else.
"""

import hashlib
import os
import shutil
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


def build(cache: Path, sources: Sources) -> list[Path]:
    """Build the modules where they changed; returns them in the order in which they are loaded.

    Raises:
        CannotRunError: the drivers or the programs cannot be had, or the drivers not be built.
    """
    for program in ("gcc", "make", "strip"):
        if shutil.which(program) is None:
            raise CannotRunError(f"{program} is missing (make deps DEPS=kernel)")
    folder = cache / "xrt"
    folder.mkdir(exist_ok=True)
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
    run("nice", "make", f"-j{os.cpu_count() or 1}", *arguments)
