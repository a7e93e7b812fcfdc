"""Compares the ledger's claims with kubelet's record of them.

With each life of kubelet, before anything is scrubbed, and whenever the record changes: a claim
that the record names and the ledger lacks is adopted, whatever the plugin knew before, unless the
cgroups of all its pods are known to be gone. So is a device of a claim in force whose own row a
damaged journal lost. A claim that has ended keeps its row until the record lacks it. Pods of a
claim come and go without a call: the record names them, and those that it names no longer are done
with the claim. A claim that only the journal has may have been lost by kubelet, which then never
ends it.

A claim that kubelet lost ends when the API server says that it is over (deleted, another of its
name, not allocated or elsewhere, reserved for nobody) and no pod of it runs. Only while there is
such a claim is anything asked at intervals. Of a claim that has ended, and of which kubelet will
not ask again, nothing is kept once its regions are clean.
"""

import asyncio
import re
from collections.abc import Collection, Mapping
from typing import Final

import structlog

from fpga_plugin.dra.cdi import CdiFiles
from fpga_plugin.dra.claim import AllocatedElsewhereError, ClaimRef, Claims, NoSuchClaimError
from fpga_plugin.dra.life import ClaimLife
from fpga_plugin.dra.names import device_name
from fpga_plugin.dra.record import ClaimRecord, devices_of
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import ClaimUid
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.ledger.records import Holder
from fpga_plugin.pods.dra_record import FILE_NAME, RecordedClaim
from fpga_plugin.process.watcher import Look, Watcher, hint_for
from fpga_plugin.regions.operations import CardOperations
from fpga_plugin.regions.queue import CardQueue
from fpga_plugin.stock.leftovers import DevicePluginLeftovers

log = structlog.get_logger()

LOST_SECONDS: Final = 30.0
"""Between two questions about a claim that kubelet lost."""

_FILE: Final = re.compile(re.escape(FILE_NAME))


class ClaimReconciler:
    """Belongs to the event loop.

    Args:
        operations: has the ledger, and pods' cgroups.
        queue: is in step with kubelet once its record was read.
        life: ends claims.
        claims: reads claims at the API server.
        record: kubelet's.
        leftovers: what pods have by the device plugin API.
        files: for the container runtime.
        root: kubelet's root directory.

    Attributes:
        problem: why kubelet's record cannot be read; empty while it can.
    """

    def __init__(
        self,
        operations: CardOperations,
        queue: CardQueue,
        life: ClaimLife,
        claims: Claims,
        *,
        record: ClaimRecord,
        leftovers: DevicePluginLeftovers,
        files: CdiFiles,
        root: str,
    ) -> None:
        self._operations = operations
        self._ledger: Ledger = operations.ledger
        self._queue = queue
        self._life = life
        self._claims = claims
        self._files = files
        self._root = root
        self._record = record
        self._leftovers = leftovers
        self._wake = asyncio.Event()
        self._lost: set[ClaimUid] = set()
        self._over: set[ClaimUid] = set()
        self._parting = False
        self.problem = ""
        self._watcher = Watcher(self, name="dra-record", local=True)
        life.doubted = self._doubt
        self._unsubscribe = self._ledger.subscribe(lambda _: self._card_changed())

    def look(self, look: Look) -> None:
        """What is watched (`process.watcher.Target`)."""
        resolved, names = look.inside(self._root, _FILE)
        for name in names:
            look.file(resolved, name, name)

    def changed(self, _reported: str | None) -> None:
        """Kubelet wrote its record (`process.watcher.Target`)."""
        self._wake.set()

    def unwatched(self, error: OSError) -> None:
        """It is read at calls only (`process.watcher.Target`)."""
        log.warning(
            "cannot watch kubelet's record of claims",
            directory=self._root,
            error=error.strerror,
            hint=hint_for(error),
        )

    def kubelet_seen(self) -> None:
        """A life of kubelet registered the driver: nothing is touched before its record is read."""
        self._queue.unsync()
        self._wake.set()

    def _doubt(self, _uid: ClaimUid) -> None:
        """Somebody waits for a claim's end."""
        self._wake.set()

    def _card_changed(self) -> None:
        if self._over or self._ledger.unreconciled & self._ledger.cards.keys():
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        self._watcher.start()
        await self._watcher.ready()
        try:
            while True:
                self._wake.clear()
                read = await self._round()
                waiting = bool(
                    self._lost or self._over or self._parting or self._leftovers.waits or not read
                )
                try:
                    async with asyncio.timeout(LOST_SECONDS if waiting else None):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            self._unsubscribe()
            self._watcher.close()

    async def _round(self) -> bool:
        """One look at the record; returns whether it could be read."""
        before, calls = set(self._ledger.holders), self._life.calls.copy()
        try:
            record = await self._record.read()
            gone = await self._record.gone(record)
            if not await self._leftovers.look():
                self.problem = self._leftovers.problem
                return False
            self._adopt(record, gone)
        except FpgaPluginError as error:
            if self.problem != str(error):
                self.problem = str(error)
                log.warning("kubelet's record of claims cannot be read", error=str(error))
            return False
        self.problem = ""
        if not self._queue.synced:
            log.info("kubelet's record of claims read", claims=len(record))
            # Not before: of a claim that the journal lost the file is still needed, unless nobody
            # of whom kubelet knows can have it.
            known = {uid for uid, one in self._ledger.holders.items() if not one.ended}
            await asyncio.to_thread(self._files.keep, known | (record.keys() - gone))
            self._queue.sync()
        await self._part(record, calls)
        await self._look_for_lost(before, record)
        self._forget(before - record.keys())
        return True

    async def _part(
        self, record: Mapping[ClaimUid, RecordedClaim], calls: Mapping[ClaimUid, int]
    ) -> None:
        """Pods that the record names no longer are done with their claims.

        What is kept of them ends with their processes.
        """
        self._parting = False
        try:
            for uid, one in record.items():
                if self._life.calls[uid] == calls[uid]:
                    self._ledger.resource_claims.part(uid, one.pods)
                else:  # kubelet writes its record just before it calls: it is read once more
                    self._wake.set()
                self._parting |= await self._record.end_gone(uid)
        except FpgaPluginError as error:
            self._parting = True
            log.warning("pods of claims cannot be forgotten", error=str(error))

    def _adopt(self, record: Mapping[ClaimUid, RecordedClaim], gone: Collection[ClaimUid]) -> None:
        """Learn of pods, and of claims that the journal lost; not of those that are `gone`.

        Raises:
            JournalError: it cannot be written down.
        """
        ledger, life = self._ledger, self._life
        cards = ledger.unreconciled & self._leftovers.settled
        life.over &= record.keys()
        life.unadopted = {uid: life.unadopted[uid] for uid in life.over}
        for uid, one in record.items():
            if uid in life.over:
                continue  # its end was told, and kubelet writes that down after the answer
            holder = ledger.holders.get(uid)
            names = {*one.devices}
            if holder is not None:
                if holder.ended:
                    continue
                ledger.resource_claims.join(uid, one.pods)
                # What a damaged journal lost of it: a holder and its claims are written as one.
                names = {device_name(d) for d in holder.devices if d not in ledger.claims}
            if not names:
                continue  # all of it is known, or it is only about to be prepared
            if holder is None and uid in gone:
                life.unadopted[uid] = tuple(devices_of(names))  # its end waits until they are clean
                continue
            try:
                adopted = self._record.holder(one) if holder is None else holder
                ledger.resource_claims.adopt_holder(adopted, one.pods)
            except (ValueError, FpgaPluginError) as error:
                # Its card stays back: who has it is not known.
                log.warning("claim not adopted", claim=uid, error=str(error))
                cards -= {card for card in cards if any(_of_card(name, card) for name in names)}
                life.unadopted[uid] = tuple(devices_of(names))
            else:
                log.warning("claim adopted", **ClaimRef.of(one).logged, pods=sorted(one.pods))
        ledger.resource_claims.claims_read()
        ledger.allocations.reconciled(cards)
        for card in cards:
            self._queue.add(card)

    async def _look_for_lost(
        self, before: set[ClaimUid], record: Mapping[ClaimUid, RecordedClaim]
    ) -> None:
        """Claims that kubelet never ends, because it knows nothing of them."""
        holders = self._ledger.holders
        # One that we ended, whose file could not be removed, stays one of them until it can.
        lost = {
            uid
            for uid in before & holders.keys() - record.keys()
            if not holders[uid].ended or uid in self._lost
        }
        for uid in lost - self._lost:
            log.warning(
                "kubelet's record lacks a claim",
                **ClaimRef.of(holders[uid]).logged,
                devices=list(holders[uid].devices),
                pods=sorted(self._ledger.pods_of(holders[uid].devices)),
                hint="its devices are kept until the API server says that it is over and its pods"
                " are gone",
            )
        self._lost = lost
        for uid in sorted(lost):
            try:
                await self._end_if_over(uid)
            except FpgaPluginError as error:
                log.warning("claim cannot be ended", claim=uid, error=str(error))

    def _forget(self, unknown: set[ClaimUid]) -> None:
        """Ended claims that kubelet does not know: it has no answer to wait for."""
        holders = self._ledger.holders
        ended = {uid for uid in unknown & holders.keys() if holders[uid].ended} - self._lost
        try:
            for uid in sorted(ended):
                self._life.forget(uid)
        except FpgaPluginError as error:
            log.warning("ended claims stay in the journal", claims=sorted(ended), error=str(error))
        self._over = ended & holders.keys()

    async def _end_if_over(self, uid: ClaimUid) -> None:
        """End a claim that kubelet's record lacks, if nobody uses it.

        Raises:
            FpgaPluginError: not now: the journal or the claim's file cannot be written.
        """
        holder = self._ledger.holders.get(uid)
        if holder is None or not (holder.ended or await self._is_over(holder)):
            return
        if not holder.ended:
            log.warning("claim ended without a call", **ClaimRef.of(holder).logged)
        await self._life.end(uid)
        self._lost.discard(uid)

    async def _is_over(self, holder: Holder) -> bool:
        """Whether nobody uses a claim that kubelet's record lacks.

        Raises:
            FpgaPluginError: kubelet's record cannot be read, or the journal not be written.
        """
        try:
            claim = await self._claims.get(ClaimRef.of(holder), holder.driver)
        except (NoSuchClaimError, AllocatedElsewhereError):
            pass
        except FpgaPluginError as error:
            log.info("whether a claim is over is not known", claim=holder.uid, error=str(error))
            return False
        else:
            if claim.reserved:
                self._ledger.resource_claims.join(holder.uid, claim.pods)
                return False
        self._ledger.resource_claims.part(holder.uid, ())  # the API server's word, and the record's
        if (
            await self._operations.living(
                self._ledger.resource_claims.tenancies_of_holder(holder.uid)
            )
            is not None
        ):
            return False
        # Kubelet may have begun to prepare it in the meantime.
        now = await self._record.read()
        return holder.uid not in now


def _of_card(device: str, card: str) -> bool:
    return device.startswith(card.replace(".", "-"))
