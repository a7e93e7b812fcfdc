"""The object graph: everything between kubelet and the cards, made and joined in one place.

Things are made in the order in which they use each other: each gets those that it calls, and none
calls those that were made after it. The queue of cards, the ledger's listeners and the
observer report upwards what happens below. Tests make a `Plugin` too, on doubles of `NodeParts`.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from fpga_plugin import __version__
from fpga_plugin.allocation.journal.journal import Journal
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.lists import DeviceLists
from fpga_plugin.allocation.neighbours import NO_RINGS
from fpga_plugin.allocation.permission import Permission
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.reconcile.leftovers import DevicePluginLeftovers
from fpga_plugin.allocation.reconcile.owners import Owners
from fpga_plugin.allocation.recorder import EventRecorder, PodObserver
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.bitstreams.index import StoreIndex
from fpga_plugin.bitstreams.library import Library
from fpga_plugin.bitstreams.reader import StoreReader
from fpga_plugin.build import exposure, is_guarded, names_interfaces, names_shells, open_trust
from fpga_plugin.cards.actions import CardActions
from fpga_plugin.cards.blanks import Blanks
from fpga_plugin.cards.byhand import HandProgrammer
from fpga_plugin.cards.debugging import Allowed, Debugging
from fpga_plugin.cards.interface_names import InterfaceNames
from fpga_plugin.cards.inventory import Inventory
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.cards.prepare import Preparer
from fpga_plugin.cards.reads import CardReads
from fpga_plugin.cards.recovery import Recovery
from fpga_plugin.cards.reports import ReportObserver
from fpga_plugin.cards.scrub import Scrubber
from fpga_plugin.cards.targets import Targets
from fpga_plugin.cards.workers import CardWorkers
from fpga_plugin.deviceplugin.environment import StockEnvironment
from fpga_plugin.deviceplugin.link import KubeletLink
from fpga_plugin.deviceplugin.missed_prestarts import MissedPreStarts
from fpga_plugin.deviceplugin.prestart import PreStarts
from fpga_plugin.deviceplugin.reconcile import Reconciler
from fpga_plugin.deviceplugin.service import CallObserver, DevicePlugin
from fpga_plugin.hardware.backend import Backend
from fpga_plugin.ids import RegionId, ours
from fpga_plugin.kubernetes.apiserver.nodecheck import CDI_NOT_KNOWN, NodeCheck, for_cdi_devices
from fpga_plugin.kubernetes.cgroup import PodCgroups
from fpga_plugin.kubernetes.events.broadcaster import EventBroadcaster, EventSink
from fpga_plugin.kubernetes.kubelet.podresources import PodResourcesClient
from fpga_plugin.settings.settings import Advertise, ServedApi, Settings
from fpga_plugin.settings.values import NO_CDI_DEVICES

if TYPE_CHECKING:
    from fpga_plugin.dra.driver import DraDriver
    from fpga_plugin.dra.poolcheck import PoolCheck
    from fpga_plugin.dra.reconcile import ClaimReconciler
    from fpga_plugin.policy.file import PolicyFile  # imports YAML: only where there is a policy

log = structlog.get_logger()

RESUME_SECONDS: Final = 5.0
"""How long the start waits for cards that an earlier run left without driver or in a reset."""

KEPT_LOOKS: Final = 3
"""Intervals between two looks at PodResources for which the connection is kept."""


class PluginObserver(ReportObserver, PodObserver, Protocol):
    """Watches what the plugin does, and decides nothing. Must not raise."""

    @property
    def called(self) -> CallObserver:
        """Kubelet was answered."""


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What the plugin stands on.

    Attributes:
        backend: the cards.
        store: bitstreams.
        pods: who holds what, as kubelet and the cluster tell.
        cgroups: whose processes run.
        workers: locks and threads of cards that are worked on.
        reads: threads in which cards are read.
        policy: who may load what; None: everybody everything.
    """

    backend: Backend
    store: StoreReader
    pods: PodDirectory
    cgroups: PodCgroups
    workers: CardWorkers
    reads: CardReads = field(default_factory=CardReads)
    policy: "PolicyFile | None" = None


def open_ledger(settings: Settings, journal: Journal, boot_id: str) -> Ledger:
    """What the journal knew, in this boot.

    Raises:
        JournalError: what this boot makes of it cannot be written down.
    """
    return Ledger(
        prefix=settings.resource_prefix,
        prefixes=settings.prefixes,
        journal=journal,
        snapshot=journal.snapshot,
        boot_id=boot_id,
        scrub=settings.scrub,
        exposure=exposure(settings),
        functions=settings.advertise is Advertise.AF,
        aliases=names_interfaces(settings),
        shells=names_shells(settings),
        dra=settings.mode is ServedApi.DRA,
    )


def open_library(settings: Settings) -> Library:
    """The store, verified."""
    return Library(
        settings.bitstream_dir,
        directory=os.path.join(settings.state_dir, "verified"),
        limit=settings.verified_size,
        trust=open_trust(settings, owner=True),
        guarded=is_guarded(settings),
    )


def open_node(
    settings: Settings,
    *,
    backend: Backend,
    library: Library,
    policy: "PolicyFile | None",
    programming: Callable[[frozenset[RegionId]], None],
) -> NodeParts:
    """The node that the settings describe.

    `programming` is called with the regions whose work in flight would outlast the process's
    death.
    """
    podresources = None
    if settings.podresources_socket is not None:
        podresources = PodResourcesClient(
            settings.podresources_socket,
            ours(settings.resource_prefix),
            idle_seconds=KEPT_LOOKS * settings.reconcile_interval,
        )
    return NodeParts(
        backend=backend,
        store=StoreReader(library),
        pods=PodDirectory(
            kubelet_dir=settings.kubelet_dir,
            prefix=settings.resource_prefix,
            podresources=podresources,
            pods_socket=settings.pods_socket,
            kubeconfig=settings.kubeconfig,
        ),
        cgroups=PodCgroups(settings.cgroup_root, os.path.join(settings.kubelet_root, "pods")),
        workers=CardWorkers(programming),
        policy=policy,
    )


def check_link(settings: Settings) -> None:
    """Whether kubelet can dial the plugin's sockets by their paths.

    Raises:
        SettingsError: a path would be too long (kubelet.sock's own neighbours are dialled by
            names), or a setting that DRA needs is missing.
        FpgaPluginError: a directory that DRA writes into cannot be made.
    """
    if settings.mode is ServedApi.DRA:
        from fpga_plugin.dra.driver import (  # only where DRA serves
            check,
            make_directories,
        )

        check(settings)
        make_directories(settings)


def _event_sink(settings: Settings) -> EventSink:
    """What puts Events into the cluster."""
    from fpga_plugin.kubernetes.events.sink import ApiServerSink  # only where Events are wanted

    return ApiServerSink(settings.kubeconfig, instance=settings.node_name or "")


def _device_plugin(  # noqa: PLR0917  # as `Plugin` made them
    settings: Settings,
    node: NodeParts,
    ledger: Ledger,
    link: KubeletLink,
    queue: CardQueue,
    prestarts: PreStarts,
    owners: Owners,
    envs: StockEnvironment,
    recorder: EventRecorder,
    observer: PluginObserver,
) -> DevicePlugin:
    reconciler = Reconciler(
        ledger=ledger,
        queue=queue,
        link=link,
        pods=node.pods,
        owners=owners,
        envs=envs,
        missed=MissedPreStarts(
            ledger=ledger, pods=node.pods, kubelet_dir=settings.kubelet_dir, recorder=recorder
        ),
        pods_socket=settings.pods_socket,
    )
    return DevicePlugin(
        ledger=ledger,
        owners=owners,
        lists=DeviceLists(ledger, advertise=settings.advertise),
        queue=queue,
        prestarts=prestarts,
        reconciler=reconciler,
        on_call=observer.called,
        cdi_devices=settings.cdi_devices or NO_CDI_DEVICES,
        rings=settings.neighbours or NO_RINGS,
    )


class Plugin:
    """The plugin of one node, from the link to kubelet down to the cards.

    Args:
        settings: all of them.
        node: what it stands on.
        ledger: who has what; open.
        link: to kubelet; not started.
        observer: sees calls, refusals, scrubs and preparations.
    """

    def __init__(
        self,
        settings: Settings,
        node: NodeParts,
        ledger: Ledger,
        link: KubeletLink,
        observer: PluginObserver,
    ) -> None:
        self.settings, self.node, self.ledger, self.link = settings, node, ledger, link
        # What everybody uses.
        queue = self.queue = CardQueue(interval=settings.reconcile_interval)
        recorder = self.recorder = EventRecorder(
            EventBroadcaster(lambda: _event_sink(settings)) if settings.events else None,
            node_name=settings.node_name,
            pods=node.pods,
            observer=observer,
        )
        # Work on cards.
        self.blanks = Blanks(node.store, settings.scrub)
        operations = self.operations = CardOperations(
            ledger=ledger,
            backend=node.backend,
            blanks=self.blanks,
            workers=node.workers,
            cgroups=node.cgroups,
            observer=observer,
        )
        inventory = self.inventory = Inventory(
            operations,
            queue,
            recorder=recorder,
            reads=node.reads,
            cards=settings.cards,
            interval=settings.health_interval,
        )
        recovery = self.recovery = Recovery(
            settings.recovery, operations=operations, inventory=inventory, link=link, queue=queue
        )
        self.actions = CardActions(operations, recovery, inventory)
        self.by_hand = HandProgrammer(operations, node.store)
        self.scrubber = Scrubber(operations, recovery, inventory, queue)
        queue.start(self.scrubber)
        # Kubelet's calls.
        owners = Owners(ledger, node.cgroups, node.pods)
        preparer = Preparer(operations, recovery, node.reads)
        self.debugging = Debugging(
            operations,
            node.pods,
            recorder,
            queue,
            allowed=Allowed.by(settings),
            interval=settings.reconcile_interval,
        )
        targets = Targets(
            operations,
            node.store,
            node.reads,
            recorder=recorder,
            unknown=settings.unknown_variables,
        )
        permission = Permission(node.policy, node.pods)
        self.dra: DraDriver | None = None
        self.pool: PoolCheck | None = None
        if settings.mode is ServedApi.DRA:
            # Only where DRA serves: the device plugin API needs none of it.
            from fpga_plugin.dra import driver, poolcheck
            from fpga_plugin.dra.pool import Pool

            self.dra = driver.DraDriver(
                settings,
                operations,
                preparer,
                targets,
                queue,
                permission,
                recorder,
                DevicePluginLeftovers(ledger, node.cgroups, owners, node.pods, queue),
            )
            assert settings.node_name is not None, "checked before"
            pool = Pool(settings.resource_prefix, settings.node_name)
            self.pool = poolcheck.PoolCheck(settings.kubeconfig, pool, warn=recorder.foreign_slices)
        self.device_plugin: DevicePlugin | None = None
        if self.dra is None:
            envs = StockEnvironment(node.pods, cgroups=node.cgroups)
            prestarts = PreStarts(
                operations,
                preparer,
                targets,
                pods=node.pods,
                envs=envs,
                permission=permission,
                recorder=recorder,
                debugging=self.debugging,
            )
            self.device_plugin = _device_plugin(
                settings, node, ledger, link, queue, prestarts, owners, envs, recorder, observer
            )
        self.leftovers: ClaimReconciler | None = None
        if self.dra is None and (ledger.claim_owners or ledger.resource_claims_unknown):
            from fpga_plugin.dra.driver import open_leftovers  # only where DRA served before

            self.leftovers = open_leftovers(settings, operations, queue)
        self._runtime: NodeCheck | None = None
        if settings.cdi_devices is not None and self.dra is None:
            self._runtime = NodeCheck(
                settings.kubeconfig,
                settings.node_name,
                judge=for_cdi_devices,
                warn=recorder.node_unsuited,
                not_known=CDI_NOT_KNOWN,
            )
            self._runtime.wake()
        self._index: StoreIndex | None = None
        self._resuming: asyncio.Task[None] | None = None
        self._names = InterfaceNames(ledger, node.store) if names_interfaces(settings) else None

    async def start(self) -> None:
        """Learn what is there, and let kubelet call; returns before kubelet has heard of it.

        Raises:
            FpgaPluginError: the cards cannot be read, or what was found cannot be written down.
        """
        self._index = StoreIndex(self.node.store, self.scrubber.blank_changed)
        await self._index.watch()
        self.debugging.start()
        if self._names is not None:
            await self._names.look()  # before any device is listed under its id
        await self.inventory.scan()
        self.inventory.say_what_is_missing(self.settings.sysfs_root)
        # A card that does not come back holds up no other, nor kubelet's calls.
        self._resuming = asyncio.create_task(self.recovery.resume(), name="resume")
        done, _ = await asyncio.wait({self._resuming}, timeout=RESUME_SECONDS)
        for resumed in done:
            resumed.result()
        if (api := self.device_plugin) is not None:
            await self.link.start(api)
        elif self.dra is not None:
            await self.dra.start()
        if self.node.policy is not None:
            self.node.policy.start()
        log.info(
            "serving",
            version=__version__,
            cards=len(self.ledger.cards),
            resources=() if api is None else api.lists.resources(),
            node=self.settings.node_name,
        )

    def work(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """What is to be done for as long as the plugin serves, by name; once started."""
        assert self._index is not None, "made by `start`"
        api = self.device_plugin
        of_api = {} if api is None else {**self._of_device_plugin(api)}
        of_api |= {} if self.dra is None else self.dra.work()
        of_api |= {**self.debugging.work(), "resume": self._resumed()}
        if self.pool is not None:
            of_api = {**of_api, "pool": self.pool.run()}
        names = {} if self._names is None else {"names": self._names.run()}
        return {**of_api, **names, "store": self._index.run(), "health": self.inventory.run()}

    async def _resumed(self) -> None:
        """An error of what the start did not wait for is one of the plugin's own."""
        assert self._resuming is not None, "made by `start`"
        await self._resuming

    @property
    def records_problem(self) -> str:
        """Why kubelet's records cannot be read; empty while they can."""
        if self.dra is not None:
            return self.dra.reconciler.problem
        return "" if self.device_plugin is None else self.device_plugin.reconciler.problem

    def notes(self) -> list[str]:
        """What may keep pods from what they should get, although kubelet is served."""
        found = [] if self.dra is None else [*self.dra.node.concerns]
        if self._runtime is not None:
            found += self._runtime.concerns
        return [*found, self.pool.problem] if self.pool and self.pool.problem else found

    def _of_device_plugin(self, api: DevicePlugin) -> Mapping[str, Coroutine[Any, Any, None]]:
        watch = api.reconciler.watch
        return {
            **({} if watch is None else {"pods": watch.run()}),
            **({} if self._runtime is None else {"runtime": self._runtime.run()}),
            "reconcile": api.reconciler.run(),
            "owners": api.owners.run(),
            **({} if self.leftovers is None else {"claims": self.leftovers.run()}),
        }

    async def close(self) -> None:
        """End kubelet's calls, then the work; a PR that runs is waited for, and nothing else."""
        if self._index is not None:
            self._index.close()
        await self.link.stop()
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.wait({self._resuming})
        if self.dra is not None:
            await self.dra.stop()
        self.node.workers.close()
        if self.dra is not None:
            await self.dra.lifecycle.close()
        if self.device_plugin is not None:
            await self.device_plugin.prestarts.close()
        if self.node.pods.podresources is not None:
            self.node.pods.podresources.close()
        await self.queue.close()
        await self.by_hand.close()
        await self.inventory.close()
        await self.recorder.close()
