"""Which claims have their file for the container runtime: those whose nodes lead where they did.

A container of a prepared claim starts again without any call of kubelet's: the runtime reads the
claim's file. So the file goes when what was prepared is no longer there, or its nodes lead
elsewhere, and no container starts with another claim's region (invariant 10). It comes back with
the next Prepare; of a card that was only not seen yet, with the card.

At the start the files are written anew: they may have been lost. That of a claim that was adopted
stays, and none is written: what its region holds is not known (docs/architecture.md).
"""

import asyncio
from typing import Final

import structlog

from fpga_plugin.dra.cdi import CdiFiles
from fpga_plugin.dra.claim import ClaimRef
from fpga_plugin.dra.written import write_file
from fpga_plugin.errors import FpgaPluginError, RefusedError
from fpga_plugin.ids import CardId, ClaimUid
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.ledger.records import Holder

log = structlog.get_logger()

RETRY_SECONDS: Final = 30.0
"""Until what could not be written or removed is tried again."""


class KeptFiles:
    """Belongs to the event loop.

    Args:
        ledger: who has what.
        files: for the container runtime.
    """

    def __init__(self, ledger: Ledger, files: CdiFiles) -> None:
        self._ledger = ledger
        self._files = files
        self._missing = {
            one.uid for one in ledger.holders.values() if ledger.resource_claims.is_prepared(one)
        }
        self._failing: set[ClaimUid] = set()
        self._changed: set[ClaimUid] = set()
        self._wake = asyncio.Event()
        ledger.subscribe(self._card_changed)

    def _card_changed(self, card: CardId | None) -> None:
        """The claims of a card may not be as they were prepared any more."""
        ledger = self._ledger
        devices = () if card is None else [claim.device for claim in ledger.claims_on(card)]
        for device in devices:
            if (holder := ledger.holder_of(device)) is not None:
                self._changed.add(holder.uid)
        self._wake.set()

    async def begin(self) -> None:
        """Write the files of all claims that are as they were prepared.

        Of one that has ended the plugin may have died before its file was gone, and kubelet may
        never ask again.

        Raises:
            FpgaPluginError: one cannot be written, or removed.
        """
        for uid, holder in tuple(self._ledger.holders.items()):
            if holder.ended:
                await asyncio.to_thread(self._files.remove, self._files.of(holder))
            await self._try(uid)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            changed, self._changed = self._changed, set()
            self._missing &= self._ledger.holders.keys()
            for uid in changed | self._failing:
                await self._try(uid)
            try:
                async with asyncio.timeout(RETRY_SECONDS if self._failing else None):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _try(self, uid: ClaimUid) -> None:
        try:
            await self._look(uid)
        except FpgaPluginError as error:
            if uid not in self._failing:
                log.warning("claim's file not in order", claim=uid, error=str(error))
            self._failing.add(uid)
        else:
            self._failing.discard(uid)

    async def _look(self, uid: ClaimUid) -> None:
        ledger = self._ledger
        holder = ledger.holders.get(uid)
        if holder is None or holder.ended:
            self._missing.discard(uid)
        elif not ledger.resource_claims.fallen(holder):
            if uid in self._missing:
                await self._write(uid)
        elif ledger.resource_claims.is_prepared(holder) or ledger.resource_claims.misled(holder):
            await self._remove(holder)
        # Else it is being prepared, or was adopted, and its containers may start again.

    async def _write(self, uid: ClaimUid) -> None:
        await write_file(self._ledger, self._files, uid)
        self._missing.discard(uid)

    async def _remove(self, holder: Holder) -> None:
        """Take a claim's file away, until its devices are what was prepared."""
        ledger, uid = self._ledger, holder.uid
        await asyncio.to_thread(self._files.remove, self._files.of(holder))
        after = ledger.holders.get(uid)
        if after is None or not ledger.resource_claims.is_prepared(after):
            return
        if not (why := ledger.resource_claims.fallen(after)):
            self._missing.add(uid)
            self._changed.add(uid)
            self._wake.set()
        elif not self._is_there(after):
            self._missing.add(uid)  # what was not seen yet in this life may be as it was
        else:
            ledger.resource_claims.unprepared(uid)
            self._missing.discard(uid)
            log.warning(
                "claim withdrawn",
                **ClaimRef.of(after).logged,
                devices=list(after.devices),
                pods=sorted(ledger.pods_of(after.devices)),
                reason=why,
                hint="no container starts with it any more: delete its pods",
            )

    def _is_there(self, holder: Holder) -> bool:
        try:
            for device in holder.devices:
                self._ledger.obstacles.regions_of(device)
        except RefusedError:
            return False
        return True
