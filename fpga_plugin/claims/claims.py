"""The calls of kubelet, as the life of a claim: `DevicePluginCalls` over ledger and lists.

Allocate, PostStop and Deallocate are ledger steps and return at once; what they set off runs in the
background (invariant 5). PreStart, which waits, has a module of its own (`prestart`).
"""

from collections.abc import Callable, Mapping, Sequence

import structlog

from fpga_plugin.claims.calls import Caller, Grant
from fpga_plugin.claims.environment import EnvSource
from fpga_plugin.claims.owners import Owners
from fpga_plugin.claims.prestart import PreStarts
from fpga_plugin.ids import DeviceId, ResourceName, device_variable
from fpga_plugin.ledger.devices import AdvertisedDevice
from fpga_plugin.ledger.ledger import Ledger, card_of
from fpga_plugin.ledger.lists import DeviceLists
from fpga_plugin.ledger.preferred import preferred
from fpga_plugin.regions.queue import CardQueue

log = structlog.get_logger()


class ClaimService:
    """Belongs to the event loop.

    Args:
        ledger: who has what.
        owners: finds out whose claims these are.
        lists: what is advertised of it.
        prestarts: the call that waits.
        queue: where cards that may have to be scrubbed are added.
        envs: is told of each life of kubelet.
        epoch_changed: is told of it too.
        stream_opened: is told that kubelet has a resource's list.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        owners: Owners,
        lists: DeviceLists,
        prestarts: PreStarts,
        queue: CardQueue,
        envs: EnvSource,
        epoch_changed: Callable[[str], None],
        stream_opened: Callable[[ResourceName], None],
    ) -> None:
        self._ledger = ledger
        self._owners = owners
        self._lists = lists
        self._prestarts = prestarts
        self._queue = queue
        self._envs = envs
        self._epoch_changed = epoch_changed
        self._stream_opened = stream_opened

    # ---------------------------------------------------------------- lists

    def resources(self) -> tuple[ResourceName, ...]:
        """Every resource that is to be registered."""
        return self._lists.resources()

    def devices(self, resource: ResourceName) -> tuple[AdvertisedDevice, ...]:
        """The resource's list as of now."""
        return self._lists.devices(resource)

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after every change of resources or lists; returns how to stop that."""
        return self._ledger.subscribe(lambda _: changed())

    def kubelet_epoch(self, epoch: str) -> None:
        """A life of kubelet began or was found."""
        if self._ledger.kubelet_epoch(epoch):
            log.info("kubelet's life began", epoch=epoch)
            self._envs.new_kubelet()
            self._epoch_changed(epoch)

    def stream_opened(self, resource: ResourceName) -> None:
        """Kubelet opened ListAndWatch and has the list."""
        self._stream_opened(resource)

    # ---------------------------------------------------------------- quick calls

    def allocate(self, resource: ResourceName, ids: Sequence[str]) -> Grant:
        """Grant devices to a container, journalled before it returns."""
        claims = self._ledger.allocate(resource, ids)
        self._owners.allocated(claim.device for claim in claims)
        nodes = [(region, node) for claim in claims for region, node in claim.nodes]
        return Grant(
            envs={device_variable(region): node for region, node in nodes},
            nodes=tuple(node for _, node in nodes),
        )

    def preferred(
        self,
        resource: ResourceName,
        available: Sequence[str],
        must_include: Sequence[str],
        size: int,
    ) -> list[str]:
        """Which of `available` to take."""
        listed = self._lists.devices(resource)
        return preferred(self._ledger, listed, available, must_include, size)

    def poststop(self, resource: ResourceName, ids: Sequence[str]) -> None:
        """A container that had these devices was removed."""
        claims = self._ledger.claims
        # Without a claim it may be one that was still to come of an ended claim.
        devices = [
            device
            for device in map(DeviceId, dict.fromkeys(ids))
            if device not in claims or claims[device].resource == resource
        ]
        for device in self._ledger.poststop_seen(devices):
            log.info(
                "all containers of a claim stopped",
                device=device,
                resource=resource,
                pod=claims[device].pod,
            )
            self._queue.add(card_of(device))

    def deallocate(self, resource: ResourceName, ids: Sequence[str]) -> None:
        """The claim of these devices ended."""
        claimed = self._claimed(resource, ids)
        pods = {device: self._ledger.claims[device].pod for device in claimed}
        released = self._ledger.release(claimed)
        self._prestarts.forget(released)
        for device in released:
            log.info("released", device=device, resource=resource, pod=pods[device])
            self._queue.add(card_of(device))

    def _claimed(self, resource: ResourceName, ids: Sequence[str]) -> list[DeviceId]:
        """Those of `ids` that are claimed under this resource, each once."""
        devices = [DeviceId(text) for text in dict.fromkeys(ids)]
        claims = self._ledger.claims
        return [d for d in devices if (claim := claims.get(d)) and claim.resource == resource]

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
