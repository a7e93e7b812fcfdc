"""The DRA driver, put together: kubelet's calls, its record, and its finding of the driver.

The driver's socket is `<kubelet root>/plugins/<driver>/dra.sock`; kubelet finds it through the one
in `plugins_registry`. Both have fixed names, and stay for the life of the process. A kubelet that
starts finds them by itself.
"""

import asyncio
import os
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

import structlog

from fpga_plugin.allocation.permission import Permission
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.reconcile.leftovers import DevicePluginLeftovers
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.cards.prepare import Preparer
from fpga_plugin.cards.targets import Targets
from fpga_plugin.dra.cdi import CdiFiles
from fpga_plugin.dra.claim import ClaimReader
from fpga_plugin.dra.claim_targets import ClaimTargets
from fpga_plugin.dra.desired import desired_slices
from fpga_plugin.dra.ends import ClaimEnds
from fpga_plugin.dra.evictions import Evictions
from fpga_plugin.dra.files import ClaimFiles
from fpga_plugin.dra.lifecycle import ClaimLifecycle
from fpga_plugin.dra.metadata import MetadataFiles
from fpga_plugin.dra.pool import Pool
from fpga_plugin.dra.reconcile import ClaimReconciler
from fpga_plugin.dra.servicer import VERSIONS, DraServicer
from fpga_plugin.dra.slices import SliceReconciler
from fpga_plugin.errors import SettingsError
from fpga_plugin.kubernetes.apiserver.nodecheck import NodeCheck, for_claims
from fpga_plugin.kubernetes.grpc.fixed_socket import (
    REGISTRY,
    FixedSocket,
    SocketError,
    check_length,
    registry_path,
)
from fpga_plugin.kubernetes.kubelet.registry import Info, RegistrySocket, Reoffer
from fpga_plugin.settings.settings import Advertise, Settings
from fpga_plugin.settings.values import NO_CDI_DEVICES

log = structlog.get_logger()


def socket_path(settings: Settings) -> str:
    """The path of the socket at which kubelet calls the driver."""
    return os.path.join(settings.kubelet_root, "plugins", settings.resource_prefix, "dra.sock")


def metadata_directory(settings: Settings) -> str:
    """The directory of the files that describe devices to their containers."""
    return os.path.join(os.path.dirname(socket_path(settings)), "metadata")


def check(settings: Settings) -> None:
    """Check that the settings suffice for DRA.

    Raises:
        SettingsError: they are not.
    """
    if settings.node_name is None:
        raise SettingsError(
            "NODE_NAME is not set: FPGA_PLUGIN_MODE=dra needs the node's name",
            hint="set it from the downward API (spec.nodeName)",
        )
    if len(settings.resource_prefix) > 63:  # noqa: PLR2004  # resource.k8s.io/v1, DriverNameMaxLength
        raise SettingsError(
            f"FPGA_PLUGIN_RESOURCE_PREFIX={settings.resource_prefix} is the driver's name, and has"
            " more than 63 characters"
        )
    if settings.advertise is Advertise.AF:
        raise SettingsError(
            "FPGA_PLUGIN_ADVERTISE=af is not served with FPGA_PLUGIN_MODE=dra",
            hint="advertise both, region or whole",
        )
    # That of the other socket is shorter.
    name = registry_path(settings.kubelet_root, settings.resource_prefix)
    check_length(name, "FPGA_PLUGIN_KUBELET_ROOT")


def make_directories(settings: Settings) -> None:
    """Make the driver's directories, before the process gives up the right to.

    Raises:
        SocketError: one cannot be made, or kubelet's root directory is another one.
    """
    root = settings.kubelet_root
    if not os.path.isdir(os.path.join(root, REGISTRY)):  # kubelet makes it before it runs any pod
        raise SocketError(
            f"'{root}' is not kubelet's root directory: it has no {REGISTRY}",
            hint="set FPGA_PLUGIN_KUBELET_ROOT to kubelet's --root-dir (/var/lib/kubelet, unless it"
            " was told otherwise), and mount it there",
        )
    metadata = metadata_directory(settings)
    for path in (os.path.dirname(metadata), metadata, settings.cdi_dir):
        try:
            os.makedirs(path, 0o755, exist_ok=True)
        except OSError as error:
            raise SocketError(
                f"directory '{path}' cannot be made: {error.strerror}",
                hint="mount the node's directory there as a hostPath, without readOnly",
            ) from error


def open_leftovers(
    settings: Settings, operations: CardOperations, queue: CardQueue
) -> ClaimReconciler:
    """The reconciler that ends DRA's claims once the device plugin API serves instead."""
    # The driver's directory, with what containers read, is not mounted.
    files = ClaimFiles(operations.ledger, CdiFiles(settings.cdi_dir, settings.resource_prefix))
    ends = ClaimEnds(operations.ledger, operations.blanks, queue, files)
    driver, root = settings.resource_prefix, settings.kubelet_root
    return ClaimReconciler(operations, queue, ends, files, root=root, driver=driver)


class DraDriver:
    """The DRA driver of the node.

    Args:
        settings: all of them.
        operations: what is done to cards.
        preparer: of regions.
        targets: loads bitstreams.
        queue: of cards.
        permission: the operator's policy.
        recorder: makes Events.
        leftovers: what pods have by the device plugin API.

    Attributes:
        registered: set while kubelet has the driver.
        problem: why kubelet does not have it; empty while nothing went wrong.
    """

    def __init__(  # noqa: PLR0917  # the same as of the device plugin API
        self,
        settings: Settings,
        operations: CardOperations,
        preparer: Preparer,
        targets: Targets,
        queue: CardQueue,
        permission: Permission,
        recorder: EventRecorder,
        leftovers: DevicePluginLeftovers,
    ) -> None:
        assert settings.node_name is not None, "checked before"
        self._settings = settings
        driver, root = settings.resource_prefix, settings.kubelet_root
        ledger = operations.ledger
        self.registered = asyncio.Event()
        self.problem = ""
        metadata = MetadataFiles(metadata_directory(settings), settings.node_name)
        cdi = CdiFiles(settings.cdi_dir, driver, metadata)
        files = self._files = ClaimFiles(ledger, cdi)
        ends = ClaimEnds(ledger, operations.blanks, queue, files)
        claims = ClaimReader(
            settings.kubeconfig, driver=driver, node=settings.node_name, named=recorder.named
        )
        wanted = partial(desired_slices, ledger, driver=driver, advertise=settings.advertise)
        pool = Pool(driver, settings.node_name)
        self.slices = SliceReconciler(settings.kubeconfig, pool, wanted, registered=self.registered)
        self.lifecycle = ClaimLifecycle(
            operations,
            preparer,
            targets,
            queue,
            claims=claims,
            claim_targets=ClaimTargets(ledger, targets, settings.kubeconfig),
            permission=permission,
            files=files,
            ends=ends,
            tell_scheduler=self.slices.caught_up,
            cdi_devices=settings.cdi_devices or NO_CDI_DEVICES,
        )
        self.reconciler = ClaimReconciler(
            operations,
            queue,
            ends,
            files,
            root=root,
            driver=driver,
            claims=claims,
            leftovers=leftovers,
        )
        ledger.subscribe(lambda _: self.slices.wake())
        self.node = NodeCheck(
            settings.kubeconfig, settings.node_name, judge=for_claims, warn=recorder.node_unsuited
        )
        servicer = DraServicer(
            self.lifecycle, ledger, settings.node_name, recorder, Evictions(ledger)
        )
        self._endpoint = FixedSocket(socket_path(settings), servicer)
        info = Info("DRAPlugin", driver, self._endpoint.path, VERSIONS)
        self._registry = RegistrySocket(registry_path(root, driver), info, self._told)
        self._reoffer = Reoffer(self._registry)

    async def start(self) -> None:
        """Serve; kubelet comes when it looks.

        Raises:
            FpgaPluginError: a socket or a file for the container runtime cannot be made.
        """
        await self._files.begin()
        await self._endpoint.start()
        await self._registry.start()

    def work(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """The tasks that run for as long as the plugin serves."""
        return {
            "registration": self._reoffer.run(),
            "claims": self.reconciler.run(),
            "files": self._files.run(),
            "slices": self.slices.run(),
            "node": self.node.run(),
        }

    def not_ready(self) -> list[str]:
        """Why kubelet is not served, or the slices are not published; empty: both are well."""
        found = []
        if not self.registered.is_set():
            root = self._settings.kubelet_root
            not_yet = (
                "not registered with kubelet yet (it looks into plugins_registry of its root"
                f" directory each second; FPGA_PLUGIN_KUBELET_ROOT is {root})"
            )
            found.append(f"driver: {self.problem or not_yet}")
        if not self.slices.published:
            found.append(f"ResourceSlices: {self.slices.problem or 'not published yet'}")
        if self.reconciler.problem:
            found.append(f"claims: {self.reconciler.problem}")
        return found

    def _told(self, problem: str) -> None:
        self.problem = f"kubelet refused the driver: {problem}" if problem else ""
        again = self._reoffer.told(problem)
        if problem:
            self.registered.clear()
            log.warning(
                "kubelet does not register the driver",
                reason=problem,
                retry_in=again,
                hint="no claim is prepared until it does; if it stays, kubelet's own log says more",
            )
            return
        log.info("driver registered with kubelet", driver=self._settings.resource_prefix)
        self.registered.set()
        self.reconciler.kubelet_seen()
        self.node.wake()

    async def stop(self) -> None:
        """End kubelet's calls; `close` waits for the work that runs."""
        await self._registry.stop()
        await self._endpoint.stop()
