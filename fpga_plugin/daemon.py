"""Wiring and supervision: one process a node.

Order of a start: settings, locks (another plugin may still be in a PR), journal, hardware, kubelet.
Order of an end: kubelet's calls, background work, locks. Nothing is wiped on the way out; a PR that
runs is waited for, since the kernel would not let the process die anyway.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import structlog

from fpga_plugin import __version__
from fpga_plugin.bitstream.index import StoreIndex
from fpga_plugin.bitstream.library import Library
from fpga_plugin.bitstream.reader import StoreReader
from fpga_plugin.build import (
    check_state_dir,
    is_guarded,
    open_hardware,
    open_policy,
    open_trust,
)
from fpga_plugin.claims.claims import ClaimService
from fpga_plugin.claims.owners import Owners
from fpga_plugin.claims.permission import Permission
from fpga_plugin.claims.prestart import PreStarts
from fpga_plugin.config.settings import Settings
from fpga_plugin.deviceplugin.link import KubeletLink
from fpga_plugin.deviceplugin.servicer import CallObserver
from fpga_plugin.errors import BackgroundFailedError
from fpga_plugin.hardware.backend import EventSource
from fpga_plugin.ids import CardId, InterfaceId
from fpga_plugin.ledger.journal import JOURNAL_FILE, Journal
from fpga_plugin.ledger.ledger import Ledger, card_of
from fpga_plugin.ledger.lists import DeviceLists
from fpga_plugin.operator.card_operations import operations as operator_actions
from fpga_plugin.operator.listeners import Listeners
from fpga_plugin.operator.survey import Operation, Parts, Survey
from fpga_plugin.pods.cgroup import PodCgroups
from fpga_plugin.pods.directory import PodDirectory
from fpga_plugin.pods.podresources import PodResourcesClient
from fpga_plugin.pods.recorder import EventRecorder
from fpga_plugin.process.confinement import confine
from fpga_plugin.process.locks import NodeLocks, acquire_locks
from fpga_plugin.regions.actions import CardActions
from fpga_plugin.regions.blanks import Blanks
from fpga_plugin.regions.inventory import Inventory
from fpga_plugin.regions.operations import CardOperations
from fpga_plugin.regions.prepare import Preparer
from fpga_plugin.regions.queue import CardQueue
from fpga_plugin.regions.reads import CardReads
from fpga_plugin.regions.recovery import Recovery
from fpga_plugin.regions.reports import Report
from fpga_plugin.regions.scrub import Scrubber
from fpga_plugin.regions.workers import CardWorkers
from fpga_plugin.stock.environment import StockEnvironment
from fpga_plugin.stock.missed_prestarts import MissedPreStarts
from fpga_plugin.stock.reconcile import Reconciler
from fpga_plugin.telemetry.kube_events import Events, Poster

if TYPE_CHECKING:
    from fpga_plugin.policy.file import PolicyFile

log = structlog.get_logger()

FOLD_SECONDS = 600.0
"""How often the journal's write-ahead log is folded in, if anything was written."""

KEEP_SECONDS = 30.0
"""How often an idle plugin looks whether its journal is still there."""


def _event_poster(settings: Settings) -> Poster:
    """What puts Events into the cluster."""
    from fpga_plugin.telemetry.event_poster import EventPoster  # lightkube: 10 MiB

    return EventPoster(settings.kubeconfig, instance=settings.node_name or "")


def _check(settings: Settings) -> None:
    """Say what is odd about the settings; look at the state directory before others lose it.

    Raises:
        FpgaPluginError: others may have written there.
    """
    for warning in settings.warnings:
        log.warning(warning)
    check_state_dir(settings)


def _open_journal(settings: Settings) -> Journal:
    """The journal, in a directory that can be relied on; says what was lost of it.

    Raises:
        FpgaPluginError: the directory or the journal cannot be used.
    """
    check_state_dir(settings)
    journal = Journal(os.path.join(settings.state_dir, JOURNAL_FILE))
    if journal.left_out:
        log.error(
            "rows of the journal make no sense and are left out",
            rows=journal.left_out[:10],
            count=len(journal.left_out),
            copy=journal.set_aside,
            hint="every region without an owner is scrubbed; kubelet's records name the owners",
        )
    elif journal.set_aside is not None:
        log.error(
            "journal unreadable: beginning a new one",
            reason=journal.reason,
            moved_to=journal.set_aside,
            hint="every region without an owner is scrubbed; kubelet's records name the owners",
        )
    return journal


def open_library(settings: Settings, boot_id: str) -> Library:
    """The store, verified."""
    return Library(
        settings.bitstream_dir,
        directory=os.path.join(settings.state_dir, "verified"),
        limit=settings.verified_size,
        boot_id=boot_id,
        trust=open_trust(settings, owner=True),
        guarded=is_guarded(settings),
    )


class Daemon:
    """The plugin of one node.

    Args:
        settings: all of them.
        on_call: is told of each of kubelet's calls and its outcome.
        on_report: is told of each scrub and preparation.
        confined: the process is the plugin's own: it takes from itself what the plugin does not
            need, once the hardware is open.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        on_call: CallObserver | None = None,
        on_report: Callable[[Report], None] | None = None,
        confined: bool = False,
    ) -> None:
        self.settings = settings
        self._confined = confined
        self._on_call = on_call
        self._on_report = on_report
        self.survey = Survey(settings)
        self._operations: dict[str, Operation] = {}
        self._status: Listeners | None = None
        self._locks: NodeLocks | None = None
        self._journal: Journal | None = None
        self._events: EventSource | None = None
        self._index: StoreIndex | None = None
        self._policy: PolicyFile | None = None
        self._reads = CardReads()
        self._tasks: list[asyncio.Task[None]] = []
        self.failed = False
        self.kubelet = KubeletLink(kubelet_dir=settings.kubelet_dir, on_call=self._called)

    async def start(self) -> None:
        """From nothing to serving kubelet.

        Raises:
            FpgaPluginError: it cannot start; nothing is left behind.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        settings = self.settings
        _check(settings)
        self._policy = open_policy(settings)
        self._status = Listeners(self.survey, self._operations)
        self._status.start()
        self.survey.phase = "waiting for another plugin on this node to end"
        self._locks = await acquire_locks(settings.state_dir, settings.kubelet_dir)
        self.survey.phase = "starting"
        self._status.locked()
        journal = self._journal = _open_journal(settings)
        hardware = open_hardware(settings, owner=True)
        # Events first: what changes during the scan is scanned again. Their large buffer takes a
        # capability, and libudev is found by running ldconfig. Then nothing more is opened that a
        # confined process may not open; and no thread was made yet, which would not be confined.
        self._events = hardware.events
        self._events.start(self._hardware_changed)
        if self._confined:
            self.survey.sandbox = confine(settings, rebinds=bool(journal.snapshot.rebinding))
        boot_id = await asyncio.to_thread(hardware.backend.boot_id)
        ledger = self.ledger = Ledger(
            prefix=settings.resource_prefix,
            journal=journal,
            snapshot=journal.snapshot,
            boot_id=boot_id,
            scrub=settings.scrub,
        )
        workers = self._workers = CardWorkers(self._locks.set_programming)
        pods = PodDirectory(
            kubelet_dir=settings.kubelet_dir,
            prefix=settings.resource_prefix,
            podresources=None
            if settings.podresources_socket is None
            else PodResourcesClient(settings.podresources_socket, settings.resource_prefix),
            pods_socket=settings.pods_socket,
            kubeconfig=settings.kubeconfig,
        )
        recorder = self._recorder = EventRecorder(
            Events(lambda: _event_poster(settings)) if settings.events else None,
            node_name=settings.node_name,
            pods=pods,
            refused=self.survey.refused,
        )
        library = await asyncio.to_thread(open_library, settings, boot_id)
        store = StoreReader(library)
        blanks = self.blanks = Blanks(store, settings.scrub)
        operations = CardOperations(
            ledger=ledger,
            backend=hardware.backend,
            blanks=blanks,
            workers=workers,
            cgroups=PodCgroups(
                settings.cgroup_root,
                os.path.join(os.path.dirname(settings.kubelet_dir), "pods"),
            ),
            report=self._report,
        )
        queue = self._queue = CardQueue(interval=settings.reconcile_interval)
        inventory = self.inventory = Inventory(
            ledger=ledger,
            backend=hardware.backend,
            blanks=blanks,
            workers=workers,
            selects=settings.cards.selects,
            queue=queue,
            debugged=operations.debugged,
            recorder=recorder,
            reads=self._reads,
            calm=settings.health_interval,
        )
        recovery = Recovery(
            settings.recovery,
            operations=operations,
            inventory=inventory,
            link=self.kubelet,
            queue=queue,
        )
        queue.start(Scrubber(operations, recovery, queue))
        self.card_actions = CardActions(operations, recovery, inventory, queue)
        owners = Owners(ledger, pods)
        envs = StockEnvironment(pods, cgroups=operations.cgroups)
        reconciler = Reconciler(
            settings,
            ledger=ledger,
            queue=queue,
            link=self.kubelet,
            pods=pods,
            owners=owners,
            envs=envs,
            missed=MissedPreStarts(
                ledger=ledger,
                pods=pods,
                kubelet_dir=settings.kubelet_dir,
                recorder=recorder,
            ),
        )
        prestarts = PreStarts(
            ledger=ledger,
            backend=hardware.backend,
            store=store,
            pods=pods,
            cgroups=operations.cgroups,
            envs=envs,
            preparer=Preparer(operations, recovery, self._reads),
            queue=queue,
            recorder=recorder,
            permission=Permission(self._policy, pods),
            reads=self._reads,
        )
        claims = self.claims = ClaimService(
            ledger=ledger,
            owners=owners,
            lists=DeviceLists(
                ledger,
                prefix=settings.resource_prefix,
                advertise=settings.advertise,
                scrub=settings.scrub,
            ),
            prestarts=prestarts,
            queue=queue,
        )
        index = self._index = StoreIndex(store, self._store_changed)
        await index.watch()
        await inventory.scan()
        self._say_what_is_missing()
        if ledger.rebinding:
            await recovery.resume()
        self.survey.parts = Parts(
            ledger=ledger,
            claims=claims,
            kubelet=self.kubelet,
            inventory=inventory,
            blanks=blanks,
            backend=hardware.backend,
            reconciler=reconciler,
            pods=pods,
            library=library,
            recovery=recovery,
        )
        self._operations.update(operator_actions(self.card_actions))
        await self.kubelet.start(claims, reconciler)
        if self._policy is not None:
            self._policy.start()
        self._tasks = [
            asyncio.create_task(self._supervised(reconciler.run()), name="reconcile"),
            asyncio.create_task(self._supervised(owners.run()), name="owners"),
            asyncio.create_task(self._supervised(index.run()), name="store"),
            asyncio.create_task(self._supervised(self._check_health()), name="health"),
            asyncio.create_task(self._supervised(self._fold(journal)), name="journal"),
        ]
        log.info(
            "serving",
            version=__version__,
            cards=len(ledger.cards),
            resources=claims.resources(),
            node=settings.node_name,
        )

    def _say_what_is_missing(self) -> None:
        """A slip in a setting looks like a node without cards."""
        wanted = self.settings.cards.only or frozenset()
        for card in sorted(wanted - self.ledger.cards.keys() - self.inventory.problems.keys()):
            log.warning(
                "a card that FPGA_PLUGIN_CARDS names is not there",
                card=card,
                hint="`fpga-plugin devices` lists those that are; it is served once it comes",
            )
        if not wanted and not self.ledger.cards and not self.inventory.problems:
            log.warning(
                "no FPGA cards on this node",
                hint="the kernel's dfl-pci driver has to be bound to them (lspci -k -d ::1200), and"
                f" the node's /sys mounted at {self.settings.sysfs_root}"
                " (FPGA_PLUGIN_SYSFS_ROOT); a card is served once it comes",
            )

    def _hardware_changed(self, card: CardId | None) -> None:
        if hasattr(self, "inventory"):  # else the first scan is still to come
            self.inventory.changed(card)

    def _report(self, report: Report) -> None:
        log.info(
            "region scrubbed" if report.scrubbed else "region prepared",
            region=report.region,
            steps={step.name: round(step.seconds, 6) for step in report.steps},
            notes=[step.note for step in report.steps if step.note],
            afu_id=report.afu_id,
            error=report.error or None,
            condition=str(self.ledger.record(report.region).condition),
            **report.concerned(),
        )
        self.survey.counters.report(report, card_of(report.region))
        if self._on_report is not None:
            self._on_report(report)

    def _called(self, *call: Any) -> None:
        self.survey.called(*call)
        if self._on_call is not None:
            self._on_call(*call)

    def _store_changed(self, interface_id: InterfaceId | None) -> None:
        self.blanks.forget(interface_id)
        for card in self.ledger.cards.values():
            if interface_id in {None, card.interface_id}:
                self.ledger.another_blank(card.id)
                self._queue.add(card.id)

    async def _check_health(self) -> None:
        """Signals that no event tells of."""
        while True:
            await asyncio.sleep(self.settings.health_interval)
            await self.inventory.check_all()

    async def _fold(self, journal: Journal) -> None:
        """Keep the journal's write-ahead log short, away from the calls."""
        while True:
            for _ in range(round(FOLD_SECONDS / KEEP_SECONDS)):
                await asyncio.sleep(KEEP_SECONDS)
                journal.keep()
            await asyncio.to_thread(journal.checkpoint)

    async def _supervised(self, work: Coroutine[Any, Any, None]) -> None:
        """A background task that fails ends the process: kubelet's DaemonSet starts it anew."""
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
        for watcher in (self._events, self._index, self._policy):
            if watcher is not None:
                watcher.close()
        await self.kubelet.stop()
        if hasattr(self, "_workers"):
            self._workers.close()
        if hasattr(self, "claims"):
            await self.claims.close()
            await self._queue.close()
            await self.inventory.close()
            await self._recorder.close()
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
    from fpga_plugin.operator.observe import observe  # only where it is asked for

    await observe(settings)
