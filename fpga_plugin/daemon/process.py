"""The process of the plugin: one a node.

Order of a start: settings, locks (another plugin may still be in a PR), journal, hardware, kubelet.
Order of an end: kubelet's calls, background work, locks. Nothing is wiped on the way out; a PR that
runs is waited for, since the kernel would not let the process die anyway.
"""

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import structlog

from fpga_plugin.allocation.journal.journal import JOURNAL_FILE, Journal
from fpga_plugin.allocation.journal.marker import MARKER_FILE, Marker, Served
from fpga_plugin.allocation.journal.records import Fact
from fpga_plugin.build import check_state_dir, log_settings, open_hardware, open_policy
from fpga_plugin.daemon.confinement import confine
from fpga_plugin.deviceplugin.link import KubeletLink
from fpga_plugin.errors import BackgroundFailedError
from fpga_plugin.hardware.backend import EventSource
from fpga_plugin.host.locks import LOCK_DIRECTORY, NodeLocks, acquire_locks
from fpga_plugin.host.ticks import tick
from fpga_plugin.ids import CardId
from fpga_plugin.observability.history_writer import HistoryWriter
from fpga_plugin.observability.listeners import Listeners
from fpga_plugin.observability.status_context import Observer, StatusContext
from fpga_plugin.plugin import (
    Plugin,
    check_link,
    open_ledger,
    open_library,
    open_node,
)
from fpga_plugin.settings.settings import Settings

if TYPE_CHECKING:
    from fpga_plugin.policy.file import PolicyFile

log = structlog.get_logger()

FOLD_SECONDS = 600.0
"""How often the journal's write-ahead log is folded in, if anything was written."""

FOLD_BYTES = 16 << 20
"""How long the log may be before it is folded in earlier: thousands of pods an hour on a thousand
regions write that much in three minutes."""

KEEP_SECONDS = 30.0
"""How often an idle plugin looks whether its journal is still there, and how long its log is."""


def _open_journal(settings: Settings, boot_id: str) -> Journal:
    """The journal, in a directory that can be relied on; says what was lost of it.

    Raises:
        FpgaPluginError: the directory or the journal cannot be used.
    """
    check_state_dir(settings)
    now = Served(settings.mode.value, settings.state_dir, boot=boot_id)
    marker = Marker(os.path.join(settings.kubelet_dir, LOCK_DIRECTORY, MARKER_FILE), now)
    journal = Journal(os.path.join(settings.state_dir, JOURNAL_FILE), marker)
    if journal.doubt:
        log.warning(
            "the journal is in doubt",
            reason=journal.doubt,
            rows=journal.left_out[:10],
            copy=journal.set_aside,
            hint="every region without an owner is scrubbed; kubelet's records name the owners",
        )
    return journal


class Daemon:
    """The plugin of one node.

    Args:
        settings: all of them.
        observer: sees each of kubelet's calls, and each scrub and preparation.
        confined: the process is the plugin's own: it takes from itself what the plugin does not
            need, once the hardware is open.
    """

    def __init__(
        self, settings: Settings, *, observer: Observer | None = None, confined: bool = False
    ) -> None:
        self.settings = settings
        self.context = StatusContext(settings, observer)
        self.failed = False
        self._confined = confined
        self._status: Listeners | None = None
        self._locks: NodeLocks | None = None
        self._journal: Journal | None = None
        self._events: EventSource | None = None
        self._policy: PolicyFile | None = None
        self._plugin: Plugin | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def served(self) -> list[str]:
        """The addresses on which metrics and page are served; empty: not yet, or nowhere."""
        return [] if self._status is None else self._status.served

    async def start(self) -> Plugin:
        """From nothing to serving kubelet.

        Raises:
            FpgaPluginError: it cannot start; nothing is left behind.
        """
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> Plugin:
        settings = self.settings
        log_settings(settings)
        check_link(settings)
        check_state_dir(settings)  # before others lose it
        self._policy = open_policy(settings)
        self._status = Listeners(self.context)
        self._status.start()
        self.context.phase = "waiting for another plugin on this node to end"
        self._locks = await acquire_locks(settings.state_dir, settings.kubelet_dir)
        self.context.phase = "starting"
        self._status.locked()
        hardware = open_hardware(settings, owner=True)
        boot_id = hardware.backend.boot_id()
        journal = self._journal = _open_journal(settings, boot_id)
        # Events first: what changes during the scan is scanned again. Their large buffer takes a
        # capability, and libudev is found by running ldconfig. Then nothing more is opened that a
        # confined process may not open; and no thread was made yet, which would not be confined.
        self._events = hardware.events
        self._events.start(self._hardware_changed)
        if self._confined:
            self.context.sandbox = confine(
                settings,
                rebinds=bool(journal.snapshot.rebinding),
                claims=bool(
                    journal.doubt
                    or journal.snapshot.claim_owners
                    or Fact.RESOURCE_CLAIMS in journal.snapshot.facts
                ),
                cdi_dirs={
                    os.path.dirname(one.file)
                    for one in journal.snapshot.claim_owners.values()
                    if one
                },
            )
        ledger = open_ledger(settings, journal, boot_id)
        node = open_node(
            settings,
            backend=hardware.backend,
            library=await asyncio.to_thread(open_library, settings),
            policy=self._policy,
            programming=self._locks.set_programming,
        )
        link = KubeletLink(kubelet_dir=settings.kubelet_dir)
        history_writer = self.context.history_writer = HistoryWriter(
            ledger, node.pods.known, journal
        )
        plugin = self._plugin = Plugin(settings, node, ledger, link, self.context)
        await plugin.start()
        self.context.plugin = plugin
        self._tasks = [
            asyncio.create_task(self._supervised(work), name=name)
            for name, work in {
                **plugin.work(),
                "journal": self._fold(journal),
                "history": history_writer.run(),
            }.items()
        ]
        return plugin

    def _hardware_changed(self, card: CardId | None) -> None:
        if self._plugin is not None:  # else the first scan is still to come
            self._plugin.inventory.changed(card)

    async def _fold(self, journal: Journal) -> None:
        """Keep the journal's write-ahead log short, away from the calls."""
        while True:
            for _ in range(round(FOLD_SECONDS / KEEP_SECONDS)):
                await tick(KEEP_SECONDS)
                journal.keep()
                if journal.log_bytes() > FOLD_BYTES:
                    break
            await asyncio.to_thread(journal.checkpoint)

    async def _supervised(self, work: Coroutine[Any, Any, None]) -> None:
        """A background task that fails ends the process: kubelet's DaemonSet starts it again."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a background task failed; ending")
            self.failed = True
            os.kill(os.getpid(), signal.SIGTERM)

    async def stop(self) -> None:
        """End; waits for a PR that runs, and for nothing else."""
        if self._status is not None:
            await self._status.close()
        await self._end_tasks()
        for watcher in (self._events, self._policy):
            if watcher is not None:
                watcher.close()
        if self._plugin is not None:
            await self._plugin.close()
        if self.context.history_writer is not None:
            self.context.history_writer.close()
        if self._journal is not None:
            self._journal.close()
        if self._locks is not None:
            self._locks.release()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def run(settings: Settings) -> None:
    """Run the plugin until SIGTERM or SIGINT.

    Raises:
        FpgaPluginError: it could not start, or ended by a defect of its own.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    starting = asyncio.create_task(_observe(settings) if settings.observe else _serve(settings))
    ending = asyncio.create_task(ended.wait())
    await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
    ending.cancel()
    try:
        daemon = await starting
    except asyncio.CancelledError:
        return
    if not ended.is_set():
        await ended.wait()
    if daemon is not None:
        await daemon.stop()
        if daemon.failed:
            raise BackgroundFailedError(
                "ended because a background task failed", hint="the log above says which and why"
            )


async def _serve(settings: Settings) -> Daemon:
    daemon = Daemon(settings, confined=True)
    await daemon.start()
    return daemon


async def _observe(settings: Settings) -> None:
    from fpga_plugin.observability.observe import observe  # only where it is asked for

    await observe(settings)
