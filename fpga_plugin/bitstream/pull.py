"""Brings a store up to date with an OCI artifact, in one step for whoever reads it.

    <store>/..data -> ..sha256-<digest>           renamed into place: the step
    <store>/..sha256-<digest>/<interface id>/...  what the artifact holds
    <store>/<interface id> -> ..data/<interface id>, <store>/manifest.json -> ..data/manifest.json

That is how kubelet fills a ConfigMap's volume, which the plugin reads as well. The files are
fetched, checked against their digests, and judged as the plugin judges them, before anything of
them can be seen. Who dies in between leaves the store as it was; the next run removes what is left.

A store that is filled so is filled by nothing else: files that somebody put there are not touched,
and the pull is refused. Blocks; belongs to the command.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, Final

from fpga_plugin.bitstream.artifact import ArtifactFile, files_of
from fpga_plugin.bitstream.files import FILE_MODE, Progress
from fpga_plugin.bitstream.manifest import MANIFEST
from fpga_plugin.bitstream.store import Store
from fpga_plugin.bitstream.trust import Trust
from fpga_plugin.errors import BitstreamError, FpgaPluginError
from fpga_plugin.process.atomic_file import sync_directory
from fpga_plugin.registry.client import Registry

DATA: Final = "..data"
"""The link to what is in force."""

_LOCK: Final = "..pull-lock"
_SET: Final = re.compile(r"\.\.sha256-[0-9a-f]{64}", re.ASCII)
_DIRECTORY_MODE: Final = 0o755
_PIECE: Final = 1 << 20

Said = Callable[[str], Progress]
"""Is told which file is fetched next, and gives what is told how far it is."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What `pull` did.

    Attributes:
        digest: of the artifact's manifest: what to name next time.
        files: how many the store has now.
        fetched: how many of them came from the registry.
        bytes: of these.
        changed: False when the store was up to date.
    """

    digest: str
    files: int
    fetched: int
    bytes: int
    changed: bool


def pull(
    registry: Registry, directory: str, *, name: str, trust: Callable[[str], Trust], said: Said
) -> Pulled:
    """Make a store what an artifact holds.

    Args:
        registry: where from.
        directory: the store; it may be missing or empty.
        name: the artifact's, for messages.
        trust: judges the files of a store, given its root.
        said: is told of each file.

    Raises:
        FpgaPluginError: the store is as it was before.
    """
    try:
        os.makedirs(directory, _DIRECTORY_MODE, exist_ok=True)
        with _locked(directory):
            return _pull(registry, directory, name=name, trust=trust, said=said)
    except OSError as error:
        raise BitstreamError(
            f"{error.filename or directory}: {error.strerror}",
            hint="the store has to be a directory that this user may write, on a file system with"
            " room for all of its files twice",
        ) from error


def _pull(
    registry: Registry, directory: str, *, name: str, trust: Callable[[str], Trust], said: Said
) -> Pulled:
    _refuse_foreign(directory)
    data, digest = registry.manifest()
    files = files_of(data, where=name)
    new = f"..{digest.replace(':', '-')}"
    present = _present(directory)
    whole = {path: file for path, file in files.items() if _is(directory, present, path, file)}
    if present is not None and present.startswith(new) and len(whole) == len(files):
        _link(directory, files)  # who died after the step left this undone
        _sweep(directory, keep=new)
        return Pulled(digest, len(files), 0, 0, changed=False)
    # What is in force may have this name and be damaged, or one that a run before gave itself.
    staged = f"{new}.{secrets.token_hex(8)}"
    _sweep(directory, keep=present)
    where = _Where(directory, staged, present)
    fetched = _stage(registry, where, files, whole, said)
    _judge(os.path.join(directory, staged), trust)
    _step(directory, staged, new, present)
    _link(directory, files)
    _sweep(directory, keep=new)
    sizes = sum(files[path].size for path in fetched)
    return Pulled(digest, len(files), len(fetched), sizes, changed=True)


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    descriptor = os.open(
        os.path.join(directory, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BitstreamError(
                f"{directory}: another pull fills this store", hint="wait until it has ended"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _refuse_foreign(directory: str) -> None:
    """Raise an error where somebody else put something into the store."""
    for entry in _entries(directory):
        ours = entry.name in {DATA, _LOCK, "lost+found"} or _is_set(entry.name)
        if ours or (entry.is_symlink() and os.readlink(entry.path) == f"{DATA}/{entry.name}"):
            continue
        raise BitstreamError(
            f"{entry.path}: was not put there by a pull, which would take the store over",
            hint="move it away, or pull into a directory of its own (--dir)",
        )


def _entries(directory: str) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return list(entries)


def _is_set(name: str) -> bool:
    return _SET.match(name) is not None


def _present(directory: str) -> str | None:
    """The directory of what is in force."""
    try:
        target = os.readlink(os.path.join(directory, DATA))
    except FileNotFoundError:
        return None
    return target if _is_set(target) and "/" not in target else None


def _is(directory: str, present: str | None, path: str, file: ArtifactFile) -> bool:
    """Whether what is in force has this very file."""
    if present is None:
        return False
    digest, size = hashlib.sha256(), 0
    try:
        with open(os.path.join(directory, present, path), "rb") as opened:
            while piece := opened.read(_PIECE):
                digest.update(piece)
                size += len(piece)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (f"sha256:{digest.hexdigest()}", size) == (file.digest, file.size)


@dataclass(frozen=True, slots=True)
class _Where:
    """Names in a store.

    Attributes:
        directory: the store.
        staged: in it, what is to come.
        present: in it, what is in force; None: nothing.
    """

    directory: str
    staged: str
    present: str | None


def _stage(
    registry: Registry,
    where: _Where,
    files: Mapping[str, ArtifactFile],
    whole: Mapping[str, ArtifactFile],
    said: Said,
) -> list[str]:
    """Put all files beside what is in force; returns which were fetched."""
    fetched = []
    root = os.path.join(where.directory, where.staged)
    os.mkdir(root, _DIRECTORY_MODE)
    for path, file in sorted(files.items()):
        target = os.path.join(root, path)
        os.makedirs(os.path.dirname(target), _DIRECTORY_MODE, exist_ok=True)
        if path in whole and where.present is not None:
            os.link(os.path.join(where.directory, where.present, path), target)
            continue
        with open(target, "xb") as opened:
            registry.blob(file.digest, file.size, _writer(opened, file.size, said(path)))
            opened.flush()
            os.fchmod(opened.fileno(), FILE_MODE)
            os.fsync(opened.fileno())
        fetched.append(path)
    for each in {os.path.dirname(os.path.join(root, path)) for path in files} | {root}:
        sync_directory(each)
    return fetched


def _writer(file: BinaryIO, size: int, progress: Progress) -> Callable[[bytes], None]:
    def write(piece: bytes) -> None:
        file.write(piece)
        progress(file.tell(), size)

    return write


def _judge(root: str, trust: Callable[[str], Trust]) -> None:
    """Raise what the plugin would say of any file."""
    store, judge = Store(root), trust(root)
    found = set()
    for entry in store.list():
        if entry.problem is not None:
            raise _of_artifact(entry.problem, root)
        found.add(relative := store.relative(entry.path))
        try:
            judge.check_file(relative)
        except FpgaPluginError as error:
            raise _of_artifact(error, root) from error
    if missing := sorted(judge.named() - found):
        raise BitstreamError(
            f"the artifact's manifest.json names {missing[0]}, and the artifact does not have it",
            hint="push all files of the store",
        )


def _of_artifact(error: FpgaPluginError, root: str) -> FpgaPluginError:
    """The same error, with the path as it is in the artifact: the directory is gone soon."""
    return type(error)(error.message.replace(f"{root}/", ""), hint=error.hint)


def _step(directory: str, staged: str, new: str, present: str | None) -> None:
    """From now on readers see the new files, all of them."""
    target = new
    if present == new:  # damaged: its name is taken until the step
        target = staged
    else:
        os.rename(os.path.join(directory, staged), os.path.join(directory, new))
    link = os.path.join(directory, f"{new}.link")
    with suppress(FileNotFoundError):
        os.unlink(link)
    os.symlink(target, link)
    os.rename(link, os.path.join(directory, DATA))
    sync_directory(directory)


def _link(directory: str, files: Mapping[str, ArtifactFile]) -> None:
    """A name in the store for each that what is in force has, and for no other."""
    wanted = {path.split("/", 1)[0] for path in files}
    for entry in _entries(directory):
        if entry.name.startswith("..") or not entry.is_symlink():
            continue
        if entry.name not in wanted:
            os.unlink(entry.path)
        wanted.discard(entry.name)
    # The manifest first: nothing of the first pull is judged without it.
    for name in sorted(wanted, key=lambda name: (not name.startswith(MANIFEST), name)):
        os.symlink(f"{DATA}/{name}", os.path.join(directory, name))
    sync_directory(directory)


def _sweep(directory: str, *, keep: str | None) -> None:
    """Remove what is not in force."""
    kept = {keep, _present(directory)}
    for entry in _entries(directory):
        if not _is_set(entry.name) or entry.name in kept:
            continue
        if entry.is_symlink() or not entry.is_dir():
            os.unlink(entry.path)
        else:
            shutil.rmtree(entry.path)
