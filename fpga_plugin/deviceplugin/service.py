"""Kubelet's calls as steps in the life of an allocation.

Allocate, PostStop and Deallocate are ledger steps and return at once; what they set off runs in the
background (invariant 5). PreStart, which waits, has a module of its own (`prestart`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from fpga_plugin.allocation.calls import AllocateAnswer, Caller
from fpga_plugin.allocation.devices import AdvertisedDevice
from fpga_plugin.allocation.ledger import Ledger, card_of
from fpga_plugin.allocation.lists import DeviceLists
from fpga_plugin.allocation.neighbours import NO_RINGS, Rings
from fpga_plugin.allocation.preferred import preferred
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.reconcile.owners import Owners
from fpga_plugin.allocation.release import release
from fpga_plugin.deviceplugin.prestart import PreStarts
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import ResourceName
from fpga_plugin.settings.values import NO_CDI_DEVICES, CdiDevices

log = structlog.get_logger()


class DevicePluginService:
    """Ids come as kubelet sent them, unchecked.

    Errors are `fpga_plugin.errors`; the kubelet layer turns them into gRPC statuses.

    Args:
        owners: finds the allocations' pods.
        lists: the devices to advertise.
        prestarts: the call that waits.
        queue: where cards that may have to be scrubbed are added.
        cdi_devices: what the operator adds.
        rings: which cards lie beside each other.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        owners: Owners,
        lists: DeviceLists,
        prestarts: PreStarts,
        queue: CardQueue,
        cdi_devices: CdiDevices = NO_CDI_DEVICES,
        rings: Rings = NO_RINGS,
    ) -> None:
        self._ledger = ledger
        self._owners = owners
        self._lists = lists
        self._prestarts = prestarts
        self._queue = queue
        self._cdi_devices = cdi_devices
        self._rings = rings

    # ---------------------------------------------------------------- lists

    def resources(self) -> tuple[ResourceName, ...]:
        """Every resource that is to be registered; none ever goes."""
        return self._lists.resources()

    def devices(self, resource: ResourceName) -> tuple[AdvertisedDevice, ...]:
        """The resource's list as of now."""
        return self._lists.devices(resource)

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after every change of resources or lists; returns how to stop that."""
        return self._ledger.subscribe(lambda _: changed())

    # ---------------------------------------------------------------- quick calls

    def allocate(self, resource: ResourceName, ids: Sequence[str]) -> AllocateAnswer:
        """Grant devices to a container, journalled before it returns."""
        allocations = self._ledger.device_plugin.allocate(resource, ids)
        self._owners.answered(allocation.device for allocation in allocations)
        of = self._ledger.naming.named_resource(resource)
        answer = AllocateAnswer.of(
            of,
            {
                region: grant
                for allocation in allocations
                for region, grant in allocation.grants.items()
            },
        )
        return replace(answer, cdi_devices=self._cdi_devices.of(of))

    def preferred(
        self,
        resource: ResourceName,
        available: Sequence[str],
        must_include: Sequence[str],
        size: int,
    ) -> list[str]:
        """Which of `available` to take; never raises for ids that it does not know."""
        listed = self._lists.devices(resource)
        return preferred(self._ledger, listed, available, must_include, size, rings=self._rings)

    def poststop(self, resource: ResourceName, ids: Sequence[str]) -> None:
        """A container that had these devices was removed. Work follows in the background."""
        allocations = self._ledger.allocations
        # Without an allocation it may be one that was still to come of an ended allocation.
        devices = [
            device
            for device in map(DeviceId, dict.fromkeys(ids))
            if device not in allocations or allocations[device].resource == resource
        ]
        for device in self._ledger.device_plugin.poststop_seen(devices):
            log.info(
                "all containers of an allocation stopped",
                device=device,
                resource=resource,
                pod=allocations[device].pod,
            )
            self._queue.add(card_of(device))

    def deallocate(self, resource: ResourceName, ids: Sequence[str]) -> None:
        """The allocation of these devices ended. Work follows in the background."""
        self._owners.answered(release(self._ledger, self._queue, resource, ids))

    # ---------------------------------------------------------------- PreStart

    async def prestart(
        self,
        resource: ResourceName,
        ids: Sequence[str],
        env: Mapping[str, str],
        time_left: float | None,
        caller: Caller | None = None,
    ) -> None:
        """Bring the devices into the state that the container asks for (`PreStarts.serve`)."""
        await self._prestarts.serve(resource, ids, env, time_left, caller)

    async def close(self) -> None:
        """Wait for the preparations that run; begin none."""
        await self._prestarts.close()
