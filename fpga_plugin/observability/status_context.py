"""What is looked at: the plugin, what was counted of it, and how far its start has come."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from grpclib.const import Status

from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.cards.reads import CardReads
from fpga_plugin.cards.reports import Report, ReportObserver
from fpga_plugin.deviceplugin.service import CallObserver
from fpga_plugin.errors import FpgaPluginError, NotFinishedError
from fpga_plugin.hardware.backend import Backend
from fpga_plugin.hardware.model import Card, Readings
from fpga_plugin.host.sandbox import Measure
from fpga_plugin.ids import CardId, DeviceId
from fpga_plugin.kubernetes.names import ResourceName
from fpga_plugin.observability.catalogue import Catalogue
from fpga_plugin.observability.counters import Counters
from fpga_plugin.observability.fresh import Fresh
from fpga_plugin.observability.history_reader import HistoryReader
from fpga_plugin.observability.history_writer import HistoryWriter
from fpga_plugin.observability.refusals import Refusals
from fpga_plugin.settings.settings import Settings

if TYPE_CHECKING:
    from fpga_plugin.plugin import Plugin

MAX_DEVICES = 16
"""Of a refused call, that are remembered."""

_GIVE = frozenset({"Allocate", "PreStartContainer"})
"""Calls whose success ends what was refused of their devices before."""

FRESH = 2.0
"""Seconds for which a card's sensors are not read again."""


class Observer(ReportObserver, Protocol):
    """Sees each of kubelet's calls, scrubs, preparations and warnings. Must not raise."""

    def warned(self, identity: Identity, devices: Sequence[DeviceId], message: str) -> None:
        """A container is served, and may not be what its author means."""

    @property
    def called(self) -> CallObserver:
        """Kubelet was answered."""


@dataclass(slots=True)
class StatusContext:
    """A daemon as it is looked at.

    Attributes:
        settings: all of them.
        observer: sees calls and work on regions, too.
        counters: what is counted.
        refusals: the last of each pod.
        catalogue: what the store has.
        warnings: the last of each pod that was served.
        history: what happened, as the journal says.
        history_writer: writes that down; None while the plugin starts.
        phase: how far the start has come, until `plugin` is there.
        plugin: None while it starts.
        sandbox: what the process has taken from itself; empty: nothing, or not yet.
        began: Unix time of the start.
    """

    settings: Settings
    observer: Observer | None = None
    counters: Counters = field(default_factory=Counters, init=False)
    refusals: Refusals = field(default_factory=Refusals, init=False)
    catalogue: Catalogue = field(default_factory=Catalogue, init=False)
    warnings: Refusals = field(default_factory=Refusals, init=False)
    history: HistoryReader = field(init=False)
    history_writer: HistoryWriter | None = field(default=None, init=False)
    phase: str = field(default="starting", init=False)
    plugin: "Plugin | None" = field(default=None, init=False)
    sandbox: tuple[Measure, ...] = field(default=(), init=False)
    began: float = field(default_factory=time.time, init=False)
    _readings: Fresh[Mapping[CardId, Readings]] = field(
        default_factory=lambda: Fresh({}, seconds=FRESH), init=False
    )
    # Threads of its own: sensors are slow.
    _reads: CardReads = field(default_factory=CardReads, init=False)

    def __post_init__(self) -> None:
        """Look where the settings say."""
        self.history = HistoryReader(self.settings.state_dir, self.catalogue)

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
            if self.history_writer is not None:
                self.history_writer.refused(None, devices, message)
        elif status is Status.OK and method in _GIVE:
            self.refusals.served(devices)
        if self.observer is not None:
            self.observer.called(method, resource, devices, status, message, seconds)

    def reported(self, report: Report) -> None:
        """A region was scrubbed or prepared (`Plugin`'s observer)."""
        self.counters.report(report, card_of(report.region))
        if self.history_writer is not None:
            self.history_writer.reported(report)
        if self.observer is not None:
            self.observer.reported(report)

    def refused(
        self, identity: Identity, devices: Sequence[DeviceId], error: FpgaPluginError
    ) -> None:
        """A PreStart was not answered with OK (`Observer`). Work that goes on is no refusal."""
        self.counters.refused(error)
        if isinstance(error, NotFinishedError):
            return
        if self.history_writer is not None:
            self.history_writer.refused(identity.pod, devices, str(error), identity.claim)
        self.refusals.refused(
            "NodePrepareResources" if identity.claim else "PreStartContainer",
            identity.pod,
            devices[:MAX_DEVICES],
            status=error.status.name,
            message=str(error),
            name=identity.name,
            claim=identity.claim,
        )

    def served(self, devices: Sequence[DeviceId], claim: str) -> None:
        """A ResourceClaim was prepared, or ended (`Observer`)."""
        self.refusals.served(devices, claim)

    def warned(self, identity: Identity, devices: Sequence[DeviceId], message: str) -> None:
        """A container is served, and may not be what its author means (`Observer`)."""
        self.warnings.refused(
            "PreStartContainer",
            identity.pod,
            devices[:MAX_DEVICES],
            status="OK",
            message=message,
            name=identity.name,
        )
        if self.observer is not None:
            self.observer.warned(identity, devices, message)

    def running(self) -> "Plugin":
        """The plugin, once it has started.

        Raises:
            NotFinishedError: it has not.
        """
        if self.plugin is None:
            raise NotFinishedError("the plugin is starting: try again in a moment")
        return self.plugin

    async def readings(self) -> Mapping[CardId, Readings]:
        """Sensors of all cards, at most `FRESH` seconds old; read in a thread."""
        if (plugin := self.plugin) is None:
            return {}
        return await self._readings.get(
            lambda: self._read(plugin.node.backend, plugin.ledger.cards)
        )

    async def _read(
        self, backend: Backend, cards: Mapping[CardId, Card]
    ) -> Mapping[CardId, Readings]:
        present = dict(cards)
        # A card that does not answer has no readings, and costs no other card its own.
        found, _ = await self._reads.each(present, lambda card: backend.readings(present[card]))
        return found
