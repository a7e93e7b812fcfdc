"""The store as the daemon uses it: only what was verified, and only from copies of its own.

A file is verified when it arrives (`bitstream.index`), or by the first PreStart or scrub that comes
before that: copied and hashed in one pass, its trust judged, the copy parsed, its ids compared with
its path. What trust refuses is not parsed, and of what is parsed only a piece is in memory at a
time. What came out holds while the file and what its trust depends on stay the same ones; so a warm
PreStart compares two `stat`s, and the driver reads the copy from where it lies. A file that was
changed is verified again before anything of it is used, and what was refused is not hashed again.

Who asks for the same content gets the same bitstream as long as anybody uses it: an image may have
tens of MiB, and at the first start on a node all its cards are scrubbed at the same time.

What is known of files is kept in `bitstream.verdicts`.
"""

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import structlog

from fpga_plugin.bitstream.aocx import Write
from fpga_plugin.bitstream.byte_range import ByteRange
from fpga_plugin.bitstream.copies import UNPACKED, Copies, Copy, map_gbs
from fpga_plugin.bitstream.files import Content, open_file
from fpga_plugin.bitstream.gbs import HEAD_BYTES, Gbs, parse_header
from fpga_plugin.bitstream.staging import MemoryQuota, StagedFile
from fpga_plugin.bitstream.store import (
    Bitstream,
    Store,
    check_contents,
    check_names,
    ids_of,
    is_aocx,
)
from fpga_plugin.bitstream.trust import Trust
from fpga_plugin.bitstream.verdicts import Verdict, Verdicts
from fpga_plugin.errors import BitstreamError, FpgaPluginError, NotFinishedError, NotPermittedError
from fpga_plugin.ids import BitstreamId, InterfaceId
from fpga_plugin.process.file_identity import version_at
from fpga_plugin.process.trusted_files import RENAME, being_written
from fpga_plugin.telemetry.instruments import Counter

log = structlog.get_logger()


class Library:
    """A store of verified bitstreams. Thread-safe; all of it blocks."""

    def __init__(
        self,
        root: str,
        *,
        directory: str,
        limit: int,
        boot_id: str,
        trust: Trust,
        guarded: bool,
        memory: MemoryQuota | None = None,
    ) -> None:
        """Take up what was verified since the node booted.

        Args:
            root: of the store.
            directory: of the copies.
            limit: bytes that all copies may have together.
            boot_id: of this boot.
            trust: judges the files.
            guarded: refuse what others may write.
            memory: for what the disk does not take.
        """
        self.store = Store(root)
        self.trust = trust
        self.verifications = Counter()  # files that were read and judged, by outcome
        self._guarded = guarded
        self._lock = threading.Lock()
        self._busy: dict[str, tuple[threading.Lock, int]] = {}
        self._in_use: weakref.WeakValueDictionary[tuple[str, str], Bitstream] = (
            weakref.WeakValueDictionary()
        )
        self._copies = Copies(directory, limit, memory=memory)
        self._verdicts = Verdicts(directory, boot_id)
        self._copies.only(self._verdicts.good_digests())

    def load(self, interface_id: InterfaceId, bitstream_id: BitstreamId) -> Bitstream:
        """A verified bitstream, in memory.

        Raises:
            BitstreamNotFoundError: there is none; the message names the path.
            BitstreamError: the file cannot be used, or is not what its name says.
            NotPermittedError: it is not trusted.
            NotFinishedError: it is still being written.
            StoreUnavailableError: there is no room for a copy.
        """
        path = self.store.path(interface_id, bitstream_id)
        try:
            return self._fetch(path, interface_id, bitstream_id)
        except (FileNotFoundError, NotADirectoryError):
            self.store.not_found(path, interface_id)

    def blank(self, interface_id: InterfaceId) -> Bitstream | None:
        """The verified blank bitstream of an interface id; None when there is none.

        Raises:
            BitstreamError: the file cannot be used, or is for another interface id.
            NotPermittedError: it is not trusted.
            NotFinishedError: it is still being written.
            StoreUnavailableError: there is no room for a copy.
        """
        try:
            return self._fetch(self.store.blank_path(interface_id), interface_id, None)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def kept(self, interface_id: InterfaceId, bitstream_id: BitstreamId | None) -> Bitstream | None:
        """A bitstream as the store had it when it last answered; the store is not touched.

        None where that is not known in this life of the plugin, or something since said that the
        file, or what its trust depends on, may be another one by now.

        Args:
            interface_id: of the cards.
            bitstream_id: its name; None: the blank bitstream.

        Raises:
            BitstreamError, StoreUnavailableError: its copy cannot be used.
        """
        path = self.store.path(interface_id, bitstream_id)
        relative = self.store.relative(path)
        known = self._verdicts.confirmed(relative)
        if known is None or known.problem is not None:
            return None
        with self._new_copies(make_room=True) as made:
            if (found := self._used(path, known)) is not None:
                return found
            if (copy := self._find(path, known, interface_id, bitstream_id, made)) is None:
                return None
            return self._bitstream(path, known, copy, interface_id, bitstream_id)

    def examine(self, relative: str) -> Verdict | None:
        """Verify a file if that is not done yet; None: it is not there (any more).

        Raises:
            NotFinishedError: it is still being written.
            StoreUnavailableError: there is no room for a copy.
        """
        path = os.path.join(self.store.root, relative)
        try:
            interface_id, bitstream_id = ids_of(path)
            with self._alone(relative), self._new_copies(make_room=False) as made:
                known = self._known(path, relative)
                if known is None:
                    known, _ = self._verify(path, relative, interface_id, bitstream_id, made)
                return known
        except (FileNotFoundError, NotADirectoryError):
            self.forget(relative)
            return None
        except BitstreamError as error:
            return Verdict((), "", problem=error)

    def verdict(self, relative: str) -> Verdict | None:
        """What was last known of a file; nothing is read."""
        return self._verdicts.get(relative)

    def forget(self, relative: str) -> None:
        """Verify a file anew when it is next asked for, even if it looks the same."""
        self._verdicts.forget(relative)

    def doubt(self) -> None:
        """Any file, or its trust, may be another by now: the store must say before one is used."""
        self._verdicts.doubt_all()

    def tidy(self, present: Iterable[str]) -> None:
        """Forget all files but these, remove the copies of no file, and save the verdicts."""
        self._verdicts.only(present)
        self._copies.only(self._verdicts.good_digests())
        self.save()

    def save(self) -> None:
        """Keep the verdicts for the next start; they can always be made again."""
        self._verdicts.save()

    def _fetch(
        self, path: str, interface_id: InterfaceId, bitstream_id: BitstreamId | None
    ) -> Bitstream:
        relative = self.store.relative(path)
        with self._alone(relative), self._new_copies(make_room=True) as made:
            known = self._known(path, relative)
            copy: Copy | None = None
            if known is not None and known.problem is None:
                if (found := self._used(path, known)) is not None:
                    return found
                copy = self._find(path, known, interface_id, bitstream_id, made)
            if known is None or (known.problem is None and copy is None):
                known, copy = self._verify(path, relative, interface_id, bitstream_id, made)
            if known.problem is not None:
                raise _bare(known.problem)
            assert copy is not None, "of what is good there is one"
            return self._bitstream(path, known, copy, interface_id, bitstream_id)

    def _used(self, path: str, known: Verdict) -> Bitstream | None:
        """What somebody has in use of the same file with the same content."""
        with self._lock:
            return self._in_use.get((path, known.sha256))

    def _find(
        self,
        path: str,
        known: Verdict,
        interface_id: InterfaceId,
        bitstream_id: BitstreamId | None,
        made: "_NewCopies",
    ) -> Copy | None:
        """What the driver gets of a good file, from its copy; None where that is gone."""
        file = self._copies.find(known.sha256, known.size)
        if not is_aocx(bitstream_id):
            return file
        if known.unpacked and (found := self._copies.find(known.sha256 + UNPACKED, known.unpacked)):
            return found
        if file is None:
            return None
        with file.byte_range(path) as packed:
            return self._check(packed, known, interface_id, bitstream_id, made)[1]

    def _bitstream(
        self,
        path: str,
        known: Verdict,
        copy: Copy,
        interface_id: InterfaceId,
        bitstream_id: BitstreamId | None,
    ) -> Bitstream:
        """The bytes of a copy that is checked; never those of the store's file."""
        if copy.view is not None:
            header = parse_header(bytes(copy.view[:HEAD_BYTES]), size=copy.size, where=path)
            gbs = Gbs(header.metadata, copy.view[header.image_offset :])
        else:
            assert copy.path is not None, "on the disk or in memory"
            try:
                gbs = map_gbs(copy.path, memory=self._copies.memory)
            except (FileNotFoundError, NotADirectoryError):
                raise NotFinishedError(
                    f"{path}: its verified copy was removed while it was read",
                    hint="kubelet's next try makes another",
                ) from None
        metadata = gbs.metadata
        # An AOCX file's own name was compared with this one when it was unpacked.
        claimed = bitstream_id if is_aocx(bitstream_id) else None
        check_names(path, metadata, interface_id, bitstream_id, claimed=claimed)
        bitstream = Bitstream(
            path=path,
            interface_id=interface_id,
            bitstream_id=bitstream_id or BitstreamId(metadata.afu_id),
            afu_id=metadata.afu_id,
            image=gbs.image,
            clock_frequency_high=metadata.clock_frequency_high,
            clock_frequency_low=metadata.clock_frequency_low,
        )
        with self._lock:
            return self._in_use.setdefault((path, known.sha256), bitstream)

    def _known(self, path: str, relative: str) -> Verdict | None:
        """The verdict, if it still holds."""
        changes = self._verdicts.changes
        known = self._verdicts.get(relative)
        if known is None:
            return None
        if version_at(path) != known.version:  # before it is opened, which may hang
            self._verdicts.doubt(relative)
            return None
        try:
            with open_file(path, inside=self.store.root, guarded=self._guarded) as opened:
                if opened.version != known.version:
                    self._verdicts.doubt(relative)
                    return None
        except BaseException:
            self._verdicts.doubt(relative)
            raise
        trust = self.trust.version(relative)
        if trust == known.trust:
            self._verdicts.learn(relative, known, changes)
            return known
        # The file is the same: only its trust is judged anew, by the digest that is known.
        self._verdicts.doubt(relative)
        copy = self._copies.find(known.sha256, known.size) if known.checked else None
        if copy is None:
            return None
        known = replace(known, trust=trust, problem=None)
        known = self._judge(relative, known, copy.content)
        self._verdicts.learn(relative, known, changes)
        return known

    def _judge(self, relative: str, known: Verdict, content: Content) -> Verdict:
        try:
            self.trust.check(relative, content)
        except NotPermittedError as error:
            return replace(known, problem=_bare(error))
        return known

    def _verify(
        self,
        path: str,
        relative: str,
        interface_id: InterfaceId,
        bitstream_id: BitstreamId | None,
        made: "_NewCopies",
    ) -> tuple[Verdict, Copy | None]:
        """Read and judge a file as it is now; returns what the driver gets, if it is good.

        Raises:
            FileNotFoundError, NotADirectoryError: there is no such file.
            BitstreamError: it must not be opened, or changed while it was read.
            NotFinishedError: it is still being written.
            StoreUnavailableError: there is no room for a copy.
        """
        changes = self._verdicts.changes
        trust = self.trust.version(relative)  # before the judging: a change in between shows
        with open_file(path, inside=self.store.root, guarded=self._guarded) as opened:
            if being_written(opened.file):
                raise NotFinishedError(
                    f"{path}: still being written",
                    hint=f"it is used when whoever writes it has closed it; {RENAME}",
                )
            copy = self._copies.take(opened, make_room=made.make_room)
            made.copies[copy.sha256] = copy
            known = Verdict(opened.version, trust, copy.sha256, copy.size)
        try:
            # First: nothing that is not trusted is parsed.
            known = self._judge(relative, known, copy.content)
            if known.problem is None:
                with copy.byte_range(path) as file:
                    known, packed = self._check(file, known, interface_id, bitstream_id, made)
                copy = packed or copy
        except BitstreamError as error:
            known = replace(known, problem=_bare(error))
        self._verdicts.learn(relative, known, changes)
        with self._lock:
            self.verifications.add("good" if known.problem is None else known.problem.kind)
        if known.problem is not None:
            made.drop()
            return known, None
        made.verified = True
        log.info("bitstream verified", file=relative, sha256=known.sha256, bytes=known.size)
        return known, copy

    def _check(
        self,
        file: ByteRange,
        known: Verdict,
        interface_id: InterfaceId,
        bitstream_id: BitstreamId | None,
        made: "_NewCopies",
    ) -> tuple[Verdict, Copy | None]:
        """Whether a copy is of what its path says; and the GBS file that was packed in it.

        Raises:
            BitstreamError: it is not.
            StoreUnavailableError: there is no room for the GBS file.
        """
        with ExitStack() as stack:
            staged: list[StagedFile] = []

            def unpack(size: int) -> Write:
                gbs_file = self._copies.stage(size, where=file.where, make_room=made.make_room)
                staged.append(stack.enter_context(gbs_file))
                return staged[0].write

            _, unpacked = check_contents(file, interface_id, bitstream_id, unpack=unpack)
        known = replace(known, checked=True, unpacked=unpacked)
        if not staged:
            return known, None
        (gbs_file,) = staged
        copy = made.copies[known.sha256 + UNPACKED] = Copy.of(gbs_file)
        return known, copy

    @contextmanager
    def _new_copies(self, *, make_room: bool) -> Iterator["_NewCopies"]:
        """Collects copies; those that are left at the end go into the cache if there is room."""
        made = _NewCopies(self._copies, make_room=make_room)
        try:
            yield made
        except BaseException:
            made.drop()
            raise
        for name, copy in made.copies.items():
            if not self._copies.keep(copy, name, make_room=make_room):
                self._copies.drop(copy)
        if made.verified and make_room:
            self.save()

    @contextmanager
    def _alone(self, relative: str) -> Iterator[None]:
        """Held by whoever verifies a file, so that one copy is made for all who wait for it."""
        with self._lock:
            lock, users = self._busy.get(relative) or (threading.Lock(), 0)
            self._busy[relative] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                _, users = self._busy.pop(relative)
                if users > 1:
                    self._busy[relative] = lock, users - 1


def _bare(error: FpgaPluginError) -> FpgaPluginError:
    """The same error without its traceback, whose frames would keep a copy in memory."""
    return type(error)(error.message, hint=error.hint)


class _NewCopies:
    """Copies that one call made.

    Attributes:
        copies: by the names that they are to have.
        make_room: other copies may go for them.
        verified: they are of a file that was found good.
    """

    def __init__(self, all_copies: Copies, *, make_room: bool) -> None:
        self.copies: dict[str, Copy] = {}
        self.make_room = make_room
        self.verified = False
        self._all = all_copies

    def drop(self) -> None:
        """Remove them."""
        for copy in self.copies.values():
            self._all.drop(copy)
        self.copies.clear()
