"""The answers to kubelet's calls, and the callers, in the plugin's own values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.hardware.grant import Grant, Mount
from fpga_plugin.ids import (
    RegionId,
    Resource,
    device_order,
    device_variable,
    numbered_variable,
)


@dataclass(frozen=True, slots=True)
class AllocateAnswer:
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
    def of(cls, resource: Resource, grants: Mapping[RegionId, Grant]) -> "AllocateAnswer":
        """The answer for a container that gets these regions, as or in devices of this resource.

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
    """The container that a PreStart is for: found while the call runs, logged with its answer.

    Attributes:
        identity: what is known so far.
    """

    identity: Identity = field(default_factory=Identity)

    def known(self) -> Mapping[str, str]:
        """What is known so far, as values of a log line."""
        values = {
            "pod": self.identity.pod or "",
            "namespace": self.identity.namespace,
            "name": "" if self.identity.name is None else self.identity.name.name,
            "container": self.identity.container,
        }
        return {key: value for key, value in values.items() if value}
