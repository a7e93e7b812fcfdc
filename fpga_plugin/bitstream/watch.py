"""Tells when something in the store appears, changes or goes: bitstreams, signatures, the manifest.

Files are verified when they arrive, and a card without a blank bitstream is Unhealthy until the
file is there; nobody should have to restart the plugin for that, and nothing is polled. A file may
appear with its directory, with the whole store, or by a link somewhere on its path being switched
(a ConfigMap switches `..data`).

So the watcher resolves each path as the kernel does, one name after the other, and watches every
directory in which a name was looked up. An event there that concerns such a name makes it resolve
everything again and compare. Inotify does not see what other machines do on a network file system,
nor a file system that is mounted over a watched directory: there a PreStart, which looks itself,
finds the change.

Looking up names and adding watches is done in a thread of its own, since the store may be a file
system that does not answer: then the watcher waits for it, and nobody else does. While the thread
looks the loop takes no events, so that only one of the two uses the inotify instance.
"""

import asyncio
import contextlib
import errno
import itertools
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from asyncinotify import Event, Inotify, Mask

from fpga_plugin.bitstream.manifest import MANIFEST
from fpga_plugin.errors import BitstreamError, StoreUnavailableError
from fpga_plugin.process.threads import LateError, Threads
from fpga_plugin.process.trusted_files import lookups, version_at

log = structlog.get_logger()

_NAMES = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.ATTRIB
_CONTENTS = Mask.CLOSE_WRITE
_DIRECTORY = Mask.ONLYDIR | Mask.DONT_FOLLOW

_INTERFACE_DIRECTORY = re.compile(r"[0-9a-f]{32}", re.ASCII)
_ROOT_NAME = re.compile(r"[0-9a-f]{32}|" + re.escape(MANIFEST) + r"(\.sig)?", re.ASCII)
_BITSTREAM_NAME = re.compile(r"[^.].*\.(gbs|aocx)(\.sig)?", re.ASCII | re.DOTALL)
_KEY_NAME = re.compile(r"[^.].*\.pem", re.ASCII | re.DOTALL)

KEYS = "keys"
"""What stands for the directory of keys, where the watcher reports paths."""

_MAX_EVENTS = 512
"""Events taken in one turn of the event loop, so that a storm of them does not hold it up."""
_MAX_ROUNDS = 16
"""How often watches are extended in a row; a change after that has an event of its own."""

_START_SECONDS = 5.0
"""How long the first look may take before the start of the plugin goes on without it."""

_TRANSIENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES}
"""What a directory that just went, or that we may not read, answers to a watch."""

_Signature = tuple[int, ...] | None


@dataclass(slots=True)
class _Names:
    """Names in one directory that matter.

    Attributes:
        links: names on the way to a file.
        files: names of files, each with what it is reported as.
        patterns: of names that matter when they appear.
    """

    links: set[str] = field(default_factory=set)
    files: dict[str, set[str]] = field(default_factory=dict)
    patterns: set[re.Pattern[str]] = field(default_factory=set)

    def concern(self, name: str) -> bool:
        return (
            name in self.links
            or name in self.files
            or any(pattern.fullmatch(name) for pattern in self.patterns)
        )

    def add(self, other: "_Names") -> None:
        self.links |= other.links
        for name, reported in other.files.items():
            self.files.setdefault(name, set()).update(reported)
        self.patterns |= other.patterns


class StoreWatcher:
    """Watches a store and the keys; neither need exist yet.

    Start it first and read the store then: what was there at the start is not reported.
    """

    def __init__(
        self, root: str, changed: Callable[[str | None], None], *, keys_dir: str | None = None
    ) -> None:
        """Watch nothing yet.

        Args:
            root: of the store.
            changed: gets the path of what may have changed, from the root, or `KEYS`, or None when
                events were lost: then anything may have. It must not raise.
            keys_dir: the directory of the keys, if they matter.
        """
        self._root = os.path.abspath(root)
        self._keys_dir = None if keys_dir is None else os.path.abspath(keys_dir)
        self._changed = changed
        self._threads: Threads[str] = Threads("store-watch", most=1)
        self._inotify: Inotify | None = None
        self._lock = threading.Lock()
        self._in_use = False  # by the thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking: asyncio.Task[None] | None = None
        self._survey: dict[int, _Names] = {}
        self._signatures: dict[str, _Signature] = {}

    async def start(self, *, seconds: float = _START_SECONDS) -> None:
        """Begin to call `changed` on the running loop.

        Raises:
            BitstreamError: the kernel gives no more inotify instances or watches.
            StoreUnavailableError: the store does not answer. When it does it is watched, and
                `changed` is told that anything may have.
        """
        self._loop = asyncio.get_running_loop()
        try:
            # A timeout of 0 makes iteration end where no event is left, instead of blocking.
            inotify = self._inotify = Inotify(sync_timeout=0)
            try:
                self._signatures = await self._threads.run(
                    self._root, lambda: self._use(inotify), seconds=seconds
                )
            except LateError as late:
                self._looking = asyncio.create_task(self._catch_up(late))
                raise StoreUnavailableError(
                    f"{self._root}: not looked into within {seconds:.0f} s",
                    hint="check the file system that holds it; it is watched once it answers",
                ) from None
        except OSError as error:
            self.close()
            raise _unwatched(self._root, error) from error
        if self._inotify is inotify:
            self._loop.add_reader(inotify.fd, self._ready)

    def close(self) -> None:
        """Stop; no call comes after this."""
        with self._lock:
            inotify, self._inotify = self._inotify, None
            in_use = self._in_use
        if inotify is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(inotify.fd)
        if self._looking is not None:
            self._looking.cancel()
        if not in_use:  # else the thread closes it: its number must not become another file's
            inotify.close()

    def _ready(self) -> None:
        """Take the events that there are, then look once."""
        if self._inotify is None or self._loop is None or self._looking is not None:
            return
        events = list(itertools.islice(self._inotify, _MAX_EVENTS))
        if len(events) == _MAX_EVENTS:
            # asyncinotify may hold some that it has read: the descriptor does not tell of those.
            self._loop.call_soon(self._ready)
        lost = stale = False
        written: set[str] = set()
        for event in events:
            if Mask.Q_OVERFLOW in event.mask:
                lost = True
                continue
            names = self._survey.get(event.watch.wd) if event.watch is not None else None
            if names is None:
                continue  # of a watch that is not needed any more
            name = _name(event)
            if Mask.IGNORED in event.mask or Mask.UNMOUNT in event.mask or names.concern(name):
                stale = True
            if Mask.CLOSE_WRITE in event.mask:
                written |= names.files.get(name, set())
        if lost or stale:
            self._loop.remove_reader(self._inotify.fd)
            self._looking = self._loop.create_task(
                self._compare(self._inotify, lost=lost, written=written)
            )

    async def _catch_up(self, late: LateError) -> None:
        """The first look was late: look again when it ends, and have everything read."""
        await asyncio.wait(late.ended)
        if self._inotify is not None:
            await self._compare(self._inotify, lost=True, written=set())

    async def _compare(self, inotify: Inotify, *, lost: bool, written: set[str]) -> None:
        before = self._signatures
        try:
            self._signatures = await self._again(inotify)
        except OSError as error:
            log.warning("the store is not watched", error=str(_unwatched(self._root, error)))
            lost = True
        self._looking = None
        if self._inotify is None or self._loop is None:
            return
        self._loop.add_reader(inotify.fd, self._ready)
        self._loop.call_soon(self._ready)
        if lost:
            self._changed(None)
            return
        different = {
            path
            for path in before.keys() | self._signatures.keys()
            if before.get(path) != self._signatures.get(path)
        }
        # A file rewritten within one tick of the file system's clock has the signature it had.
        for path in sorted(different | written):
            if self._inotify is not None:  # `changed` may close us
                self._changed(path)

    async def _again(self, inotify: Inotify) -> dict[str, _Signature]:
        """Look, however long it takes."""
        while True:
            try:
                return await self._threads.run(
                    self._root, lambda: self._use(inotify), seconds=_START_SECONDS
                )
            except LateError as late:
                log.warning(
                    "the store does not answer: its changes are not noticed",
                    directory=self._root,
                    hint="check the file system that holds it; it is looked at when it answers",
                )
                await asyncio.wait(late.ended)

    def _use(self, inotify: Inotify) -> dict[str, _Signature]:
        """In the thread."""
        with self._lock:
            if self._inotify is not inotify:
                return {}
            self._in_use = True
        try:
            return self._look(inotify)
        finally:
            with self._lock:
                self._in_use = False
                closed = self._inotify is not inotify
            if closed:
                inotify.close()

    def _look(self, inotify: Inotify) -> dict[str, _Signature]:
        """Watch what matters now; returns what the files are like.

        What was read before its directory was watched may be out of date: read again until there
        is nothing new to watch.
        """
        for _ in range(_MAX_ROUNDS):
            look = _resolve(self._root, self._keys_dir)
            survey: dict[int, _Names] = {}
            for directory, names in look.directories.items():
                mask = (
                    _DIRECTORY | _NAMES | (_CONTENTS if names.patterns or names.files else Mask(0))
                )
                try:
                    watch = inotify.add_watch(directory, mask)
                except OSError as error:
                    if error.errno not in _TRANSIENT:
                        raise
                    continue
                survey.setdefault(watch.wd, _Names()).add(names)
            recorder = survey.keys() - self._survey.keys()
            self._survey = survey
            if not recorder:
                break
        for watch in inotify.watches:
            if watch.wd not in self._survey:
                with contextlib.suppress(OSError):  # its directory went, and the watch with it
                    inotify.rm_watch(watch)
        return look.signatures


class _Resolution:
    """One look at everything: the files, and the directories that decide what they are."""

    def __init__(self) -> None:
        self.signatures: dict[str, _Signature] = {}
        self.directories: dict[str, _Names] = {}

    def names(self, directory: str) -> _Names:
        return self.directories.setdefault(directory, _Names())

    def inside(self, directory: str, pattern: re.Pattern[str]) -> tuple[str, list[str]]:
        """A directory as it resolves, and the names in it that match."""
        for above, name in lookups(directory):
            self.names(above).links.add(name)
        resolved = os.path.realpath(directory)
        try:
            found = sorted(filter(pattern.fullmatch, os.listdir(resolved)))
        except OSError:
            return resolved, []
        self.names(resolved).patterns.add(pattern)
        return resolved, found

    def file(self, resolved: str, name: str, reported: str) -> None:
        """One file; in most stores it is no link, and then its directory is all there is to it."""
        path = os.path.join(resolved, name)
        last = resolved, name
        if os.path.islink(path):
            for last in lookups(path):
                self.names(last[0]).links.add(last[1])
        self.names(last[0]).files.setdefault(last[1], set()).add(reported)
        # Several keys are one thing: any that differs makes it another.
        before = self.signatures.get(reported) or ()
        self.signatures[reported] = before + (_signature(path) or (-1,))


def _resolve(root: str, keys_dir: str | None) -> _Resolution:
    """All files that matter."""
    look = _Resolution()
    resolved_root, names = look.inside(root, _ROOT_NAME)
    for name in names:
        if not _INTERFACE_DIRECTORY.fullmatch(name):
            look.file(resolved_root, name, name)
            continue
        resolved, files = look.inside(os.path.join(root, name), _BITSTREAM_NAME)
        for file in files:
            look.file(resolved, file, f"{name}/{file}")
    if keys_dir is not None:
        resolved, files = look.inside(keys_dir, _KEY_NAME)
        for file in files:
            look.file(resolved, file, KEYS)
    return look


def _unwatched(root: str, error: OSError) -> BitstreamError:
    return BitstreamError(
        f"{root}: cannot be watched: {error.strerror}",
        hint="raise fs.inotify.max_user_instances or fs.inotify.max_user_watches",
    )


def _signature(path: str) -> _Signature:
    """What differs when a file is another one or has other content; None where there is none."""
    return version_at(path)


def _name(event: Event) -> str:
    return str(event.name) if event.name is not None else ""
