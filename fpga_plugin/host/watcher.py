"""Tells when files that matter appear, change or go.

A look reads which files there are and what each is like; what differs from the look before is a
change. Inotify only says when to look: at once after something happened in a directory that
matters, and every minute whatever it says. The minute covers what inotify does not see: changes
that other machines make on a network file system, a file system that is mounted over a watched
directory, and a kernel that has no watch left to give.

A file may appear with its directory, with all the directories above it, or by a link on its path
being switched (a ConfigMap switches `..data`). So every directory in which the kernel looks up a
name of the path is watched: those above a file for that name alone, the file's own for everything.

A look runs in a thread of its own where the files may lie on a file system that does not answer:
then the watcher waits for it, and nobody else does. Nobody supervises a watcher: whatever fails, a
thread that cannot be started included, is logged and tried again.
"""

import asyncio
import contextlib
import errno
import itertools
import os
import re
from typing import Final, Protocol

import structlog
from asyncinotify import Event, Inotify, Mask

from fpga_plugin.host.file_identity import Version, inode_at, version_at
from fpga_plugin.host.keyed_threads import KeyedThreads, LateError
from fpga_plugin.host.ticks import next_tick
from fpga_plugin.host.trusted_files import lookups

log = structlog.get_logger()

RECHECK_SECONDS: Final = 60.0
"""Between two looks where inotify says nothing."""

ANSWER_SECONDS = 5.0
"""Seconds for a look, after which the target learns that its file system does not answer."""

_ABOVE = (Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.ATTRIB) | Mask.ONLYDIR
_INSIDE = _ABOVE | Mask.CLOSE_WRITE
_GONE = Mask.IGNORED | Mask.UNMOUNT

_MAX_EVENTS = 512
"""Events taken in one turn of the event loop, so that a storm of them does not hold it up."""
_MAX_ROUNDS = 16
"""How often watches are extended in a row; a change after that has an event of its own."""

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
"""What a path without a directory answers; the directories above it tell when there is one."""


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
        self._above: dict[str, set[str]] = {}
        self._inside: set[str] = set()

    def inside(self, directory: str, pattern: re.Pattern[str]) -> tuple[str, list[str]]:
        """Watch a directory, which need not exist.

        Args:
            directory: absolute.
            pattern: of the names that matter in it.

        Returns:
            The directory without links on its path, and the names in it that match, sorted.
        """
        self._on_the_way(directory)
        resolved = os.path.realpath(directory)
        self._inside.add(resolved)
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
        if os.path.islink(path):  # most are none, and then the directory is all there is to it
            self._on_the_way(path)
            self._inside.add(os.path.dirname(os.path.realpath(path)))
        before = self.versions.get(reported) or ()
        self.versions[reported] = before + (version_at(path) or (-1,))

    def directory(self, path: str, reported: str) -> None:
        """Report when a directory is another one, whatever happens in it."""
        self.versions[reported] = inode_at(path) or (-1,)

    def watch(self, inotify: Inotify) -> dict[int, set[str] | None]:
        """Watch all of that; returns the names that matter by watch descriptor, None for all.

        A directory that the kernel refuses to watch is left out, and `unwatched` says why.
        """
        watches: dict[int, set[str] | None] = {}
        # The last mask counts of a directory that has two paths, so those listed come last.
        wanted = [(path, names) for path, names in self._above.items() if path not in self._inside]
        for directory, names in [*wanted, *((path, None) for path in self._inside)]:
            try:
                watch = inotify.add_watch(directory, _INSIDE if names is None else _ABOVE)
            except OSError as error:
                # One above that may not be read is usual; one to be listed, `inside` has reported.
                if error.errno not in _ABSENT | {errno.EACCES}:
                    self.unwatched = error
                continue
            known = watches.setdefault(watch.wd, names)
            watches[watch.wd] = None if names is None or known is None else known | names
        return watches

    def _on_the_way(self, path: str) -> None:
        for directory, name in lookups(path):
            self._above.setdefault(directory, set()).add(name)


def hint_for(error: OSError) -> str:
    """What the operator can do about an error that `WatchTarget.unwatched` reports."""
    if error.errno in {errno.EMFILE, errno.ENOSPC}:
        return "raise fs.inotify.max_user_instances or fs.inotify.max_user_watches"
    return "check the directory's permissions and the file system that holds it"


class WatchTarget(Protocol):
    """What is watched, and what a change calls."""

    def look(self, look: Look) -> None:
        """Name the directories and files that matter now; called in a thread."""

    def changed(self, reported: str | None) -> None:
        """Something is another one now; called on the loop. It must not raise.

        Args:
            reported: what, as `look` named it; None: anything, because the first look succeeded
                only after `ready` had returned.
        """

    def unwatched(self, error: OSError) -> None:
        """Changes are noticed late for now, some or all; said once for each reason, on the loop.

        Args:
            error: why. A TimeoutError: the file system does not answer, and is watched when it
                does. Any other: the kernel refuses, and is asked again at the next look.
        """


class Watcher:
    """Watches one target."""

    def __init__(
        self,
        target: WatchTarget,
        *,
        name: str,
        recheck: float = RECHECK_SECONDS,
        retry: float | None = None,
        local: bool = False,
    ) -> None:
        """Watch nothing yet.

        Args:
            target: what is watched, and what a change calls.
            name: of the thread and the task.
            recheck: seconds between two looks where inotify says nothing.
            retry: the same while something could not be watched; None: `recheck`.
            local: the file system answers as long as the node lives: look on the loop, without a
                thread.
        """
        self._target = target
        self._name = name
        self._recheck = recheck
        self._retry = recheck if retry is None else retry
        self._threads: KeyedThreads[str] | None = (
            None if local else KeyedThreads(f"{name}-watch", most=1)
        )
        self._inotify: Inotify | None = None
        self._watches: dict[int, set[str] | None] = {}
        self._versions: dict[str, Version] | None = None
        self._ready = asyncio.Event()
        self._problem = ""
        self._closed = False
        self._looking = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tell the target of changes, on the running loop."""
        self._task = asyncio.create_task(self._run(), name=f"{self._name} watcher")

    async def ready(self) -> None:
        """Wait until changes are noticed, or the target has learned that they are not.

        What happened before that is not reported: look at the files after it.
        """
        await self._ready.wait()

    def close(self) -> None:
        """Stop; the target is not called after this. May be repeated."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while True:
                await self._once()
        finally:
            self._closed = True
            if not self._looking:
                self._drop()

    async def _once(self) -> None:
        try:
            self._compare(await self._look())
            await self._hear()
        except Exception as error:
            self._looking = False
            self._drop()
            self._ready.set()
            if repr(error) != self._problem:
                self._problem = repr(error)
                log.exception("watching files failed, and is tried again", watcher=self._name)
            await asyncio.sleep(self._retry)

    def _drop(self) -> None:
        """Close inotify; not while a thread looks, which may use it as long as it is held up."""
        inotify, self._inotify, self._watches = self._inotify, None, {}
        if inotify is not None:
            inotify.close()

    def _compare(self, look: Look) -> None:
        """Tell what differs from the look before."""
        before, now = self._versions, look.versions
        if look.unlisted is not None:  # what is in there is not known to be gone
            now = (before or {}) | now
        self._versions = now
        if before is not None:
            different = {name for name in before | now if before.get(name) != now.get(name)}
            for name in sorted(different):
                self._tell(name)
        elif self._ready.is_set():  # the task that waited for that has looked before us
            self._tell(None)
        if (refused := look.unwatched or look.unlisted) is None:
            self._problem = ""
            self._ready.set()
        else:
            self._refuse(refused)

    def _refuse(self, error: OSError) -> None:
        problem = error.strerror or str(error)  # not the path: each time it may be another one
        if problem != self._problem and not self._closed:
            self._problem = problem
            self._target.unwatched(error)
        self._ready.set()

    def _tell(self, reported: str | None) -> None:
        if not self._closed:  # `changed` may close us
            self._target.changed(reported)

    async def _hear(self) -> None:
        """Wait for an event that matters, or until it is time to look."""
        seconds = self._retry if self._problem else self._recheck
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(next_tick(seconds)):
                if self._inotify is None:
                    await asyncio.Event().wait()
                    return
                while True:
                    first = await self._inotify.get()
                    more = list(itertools.islice(self._inotify, _MAX_EVENTS - 1))
                    if any(self._matters(event) for event in (first, *more)):
                        return
                    await asyncio.sleep(0)

    def _matters(self, event: Event) -> bool:
        if Mask.Q_OVERFLOW in event.mask:
            return True
        if event.watch is None or event.watch.wd not in self._watches:
            return False  # of a watch that is not needed any more
        names = self._watches[event.watch.wd]
        return names is None or bool(event.mask & _GONE) or str(event.name) in names

    async def _look(self) -> Look:
        """Look, however long that takes; the target learns if it takes long."""
        if self._threads is None:
            return self._look_now()
        while True:
            self._looking = True
            try:
                return await self._threads.run(
                    self._name, self._look_in_thread, seconds=ANSWER_SECONDS
                )
            except LateError as error:
                self._refuse(TimeoutError(f"not looked into within {ANSWER_SECONDS:.0f} s"))
                await asyncio.wait(error.ended)

    def _look_in_thread(self) -> Look:
        try:
            return self._look_now()
        finally:
            self._looking = False
            if self._closed:
                self._drop()

    def _look_now(self) -> Look:
        """Look at what matters now, and watch it.

        What was read before its directory was watched may be out of date: read again until there
        is nothing new to watch.
        """
        look = Look()
        if self._inotify is None:
            try:
                self._inotify = Inotify(sync_timeout=0)  # 0: iterating does not wait
            except OSError as error:
                look.unwatched = error
        if (inotify := self._inotify) is None:
            self._target.look(look)
            return look
        for _ in range(_MAX_ROUNDS):
            look = Look()
            self._target.look(look)
            before, self._watches = self._watches, look.watch(inotify)
            if look.unlisted is not None:  # what is in there is not known to be gone
                self._watches = before | self._watches
            if self._watches.keys() <= before.keys():
                break
        for watch in inotify.watches:
            if watch.wd not in self._watches:
                with contextlib.suppress(OSError):  # its directory went, and the watch with it
                    inotify.rm_watch(watch)
        return look
