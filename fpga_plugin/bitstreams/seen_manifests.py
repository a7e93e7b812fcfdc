"""What this node remembers of the signed manifests that it has seen.

A signature does not age: an old manifest, or none at all, could be put in the place of the present
one. So the highest version, and all that signed manifests ever named, are kept in the state
directory, `seen-manifests.json`. A manifest is used only after it was noted there: the next
process knows of it, however this one ends. The plugin that holds the node's locks writes; others
only look.

Fails closed: a record that is damaged, or of a later version of the plugin, trusts nothing. Where
there is none, as on a new node, the first signed manifest is believed whatever its version.
"""

import errno
import os
import threading
from datetime import datetime
from typing import Annotated, Literal

import msgspec
import structlog

from fpga_plugin.bitstreams.files import write_atomically
from fpga_plugin.bitstreams.manifest import MANIFEST, MAX_VERSION, Manifest, in_utc
from fpga_plugin.errors import BitstreamError, NotFinishedError, NotPermittedError, quote
from fpga_plugin.host.file_identity import Version, version_of
from fpga_plugin.host.trusted_files import read_small

log = structlog.get_logger()

SEEN = "seen-manifests.json"
"""Its name, in the state directory."""

_MAX_BYTES = 64 << 20
_MAX_NAMED = 200_000
"""Paths that are remembered. With more, none that the present manifest does not name is trusted."""

_SIGN = "`fpga-plugin bitstream sign --manifest`"

_START_ANEW = (
    "`fpga-plugin bitstream forget` on the node makes it believe the next signed manifest,"
    " whatever its version"
)


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record.

    Attributes:
        format: of the record itself.
        version: the highest of all signed manifests; 0: none was seen.
        sha256: of the manifest that had it.
        expires: from when on that one counts no more, seconds since 1970.
        expired: it was seen to be so. A clock that is put back does not make it good again.
        named: every path that one of them named or revoked.
        all_named: so many were named that each path counts as one of them.
    """

    format: Literal[1] = 1
    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)] = 0
    sha256: str = ""
    expires: int | None = None
    expired: bool = False
    named: frozenset[str] = frozenset()
    all_named: bool = False

    def has_named(self, path: str) -> bool:
        """Whether a signed manifest ever named a path."""
        return self.all_named or path in self.named


_DECODER = msgspec.json.Decoder(Seen)  # made at import: see kubernetes/kubelet/checkpoint.py


class SeenManifests:
    """`<state dir>/seen-manifests.json`. Thread-safe; all of it blocks.

    Args:
        state_dir: where the record is kept; None: nowhere, as on a computer that is no node.
        owner: this process holds the node's locks: it writes the record.
    """

    def __init__(self, state_dir: str | None, *, owner: bool) -> None:
        self.path = None if state_dir is None else os.path.join(state_dir, SEEN)
        self._owner = owner
        self._lock = threading.Lock()
        self._known: tuple[Version | None, Seen] = None, Seen()

    def version(self) -> Version | None:
        """What differs when the record is another one; None where there is none.

        Raises:
            NotPermittedError: it cannot be looked at.
        """
        if self.path is None:
            return None
        try:
            return version_of(os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise NotPermittedError(
                f"{self.path}: cannot be looked at: {error.strerror}: which manifests this node has"
                " seen is not known",
                hint="use the plugin's own user, root on a node",
            ) from error

    def get(self) -> Seen:
        """The record as it is now.

        Raises:
            NotPermittedError: there is one that cannot be used.
            NotFinishedError: it could not be read or put back just now.
        """
        with self._lock:
            return self._get()

    def admit(self, manifest: Manifest, sha256: str, now: datetime) -> Seen:
        """Note a signed manifest, before anything that it names is used.

        Args:
            manifest: one with a good signature.
            sha256: of its text.
            now: what time it is.

        Returns:
            The record with it.

        Raises:
            NotPermittedError: it is not the newest, or has expired; or the record cannot be used.
            NotFinishedError: the record could not be written just now.
        """
        version = manifest.version
        with self._lock:
            seen = self._get()
            if version < seen.version:
                raise NotPermittedError(
                    f"its version {version} is older than version {seen.version}, which this node"
                    " has seen",
                    hint=f"put the newest one there, or sign it again with `--manifest-version"
                    f" {seen.version + 1}`; {_START_ANEW}",
                )
            if version == seen.version and sha256 != seen.sha256:
                raise NotPermittedError(
                    f"this node has seen another manifest of the same version {version}",
                    hint=f"write and sign it again with {_SIGN}",
                )
            same = version == seen.version
            expired = manifest.expires is not None and now >= manifest.expires
            named = seen.named | manifest.files.keys() | manifest.revoked
            many = seen.all_named or len(named) > _MAX_NAMED
            noted = Seen(
                version=version,
                sha256=sha256,
                expires=None if manifest.expires is None else int(manifest.expires.timestamp()),
                expired=expired or (same and seen.expired),
                named=frozenset() if many else named,
                all_named=many,
            )
            if noted != seen:
                self._keep(noted)
        if noted.expired and manifest.expires is not None:
            raise NotPermittedError(
                f"its version {version} expired at {in_utc(manifest.expires)}"
                + ("" if expired else ", and this node has seen that; its clock was put back")
                + f" (the clock says {in_utc(now)})",
                hint=f"write and sign it again with {_SIGN}; check the node's clock",
            )
        return noted

    def forget(self) -> Seen:
        """Begin again: the next signed manifest is believed whatever its version; returns what was.

        Raises:
            NotPermittedError: the record cannot be looked at.
            BitstreamError: it cannot be written.
        """
        with self._lock:
            if self.path is None or self.version() is None:
                return Seen()
            try:
                seen = self._get()
            except (NotPermittedError, NotFinishedError):
                seen = Seen()  # the way out of a damaged one, too
            # Written, not removed: a plugin that runs puts back a record that was removed.
            self._write(Seen())
        return seen

    def _get(self) -> Seen:
        version = self.version()
        before, known = self._known
        if version == before:
            return known
        if version is None and self._owner:
            self._keep(known)
            log.error(
                "the record of signed manifests was removed while it was in use, and is put back",
                file=self.path,
                hint=f"leave the state directory alone while the plugin runs; {_START_ANEW}",
            )
            return known
        seen = Seen() if version is None or self.path is None else _read(self.path)
        self._known = version, seen
        return seen

    def _keep(self, seen: Seen) -> None:
        """Note it; only the owner writes it to disk."""
        if self._owner and self.path is not None:
            try:
                self._write(seen)
            except BitstreamError as error:
                raise NotFinishedError(
                    f"{MANIFEST} is not used before this node can note its version:"
                    f" {error.message}",
                    hint=error.hint,
                ) from error
            self._known = self.version(), seen

    def _write(self, seen: Seen) -> None:
        if self.path is not None:
            write_atomically(self.path, msgspec.json.encode(seen), mode=0o600)


def _read(path: str) -> Seen:
    try:
        data = read_small(path, inside=None, guarded=False, limit=_MAX_BYTES)
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotPermittedError(
            f"{path}: damaged, or of a later version of the plugin ({quote(error)}): which"
            " manifests this node has seen is not known",
            hint=f"restore it, or use the version that wrote it; {_START_ANEW}",
        ) from None
    except BitstreamError as error:
        raise NotFinishedError(error.message, hint=error.hint) from error
    except OSError as error:
        raise NotFinishedError(f"{path}: {os.strerror(error.errno or errno.EIO)}") from error
