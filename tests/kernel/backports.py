"""One package of a Debian suite that is not the machine's own, unpacked and installed nowhere.

The archive's address is that of the machine's own sources; the suite's lists stay in a folder of
ours, and apt checks them by the keys of Debian's archive.
"""

import shutil
from pathlib import Path

from sources import CannotRunError, run

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
"""Of the package debian-archive-keyring, which every Debian has."""


def archive() -> str:
    """The address that the machine has Debian's packages from.

    Raises:
        CannotRunError: its sources name no archive of Debian's.
    """
    shown = run(
        "apt-get",
        "indextargets",
        "--format",
        "$(LABEL) $(COMPONENT) $(REPO_URI)",
        "Created-By: Packages",
    )
    for line in shown.splitlines():
        label, _, rest = line.partition(" ")
        component, _, address = rest.partition(" ")
        if (label, component) == ("Debian", "main"):
            return address
    raise CannotRunError("apt's sources name no archive of Debian's: add one, then apt-get update")


def unpack(package: str, suite: str, *, scratch: Path, to: Path) -> str:
    """Download a package and unpack it; returns its version.

    Args:
        package: its name.
        suite: where it is, such as `trixie-backports`.
        scratch: a folder for apt's lists; it is emptied first and removed at the end.
        to: where the package's files go, as if it were `/`.

    Raises:
        CannotRunError: the suite or the package cannot be had, or its signature is wrong.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    lists, debs = scratch / "lists", scratch / "debs"
    for folder in (lists, debs):
        folder.mkdir(parents=True)
    sources = scratch / "debian.sources"
    sources.write_text(
        f"Types: deb\nURIs: {archive()}\nSuites: {suite}\nComponents: main\n"
        f"Architectures: amd64\nSigned-By: {KEYRING}\n"
    )
    (scratch / "status").touch()
    options = [
        f"-oDir::Etc::sourcelist={sources}",
        "-oDir::Etc::sourceparts=/dev/null",
        f"-oDir::State::lists={lists}",
        f"-oDir::State::status={scratch / 'status'}",
        "-oDir::Cache::pkgcache=",
        "-oDir::Cache::srcpkgcache=",
        "-oAPT::Architecture=amd64",
        "-oAPT::Sandbox::User=root",
    ]
    run("apt-get", *options, "--error-on=any", "update", "-qq")
    run("apt-get", *options, "download", "-q", package, cwd=debs)
    (deb,) = debs.glob("*.deb")
    run("dpkg-deb", "-x", str(deb), str(to))
    version = run("dpkg-deb", "-f", str(deb), "Version").strip()
    shutil.rmtree(scratch)
    return version
