"""Reconcile: compare the ledger with kubelet's own records.

It has two tasks. At the start of each kubelet instance it reads kubelet's records once. That answer
syncs the queue of cards; nothing is scrubbed before.

After that, while anything is owned, it asks kubelet at intervals which devices its pods still hold.
It ends an allocation that kubelet no longer knows. For that, two Lists in a row and a checkpoint
rewritten after the second must all lack the device. Both Lists must begin after the allocation's
last Allocate or PreStart, in one kubelet instance. If the checkpoint cannot be read, a source of
pods has to say that the pod is gone or has ended. Any other failed read releases nothing.

It does not poll while nothing is owned, nor while kubelet streams its pods (`kubelet/podwatch`) and
every owner is one of them: then the end of such a pod is the reason to ask.

If an allocation cannot be ended (a full disk), or kubelet's directory is missing, it reports that
and tries again: neither may end the daemon.
"""

import asyncio
import time
from collections.abc import Collection

import structlog

from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.link import Link
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.reconcile.owners import Owners
from fpga_plugin.allocation.release import release
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.deviceplugin.allocatable import AllocatableCheck
from fpga_plugin.deviceplugin.environment import StockEnvironment
from fpga_plugin.deviceplugin.missed_prestarts import MissedPreStarts
from fpga_plugin.errors import FpgaPluginError, NoSourceError
from fpga_plugin.ids import CardId, DeviceId
from fpga_plugin.kubernetes.kubelet.checkpoint import Checkpoint
from fpga_plugin.kubernetes.kubelet.podresources import PodResourcesClient
from fpga_plugin.kubernetes.kubelet.podwatch import PodWatch
from fpga_plugin.kubernetes.names import PodUid, ResourceName

log = structlog.get_logger()

REWRITE_WAIT = 1.0
"""Seconds that kubelet gets to rewrite its checkpoint after a list was sent again."""

REWRITE_POLL = 0.02
"""Seconds between two looks at the checkpoint's identity while waiting for that."""


class Reconciler:
    """Compares the ledger with kubelet's records; each resource reports the instances it finds.

    Args:
        ledger: its allocations end.
        queue: synced once kubelet's records were read, until another kubelet begins. Its interval
            is also that of the Lists.
        link: sends the lists to kubelet again, which makes it rewrite its checkpoint.
        pods: kubelet's records. Where FPGA_PLUGIN_PODRESOURCES_SOCKET is empty, an open
            ListAndWatch stream is the answer that syncs the queue, and nothing is polled.
        owners: compares the ledger with kubelet's checkpoint.
        envs: forgets with each kubelet instance which container started last.
        missed: looks for containers that started without PreStart.
        pods_socket: of kubelet's Pods API; None: it is not asked which pods live.

    Attributes:
        problem: why kubelet's records cannot be read; empty while they can.
        answered: whether the present kubelet's records were read: nothing is scrubbed before.
        released: how many allocations ended because the records no longer show them.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        queue: CardQueue,
        link: Link,
        pods: PodDirectory,
        owners: Owners,
        envs: StockEnvironment,
        missed: MissedPreStarts,
        pods_socket: str | None = None,
    ) -> None:
        self._ledger = ledger
        self._queue = queue
        self._link = link
        self._pods = pods
        self._podresources = pods.podresources
        self._owners = owners
        self._envs = envs
        self._missed = missed
        self._allocatable = AllocatableCheck(link, pods.podresources)
        self._streaming = False
        self._wake = asyncio.Event()
        # Claimed devices that the last List lacked, by what was done to them before it; and which
        # kubelet gave it.
        self._lacking: dict[DeviceId, int] = {}
        self._lister: tuple[str, str] | None = None
        self._waiting: list[DeviceId] = []
        self._last_read = 0.0
        self.problem = ""
        self.answered = False
        self.released = 0
        self.watch = None if pods_socket is None else PodWatch(pods_socket, self._wake.set)
        self._unsubscribe = ledger.subscribe(self._card_changed)

    def kubelet_found(self, instance: str) -> None:
        """A kubelet instance began or was found; its socket's identity names it.

        If it is a new one, it is not known yet what is in use.

        Raises:
            JournalError: it is not written yet, but holds.
        """
        if instance == self._ledger.kubelet_instance:
            return
        log.info("a new kubelet process was found", instance=instance)
        self.answered = self._streaming = False
        self._lacking.clear()
        self._envs.new_kubelet()
        self._owners.new_kubelet()
        self._allocatable.new_kubelet()
        self._missed.new_kubelet()
        self._queue.unsync()
        self._wake.set()
        # Last: it holds even where it cannot be written.
        self._ledger.device_plugin.kubelet_found(instance)

    def stream_opened(self, resource: ResourceName) -> None:
        """Kubelet opened ListAndWatch for the resource and was sent its list."""
        self._streaming = True
        self._missed.stream_opened(resource)
        self._changed()

    def _card_changed(self, card: CardId | None) -> None:
        if card is not None:
            self._owners.card_changed(card)
        self._changed()

    def _changed(self) -> None:
        self._allocatable.changed()
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._wake.clear()
                again = False
                if self._streaming and not self.answered:
                    again = not await self._first_answer()
                elif self._streaming:
                    again = await self._compare_records()
                if again:
                    await asyncio.sleep(self._queue.interval)
                    if self._allocatable.due:
                        await self._allocatable.look()
                else:
                    await self._wake.wait()
        finally:
            self._unsubscribe()
            self._missed.close()

    async def _compare_records(self) -> bool:
        """Once; returns whether to do it again without another reason."""
        allocations = self._ledger.pod_allocations()
        # Where the records of a new card cannot be read, others' allocations may still end.
        if self._owners.new_cards:
            await self._read_records()
        if self.watch is not None and allocations:
            self.watch.want()
        doubtful = self._owners.doubtful
        asked = doubtful or (bool(allocations) and self._telling is None)
        if asked and self._podresources is not None:
            await self._list(self._podresources)
            return True
        if doubtful:
            await self._settle([])
        return doubtful or self._owners.new_cards or self._allocatable.due

    @property
    def _telling(self) -> PodWatch | None:
        """Kubelet's stream of pods, if it shows when any of the allocations may have ended."""
        allocations = self._ledger.pod_allocations()
        if (watch := self.watch) is None or self._podresources is None or not allocations:
            return None
        told = all(one.pod is not None and watch.lives(one.pod) for one in allocations)
        return watch if told else None

    @property
    def last_read(self) -> float:
        """Unix time up to which kubelet's records are known; 0: they were never read."""
        if not self.answered or (watch := self._telling) is None:
            return self._last_read
        # Not now: an end that happened since may have been dropped on its way.
        return max(self._last_read, watch.told_at)

    def _is_new(self, problem: FpgaPluginError) -> bool:
        """Whether it is another problem than at the last try: each is logged once."""
        last, self.problem = self.problem, str(problem)
        return last != self.problem

    def _report(self, error: FpgaPluginError) -> None:
        if self._is_new(error):
            log.warning("kubelet's records cannot be read: nothing is released", error=str(error))

    async def _first_answer(self) -> bool:
        instance, adopted = self._ledger.kubelet_instance, self._owners.adopted
        if not await self._read_records():
            return False
        self.answered = True
        log.info(
            "kubelet's records read", allocations=len(self._ledger.allocations), instance=instance
        )
        self._queue.sync()
        self._wake.set()
        if self._owners.adopted == adopted:  # else it is unknown which containers were served
            self._missed.look()
        return True

    async def _read_records(self) -> bool:
        """Learn the cards' owners from kubelet's records; returns whether they could be read."""
        instance = self._ledger.kubelet_instance
        try:
            if self._podresources is not None:
                await self._podresources.snapshot()
            await self._read_checkpoint()
        except FpgaPluginError as error:
            self._report(error)
            return False
        if instance != self._ledger.kubelet_instance:
            return False
        self.problem = ""
        self._last_read = time.time()
        return True

    async def _read_checkpoint(self) -> Checkpoint:
        """Compare the ledger with kubelet's checkpoint (`Owners.read`)."""
        checkpoint = await self._owners.read()
        if not self._ledger.resource_claims_unknown:
            self._ledger.reconciled(self._owners.settled)
        return checkpoint

    async def _list(self, podresources: PodResourcesClient) -> None:
        """Ask kubelet which devices its pods hold; end what it lacked before, too."""
        ledger = self._ledger
        before = {one.device: ledger.activity[one.device] for one in ledger.pod_allocations()}
        instance = ledger.kubelet_instance
        try:
            listed = await podresources.snapshot()
        except FpgaPluginError as error:
            self._lacking.clear()
            self._report(error)
            return
        self._last_read = time.time()
        if instance != ledger.kubelet_instance:
            return
        held = {device for pod in listed.devices for device in pod.devices}
        lister = (instance, listed.instance)
        last = self._lacking if lister == self._lister else {}
        self._lister = lister
        self._lacking = {device: n for device, n in before.items() if device not in held}
        ended = [device for device, n in self._lacking.items() if last.get(device) == n]
        if ended or self._owners.doubtful:
            await self._settle(ended)
        else:
            self.problem, self._waiting = "", []

    async def _settle(self, ended: list[DeviceId]) -> None:
        """The Lists lack these devices; the rewritten checkpoint has the last word."""
        try:
            if not await self._rewritten():
                if ended != self._waiting:
                    log.info("kubelet has not rewritten its checkpoint yet", devices=ended)
                self.problem, self._waiting = "", ended  # it can be read
                return
            self._waiting = []
            checkpoint = await self._read_checkpoint()
            self._release([d for d in ended if not checkpoint.holders(d)])
        except NoSourceError as error:
            await self._settle_without(ended, error)
        except JournalError as error:  # nothing was learnt from these records: they are read again
            self._report(error)

    async def _rewritten(self) -> bool:
        """Have kubelet write its checkpoint; one that never writes any has no entries.

        Raises:
            NoSourceError: it cannot be read.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + REWRITE_WAIT
        now = stamp = await asyncio.to_thread(self._pods.stamp)
        self._link.resend()
        while loop.time() < deadline:
            now = await asyncio.to_thread(self._pods.stamp)
            if now is not None and now != stamp:
                return True
            await asyncio.sleep(REWRITE_POLL)
        return now is None and stamp is None

    async def _settle_without(self, ended: Collection[DeviceId], unreadable: NoSourceError) -> None:
        """End allocations without the checkpoint: another source says that the pod has ended."""
        pods = {one.device: one.pod for one in self._ledger.allocations_of(ended) if one.pod}
        over: set[PodUid] = set()
        problem = unreadable
        for pod in dict.fromkeys(pods.values()):
            try:
                if await self._pods.ended(pod):
                    over.add(pod)
            except NoSourceError as error:
                problem = NoSourceError(f"{unreadable.message}; {error.message}")
            if not self.answered:
                return  # another kubelet, which is not kept waiting
        gone = [device for device, pod in pods.items() if pod in over]
        if len(gone) < len(ended) or not ended:
            self._report(problem)
        elif self._is_new(problem):
            log.warning("kubelet's checkpoint cannot be read", error=str(problem))
        self._release(gone, solved=False)

    def _release(self, devices: Collection[DeviceId], *, solved: bool = True) -> None:
        """End the allocations of devices without a pod, if nothing happened to them meanwhile.

        `solved`: the problem with kubelet's records is over, unless an allocation cannot be ended.
        """
        for allocation in self._ledger.allocations_of(devices):
            device = allocation.device
            if self._lacking.get(device) != self._ledger.activity[device]:
                continue
            try:
                release(self._ledger, self._queue, allocation.resource, [device])
            except JournalError as error:
                solved = False
                if self._is_new(error):
                    log.warning(
                        "allocation cannot be ended",
                        device=device,
                        pod=allocation.pod,
                        error=str(error),
                        hint="it is tried again",
                    )
            else:
                self.released += 1
                log.info(
                    "kubelet no longer knows the allocation", device=device, pod=allocation.pod
                )
        if solved:
            self.problem = ""
