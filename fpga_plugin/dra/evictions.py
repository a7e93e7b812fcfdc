"""Finds pods that are not evicted although a device of their claim failed before their start.

Such a device has a NoExecute taint (`desired`), by which Kubernetes deletes the pod, so that its
controller makes another, which the scheduler places elsewhere. Before 1.37.2 it does not do so for
pods that ask by `limits` (kubernetes/kubernetes#141290), a claim may tolerate the taint, and the
cluster may have no such controller. No version is guessed: kubelet prepares nothing for a pod that
is being deleted, so a pod for whose claim it still asks was not evicted.
"""

import time
from collections.abc import Callable
from typing import Final

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.dra.claim import ResourceClaim
from fpga_plugin.dra.desired import cannot_start
from fpga_plugin.host.bounded import BoundedDict
from fpga_plugin.kubernetes.names import ClaimUid

PATIENCE: Final = 30.0
"""Seconds for which an eviction may take; kubelet asks again after 60 to 90."""

_KEPT: Final = 256
"""Claims of which is remembered since when their pods are to be evicted."""


class Evictions:
    """Knows since when the pods of each claim wait for an eviction.

    Args:
        ledger: knows which devices failed.
        clock: tells seconds.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._since: BoundedDict[ClaimUid, float] = BoundedDict(_KEPT)

    def overdue(self, claim: ResourceClaim) -> str:
        """The message for a claim's pod after a Prepare that failed; empty: none."""
        uid = claim.owner.uid
        failed = [one for one in claim.owner.devices if cannot_start(self._ledger, one)]
        if not failed:
            self._since.pop(uid, None)
            return ""
        now = self._clock()
        waited = now - self._since.setdefault(uid, now)
        if waited < PATIENCE:
            return ""
        why = (
            "its claim tolerates the taint, or the cluster evicts no pods for taints of devices"
            if claim.pod is None
            else "before 1.37.2 Kubernetes evicts no pod that asks by limits"
            " (kubernetes/kubernetes#141290)"
        )
        return (
            f"{', '.join(failed)} failed before the pod started and has a NoExecute taint, and"
            f" after {waited:.0f} s nobody has evicted the pod: {why}; delete it, so that its"
            " controller makes another"
        )
