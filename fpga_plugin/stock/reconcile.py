"""Reconcile: compare the ledger with kubelet's own records.

Twofold. At the start of each of kubelet's lives nothing is scrubbed until its records were read
once: that answer syncs the queue of cards. After that, while anything is owned, kubelet is asked at
intervals which devices its pods still hold, and a claim that it no longer knows ends: after two
Lists in a row, both begun after the claim's last Allocate or PreStart and in one epoch, and a
checkpoint rewritten after the second, that all lack the device. Where the checkpoint cannot be
read, a source of pods has to say that the pod is gone or has ended. Whatever else cannot be read
releases nothing. With nothing owned nothing is polled. Nor is anything while kubelet streams its
pods (`pods/podwatch`) and every owner is one of them: the end of such a pod is the reason to ask.

A claim that cannot be ended (a full disk) and a kubelet directory that is away are reported and
tried again: they must not end the daemon.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from fpga_plugin.errors import FpgaPluginError, NoSourceError
from fpga_plugin.ids import CardId, DeviceId, PodUid, ResourceName
from fpga_plugin.ledger.journal import JournalError
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.pods.checkpoint import Checkpoint
from fpga_plugin.pods.directory import PodDirectory
from fpga_plugin.pods.podresources import PodList, PodResourcesClient
from fpga_plugin.pods.podwatch import PodWatch
from fpga_plugin.regions.link import Link
from fpga_plugin.regions.queue import CardQueue
from fpga_plugin.regions.release import release
from fpga_plugin.stock.adoption import Adoption
from fpga_plugin.stock.allocatable import AllocatableCheck
from fpga_plugin.stock.environment import StockEnvironment
from fpga_plugin.stock.missed_prestarts import MissedPreStarts
from fpga_plugin.stock.owners import Owners

log = structlog.get_logger()

NEEDED_LISTS = 2
"""Lists in a row that must lack a device before its claim can end."""

REWRITE_WAIT = 1.0
"""Seconds that kubelet gets to rewrite its checkpoint after a list was sent again."""

REWRITE_POLL = 0.02
"""Seconds between two looks at the checkpoint's identity while waiting for that."""


@dataclass(frozen=True, slots=True)
class _Absence:
    """How often in a row a claimed device was missing from kubelet's List."""

    activity: int
    epoch: tuple[str, str]
    count: int


class Reconciler:
    """Belongs to the event loop; is told of kubelet's lives (`KubeletLives`).

    Args:
        ledger: whose claims end.
        queue: is in step with kubelet once its records were read, until another kubelet begins. Its
            interval is that of kubelet's Lists, too.
        link: sends the lists to kubelet again, which makes it rewrite its checkpoint.
        pods: kubelet's records. Where FPGA_PLUGIN_PODRESOURCES_SOCKET is empty, an open
            ListAndWatch stream is the answer that syncs the queue, and nothing is polled.
        owners: learns whose claims these are from each life's first answer.
        adoption: makes the claims that kubelet's records name and the ledger lacks.
        envs: forgets with each life of kubelet which container started last.
        missed: looks for containers that started without PreStart.
        pods_socket: of kubelet's Pods API; None: it is not asked which pods live.

    Attributes:
        released: how many claims ended because the records no longer show them.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        queue: CardQueue,
        link: Link,
        pods: PodDirectory,
        owners: Owners,
        adoption: Adoption,
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
        self._adoption = adoption
        self._allocatable = (
            None if pods.podresources is None else AllocatableCheck(link, pods.podresources)
        )
        self._interval = queue.interval
        self._answered = False
        self._streaming = False
        self._wake = asyncio.Event()
        self._absences: dict[DeviceId, _Absence] = {}
        self._said = ""
        self._waiting: list[DeviceId] | None = None
        self._last_read = 0.0
        self._adopted = 0  # claims that kubelet's records named and the ledger lacked
        self.released = 0
        self.watch = None if pods_socket is None else PodWatch(pods_socket, self._wake.set)
        self._unsubscribe = ledger.subscribe(self._card_changed)

    def kubelet_epoch(self, epoch: str) -> None:
        """A life of kubelet began or was found; of another one, what is in use is not known yet.

        Raises:
            JournalError: it is not written yet, and holds.
        """
        if epoch == self._ledger.epoch:
            return
        log.info("a new kubelet process was found", epoch=epoch)
        self._answered = False
        self._streaming = False
        self._absences.clear()
        self._envs.new_kubelet()
        self._owners.new_kubelet()
        if self._allocatable is not None:
            self._allocatable.new_kubelet()
        self._missed.new_kubelet()
        self._queue.unsync()
        self._wake.set()
        # Last: it holds even where it cannot be written.
        self._ledger.kubelet_epoch(epoch)

    def stream_opened(self, resource: ResourceName) -> None:
        """Kubelet talks to us."""
        self._streaming = True
        self._missed.stream_opened(resource)
        self._changed()

    def _card_changed(self, card: CardId | None) -> None:
        if card is not None:
            self._adoption.card_changed(card)
        self._changed()

    def _changed(self) -> None:
        if self._allocatable is not None:
            self._allocatable.changed()
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._wake.clear()
                if not self._streaming:
                    await self._wake.wait()
                elif not self._answered:
                    if not await self._first_answer():
                        await asyncio.sleep(self._interval)
                else:
                    await self._compare_records()
        finally:
            self._unsubscribe()
            self._missed.close()

    async def _compare_records(self) -> None:
        """Once, and the wait until there is reason to do it again."""
        # Where the records of a new card cannot be read, others' claims may still end.
        unread = self._adoption.new_cards and not await self._read_records()
        if self.watch is not None and self._ledger.pod_claims():
            self.watch.want()
        pending = self._adoption.doubtful or (
            self._ledger.pod_claims() and not self._told_by_kubelet()
        )
        if self._podresources is not None and pending:
            await self._round(self._podresources)
            await self._compare_lists()
            await asyncio.sleep(self._interval)
        elif self._adoption.doubtful:
            await self._settle([])
            await asyncio.sleep(self._interval)
        elif self._allocatable is not None and self._allocatable.due:
            await asyncio.sleep(self._interval)
            await self._compare_lists()
        elif unread:
            await asyncio.sleep(self._interval)
        else:
            await self._wake.wait()

    def _told_by_kubelet(self) -> bool:
        """Whether kubelet will tell by itself when any of the claims may have ended."""
        if self.watch is None or self._podresources is None:
            return False
        return all(
            claim.pod is not None and self.watch.lives(claim.pod)
            for claim in self._ledger.pod_claims()
        )

    @property
    def last_read(self) -> float:
        """Unix time up to which kubelet's records are known; 0: they were never read."""
        if (
            self.watch is not None
            and self._last_read
            and self._answered
            and self._ledger.pod_claims()
            and self._told_by_kubelet()
        ):
            # Not now: an end that happened since may have been dropped on its way.
            return max(self._last_read, self.watch.told_at)
        return self._last_read

    async def _compare_lists(self) -> None:
        if self._allocatable is not None and self._allocatable.due:
            await self._allocatable.look()

    @property
    def problem(self) -> str:
        """Why kubelet's records cannot be read; empty while they can."""
        return self._said

    @property
    def answered(self) -> bool:
        """Whether the present kubelet has told what is in use: before that nothing is scrubbed."""
        return self._answered

    def _report(self, error: FpgaPluginError) -> None:
        """Once for each new reason, not once a try."""
        if self._said != str(error):
            self._said = str(error)
            log.warning("kubelet's records cannot be read: nothing is released", error=str(error))

    async def _first_answer(self) -> bool:
        epoch = self._ledger.epoch
        adopted = self._adopted
        if not await self._read_records():
            return False
        self._answered = True
        log.info("kubelet's records read", claims=len(self._ledger.claims), epoch=epoch)
        self._queue.sync()
        if self._adopted == adopted:  # else nobody knows who was served
            self._missed.look()
        return True

    async def _read_records(self) -> bool:
        """Learn from kubelet's records who has the cards; returns whether they could be read."""
        epoch = self._ledger.epoch
        try:
            if self._podresources is not None:
                await self._podresources.snapshot()
            unknown, before = self._owners.unknown(), self._adoption.before()
            checkpoint = await self._pods.checkpoint()
            if epoch != self._ledger.epoch:
                return False
            self._owners.learn(unknown, checkpoint)
            await self._adopt(checkpoint, before)
            if epoch != self._ledger.epoch:
                return False
        except FpgaPluginError as error:
            self._report(error)
            return False
        self._said = ""
        self._last_read = time.time()
        return True

    async def _adopt(self, checkpoint: Checkpoint, before: Mapping[DeviceId, int]) -> None:
        self._adopted += await self._adoption.adopt(checkpoint, before)
        if not self._ledger.claims_unknown:
            self._ledger.reconciled(self._adoption.settled)

    async def _round(self, podresources: PodResourcesClient) -> None:
        ledger = self._ledger
        before = {one.device: ledger.activity[one.device] for one in ledger.pod_claims()}
        epoch = ledger.epoch
        try:
            listed = await podresources.snapshot()
        except FpgaPluginError as error:
            self._absences.clear()
            self._report(error)
            return
        self._last_read = time.time()
        if epoch != ledger.epoch:
            self._absences.clear()
            return
        self._count(before, listed)
        ended = [d for d, absence in self._absences.items() if absence.count >= NEEDED_LISTS]
        if ended or self._adoption.doubtful:
            await self._settle(ended)
        else:
            self._said, self._waiting = "", None

    def _count(self, before: dict[DeviceId, int], listed: PodList) -> None:
        held = {device for pod in listed.devices for device in pod.devices}
        epoch = (self._ledger.epoch, listed.epoch)
        absences: dict[DeviceId, _Absence] = {}
        for device, activity in before.items():
            if device in held or device not in self._ledger.claims:
                continue
            last = self._absences.get(device)
            again = last is not None and (last.activity, last.epoch) == (activity, epoch)
            count = last.count + 1 if again and last is not None else 1
            if self._ledger.activity[device] == activity:
                absences[device] = _Absence(activity, epoch, count)
        self._absences = absences

    async def _settle(self, ended: list[DeviceId]) -> None:
        """The Lists lack these devices; the rewritten checkpoint has the last word."""
        try:
            before = self._adoption.before()
            checkpoint = await self._fresh_checkpoint(ended)
            if checkpoint is not None:
                self._waiting = None
                await self._adopt(checkpoint, before)
                if self._release_all([d for d in ended if not checkpoint.holders(d)]):
                    self._said = ""
        except NoSourceError as error:
            await self._settle_without(ended, error)
        except JournalError as error:  # nothing was learnt from these records: they are read again
            self._report(error)

    async def _fresh_checkpoint(self, ended: list[DeviceId]) -> Checkpoint | None:
        """The checkpoint as kubelet wrote it just now; None: it has not.

        Raises:
            NoSourceError: it cannot be read.
        """
        stamp = await asyncio.to_thread(self._pods.stamp)
        self._link.resend()
        if await self._rewritten(stamp):
            return await self._pods.checkpoint()
        if ended != self._waiting:
            log.info("kubelet has not rewritten its checkpoint yet", devices=ended)
        self._said, self._waiting = "", ended  # it can be read
        return None

    async def _settle_without(self, ended: Sequence[DeviceId], unreadable: NoSourceError) -> None:
        """The checkpoint cannot be read: whose pod is gone or has ended is known elsewhere."""
        claims = [claim for device in ended if (claim := self._ledger.claims.get(device))]
        told: dict[PodUid, bool] = {}
        problem = unreadable
        for pod in dict.fromkeys(claim.pod for claim in claims):
            if pod is None:
                continue
            try:
                told[pod] = await self._pods.ended(pod)
            except NoSourceError as error:
                problem = NoSourceError(f"{unreadable.message}; {error.message}")
            if not self._answered:
                return  # another kubelet, which is not kept waiting
        gone = [claim.device for claim in claims if claim.pod is not None and told.get(claim.pod)]
        if len(gone) < len(ended) or not ended:
            self._report(problem)
        elif self._said != str(problem):
            self._said = str(problem)
            log.warning("kubelet's checkpoint cannot be read", error=str(problem))
        self._release_all(gone)

    def _release_all(self, devices: Sequence[DeviceId]) -> bool:
        """End the claims of devices that nobody has, unless something happened to them meanwhile.

        Returns False where one cannot be ended: its device is asked about again.
        """
        all_ended = True
        for device in devices:
            claim, absence = self._ledger.claims.get(device), self._absences.get(device)
            if claim is None or absence is None:  # the latter with another kubelet's life
                continue
            if self._ledger.activity[device] != absence.activity:
                continue
            try:
                release(self._ledger, self._queue, claim.resource, [device])
            except JournalError as error:
                all_ended = False
                if self._said != str(error):
                    self._said = str(error)
                    log.warning(
                        "claim cannot be ended",
                        device=device,
                        pod=claim.pod,
                        error=str(error),
                        hint="it is tried again",
                    )
            else:
                self.released += 1
                log.info("kubelet no longer knows the claim", device=device, pod=claim.pod)
        return all_ended

    async def _rewritten(self, stamp: object) -> bool:
        """Whether kubelet wrote its checkpoint; one that never writes any has no entries."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + REWRITE_WAIT
        now: object = stamp
        while loop.time() < deadline:
            now = await asyncio.to_thread(self._pods.stamp)
            if now is not None and now != stamp:
                return True
            await asyncio.sleep(REWRITE_POLL)
        return now is None and stamp is None
