"""The store as the daemon uses it: only what was verified, and only from a copy of its own.

A file is verified when it arrives (`index`), or by the first PreStart or scrub that comes
before that: copied and hashed in one pass, its trust judged, the copy parsed, its ids compared with
its path. What trust refuses is not parsed. What is programmed goes into the cache
(`bitstreams.cache`): the copy, or the GBS file that was packed in it. From then on nobody needs the
store's file, and replacing it does not change what is programmed.

What came out (`bitstreams.verdicts`) holds while the file and what its trust depends on stay the
same ones; so a warm PreStart compares two `stat`s, and the driver reads the copy from where it
lies. A file that was changed is verified again before anything of it is used, and what was refused
is not hashed again.
"""

import os
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TypeVar

import structlog
from msgspec import structs

from fpga_plugin.bitstreams.cache import Cache, NewFile
from fpga_plugin.bitstreams.contents import Write
from fpga_plugin.bitstreams.files import Content, open_file, pieces_of
from fpga_plugin.bitstreams.kinds import read_data
from fpga_plugin.bitstreams.places import Place, place_for, place_of_path
from fpga_plugin.bitstreams.store import Bitstream, Store
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.bitstreams.verdicts import FileVerdict, Verdicts
from fpga_plugin.errors import (
    BitstreamError,
    BitstreamNotFoundError,
    FpgaPluginError,
    NotFinishedError,
    NotPermittedError,
)
from fpga_plugin.hardware.image import Image, RawImage
from fpga_plugin.host.file_identity import version_at
from fpga_plugin.host.instruments import Counter
from fpga_plugin.host.trusted_files import RENAME, being_written
from fpga_plugin.ids import BitstreamId, InterfaceId

log = structlog.get_logger()

E = TypeVar("E", bound=FpgaPluginError)


class Library:
    """A store of verified bitstreams. All of it blocks.

    `verdicts` has what was last known of its files; saved, they can always be made again.

    Thread-safe, except for two calls for one file at a time: `StoreReader` prevents them.
    """

    def __init__(
        self, root: str, *, directory: str, limit: int, trust: Trust, guarded: bool
    ) -> None:
        """Read what earlier processes verified.

        Args:
            root: of the store.
            directory: of the cache; what is known of files is beside it, in `<directory>.json`.
            limit: bytes that all files of the cache may have together.
            trust: judges the files.
            guarded: refuse what others may write.
        """
        self.store = Store(root)
        self.trust = trust
        self.verifications = Counter()  # files that were read and judged, by outcome
        self._counting = threading.Lock()
        self._guarded = guarded
        self._cache = Cache(directory, limit)
        self.verdicts = Verdicts(f"{directory}.json")
        self._cache.only(self.verdicts.cached())

    def load(
        self,
        interface_id: InterfaceId,
        bitstream_id: BitstreamId | None,
        takes: type[Image] = RawImage,
    ) -> Bitstream:
        """A verified bitstream.

        Args:
            interface_id: of the cards.
            bitstream_id: its name; None: the blank bitstream.
            takes: what their driver reads.

        Raises:
            BitstreamNotFoundError: there is none; the message names the path.
            BitstreamError: the file cannot be used, or is not what its name says.
            NotPermittedError: it is not trusted.
            NotFinishedError: it is still being written.
            StoreUnavailableError: there is no room for a copy.
        """
        place = place_for(interface_id, bitstream_id, takes)
        try:
            return self._fetch(place)
        except BitstreamNotFoundError:
            self.store.not_found(place)

    def kept(self, place: Place) -> Bitstream | None:
        """A bitstream as the store had it when it last answered; the store is not touched.

        None where that is not known in this run of the plugin, or something since said that the
        file, or what its trust depends on, may be another one by now.
        """
        known = self.verdicts.confirmed(place.path)
        if known is None or known.problem is not None:
            return None
        data = self._cache.map(known.cached)
        return None if data is None else self._bitstream(place, data)

    def examine(self, relative: str) -> FileVerdict | None:
        """Verify a file if that is not done yet; None: it is not there (any more).

        Raises:
            NotFinishedError: it is still being written.
            StoreUnavailableError: there is no room for a copy.
        """
        try:
            place = place_of_path(os.path.join(self.store.root, relative))
            known = self._known(place)
            return known or self._verify(place, evict=False)[0]
        except BitstreamNotFoundError:
            self.verdicts.forget(relative)
            return None
        except BitstreamError as error:
            return FileVerdict((), "", Content("", 0), problem=error)

    def tidy(self, present: Iterable[str]) -> None:
        """Forget all files but these, remove the copies of no file, and save the verdicts."""
        self.verdicts.only(present)
        self._cache.only(self.verdicts.cached())
        self.verdicts.save()

    def _fetch(self, place: Place) -> Bitstream:
        known = self._known(place)
        if known is not None and known.problem is None:
            if (data := self._cache.map(known.cached)) is not None:
                return self._bitstream(place, data)
            known = None
        data = None
        if known is None:
            known, data = self._verify(place, evict=True)
        if known.problem is not None:
            raise _bare(known.problem)
        assert data is not None, "of what is good there is one"
        self.verdicts.save()
        return self._bitstream(place, data)

    def _bitstream(self, place: Place, data: memoryview) -> Bitstream:
        """What is to be programmed, of a file in the cache."""
        where = self.store.at(place)
        contents = read_data(data, where)
        high, low = contents.clocks
        return Bitstream(
            path=where,
            interface_id=place.interface_id,
            bitstream_id=place.bitstream_id or contents.bitstream_id,
            afu_id=contents.afu_id,
            image=contents.image(data),
            clock_frequency_high=high,
            clock_frequency_low=low,
        )

    def _known(self, place: Place) -> FileVerdict | None:
        """The verdict, if it still holds."""
        changes = self.verdicts.changes
        known = self.verdicts.get(place.path)
        if known is None or not self._same(place, known):
            self.verdicts.doubt(place.path)
            return None
        trust = self.trust.version(place.path)
        if trust != known.trust:
            # The file is the same: only its trust is judged again, by the digest that is known.
            self.verdicts.doubt(place.path)
            if not known.cached:
                return None
            known = structs.replace(known, trust=trust, problem=None)
            try:
                self.trust.check(place.path, known.content)
            except NotPermittedError as error:
                known = structs.replace(known, problem=_bare(error))
        self.verdicts.learn(place.path, known, changes)
        return known

    def _same(self, place: Place, known: FileVerdict) -> bool:
        """Whether the store's file is the one that was judged."""
        path = self.store.at(place)
        if version_at(path) != known.version:  # before it is opened, which may hang
            return False
        try:
            with open_file(path, inside=self.store.root, guarded=self._guarded) as opened:
                return opened.version == known.version
        except BaseException:
            self.verdicts.doubt(place.path)
            raise

    def _verify(self, place: Place, *, evict: bool) -> tuple[FileVerdict, memoryview | None]:
        """Read and judge a file as it is now; returns what is programmed, too, if it is good.

        Args:
            place: of the file.
            evict: copies that were not used for longest go where there is no room for this one.

        Raises:
            BitstreamNotFoundError: there is no such file.
            BitstreamError: it must not be opened, or changed while it was read.
            NotFinishedError: it is still being written.
            StoreUnavailableError: there is no room for a copy.
        """
        path = self.store.at(place)
        changes = self.verdicts.changes
        trust = self.trust.version(place.path)  # before the judging: a change in between shows
        data: memoryview | None = None
        with ExitStack() as stack:
            opened = stack.enter_context(
                open_file(path, inside=self.store.root, guarded=self._guarded)
            )
            if being_written(opened.file):
                raise NotFinishedError(
                    f"{path}: still being written",
                    hint=f"it is used once its writer has closed it; {RENAME}",
                )
            copy = stack.enter_context(self._cache.new(opened.size, where=path, evict=evict))
            for piece in pieces_of(opened):
                copy.write(piece)
            known = FileVerdict(opened.version, trust, Content(copy.sha256, opened.size))
            try:
                # First: nothing that is not trusted is parsed.
                self.trust.check(place.path, known.content)
                file = self._unpack(place, copy, stack, evict=evict)
                self._cache.keep(file, evict=evict)
                known, data = structs.replace(known, cached=file.sha256), file.map()
            except (BitstreamError, NotPermittedError) as error:
                known = structs.replace(known, problem=_bare(error))
        self.verdicts.learn(place.path, known, changes)
        with self._counting:
            self.verifications.add(known.problem.kind if known.problem else "good")
        if known.problem is None:
            log.info(
                "bitstream verified",
                file=place.path,
                sha256=known.content.sha256,
                bytes=known.content.size,
            )
        return known, data

    def _unpack(self, place: Place, copy: NewFile, stack: ExitStack, *, evict: bool) -> NewFile:
        """Check that a copy is what its path says; what is programmed of it: itself, or a part.

        Raises:
            BitstreamError: it is something else.
            StoreUnavailableError: there is no room for what is packed in it.
        """
        packed: list[NewFile] = []

        def begin(size: int) -> Write:
            path = self.store.at(place)
            packed.append(stack.enter_context(self._cache.new(size, where=path, evict=evict)))
            return packed[0].write

        place.read(copy.byte_range, begin)
        return packed[0] if packed else copy


def _bare(error: E) -> E:
    """The same error without its traceback, whose frames would keep what they hold."""
    return type(error)(error.message, hint=error.hint)
