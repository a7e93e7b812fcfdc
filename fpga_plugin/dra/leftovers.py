"""With the device plugin API: what ResourceClaims still have.

Such a claim ends by the same rule as any other: kubelet's record, read, lacks it, and the processes
of its pods are gone. Kubelet does not end it by itself, since no driver of its name is registered;
nor can its record be read where kubelet's root directory is not mounted. Until then its devices are
given to nobody, and the rest is served.
"""

import asyncio
import os
from collections.abc import Collection

import structlog

from fpga_plugin.dra.cdi import CdiFiles
from fpga_plugin.dra.record import ClaimRecord
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import ClaimUid
from fpga_plugin.ledger.journal import JournalError
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.pods.dra_record import FILE_NAME, RecordedClaim, RecordUnreadableError
from fpga_plugin.process.ticks import tick
from fpga_plugin.regions.operations import CardOperations
from fpga_plugin.regions.queue import CardQueue

log = structlog.get_logger()

LOOK_SECONDS = 30.0
"""Between two looks at kubelet's record."""


class ClaimLeftovers:
    """Belongs to the event loop.

    Args:
        operations: has the ledger.
        record: kubelet's.
        queue: where cards that have to be scrubbed are added.
        files: for the container runtime.
        root: kubelet's root directory.

    Attributes:
        read: whether kubelet's record could be read in this life.
        problem: why not; empty while it can.
    """

    def __init__(
        self,
        operations: CardOperations,
        record: ClaimRecord,
        queue: CardQueue,
        files: CdiFiles,
        root: str,
    ) -> None:
        self._operations = operations
        self._ledger: Ledger = operations.ledger
        self._record = record
        self._queue = queue
        self._files = files
        self._path = os.path.join(root, FILE_NAME)
        self.read = False
        self.problem = ""

    async def run(self) -> None:
        """Until cancelled, or nothing is left."""
        while not self.read or self._ledger.holders:
            await self.look()
            await tick(LOOK_SECONDS)

    async def look(self) -> None:
        """Compare the ledger with kubelet's record, once."""
        try:
            if not await asyncio.to_thread(os.path.exists, self._path):
                raise RecordUnreadableError(f"kubelet's record {self._path} is not there")
            record = await self._record.read()
            gone = await self._record.gone(record)
            refused = [one.uid for one in record.values() if not self._learn(one, gone)]
            for uid in tuple(self._ledger.holders):
                self._ledger.resource_claims.part(uid, record[uid].pods if uid in record else ())
                await self._record.end_gone(uid)
                if uid not in record:
                    await self._end(uid)
        except (ValueError, FpgaPluginError) as error:
            if self.problem != str(error):
                self.problem = str(error)
                log.warning(
                    "ResourceClaims may still have devices, which are given to nobody",
                    error=str(error),
                    claims=[one.full_name for one in self._ledger.holders.values()],
                    hint="start the plugin with FPGA_PLUGIN_MODE=dra until their pods are gone"
                    " (docs/dra.md)",
                )
            return
        self.read, self.problem = True, ""
        if not refused:
            self._ledger.resource_claims.claims_read()

    def _learn(self, one: RecordedClaim, gone: Collection[ClaimUid]) -> bool:
        """Learn of one claim that kubelet's record names; returns whether the ledger has it now.

        Raises:
            JournalError: it cannot be written down.
        """
        if one.uid in self._ledger.holders:
            self._ledger.resource_claims.join(one.uid, one.pods)
        elif one.uid not in gone and one.devices:
            try:
                self._ledger.resource_claims.adopt_holder(self._record.holder(one), one.pods)
            except JournalError:
                raise
            except (ValueError, FpgaPluginError) as error:
                log.warning("claim not adopted", claim=one.uid, error=str(error))
                return False
            log.warning("claim adopted", claim=one.uid, pods=sorted(one.pods))
        return True

    async def _end(self, uid: ClaimUid) -> None:
        """End a claim that kubelet's record lacks, if nobody runs with it.

        Raises:
            FpgaPluginError: its file cannot be removed, or the journal not be written.
        """
        holder = self._ledger.holders[uid]
        users = self._ledger.resource_claims.tenancies_of_holder(uid)
        if await self._operations.living(users) is not None:
            return
        await asyncio.to_thread(self._files.remove, self._files.of(holder))
        for card in self._ledger.resource_claims.end_holder(uid):
            self._queue.add(card)
        self._ledger.resource_claims.forget_holder(uid)
        log.warning("claim ended without a call", claim=uid, name=holder.full_name)
