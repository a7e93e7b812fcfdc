"""The end of allocations that kubelet reports (Deallocate) or that its records show (reconcile)."""

from collections.abc import Sequence

import structlog

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import ResourceName

log = structlog.get_logger()


def release(
    ledger: Ledger, queue: CardQueue, resource: ResourceName, ids: Sequence[str]
) -> tuple[DeviceId, ...]:
    """End the allocations of these devices under a resource; others are skipped.

    Their regions are scrubbed in the background. Returns the devices whose allocations ended.

    Raises:
        JournalError: nothing has ended.
    """
    allocations = ledger.allocations_of(map(DeviceId, ids))
    pods = {one.device: one.pod for one in allocations if one.resource == resource}
    released = ledger.device_plugin.release(pods)
    for device in released:
        log.info("released", device=device, resource=resource, pod=pods[device])
        queue.add(card_of(device))
    return released
