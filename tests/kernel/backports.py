"""Packages of a Debian release that is not the machine's own, unpacked and installed nowhere.

The archive's address is that of the machine's own sources. The release's lists are in a folder of
ours, and apt checks them by the keys of Debian's archive.
"""

import shutil
import tempfile
from pathlib import Path

from sources import CannotRunError, run

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
"""Of the package debian-archive-keyring, which every Debian has."""


def archive() -> str:
    """The address that the machine has Debian's packages from.

    Raises:
        CannotRunError: its sources name no archive of Debian's.
    """
    if (found := _archive()) is None:
        run("apt-get", "update", "-qq")  # whose archive it is stands in the lists
        found = _archive()
    if found is None:
        raise CannotRunError("apt's sources name no archive of Debian's: add one")
    return found


def _archive() -> str | None:
    shown = "$(LABEL) $(COMPONENT) $(REPO_URI)"
    targets = run("apt-get", "indextargets", "--format", shown, "Created-By: Packages")
    for line in targets.splitlines():
        match line.split():
            case ["Debian", "main", address]:
                return address
            case _:
                continue
    return None


def unpack(package: str, suite: str, *, to: Path, whole: bool = False) -> None:
    """Download a package and unpack it.

    Args:
        package: its name.
        suite: the one whose backports have it, such as `trixie`.
        to: a folder, made for it: the files go there as if it were `/`.
        whole: with all packages that it depends on, so that its programs run in there.

    Raises:
        CannotRunError: the suite or the package cannot be had, or its signature is wrong.
    """
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        scratch = Path(folder)
        options = _options(scratch, suite)
        run("apt-get", *options, "--error-on=any", "update", "-qq")
        wanted = f"{package}/{suite}-backports"
        if whole:
            install = ("install", "-y", "-q", "--download-only", "--no-install-recommends")
            run("apt-get", *options, *install, f"-t={suite}-backports", package)
        else:
            run("apt-get", *options, "download", "-q", wanted, cwd=scratch / "debs")
        for deb in (scratch / "debs").glob("*.deb"):
            run("dpkg-deb", "-x", str(deb), str(to))


def _options(scratch: Path, suite: str) -> list[str]:
    """What makes apt use folders of ours, where nothing is installed."""
    for folder in ("lists", "debs/partial"):
        (scratch / folder).mkdir(parents=True)
    sources = scratch / "debian.sources"
    sources.write_text(
        f"Types: deb\nURIs: {archive()}\nSuites: {suite} {suite}-backports\nComponents: main\n"
        f"Architectures: amd64\nSigned-By: {KEYRING}\n"
    )
    (scratch / "status").touch()
    return [
        f"-oDir::Etc::sourcelist={sources}",
        "-oDir::Etc::sourceparts=/dev/null",
        f"-oDir::State::lists={scratch / 'lists'}",
        f"-oDir::State::status={scratch / 'status'}",
        f"-oDir::Cache::archives={scratch / 'debs'}",
        "-oDir::Cache::pkgcache=",
        "-oDir::Cache::srcpkgcache=",
        "-oAPT::Architecture=amd64",
        "-oAPT::Architectures=amd64",
        "-oAPT::Sandbox::User=root",
    ]
