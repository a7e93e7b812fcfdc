"""Writes an initramfs: busybox, modules, the guest's first process and what it is to run."""

import gzip
import stat
from pathlib import Path

_HEADER = "070701" + "%08X" * 13


def _entry(name: str, mode: int, content: bytes, number: int) -> bytes:
    """One file in cpio's "newc" form (Linux, Documentation/driver-api/early-userspace)."""
    encoded = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    head = (_HEADER % fields).encode() + encoded
    head += bytes(-len(head) % 4)
    return head + content + bytes(-len(content) % 4)


def write(path: Path, files: dict[str, bytes]) -> None:
    """Write the archive; folders are made from the files' names, and all files can be run."""
    entries = []
    folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
    for number, name in enumerate(sorted(folders)):
        entries.append(_entry(name, stat.S_IFDIR | 0o755, b"", number))
    for number, (name, content) in enumerate(files.items(), len(folders)):
        entries.append(_entry(name, stat.S_IFREG | 0o755, content, number))
    # The kernel opens it for the first process before there is a /dev.
    entries.append(_entry("TRAILER!!!", 0, b"", 0))
    path.write_bytes(gzip.compress(b"".join(entries), compresslevel=1))
