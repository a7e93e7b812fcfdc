"""Putting bitstreams into a store, and taking them out.

The name of an installed file comes from its own metadata, never from the name that it had before,
so an installed file is what its path says. Blocks; belongs to the command: the daemon never writes
to the store.
"""

import contextlib
import os
from dataclasses import dataclass

from fpga_plugin.bitstream.files import read_bytes, sync_directory, write_atomically
from fpga_plugin.bitstream.gbs import parse_gbs
from fpga_plugin.bitstream.store import BLANK, Store
from fpga_plugin.errors import BitstreamError, BitstreamNotFoundError
from fpga_plugin.ids import BitstreamId, InterfaceId


@dataclass(frozen=True, slots=True)
class Installed:
    """What `install` did.

    Attributes:
        path: where the file is now.
        changed: False when the same file was there already.
    """

    path: str
    changed: bool


def install(store: Store, file: str, *, blank: bool = False, force: bool = False) -> Installed:
    """Copy a GBS file to its place in a store, in one step for readers.

    Args:
        store: where to.
        file: the GBS file.
        blank: it is the blank bitstream of its interface id.
        force: replace a different file that has the place.

    Raises:
        BitstreamNotFoundError: there is no `file`.
        BitstreamError: `file` cannot be used, the place is taken, or it cannot be written.
    """
    if not blank and os.path.basename(file) == f"{BLANK}.gbs":
        raise BitstreamError(
            f"{file}: by its name a blank bitstream",
            hint="say --blank to install it as that; rename it if it is an accelerator",
        )
    try:
        data = read_bytes(file)
    except (FileNotFoundError, NotADirectoryError):
        raise no_file(file) from None
    metadata = parse_gbs(data, where=file).metadata
    interface_id = metadata.interface_id
    bitstream_id = BitstreamId(metadata.afu_id)
    path = store.blank_path(interface_id) if blank else store.path(interface_id, bitstream_id)
    if _same(path, data):
        return Installed(path=path, changed=False)
    if os.path.lexists(path) and not force:
        raise BitstreamError(
            f"{path}: a different file is there",
            hint="compare the two with `fpga-plugin bitstream inspect`; --force replaces it",
        )
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except OSError as error:
        raise BitstreamError(
            f"{path}: cannot be written: {error.strerror}",
            hint="check the permissions of the store, or choose another with --dir",
        ) from error
    write_atomically(path, data)
    # Read it as the daemon will: a directory that is a link out of the store shows here.
    if blank:
        store.blank(interface_id)
    else:
        store.load(interface_id, bitstream_id)
    return Installed(path=path, changed=True)


def remove(store: Store, interface_id: InterfaceId, bitstream_id: BitstreamId | None) -> str:
    """Remove a bitstream from a store, whatever is in the file; returns its path.

    The interface id's directory goes too when nothing is left in it.

    Args:
        store: where from.
        interface_id: which directory.
        bitstream_id: which file; None: the blank bitstream.

    Raises:
        BitstreamNotFoundError: there is none.
        BitstreamError: it cannot be removed.
    """
    path = (
        store.blank_path(interface_id)
        if bitstream_id is None
        else store.path(interface_id, bitstream_id)
    )
    directory = os.path.dirname(path)
    try:
        os.unlink(path)
        sync_directory(directory)
    except (FileNotFoundError, NotADirectoryError):
        raise BitstreamNotFoundError(
            f"no bitstream {path}", hint="`fpga-plugin bitstream list` shows what there is"
        ) from None
    except OSError as error:
        raise BitstreamError(f"{path}: cannot be removed: {error.strerror}") from error
    with contextlib.suppress(OSError):  # not empty, or a link: then it stays
        os.rmdir(directory)
    return path


def no_file(path: str) -> BitstreamNotFoundError:
    """The error for a file on the command line that is not there."""
    return BitstreamNotFoundError(f"{path}: no such file", hint="check the path")


def _same(path: str, data: bytes) -> bool:
    try:
        return read_bytes(path) == data
    except (BitstreamError, OSError):
        return False
