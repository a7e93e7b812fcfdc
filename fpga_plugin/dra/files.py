"""Keeps a claim's file for the container runtime only while its nodes lead where they did.

A container of a prepared claim starts again without any call of kubelet's: the runtime reads the
claim's file. So the file goes when the preparation no longer holds or the nodes lead elsewhere: no
container starts with another claim's region (invariant 10). The file comes back with the next
Prepare, or with the card if that was only not seen yet.

At the start the files are written again: they may have been lost. An adopted claim keeps its file,
but none is written for it: its region's contents are unknown (docs/architecture.md).

Files are written and removed in a thread. Meanwhile the claim may end, be allocated again, or be
prepared with other devices. So the ledger is asked again afterwards, until the file is what the
ledger says: an outdated file would let containers start with another claim's region.

Before a claim ends, or its preparation is withdrawn, its file goes and stays away while kubelet's
record is read (`withhold`): further pods of a prepared claim start without a call, and kubelet
writes them down before they do.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Final
from weakref import WeakValueDictionary

import structlog

from fpga_plugin.allocation.journal.records import ClaimOwner
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of
from fpga_plugin.dra.cdi import CdiFiles
from fpga_plugin.dra.claim import ClaimRef
from fpga_plugin.errors import FpgaPluginError, RefusedError
from fpga_plugin.ids import CardId
from fpga_plugin.kubernetes.names import ClaimUid

log = structlog.get_logger()

RETRY_SECONDS: Final = 30.0
"""Until what could not be written or removed is tried again."""


class ClaimFiles:
    """Writes and removes the claims' files for the container runtime.

    Args:
        ledger: knows the claims.
        cdi: writes and removes the files.

    Attributes:
        cdi: the same; it blocks.
        learn: learns of the pods of a claim whose containers may have started with its file.
    """

    def __init__(self, ledger: Ledger, cdi: CdiFiles) -> None:
        self._ledger = ledger
        self.cdi = cdi
        self.learn: Callable[[ClaimUid], Awaitable[None]] = _nothing
        self._locks = WeakValueDictionary[ClaimUid, asyncio.Lock]()
        self._missing = set(ledger.claim_owners)
        self._failing: set[ClaimUid] = set()
        self._changed: set[ClaimUid] = set()
        self._wake = asyncio.Event()
        ledger.subscribe(self._card_changed)

    def _card_changed(self, card: CardId | None) -> None:
        """The preparations of a card's claims may no longer hold."""
        if card is not None:
            owners = (
                self._ledger.claim_owner_of(one.device) for one in self._ledger.allocations_on(card)
            )
            self._changed |= {owner.uid for owner in owners if owner is not None}
        self._wake.set()

    async def begin(self) -> None:
        """Write the files of all claims that are as they were prepared.

        Of one that has ended the plugin may have died before its file was gone, and kubelet may
        never ask again.
        """
        await self._settle_all(self._ledger.claim_owners)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            changed, self._changed = self._changed, set()
            await self._settle_all(changed | self._failing)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS if self._failing else None):
                    await self._wake.wait()

    async def _settle_all(self, uids: Collection[ClaimUid]) -> None:
        for uid in tuple(uids):
            try:
                await self.settle(uid)
            except FpgaPluginError as error:
                if uid not in self._failing:
                    log.warning("claim's file not in order", claim=uid, error=str(error))
                self._failing.add(uid)
            else:
                self._failing.discard(uid)

    async def settle(self, uid: ClaimUid, *, again: bool = False) -> ClaimOwner | None:
        """Make a claim's file what the ledger says, until both agree.

        `again`: it is written although it should be there.

        Returns the claim as its file has it; None: it has no valid file.

        Raises:
            FpgaPluginError: the file cannot be written or removed, the journal not be written, or
                kubelet's record not be read.
        """
        async with self._lock(uid):
            return await self._settle(uid, again=again)

    def _lock(self, uid: ClaimUid) -> asyncio.Lock:
        """Nobody writes a claim's file while it is withheld."""
        return self._locks.setdefault(uid, asyncio.Lock())

    async def _settle(self, uid: ClaimUid, *, again: bool) -> ClaimOwner | None:
        ledger = self._ledger
        written: ClaimOwner | None = None
        content: object = None
        while True:
            owner = ledger.claim_owners.get(uid)
            if owner is None or ledger.dra.preparation_error(owner):
                if (stale := self._stale(owner) or written) is None:
                    return None  # it is being prepared, or was adopted, and may start again
                if not await self._dropped(stale):
                    return None
                written = None
                continue
            allocations = tuple(ledger.allocations[device] for device in owner.devices)
            now = (owner, allocations)
            if now == content or not (again or uid in self._missing):
                self._missing.discard(uid)
                return owner
            cards = {one.device: ledger.cards[card_of(one.device)] for one in allocations}
            await asyncio.to_thread(self.cdi.write, owner, allocations, cards)
            written, content = owner, now

    def _stale(self, owner: ClaimOwner | None) -> ClaimOwner | None:
        """A claim, if no container may start with the file that it may have."""
        if owner is None:
            return None
        # Of one that has ended another claim may have the devices by now.
        stale = (
            owner.ended
            or self._ledger.dra.is_prepared(owner)
            or self._ledger.dra.grant_error(owner)
        )
        return owner if stale else None

    async def _dropped(self, stale: ClaimOwner) -> bool:
        """Remove a file; returns whether its claim needs one again."""
        if (after := await self._withhold(stale)) is None:
            return False
        why = self._ledger.dra.preparation_error(after)
        if why and self._is_there(after):
            self._withdrawn(after, why)
            return False
        return not why  # what was not seen yet in this life may be as it was

    def _is_there(self, owner: ClaimOwner) -> bool:
        try:
            for device in owner.devices:
                self._ledger.obstacles.regions_of(device)
        except RefusedError:
            return False
        return True

    async def remove(self, uid: ClaimUid, owner: ClaimOwner | None) -> None:
        """No container starts with a claim's devices, whether the ledger has it or not.

        Raises:
            CdiError: the file may still be there.
        """
        path = self.cdi.path(uid) if owner is None else self.cdi.of(owner)
        await asyncio.to_thread(self.cdi.remove, path, uid)

    async def withdraw(self, owner: ClaimOwner, why: str) -> None:
        """Withdraw a preparation that no longer matches what the claim asks for.

        Raises:
            FpgaPluginError: as of `withhold`.
        """
        if (after := await self.withhold(owner)) is not None:
            self._withdrawn(after, why)

    async def withhold(self, owner: ClaimOwner) -> ClaimOwner | None:
        """Let no further container start with a claim, and learn of the pods whose containers did.

        In this order: a pod that starts with the file is in kubelet's record before. Returns the
        claim if it is prepared; what the caller does then, it does at once.

        Raises:
            FpgaPluginError: the file may still be there, the record cannot be read, or what it says
                not be written.
        """
        async with self._lock(owner.uid):
            return await self._withhold(owner)

    async def _withhold(self, owner: ClaimOwner) -> ClaimOwner | None:
        uid, ledger = owner.uid, self._ledger
        self._missing.add(uid)  # first: the thread goes on even if nobody waits any more
        await self.remove(uid, owner)
        await self.learn(uid)
        after = ledger.claim_owners.get(uid)
        if after is not None and ledger.dra.is_prepared(after):
            return after
        self._missing.discard(uid)
        return None

    def _withdrawn(self, owner: ClaimOwner, why: str) -> None:
        self._ledger.dra.unprepared(owner.uid)
        log.warning(
            "claim withdrawn",
            **ClaimRef.of(owner).logged,
            devices=list(owner.devices),
            pods=sorted(self._ledger.pods_of(owner.devices)),
            reason=why,
            hint="no container starts with what it had: delete the pods that use it",
        )


async def _nothing(_uid: ClaimUid) -> None:
    """Until somebody can read kubelet's record."""
