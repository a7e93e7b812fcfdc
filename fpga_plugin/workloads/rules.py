"""What containers get beside their devices, as values: which resources, and what each adds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fpga_plugin.hardware.grant import Mount
from fpga_plugin.ids import InterfaceId, Resource


@dataclass(frozen=True, slots=True)
class Extras:
    """What a container gets in addition.

    Attributes:
        mounts: files and directories of the node.
        env: variables; none of the plugin's own.
        nodes: device nodes, to read and write, at the same path; none that leads to a region.
    """

    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One entry of the file.

    Attributes:
        name: what the operator calls it.
        resources: what follows the domain in a resource's name (`region-<id>`); None: any.
        interfaces: the cards; None: any.
        extras: what it adds.
    """

    name: str
    resources: frozenset[str] | None
    interfaces: frozenset[InterfaceId] | None
    extras: Extras

    def concerns(self, resource: Resource) -> bool:
        """Whether it is about containers that have devices of this resource."""
        # By its id, also where the resource has an alias: the file says the same on every node.
        stem = replace(resource, alias=None).name.partition("/")[2]
        return (self.resources is None or stem in self.resources) and (
            self.interfaces is None or resource.interface_id in self.interfaces
        )

    def meets(self, other: "Workload") -> bool:
        """Whether a resource may have both."""
        return all(
            mine is None or theirs is None or mine & theirs
            for mine, theirs in (
                (self.resources, other.resources),
                (self.interfaces, other.interfaces),
            )
        )


@dataclass(frozen=True, slots=True)
class Workloads:
    """The file's entries, in its order."""

    entries: tuple[Workload, ...] = ()

    def of(self, resource: Resource) -> tuple[Workload, ...]:
        """The entries about a resource."""
        return tuple(entry for entry in self.entries if entry.concerns(resource))

    def extras(self, resource: Resource) -> Extras:
        """All that they add."""
        found = [entry.extras for entry in self.of(resource)]
        return Extras(
            mounts=tuple(dict.fromkeys(mount for one in found for mount in one.mounts)),
            env={name: value for one in found for name, value in one.env.items()},
            nodes=tuple(dict.fromkeys(node for one in found for node in one.nodes)),
        )
