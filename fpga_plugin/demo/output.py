"""Where the demo's events go: JSON for programs, a timeline for people.

The default is in `brief`. Each writes a line as it happens. None raises: they are called from
inside the daemon's steps. An error of the stream is kept, and looked at between two steps.
"""

import json
import os
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from typing import Final, TextIO

from fpga_plugin.allocation.journal.records import CLEAN, Condition
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
from fpga_plugin.demo.pod import DemoContainer
from fpga_plugin.demo.pod_manifest import PodManifest
from fpga_plugin.errors import quote
from fpga_plugin.ids import Resource, ResourceKind
from fpga_plugin.kubernetes.names import ResourceName

_CLOCK: Final = 9
_KIND: Final = 12
_INDENT: Final = " " * (_CLOCK + _KIND)
_SHOWN_IDS: Final = 3
_ID_DIGITS: Final = 8

_COLOURS: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class Output:
    """Shows what the demo does, as lines of a stream: as it is here, nothing.

    On a terminal they are in colours, and no wider than it.

    Attributes:
        failed: why nothing can be written any more.
        detail: every step is worth a line; else what is common to all regions is left out.
        names: what the store's manifest calls accelerators, by AFU id.
    """

    indent = ""
    """Of the lines that `wrapped` makes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failed: OSError | None = None
        self.detail = False
        self.names: Mapping[str, str] = {}
        terminal = stream.isatty()
        self._colour = (
            terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
        # A file or a pipe gets whole lines, so that they can be searched.
        self._width = shutil.get_terminal_size().columns if terminal else 0

    # ---------------------------------------------------------------- what there is to show

    def introduce(self, manifest: PodManifest, source: str, store: str, kubelet: str) -> None:
        """What is going to happen, and to what.

        Args:
            manifest: the pod.
            source: where it is from.
            store: directory of the bitstreams.
            kubelet: which kind is played.
        """

    def event(self, seconds: float, event: Event) -> None:
        """Something happened, so many seconds after the start."""

    def heading(self, title: str, why: str = "") -> None:
        """A part of the story begins."""

    def text(self, lines: Iterable[str]) -> None:
        """Something to read."""

    def step(self, seconds: float, who: str, text: str, more: Iterable[str] = ()) -> None:
        """The plugin, kubelet or the pod does something that no event shows."""

    def verdict(self, text: str, *, good: bool) -> None:
        """What became of the pod: the last line."""

    # ---------------------------------------------------------------- how it is written

    def write(self, *lines: str) -> None:
        """Lines, if the stream still accepts them."""
        if self.failed is not None:
            return
        try:
            self._stream.writelines(f"{line}\n" for line in lines)
            self._stream.flush()
        except OSError as error:
            self.failed = error

    def wrapped(self, text: str, indent: str) -> list[str]:
        """The text in lines that fit beside `self.indent`, each behind `indent`."""
        if not text:
            return []
        if not self._width:
            return [indent + text]
        width = max(self._width - len(self.indent), 40)
        return textwrap.wrap(
            text,
            width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )

    def painted(self, text: str, colour: str) -> str:
        """The text in a colour, where the stream has them."""
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self._colour else text

    def held(self, afu_id: str | None) -> str:
        """What a region holds, by the name that the manifest gives it."""
        return self.names.get(afu_id or "", afu_id or "")


class JsonOutput(Output):
    """One object a line, nothing else; programs have the exit code, and the `error` events."""

    def event(self, seconds: float, event: Event) -> None:
        """Write it."""
        self.write(json.dumps({"t": round(seconds, 6), **event.json()}))


class QuietOutput(Output):
    """The verdict alone."""

    def verdict(self, text: str, *, good: bool) -> None:  # noqa: ARG002  # it has no colours
        """The one line."""
        self.write(text)


class TextOutput(Output):
    """A timeline: seconds since the start, what it is, and what is to be said about it."""

    indent = _INDENT

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._begun = False

    def introduce(self, manifest: PodManifest, source: str, store: str, kubelet: str) -> None:
        """Each container, and what it asks for."""
        pod = manifest.pod
        self.heading(
            f"The real plugin, simulated cards, a stand-in for {kubelet}",
            "Nothing of this machine is touched; everything happens in a temporary folder.",
        )
        self.write("", f"  pod         {pod.namespace}/{pod.name}, from {source}")
        for container in pod.all_containers:
            init = "init container" if container in pod.init_containers else "container"
            self.write(f"  {init} {container.name}:")
            self.write(*(f"    {line}" for line in asks(container)))
        self.write(f"  bitstreams  {store}")

    def heading(self, title: str, why: str = "") -> None:
        """A title, and why this happens."""
        if self._begun:
            self.write("")
        self._begun = True
        self.write(self.painted(title, "bold"), *self.wrapped(why, "  "))

    def text(self, lines: Iterable[str]) -> None:
        """As it is."""
        self.write(*lines)

    def step(self, seconds: float, who: str, text: str, more: Iterable[str] = ()) -> None:
        """One line, and what belongs to it."""
        self.write(f"{seconds:{_CLOCK - 2}.3f}  -- {who}: {text}")
        self.write(*(f"{' ' * _CLOCK}     {line}" for line in more))

    def event(self, seconds: float, event: Event) -> None:
        """One line, or several."""
        match event:
            case Advertised():
                self._advertised(seconds, event)
            case KubeletCall():
                self._call(seconds, event)
            case RegionShown():
                self._region(seconds, event)
            case RegionWork():
                self._work(seconds, event)
            case Warned():
                self._told(seconds, "warning", event.message, "yellow")
            case Failure():
                kind, colour = ("error", "red") if event.final else ("retry", "yellow")
                self._told(seconds, kind, event.message, colour)

    def verdict(self, text: str, *, good: bool) -> None:
        """The last line."""
        self.write("", self.painted(text, "green" if good else "red"))

    def _line(self, seconds: float, kind: str, text: str) -> None:
        clock = self.painted(f"{seconds:{_CLOCK - 2}.3f}  ", "dim")
        self.write(f"{clock}{kind:<{_KIND}}{text}".rstrip())

    def _advertised(self, seconds: float, event: Advertised) -> None:
        listed, resource = event.listed, short(event.listed.resource)
        counts = f"{len(listed.healthy)} of {len(listed.ids)} healthy"
        if event.before is None:
            self._line(seconds, "advertised", f"{resource:<24}{counts}")
        elif parts := changes(listed, event.before):
            self._line(seconds, "advertised", f"{resource:<24}{'; '.join(parts)} ({counts})")
        # Else it was sent again so that kubelet writes its checkpoint.

    def _call(self, seconds: float, event: KubeletCall) -> None:
        ok = event.status == "OK"
        status = self.painted(event.status, "green" if ok else "red")
        devices = ids(event.devices)
        self._line(
            seconds,
            "call",
            f"{event.method:<24}{short(event.resource)}  {devices}{'  ' if devices else ''}"
            f"{status} in {milliseconds(event.seconds)}",
        )

    def _region(self, seconds: float, event: RegionShown) -> None:
        if not self.detail:
            return
        reason = f"  ({event.reason})" if event.reason else ""
        self._line(
            seconds,
            "region",
            f"{event.region:<24}{event.ownership:<9}{event.condition:<12}"
            f"{self.held(event.afu_id)}{reason}",
        )

    def _work(self, seconds: float, event: RegionWork) -> None:
        report = event.report
        good = event.condition in CLEAN | {Condition.PROGRAMMED}
        condition = self.painted(str(event.condition), "green" if good else "red")
        self._line(
            seconds,
            "scrub" if report.scrubbed else "program",
            f"{report.region:<24}{condition} after {milliseconds(event.seconds)}",
        )
        if self.detail or report.error:
            for step in report.steps:
                note = f"  {step.note}" if step.note else ""
                self.write(f"{_INDENT}  {step.name:<18}{milliseconds(step.seconds):>10}{note}")

    def _told(self, seconds: float, kind: str, message: str, colour: str) -> None:
        first, *rest = self.wrapped(message, "") or [""]
        self._line(seconds, kind, self.painted(first, colour))
        self.write(*(_INDENT + self.painted(line, colour) for line in rest))


def asks(container: DemoContainer) -> list[str]:
    """What a container asks for, each a line."""
    return [f"{count} x {name}" for name, count in container.devices.items()] + [
        f"{name}={quote(value)[1:-1]}"
        for name, value in container.env.items()
        if name.startswith("FPGA_")
    ]


def short(resource: ResourceName) -> str:
    """`region-ce489693...`: enough to tell the demo's resources apart."""
    of = Resource.parse(resource)
    return f"{of.kind.stem}-{of.interface_id[:_ID_DIGITS]}..."


def ids(devices: Iterable[str], most: int = _SHOWN_IDS) -> str:
    """Some device ids, and how many more."""
    shown = list(devices)
    more = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {more} more" if more > 0 else "")


def milliseconds(seconds: float, digits: int = 1) -> str:
    """`250.3 ms`."""
    return f"{seconds * 1000:.{digits}f} ms"


def changes(now: DeviceList, before: DeviceList) -> list[str]:
    """What is different from the list of before, and why."""
    whole = Resource.parse(now.resource).kind is ResourceKind.WHOLE
    parts = []
    if gone := [device for device in before.ids if device not in now.devices]:
        why = "one of its regions is taken" if whole else "the card is taken as a whole"
        parts.append(f"hidden: {ids(gone)}, because {why}")
    if new := [device for device in now.ids if device not in before.devices]:
        waits = "" if now.healthy.issuperset(new) else ", Unhealthy until it is clean"
        parts.append(f"shown again: {ids(new)}{waits}")
    kept = [device for device in now.ids if device in before.devices]
    if better := [device for device in kept if device in now.healthy - before.healthy]:
        parts.append(f"Healthy: {ids(better)}")
    if worse := [device for device in kept if device in before.healthy - now.healthy]:
        parts.append(f"Unhealthy: {ids(worse)}")
    return parts
