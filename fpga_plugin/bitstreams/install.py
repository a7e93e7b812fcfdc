"""Putting bitstreams into a store, and taking them out.

The name of an installed file comes from its own metadata, never from the name that it had before,
so an installed file is what its path says. Blocks; belongs to the command: the daemon never writes
to the store.
"""

import contextlib
import os
from dataclasses import dataclass

from fpga_plugin.bitstreams.contents import Contents
from fpga_plugin.bitstreams.files import (
    Content,
    Progress,
    content_of,
    make_directory,
    no_progress,
    read_bytes,
    write_atomically,
)
from fpga_plugin.bitstreams.kinds import read_data
from fpga_plugin.bitstreams.places import Place, all_places, is_blank
from fpga_plugin.bitstreams.signatures import ENDING
from fpga_plugin.bitstreams.signing import remove_signature
from fpga_plugin.bitstreams.store import Store, check_no_directory
from fpga_plugin.bitstreams.trust import MAX_SIGNATURE_BYTES, Trust, check_signed
from fpga_plugin.errors import BitstreamError, BitstreamNotFoundError, NotPermittedError
from fpga_plugin.host.atomic_file import sync_directory
from fpga_plugin.ids import BitstreamId, InterfaceId


@dataclass(frozen=True, slots=True)
class Installed:
    """What `install` did.

    Attributes:
        path: where the file is now.
        changed: False when the same file was there already.
        untrusted: why the plugin does not use it yet; None: it does.
    """

    path: str
    changed: bool
    untrusted: NotPermittedError | None = None


def install(
    store: Store,
    file: str,
    *,
    trust: Trust,
    blank: bool = False,
    force: bool = False,
    progress: Progress = no_progress,
) -> Installed:
    """Copy a bitstream, and its signature with it, to its place in a store.

    In one step for readers.

    Args:
        store: where to.
        file: the bitstream.
        trust: of the store; a file that its manifest knows otherwise is not installed.
        blank: it is the blank bitstream of its interface id.
        force: replace a different file that has the place, and make a blank bitstream of what the
            store has as an accelerator.
        progress: of the reading, then of the writing.

    Raises:
        BitstreamNotFoundError: there is no `file`.
        BitstreamError: `file` cannot be used, the place is taken, the store has a blank bitstream
            as an accelerator, or it cannot be written.
        NotPermittedError: its signature is not good for that place; or the manifest says that
            another file belongs there, and no force.
    """
    data, contents = _to_install(file, blank=blank, progress=progress)
    place = Place(contents.interface_id, None if blank else contents.bitstream_id, contents.kind)
    path, relative = store.at(place), place.path
    if blank and not force:
        _check_no_accelerator(store, file, contents)
    content = content_of(data)
    signature = _signature(file)
    if signature is not None and trust.keys_dir is not None:
        check_signed(os.path.abspath(file), relative, content, trust.keys_dir)
    if not force:
        trust.check_named(relative, content)
    there = _same(path, data)
    if there and (signature is None or _same(path + ENDING, signature)):
        return Installed(path=path, changed=False, untrusted=_untrusted(trust, relative, content))
    if not (there or force) and os.path.lexists(path):
        raise BitstreamError(
            f"{path}: a different file is there",
            hint="compare the two with `fpga-plugin bitstream inspect`; --force replaces it",
        )
    make_directory(os.path.dirname(path))
    if not there:
        remove_signature(path)
        write_atomically(path, data, progress=progress)
    if signature is not None:
        write_atomically(path + ENDING, signature)
    # Read it as the daemon will: a directory that is a link out of the store shows here.
    store.check(place)
    return Installed(path=path, changed=True, untrusted=_untrusted(trust, relative, content))


def _to_install(file: str, *, blank: bool, progress: Progress) -> tuple[bytes, Contents]:
    """Read a file and check that it is what it is to be installed as."""
    check_no_directory(file)
    if not blank and is_blank(file):
        raise BitstreamError(
            f"{file}: by its name a blank bitstream",
            hint="say --blank to install it as that; rename it if it is an accelerator",
        )
    data = read_bytes(file, progress=progress)
    contents = read_data(data, file)
    if blank and not contents.kind.blank:
        raise BitstreamError(
            f"{file}: holds {contents.kind}, which is no blank bitstream",
            hint="install the card vendor's null image, a GBS or xclbin file",
        )
    return data, contents


def _check_no_accelerator(store: Store, file: str, contents: Contents) -> None:
    """Refuse an accelerator as a blank bitstream: every scrub would program it.

    Raises:
        BitstreamError: the store has a file of this id as an accelerator.
    """
    place = Place(contents.interface_id, contents.bitstream_id, contents.kind)
    if os.path.lexists(store.at(place)):
        raise BitstreamError(
            f"{file}: the store has {place.path}, so this is an accelerator, and a scrub would"
            " program it",
            hint="install the card vendor's null image; if this is it, --force installs it",
        )


def _signature(file: str) -> bytes | None:
    try:
        return read_bytes(file + ENDING, limit=MAX_SIGNATURE_BYTES)
    except BitstreamNotFoundError:
        return None


def _untrusted(trust: Trust, relative: str, content: Content) -> NotPermittedError | None:
    try:
        trust.check(relative, content)
    except NotPermittedError as error:
        return error
    return None


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
    paths = [store.at(place) for place in all_places(interface_id, bitstream_id)]
    there = [path for path in paths if os.path.lexists(path)]
    if len(there) > 1:
        raise BitstreamError(
            f"{' and '.join(there)} are both there", hint="remove the file that is wrong by `rm`"
        )
    path = (there or paths)[0]
    directory = os.path.dirname(path)
    try:
        os.unlink(path)
        sync_directory(directory)
        remove_signature(path)
    except (FileNotFoundError, NotADirectoryError):
        raise BitstreamNotFoundError(
            f"no bitstream {path}", hint="`fpga-plugin bitstream list` shows what there is"
        ) from None
    except OSError as error:
        raise BitstreamError(f"{path}: cannot be removed: {error.strerror}") from error
    with contextlib.suppress(OSError):  # not empty, or a link: then it stays
        os.rmdir(directory)
    return path


def _same(path: str, data: bytes) -> bool:
    try:
        return read_bytes(path) == data
    except (BitstreamError, BitstreamNotFoundError, OSError):
        return False
