"""One door a node: a start is refused while pods have devices by the other one.

The two APIs account for devices apart from each other, so what both offered would be given out
twice. What the journal still has of the other door, and nobody uses any more, ends here.
"""

import asyncio
from collections.abc import Iterable, Mapping

import structlog
from grpclib.const import Status

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import ClaimUid, PodUid, is_device_id, known_resource
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.pods.cgroup import PodCgroups, PodPresence
from fpga_plugin.pods.directory import PodDirectory
from fpga_plugin.pods.dra_record import RecordedClaim, RecordUnreadableError, read_record

log = structlog.get_logger()


class OtherDoorError(FpgaPluginError):
    """Pods have devices by the other of kubelet's APIs."""

    status = Status.FAILED_PRECONDITION


async def leave_dra(ledger: Ledger, cgroups: PodCgroups, *, root: str, driver: str) -> None:
    """See that no claim of DRA has a device, before the device plugin serves.

    Raises:
        OtherDoorError: one has.
        JournalError: an end cannot be written down.
    """
    record: Mapping[ClaimUid, RecordedClaim] = {}
    try:
        record = await asyncio.to_thread(read_record, root, driver)
    except RecordUnreadableError as error:  # most nodes show this door no more than its own files
        if ledger.holders:
            log.warning("kubelet's record of claims cannot be read", error=str(error))
    living = {f"claim {one.namespace}/{one.name}" for one in record.values() if one.devices}
    for holder in ledger.holders.values():
        if not holder.ended and await _any_lives(cgroups, ledger.pods_of(holder.devices)):
            living.add(f"claim {holder.full_name}")
    if living:
        raise OtherDoorError(
            f"FPGA_PLUGIN_MODE is device-plugin, and pods have devices by DRA: {_some(living)}",
            hint="set FPGA_PLUGIN_MODE=dra, drain the node, and switch when its claims have ended"
            " (docs/dra.md)",
        )
    for uid in list(ledger.holders):
        log.warning("claim of the other door ended", claim=uid)
        ledger.end_holder(uid)
        ledger.forget_holder(uid)


async def leave_device_plugin(
    ledger: Ledger, cgroups: PodCgroups, pods: PodDirectory, *, prefix: str
) -> None:
    """See that no pod has a device by the device plugin, before claims get any.

    Kubelet's checkpoint may name pods that ended: it is rewritten only for a device plugin. And in
    other domains, resources of other vendors that look as if they were named by an alias.

    Raises:
        OtherDoorError: one has, or it is not known.
        NoSourceError: kubelet's checkpoint cannot be read.
        JournalError: an end cannot be written down.
    """
    checkpoint = await pods.checkpoint()
    living = set[str]()
    for entry in checkpoint.entries:
        named = entry.resource.startswith(f"{prefix}/") or known_resource(entry.resource)
        if not named and not any(map(is_device_id, entry.devices)):
            continue
        presence = await asyncio.to_thread(cgroups.state, entry.pod_uid)
        if presence is not PodPresence.GONE:
            living.add(f"pod {entry.pod_uid}")
    of_claims = {device for one in ledger.holders.values() for device in one.devices}
    left = [claim for device, claim in ledger.claims.items() if device not in of_claims]
    for claim in left:
        if claim.pod is not None and await _any_lives(cgroups, [claim.pod]):
            living.add(f"pod {claim.pod}")
    if living:
        raise OtherDoorError(
            f"FPGA_PLUGIN_MODE is dra, and pods have devices by the device plugin: {_some(living)}",
            hint="set FPGA_PLUGIN_MODE=device-plugin, drain the node, and switch when these pods"
            " are gone (docs/dra.md)",
        )
    for claim in left:
        log.warning("claim of the other door ended", device=claim.device, pod=claim.pod)
    ledger.release([claim.device for claim in left])


async def _any_lives(cgroups: PodCgroups, pods: Iterable[PodUid]) -> bool:
    for pod in sorted(pods):
        if await asyncio.to_thread(cgroups.may_live, pod):
            return True
    return False


def _some(who: set[str]) -> str:
    shown = sorted(who)[:4]
    return ", ".join(shown) + (f" and {len(who) - 4} more" if len(who) > len(shown) else "")
