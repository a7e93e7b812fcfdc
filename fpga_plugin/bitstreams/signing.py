"""What `fpga-plugin bitstream sign` does: signatures beside files, and a store's manifest.

Blocks; belongs to the command. The daemon signs nothing and writes nothing to a store.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from datetime import datetime

import msgspec

from fpga_plugin.bitstreams.contents import Contents
from fpga_plugin.bitstreams.files import (
    Progress,
    content_of,
    no_progress,
    read_bytes,
    read_digest,
    write_atomically,
)
from fpga_plugin.bitstreams.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestFile,
    manifest_path,
    parse_manifest,
    write_manifest,
)
from fpga_plugin.bitstreams.places import Place, find_place, is_blank
from fpga_plugin.bitstreams.signatures import ENDING, sign, statement
from fpga_plugin.bitstreams.store import Store, look
from fpga_plugin.errors import BitstreamError, BitstreamNotFoundError
from fpga_plugin.host.atomic_file import sync_directory
from fpga_plugin.ids import Alias, InterfaceId

_CLOCKS_DIFFER = 24 * 60 * 60 * 1000
"""Milliseconds by which the clocks of two computers that sign may differ."""


def statement_of(file: str, progress: Progress = no_progress) -> tuple[str, bytes]:
    """The path in a store that a file is for, and what is to be signed for it to be trusted there.

    Raises:
        BitstreamNotFoundError: there is no such file.
        BitstreamError: it cannot be used, or its place is unknown.
    """
    if os.path.basename(os.path.abspath(file)) == MANIFEST:
        data = read_bytes(file, limit=MAX_MANIFEST_BYTES)
        parse_manifest(data, where=file)
        return MANIFEST, statement(MANIFEST, content_of(data))
    contents, content = look(file, progress)
    path = place_of(file, contents).path
    return path, statement(path, content)


def sign_file(file: str, key: str, progress: Progress = no_progress) -> str:
    """Write the signature of a file beside it; returns the path in a store that it is for.

    Raises:
        BitstreamNotFoundError: there is no such file, or no such key.
        BitstreamError: one of them cannot be used, or the signature not be written.
    """
    path, text = statement_of(file, progress)
    write_atomically(file + ENDING, sign(key, text))
    return path


def path_in_store(file: str) -> Place | None:
    """The place of a file that lies where a store has bitstreams, by its names; None: elsewhere."""
    return find_place("/".join(os.path.abspath(file).split("/")[-2:]))


def place_of(file: str, contents: Contents) -> Place:
    """Which place in a store a bitstream is for.

    In a store the path says which, and the content has to agree. Elsewhere an accelerator's
    content says it, by which `install` names it. Content does not say that an image is a blank
    bitstream.

    Args:
        file: its path.
        contents: what is in it.

    Raises:
        BitstreamError: they do not agree, or nothing says which.
    """
    place = path_in_store(file)
    if place is None and is_blank(os.path.basename(file)):
        raise BitstreamError(
            f"{file}: its path does not name the interface id that it is for",
            hint="put it into the store first, `fpga-plugin bitstream install --blank FILE`, and"
            " sign the manifest",
        )
    place = place or Place(contents.interface_id, contents.bitstream_id, contents.kind)
    place.check(contents, file)
    return place


def renew_manifest(
    store: Store,
    *,
    key: str | None = None,
    version: int | None = None,
    expires: datetime | None = None,
    aliases: Mapping[str, Alias | None] | None = None,
    interfaces: Mapping[InterfaceId, Alias | None] | None = None,
    progress: Progress = no_progress,
) -> tuple[Manifest, bool]:
    """Write the manifest of all that is in a store, and its signature.

    What the present one calls files and interface ids, the new one does, too.

    One that says so already stays as it is. Without a key, the signature of another one goes: it
    would be of other bytes.

    Args:
        store: to describe.
        key: file of the private key; None: it is not signed.
        version: of a new manifest; None: the time, and more than that of the present one.
        expires: from when on it counts no more; None: never.
        aliases: what files are to be called, by path from the root; None: nothing, any more.
        interfaces: what interface ids are to be called; None: nothing, any more.
        progress: of the reading.

    Returns:
        The manifest as it is now, and whether it said something else before.

    Raises:
        BitstreamNotFoundError: there is no store, or no such key.
        BitstreamError: a file of it cannot be used, which a manifest should not vouch for; or the
            version is not higher than the present one's.
    """
    files = _files(store, progress)
    path = manifest_path(store.root)
    before = _present(path)
    _name(files, before, aliases or {}, store.root)
    revoked = (before.revoked | before.files.keys()) - files.keys()
    wanted = {**before.interfaces, **(interfaces or {})}
    called = {interface_id: alias for interface_id, alias in wanted.items() if alias is not None}
    if before.version and version in {None, before.version}:
        same = Manifest(files, before.version, expires, revoked, interfaces=called)
        if same == before:
            if key is not None:
                sign_file(path, key)
            return before, False
    version = _next_version(path, before.version, version)
    data = write_manifest(
        files.values(), version=version, expires=expires, revoked=revoked, interfaces=called
    )
    manifest = parse_manifest(data, where=path)  # not too large; no two are called the same
    # Signed before anything is written: nodes meet a manifest without its signature for an instant
    # only, and a key that cannot be used changes nothing.
    signature = None if key is None else sign(key, statement(MANIFEST, content_of(data)))
    remove_signature(path)
    write_atomically(path, data)
    if signature is not None:
        write_atomically(path + ENDING, signature)
    return manifest, True


def _name(
    files: dict[str, ManifestFile],
    before: Manifest,
    aliases: Mapping[str, Alias | None],
    root: str,
) -> None:
    """Put into the lines of a manifest what files are called.

    Raises:
        BitstreamNotFoundError: a name is for a file that is not there.
    """
    for path in aliases:
        if path not in files:
            raise BitstreamNotFoundError(
                f"{os.path.join(root, path)}: no such bitstream to be named",
                hint="`fpga-plugin bitstream list` shows those that there are",
            )
    for path, file in files.items():
        old = before.files.get(path, file)
        files[path] = msgspec.structs.replace(file, alias=aliases.get(path, old.alias))


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


def _files(store: Store, progress: Progress) -> dict[str, ManifestFile]:
    """What a manifest has to say of a store, by path."""
    files = {}
    for entry in store.list():
        if entry.problem is not None:
            raise BitstreamError(
                entry.problem.message,
                hint=f"repair or remove it first. {entry.problem.hint}".rstrip(),
            )
        content = read_digest(entry.path, inside=store.root, guarded=False, progress=progress)
        file = ManifestFile(store.relative(entry.path), content.sha256, content.size)
        files[file.path] = file
    return files


def _next_version(path: str, before: int, wanted: int | None) -> int:
    """The version of a changed manifest.

    The present one may be foreign: its version does not count where it is no past time.
    """
    hint = (
        "`--manifest-version N` says which to give; if the manifest there is not yours, remove it"
    )
    if wanted is not None:
        if wanted <= before:
            raise BitstreamError(
                f"{path}: has version {before}, and a changed manifest needs a higher one than"
                f" {wanted}",
                hint=hint,
            )
        return wanted
    # Not seconds: two manifests may be made in one, the first of them removed before the second.
    now = time.time_ns() // 1_000_000
    if before > now + _CLOCKS_DIFFER:
        raise BitstreamError(
            f"{path}: has version {before}, which is in the future as a time", hint=hint
        )
    return max(now, before + 1)


def _present(path: str) -> Manifest:
    """The manifest that is there; an empty one where there is none that can be read."""
    with contextlib.suppress(BitstreamNotFoundError, BitstreamError):
        return parse_manifest(read_bytes(path, limit=MAX_MANIFEST_BYTES), where=path)
    return Manifest({})
