"""The policy file: read at the start, and again when it changes.

`process.watcher` tells of a change, however the file is replaced. It does not see everything (a
network file system), so whoever asks for the policy looks too, by one `stat`.

A version that cannot be read or is wrong changes nothing: the one before stays in force, and every
such version is an error in the log. A file that is gone is such a version: to do without a policy
is a matter of the settings, not of a deleted file; and so is one that others than root may write.
"""

import asyncio
import contextlib
import os
import re

import structlog

from fpga_plugin.errors import BitstreamError
from fpga_plugin.policy.parse import MAX_BYTES, PolicyError, parse_policy
from fpga_plugin.policy.rules import Policy
from fpga_plugin.process.file_identity import Version, version_at
from fpga_plugin.process.trusted_files import open_trusted
from fpga_plugin.process.watcher import RETRY_SECONDS, Look, Watcher, hint_for

log = structlog.get_logger()


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
        with open_trusted(path, inside=None, guarded=guarded, limit=MAX_BYTES) as opened:
            raw = opened.file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PolicyError(
            f"policy file {path} cannot be read: {error.strerror}",
            hint="mount it, or leave FPGA_PLUGIN_POLICY_FILE empty to do without a policy",
        ) from error
    except BitstreamError as error:
        raise PolicyError(f"policy file {error.message}", hint=error.hint) from error
    try:
        return parse_policy(raw, as_json=path.endswith(".json")), opened.version
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
        self._watcher = Watcher(self, name="policy")
        self._changed = asyncio.Event()
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
                known = before == self._seen and str(error) == self.problem
                # The version of before the read: if it has changed since, there is more to see.
                self._seen = before
                self.problem = str(error)
                if known:
                    return
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
        self._watcher.start()
        self._task = asyncio.create_task(self._follow(), name="policy file")

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
            except Exception as error:
                if repr(error) != problem:
                    problem = repr(error)
                    log.exception("the policy file cannot be followed", file=self.path)
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS):
                        await self._changed.wait()
                self._changed.set()

    def look(self, look: Look) -> None:
        """What is watched (`process.watcher.Target`)."""
        directory, name = os.path.split(self.path)
        resolved, found = look.inside(directory, re.compile(re.escape(name)))
        for file in found:
            look.file(resolved, file, file)

    def changed(self, _reported: str | None) -> None:
        """The file may be another one (`process.watcher.Target`)."""
        self._changed.set()

    def unwatched(self, error: OSError) -> None:
        """Changes are not noticed (`process.watcher.Target`)."""
        log.warning(
            "the policy file is not watched: a change is seen at the next PreStart",
            file=self.path,
            error=str(error) if isinstance(error, TimeoutError) else error.strerror,
            hint=hint_for(error),
        )
