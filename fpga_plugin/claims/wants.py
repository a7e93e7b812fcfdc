"""What each region of a call is to become: requests given to regions, and their bitstreams read."""

from functools import partial

from fpga_plugin.bitstream.reader import StoreReader
from fpga_plugin.bitstream.store import Bitstream
from fpga_plugin.errors import CardGoneError
from fpga_plugin.hardware.backend import DriverSettings
from fpga_plugin.ids import BitstreamId, DeviceId, InterfaceId, RegionId
from fpga_plugin.ledger.ledger import DELETE_THE_POD, card_of
from fpga_plugin.pods.requests import FpgaRequest, Target, assign, check_limits
from fpga_plugin.regions.operations import CardOperations
from fpga_plugin.regions.prepare import Want
from fpga_plugin.regions.reads import CardReads


class Wants:
    """Belongs to the event loop.

    Args:
        operations: has the ledger and the backend.
        store: where bitstreams come from.
        reads: of cards that may not answer.
    """

    def __init__(self, operations: CardOperations, store: StoreReader, reads: CardReads) -> None:
        self._ledger = operations.ledger
        self._backend = operations.backend
        self._store = store
        self._reads = reads

    async def of(
        self, devices: tuple[DeviceId, ...], requests: tuple[FpgaRequest, ...]
    ) -> dict[RegionId, Want | None]:
        """What the regions of these devices are to become; None: blank.

        Raises:
            InvalidRequestError: no request fits, or a parameter is out of its limits.
            RefusedError: more fit than there are devices, or a card is gone.
            FpgaPluginError: a bitstream is not there, not valid, or not trusted.
        """
        targets = [
            Target(
                region=region.id,
                device=device,
                interface_id=self._ledger.cards[card_of(device)].interface_id,
            )
            for device in devices
            for region in self._ledger.regions_of(device)
        ]
        wants: dict[RegionId, Want | None] = {}
        loaded: dict[tuple[InterfaceId, BitstreamId], Bitstream] = {}
        for region_id, request in assign(requests, targets).items():
            if request is None:
                wants[region_id] = None
                continue
            await self._check_limits(region_id, request)
            name = (request.interface_id, request.bitstream_id)
            if name not in loaded:
                loaded[name] = await self._store.load(*name)
            wants[region_id] = Want(loaded[name], request.settings)
        return wants

    async def _check_limits(self, region_id: RegionId, request: FpgaRequest) -> None:
        region = self._ledger.region(region_id)
        card = self._ledger.cards.get(card_of(region_id))
        if region is None or card is None:
            raise CardGoneError(f"region {region_id} is gone", hint=DELETE_THE_POD)
        if request.settings != DriverSettings():
            limits = await self._reads.run(
                card.id, partial(self._backend.clock_limits, card, region)
            )
            check_limits(request, limits, region_id)
