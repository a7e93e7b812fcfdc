"""Which files of a store may be programmed: what the manifest and the signatures say.

    any      what the manifest does not name, too
    digest   only what the manifest names
    signed   only what has a signature, or is named by a manifest that has one

What the manifest names must match it in every mode. A manifest that cannot be read names nobody
knows what, so nothing of its store is trusted until it can. Signatures count under `signed` only:
elsewhere there may be no keys.

A verdict holds as long as its `version` does; a PreStart compares the two and judges nothing.
"""

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from fpga_plugin.bitstream.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestFile,
    manifest_path,
    parse_manifest,
)
from fpga_plugin.bitstream.signatures import (
    ENDING,
    SIGNATURE_BYTES,
    Keys,
    key_files,
    load_keys,
    signer,
)
from fpga_plugin.config import TrustMode
from fpga_plugin.errors import BitstreamError, NotPermittedError
from fpga_plugin.originals import Version, read_small, version_at

if TYPE_CHECKING:
    from cryptography.utils import Buffer

log = structlog.get_logger()

MAX_SIGNATURE_BYTES = 4096
"""A `.sig` of another length is no signature; of what is longer not even the length matters."""

_RENEW = "`fpga-plugin bitstream sign --manifest`"


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a file, in memory or in a copy of our own.

    Attributes:
        sha256: of all of them, 64 hex digits.
        size: how many.
        buffer: gives them to whoever checks a signature.
    """

    sha256: str
    size: int
    buffer: Callable[[], AbstractContextManager["Buffer"]]


@dataclass(frozen=True, slots=True)
class _Manifest:
    """A manifest that was read, and by whose signature it can be trusted.

    Attributes:
        manifest: None where there is none.
        signer: name of the key; empty: not signed by any of ours, or not asked.
        unsigned: why it counts as not signed.
    """

    manifest: Manifest | None = None
    signer: str = ""
    unsigned: str = ""


class Trust:
    """Judges the files of one store. Thread-safe; all of it blocks."""

    def __init__(
        self, root: str, mode: TrustMode, keys_dir: str | None, *, guarded: bool = True
    ) -> None:
        """Read nothing yet.

        Args:
            root: of the store.
            mode: what has to be shown of a file.
            keys_dir: where the public keys are; None: there are none.
            guarded: refuse a manifest, signature or key that others may write.
        """
        self.mode = mode
        self.keys_dir = keys_dir
        self._root = root
        self._guarded = guarded
        self._lock = threading.Lock()
        self._manifest: tuple[tuple[object, ...], _Manifest | BitstreamError] | None = None
        self._keys: tuple[tuple[object, ...], Keys] | None = None

    def version(self, relative: str) -> str:
        """What differs when a file's verdict may be another one."""
        signed = self.mode is TrustMode.SIGNED
        return repr(
            (
                self.mode.value,
                self._manifest_version(),
                version_at(os.path.join(self._root, relative + ENDING)) if signed else None,
            )
        )

    def check(self, relative: str, content: Content) -> str:
        """Judge a file.

        Args:
            relative: its path from the store's root.
            content: what is in it.

        Returns:
            Why it is trusted, in a few words; empty where nothing was asked.

        Raises:
            NotPermittedError: it is not trusted; the message says why.
        """
        path = os.path.join(self._root, relative)
        known = self._read_manifest()
        named = known.manifest.files.get(relative) if known.manifest else None
        if named is not None:
            _compare(path, named, content)
        match self.mode:
            case TrustMode.ANY:
                return "named by the manifest" if named else ""
            case TrustMode.DIGEST:
                if named is None:
                    raise NotPermittedError(
                        f"{path}: {self._not_named(known)}, and FPGA_PLUGIN_TRUST is digest",
                        hint=f"the operator adds it with {_RENEW}",
                    )
                return "named by the manifest"
            case TrustMode.SIGNED:
                if named is not None and known.signer:
                    return f"named by the manifest, signed with {known.signer}"
                return self._check_signed(path, relative, content, known, named)

    def check_named(self, relative: str, content: Content) -> None:
        """Compare a file with what the manifest says of it, if it does.

        Raises:
            NotPermittedError: it is another one, or the manifest cannot be used.
        """
        known = self._read_manifest()
        if known.manifest and (named := known.manifest.files.get(relative)) is not None:
            _compare(os.path.join(self._root, relative), named, content)

    def named(self) -> frozenset[str]:
        """What the manifest names, if there is one.

        Raises:
            NotPermittedError: it cannot be used.
        """
        known = self._read_manifest()
        return frozenset(known.manifest.files) if known.manifest else frozenset()

    def keys(self) -> Keys:
        """The keys that there are now; says in the log what is wrong with them, once."""
        with self._lock:
            version = self._keys_version()
            if self._keys is None or self._keys[0] != version:
                keys = (
                    Keys()
                    if self.keys_dir is None
                    else load_keys(self.keys_dir, guarded=self._guarded)
                )
                self._keys = version, keys
                for problem in keys.problems:
                    log.error("a key is left out", error=problem)
                if not keys.keys:
                    log.error(
                        "no keys: no bitstream is trusted",
                        directory=self.keys_dir,
                        hint="mount Ed25519 public keys (*.pem) in FPGA_PLUGIN_KEYS_DIR",
                    )
            return self._keys[1]

    def check_signature(self, path: str, buffer: "Buffer") -> tuple[str, str]:
        """Look for a valid signature beside a file.

        Returns:
            The name of the key, or an empty text; then why there is none.
        """
        keys = self.keys()
        if not keys.keys:
            return "", f"there is no key in {self.keys_dir or 'FPGA_PLUGIN_KEYS_DIR'}"
        try:
            signature = read_small(
                path + ENDING,
                inside=self._root,
                guarded=self._guarded,
                limit=MAX_SIGNATURE_BYTES,
            )
        except (FileNotFoundError, NotADirectoryError):
            return "", f"there is no {os.path.basename(path)}{ENDING} beside it"
        except BitstreamError as error:
            return "", error.message
        if len(signature) != SIGNATURE_BYTES:
            return "", (
                f"{os.path.basename(path)}{ENDING} has {len(signature)} bytes where a raw Ed25519"
                f" signature has {SIGNATURE_BYTES}"
            )
        key = signer(keys.keys, signature, buffer)
        if key is None:
            names = ", ".join(key.name for key in keys.keys[:5])
            return "", f"{os.path.basename(path)}{ENDING} is of other bytes or of no key in {names}"
        return key.name, ""

    def _check_signed(
        self,
        path: str,
        relative: str,
        content: Content,
        known: _Manifest,
        named: ManifestFile | None,
    ) -> str:
        with content.buffer() as buffer:
            name, reason = self.check_signature(os.path.join(self._root, relative), buffer)
        if name:
            return f"signed with {name}"
        if known.manifest is not None:
            reason += f"; {self._not_named(known) if named is None else known.unsigned}"
        raise NotPermittedError(
            f"{path}: not signed, and FPGA_PLUGIN_TRUST is signed: {reason}",
            hint="the operator signs it with `fpga-plugin bitstream sign`",
        )

    def _not_named(self, known: _Manifest) -> str:
        if known.manifest is None:
            return f"the store has no {MANIFEST}"
        return f"{MANIFEST} does not name it"

    def _read_manifest(self) -> _Manifest:
        """The manifest, read anew when it or the keys changed.

        Raises:
            NotPermittedError: there is one, and it cannot be used.
        """
        version = self._manifest_version()
        with self._lock:
            cached = self._manifest
        if cached is None or cached[0] != version:
            result: _Manifest | BitstreamError
            try:
                result = self._load_manifest()
            except BitstreamError as error:
                result = error
                log.error("nothing of the store is trusted", error=str(error))  # noqa: TRY400  # no traceback: the operator's file
            cached = version, result
            with self._lock:
                self._manifest = cached
        if isinstance(cached[1], BitstreamError):
            raise NotPermittedError(
                f"nothing of the store is trusted: {cached[1].message}", hint=cached[1].hint
            )
        return cached[1]

    def _load_manifest(self) -> _Manifest:
        path = manifest_path(self._root)
        try:
            data = read_small(
                path, inside=self._root, guarded=self._guarded, limit=MAX_MANIFEST_BYTES
            )
        except (FileNotFoundError, NotADirectoryError):
            return _Manifest()
        manifest = parse_manifest(data, where=path)
        if self.mode is not TrustMode.SIGNED:
            return _Manifest(manifest)
        name, reason = self.check_signature(path, data)
        return _Manifest(manifest, name, "" if name else f"{MANIFEST} names it, but {reason}")

    def _manifest_version(self) -> tuple[object, ...]:
        path = manifest_path(self._root)
        # A link that leads nowhere is a manifest that cannot be read, not one that is missing.
        found = version_at(path) or (() if os.path.lexists(path) else None)
        if self.mode is not TrustMode.SIGNED:
            return (found,)
        return (found, version_at(path + ENDING), self._keys_version())

    def _keys_version(self) -> tuple[object, ...]:
        if self.keys_dir is None:
            return ()
        found: list[tuple[str, Version | None]] = []
        try:
            found += [(path, version_at(path)) for path in key_files(self.keys_dir)]
        except OSError as error:
            return (error.errno,)
        return tuple(found)


def _compare(path: str, named: ManifestFile, content: Content) -> None:
    if content.size != named.size:
        raise NotPermittedError(
            f"{path}: has {content.size} bytes where {MANIFEST} says {named.size}",
            hint=f"put the right file there, or renew the manifest with {_RENEW}",
        )
    if content.sha256 != named.sha256:
        raise NotPermittedError(
            f"{path}: its SHA-256 is {content.sha256} where {MANIFEST} says {named.sha256}",
            hint=f"put the right file there, or renew the manifest with {_RENEW}",
        )
