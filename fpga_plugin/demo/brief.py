"""The demo's default output: a pod's life in some 25 lines that fit a terminal of 80 columns.

One line for each thing that a newcomer should see, and who does it. Everything else is in the
timeline (`output.TextOutput`).
"""

from collections.abc import Iterable
from typing import Final, TextIO

from fpga_plugin.allocation.journal.records import CLEAN, Condition, Ownership
from fpga_plugin.demo.events import (
    Advertised,
    Event,
    Failure,
    KubeletCall,
    RegionShown,
    RegionWork,
    Warned,
)
from fpga_plugin.demo.output import Output, asks, ids, milliseconds
from fpga_plugin.demo.pod_manifest import PodManifest
from fpga_plugin.ids import RegionId, Resource, ResourceKind

_CLOCK: Final = 10
_WHO: Final = 9

_CALLS: Final = {"Allocate", "PreStartContainer", "PostStopContainer", "Deallocate"}
"""Those of a pod's life that change something."""


class BriefOutput(Output):
    """Writes a line for each thing that a newcomer should see."""

    indent = " " * (_CLOCK + _WHO + 2)

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._owned: set[RegionId] = set()

    def introduce(self, manifest: PodManifest, source: str, store: str, kubelet: str) -> None:  # noqa: ARG002  # the timeline's
        """The pod, and what it asks for."""
        pod = manifest.pod
        self.write(
            self.painted(f"The real plugin, simulated cards, a stand-in for {kubelet}.", "bold"),
            "",
            f"Pod {pod.namespace}/{pod.name} asks for",
        )
        asked = {one.name: lines for one in pod.all_containers if (lines := asks(one))}
        for container, lines in asked.items():
            if len(asked) > 1:
                self.write(f"  in container {container}")
            indent = "    " if len(asked) > 1 else "  "
            self.write(*(indent + line for line in lines))
        self.write("")

    def step(self, seconds: float, who: str, text: str, more: Iterable[str] = ()) -> None:
        """One line, and what belongs to it."""
        clock = self.painted(f"{seconds:{_CLOCK - 4}.2f} s  ", "dim")
        self.write(f"{clock}{who:<{_WHO}}{text}")
        self.write(*(self.indent + line for line in more))

    def event(self, seconds: float, event: Event) -> None:
        """What of it a newcomer should see; the verdict has the failure that ends the story."""
        match event:
            case Warned():
                self._told(seconds, "plugin", "warns", event.message, "yellow")
            case Failure(final=False):
                self._told(seconds, "kubelet", "reports", event.message, "yellow")
            case _ if not self.detail:
                pass  # before the pod: the story sums it up
            case Advertised():
                self._advertised(seconds, event)
            case KubeletCall():
                self._call(seconds, event)
            case RegionShown():
                self._region(seconds, event)
            case RegionWork():
                self._work(seconds, event)

    def verdict(self, text: str, *, good: bool) -> None:
        """The last line."""
        self.write(
            "",
            "-v shows each call and step; --pod FILE --bitstreams DIR plays your own pod.",
            self.painted(text, "green" if good else "red"),
        )

    def _advertised(self, seconds: float, event: Advertised) -> None:
        listed, before = event.listed, event.before
        gone = [device for device in before.ids if device not in listed.devices] if before else []
        if not gone:
            return
        if Resource.parse(listed.resource).kind is ResourceKind.WHOLE:
            self.step(seconds, "plugin", f"hides card {ids(gone, 1)}: a region is taken")
        else:
            self.step(seconds, "plugin", f"hides region {ids(gone, 1)}: the card is taken")

    def _call(self, seconds: float, event: KubeletCall) -> None:
        if event.method not in _CALLS:
            return
        status = self.painted(event.status, "green" if event.status == "OK" else "red")
        called = f"{event.method} {ids(event.devices, 1)}".rstrip()
        self.step(seconds, "kubelet", f"{called}: {status} in {milliseconds(event.seconds, 0)}")

    def _region(self, seconds: float, event: RegionShown) -> None:
        if event.ownership is not Ownership.FREE:
            self._owned.add(event.region)
        elif event.region in self._owned:
            self._owned.remove(event.region)
            self.step(seconds, "plugin", f"takes {event.region} back: no pod has it any more")

    def _work(self, seconds: float, event: RegionWork) -> None:
        report, now = event.report, event.condition
        took = milliseconds(event.seconds, 0)
        if now is Condition.PROGRAMMED:
            self.step(
                seconds,
                "plugin",
                f"programs {report.region} in {took}, and reads back",
                [self.held(report.afu_id)],
            )
        elif now in CLEAN and not report.error:
            done = f"scrubs {report.region} in {took}; it is"
            left = f"hands {report.region} over"
            self.step(seconds, "plugin", f"{done if report.scrubbed else left} {now.lower()}")
        else:
            tried = "scrub" if report.scrubbed else "program"
            self._told(
                seconds, "plugin", f"cannot {tried} {report.region}: {now}", report.error, "red"
            )

    def _told(self, seconds: float, who: str, text: str, message: str, colour: str) -> None:
        self.step(
            seconds, who, text, [self.painted(line, colour) for line in self.wrapped(message, "")]
        )
