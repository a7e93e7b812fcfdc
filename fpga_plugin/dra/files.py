"""Which claims have their file for the container runtime: those whose nodes lead where they did.

A container of a prepared claim starts again without any call of kubelet's: the runtime reads the
claim's file. So the file goes when what was prepared is no longer there, or its nodes lead
elsewhere, and no container starts with another claim's region (invariant 10). It comes back with
the next Prepare; of a card that was only not seen yet, with the card.

At the start the files are written again: they may have been lost. That of a claim that was adopted
stays, and none is written: what its region holds is not known (docs/architecture.md).

Files are written and removed in a thread. Meanwhile the claim may end, be allocated again, or be
prepared with other devices. So the ledger is asked again afterwards, until the file is what the
ledger says: a file that nobody answers for any more would let containers start with what became
another claim's.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Final

import structlog

from fpga_plugin.allocation.journal.records import Holder
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.dra.cdi import CdiFiles
from fpga_plugin.dra.claim import ClaimRef
from fpga_plugin.errors import FpgaPluginError, RefusedError
from fpga_plugin.ids import CardId, ClaimUid

log = structlog.get_logger()

RETRY_SECONDS: Final = 30.0
"""Until what could not be written or removed is tried again."""


class ClaimFiles:
    """Belongs to the event loop.

    Args:
        ledger: who has what.
        cdi: reads and writes the files.
    """

    def __init__(self, ledger: Ledger, cdi: CdiFiles) -> None:
        self._ledger = ledger
        self._cdi = cdi
        self._missing = {
            one.uid for one in ledger.holders.values() if ledger.resource_claims.is_prepared(one)
        }
        self._failing: set[ClaimUid] = set()
        self._changed: set[ClaimUid] = set()
        self._wake = asyncio.Event()
        ledger.subscribe(self._card_changed)

    def path(self, uid: ClaimUid, driver: str = "") -> str:
        """Where the file of a claim is that is allocated now, under our name or a former one."""
        return self._cdi.path(uid, driver)

    def _card_changed(self, card: CardId | None) -> None:
        """The claims of a card may not be as they were prepared any more."""
        if card is not None:
            holders = (self._ledger.holder_of(one.device) for one in self._ledger.claims_on(card))
            self._changed |= {holder.uid for holder in holders if holder is not None}
        self._wake.set()

    async def begin(self) -> None:
        """Write the files of all claims that are as they were prepared.

        Of one that has ended the plugin may have died before its file was gone, and kubelet may
        never ask again.
        """
        await self._settle_all(self._ledger.holders)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            changed, self._changed = self._changed, set()
            self._missing &= self._ledger.holders.keys()
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

    async def settle(self, uid: ClaimUid, *, anew: bool = False) -> Holder | None:
        """Make a claim's file what the ledger says, until both agree.

        `anew`: it is written although it should be there.

        Returns the claim as its file has it; None: it has none that anybody answers for.

        Raises:
            FpgaPluginError: the file cannot be written or removed, or the journal not be written.
        """
        ledger = self._ledger
        written: Holder | None = None
        content: object = None
        while True:
            holder = ledger.holders.get(uid)
            if holder is None or ledger.resource_claims.fallen(holder):
                if (stale := self._stale(holder) or written) is None:
                    return None  # it is being prepared, or was adopted, and may start again
                if not await self._dropped(stale):
                    return None
                written = None
                continue
            claims = tuple(ledger.claims[device] for device in holder.devices)
            # Pods may have come to it, of which the file says nothing.
            now = holder.requests, holder.file, [(claim.device, claim.grants) for claim in claims]
            if now == content or (content is None and not anew and uid not in self._missing):
                self._missing.discard(uid)
                return holder
            await asyncio.to_thread(self._cdi.write, holder, claims)
            written, content = holder, now

    def _stale(self, holder: Holder | None) -> Holder | None:
        """A claim, if no container may start with the file that it may have."""
        if holder is None:
            return None
        stale = (
            holder.ended
            or self._ledger.resource_claims.is_prepared(holder)
            or self._ledger.resource_claims.misled(holder)
        )
        return holder if stale else None

    async def _dropped(self, stale: Holder) -> bool:
        """Remove a file; returns whether its claim needs one again."""
        ledger, uid = self._ledger, stale.uid
        await self.remove(uid, stale)
        self._missing.discard(uid)
        after = ledger.holders.get(uid)
        if after is None or not ledger.resource_claims.is_prepared(after):
            return False
        why = ledger.resource_claims.fallen(after)
        if why and self._is_there(after):
            self._withdrawn(after, why)
            return False
        self._missing.add(uid)  # what was not seen yet in this life may be as it was
        return not why

    def _is_there(self, holder: Holder) -> bool:
        try:
            for device in holder.devices:
                self._ledger.obstacles.regions_of(device)
        except RefusedError:
            return False
        return True

    async def remove(self, uid: ClaimUid, holder: Holder | None) -> None:
        """No container starts with a claim's devices, whether the ledger has it or not.

        Raises:
            CdiError: the file may still be there.
        """
        path = self._cdi.path(uid) if holder is None else self._cdi.of(holder)
        await asyncio.to_thread(self._cdi.remove, path)

    async def withdraw(self, holder: Holder, why: str) -> None:
        """What was prepared for a claim is no longer what it asks for.

        Raises:
            FpgaPluginError: the file cannot be removed, or the journal not be written.
        """
        await self.remove(holder.uid, holder)
        after = self._ledger.holders.get(holder.uid)
        if after is not None and self._ledger.resource_claims.is_prepared(after):
            self._withdrawn(after, why)

    def _withdrawn(self, holder: Holder, why: str) -> None:
        self._ledger.resource_claims.unprepared(holder.uid)
        log.warning(
            "claim withdrawn",
            **ClaimRef.of(holder).logged,
            devices=list(holder.devices),
            pods=sorted(self._ledger.pods_of(holder.devices)),
            reason=why,
            hint="no container starts with what it had: delete the pods that use it",
        )

    async def keep(self, uids: Collection[ClaimUid]) -> None:
        """Remove the files of all claims but these."""
        await asyncio.to_thread(self._cdi.keep, uids)
