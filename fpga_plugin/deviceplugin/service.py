"""Kubelet's calls as steps in the life of an allocation.

Allocate, PostStop and Deallocate are ledger steps and return at once; what they set off runs in the
background (invariant 5). PreStart, which waits, has a module of its own (`prestart`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog
from grpclib.const import Status

from fpga_plugin.allocation.calls import AllocateAnswer
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.lists import DeviceLists
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.neighbours import NO_RINGS, Rings
from fpga_plugin.allocation.preferred import preferred
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.reconcile.owners import Owners
from fpga_plugin.allocation.release import release
from fpga_plugin.deviceplugin.prestart import PreStarts
from fpga_plugin.deviceplugin.reconcile import Reconciler
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import ResourceName
from fpga_plugin.settings.values import NO_CDI_DEVICES, CdiDevices

CallObserver = Callable[[str, ResourceName, Sequence[DeviceId], Status, str, float], None]
"""Called after every answered call but ListAndWatch, on the event loop; must not block.

Its arguments are the method, the resource, the call's valid ids, the status, what the operator
should know (empty when OK), and the seconds that it took."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlugin:
    """What serves kubelet by the device plugin API; with DRA there is none.

    Ids come as kubelet sent them, unchecked. Errors are `fpga_plugin.errors`; `servicer` turns them
    into gRPC statuses.

    Attributes:
        owners: finds the allocations' pods.
        lists: the devices to advertise.
        queue: where cards that may have to be scrubbed are added.
        prestarts: the call that waits.
        reconciler: what a stock kubelet does not say.
        on_call: sees the answers.
        cdi_devices: what the operator adds.
        rings: which cards lie beside each other.
    """

    ledger: Ledger
    owners: Owners
    lists: DeviceLists
    queue: CardQueue
    prestarts: PreStarts
    reconciler: Reconciler
    on_call: CallObserver
    cdi_devices: CdiDevices = NO_CDI_DEVICES
    rings: Rings = NO_RINGS

    def allocate(self, resource: ResourceName, ids: Sequence[str]) -> AllocateAnswer:
        """Grant devices to a container, journalled before it returns."""
        allocations = self.ledger.device_plugin.allocate(resource, ids)
        self.owners.answered(allocation.device for allocation in allocations)
        of = self.ledger.naming.named_resource(resource)
        grants = {region: grant for one in allocations for region, grant in one.grants.items()}
        return replace(AllocateAnswer.of(of, grants), cdi_devices=self.cdi_devices.of(of))

    def preferred(
        self,
        resource: ResourceName,
        available: Sequence[str],
        must_include: Sequence[str],
        size: int,
    ) -> list[str]:
        """Which of `available` to take; never raises for ids that it does not know."""
        listed = self.lists.devices(resource)
        return preferred(self.ledger, listed, available, must_include, size, rings=self.rings)

    def poststop(self, resource: ResourceName, ids: Sequence[str]) -> None:
        """A container that had these devices was removed. Work follows in the background."""
        allocations = self.ledger.allocations
        # Without an allocation it may be one that was still to come of an ended allocation.
        devices = [
            device
            for device in map(DeviceId, dict.fromkeys(ids))
            if device not in allocations or allocations[device].resource == resource
        ]
        for device in self.ledger.device_plugin.poststop_seen(devices):
            log.info(
                "all containers of an allocation stopped",
                device=device,
                resource=resource,
                pod=allocations[device].pod,
            )
            self.queue.add(card_of(device))

    def deallocate(self, resource: ResourceName, ids: Sequence[str]) -> None:
        """The allocation of these devices ended. Work follows in the background."""
        self.owners.answered(release(self.ledger, self.queue, resource, ids))
