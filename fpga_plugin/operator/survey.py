"""What is looked at: the parts of a daemon that know something, and how far its start has come."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from grpclib.const import Status

from fpga_plugin.bitstream.library import Library
from fpga_plugin.claims.claims import ClaimService
from fpga_plugin.config.settings import Settings
from fpga_plugin.deviceplugin.link import KubeletLink
from fpga_plugin.errors import FpgaPluginError, NotFinishedError
from fpga_plugin.hardware.backend import Backend
from fpga_plugin.hardware.model import Card, Readings
from fpga_plugin.ids import CardId, DeviceId, ResourceName
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.operator.counters import Counters
from fpga_plugin.operator.refusals import Refusals
from fpga_plugin.pods.directory import PodDirectory
from fpga_plugin.pods.identity import Identity
from fpga_plugin.process.sandbox import Measure
from fpga_plugin.regions.blanks import Blanks
from fpga_plugin.regions.inventory import Inventory
from fpga_plugin.regions.reads import CardReads
from fpga_plugin.regions.recovery import Recovery
from fpga_plugin.stock.reconcile import Reconciler

Operation = Callable[[str], Awaitable[Mapping[str, object]]]
"""Something that is done to a card, by its id; raises FpgaPluginError, returns what to show."""

MAX_DEVICES = 16
"""Of a refused call, that are remembered."""

FRESH = 2.0
"""Seconds for which a card's sensors are not read again, whoever asks."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a daemon that serves kubelet."""

    ledger: Ledger
    claims: ClaimService
    kubelet: KubeletLink
    inventory: Inventory
    blanks: Blanks
    backend: Backend
    reconciler: Reconciler
    pods: PodDirectory
    library: Library
    recovery: Recovery


@dataclass(slots=True)
class Survey:
    """A daemon as it is looked at; belongs to the event loop.

    Attributes:
        settings: all of them.
        counters: what is counted.
        refusals: the last of each pod.
        phase: how far the start has come, until `parts` are there.
        parts: None while it starts.
        sandbox: what the process has taken from itself; empty: nothing, or not yet.
        began: Unix time of the start.
    """

    settings: Settings
    counters: Counters = field(default_factory=Counters)
    refusals: Refusals = field(default_factory=Refusals)
    phase: str = "starting"
    parts: Parts | None = None
    sandbox: tuple[Measure, ...] = ()
    began: float = field(default_factory=time.time)
    _readings: Mapping[CardId, Readings] = field(default_factory=dict)
    _reads: CardReads = field(default_factory=CardReads)  # nobody's but ours: sensors are slow
    _read_at: float = float("-inf")
    _reading: asyncio.Task[Mapping[CardId, Readings]] | None = None

    def called(  # noqa: PLR0917  # as CallObserver has it
        self,
        method: str,
        resource: ResourceName,
        devices: Sequence[DeviceId],
        status: Status,
        message: str,
        seconds: float,
    ) -> None:
        """Kubelet was answered (`CallObserver`)."""
        self.counters.call(method, resource, devices, status, message, seconds)
        if method == "Allocate" and status is not Status.OK:
            self.refusals.refused(
                method, None, devices[:MAX_DEVICES], status=status.name, message=message
            )

    def refused(
        self, identity: Identity, devices: Sequence[DeviceId], error: FpgaPluginError
    ) -> None:
        """A PreStart was not answered with OK (`News`). Work that goes on is no refusal."""
        self.counters.refused(error)
        if isinstance(error, NotFinishedError):
            return
        self.refusals.refused(
            "PreStartContainer",
            identity.pod,
            devices[:MAX_DEVICES],
            status=error.status.name,
            message=str(error),
            name=identity.name,
        )

    async def readings(self) -> Mapping[CardId, Readings]:
        """Sensors of all cards, at most `FRESH` seconds old; read in a thread, by one at a time."""
        if self.parts is None:
            return {}
        now = time.monotonic()
        if now - self._read_at < FRESH:
            return self._readings
        if self._reading is None:
            cards = tuple(self.parts.ledger.cards.values())
            self._reading = asyncio.create_task(self._read(self.parts.backend, cards))
        # Shielded: whoever asked may go away, and the others still wait for it.
        return await asyncio.shield(self._reading)

    async def _read(self, backend: Backend, cards: tuple[Card, ...]) -> Mapping[CardId, Readings]:
        try:
            by_id = {card.id: card for card in cards}
            # A card that does not answer has no readings, and costs no other card its own.
            self._readings, _ = await self._reads.each(
                by_id, lambda card: backend.readings(by_id[card])
            )
            self._read_at = time.monotonic()
            return self._readings
        finally:
            self._reading = None
