"""Whose claims these are: learnt from kubelet's checkpoint as soon as it shows it.

Allocate names no pod, PreStart comes late, and after kubelet's restart perhaps never: a container
then starts without one. So the pod of a claim is looked for right after Allocate, when kubelet's
life begins, and for as long as there is a claim without a pod, ever less often. With none nothing
is read.

Kubelet writes its checkpoint after Allocate was answered. Until then an entry for the device may be
that of a pod that ended, so an entry counts only in a file that was written after the Allocate.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import DeviceId
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.pods.checkpoint import Checkpoint, Stamp
from fpga_plugin.pods.directory import PodDirectory

log = structlog.get_logger()

FIRST_LOOK: Final = 0.05
"""Seconds from Allocate to the first look; kubelet writes within milliseconds."""

LONGEST_WAIT: Final = 30.0
"""Seconds between two looks; each wait is twice as long as the last."""


@dataclass(frozen=True, slots=True)
class _Grant:
    """An Allocate's answer, by which it is told whether the checkpoint was written since.

    Attributes:
        generation: of the claim.
        stamp: the checkpoint's when Allocate was answered.
        known: whether that could be read.
    """

    generation: int
    stamp: Stamp | None = None
    known: bool = True


class Owners:
    """Belongs to the event loop.

    Args:
        ledger: has the claims.
        pods: reads kubelet's checkpoint.
    """

    def __init__(self, ledger: Ledger, pods: PodDirectory) -> None:
        self._ledger = ledger
        self._pods = pods
        self._grants: dict[DeviceId, _Grant] = {}
        self._ended: dict[DeviceId, Stamp | None] = {}
        self._wake = asyncio.Event()
        self._at_once = False
        self._said = ""

    def allocated(self, devices: Iterable[DeviceId]) -> None:
        """Allocate is about to be answered: what the checkpoint says by now is about others."""
        stamp, known = self._stamp()
        for device in devices:
            self._ended.pop(device, None)
            if (claim := self._ledger.claims.get(device)) is not None:
                self._grants[device] = _Grant(claim.generation, stamp, known)
        self._wake.set()

    def deallocated(self, devices: Iterable[DeviceId]) -> None:
        """Deallocate is about to be answered: the checkpoint may still name the last owner."""
        self._ended |= dict.fromkeys(devices, self._stamp()[0])

    def _stamp(self) -> tuple[Stamp | None, bool]:
        """The checkpoint's stamp, and whether it could be read; one system call."""
        try:
            return self._pods.stamp(), True
        except FpgaPluginError:
            return None, False

    def is_older(self, device: DeviceId, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint's word on a device may be older than the last call about it."""
        if (grant := self._grants.get(device)) is not None and device in self._ledger.claims:
            return not grant.known or checkpoint.stamp == grant.stamp
        return device in self._ended and checkpoint.stamp == self._ended[device]

    def new_kubelet(self) -> None:
        """It starts containers without PreStart: high time to know whose claims these are."""
        self._at_once = True
        self._wake.set()

    def unknown(self) -> Mapping[DeviceId, _Grant]:
        """Claims without a pod, as they are now: ask before a checkpoint is read."""
        for device in self._grants.keys() - self._ledger.claims.keys():
            del self._grants[device]
        found: dict[DeviceId, _Grant] = {}
        for claim in self._ledger.pod_claims():
            device = claim.device
            if claim.pod is None:
                grant = self._grants.get(device)
                if grant is None or grant.generation != claim.generation:
                    # Of an earlier life of the plugin: kubelet has written it down since.
                    grant = self._grants[device] = _Grant(claim.generation)
                found[device] = grant
        return found

    def learn(self, asked: Mapping[DeviceId, _Grant], checkpoint: Checkpoint) -> None:
        """Bind claims to the pods that a checkpoint names.

        Args:
            asked: what `unknown` told before it was read.
            checkpoint: as read.

        Raises:
            JournalError: a pod cannot be written down; it is not known then.
        """
        for device, grant in asked.items():
            claim = self._ledger.claims.get(device)
            if claim is None or claim.pod is not None or self._grants.get(device) is not grant:
                continue  # Allocate came again while it was read
            if not grant.known:
                self._grants[device] = _Grant(grant.generation, checkpoint.stamp)
                continue
            if checkpoint.stamp == grant.stamp:
                continue
            holders = checkpoint.holders(device)
            pods = {holder.pod_uid for holder in holders if holder.resource == claim.resource}
            if len(pods) == 1:
                (pod,) = pods
                self._ledger.allocations.bind_pod([device], pod)
                log.debug("owner of a claim found", device=device, pod=pod)

    async def run(self) -> None:
        """Until cancelled."""
        wait = FIRST_LOOK
        while True:
            try:
                async with asyncio.timeout(wait if self.unknown() else None):
                    await self._wake.wait()
            except TimeoutError:
                wait = min(wait * 2, LONGEST_WAIT)
                await self._look()
                continue
            self._wake.clear()
            wait = FIRST_LOOK
            if self._at_once:
                self._at_once = False
                await self._look()

    async def _look(self) -> None:
        """Read the checkpoint once, if anything is not known."""
        asked = self.unknown()
        if not asked:
            return
        try:
            self.learn(asked, await self._pods.checkpoint())
        except FpgaPluginError as error:  # a journal that cannot be written, too
            self._report(error)
        else:
            self._said = ""

    def _report(self, error: FpgaPluginError) -> None:
        """Once for each new reason, not once a look."""
        if self._said != str(error):
            self._said = str(error)
            log.warning("the owners of claims cannot be read", error=str(error))
