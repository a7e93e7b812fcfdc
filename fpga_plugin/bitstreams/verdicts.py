"""What is known of the store's files: verdicts, and which of them still hold without a look.

A verdict holds while the file and what its trust depends on are the same ones. It is *confirmed*
while nothing said otherwise since the store last answered: then the file's copy may serve although
the store does not answer. Verdicts on good files are written down, for the plugin's next run.
"""

import contextlib
import threading
from collections.abc import Iterable
from typing import Annotated

import msgspec

from fpga_plugin.bitstreams.files import Content
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.host.atomic_file import replace_file
from fpga_plugin.host.file_identity import Version


class FileVerdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a file.

    Attributes:
        version: of the file when it was read: its inode, size, owner, mode and times.
        trust: what its trust depended on.
        content: what was read.
        cached: the digest in the cache of what is programmed: the file itself, or the GBS file that
            was packed in it. Empty: it was not parsed.
        problem: why it is not used; None: it is good.
    """

    version: Version
    trust: str
    content: Content
    # It becomes a path.
    cached: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")] = ""
    problem: FpgaPluginError | None = None


# Of those that are good. Made at import: see kubernetes/kubelet/checkpoint.py
_GOOD = msgspec.json.Decoder(dict[str, FileVerdict])


class Verdicts:
    """Verdicts by the files' paths from the store's root. Thread-safe; `save` blocks."""

    def __init__(self, path: str) -> None:
        """Read what an earlier process verified.

        Args:
            path: where it is written down.
        """
        self._path = path
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._changes = 0
        self._confirmed: set[str] = set()
        self._known: dict[str, FileVerdict] = {}
        try:
            with open(path, "rb") as file:
                self._known = {k: v for k, v in _GOOD.decode(file.read()).items() if v.cached}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # all of it can be made again

    @property
    def changes(self) -> int:
        """How many changes were reported until now: to be read before the store is asked."""
        return self._changes

    def get(self, relative: str) -> FileVerdict | None:
        """What was known of a file when it was last read."""
        return self._known.get(relative)

    def confirmed(self, relative: str) -> FileVerdict | None:
        """What is known of a file without asking the store."""
        with self._lock:
            return self._known.get(relative) if relative in self._confirmed else None

    def learn(self, relative: str, verdict: FileVerdict, changes: int) -> None:
        """Remember what the store said.

        Args:
            relative: the file.
            verdict: on it.
            changes: as they were before the store was asked.
        """
        with self._lock:
            self._known[relative] = verdict
            if changes == self._changes:
                self._confirmed.add(relative)

    def doubt(self, relative: str) -> None:
        """The store said that its last word on a file does not hold."""
        with self._lock:
            self._confirmed.discard(relative)

    def doubt_all(self) -> None:
        """Any file, or its trust, may be another by now."""
        with self._lock:
            self._changes += 1
            self._confirmed.clear()

    def forget(self, relative: str) -> None:
        """A file may be another one, even if it looks the same."""
        with self._lock:
            self._changes += 1
            self._known.pop(relative, None)
            self._confirmed.discard(relative)

    def only(self, present: Iterable[str]) -> None:
        """Forget all files but these."""
        with self._lock:
            keep = set(present)
            self._known = {k: v for k, v in self._known.items() if k in keep}
            self._confirmed &= keep

    def cached(self) -> set[str]:
        """The digests in the cache of the files that are good."""
        with self._lock:
            return {v.cached for v in self._known.values() if v.problem is None}

    def save(self) -> None:
        """Write them down."""
        with self._writing:
            with self._lock:
                good = {k: v for k, v in self._known.items() if v.problem is None}
            with contextlib.suppress(OSError):  # they can always be made again
                replace_file(self._path, [msgspec.json.encode(good)])
