"""Follows the aliases of interface ids in the store's manifest, for the names of resources.

Only a manifest that counts and says otherwise takes an alias away. While there is none, while it is
being written, or while the store does not answer, resources keep their names: a resource must not
come and go with a network file system, as its pods would lose their place in the cluster.
"""

from collections.abc import Mapping
from typing import Final

import structlog

from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.bitstreams.reader import StoreReader
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.host.ticks import tick
from fpga_plugin.ids import Alias, InterfaceId
from fpga_plugin.kubernetes.names import ResourceName

log = structlog.get_logger()

LOOK_SECONDS: Final = 5.0
"""Between two looks: the manifest is read again only when its file changed."""


class InterfaceNames:
    """Follows the manifest's names of interface ids."""

    def __init__(self, ledger: Ledger, store: StoreReader) -> None:
        self._ledger = ledger
        self._store = store
        self._problem = ""
        self._waiting: Mapping[InterfaceId, tuple[Alias, ResourceName]] = {}

    async def run(self) -> None:
        """Follow the manifest until cancelled."""
        while True:
            await tick(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Take over the manifest's present aliases; each obstacle is logged once."""
        try:
            aliases = await self._store.interface_aliases()
        except FpgaPluginError as error:
            if self._problem != error.message:
                self._problem = error.message
                log.warning(
                    "aliases of interface ids are not known: resources keep their names",
                    error=error.message,
                    hint=error.hint,
                )
            return
        self._problem = ""
        if aliases is None:
            return
        before = dict(self._ledger.aliases)
        try:
            waiting = self._ledger.naming.call_interfaces(aliases)
        except JournalError as error:
            log.warning("resources keep their names", error=str(error))
            return
        if before != self._ledger.aliases:
            log.info("aliases of interface ids", aliases=dict(self._ledger.aliases))
        for interface_id, (alias, resource) in sorted(waiting.items() - self._waiting.items()):
            log.warning(
                "an alias waits: a pod has a device by it for another interface id",
                alias=alias,
                interface_id=interface_id,
                resource=resource,
                hint="it is taken when such pods have ended",
            )
        self._waiting = waiting
