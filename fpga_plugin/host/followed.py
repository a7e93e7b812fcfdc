"""A file of the operator's: read at the start, and again when it changes.

`host.watcher` reports a change, however the file is replaced. It does not see everything (a
network file system), so who can wait looks too, by one `stat` (`current`).

A version that cannot be read or is wrong changes nothing: the one before stays in force, and every
such version is an error in the log. A file that is gone is such a version: to do without one is a
matter of the settings, not of a deleted file; and so is one that others than root may write.
"""

import asyncio
import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fpga_plugin.errors import BitstreamError, FpgaPluginError
from fpga_plugin.host.file_identity import Version, version_at
from fpga_plugin.host.strict_yaml import MAX_BYTES
from fpga_plugin.host.trusted_files import open_trusted
from fpga_plugin.host.watcher import RECHECK_SECONDS, Look, Watcher

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FollowedKind(Generic[T]):
    """What a file is.

    Attributes:
        name: for people: `policy file`.
        setting: the variable that names it.
        parse: its bytes, and whether they are JSON, to what it says; raises `error`.
        error: what it raises where it is wrong or cannot be read; the message names the file.
        hint: what helps where it cannot be read.
    """

    name: str
    setting: str
    parse: Callable[[bytes, bool], T]
    error: type[FpgaPluginError]
    hint: str


def read_file(path: str, kind: FollowedKind[T], *, guarded: bool) -> tuple[T, Version]:
    """Read a file; JSON if its name ends so.

    Args:
        path: of the file.
        kind: what it is.
        guarded: refuse one that others than root and this process's user may write: its writer
            decides what other pods get.

    Raises:
        FpgaPluginError: it cannot be read, or is wrong (`FollowedKind.error`).
    """
    try:
        with open_trusted(path, inside=None, guarded=guarded, limit=MAX_BYTES) as opened:
            raw = opened.file.read(MAX_BYTES + 1)
    except OSError as error:
        raise kind.error(
            f"{kind.name} {path} cannot be read: {error.strerror}", hint=kind.hint
        ) from error
    except BitstreamError as error:
        raise kind.error(f"{kind.name} {error.message}", hint=error.hint) from error
    try:
        return kind.parse(raw, path.endswith(".json")), opened.version
    except kind.error as error:
        raise kind.error(f"{kind.name} {path}: {error.message}", hint=error.hint) from error


class FollowedFile(ABC, Generic[T]):
    """What a file says, as of its last good version.

    Args:
        path: of the file; absolute.
        kind: what it is.
        guarded: accept no version that others may write.
        otherwise: what is in force where the first version is wrong; None: that is an error.

    Attributes:
        path: of the file.
        problem: why the present file is not in force; empty: it is.

    Raises:
        FpgaPluginError: it cannot be read or is wrong (`FollowedKind.error`), and there is no
            `otherwise`.
    """

    def __init__(
        self, path: str, kind: FollowedKind[T], *, guarded: bool, otherwise: T | None = None
    ) -> None:
        self.path = path
        self.problem = ""
        self.content: T
        self._kind = kind
        self._guarded = guarded
        self._seen: Version | None
        self._reading = asyncio.Lock()
        self._watcher = Watcher(self, name=kind.name.partition(" ")[0])
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        before = version_at(path)
        try:
            self.content, self._seen = read_file(path, kind, guarded=guarded)
        except kind.error as error:
            if otherwise is None:
                raise
            self.content, self._seen, self.problem = otherwise, before, str(error)
            self.not_taken(error)
        else:
            self.in_force()

    @abstractmethod
    def in_force(self) -> None:
        """Say that the file's present version is in force."""

    @abstractmethod
    def not_taken(self, error: FpgaPluginError) -> None:
        """Say that a new version is wrong, and the one before stays in force."""

    @abstractmethod
    def not_followed(self) -> None:
        """Say that the handled exception keeps the file from being followed."""

    async def current(self) -> T:
        """Look, and take a new version into force if there is one."""
        if version_at(self.path) != self._seen:
            await self.reload()
        return self.content

    async def reload(self) -> None:
        """Read the file whatever it looks like."""
        async with self._reading:
            before = version_at(self.path)
            try:
                content, version = await asyncio.to_thread(
                    read_file, self.path, self._kind, guarded=self._guarded
                )
            except self._kind.error as error:
                known = before == self._seen and str(error) == self.problem
                # The version of before the read: if it has changed since, there is more to see.
                self._seen = before
                self.problem = str(error)
                if not known:
                    self.not_taken(error)
                return
            changed = content != self.content or bool(self.problem)
            self.content, self._seen, self.problem = content, version, ""
            if changed:
                self.in_force()

    # ---------------------------------------------------------------- changes

    def start(self) -> None:
        """Watch for changes on the running loop. Without inotify, those who ask still look."""
        self._watcher.start()
        self._task = asyncio.create_task(self._follow(), name=self._kind.name)

    def close(self) -> None:
        """Stop watching."""
        self._watcher.close()
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        """Read what changes. Nobody supervises this: what fails is logged and tried again."""
        await self._watcher.ready()
        problem = ""
        while True:
            try:
                await self.current()  # a change before the wait
                await self._changed.wait()
                self._changed.clear()
                # Whatever it looks like: rewritten within a tick of the clock, it looks as before.
                await self.reload()
                problem = ""
            except Exception as error:  # noqa: BLE001  # `not_followed` logs it with its traceback
                if repr(error) != problem:
                    problem = repr(error)
                    self.not_followed()
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RECHECK_SECONDS):
                        await self._changed.wait()
                self._changed.set()

    def look(self, look: Look) -> None:
        """What is watched (`host.watcher.WatchTarget`)."""
        directory, name = os.path.split(self.path)
        resolved, found = look.inside(directory, re.compile(re.escape(name)))
        for file in found:
            look.file(resolved, file, file)

    def changed(self, _reported: str | None) -> None:
        """The file may be another one (`host.watcher.WatchTarget`)."""
        self._changed.set()

    @abstractmethod
    def unwatched(self, error: OSError) -> None:
        """Say that changes are not noticed (`host.watcher.WatchTarget`)."""
