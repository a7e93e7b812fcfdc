"""The store as the daemon uses it: only what was verified, and only from copies of its own.

A file is verified when it arrives (`bitstream.index`), or by the first PreStart or scrub that comes
before that: copied and hashed in one pass, the copy parsed, its ids compared with its path, its
trust judged. What came out holds while the file and what its trust depends on stay the same ones;
so a warm PreStart compares two `stat`s, and the driver reads the copy from where it lies. A file
that was changed is verified again before anything of it is used, and what was refused is not hashed
again.

Verdicts are kept in `<directory>/index.json` too, for a restart of the plugin within one boot.
"""

import contextlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import structlog

from fpga_plugin.bitstream.files import open_file, read_header
from fpga_plugin.bitstream.store import (
    Bitstream,
    Store,
    bitstream_of,
    check_names,
    ids_of,
    is_aocx,
    parse_contents,
    read_contents,
)
from fpga_plugin.bitstream.trust import Content, Trust
from fpga_plugin.bitstream.verified import Copies, Taken
from fpga_plugin.errors import BitstreamError, FpgaPluginError, NotFinishedError, NotPermittedError
from fpga_plugin.ids import BitstreamId, InterfaceId
from fpga_plugin.originals import RENAME, Version, being_written
from fpga_plugin.telemetry.tally import Tally

log = structlog.get_logger()

INDEX = "index.json"

_LOCKS = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a file.

    Attributes:
        version: of the file when it was read.
        trust: what its trust depended on.
        sha256: of its content; empty where it could not be read.
        size: in bytes.
        problem: why it is not used; None: it is good.
    """

    version: Version
    trust: str
    sha256: str = ""
    size: int = 0
    problem: FpgaPluginError | None = None


class _Line(msgspec.Struct, frozen=True):
    version: tuple[int, ...]
    trust: str
    sha256: str
    size: int


class _Index(msgspec.Struct, frozen=True):
    boot_id: str
    files: dict[str, _Line]


_INDEX = msgspec.json.Decoder(_Index)  # made at import: see pods/checkpoint.py


class Library(Store):
    """A store of verified bitstreams. Thread-safe; all of it blocks."""

    def __init__(
        self, root: str, *, directory: str, limit: int, boot_id: str, trust: Trust, guarded: bool
    ) -> None:
        """Take up what was verified since the node booted.

        Args:
            root: of the store.
            directory: of the copies.
            limit: bytes that all copies may have together.
            boot_id: of this boot.
            trust: judges the files.
            guarded: refuse what others may write.
        """
        super().__init__(root)
        self.trust = trust
        self.verifications = Tally()  # files that were read and judged, by outcome
        self._guarded = guarded
        self._boot_id = boot_id
        self._lock = threading.Lock()
        # A few locks for all files: a lock for each would be one for every id that a pod makes up.
        self._busy = tuple(threading.Lock() for _ in range(_LOCKS))
        self._copies = Copies(directory, limit)
        self._verdicts = self._restore()
        self._copies.only({verdict.sha256 for verdict in self._verdicts.values()})

    def load(self, interface_id: InterfaceId, bitstream_id: BitstreamId) -> Bitstream:
        """A verified bitstream, in memory.

        Raises:
            BitstreamNotFoundError: there is none; the message names the path.
            BitstreamError: the file cannot be used, or is not what its name says.
            NotPermittedError: it is not trusted.
            NotFinishedError: it is still being written.
        """
        path = self.path(interface_id, bitstream_id)
        try:
            return self._fetch(path, interface_id, bitstream_id)
        except (FileNotFoundError, NotADirectoryError):
            self.not_found(path, interface_id)

    def blank(self, interface_id: InterfaceId) -> Bitstream | None:
        """The verified blank bitstream of an interface id; None when there is none.

        Raises:
            BitstreamError: the file cannot be used, or is for another interface id.
            NotPermittedError: it is not trusted.
            NotFinishedError: it is still being written.
        """
        try:
            return self._fetch(self.blank_path(interface_id), interface_id, None)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def examine(self, relative: str) -> Verdict | None:
        """Verify a file if that is not done yet; None: it is not there (any more).

        Raises:
            NotFinishedError: it is still being written.
        """
        path = os.path.join(self.root, relative)
        try:
            interface_id, bitstream_id = ids_of(path)
            with self._alone(relative):
                known = self._known(path, relative)
                if known is None:
                    known, taken = self._verify(path, relative, interface_id, bitstream_id)
                    if taken is not None:
                        self._settle(relative, known, taken, make_room=False)
                return known
        except (FileNotFoundError, NotADirectoryError):
            self.forget(relative)
            return None
        except BitstreamError as error:
            return Verdict((), "", problem=error)

    def forget(self, relative: str) -> None:
        """Verify a file anew when it is next asked for, even if it looks the same."""
        with self._lock:
            self._verdicts.pop(relative, None)

    def tidy(self, present: Iterable[str]) -> None:
        """Forget all files but these, remove the copies of no file, and save the verdicts."""
        with self._lock:
            keep = set(present)
            self._verdicts = {k: v for k, v in self._verdicts.items() if k in keep}
            digests = {v.sha256 for v in self._verdicts.values() if v.problem is None}
        self._copies.only(digests)
        self.save()

    def save(self) -> None:
        """Keep the verdicts for the next start; they can always be made again."""
        with self._lock:
            files = {
                relative: _Line(known.version, known.trust, known.sha256, known.size)
                for relative, known in self._verdicts.items()
                if known.problem is None
            }
        path = os.path.join(self._copies.directory, INDEX)
        with contextlib.suppress(OSError):
            with open(f"{path}.new", "wb") as file:
                file.write(msgspec.json.encode(_Index(self._boot_id, files)))
            os.rename(f"{path}.new", path)

    def _restore(self) -> dict[str, Verdict]:
        try:
            with open(os.path.join(self._copies.directory, INDEX), "rb") as file:
                index = _INDEX.decode(file.read())
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
        if index.boot_id != self._boot_id:
            return {}
        return {
            relative: Verdict(line.version, line.trust, line.sha256, line.size)
            for relative, line in index.files.items()
        }

    def _fetch(
        self, path: str, interface_id: InterfaceId, bitstream_id: BitstreamId | None
    ) -> Bitstream:
        relative = self.relative(path)
        with self._alone(relative):
            known = self._known(path, relative)
            taken: Taken | None = None
            content: Content | None = None
            if known is not None and known.problem is None:
                content = self._copies.find(known.sha256, known.size)
            if known is None or (known.problem is None and content is None):
                known, taken = self._verify(path, relative, interface_id, bitstream_id)
            if known.problem is not None:
                raise type(known.problem)(known.problem.message, hint=known.problem.hint)
            try:
                return self._from_copy(path, interface_id, bitstream_id, known, taken)
            finally:
                if taken is not None:
                    self._settle(relative, known, taken, make_room=True)
                    self.save()

    def _from_copy(
        self,
        path: str,
        interface_id: InterfaceId,
        bitstream_id: BitstreamId | None,
        known: Verdict,
        taken: Taken | None,
    ) -> Bitstream:
        """The bytes of a copy; never those of the original."""
        if taken is not None and taken.data is not None:
            contents = parse_contents(taken.data, bitstream_id, where=path)
        else:
            copy = taken.path if taken is not None and taken.path else None
            try:
                copy = copy or self._copies.path(known.sha256)
                contents = read_contents(copy, bitstream_id, mapped=True)
            except (FileNotFoundError, NotADirectoryError):
                raise NotFinishedError(
                    f"{path}: its verified copy was removed while it was read",
                    hint="kubelet's next try makes another",
                ) from None
        return bitstream_of(path, contents, interface_id, bitstream_id)

    def _known(self, path: str, relative: str) -> Verdict | None:
        """The verdict, if it still holds."""
        with self._lock:
            known = self._verdicts.get(relative)
        if known is None:
            return None
        with open_file(path, inside=self.root, guarded=self._guarded) as original:
            if original.version != known.version:
                return None
        trust = self.trust.version(relative)
        if trust == known.trust:
            return known
        # The file is the same: only its trust is judged anew, by the digest that is known.
        if known.sha256 and (content := self._copies.find(known.sha256, known.size)) is not None:
            if known.problem is not None and not isinstance(known.problem, NotPermittedError):
                return None
            known = Verdict(known.version, trust, known.sha256, known.size)
            known = self._judge(relative, known, content)
            with self._lock:
                self._verdicts[relative] = known
            return known
        return None

    def _judge(self, relative: str, known: Verdict, content: Content) -> Verdict:
        try:
            self.trust.check(relative, content)
        except NotPermittedError as error:
            return Verdict(known.version, known.trust, known.sha256, known.size, error)
        return known

    def _verify(
        self,
        path: str,
        relative: str,
        interface_id: InterfaceId,
        bitstream_id: BitstreamId | None,
    ) -> tuple[Verdict, Taken | None]:
        """Read and judge a file as it is now; the copy is whoever calls to keep or drop.

        Raises:
            FileNotFoundError, NotADirectoryError: there is no such file.
            BitstreamError: it must not be opened, or changed while it was read.
            NotFinishedError: it is still being written.
        """
        trust = self.trust.version(relative)  # before the judging: a change in between shows
        with open_file(path, inside=self.root, guarded=self._guarded) as original:
            if being_written(original.file):
                raise NotFinishedError(
                    f"{path}: still being written",
                    hint=f"it is used when whoever writes it has closed it; {RENAME}",
                )
            taken = self._copies.take(original)
            known = Verdict(original.version, trust, taken.content.sha256, taken.content.size)
        try:
            claimed: BitstreamId | None = None
            if taken.path is None or is_aocx(bitstream_id):
                contents = (
                    read_contents(taken.path, bitstream_id, keep_image=False)
                    if taken.path is not None
                    else parse_contents(
                        taken.data or b"", bitstream_id, where=path, keep_image=False
                    )
                )
                metadata, claimed = contents.metadata, contents.bitstream_id
            else:
                metadata = read_header(taken.path)[0].metadata
            check_names(path, metadata, interface_id, bitstream_id, claimed=claimed)
            known = self._judge(relative, known, taken.content)
        except BitstreamError as error:
            message = error.message.replace(taken.path or path, path)
            problem = BitstreamError(message, hint=error.hint)
            known = Verdict(known.version, trust, known.sha256, known.size, problem)
        except BaseException:
            self._copies.drop(taken)
            raise
        with self._lock:
            self._verdicts[relative] = known
            self.verifications.add("good" if known.problem is None else known.problem.kind)
        if known.problem is not None:
            self._copies.drop(taken)
            return known, None
        return known, taken

    def _settle(self, relative: str, known: Verdict, taken: Taken, *, make_room: bool) -> None:
        if not self._copies.keep(taken, make_room=make_room):
            self._copies.drop(taken)
        log.info("bitstream verified", file=relative, sha256=known.sha256, bytes=known.size)

    def _alone(self, relative: str) -> threading.Lock:
        """Held by whoever verifies a file, so that one copy is made for all who wait for it."""
        return self._busy[hash(relative) % _LOCKS]
