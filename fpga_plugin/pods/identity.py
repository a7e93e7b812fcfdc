"""Who asks: kubelet's checkpoint names the pod and the containers that hold a device.

Kubelet writes its checkpoint after each admission, before any PreStart of that pod
(pkg/kubelet/cm/devicemanager/manager.go), so at PreStart the entry is there. The file is internal
to kubelet: what it says is a hint where it can be read, and its absence is no error.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import DeviceId, PodUid, ResourceName
from fpga_plugin.pods.checkpoint import (
    FILE_NAME,
    Checkpoint,
    CheckpointEntry,
    read_checkpoint,
)
from fpga_plugin.pods.grants import cached_grant

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who holds the devices of a call.

    Attributes:
        pod: None where kubelet's records do not tell, or name several.
        containers: those of the pod that hold all of the devices: init containers and app
            containers may share one.
        resources: every resource of ours that one of these containers holds.
        entries: the checkpoint's entries of these containers and devices.
        held: all devices of ours that any container of the pod holds.
        container: the one that starts now, where it had to be told apart from the others.
        namespace: of the pod; empty where it was not asked for.
        name: of the pod; empty where it was not asked for.
    """

    pod: PodUid | None = None
    containers: frozenset[str] = frozenset()
    resources: frozenset[ResourceName] = frozenset()
    entries: tuple[CheckpointEntry, ...] = field(default=(), compare=False)
    held: frozenset[str] = field(default=frozenset(), compare=False)
    container: str = ""
    namespace: str = field(default="", compare=False)
    name: str = field(default="", compare=False)

    def granted_nodes(self) -> dict[str, str]:
        """Kubelet's copy of the environment that Allocate answered: nodes by variable.

        Raises:
            NoSourceError: kubelet's copy cannot be read.
        """
        return {k: v for entry in self.entries for k, v in granted_nodes(entry).items()}


class Identities:
    """Reads kubelet's checkpoint.

    Args:
        kubelet_dir: where the checkpoint lies.
        prefix: of our resources.
    """

    def __init__(self, *, kubelet_dir: str, prefix: str) -> None:
        self._path = os.path.join(kubelet_dir, FILE_NAME)
        self._prefix = prefix

    async def checkpoint(self) -> Checkpoint:
        """Kubelet's records of our resources; a missing file has no entries.

        Raises:
            NoSourceError: the file is there and cannot be read.
        """
        return await asyncio.to_thread(read_checkpoint, self._path, self._prefix)

    async def identify(self, resource: ResourceName, devices: Sequence[DeviceId]) -> Identity:
        """Whose PreStart this is, as far as the checkpoint tells."""
        try:
            checkpoint = await self.checkpoint()
        except FpgaPluginError as error:
            log.warning("kubelet's checkpoint cannot be read", error=str(error))
            return Identity()
        wanted = frozenset[str](devices)
        # A PreStart is for all devices that one container has of a resource.
        holders = [
            entry
            for entry in checkpoint.entries
            if entry.resource == resource and wanted == entry.devices
        ]
        uids = {entry.pod_uid for entry in holders}
        if len(uids) != 1:
            if uids:
                log.warning("kubelet's checkpoint names several pods", devices=devices, pods=uids)
            return Identity()
        (uid,) = uids
        containers = frozenset(entry.container for entry in holders)
        return Identity(
            uid,
            containers,
            frozenset(
                entry.resource
                for entry in checkpoint.entries
                if entry.pod_uid == uid and entry.container in containers
            ),
            tuple(holders),
            frozenset[str]().union(
                *(entry.devices for entry in checkpoint.entries if entry.pod_uid == uid)
            ),
        )


def granted_nodes(entry: CheckpointEntry) -> Mapping[str, str]:
    """The nodes that kubelet hands to the container at each of its starts, by variable.

    Empty where the checkpoint does not hold Allocate's answer.
    """
    grant = cached_grant(entry)
    return {} if grant is None else grant.envs
