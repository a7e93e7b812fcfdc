"""Is it still the same file? Three questions, each with its answer.

    inode     is it the same file, whatever was written to it?
    life      is it the file that was made then, and not a later one under the same name?
    version   is it the same file with the same content and the same permissions?

A file system may give the inode number of a removed file to the next one, so a life and a
version also contain the time of the inode's last change.
"""

import os

Inode = tuple[int, int]
"""Device and inode number: no two files that are there at the same time have the same."""

Version = tuple[int, ...]
"""What differs when a name stands for another file, or for the same one with other content."""


def inode_of(found: os.stat_result) -> Inode:
    """The device and inode number of a file."""
    return found.st_dev, found.st_ino


def inode_at(path: str) -> Inode | None:
    """Those of the file at a path; None where there is none, or it cannot be read."""
    try:
        return inode_of(os.stat(path))
    except OSError:
        return None


def instance_of(found: os.stat_result) -> str:
    """One life of a file that is made and removed but not changed, as a socket: `dev:ino:ctime`.

    The journal keeps it: kubelet's instance is the life of its socket.
    """
    return f"{found.st_dev}:{found.st_ino}:{found.st_ctime_ns}"


def version_of(found: os.stat_result) -> Version:
    """The version of a file."""
    return (
        found.st_dev,
        found.st_ino,
        found.st_mode,
        found.st_uid,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )


def version_at(path: str) -> Version | None:
    """The version of what a path leads to; None where there is nothing."""
    try:
        return version_of(os.stat(path))
    except (OSError, ValueError):
        return None
