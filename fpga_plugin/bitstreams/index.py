"""The index: files are verified when they arrive, not when a pod waits for one.

The watcher says what may have changed; one file after the other is then verified in a thread. At
the start that is every file of the store, after the plugin serves kubelet. A file that is still
being written is left alone until its writer closes it, which inotify reports; one that the store
does not give is left until the store answers. What is refused is logged once, with the
reason; a pod gets the same message.
"""

import asyncio
from collections.abc import Callable

import structlog

from fpga_plugin.bitstreams.manifest import MANIFEST
from fpga_plugin.bitstreams.places import find_place
from fpga_plugin.bitstreams.reader import HEADERS, StoreReader
from fpga_plugin.bitstreams.signatures import ENDING
from fpga_plugin.bitstreams.verdicts import FileVerdict
from fpga_plugin.bitstreams.watched_names import KEYS, look_at_store
from fpga_plugin.errors import (
    BitstreamError,
    BitstreamNotFoundError,
    NotFinishedError,
    StoreUnavailableError,
)
from fpga_plugin.host.watcher import Look, Watcher, hint_for
from fpga_plugin.ids import InterfaceId
from fpga_plugin.settings.settings import TrustMode

log = structlog.get_logger()

_EVERYTHING = frozenset({MANIFEST, MANIFEST + ENDING, KEYS})
"""What may change the verdict on every file."""

_CLOCK_SECONDS = 600.0
"""Between two looks at the clock, where the manifest expires."""


class StoreIndex:
    """Keeps a library up to date while the loop runs."""

    def __init__(
        self, reader: StoreReader, blank_changed: Callable[[InterfaceId | None], None]
    ) -> None:
        """Do nothing yet.

        Args:
            reader: of the library that is kept up to date.
            blank_changed: gets the interface id whose blank bitstream, or the trust in it, may
                have changed; None: any may have. It must not raise.
        """
        self._reader = reader
        self._library = library = reader.library
        self._blank_changed = blank_changed
        reader.on_answer(self._answered)
        self._keys_dir = library.trust.keys_dir if library.trust.mode is TrustMode.SIGNED else None
        self._watcher = Watcher(self, name="store")
        self._changes: set[str | None] = set()
        self._waiting = asyncio.Event()
        self._reported: dict[str, str] = {}

    async def watch(self) -> None:
        """Begin to notice changes; what is there already is for `run`."""
        self._watcher.start()
        await self._watcher.ready()

    def close(self) -> None:
        """Notice nothing more; `run` is its task's to cancel."""
        self._watcher.close()

    async def run(self) -> None:
        """Verify all files, then those that change."""
        self._changes.add(None)
        self._waiting.set()
        while True:
            await self._something_new()
            self._waiting.clear()
            changes, self._changes = self._changes, set()
            if None in changes:
                await self._all()
                continue
            for relative in sorted(filter(None, changes)):
                await self._one(relative)
            await asyncio.to_thread(self._library.verdicts.save)  # which does not touch the store

    async def _something_new(self) -> None:
        """Wait for the watcher's word, or until the manifest expires."""
        while not self._waiting.is_set():
            left = self._library.trust.seconds_left()
            try:
                # The clock may be set meanwhile: look at it now and then.
                async with asyncio.timeout(None if left is None else min(left, _CLOCK_SECONDS)):
                    await self._waiting.wait()
            except TimeoutError:
                if self._library.trust.seconds_left() is None:
                    self.changed(None)

    def look(self, look: Look) -> None:
        """What is watched (`host.watcher.WatchTarget`)."""
        look_at_store(look, self._library.store.root, self._keys_dir)

    def unwatched(self, error: OSError) -> None:
        """Changes are not noticed (`host.watcher.WatchTarget`)."""
        root = self._library.store.root
        if isinstance(error, TimeoutError):
            log.warning(
                "the store does not answer: its changes are not noticed",
                directory=root,
                hint="check the file system that holds it; it is looked at when it answers",
            )
        else:
            log.warning(
                "the store is not watched",
                directory=root,
                error=error.strerror,
                hint=hint_for(error),
            )

    def changed(self, relative: str | None) -> None:
        """Something may have changed (`host.watcher.WatchTarget`)."""
        if relative is None or relative in _EVERYTHING:
            self._library.verdicts.doubt_all()
            self._look_at(None)
        else:
            relative = relative.removesuffix(ENDING)
            self._library.verdicts.forget(relative)
            self._look_at(relative)

    def _answered(self, relative: str) -> None:
        """A file, or with an empty path the store's directory, was late and answers now."""
        if relative not in {HEADERS, MANIFEST}:
            self._look_at(relative or None)

    def _look_at(self, relative: str | None) -> None:
        """Verify a file; None: all of them."""
        self._changes.add(relative)
        place = None if relative is None else find_place(relative)
        if relative is None:
            self._blank_changed(None)
        elif place is not None and place.bitstream_id is None:
            self._blank_changed(place.interface_id)
        self._waiting.set()

    async def _all(self) -> None:
        await self._reader.names()  # for refusals, which wait for no store
        try:
            entries = await self._reader.list()
        except (BitstreamError, BitstreamNotFoundError, StoreUnavailableError) as error:
            self._report("", str(error))
            return
        self._report("", "")
        present = []
        for entry in entries:
            relative = self._library.store.relative(entry.path)
            if entry.interface_id is None or "/" not in relative:
                self._report(relative, str(entry.problem or ""))
                continue
            present.append(relative)
            await self._one(relative)
        for gone in self._reported.keys() - {"", *present}:
            if "/" in gone:
                del self._reported[gone]
        await asyncio.to_thread(self._library.tidy, present)  # neither does this

    async def _one(self, relative: str) -> None:
        verdict: FileVerdict | None
        try:
            verdict = await self._reader.examine(relative)
        except NotFinishedError:
            return  # its writer's close is reported
        except StoreUnavailableError as error:
            self._report(relative, str(error))
            return
        except Exception:
            # This task's end is the daemon's: one file must not be the others' end. The PreStart
            # that asks for this file reports its error.
            log.exception("a bitstream could not be examined", file=relative)
            return
        if verdict is None:
            self._reported.pop(relative, None)
        else:
            self._report(relative, "" if verdict.problem is None else str(verdict.problem))

    def _report(self, relative: str, problem: str) -> None:
        """Say what is wrong with a file, once."""
        if problem == self._reported.get(relative, ""):
            return
        if problem:
            self._reported[relative] = problem
            log.warning("bitstream refused", reason=problem)
        else:
            del self._reported[relative]
