"""What `fpga-plugin bitstream sign` does: signatures beside files, and a store's manifest.

Blocks; belongs to the command. The daemon signs nothing and writes nothing to a store.
"""

import contextlib
import os

from fpga_plugin.bitstream.checks import digest_of
from fpga_plugin.bitstream.files import (
    Progress,
    no_progress,
    read_bytes,
    sync_directory,
    write_atomically,
)
from fpga_plugin.bitstream.manifest import ManifestFile, manifest_path, write_manifest
from fpga_plugin.bitstream.signatures import ENDING, sign
from fpga_plugin.bitstream.store import Store
from fpga_plugin.errors import BitstreamError, BitstreamNotFoundError


def sign_file(file: str, key: str, progress: Progress = no_progress) -> str:
    """Write the signature of a file beside it; returns the signature's path.

    Raises:
        BitstreamNotFoundError: there is no such file, or no such key.
        BitstreamError: one of them cannot be used, or the signature not be written.
    """
    data = _existing(file, progress)
    try:
        signature = sign(key, data)
    except (FileNotFoundError, NotADirectoryError):
        raise BitstreamNotFoundError(f"{key}: no such file", hint="check --key") from None
    write_atomically(file + ENDING, signature)
    return file + ENDING


def renew_manifest(store: Store, progress: Progress = no_progress) -> tuple[str, int]:
    """Write the manifest of all that is in a store; returns its path and how many files it names.

    The old one's signature goes: it would be of other bytes.

    Raises:
        BitstreamNotFoundError: there is no store.
        BitstreamError: a file of it cannot be used, which a manifest should not vouch for.
    """
    files = []
    for entry in store.list():
        if entry.problem is not None:
            raise BitstreamError(
                entry.problem.message,
                hint=f"repair or remove it first. {entry.problem.hint}".rstrip(),
            )
        content = digest_of(entry.path, inside=store.root, guarded=False, progress=progress)
        files.append(ManifestFile(store.relative(entry.path), content.sha256, content.size))
    path = manifest_path(store.root)
    data = write_manifest(files)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if read_bytes(path) == data:
            return path, len(files)
    remove_signature(path)
    write_atomically(path, data)
    return path, len(files)


def remove_signature(file: str) -> None:
    """Remove the signature beside a file, if there is one.

    Raises:
        BitstreamError: it cannot be removed.
    """
    try:
        os.unlink(file + ENDING)
        sync_directory(os.path.dirname(file) or ".")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise BitstreamError(f"{file}{ENDING}: cannot be removed: {error.strerror}") from error


def _existing(file: str, progress: Progress) -> bytes:
    try:
        return read_bytes(file, progress=progress)
    except (FileNotFoundError, NotADirectoryError):
        raise BitstreamNotFoundError(f"{file}: no such file", hint="check the path") from None
