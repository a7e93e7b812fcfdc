"""What is known of the store's files: verdicts, and which of them still hold without a look.

A verdict holds while the file and what its trust depends on are the same ones. It is *confirmed*
while nothing said otherwise since the store last answered: then the file's copy may serve although
the store does not answer. Verdicts are kept in `index.json`, for a restart within one boot.
"""

import contextlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.process.file_identity import Version

INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a file.

    Attributes:
        version: of the file when it was read.
        trust: what its trust depended on.
        sha256: of its content; empty where it could not be read.
        size: in bytes.
        problem: why it is not used; None: it is good.
        checked: it was parsed, and is what its path says.
        unpacked: bytes of the GBS file that was packed in it; 0 where there is none.
    """

    version: Version
    trust: str
    sha256: str = ""
    size: int = 0
    problem: FpgaPluginError | None = None
    checked: bool = False
    unpacked: int = 0


class _Line(msgspec.Struct, frozen=True):
    version: tuple[int, ...]
    trust: str
    sha256: str
    size: int
    unpacked: int = 0


class _Index(msgspec.Struct, frozen=True):
    boot_id: str
    files: dict[str, _Line]


_INDEX = msgspec.json.Decoder(_Index)  # made at import: see pods/checkpoint.py


class Verdicts:
    """Verdicts by the files' paths from the store's root. Thread-safe; `save` blocks."""

    def __init__(self, directory: str, boot_id: str) -> None:
        """Take up what was verified since the node booted.

        Args:
            directory: of `index.json`.
            boot_id: of this boot.
        """
        self._path = os.path.join(directory, INDEX)
        self._boot_id = boot_id
        self._lock = threading.Lock()
        self._changes = 0
        self._confirmed: set[str] = set()
        self._known = self._restore()

    @property
    def changes(self) -> int:
        """How many changes were reported until now: to be read before the store is asked."""
        return self._changes

    def get(self, relative: str) -> Verdict | None:
        """What was known of a file when it was last read."""
        return self._known.get(relative)

    def confirmed(self, relative: str) -> Verdict | None:
        """What is known of a file without asking the store."""
        with self._lock:
            return self._known.get(relative) if relative in self._confirmed else None

    def learn(self, relative: str, verdict: Verdict, changes: int) -> None:
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

    def good_digests(self) -> set[str]:
        """The digests of the files that are good."""
        with self._lock:
            return {v.sha256 for v in self._known.values() if v.problem is None}

    def save(self) -> None:
        """Keep them for the next start; they can always be made again."""
        with self._lock:
            files = {
                relative: _Line(
                    known.version, known.trust, known.sha256, known.size, known.unpacked
                )
                for relative, known in self._known.items()
                if known.problem is None
            }
        with contextlib.suppress(OSError):
            with open(f"{self._path}.new", "wb") as file:
                file.write(msgspec.json.encode(_Index(self._boot_id, files)))
            os.rename(f"{self._path}.new", self._path)

    def _restore(self) -> dict[str, Verdict]:
        try:
            with open(self._path, "rb") as file:
                index = _INDEX.decode(file.read())
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
        if index.boot_id != self._boot_id:
            return {}
        return {
            relative: Verdict(
                line.version,
                line.trust,
                line.sha256,
                line.size,
                checked=True,
                unpacked=line.unpacked,
            )
            for relative, line in index.files.items()
        }
