"""Tells when files that matter appear, change or go: the plugin's one use of inotify on files.

A file may appear with its directory, with all the directories above it, or by a link on its path
being switched (a ConfigMap switches `..data`). So a path is resolved as the kernel does, one name
after the other, and every directory in which a name was looked up is watched. An event that
concerns such a name makes the watcher look again: it resolves everything and compares the files'
versions. What a file is like is always read from the file. Events only say when to look, so they
may come late, twice or out of order.

Inotify does not see what other machines do on a network file system, nor a file system that is
mounted over a watched directory. A target that needs to know names a time after which the watcher
looks although nothing happened (`recheck`); else whoever uses a file looks himself.

What the kernel refuses (an instance, the watch of one directory, a listing) is tried again after a
while. Meanwhile the rest is watched, and each try compares the files' versions too.

Looking and adding watches is done in a thread of its own where the files may lie on a file system
that does not answer: then the watcher waits for it, and nobody else does. While the thread looks,
the loop takes no events, so that only one of the two uses the inotify instance.

Nobody supervises a watcher: whatever fails, a thread that cannot be started included, is logged and
tried again.
"""

import asyncio
import contextlib
import errno
import itertools
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from asyncinotify import Event, Inotify, Mask

from fpga_plugin.process.file_identity import Version, inode_at, version_at
from fpga_plugin.process.threads import LateError, Threads
from fpga_plugin.process.ticks import next_tick
from fpga_plugin.process.trusted_files import lookups

log = structlog.get_logger()

RETRY_SECONDS = 60.0
"""After which watching is tried again, and the files are looked at, where the kernel refused."""

ANSWER_SECONDS = 5.0
"""How long a look may take before a target is told that its file system does not answer."""

_NAMES = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.ATTRIB
_CONTENTS = Mask.CLOSE_WRITE
_DIRECTORY = Mask.ONLYDIR | Mask.DONT_FOLLOW
_GONE = Mask.IGNORED | Mask.UNMOUNT

_MAX_EVENTS = 512
"""Events taken in one turn of the event loop, so that a storm of them does not hold it up."""
_MAX_ROUNDS = 16
"""How often watches are extended in a row; a change after that has an event of its own."""

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
"""What a path without a directory answers; the directories above it tell when there is one."""


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


class Look:
    """One look at everything: the files, and the directories that decide what they are.

    Attributes:
        versions: what files are like, by what they are reported as. Several may share one report.
        unlisted: why a directory could not be listed: the versions of what is in it are missing.
        unwatched: why a directory could not be watched.
    """

    def __init__(self) -> None:
        self.versions: dict[str, Version] = {}
        self.unlisted: OSError | None = None
        self.unwatched: OSError | None = None
        self._directories: dict[str, _Names] = {}

    def inside(self, directory: str, pattern: re.Pattern[str]) -> tuple[str, list[str]]:
        """Watch a directory, which need not exist, for names that match.

        Args:
            directory: absolute.
            pattern: of the names.

        Returns:
            The directory without links on its path, and the names in it that match, sorted.
        """
        for above, name in lookups(directory):
            self._names(above).links.add(name)
        resolved = os.path.realpath(directory)
        self._names(resolved).patterns.add(pattern)
        try:
            return resolved, sorted(filter(pattern.fullmatch, os.listdir(resolved)))
        except OSError as error:
            if error.errno not in _ABSENT:
                self.unlisted = error
            return resolved, []

    def file(self, resolved: str, name: str, reported: str) -> None:
        """Watch one file.

        Args:
            resolved: its directory, as `inside` gave it.
            name: of the file, which may be a link.
            reported: what `changed` is called with.
        """
        path = os.path.join(resolved, name)
        last = resolved, name
        if os.path.islink(path):  # most are none, and then the directory is all there is to it
            for last in lookups(path):
                self._names(last[0]).links.add(last[1])
        self._names(last[0]).files.setdefault(last[1], set()).add(reported)
        before = self.versions.get(reported) or ()
        self.versions[reported] = before + (version_at(path) or (-1,))

    def directory(self, path: str, reported: str) -> None:
        """Report when a directory is another one, whatever happens in it."""
        self.versions[reported] = inode_at(path) or (-1,)

    def watch(self, inotify: Inotify) -> dict[int, _Names]:
        """Watch all of that; returns which names matter, by the descriptor of their watch.

        A directory that the kernel refuses to watch is left out, and `unwatched` says why.
        """
        names_by_watch: dict[int, _Names] = {}
        for directory, names in self._directories.items():
            mask = _DIRECTORY | _NAMES
            if names.patterns or names.files:
                mask |= _CONTENTS
            try:
                watch = inotify.add_watch(directory, mask)
            except OSError as error:
                # One above that may not be read is usual; one to be listed, `inside` has reported.
                if error.errno not in _ABSENT | {errno.EACCES}:
                    self.unwatched = error
                continue
            names_by_watch.setdefault(watch.wd, _Names()).add(names)
        return names_by_watch

    def _names(self, directory: str) -> _Names:
        return self._directories.setdefault(directory, _Names())


def hint_for(error: OSError) -> str:
    """What the operator can do about an error that `Target.unwatched` tells."""
    if error.errno in {errno.EMFILE, errno.ENOSPC}:
        return "raise fs.inotify.max_user_instances or fs.inotify.max_user_watches"
    return "check the directory's permissions and the file system that holds it"


class Target(Protocol):
    """What is watched, and who is told."""

    def look(self, look: Look) -> None:
        """Name the directories and files that matter now; called in a thread."""

    def changed(self, reported: str | None) -> None:
        """Something may be another one now; called on the loop. It must not raise.

        Args:
            reported: what, as `look` named it; None: anything, for events were lost, it is watched
                again after `unwatched`, or it is time to look (`recheck`).
        """

    def unwatched(self, error: OSError) -> None:
        """Changes are noticed late for now, some or all; said once for each reason, on the loop.

        Args:
            error: why. A TimeoutError: the file system does not answer, and is watched when it
                does. Any other: the kernel refuses, and is asked again after the retry time.
        """


@dataclass(slots=True)
class _Heard:
    """What events say.

    Attributes:
        lost: some were lost.
        stale: names that matter are other ones now.
        written: what was written to, as it is reported.
    """

    lost: bool = False
    stale: bool = False
    written: set[str] = field(default_factory=set)


class Watcher:
    """Watches one target. Belongs to the event loop."""

    def __init__(
        self,
        target: Target,
        *,
        name: str,
        recheck: float | None = None,
        retry: float = RETRY_SECONDS,
        local: bool = False,
    ) -> None:
        """Watch nothing yet.

        Args:
            target: what is watched, and who is told.
            name: of the thread and the task.
            recheck: seconds after which to look although nothing happened; None: never.
            retry: seconds after which to try again where the kernel refuses to watch.
            local: the file system answers as long as the node lives: look on the loop, without a
                thread.
        """
        self._target = target
        self._name = name
        self._recheck = recheck
        self._retry = retry
        self._threads: Threads[str] | None = None if local else Threads(f"{name}-watch", most=1)
        self._names: dict[int, _Names] = {}
        self._versions: dict[str, Version] | None = None
        self._due: float | None = None
        self._ready = asyncio.Event()
        self._problem = ""
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tell the target of changes, on the running loop."""
        self._task = asyncio.create_task(self._run(), name=f"{self._name} watcher")

    async def ready(self) -> None:
        """Wait until changes are noticed, or the target was told that they are not.

        What happened before that is not reported: look at the files after it.
        """
        await self._ready.wait()

    def close(self) -> None:
        """Stop; the target is not called after this. May be repeated."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                await self._watch()
            except OSError as error:
                self._fail(error)
                await asyncio.sleep(self._retry)
            except Exception as error:
                if repr(error) != self._problem:
                    self._problem = repr(error)
                    log.exception("watching files failed, and is tried again", watcher=self._name)
                self._ready.set()
                await asyncio.sleep(self._retry)

    async def _watch(self) -> None:
        """Watch for as long as the kernel lets us; return when it is to be asked anew.

        Raises:
            OSError: its instance of inotify does not work any more.
            RuntimeError: there is no thread left to look in.
        """
        self._names = {}
        try:
            instance = _Instance()
        except OSError as error:
            await self._compare(None, _Heard(), refused=error)
            await asyncio.sleep(self._retry)
            return
        with contextlib.closing(instance):
            heard = _Heard()
            while True:
                await self._compare(instance, heard)
                heard = await self._hear(instance.inotify)

    def _fail(self, error: OSError) -> None:
        problem = error.strerror or str(error)  # not the path: each time it may be another one
        if problem != self._problem and not self._closed:
            self._problem = problem
            self._target.unwatched(error)
        self._ready.set()

    def _tell(self, reported: str | None) -> None:
        if not self._closed:  # `changed` may close us
            self._target.changed(reported)

    async def _hear(self, inotify: Inotify) -> _Heard:
        """Wait for events that concern the target, or until it is time to look without any."""
        retry = asyncio.get_running_loop().time() + self._retry if self._problem else None
        times = [time for time in (self._due, retry) if time is not None]
        try:
            async with asyncio.timeout_at(min(times, default=None)):
                while True:
                    events = list(itertools.islice(inotify, _MAX_EVENTS))
                    heard = self._understand(events)
                    if heard.lost or heard.stale:
                        return heard
                    if len(events) < _MAX_EVENTS:
                        await _readable(inotify.fd)
                    else:
                        # asyncinotify may hold some that it has read: the descriptor does not tell.
                        await asyncio.sleep(0)
        except TimeoutError:
            return _Heard()

    def _understand(self, events: list[Event]) -> _Heard:
        heard = _Heard()
        for event in events:
            if Mask.Q_OVERFLOW in event.mask:
                heard.lost = True
                continue
            names = self._names.get(event.watch.wd) if event.watch is not None else None
            if names is None:
                continue  # of a watch that is not needed any more
            name = "" if event.name is None else str(event.name)
            if event.mask & _GONE or names.concern(name):
                heard.stale = True
            if Mask.CLOSE_WRITE in event.mask:
                heard.written |= names.files.get(name, set())
        return heard

    async def _compare(
        self, instance: "_Instance | None", heard: _Heard, *, refused: OSError | None = None
    ) -> None:
        """Look again, and tell what differs.

        Args:
            instance: of inotify; None: only look.
            heard: what events say.
            refused: why there is no instance.
        """
        watched, before = not self._problem, self._versions
        look = await self._look(instance)
        refused = refused or look.unwatched or look.unlisted
        now = look.versions if look.unlisted is None else (before or {}) | look.versions
        self._versions = now
        if self._is_due() or heard.lost or not (watched or refused):
            self._tell(None)
        elif before is not None:
            different = {
                name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
            }
            # A file rewritten within one tick of the file system's clock has the version it had.
            for name in sorted(different | heard.written):
                self._tell(name)
        elif self._ready.is_set():  # whoever waited for that has looked before us
            self._tell(None)
        if refused is None:
            self._problem = ""
            self._ready.set()
        else:
            self._fail(refused)

    def _is_due(self) -> bool:
        """Whether it is time to look although nothing happened; that begins anew then."""
        if self._recheck is None:
            return False
        now = asyncio.get_running_loop().time()
        due = self._due is not None and now >= self._due
        if due or self._due is None:
            self._due = next_tick(self._recheck)
        return due

    async def _look(self, instance: "_Instance | None") -> Look:
        """Look, however long that takes; the target is told if it is long."""
        if self._threads is None:
            return self._look_now(instance)
        while True:
            try:
                return await self._threads.run(
                    self._name, lambda: self._look_now(instance), seconds=ANSWER_SECONDS
                )
            except LateError as error:
                self._fail(TimeoutError(f"not looked into within {ANSWER_SECONDS:.0f} s"))
                await asyncio.wait(error.ended)

    def _look_now(self, instance: "_Instance | None") -> Look:
        """Look at what matters now, and watch it.

        What was read before its directory was watched may be out of date: read again until there
        is nothing new to watch.
        """
        look = Look()
        if instance is None:
            self._target.look(look)
            return look
        with instance.used() as inotify:
            for _ in range(_MAX_ROUNDS):
                look = Look()
                self._target.look(look)
                before, self._names = self._names, look.watch(inotify)
                if look.unlisted is not None:  # what is in there is not known to be gone
                    self._names = before | self._names
                if self._names.keys() <= before.keys():
                    break
            for watch in inotify.watches:
                if watch.wd not in self._names:
                    with contextlib.suppress(OSError):  # its directory went, and the watch with it
                        inotify.rm_watch(watch)
        return look


class _Instance:
    """An inotify instance that a thread may be using when it is to be closed.

    A thread that a file system holds up closes it when it goes on: closed before, the number of its
    descriptor could be another file's by then.
    """

    def __init__(self) -> None:
        self.inotify = Inotify(sync_timeout=0)  # 0: iterating ends where there are no events
        self._lock = threading.Lock()
        self._in_use = self._closed = False

    @contextlib.contextmanager
    def used(self) -> Iterator[Inotify]:
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._in_use = True
        try:
            yield self.inotify
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._in_use = False
            if self._closed:
                self.inotify.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if not self._in_use:
                self.inotify.close()


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
