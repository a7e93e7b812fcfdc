"""Who asks: kubelet's checkpoint names the pod and the containers that hold a device.

Kubelet writes its checkpoint after each admission, before any PreStart of that pod
(pkg/kubelet/cm/devicemanager/manager.go), so at PreStart the entry is there. The file is internal
to kubelet: what it says is a hint where it can be read, and its absence is no error.
"""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import structlog

from fpga_plugin.errors import NoSourceError
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.kubelet.checkpoint import Checkpoint, CheckpointEntry
from fpga_plugin.kubernetes.kubelet.grants import cached_grant
from fpga_plugin.kubernetes.names import PodName, PodUid, ResourceName

log = structlog.get_logger()

Gone = Callable[[AbstractSet[PodUid]], AbstractSet[PodUid]]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who holds the devices of a call.

    Attributes:
        pod: None where kubelet's records do not say.
        containers: those of the pod that hold all of the devices: init containers and app
            containers may share one.
        resources: every resource of ours that one of these containers holds.
        entries: the checkpoint's entries of these containers and devices.
        held: all devices of ours that any container of the pod holds.
        container: the one that starts now, where it had to be told apart from the others.
        name: of the pod; None where it was not asked for.
        claim: the ResourceClaim by which it asks, as namespace and name; empty: by none.
    """

    pod: PodUid | None = None
    containers: frozenset[str] = frozenset()
    resources: frozenset[ResourceName] = frozenset()
    entries: tuple[CheckpointEntry, ...] = field(default=(), compare=False)
    held: frozenset[str] = field(default=frozenset(), compare=False)
    container: str = ""
    name: PodName | None = field(default=None, compare=False)
    claim: str = field(default="", compare=False)

    @property
    def namespace(self) -> str:
        """Of the pod; empty where its name was not asked for."""
        return "" if self.name is None else self.name.namespace

    def granted_nodes(self) -> dict[str, str]:
        """Kubelet's copy of the environment that Allocate answered: nodes by variable.

        Raises:
            NoSourceError: kubelet's copy cannot be read.
        """
        return granted_nodes(self.entries)


def identify(
    checkpoint: Checkpoint, resource: ResourceName, devices: Sequence[DeviceId], gone: Gone
) -> Identity:
    """The pod and containers that a PreStart for these devices is for, by the checkpoint.

    `gone`: of which of several pods only the entries are left. Blocks: call it from a thread.

    Raises:
        NoSourceError: it names several pods, of which each may be running with the devices.
    """
    wanted = frozenset[str](devices)
    # A PreStart is for all devices that one container has of a resource.
    holders = [
        entry
        for entry in checkpoint.entries
        if entry.resource == resource and wanted == entry.devices
    ]
    uids = {entry.pod_uid for entry in holders}
    if len(uids) > 1:
        uids -= gone(uids)
    if len(uids) > 1:
        log.warning("kubelet's checkpoint names several pods", devices=devices, pods=uids)
        raise NoSourceError(
            f"kubelet's checkpoint names several pods that hold {', '.join(devices)}:"
            f" {', '.join(sorted(uids))}",
            hint="delete all of these pods but one",
        )
    if not uids:
        return Identity()
    (uid,) = uids
    holders = [entry for entry in holders if entry.pod_uid == uid]
    containers = frozenset(entry.container for entry in holders)
    of_pod = [entry for entry in checkpoint.entries if entry.pod_uid == uid]
    return Identity(
        uid,
        containers,
        frozenset(entry.resource for entry in of_pod if entry.container in containers),
        tuple(holders),
        frozenset[str]().union(*(entry.devices for entry in of_pod)),
    )


def granted_nodes(entries: Iterable[CheckpointEntry]) -> dict[str, str]:
    """The nodes that kubelet hands to the containers at each of their starts, by variable.

    None where the checkpoint does not hold Allocate's answer.
    """
    grants = filter(None, map(cached_grant, entries))
    return {name: nodes for grant in grants for name, nodes in grant.envs.items()}
