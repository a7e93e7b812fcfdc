"""Which files of a store may be programmed: what the manifest and the signatures say.

    any      what the manifest does not name, too
    digest   only what the manifest names
    signed   only what a signed manifest names, and accelerators with a signature of their own that
             no signed manifest ever named

What the manifest names must match it in every mode. Nothing of a store is trusted while its
manifest cannot be read: what that names is unknown. Signatures count under `signed` only:
elsewhere there may be no keys.

Under `signed` a manifest is that of its time: an older one than this node has seen, or one that has
expired, counts as not signed (`bitstreams.seen_manifests`). What a signed manifest ever named is
trusted only while the present one names it: to take a file out of the manifest revokes it, whatever
signature lies beside it, and so does removing the manifest. A blank bitstream needs the manifest
always: what deprograms every region is not left to a single file's signature.

A verdict holds as long as its `version` does; a PreStart compares the two and judges nothing.
"""

import contextlib
import os
import threading
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from fpga_plugin.bitstreams.files import Content, Progress, content_of, no_progress, read_digest
from fpga_plugin.bitstreams.id_names import Names
from fpga_plugin.bitstreams.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    in_utc,
    manifest_path,
    parse_manifest,
)
from fpga_plugin.bitstreams.places import is_blank
from fpga_plugin.bitstreams.seen_manifests import SeenManifests
from fpga_plugin.bitstreams.signatures import (
    ENDING,
    SIGNATURE_BYTES,
    Keys,
    key_files,
    load_keys,
    signer,
    statement,
)
from fpga_plugin.errors import BitstreamError, NotFinishedError, NotPermittedError
from fpga_plugin.host.file_identity import Version, version_at
from fpga_plugin.host.trusted_files import read_small
from fpga_plugin.settings.settings import TrustMode

log = structlog.get_logger()

MAX_SIGNATURE_BYTES = 4096
"""A `.sig` of another length is no signature; of what is longer not even the length matters."""

_RENEW = "`fpga-plugin bitstream sign --manifest`"
_RENEW_SIGNED = "`fpga-plugin bitstream sign --key PEM --manifest`"


@dataclass(frozen=True, slots=True)
class _Manifest:
    """A manifest that was read, and by whose signature it can be trusted.

    Attributes:
        manifest: what it says; nothing where there is none.
        signer: name of the key; empty where no signature is required.
        problem: why it does not count: there is none, or its signature is not good; empty: it does.
        hint: what to do about that.
    """

    manifest: Manifest
    signer: str = ""
    problem: str = ""
    hint: str = ""

    @property
    def not_named(self) -> str:
        """Why a file is not named by a manifest that counts."""
        return self.problem or f"{MANIFEST} does not name it"


class Trust:
    """Judges the files of one store. Thread-safe; all of it blocks."""

    def __init__(
        self,
        root: str,
        mode: TrustMode,
        keys_dir: str | None,
        *,
        guarded: bool = True,
        seen: SeenManifests | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            root: of the store.
            mode: what a file needs to be trusted.
            keys_dir: where the public keys are; None: there are none.
            guarded: refuse a manifest, signature or key that others may write.
            seen: what this node has seen of manifests; None: nothing, as for a store of elsewhere.
        """
        self.mode = mode
        self.keys_dir = keys_dir
        self._root = root
        self._guarded = guarded
        self._seen = seen or SeenManifests(None, owner=False)
        self._expires: datetime | None = None  # of the manifest that was read last
        self._told = "", ""
        self._lock = threading.Lock()
        self._manifest: tuple[tuple[object, ...], _Manifest | BitstreamError] | None = None
        self._keys: tuple[tuple[object, ...], Keys] | None = None

    def version(self, relative: str) -> str:
        """What differs when a file's verdict may be another one.

        Raises:
            NotFinishedError: that is unknown just now.
        """
        signed = self.mode is TrustMode.SIGNED
        if signed:
            # Read now, if not yet: it says when it expires.
            with contextlib.suppress(NotPermittedError):
                self._read_manifest()
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
            Why it is trusted, in a few words; empty where no proof is required.

        Raises:
            NotPermittedError: it is not trusted; the message says why.
            NotFinishedError: that is unknown just now.
        """
        path = os.path.join(self._root, relative)
        known = self._read_manifest()
        named = self._compare(known, relative, content)
        if self.mode is TrustMode.SIGNED:
            if named and not known.problem:
                return f"named by the manifest, signed with {known.signer}"
            return self._check_signed(path, relative, content, known)
        if named:
            return "named by the manifest"
        if self.mode is TrustMode.DIGEST:
            raise NotPermittedError(
                f"{path}: {known.not_named}, and FPGA_PLUGIN_TRUST is digest",
                hint=f"the operator adds it with {_RENEW}",
            )
        return ""

    def check_file(self, relative: str, *, progress: Progress = no_progress) -> str:
        """Hash and judge a file; returns what `check` does.

        Args:
            relative: its path from the store's root.
            progress: of the hashing.

        Raises:
            BitstreamNotFoundError: there is none.
            BitstreamError: it must not be used, or changed while it was read.
            NotPermittedError: it is not trusted.
            NotFinishedError: that is unknown just now.
        """
        path = os.path.join(self._root, relative)
        content = read_digest(path, inside=self._root, guarded=self._guarded, progress=progress)
        return self.check(relative, content)

    def check_named(self, relative: str, content: Content) -> None:
        """Compare a file with what the manifest says of it, if it does.

        Raises:
            NotPermittedError: it is another one, or the manifest cannot be used.
        """
        self._compare(self._read_manifest(), relative, content)

    def named(self) -> AbstractSet[str]:
        """What the manifest names, if there is one.

        Raises:
            NotPermittedError: it cannot be used.
        """
        return self._read_manifest().manifest.files.keys()

    def names(self) -> Names:
        """What the manifest calls ids; under `signed` only what it says with a signature.

        Raises:
            NotPermittedError: it cannot be used.
            NotFinishedError: that is unknown just now.
        """
        known = self._read_manifest()
        if known.problem:
            return Names()
        return Names(known.manifest.aliases, known.manifest.interfaces, counts=True)

    def seconds_left(self) -> float | None:
        """How long the manifest that was read last is still good; None: no end is to come."""
        if self._expires is None:
            return None
        left = (self._expires - datetime.now(UTC)).total_seconds()
        return left if left > 0 else None

    def keys(self) -> Keys:
        """The keys that there are now; says in the log what is wrong with them, once."""
        with self._lock:
            version = self._keys_version()
            if self._keys is None or self._keys[0] != version:
                keys = Keys()
                if self.keys_dir is not None:
                    keys = load_keys(self.keys_dir, guarded=self._guarded)
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

    def check_signature(self, file: str, relative: str, content: Content) -> str:
        """Look for a valid signature beside a file; returns the name of its key.

        Args:
            file: where it is, below the root.
            relative: which place of a store it has to be signed for.
            content: what is in it.

        Raises:
            NotPermittedError: there is none; the message says why, and does not name the file.
        """
        keys = self.keys().keys
        if not keys:
            raise NotPermittedError(f"there is no key in {self.keys_dir or 'FPGA_PLUGIN_KEYS_DIR'}")
        beside = os.path.basename(file) + ENDING
        try:
            signature = read_small(
                file + ENDING, inside=self._root, guarded=self._guarded, limit=MAX_SIGNATURE_BYTES
            )
        except (FileNotFoundError, NotADirectoryError):
            raise NotPermittedError(f"there is no {beside} beside it") from None
        except BitstreamError as error:
            raise NotPermittedError(error.message) from None
        if len(signature) != SIGNATURE_BYTES:
            raise NotPermittedError(
                f"{beside} has {len(signature)} bytes where a raw Ed25519 signature has"
                f" {SIGNATURE_BYTES}"
            )
        if (name := signer(keys, signature, statement(relative, content))) is None:
            raise NotPermittedError(
                f"{beside} is of other bytes, of another path than {relative}, of no key in"
                f" {', '.join([*keys][:5])}, or of the bare file, as earlier versions signed"
            )
        return name

    def _check_signed(self, path: str, relative: str, content: Content, known: _Manifest) -> str:
        """Judge what no manifest that counts as signed names."""
        why_not = known.not_named
        if is_blank(relative):
            raise NotPermittedError(
                f"{path}: not signed, and FPGA_PLUGIN_TRUST is signed: {why_not}, and a blank"
                " bitstream's own signature does not count",
                hint=known.hint or f"the operator adds it with {_RENEW_SIGNED}",
            )
        revoked = not known.problem and relative in known.manifest.revoked
        if revoked or self._seen.get().has_named(relative):
            raise NotPermittedError(
                f"{path}: revoked: a signed manifest named it once, and now {why_not}",
                hint=known.hint
                or f"the operator adds it again with {_RENEW_SIGNED}, or removes it",
            )
        try:
            return f"signed with {self.check_signature(path, relative, content)}"
        except NotPermittedError as error:
            raise NotPermittedError(
                f"{path}: not signed, and FPGA_PLUGIN_TRUST is signed: {error.message}; {why_not}",
                hint="the operator signs it with `fpga-plugin bitstream sign --key PEM FILE`, or"
                f" adds it with {_RENEW_SIGNED}",
            ) from None

    def _compare(self, known: _Manifest, relative: str, content: Content) -> bool:
        """Whether the manifest names a file, which then has to be that one."""
        if (named := known.manifest.files.get(relative)) is None:
            return False
        if content.size != named.size:
            what = f"has {content.size} bytes where {MANIFEST} says {named.size}"
        elif content.sha256 != named.sha256:
            what = f"its SHA-256 is {content.sha256} where {MANIFEST} says {named.sha256}"
        else:
            return True
        raise NotPermittedError(
            f"{os.path.join(self._root, relative)}: {what}",
            hint=f"put the right file there, or renew the manifest with {_RENEW}",
        )

    def _read_manifest(self) -> _Manifest:
        """The manifest, read again when it or the keys changed.

        Raises:
            NotPermittedError: there is one, and it cannot be used.
        """
        version = self._manifest_version()
        cached = self._manifest  # read and bound at once: no lock is held while the store is asked
        if cached is None or cached[0] != version:
            result: _Manifest | BitstreamError
            try:
                result = self._load_manifest()
            except BitstreamError as error:
                result = error
                log.error("nothing of the store is trusted", error=str(error))  # noqa: TRY400  # no traceback: the operator's file
            self._manifest = cached = version, result
        if isinstance(cached[1], BitstreamError):
            raise NotPermittedError(
                f"nothing of the store is trusted: {cached[1].message}", hint=cached[1].hint
            )
        return cached[1]

    def _load_manifest(self) -> _Manifest:
        path = manifest_path(self._root)
        self._expires = None
        try:
            data = read_small(
                path, inside=self._root, guarded=self._guarded, limit=MAX_MANIFEST_BYTES
            )
        except (FileNotFoundError, NotADirectoryError):
            return _Manifest(Manifest({}), problem=f"the store has no {MANIFEST}")
        manifest = parse_manifest(data, where=path)
        if self.mode is not TrustMode.SIGNED:
            return _Manifest(manifest)
        return self._signed_manifest(path, content_of(data), manifest)

    def _signed_manifest(self, path: str, content: Content, manifest: Manifest) -> _Manifest:
        """Whose signature a manifest has, if it may be used now."""
        try:
            name = self.check_signature(path, MANIFEST, content)
            self._expires = manifest.expires
            self._seen.admit(manifest, content.sha256, datetime.now(UTC))
        except NotPermittedError as error:
            self._tell(content.sha256, error.message)
            return _Manifest(
                manifest,
                problem=f"{MANIFEST} does not count: {error.message}",
                hint=error.hint or f"the operator writes and signs it again with {_RENEW_SIGNED}",
            )
        except NotFinishedError as error:
            self._tell("", str(error))
            raise
        self._tell(
            content.sha256,
            "",
            version=manifest.version,
            expires=manifest.expires and in_utc(manifest.expires),
            key=name,
        )
        return _Manifest(manifest, name)

    def _tell(self, sha256: str, problem: str, **facts: object) -> None:
        """Say what a manifest is worth, once."""
        told, self._told = self._told, (sha256, problem)
        if told == self._told:
            return
        if problem:
            log.warning("the manifest does not count as signed", reason=problem)
        else:
            log.info("the manifest is in force", **facts)

    def _manifest_version(self) -> tuple[object, ...]:
        path = manifest_path(self._root)
        # A link that leads nowhere is a manifest that cannot be read, not one that is missing.
        found = version_at(path) or (() if os.path.lexists(path) else None)
        if self.mode is not TrustMode.SIGNED:
            return (found,)
        try:
            seen: object = self._seen.version()
        except NotPermittedError as error:
            seen = error.message
        expired = self._expires is not None and datetime.now(UTC) >= self._expires
        return (found, version_at(path + ENDING), self._keys_version(), seen, expired)

    def _keys_version(self) -> tuple[object, ...]:
        if self.keys_dir is None:
            return ()
        found: list[tuple[str, Version | None]] = []
        try:
            found += [(path, version_at(path)) for path in key_files(self.keys_dir)]
        except OSError as error:
            return (error.errno,)
        return tuple(found)


def check_signed(path: str, place: str, content: Content, keys_dir: str | None) -> str:
    """Check the signature beside a file, wherever it lies; returns its signer.

    Args:
        path: the file.
        place: its path in a store, for which it has to be signed.
        content: what is in it.
        keys_dir: where the public keys are.

    Raises:
        NotPermittedError: it is not good.
    """
    trust = Trust(os.path.dirname(path), TrustMode.SIGNED, keys_dir, guarded=False)
    try:
        return f"signed with {trust.check_signature(path, place, content)}"
    except NotPermittedError as error:
        raise NotPermittedError(
            f"{path}: {error.message}",
            hint="sign it with `fpga-plugin bitstream sign --key PEM FILE`, or take the right file",
        ) from None
