"""What the kubelet layer asks of the life of a claim: the interface between the two.

All of it runs on the event loop. Errors are `fpga_plugin.errors`; the kubelet layer turns them into
gRPC statuses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fpga_plugin.hardware.grant import Grant, Mount
from fpga_plugin.ids import (
    RegionId,
    Resource,
    ResourceName,
    device_order,
    device_variable,
    numbered_variable,
)
from fpga_plugin.ledger.devices import AdvertisedDevice
from fpga_plugin.pods.identity import Identity


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer to Allocate: what the container gets.

    Attributes:
        envs: what its regions' grants say, and their nodes, separated by commas:
            `FPGA_DEVICE_<REGION ID>`, the same as `FPGA_DEVICE_<n>`, and all of them together as
            `FPGA_DEVICES_<KIND>_<8>`.
        nodes: device nodes, to read and write, at the same path.
        mounts: files and directories of the node.
        cdi_devices: CDI devices that the operator adds.
    """

    envs: Mapping[str, str]
    nodes: tuple[str, ...]
    mounts: tuple[Mount, ...] = ()
    cdi_devices: tuple[str, ...] = ()

    @classmethod
    def of(cls, resource: Resource, grants: Mapping[RegionId, Grant]) -> "Allocation":
        """What a container gets that has these regions, as or in devices of this resource.

        Regions are in order of (PCI address, port id), whatever order kubelet named them in.
        """
        envs: dict[str, str] = {}
        nodes: list[str] = []
        mounts: list[Mount] = []
        regions = sorted(grants, key=device_order)
        for number, region in enumerate(regions, 1):
            grant = grants[region]
            envs |= {
                **grant.env,
                device_variable(region): str(grant),
                numbered_variable(number): str(grant),
            }
            nodes += [*grant.shared, *grant.nodes]
            mounts += grant.mounts
        envs[resource.variable] = ",".join(str(grants[r]) for r in regions)
        return cls(envs, tuple(dict.fromkeys(nodes)), tuple(dict.fromkeys(mounts)))


@dataclass(slots=True)
class Caller:
    """Whose container a PreStart is for: found out on the way, and logged with the call's answer.

    Attributes:
        identity: as far as it is known by now.
    """

    identity: Identity = field(default_factory=Identity)

    def known(self) -> Mapping[str, str]:
        """What is known by now, as values of a log line."""
        values = {
            "pod": self.identity.pod or "",
            "namespace": self.identity.namespace,
            "name": "" if self.identity.name is None else self.identity.name.name,
            "container": self.identity.container,
        }
        return {key: value for key, value in values.items() if value}


class DevicePluginCalls(Protocol):
    """One resource's view of the plugin; ids come as kubelet sent them, unchecked."""

    def resources(self) -> tuple[ResourceName, ...]:
        """Every resource that is to be registered; none ever goes."""

    def devices(self, resource: ResourceName) -> tuple[AdvertisedDevice, ...]:
        """The resource's list as of now."""

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after every change of resources or lists; returns how to stop that."""

    def allocate(self, resource: ResourceName, ids: Sequence[str]) -> Allocation:
        """Grant devices to a container, journalled before it returns; takes milliseconds."""

    def preferred(
        self,
        resource: ResourceName,
        available: Sequence[str],
        must_include: Sequence[str],
        size: int,
    ) -> list[str]:
        """Which of `available` to take; never raises for ids that it does not know."""

    async def prestart(
        self,
        resource: ResourceName,
        ids: Sequence[str],
        env: Mapping[str, str],
        time_left: float | None,
        caller: Caller,
    ) -> None:
        """Bring the devices into the state that the container asks for.

        `time_left` is the call's deadline in seconds from now, None if it has none. Cancelling the
        call does not cancel the work. `caller` is filled in, whatever comes of the call.
        """

    def poststop(self, resource: ResourceName, ids: Sequence[str]) -> None:
        """A container that had these devices was removed. Work follows in the background."""

    def deallocate(self, resource: ResourceName, ids: Sequence[str]) -> None:
        """The claim of these devices ended. Work follows in the background."""


class KubeletLives(Protocol):
    """Who has to know of kubelet's lives. All of it runs on the event loop."""

    def kubelet_epoch(self, epoch: str) -> None:
        """A life of kubelet began or was found, told by its socket's identity.

        Raises:
            FpgaPluginError: it is not written down yet, and holds; it is told again.
        """

    def stream_opened(self, resource: ResourceName) -> None:
        """Kubelet opened ListAndWatch for the resource and was sent its list."""
