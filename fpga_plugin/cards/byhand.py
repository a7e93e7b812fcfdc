"""Programming by hand: an operator tries a bitstream on a region of a card that is out of service.

The image takes the same way as a tenant's: from the store, trusted, onto a scrubbed region, with
its clock planned, verified. The region has no owner meanwhile and gets none. The end of the card's
drain leaves it DIRTY, and so does a restart of the plugin: then it is scrubbed as after any owner.

A programming may last longer than a client may wait for one answer. So it is a task under a name
that the client chooses; a second call with that name continues to wait.
"""

import asyncio
import contextlib
from dataclasses import dataclass, replace
from functools import partial

import structlog

from fpga_plugin.allocation.obstacles import ObstacleKind, Stops
from fpga_plugin.bitstreams.reader import StoreReader
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards.clocks import ClockPlan
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.errors import (
    CardGoneError,
    FpgaPluginError,
    InvalidRequestError,
    UnknownDeviceError,
    quote,
)
from fpga_plugin.hardware.backend import DriverSettings
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.host.bounded import BoundedDict
from fpga_plugin.ids import (
    AfuId,
    BitstreamId,
    CardId,
    InterfaceId,
    RegionId,
    parse_alias,
    parse_bitstream_id,
)

log = structlog.get_logger()

_PATIENCE = 8.0
"""Seconds until a client is told that it is not finished; the socket's server has more."""

_REMEMBERED = 16
"""Programmings whose outcome can be asked for."""


@dataclass(frozen=True, slots=True)
class Programmed:
    """The outcome of a programming by hand.

    Attributes:
        region: its id.
        afu_id: as it reads now.
        name: the bitstream's in the store's manifest; empty: it has none.
        clock: the state of the image's clock.
        steps: what was done, with the seconds of each.
    """

    region: RegionId
    afu_id: AfuId
    name: str
    clock: ClockPlan
    steps: tuple[tuple[str, float], ...]


class HandProgrammer:
    """Programs regions for the operator.

    Args:
        operations: what is done to a card.
        store: where bitstreams come from.
    """

    def __init__(self, operations: CardOperations, store: StoreReader) -> None:
        self._operations = operations
        self._store = store
        self._tasks: BoundedDict[str, asyncio.Task[Programmed]] = BoundedDict(_REMEMBERED)
        self._running: set[asyncio.Task[Programmed]] = set()

    async def program(
        self, name: str, *, card: str, region: str, bitstream: str
    ) -> Programmed | None:
        """Program a region, or wait for the programming of that name; None: not finished yet.

        Args:
            name: chosen by the client, unique for this programming.
            card: the card's id.
            region: the region's id, or the number of its port.
            bitstream: its id in the store, or its name in the store's manifest.

        Raises:
            FpgaPluginError: it was refused, or failed; the ledger knows what the region is.
        """
        task = self._tasks.get(name)
        if task is None:
            work = self._program(card, region, bitstream)
            task = self._tasks[name] = asyncio.create_task(work)
            self._running.add(task)
            task.add_done_callback(self._ended)
        done, _ = await asyncio.wait({task}, timeout=_PATIENCE)
        return task.result() if done else None

    async def close(self) -> None:
        """Wait for what has begun; the cards' threads begin nothing new."""
        if self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[Programmed]) -> None:
        self._running.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            # The client may be gone.
            log.warning("programming by hand failed", error=str(error))

    async def _program(self, card: str, region: str, bitstream: str) -> Programmed:
        operations = self._operations
        found, chosen = self._chosen(card, region)
        bitstream_id = await self._named(bitstream, found.interface_id)
        names = await self._store.names()
        try:
            self._check(found.id, chosen)
            loaded = await self._store.load(found.interface_id, bitstream_id, found.takes)
            async with operations.workers.lock(found.id):
                done = await self._work(found, chosen, loaded)
        except FpgaPluginError as error:
            raise names.error(error) from error.__cause__
        return replace(done, name=names.bitstream(found.interface_id, bitstream_id))

    async def _named(self, text: str, interface_id: InterfaceId) -> BitstreamId:
        """The bitstream with this id, or with this name in the store's manifest.

        Raises:
            InvalidRequestError: there is none.
            FpgaPluginError: the manifest, which has the names of bitstreams, cannot be read.
        """
        try:
            return parse_bitstream_id(text)
        except ValueError as error:
            why = error
        with contextlib.suppress(ValueError, KeyError):
            alias = parse_alias(text)
            return (await self._store.aliases())[interface_id, alias]
        ids = await self._store.titled(text, interface_id)
        raise InvalidRequestError(
            f"{quote(text)} is no bitstream id, and no name of one: {why}",
            hint=f"it is the title of bitstream {ids}: name that"
            if ids
            else "`fpga-plugin bitstream list` shows ids and names, and titles in quotes",
        )

    def _chosen(self, card: str, region: str) -> tuple[Card, Region]:
        if (found := self._operations.ledger.cards.get(CardId(card))) is None:
            raise UnknownDeviceError(
                f"no card {quote(card)} on this node", hint="`fpga-plugin status` lists them"
            )
        for one in found.regions:
            if region in {one.id, str(one.port_id)}:
                return found, one
        raise UnknownDeviceError(
            f"card {found.id} has no region {quote(region)}",
            hint=f"it has {', '.join(one.id for one in found.regions)}",
        )

    def _check(self, card_id: CardId, region: Region) -> Card:
        """Check that the region has no owner and can get none.

        Raises:
            RefusedError: it has, or may get one.
        """
        ledger = self._operations.ledger
        card = ledger.cards.get(card_id)
        if card is None or region not in card.regions:
            raise CardGoneError(f"card {card_id} went, or is another one by now")
        self._operations.check_drained(card_id)
        # A neighbour's owner shares the card's memory, which is cleared.
        of_card = (one for one in ledger.obstacles.of(card_id) if one.kind is ObstacleKind.OWNED)
        obstacle = next(of_card, None) or ledger.obstacles.first(region.id, Stops.BY_HAND)
        if obstacle is not None:
            raise obstacle.refusal(operator=True)
        return card

    async def _work(self, card: Card, region: Region, bitstream: Bitstream) -> Programmed:
        operations, ledger = self._operations, self._operations.ledger
        blank = await operations.blanks.load(card)
        # Only now: an owner may have been adopted, and have left, while the store was read.
        await operations.check_gone(ledger.left_on(card.id))
        card = self._check(card.id, region)
        async with operations.work(card, [region], partial(self._check, card.id, region)) as work:
            await work.scrub([region], blank)
            await operations.clear_memory(card, work.reports)
            clock = await work.program(region, bitstream, DriverSettings())
            ledger.work.programmed(region.id, bitstream.afu_id, by_hand=True)
        log.info(
            "region programmed by hand",
            region=region.id,
            bitstream=bitstream.bitstream_id,
            clock=clock.detail,
        )
        taken = tuple((step.name, step.seconds) for step in work.reports[region.id].steps)
        return Programmed(region.id, bitstream.afu_id, "", clock, taken)
