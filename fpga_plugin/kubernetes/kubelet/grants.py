"""What kubelet gives a container: its cached answer to Allocate, from the checkpoint.

Kubelet asks once and repeats the answer at every start of the container, over restarts and reboots,
while the kernel's numbers of port nodes move (invariant 10). Where the journal is lost,
this copy is the only record of which nodes the container will get.
"""

import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field

from fpga_plugin.kubernetes.grpc.wire import typed
from fpga_plugin.kubernetes.kubelet.checkpoint import CheckpointEntry, CheckpointUnreadableError
from fpga_plugin.kubernetes.messages import v1beta1


@dataclass(frozen=True, slots=True)
class CachedGrant:
    """The part of an answer to Allocate that concerns nodes; whichever plugin gave it.

    Attributes:
        envs: environment variables, `FPGA_DEVICE_<DEVICE ID>` = node among them.
        nodes: host paths of the device nodes.
    """

    envs: Mapping[str, str] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()


def cached_grant(entry: CheckpointEntry) -> CachedGrant | None:
    """What the container of a checkpoint's entry gets; None where the entry does not say.

    Values are for comparing only: nothing checked them.

    Raises:
        CheckpointUnreadableError: the entry has an answer that cannot be read.
    """
    if not entry.response:
        return None
    try:
        raw = binascii.a2b_base64(entry.response, strict_mode=True)
        answer = typed(v1beta1.ContainerAllocateResponse.parse(raw))
    except Exception as error:  # betterproto2 raises many types for bad bytes
        raise CheckpointUnreadableError(
            f"kubelet's cached answer to Allocate for {entry.resource} of pod {entry.pod_uid}"
            f" is not understood ({type(error).__name__})",
            hint="delete the pod",
        ) from error
    return CachedGrant(
        envs=dict(answer.envs), nodes=frozenset(device.host_path for device in answer.devices)
    )
