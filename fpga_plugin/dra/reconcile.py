"""Compares the ledger's claims with kubelet's record of them, whichever API serves.

It does so with each kubelet instance, before anything is scrubbed, and whenever the record changes.
It adopts a claim that the record names and the ledger lacks, unless, with DRA, the cgroups of all
its pods are known to be gone. It also adopts a device of a claim in force if a damaged journal lost
the device's row. Pods of a claim come and go without a call: the record names them, and a pod that
it no longer names is done with the claim. The reconciler looks for each driver name that a claim of
the ledger has, and for devices of present cards under any name: a claim does not change with the
settings.

If only the journal has a claim, the claim ends when none of its pods runs and, with DRA, the API
server says that it is over (deleted, another of its name, not allocated or elsewhere, unreserved).
The record alone is not enough: a wiped record is complete and empty. The API server is asked at
intervals only while there is such a claim. A claim that has ended keeps its row until the record
lacks it.

With the device plugin API kubelet ends no claim by itself, since no driver of its name is
registered. Its record cannot be read if its root directory is not mounted. Until it can be read,
claims keep their devices, and the rest is served.
"""

import asyncio
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

import structlog

from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import ClaimOwner
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.reconcile.leftovers import DevicePluginLeftovers
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.dra.claim import ClaimReader, ClaimRef, NoSuchClaimError
from fpga_plugin.dra.ends import ClaimEnds
from fpga_plugin.dra.files import ClaimFiles
from fpga_plugin.dra.names import device_name, devices_of, parse_device_name
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.host.watcher import Look, Watcher, hint_for
from fpga_plugin.ids import CardId, DeviceId
from fpga_plugin.kubernetes.cgroup import known_gone, known_idle
from fpga_plugin.kubernetes.kubelet.dra_record import (
    FILE_NAME,
    RecordedClaim,
    RecordUnreadableError,
    read_record,
)
from fpga_plugin.kubernetes.names import ClaimUid, PodUid

log = structlog.get_logger()

LOOK_SECONDS: Final = 30.0
"""Between two looks while a claim waits for its end."""

_FILE: Final = re.compile(re.escape(FILE_NAME))


class ClaimReconciler:
    """Compares the ledger's claims with kubelet's record.

    Args:
        operations: has the ledger, and pods' cgroups.
        queue: with DRA, synced once kubelet's record was read.
        ends: ends claims.
        files: for the container runtime.
        root: kubelet's root directory.
        driver: our name.
        claims: reads claims at the API server; None: the device plugin API serves.
        leftovers: with DRA, what pods have by the device plugin API.

    Attributes:
        problem: why kubelet's record cannot be read; empty while it can.
    """

    def __init__(
        self,
        operations: CardOperations,
        queue: CardQueue,
        ends: ClaimEnds,
        files: ClaimFiles,
        *,
        root: str,
        driver: str,
        claims: ClaimReader | None = None,
        leftovers: DevicePluginLeftovers | None = None,
    ) -> None:
        self._operations = operations
        self._ledger = operations.ledger
        self._queue = queue
        self._ends = ends
        self._files = files
        self._root = root
        self._driver = driver
        self._claims = claims
        self._leftovers = leftovers
        self._wake = asyncio.Event()
        self._lost: set[ClaimUid] = set()
        self._told: dict[ClaimUid, str] = {}
        self._waits = False
        self.problem = ""
        self._watcher = Watcher(self, name="dra-record", local=True)
        ends.doubted = lambda _: self._wake.set()
        files.learn = self.learn
        self._unsubscribe = self._ledger.subscribe(self._card_changed)

    def look(self, look: Look) -> None:
        """What is watched (`host.watcher.Target`)."""
        resolved, names = look.inside(self._root, _FILE)
        for name in names:
            look.file(resolved, name, name)

    def changed(self, _reported: str | None) -> None:
        """Kubelet wrote its record (`host.watcher.Target`)."""
        self._wake.set()

    def unwatched(self, error: OSError) -> None:
        """It is read at calls only (`host.watcher.Target`)."""
        log.warning(
            "cannot watch kubelet's record of claims",
            directory=self._root,
            error=error.strerror,
            hint=hint_for(error),
        )

    def kubelet_seen(self) -> None:
        """A kubelet instance registered the driver: its record is read before any work."""
        self._queue.unsync()
        self._wake.set()

    def _card_changed(self, _card: CardId | None) -> None:
        if self._ledger.unreconciled & self._ledger.cards.keys():
            self._wake.set()

    async def run(self) -> None:
        """Run until cancelled; with the device plugin API until no claim can have a device."""
        serves = self._claims is not None
        if serves:
            self._watcher.start()
            await self._watcher.ready()
        try:
            while True:
                self._wake.clear()
                read = await self.reconcile()
                left = self._ledger.claim_owners or self._ledger.resource_claims_unknown
                if not serves and read and not left:
                    return
                waits = self._waits or not read or not serves
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS if waits else None):
                        await self._wake.wait()
        finally:
            self._unsubscribe()
            self._watcher.close()

    async def reconcile(self) -> bool:
        """Look at the record once; returns whether it could be read."""
        before, calls = set(self._ledger.claim_owners), self._ends.calls.copy()
        seen = set(self._ledger.cards)
        try:
            self._ends.recorded = record = await self._read()
            self._ledger.dra.join({uid: one.pods for uid, one in record.items()})
            gone = await asyncio.to_thread(
                known_gone,
                self._operations.cgroups,
                {pod for uid in self._not_in_force(record) for pod in record[uid].pods},
            )
            if self._leftovers is not None and not await self._leftovers.look():
                self.problem = self._leftovers.problem
                return False
            others = self._not_in_force(record)
            stale = {uid for uid in others if record[uid].pods and record[uid].pods <= gone}
            adopted = self._adopt(record, stale, seen)
        except FpgaPluginError as error:
            self._report(error)
            return False
        self.problem = ""
        if self._claims is not None and not self._queue.synced:
            log.info("kubelet's record of claims read", claims=len(record))
            # Not before: of a claim that the journal lost the file is still needed, unless nobody
            # of whom kubelet knows can have it.
            unused = stale & self._not_in_force(record)
            kept = (self._ledger.claim_owners.keys() | record.keys()) - unused
            await asyncio.to_thread(self._files.cdi.keep, kept)
            self._queue.sync()
        self._waits = not adopted or (self._leftovers is not None and self._leftovers.waits)
        for uid in sorted(before):
            try:
                if uid in record:
                    await self._part(uid, record[uid].pods, calls[uid])
                elif (owner := self._ledger.claim_owners.get(uid)) is not None:
                    await self._end_if_over(owner, calls[uid])
            except FpgaPluginError as error:
                self._waits = True
                log.warning("claim cannot be ended", claim=uid, error=str(error))
        self._lost &= self._ledger.claim_owners.keys() - record.keys()
        return True

    def _not_in_force(self, record: Mapping[ClaimUid, RecordedClaim]) -> set[ClaimUid]:
        return {uid for uid in record if self._ledger.dra.in_force(uid) is None}

    def _report(self, error: FpgaPluginError) -> None:
        """Log each new reason once, not once a look."""
        if self.problem == str(error):
            return
        self.problem = str(error)
        if self._claims is not None:
            log.warning("kubelet's record of claims cannot be read", error=self.problem)
        else:
            log.warning(
                "ResourceClaims may still have devices, which are given to nobody",
                error=self.problem,
                claims=[one.full_name for one in self._ledger.claim_owners.values()],
                hint="start the plugin with FPGA_PLUGIN_MODE=dra until their pods are gone"
                " (docs/dra.md)",
            )

    async def _read(self) -> Mapping[ClaimUid, RecordedClaim]:
        """Claims that have devices of this plugin, or are about to get some.

        Raises:
            RecordUnreadableError: the users of claims are unknown.
        """
        path = os.path.join(self._root, FILE_NAME)
        if self._claims is None and not await asyncio.to_thread(os.path.exists, path):
            raise RecordUnreadableError(f"kubelet's record {path} is not there")
        drivers = {self._driver, *(one.driver for one in self._ledger.claim_owners.values())}
        cards = frozenset(self._ledger.cards)

        def ours(driver: str, devices: frozenset[str]) -> bool:
            return driver in drivers or any(card_of(one) in cards for one in devices_of(devices))

        return await asyncio.to_thread(read_record, self._root, ours)

    async def learn(self, uid: ClaimUid) -> None:
        """Learn of the pods of a claim, whose file is gone, by kubelet's record.

        One without processes waits for its Prepare: its containers cannot have started, and cannot
        start before. The claim may have more than the ledger knows, where that was not compared.

        Raises:
            FpgaPluginError: the record cannot be read, or what it says not be written.
        """
        if (one := (await self._read()).get(uid)) is not None:
            idle = await asyncio.to_thread(known_idle, self._operations.cgroups, one.pods)
            pods = one.pods - idle
            self._ledger.dra.join({uid: pods})
            unknown = [
                device
                for device in devices_of(one.devices)
                if card_of(device) in self._ledger.unreconciled and not self._has(uid, device)
            ]
            self._ledger.dra.left_by(unknown, pods)

    def _adopt(
        self,
        record: Mapping[ClaimUid, RecordedClaim],
        stale: set[ClaimUid],
        seen: Collection[CardId],
    ) -> bool:
        """Learn of claims that the journal lost; returns whether no device had to be left out.

        `stale`: those whose pods are gone. With the device plugin API, and of our driver where a
        journal in doubt has their end, they count if nobody else has their devices by now: a
        further pod of theirs would start without any call. `seen`: cards that were there before the
        record was read; of others it was not asked.

        Raises:
            JournalError: it cannot be written down.
        """
        ledger, ends = self._ledger, self._ends
        ends.over &= record.keys()  # kubelet writes down an end after it was answered
        self._told = {uid: why for uid, why in self._told.items() if uid in record}
        over = {*ends.over}
        if self._claims is not None:  # kubelet still ends those of the journal that are ours
            known = ledger.claim_owners.keys()
            over |= {uid for uid in stale if uid not in known or record[uid].driver != self._driver}
        refused = {
            name
            for uid in record
            if uid not in over
            for name in self._learn(record[uid])
            if uid not in stale
        }
        if not refused:  # else a later life, which may not see the record, would believe it
            ledger.dra.claims_read()
        if self._leftovers is None:
            return not refused  # the device plugin API has its own records to read
        # A device that cannot be adopted has an unknown owner: its card is kept back.
        back = {
            card
            for card in ledger.cards
            if any(name.startswith(device_name(DeviceId(card))) for name in refused)
        }
        ledger.keep_back(back)
        cards = (ledger.unreconciled & self._leftovers.settled).intersection(seen) - back
        ledger.reconciled(cards)
        for card in cards:
            self._queue.add(card)
        return not refused

    def _learn(self, one: RecordedClaim) -> set[str]:
        """Learn of a claim; returns the names of devices that cannot be adopted.

        Raises:
            JournalError: it cannot be written down.
        """
        ledger = self._ledger
        owner = ledger.claim_owners.get(one.uid)
        if owner is not None and owner.ended:
            # It may be in force again, if the journal is older.
            if ledger.unreconciled.isdisjoint(map(card_of, devices_of(one.devices))):
                return set()
            owner = None
        names = {*one.devices}
        if owner is not None:
            owner = self._grown(owner, one)
            names = {device_name(each) for each in owner.devices if not self._has(one.uid, each)}
        if not names:
            return set()  # all of it is known, or it is only about to be prepared
        try:
            ledger.dra.adopt_claim(owner or self._holder(one), one.pods)
        except JournalError:
            raise
        except (ValueError, FpgaPluginError) as error:
            if self._told.get(one.uid) != (why := str(error)):
                self._told[one.uid] = why
                log.warning("claim not adopted", claim=one.uid, error=why)
            return names
        log.warning("claim adopted", **ClaimRef.of(one).logged, pods=sorted(one.pods))
        return set()

    def _grown(self, owner: ClaimOwner, one: RecordedClaim) -> ClaimOwner:
        """A claim with what the record has of it on cards that were not compared yet.

        The journal may be older. Of other cards it is the journal that is newer.
        """
        more = {
            device: names
            for name, names in one.devices.items()
            for device in devices_of([name])
            if device not in owner.devices and card_of(device) in self._ledger.unreconciled
        }
        devices = (*owner.devices, *sorted(more))
        return replace(owner, devices=devices, requests={**owner.requests, **more})

    def _has(self, uid: ClaimUid, device: DeviceId) -> bool:
        """Whether the ledger has a device as the claim's; a damaged journal loses rows."""
        has = self._ledger.claim_owner_of(device)
        return device in self._ledger.allocations and has is not None and has.uid == uid

    def _holder(self, one: RecordedClaim) -> ClaimOwner:
        """A claim as the record has it.

        Raises:
            ValueError: a device has no name of ours.
        """
        devices = {parse_device_name(name): names for name, names in one.devices.items()}
        return ClaimOwner(
            uid=one.uid,
            namespace=one.namespace,
            name=one.name,
            devices=tuple(sorted(devices)),
            requests=devices,
            driver=one.driver,
            file=self._files.cdi.path(one.uid, one.driver),
        )

    async def _part(self, uid: ClaimUid, pods: Collection[PodUid], calls: int) -> None:
        """End the use of a claim by pods other than these; `calls`: before the look.

        Their tenancies end with their processes.

        Raises:
            JournalError: it cannot be written down.
        """
        if self._ends.calls[uid] == calls:
            self._ledger.dra.part(uid, pods)
        else:  # kubelet writes its record just before it calls: it is read once more
            self._wake.set()
        left = [one for one in self._ledger.dra.tenancies_of_claim(uid) if one.left]
        gone = [one for one in left if await self._operations.living([one]) is None]
        self._ledger.work.end_tenancies(gone)
        self._waits |= len(gone) < len(left)

    async def _end_if_over(self, owner: ClaimOwner, calls: int) -> None:
        """End a claim that kubelet's record lacks, if it is unused; `calls`: before the look.

        Raises:
            FpgaPluginError: not now: the journal or the claim's file cannot be written.
        """
        uid = owner.uid
        if not owner.ended:
            if uid not in self._lost:
                self._lost.add(uid)
                log.warning(
                    "kubelet's record lacks a claim",
                    **ClaimRef.of(owner).logged,
                    devices=list(owner.devices),
                    pods=sorted(self._ledger.pods_of(owner.devices)),
                    hint="its devices are kept until its pods are gone and, with"
                    " FPGA_PLUGIN_MODE=dra, the API server says that it is over",
                )
            if not await self._is_over(owner, calls):
                self._waits = True
                return
            await self._ends.end(uid)
            log.warning("claim ended without a call", **ClaimRef.of(owner).logged)
        self._waits |= not await self._ends.forget(uid)

    async def _is_over(self, owner: ClaimOwner, calls: int) -> bool:
        """Whether a claim that kubelet's record lacks is unused.

        If it is not, the pods that the API server no longer names either are done with it.

        Raises:
            FpgaPluginError: kubelet's record cannot be read, or the journal not be written.
        """
        uid, ledger = owner.uid, self._ledger
        if self._claims is not None:
            try:
                claim = await self._claims.get(ClaimRef.of(owner), owner.driver)
            except NoSuchClaimError:
                pass
            except FpgaPluginError as error:
                log.info("whether a claim is over is not known", claim=uid, error=str(error))
                return False
            else:
                if claim.pods or claim.others:
                    ledger.dra.join({uid: claim.pods})
                    if not claim.others:
                        await self._part(uid, claim.users, calls)
                    return False
        ledger.dra.part(uid, ())  # the API server's word, and the record's
        if await self._operations.living(ledger.dra.tenancies_of_claim(uid)) is not None:
            return False
        # Kubelet may have begun to prepare it in the meantime.
        return uid not in await self._read() and self._ends.calls[uid] == calls
