"""What is counted as it happens; everything else is read from the ledger when it is asked for.

Labels are closed sets: methods, gRPC statuses, kinds of errors, steps, cards, resources. Nothing
that a tenant chose, and no pod.
"""

from collections.abc import Sequence
from typing import Final

from grpclib.const import Status

from fpga_plugin.cards.reports import Report
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.host.instruments import Counter, Histogram
from fpga_plugin.ids import CardId, DeviceId
from fpga_plugin.kubernetes.names import ResourceName

CALL_BUCKETS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),  # Allocate: tenths of a millisecond
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),  # PreStart: a PR, at most 25 s
)
PR_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0)
"""Seconds: a simulated PR takes 50 ms, a large image over PCIe some seconds."""

_IMAGES: Final = {"program": "bitstream", "program blank": "blank"}


class Counters:
    """The counters of one run of the plugin."""

    def __init__(self) -> None:
        self.calls = Counter()
        """By method and status."""
        self.call_seconds = Histogram(CALL_BUCKETS)
        """By method."""
        self.program_seconds = Histogram(PR_BUCKETS)
        """By image: `bitstream` or `blank`."""
        self.scrub_seconds = Histogram(PR_BUCKETS)
        """By outcome: `clean` or `failed`."""
        self.failures = Counter()
        """By operation (`prestart`, `prepare`, `scrub`) and kind of error."""
        self.http_dropped = Counter()
        """HTTP connections that were closed before they had their answer, by reason."""
        self.port_failures = Counter()
        """By card: work on a region that failed."""

    def call(
        self,
        method: str,
        _resource: ResourceName,
        _devices: Sequence[DeviceId],
        status: Status,
        _message: str,
        seconds: float,
    ) -> None:
        """One of kubelet's calls was answered (`CallObserver`)."""
        self.calls.add(method, status.name)
        self.call_seconds.add(seconds, method)

    def report(self, report: Report, card: CardId) -> None:
        """A region was scrubbed or prepared."""
        for step in report.steps:
            if (image := _IMAGES.get(step.name)) is not None:
                self.program_seconds.add(step.seconds, image)
        if report.scrubbed:
            seconds = sum(step.seconds for step in report.steps if step.name != "program")
            self.scrub_seconds.add(seconds, "failed" if report.failure else "clean")
        if report.failure:
            self.failures.add("scrub" if report.scrubbed else "prepare", report.failure)
            self.port_failures.add(card)

    def refused(self, error: FpgaPluginError) -> None:
        """A PreStart was not answered with OK."""
        self.failures.add("prestart", error.kind)
