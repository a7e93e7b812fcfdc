"""Watches a daemon and its kubelet, and turns what happens into events.

It listens where the daemon itself does: the ledger for regions, the lists that kubelet got, the
calls that were answered, the reports of work. Nothing here may fail: the ledger reports in the
middle of a step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from grpclib.const import Status

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.cards.reports import Report
from fpga_plugin.demo.events import (
    Advertised,
    Event,
    Failure,
    KubeletCall,
    RegionShown,
    RegionWork,
    Warned,
)
from fpga_plugin.demo.plugins import DeviceList
from fpga_plugin.ids import CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import ResourceName

Sink = Callable[[float, Event], None]
"""Takes seconds since the start, and the event; must not raise."""


class Recorder:
    """Turns what a daemon and its kubelet do into events of the demo.

    Attributes:
        regions: each region as it is now.
        lists: the latest list of each resource.
        work: all work on regions so far.
        failure: the last one after which nothing was tried again.
        warnings: what is said of containers that are served all the same.
    """

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self._began = time.perf_counter()
        self._ledger: Ledger | None = None
        self.regions: dict[RegionId, RegionShown] = {}
        self.lists: dict[ResourceName, DeviceList] = {}
        self.work: list[RegionWork] = []
        self.failure: Failure | None = None
        self.warnings: list[str] = []

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._began

    def watch(self, ledger: Ledger) -> None:
        """Report every region, now and whenever it changes."""
        self._ledger = ledger
        ledger.subscribe(self._changed)
        self._changed(None)

    def mute(self) -> None:
        """Report nothing more: what follows is clean-up."""
        self._sink = None

    def emit(self, event: Event) -> None:
        """Report an event."""
        if isinstance(event, Failure) and event.final:
            self.failure = event
        if self._sink is not None:
            self._sink(self.seconds, event)

    def called(  # noqa: PLR0917  # the observer that the daemon calls
        self,
        method: str,
        resource: ResourceName,
        devices: Sequence[DeviceId],
        status: Status,
        message: str,
        seconds: float,
    ) -> None:
        """The daemon answered a call."""
        self.emit(KubeletCall(method, resource, tuple(devices), status.name, message, seconds))

    def reported(self, report: Report) -> None:
        """The daemon worked on a region."""
        assert self._ledger is not None, "regions are watched before anything is done to them"
        # The daemon goes on using its report.
        kept = replace(report, steps=list(report.steps))
        work = RegionWork(kept, self._ledger.record(report.region).condition)
        self.work.append(work)
        self.emit(work)

    def warned(self, _identity: Identity, devices: Sequence[DeviceId], message: str) -> None:
        """The daemon serves a container that may not be what its author means."""
        self.warnings.append(message)
        self.emit(Warned(message, tuple(devices)))

    def on_list(self, devices: DeviceList) -> None:
        """Kubelet got a list."""
        self.emit(Advertised(devices, self.lists.get(devices.resource)))
        self.lists[devices.resource] = devices

    def _changed(self, card_id: CardId | None) -> None:
        ledger = self._ledger
        assert ledger is not None
        cards = list(ledger.cards) if card_id is None else [card_id]
        for card in (ledger.cards[card] for card in cards if card in ledger.cards):
            for region in card.regions:
                record = ledger.record(region.id)
                state = RegionShown(
                    region.id,
                    ledger.ownership(region.id),
                    record.condition,
                    record.afu_id,
                    record.reason,
                )
                if self.regions.get(region.id) != state:
                    self.regions[region.id] = state
                    self.emit(state)
