"""Makes the root of the final image: `collect.py PACKAGES ROOT`, in the Dockerfile's build stage.

It takes Python and its standard library, libudev, ldconfig (by which ctypes finds libudev), the
shared libraries that any of these or of the packages is linked with, and nothing else. What Debian
package each file came from is kept where scanners of images look (/var/lib/dpkg/status.d, as the
distroless images have it), and so are the licences.
"""

import compileall
import os
import py_compile
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
STDLIB = Path("/usr/lib", PYTHON)

LEFT_OUT = {
    "__pycache__",  # compiled anew, below
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "sitecustomize.py",  # a link to what is not taken
    "test",
    "tkinter",
    "turtledemo",
    "venv",
}
"""Of the standard library: what installs, draws, or teaches."""

MODULES_LEFT_OUT = ("_curses", "_dbm.", "nis.", "readline.")
"""For terminals and old databases: they bring Kerberos, ncurses and Berkeley DB."""

COMMAND = """\
#!/usr/bin/python3 -I
import sys
from fpga_plugin.commands.main import main
sys.exit(main())
"""
"""For `kubectl exec ... -- fpga-plugin status`: the kernel runs it without a shell."""

PROBE = "#!/usr/bin/python3 -IS\n"
"""Before the text of fpga_plugin/probe.py, for kubelet's probes. Without `site` there are no
packages, of which it needs none."""


def main(packages: Path, root: Path) -> None:
    """Make the root."""
    for directory in ("bin", "etc", "tmp", "usr/bin", "usr/lib", "usr/local/bin", "usr/sbin"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    # As Debian has them: the dynamic linker's path is /lib64/..., ctypes looks for /sbin/ldconfig.
    for link in ("lib", "lib64", "sbin"):
        (root / "usr" / link).mkdir(exist_ok=True)
        (root / link).symlink_to(f"usr/{link}")
    (root / "bin").rmdir()
    (root / "bin").symlink_to("usr/bin")

    files = {Path("/usr/bin", PYTHON), Path("/usr/sbin/ldconfig"), *_found("libudev.so.1")}
    files |= set(_standard_library())
    for path in sorted(files):
        _copy(path, root)
    (root / "usr/bin/python3").symlink_to(PYTHON)

    site = root / "usr/local/lib" / PYTHON / "dist-packages"
    shutil.copytree(packages, site, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(site / "bin", ignore_errors=True)  # commands of libraries
    commands = root / "usr/local/bin"
    (commands / "fpga-plugin").write_text(COMMAND)
    (commands / "fpga-plugin-probe").write_text(PROBE + (site / "fpga_plugin/probe.py").read_text())
    for command in commands.iterdir():
        command.chmod(0o755)

    for library in _libraries(root):
        _copy(library, root)
        files.add(library)

    (root / "etc/passwd").write_text("root:x:0:0:root:/:/sbin/nologin\n")
    (root / "etc/group").write_text("root:x:0:\n")
    _say_where_from(files, root)
    license_file = root / "usr/share/doc/fpga-plugin/LICENSE"
    license_file.parent.mkdir(parents=True)
    shutil.copyfile("/build/LICENSE", license_file)

    subprocess.run(["/usr/sbin/ldconfig", "-r", root], check=True)
    # The root file system is read-only: what is not compiled now would be at each start. And
    # nothing in it changes: looking whether it did would cost a stat a module.
    compileall.compile_dir(
        root / "usr",
        quiet=1,
        stripdir=str(root),
        prependdir="/",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _found(name: str) -> Iterator[Path]:
    """A library of the dynamic linker's cache."""
    listed = subprocess.run(
        ["/usr/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True
    )
    for line in listed.stdout.splitlines():
        if line.split(" ")[0].strip() == name:
            yield Path(line.rpartition(" => ")[2])


def _standard_library() -> Iterator[Path]:
    for directory, directories, files in os.walk(STDLIB):
        directories[:] = [name for name in directories if not _is_left_out(name)]
        yield from (Path(directory, name) for name in files if not _is_left_out(name))


def _is_left_out(name: str) -> bool:
    # config-3.x is Python's own Makefile.
    return name in LEFT_OUT or name.startswith(("config-3", *MODULES_LEFT_OUT))


def _libraries(root: Path) -> set[Path]:
    """What the ELF files below a directory are linked with."""
    found: set[Path] = set()
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or not path.is_file() or path.read_bytes()[:4] != b"\x7fELF":
            continue
        listed = subprocess.run(["ldd", path], check=False, capture_output=True, text=True)
        if missing := re.findall(r"(\S+) => not found", listed.stdout):
            sys.exit(f"collect: {path} is linked with {missing}, which is not here")
        found |= {Path(each) for each in re.findall(r"(/\S+) \(0x", listed.stdout)}
    return {each for each in found if not each.is_relative_to(root)}


def _copy(path: Path, root: Path) -> None:
    """A file with all links on its way; Debian's /lib and /sbin are links to /usr's."""
    target = root / os.path.relpath(_merged(path), "/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        if not target.is_symlink():
            target.symlink_to(os.readlink(path))
        _copy(path.parent / os.readlink(path), root)
    elif not target.exists():
        shutil.copy2(path, target)


def _merged(path: Path) -> Path:
    path = Path(os.path.normpath(path))
    return path if path.is_relative_to("/usr") else Path(f"/usr{path}")


def _say_where_from(files: set[Path], root: Path) -> None:
    """For each Debian package that something came from: its licence and its entry."""
    names = {str(path) for path in files} | {str(path.resolve()) for path in files}
    # Packages still name /lib/x where the file is /usr/lib/x.
    names |= {name.removeprefix("/usr") for name in names}
    listed = subprocess.run(["dpkg", "-S", *names], check=False, capture_output=True, text=True)
    packages = {line.partition(":")[0] for line in listed.stdout.splitlines()}
    status = root / "var/lib/dpkg/status.d"
    status.mkdir(parents=True)
    for package in sorted(packages):
        entry = subprocess.run(
            ["dpkg-query", "-s", package], capture_output=True, text=True, check=True
        )
        (status / package).write_text(entry.stdout)
        licence = Path("/usr/share/doc", package, "copyright")
        target = root / os.path.relpath(licence, "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(licence.resolve(), target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
