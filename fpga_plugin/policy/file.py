"""The policy file: read at the start, and again when it changes.

A ConfigMap's files are replaced by switching a link beside them, editors rename a new file over the
old one, so the directories of the path and of what it leads to are watched, and any event in them
means: look. Inotify does not see everything (a directory that is itself replaced, a network file
system), so whoever asks for the policy looks too, by one `stat`.

A version that cannot be read or is wrong changes nothing: the one before stays in force, and every
such version is an error in the log. A file that is gone is such a version: to do without a policy
is a matter of the settings, not of a deleted file; and so is one that others than root may write.
"""

import asyncio
import contextlib
import os
from typing import Final

import structlog
from asyncinotify import Inotify, Mask

from fpga_plugin.errors import BitstreamError
from fpga_plugin.policy.parse import MAX_BYTES, PolicyError, parse_policy
from fpga_plugin.policy.rules import Policy
from fpga_plugin.process.trusted_files import Version, opened, version_at

log = structlog.get_logger()

_EVENTS: Final = (
    Mask.CLOSE_WRITE | Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.ATTRIB
    | Mask.DELETE_SELF | Mask.MOVE_SELF
)  # fmt: skip


def read_policy(path: str, *, guarded: bool = False) -> Policy:
    """Read a policy file; JSON if its name ends so.

    Args:
        path: of the file.
        guarded: refuse one that others than root and this process's user may write: whoever writes
            the policy decides who may load what.

    Raises:
        PolicyError: it cannot be read, or is wrong; the message names it.
    """
    return _read(path, guarded=guarded)[0]


def _read(path: str, *, guarded: bool) -> tuple[Policy, Version]:
    try:
        with opened(path, inside=None, guarded=guarded, limit=MAX_BYTES) as original:
            raw = original.file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PolicyError(
            f"policy file {path} cannot be read: {error.strerror}",
            hint="mount it, or leave FPGA_PLUGIN_POLICY_FILE empty to do without a policy",
        ) from error
    except BitstreamError as error:
        raise PolicyError(f"policy file {error.message}", hint=error.hint) from error
    try:
        return parse_policy(raw, as_json=path.endswith(".json")), original.version
    except PolicyError as error:
        raise PolicyError(f"policy file {path}: {error.message}", hint=error.hint) from error


class PolicyFile:
    """The policy in force. Belongs to the event loop.

    Args:
        path: of the file; absolute.
        guarded: take no version that others may write.

    Attributes:
        path: of the file.
        problem: why the present file is not in force; empty: it is.
    """

    def __init__(self, path: str, *, guarded: bool) -> None:
        self.path = path
        self.problem = ""
        self._guarded = guarded
        self._policy: Policy
        self._seen: Version | None
        self._policy, self._seen = _read(path, guarded=guarded)
        self._reading = asyncio.Lock()
        self._inotify: Inotify | None = None
        self._task: asyncio.Task[None] | None = None
        self._say()

    @property
    def policy(self) -> Policy:
        """What is in force now, as far as was looked."""
        return self._policy

    async def current(self) -> Policy:
        """Look, and take a new version into force if there is one."""
        if version_at(self.path) != self._seen:
            await self.reload()
        return self._policy

    async def reload(self) -> None:
        """Read the file whatever it looks like."""
        async with self._reading:
            before = version_at(self.path)
            try:
                policy, version = await asyncio.to_thread(_read, self.path, guarded=self._guarded)
            except PolicyError as error:
                # The version of before the read: if it has changed since, there is more to see.
                self._seen = before
                self.problem = str(error)
                log.error(  # noqa: TRY400  # the message says it all, a traceback nothing
                    "the new policy is not taken; the one before stays in force",
                    file=self.path,
                    error=error.message,
                    hint=error.hint,
                    rules=len(self._policy.rules),
                )
                return
            changed = policy != self._policy or bool(self.problem)
            self._policy, self._seen, self.problem = policy, version, ""
            if changed:
                self._say()

    def _say(self) -> None:
        log.info(
            "policy in force",
            file=self.path,
            rules=len(self._policy.rules),
            default=self._policy.default.value,
        )

    # ---------------------------------------------------------------- changes

    def start(self) -> None:
        """Watch for changes on the running loop. Without inotify, those who ask still look."""
        try:
            self._inotify = Inotify(sync_timeout=0)
            self._watch(self._inotify)
        except OSError as error:
            self.close()
            log.warning(
                "the policy file is not watched: a change is seen at the next PreStart",
                file=self.path,
                error=error.strerror,
                hint="raise fs.inotify.max_user_instances or fs.inotify.max_user_watches",
            )
            return
        asyncio.get_running_loop().add_reader(self._inotify.fd, self._ready)

    def close(self) -> None:
        """Stop watching."""
        inotify, self._inotify = self._inotify, None
        if inotify is not None:
            with contextlib.suppress(RuntimeError):  # the loop never ran
                asyncio.get_running_loop().remove_reader(inotify.fd)
            inotify.close()
        if self._task is not None:
            self._task.cancel()

    def _watch(self, inotify: Inotify) -> None:
        """The directory that names the file, and the one that the file is in.

        Raises:
            OSError: there are no more watches.
        """
        wanted = {os.path.dirname(self.path), os.path.dirname(os.path.realpath(self.path))}
        survey = set()
        for directory in wanted:
            # Of a directory that is watched already, the kernel changes nothing.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                survey.add(inotify.add_watch(directory, _EVENTS | Mask.ONLYDIR).wd)
        for watch in inotify.watches:
            if watch.wd not in survey:
                with contextlib.suppress(OSError):  # it went with its directory
                    inotify.rm_watch(watch)

    def _ready(self) -> None:
        if self._inotify is None:
            return
        names = {os.path.basename(self.path), os.path.basename(os.path.realpath(self.path))}
        for event in self._inotify:
            if Mask.CLOSE_WRITE in event.mask and str(event.name) in names:
                # Rewritten within one tick of the clock, a file may look like the one before.
                self._seen = None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="policy file")

    async def _look(self) -> None:
        try:
            if self._inotify is not None:
                self._watch(self._inotify)
        except OSError as error:
            log.warning("the policy file's directory is not watched", error=error.strerror)
        while version_at(self.path) != self._seen:
            await self.reload()
