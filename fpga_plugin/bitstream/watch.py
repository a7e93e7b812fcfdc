"""Tells when the blank bitstream of an interface id appears, changes or goes.

A card without a blank bitstream is Unhealthy until the file is there; nobody should have to restart
the plugin for that, and nothing is polled. The file may appear with its directory, with the whole
store, or by a link somewhere on its path being switched (a ConfigMap switches `..data`).

So the watcher resolves each path as the kernel does, one name after the other, and watches every
directory in which a name was looked up. An event there that concerns such a name makes it resolve
everything again and compare. Inotify does not see what other machines do on a network file system,
nor a file system that is mounted over a watched directory.

Looking up names and adding watches is done on the event loop: both are short, and the store is a
local directory.
"""

import asyncio
import contextlib
import errno
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from asyncinotify import Event, Inotify, Mask

from fpga_plugin.bitstream.store import BLANK
from fpga_plugin.errors import BitstreamError
from fpga_plugin.ids import InterfaceId

_NAMES = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.ATTRIB
_CONTENTS = Mask.CLOSE_WRITE
_DIRECTORY = Mask.ONLYDIR | Mask.DONT_FOLLOW

_INTERFACE_DIRECTORY = re.compile(r"[0-9a-f]{32}", re.ASCII)
_MAX_LINKS = 40
"""Links in one path that the kernel follows (include/linux/namei.h, MAXSYMLINKS)."""
_MAX_EVENTS = 512
"""Events taken in one turn of the event loop, so that a storm of them does not hold it up."""
_MAX_ROUNDS = 16
"""How often watches are extended in a row; a change after that has an event of its own."""

_TRANSIENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES}
"""What a directory that just went, or that we may not read, answers to a watch."""

_Signature = tuple[int, ...] | None


@dataclass(slots=True)
class _Names:
    """Names in one directory that matter.

    Attributes:
        links: names on the way to a file.
        files: names of blank bitstreams, each with the interface ids that it serves.
        interfaces: every name that is an interface id matters: this is the root.
    """

    links: set[str] = field(default_factory=set)
    files: dict[str, set[InterfaceId]] = field(default_factory=dict)
    interfaces: bool = False

    def concern(self, name: str) -> bool:
        return (
            name in self.links
            or name in self.files
            or (self.interfaces and _INTERFACE_DIRECTORY.fullmatch(name) is not None)
        )

    def add(self, other: "_Names") -> None:
        self.links |= other.links
        for name, interface_ids in other.files.items():
            self.files.setdefault(name, set()).update(interface_ids)
        self.interfaces |= other.interfaces


class StoreWatcher:
    """Watches the blank bitstreams of a store; the store need not exist yet.

    Start it first and read the store then: what was there at the start is not reported.
    """

    def __init__(self, root: str, changed: Callable[[InterfaceId | None], None]) -> None:
        """Watch nothing yet.

        Args:
            root: of the store.
            changed: gets the interface id whose blank bitstream may have changed, or None when
                events were lost: then any may have. It must not raise.
        """
        self._root = os.path.abspath(root)
        self._changed = changed
        self._inotify: Inotify | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: dict[int, _Names] = {}
        self._signatures: dict[InterfaceId, _Signature] = {}

    def start(self) -> None:
        """Begin to call `changed` on the running loop.

        Raises:
            BitstreamError: the kernel gives no more inotify instances or watches.
        """
        loop = asyncio.get_running_loop()
        try:
            # A timeout of 0 makes iteration end where no event is left, instead of blocking.
            self._inotify = Inotify(sync_timeout=0)
            self._signatures = self._look(self._inotify)
        except OSError as error:
            self.close()
            raise BitstreamError(
                f"{self._root}: cannot be watched: {error.strerror}",
                hint="raise fs.inotify.max_user_instances or fs.inotify.max_user_watches",
            ) from error
        self._loop = loop
        loop.add_reader(self._inotify.fd, self._ready)

    def close(self) -> None:
        """Stop; no call comes after this."""
        inotify, self._inotify = self._inotify, None
        if inotify is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(inotify.fd)
        inotify.close()

    def _ready(self) -> None:
        """Take the events that there are, then look once."""
        if self._inotify is None or self._loop is None:
            return
        events = list(itertools.islice(self._inotify, _MAX_EVENTS))
        if len(events) == _MAX_EVENTS:
            # asyncinotify may hold some that it has read: the descriptor does not tell of those.
            self._loop.call_soon(self._ready)
        lost = stale = False
        written: set[InterfaceId] = set()
        for event in events:
            if Mask.Q_OVERFLOW in event.mask:
                lost = True
                continue
            names = self._watched.get(event.watch.wd) if event.watch is not None else None
            if names is None:
                continue  # of a watch that is not needed any more
            name = _name(event)
            if Mask.IGNORED in event.mask or Mask.UNMOUNT in event.mask or names.concern(name):
                stale = True
            if Mask.CLOSE_WRITE in event.mask:
                written |= names.files.get(name, set())
        if lost or stale:
            self._compare(self._inotify, lost=lost, written=written)

    def _compare(self, inotify: Inotify, *, lost: bool, written: set[InterfaceId]) -> None:
        before, self._signatures = self._signatures, self._look(inotify)
        if lost:
            self._changed(None)
            return
        different = {
            interface_id
            for interface_id in before.keys() | self._signatures.keys()
            if before.get(interface_id) != self._signatures.get(interface_id)
        }
        # A file rewritten within one tick of the file system's clock has the signature it had.
        for interface_id in sorted(different | written):
            if self._inotify is not None:  # `changed` may close us
                self._changed(interface_id)

    def _look(self, inotify: Inotify) -> dict[InterfaceId, _Signature]:
        """Watch what matters now; returns what the blank bitstreams are like.

        What was read before its directory was watched may be out of date: read again until there
        is nothing new to watch.
        """
        for _ in range(_MAX_ROUNDS):
            signatures, directories = _resolve_store(self._root)
            watched: dict[int, _Names] = {}
            for directory, names in directories.items():
                mask = _DIRECTORY | _NAMES | (_CONTENTS if names.files else Mask(0))
                try:
                    watch = inotify.add_watch(directory, mask)
                except OSError as error:
                    if error.errno not in _TRANSIENT:
                        raise
                    continue
                watched.setdefault(watch.wd, _Names()).add(names)
            news = watched.keys() - self._watched.keys()
            self._watched = watched
            if not news:
                break
        for watch in inotify.watches:
            if watch.wd not in self._watched:
                with contextlib.suppress(OSError):  # its directory went, and the watch with it
                    inotify.rm_watch(watch)
        return signatures


def _resolve_store(
    root: str,
) -> tuple[dict[InterfaceId, _Signature], dict[str, _Names]]:
    """All blank bitstreams, and the directories that decide what they are."""
    directories: dict[str, _Names] = {}
    signatures: dict[InterfaceId, _Signature] = {}

    def note(directory: str) -> _Names:
        return directories.setdefault(directory, _Names())

    for directory, name in _lookups(root):
        note(directory).links.add(name)
    resolved = os.path.realpath(root)
    try:
        names = os.listdir(resolved)
    except OSError:
        return signatures, directories
    note(resolved).interfaces = True
    for interface_id in map(InterfaceId, filter(_INTERFACE_DIRECTORY.fullmatch, names)):
        last: tuple[str, str] | None = None
        path = os.path.join(root, interface_id, f"{BLANK}.gbs")
        for directory, name in _lookups(path):
            note(directory).links.add(name)
            last = directory, name
        if last is not None:
            note(last[0]).files.setdefault(last[1], set()).add(interface_id)
        signatures[interface_id] = _signature(path)
    return signatures, directories


def _lookups(path: str) -> Iterator[tuple[str, str]]:
    """Every (directory, name) that the kernel looks up to resolve a path, links followed.

    Ends at the first name that is not there. The directories contain no links.
    """
    directory = "/"
    rest = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    links = 0
    while rest:
        name = rest.pop()
        if name == "..":
            directory = os.path.dirname(directory)
            continue
        yield directory, name
        found = os.path.join(directory, name)
        try:
            mode = os.lstat(found).st_mode
            target = os.readlink(found) if stat.S_ISLNK(mode) else None
        except OSError:
            return
        if target is None:
            directory = found
            continue
        links += 1
        if links > _MAX_LINKS:
            return
        if target.startswith("/"):
            directory = "/"
        rest.extend(part for part in reversed(target.split("/")) if part not in ("", "."))


def _signature(path: str) -> _Signature:
    """What differs when a file is another one or has other content; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (
        found.st_dev,
        found.st_ino,
        found.st_mode,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )


def _name(event: Event) -> str:
    return str(event.name) if event.name is not None else ""
