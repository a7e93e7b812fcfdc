"""What the log says of regions whose port errors are logged: these errors, and what is on them.

They are the regions whose owner asked for `debug=1`, and those of pods with the debug annotation
(`CardOperations.port_errors_logged`).
"""

from collections.abc import Mapping
from functools import partial

import structlog

from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.cards.reads import CardReads
from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import AfuId, RegionId

log = structlog.get_logger()


class PortErrorLog:
    """Logs port errors, and what is on their regions, where that is asked for."""

    def __init__(self, operations: CardOperations, reads: CardReads) -> None:
        self._operations, self._reads = operations, reads
        self._errors: dict[RegionId, dict[str, int]] = {}
        self._accelerators: dict[RegionId, AfuId | None] = {}

    async def look(self, card: Card, observed: Mapping[RegionId, AfuId | None]) -> None:
        """Log what changed since the last look.

        Args:
            card: whose regions.
            observed: what is on them.
        """
        await self._look_at_errors(card)
        if self._operations.ledger.cards.get(card.id) == card:
            self._look_at_accelerators(observed)

    async def _look_at_errors(self, card: Card) -> None:
        """Log each new set of port errors, once."""
        for region in card.regions:
            if region.id not in self._operations.port_errors_logged:
                self._errors.pop(region.id, None)
                continue
            about = self._operations.owner(region.id)
            read = partial(self._operations.backend.port_errors, region)
            try:
                errors = dict(await self._reads.run(card.id, read))
            except HardwareError as error:
                log.warning(
                    "port errors cannot be read", region=region.id, error=str(error), **about
                )
                continue
            if errors != self._errors.get(region.id, {}):
                self._errors[region.id] = errors
                shown = {name: f"{value:#x}" for name, value in errors.items()}
                log.warning("port errors", region=region.id, errors=shown, **about)

    def _look_at_accelerators(self, observed: Mapping[RegionId, AfuId | None]) -> None:
        """Log what is on them: at the first look, and when it changes."""
        logged = self._operations.port_errors_logged
        self._accelerators = {r: afu for r, afu in self._accelerators.items() if r in logged}
        for region in observed.keys() & logged:
            if self._accelerators.get(region, "") != observed[region]:
                self._accelerators[region] = observed[region]
                clock = self._operations.clocks.get(region)
                log.info(
                    "accelerator of a debugged region",
                    region=region,
                    afu_id=observed[region],
                    clock=None if clock is None else clock.detail,
                    **self._operations.owner(region),
                )
