"""Blank bitstreams, by interface id: what deprograms a region.

A blank that is missing, unusable or not trusted is a state of its interface id, reported once and
taken up again when the store changes. Cards that are scrubbed at the same time share one copy in
memory: an image may have tens of MiB, and at the first start on a node all its cards are scrubbed.
"""

import asyncio
import os
import threading
import weakref

import structlog

from fpga_plugin.bitstream.store import Bitstream, Store
from fpga_plugin.config import ScrubPolicy
from fpga_plugin.errors import BitstreamError, NotFinishedError, NotPermittedError, RefusedError
from fpga_plugin.ids import AfuId, InterfaceId

log = structlog.get_logger()

NO_BLANK = "no-blank-image"
"""The reason under which a region without a blank bitstream is kept back."""


class Blanks:
    """The store's blank bitstreams under the scrub policy."""

    def __init__(self, store: Store, policy: ScrubPolicy) -> None:
        self._store = store
        self._policy = policy
        self._afus: dict[InterfaceId, AfuId | None] = {}
        self._problems: dict[InterfaceId, str] = {}
        self._changes = 0
        self._reading = threading.Lock()  # taken in threads only
        self._in_use: dict[InterfaceId, tuple[tuple[int, ...], weakref.ref[Bitstream]]] = {}

    async def load(self, interface_id: InterfaceId) -> Bitstream | None:
        """The blank bitstream; None only under best-effort.

        Raises:
            RefusedError: none can be used, and scrubbing is required.
        """
        problem = ""
        blank: Bitstream | None = None
        try:
            blank = await asyncio.to_thread(self._read, interface_id)
        except (BitstreamError, NotPermittedError, NotFinishedError) as error:
            problem = str(error)
        if blank is None and not problem:
            problem = f"no blank bitstream at {self._store.blank_path(interface_id)}"
        self._afus[interface_id] = None if blank is None else blank.afu_id
        if problem != self._problems.get(interface_id, ""):
            self._report(interface_id, problem)
        if blank is None and self._policy is ScrubPolicy.REQUIRED:
            raise RefusedError(
                f"{NO_BLANK}: {problem}",
                hint="install the card vendor's blank bitstream there, or set"
                " FPGA_PLUGIN_SCRUB=best-effort to do without",
            )
        return blank

    def _read(self, interface_id: InterfaceId) -> Bitstream | None:
        """Read the file, unless what somebody has in use is of the same file."""
        with self._reading:
            version = self._version(interface_id)
            known, in_use = self._in_use.get(interface_id, (None, None))
            if in_use is not None and known == version and (blank := in_use()) is not None:
                return blank
            blank = self._store.blank(interface_id)
            if blank is not None:
                self._in_use[interface_id] = version, weakref.ref(blank)
            return blank

    def _version(self, interface_id: InterfaceId) -> tuple[int, ...]:
        """What differs when the file is another one, or the watch reported a change of it."""
        try:
            found = os.stat(self._store.blank_path(interface_id))
        except OSError:
            return (self._changes,)
        times = found.st_mtime_ns, found.st_ctime_ns
        return self._changes, found.st_dev, found.st_ino, found.st_size, *times

    def _report(self, interface_id: InterfaceId, problem: str) -> None:
        if problem:
            self._problems[interface_id] = problem
            log.warning(
                "blank bitstream missing",
                interface_id=interface_id,
                reason=problem,
                policy=self._policy.value,
                hint=f"expected at {self._store.blank_path(interface_id)};"
                " FPGA_PLUGIN_SCRUB=best-effort does without",
            )
        else:
            self._problems.pop(interface_id, None)
            log.info("blank bitstream found", interface_id=interface_id)

    async def afu_id(self, interface_id: InterfaceId) -> AfuId | None:
        """AFU id of the blank bitstream; None where there is none to use."""
        if interface_id not in self._afus:
            try:
                await self.load(interface_id)
            except RefusedError:
                return None
        return self._afus[interface_id]

    def problem(self, interface_id: InterfaceId) -> str:
        """Why there is no blank bitstream, as far as it was looked for; else empty."""
        return self._problems.get(interface_id, "")

    def forget(self, interface_id: InterfaceId | None) -> None:
        """The store changed: look again next time; None: everywhere."""
        self._changes += 1
        if interface_id is None:
            self._afus.clear()
        else:
            self._afus.pop(interface_id, None)
