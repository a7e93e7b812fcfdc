"""Reads the store without being held up by it: each file is read in a thread of its own.

A store may be a network file system, and then a file, or all of it, may stop answering at any time.
A call for such a file gets an error within seconds. Further calls for it need no further thread,
and all calls together need a few. A file that was verified before is served from its copy, without
the store, until a change is noticed.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import structlog

from fpga_plugin.bitstreams.id_names import Names
from fpga_plugin.bitstreams.library import Library
from fpga_plugin.bitstreams.manifest import MANIFEST, Aliases, InterfaceAliases
from fpga_plugin.bitstreams.places import place_for
from fpga_plugin.bitstreams.store import Bitstream, StoreEntry
from fpga_plugin.bitstreams.verdicts import FileVerdict
from fpga_plugin.errors import (
    BitstreamNotFoundError,
    FpgaPluginError,
    NotPermittedError,
    StoreUnavailableError,
)
from fpga_plugin.hardware.image import Image, RawImage
from fpga_plugin.host.keyed_threads import KeyedThreads, LateError
from fpga_plugin.ids import BitstreamId, InterfaceId

log = structlog.get_logger()

T = TypeVar("T")

MOST_THREADS = 8
"""Reads of the store at a time. Each that hangs takes one for as long as it does."""

SPARE_THREADS = 5
"""Of those, what files that arrive leave to PreStarts and scrubs."""

LOOK_SECONDS = 1.0
"""How long a store may take to say that a verified file is the same; then its copy will do."""

READ_SECONDS = 8.0
"""How long a PreStart or a scrub waits for a file that has no copy; reading goes on after that."""

ARRIVAL_SECONDS = 60.0
"""How long the index waits for a file before it turns to the next one."""

HEADERS = "all headers"
"""Names that read among the others; no file has such a path."""

_NAMED = 3
"""Files that a message names."""


class StoreReader:
    """Reads the store's files in threads, each for a limited time."""

    def __init__(self, library: Library) -> None:
        """Read nothing yet.

        Args:
            library: what the store is to the daemon.
        """
        self.library = library
        self._threads: KeyedThreads[str] = KeyedThreads("store", most=MOST_THREADS)
        self._answered: Callable[[str], None] = lambda _relative: None
        self._late: set[str] = set()
        self._names: Names | None = None

    def on_answer(self, answered: Callable[[str], None]) -> None:
        """Call `answered` with the path from the root of a file that answers after it was late."""
        self._answered = answered

    def blank_path(self, interface_id: InterfaceId, takes: type[Image] = RawImage) -> str:
        """Where the blank bitstream of an interface id is expected, for cards that take such."""
        return self.library.store.at(place_for(interface_id, None, takes))

    async def load(
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
            StoreUnavailableError: the store does not answer, or there is no room for a copy.
        """
        place = place_for(interface_id, bitstream_id, takes)

        def read() -> Bitstream:
            return self.library.load(interface_id, bitstream_id, takes)

        begun = asyncio.get_running_loop().time()
        try:
            return await self._threads.run(place.path, read, seconds=LOOK_SECONDS)
        except LateError:
            copy = await asyncio.to_thread(self.library.kept, place)
            if copy is not None:
                log.warning(
                    "the store does not answer: a verified copy is used",
                    file=place.path,
                    hint=f"check the file system that holds {self.library.store.root}",
                )
                return copy
        left = begun + READ_SECONDS - asyncio.get_running_loop().time()
        try:
            return await self._threads.run(place.path, read, seconds=left, least=LOOK_SECONDS)
        except LateError as late:
            raise self._unavailable(place.path, late, READ_SECONDS) from None

    async def blank(
        self, interface_id: InterfaceId, takes: type[Image] = RawImage
    ) -> Bitstream | None:
        """The verified blank bitstream of an interface id; None when there is none.

        Raises:
            FpgaPluginError: as `load`.
        """
        try:
            return await self.load(interface_id, None, takes)
        except BitstreamNotFoundError:
            return None

    async def aliases(self) -> Aliases:
        """What the manifest calls bitstreams; while the store does not answer, what it called them.

        Raises:
            NotPermittedError: there is a manifest, and it cannot be used.
            NotFinishedError: that is unknown just now.
            StoreUnavailableError: the store does not answer, and never did.
        """
        return (await self._read_names()).bitstreams

    async def interface_aliases(self) -> InterfaceAliases | None:
        """What the manifest calls interface ids; None: there is none that counts.

        Raises:
            FpgaPluginError: as `aliases`.
        """
        names = await self._read_names()
        return names.interfaces if names.counts else None

    async def names(self) -> Names:
        """What the manifest calls ids, for people: what is known of it; never raises."""
        with contextlib.suppress(FpgaPluginError):
            await self._read_names()
        return self.known_names

    async def _read_names(self) -> Names:
        seconds = READ_SECONDS if self._names is None else LOOK_SECONDS
        try:
            read = self.library.trust.names
            self._names = await self._threads.run(MANIFEST, read, seconds=seconds)
        except NotPermittedError:
            self._names = None  # nothing of such a manifest counts
            raise
        except LateError as late:
            if self._names is None:
                raise self._unavailable(MANIFEST, late, seconds) from None
        return self._names

    @property
    def known_names(self) -> Names:
        """The same as it was read last, at once: the index reads it whenever it may change."""
        return self._names or Names()

    async def examine(self, relative: str) -> FileVerdict | None:
        """Verify a file that arrived, if that is not done yet; None: it is not there.

        Raises:
            NotFinishedError: it is still being written.
            StoreUnavailableError: the store does not answer, or there is no room for a copy.
        """
        return await self._unhurried(relative, lambda: self.library.examine(relative))

    async def list(self) -> tuple[StoreEntry, ...]:
        """The files of the store; nothing of them is read.

        Raises:
            BitstreamNotFoundError: there is no store.
            BitstreamError: its directory cannot be read.
            StoreUnavailableError: the store does not answer.
        """
        return await self._unhurried("", lambda: self.library.store.list(read=False))

    async def headers(self) -> tuple[StoreEntry, ...]:
        """The files of the store with what their headers say, for people; nothing is verified.

        Raises:
            BitstreamNotFoundError: there is no store.
            BitstreamError: its directory cannot be read.
            StoreUnavailableError: the store does not answer.
        """
        return await self._unhurried(HEADERS, self.library.store.list)

    async def titled(self, title: str, interface_id: InterfaceId | None = None) -> str:
        """Ids of the bitstreams whose accelerator calls itself so, for people; empty: none does.

        Of a store that answers at once. Status and lists show titles in quotes.
        """
        wanted = title.strip("'")
        entries: Iterable[StoreEntry] = ()
        with contextlib.suppress(FpgaPluginError, LateError):
            entries = await self._threads.run(
                HEADERS, self.library.store.list, seconds=LOOK_SECONDS, spare=SPARE_THREADS
            )
        found = (
            entry.bitstream_id
            for entry in entries
            if entry.bitstream_id is not None
            and interface_id in {None, entry.interface_id}
            and entry.contents is not None
            and entry.contents.name == wanted
        )
        return " or ".join([*dict.fromkeys(found)][:_NAMED])

    async def _unhurried(self, relative: str, work: Callable[[], T]) -> T:
        """A call that no container's start waits for.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        try:
            return await self._threads.run(
                relative, work, seconds=ARRIVAL_SECONDS, spare=SPARE_THREADS
            )
        except LateError as late:
            raise self._unavailable(relative, late, ARRIVAL_SECONDS) from None

    def _unavailable(self, relative: str, late: LateError, seconds: float) -> StoreUnavailableError:
        # Without times that grow: what is said once is not said again.
        if relative not in self._late:
            self._late.add(relative)
            for ended in late.ended:
                ended.add_done_callback(lambda _: self._answers(relative))
        path = f"{self.library.store.root}/{relative}".rstrip("/")
        check = f"check the file system that holds {self.library.store.root}: its server, its mount"
        if late.others:
            names = ", ".join(str(other or "the directory") for other in late.others[:_NAMED])
            more = " and others" if len(late.others) > _NAMED else ""
            return StoreUnavailableError(
                f"{path}: not read, for {len(late.others)} reads of the store do not end:"
                f" {names}{more}",
                hint=f"it is read when one of them ends; {check}",
            )
        return StoreUnavailableError(
            f"{path}: not read within {seconds:.0f} s",
            hint=f"it goes on, and kubelet's next attempt uses the result; if not, {check}",
        )

    def _answers(self, relative: str) -> None:
        if relative in self._late:
            self._late.discard(relative)
            self._answered(relative)
