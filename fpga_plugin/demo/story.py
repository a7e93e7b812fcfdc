"""The story: a pod's life on a node, from what is advertised before it to what is after it.

It does what a cluster would do, in kubelet's order, and explains itself. What the plugin does
meanwhile is reported by the recorder. Which kubelet it is, the node's profile says.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from fpga_plugin.allocation.journal.records import CLEAN, Condition, Ownership
from fpga_plugin.allocation.lists import DeviceLists
from fpga_plugin.cards.blanks import NO_BLANK
from fpga_plugin.demo.double import AdmissionError, rpc_error
from fpga_plugin.demo.events import Failure
from fpga_plugin.demo.node import DemoNode
from fpga_plugin.demo.output import Output, ids, milliseconds, short
from fpga_plugin.demo.plugins import DeviceList, NoEndpointError
from fpga_plugin.demo.pod import DemoContainer
from fpga_plugin.demo.pod_manifest import PodManifest
from fpga_plugin.demo.recorder import Recorder
from fpga_plugin.demo.scheduling import schedule
from fpga_plugin.demo.words import Words, words
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import RegionId
from fpga_plugin.kubernetes.names import ResourceName

RETRY_SECONDS = 0.5
"""Kubelet tries a container again after some 10 s; the demo does not wait so long."""

TRIES = 6

SETTLE_SECONDS = 30.0
"""How long the plugin may take for what it does in the background; it takes about a second."""


class StuckError(FpgaPluginError):
    """The plugin did not reach the expected state in time."""


class _PodFailedError(Exception):
    """The pod's event was shown; what is left is to clear up after it."""


@dataclass(slots=True)
class Story:
    """One pod on one node."""

    manifest: PodManifest
    node: DemoNode
    recorder: Recorder
    output: Output
    crash: bool = True
    """Whether each container crashes once and starts again."""

    async def tell(self) -> bool:
        """From the plugin's start to the pod's end; returns whether all went well.

        Raises:
            FpgaPluginError: the pod never got to kubelet, or the plugin is stuck.
        """
        await self._plugin_starts()
        before = self._advertised()
        allocatable = {name: len(healthy) for name, (_, healthy) in before.items()}
        schedule(self.manifest.pod, allocatable, self._problems()[:3])
        self.output.detail = True
        started: list[DemoContainer] = []
        try:
            await self._admit()
            await self._start(started)
            if self.crash:
                await self._restart(started)
        except _PodFailedError:
            await self._end(started, "The pod has failed and is deleted", "is deleted")
            return False
        await self._end(started, "The pod ends", self._words.ends)
        if self._advertised() != before:
            self._show_advertised("advertises")
            raise StuckError("the node does not advertise what it did before the pod")
        self._step("plugin", "advertises what it did before the pod")
        self._sum_up()
        return True

    # ---------------------------------------------------------------- the parts

    async def _plugin_starts(self) -> None:
        self.output.heading(
            "The plugin starts and registers",
            "Nothing is known of the regions after a boot, so each is scrubbed before it is"
            " offered: reset, blank bitstream, memory cleared, verified.",
        )
        for resource in self._lists.resources():
            with self._limit(f"{resource} was not registered"):
                await self.node.kubelet.wait_for(resource, timeout=SETTLE_SECONDS)
        cards = self.node.plugin.ledger.cards.values()
        regions = sum(len(card.regions) for card in cards)
        self._step("plugin", f"finds {len(cards)} cards with {regions} regions")
        await self._until_settled()
        await self._kubelet_has_lists()
        clean = sum(state.condition in CLEAN for state in self.recorder.regions.values())
        self._show_advertised(f"has scrubbed {clean} of them, and advertises")

    async def _admit(self) -> None:
        pod = self.manifest.pod
        self.output.heading(
            "The pod is admitted: kubelet picks devices, the plugin grants them",
            "Allocate only records who has what: it must answer in milliseconds. What that makes"
            " impossible disappears from the lists.",
        )
        try:
            await self.node.kubelet.admit(pod)
        except AdmissionError as error:
            status = "" if error.call is None else error.call.status.name
            await self._kubelet_has_lists()
            self._fail(
                f"UnexpectedAdmissionError: {error.message}", status=status, method="Allocate"
            )
        await self._kubelet_has_lists()
        lines = []
        for container in pod.all_containers:
            for held in self.node.kubelet.held.values():
                if held.container == container.name:
                    nodes = ", ".join(device.host_path for device in held.response.devices)
                    lines.append(
                        f"  container {container.name} will get {nodes}"
                        f" ({ids(held.ids)}, {short(held.resource)})"
                    )
        self.output.text(["", *lines])

    async def _start(self, started: list[DemoContainer]) -> None:
        pod = self.manifest.pod
        self.output.heading(
            "The containers start: before each, the plugin programs what it asks for",
            f"{self._words.start} Success means that the region's AFU id was read back. SCRUBBING:"
            " being worked on.",
        )
        for container in pod.all_containers:
            if not container.devices:
                continue
            await self._start_container(container, started)
            if container in pod.init_containers and not container.restartable:
                self._show_running(container, f"init container {container.name} runs to its end")
                self.node.kubelet.end_container(pod, container.name, 0)
            else:
                self._show_running(container, f"container {container.name} runs")
        self._show_regions()

    async def _restart(self, started: list[DemoContainer]) -> None:
        pod = self.manifest.pod
        running = [
            container
            for container in pod.all_containers
            if container in started and (container in pod.containers or container.restartable)
        ]
        if not running:
            return
        aside = (
            "" if self.manifest.restart_policy == "Always" else " (whatever its restartPolicy says)"
        )
        self.output.heading(
            f"{'The container restarts' if len(running) == 1 else 'The containers restart'}{aside}:"
            " programmed again",
            f"A container that crashed may have left anything on its region. {self._words.restart}",
        )
        for container in running:
            self._step("pod", f"container {container.name} crashes")
            self.node.kubelet.end_container(pod, container.name, 1)
            await self._start_container(container, started)
            await self._poststop(container)
            started.remove(container)  # its first instance is gone
        self._show_regions()

    async def _end(self, started: Sequence[DemoContainer], title: str, what: str) -> None:
        kubelet, pod = self.node.kubelet, self.manifest.pod
        self.output.heading(
            f"{title}: its regions are scrubbed and given back", self._words.release
        )
        self._step("pod", what)
        for container in started:
            await self._poststop(container)
        try:
            await kubelet.end_pod(pod)
        except (GRPCError, NoEndpointError) as error:
            raise StuckError(f"Deallocate failed: {_text(error)}") from error
        await self._until_settled(released=True)
        await self._kubelet_has_lists()
        self._show_regions()

    # ---------------------------------------------------------------- kubelet's moves

    async def _start_container(
        self, container: DemoContainer, started: list[DemoContainer]
    ) -> None:
        """PreStart until it succeeds; raises when it is refused."""
        for tries_left in reversed(range(TRIES)):
            # The fork has created the container by then: whatever the answer, it is removed later.
            started.append(container)
            try:
                await self.node.kubelet.start_container(self.manifest.pod, container.name)
            except (GRPCError, NoEndpointError) as error:
                again = error.status is Status.UNAVAILABLE and tries_left > 0
                event = Failure(
                    "Error: device plugin PreStartContainer rpc failed with err: " + _text(error),
                    error.status.name,
                    "PreStartContainer",
                    self.manifest.pod.name,
                    container.name,
                    final=not again,
                )
                self.recorder.emit(event)
                if not again:
                    self._step("kubelet", "would try again and again; the demo gives up")
                    raise _PodFailedError from error
                self._step(
                    "kubelet", f"tries again (here after {RETRY_SECONDS:g} s, else after 10 s)"
                )
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _poststop(self, container: DemoContainer) -> None:
        try:
            await self.node.kubelet.remove_container(self.manifest.pod, container.name)
        except (GRPCError, NoEndpointError) as error:
            raise StuckError(f"PostStopContainer failed: {_text(error)}") from error

    def _fail(self, message: str, *, status: str, method: str) -> None:
        self.recorder.emit(Failure(message, status, method, self.manifest.pod.name))
        raise _PodFailedError

    # ---------------------------------------------------------------- waiting

    async def _until_settled(self, *, released: bool = False) -> None:
        """The plugin has no work left on any region without an owner.

        `released`: and no region has an owner.
        """
        ledger = self.node.plugin.ledger
        changed = asyncio.Event()
        unsubscribe = ledger.subscribe(lambda _: changed.set())
        try:
            with self._limit("regions are still being worked on"):
                async with asyncio.timeout(SETTLE_SECONDS):
                    while (released and ledger.allocations) or not self._settled():
                        changed.clear()
                        await changed.wait()
        finally:
            unsubscribe()

    def _settled(self) -> bool:
        ledger = self.node.plugin.ledger
        for card in ledger.cards.values():
            records = [
                ledger.record(region.id)
                for region in card.regions
                if ledger.ownership(region.id) is Ownership.FREE
            ]
            if card.interface_id not in self.node.scrubbable:
                # The plugin looked for a blank bitstream, and said so.
                if not all(record.reason.startswith(NO_BLANK) for record in records):
                    return False
                continue
            if not all(record.condition in CLEAN | {Condition.FAULTED} for record in records):
                return False
            clean = all(record.condition in CLEAN for record in records)
            if (
                clean
                and card.id in ledger.memory_clear_pending
                and not ledger.allocations_on(card.id)
            ):
                return False
        return True

    @property
    def _words(self) -> Words:
        return words(self.node.kubelet.profile)

    @property
    def _lists(self) -> DeviceLists:
        api = self.node.plugin.device_plugin
        assert api is not None, "the demo serves the device plugin API"
        return api.lists

    async def _kubelet_has_lists(self) -> None:
        """Kubelet's lists are the plugin's."""
        for resource in self._lists.resources():
            with self._limit(f"kubelet has an old list of {resource}"):
                await self.node.kubelet.wait_for(resource, self._is_present, timeout=SETTLE_SECONDS)
        if self.output.failed is not None:
            raise self.output.failed

    def _is_present(self, listed: DeviceList) -> bool:
        present = self._lists.devices(listed.resource)
        return [(d.id, d.healthy) for d in present] == [
            (device, device in listed.healthy) for device in listed.ids
        ]

    @contextmanager
    def _limit(self, problem: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise StuckError(
                f"{problem} after {SETTLE_SECONDS:g} s",
                hint="run it again with --log to see the plugin's log",
            ) from None

    # ---------------------------------------------------------------- showing

    def _advertised(self) -> dict[ResourceName, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Ids and healthy ids of each resource, as kubelet has them."""
        return {
            name: (listed.ids, tuple(d for d in listed.ids if d in listed.healthy))
            for name, listed in self.node.kubelet.lists.items()
        }

    def _step(self, who: str, text: str, more: Iterable[str] = ()) -> None:
        self.output.step(self.recorder.seconds, who, text, more)

    def _show_running(self, container: DemoContainer, text: str) -> None:
        """Show that the container runs, and what it sees of its devices."""
        seen = [
            ids(device.container_path for device in held.response.devices)
            for held in self.node.kubelet.held.values()
            if (held.pod, held.container) == (self.manifest.pod.uid, container.name)
        ]
        self._step("pod", f"{text}. It sees", seen)

    def _show_advertised(self, text: str) -> None:
        lines = []
        for name, (devices, healthy) in self._advertised().items():
            more = "" if healthy == devices else f" of {len(devices)}, the others are Unhealthy"
            lines.append(f"{len(healthy)} x {name}{more}")
        lines += [f"not offered: {problem}" for problem in self._problems()]
        self._step("plugin", text, lines)

    def _problems(self) -> list[str]:
        """Why free regions are not offered, each reason once."""
        return sorted(
            {
                state.reason
                for state in self.recorder.regions.values()
                if state.ownership is Ownership.FREE
                and state.condition not in CLEAN
                and state.reason
            }
        )

    def _show_regions(self) -> None:
        lines = ["", "  what each region holds now:"]
        plain = 0
        for state in self.recorder.regions.values():
            if state.ownership is Ownership.FREE and state.condition in CLEAN:
                plain += 1
                continue
            lines.append(
                f"    {state.region:<20}{state.ownership:<9}{state.condition:<12}"
                f"{self.output.names.get(state.afu_id or '') or state.afu_id or ''}"
            )
        if plain:
            others = "the others" if plain < len(self.recorder.regions) else "all"
            lines.append(f"    {others} ({plain}): FREE, BLANK")
        self.output.text(lines)

    def _sum_up(self) -> None:
        recorder = self.recorder
        programmed: dict[RegionId, list[float]] = {}
        scrubs: dict[RegionId, int] = {}
        for work in recorder.work:
            for step in work.report.steps:
                if step.name == "program":
                    programmed.setdefault(work.report.region, []).append(step.seconds)
            if work.report.scrubbed and work.report.region in programmed:
                scrubs[work.report.region] = scrubs.get(work.report.region, 0) + 1
        lines = [""]
        for region, times in programmed.items():
            lines.append(
                f"  {region} was programmed {_times(len(times))} (the simulated reconfiguration"
                f" takes {milliseconds(min(times))}) and scrubbed {_times(scrubs.get(region, 0))}."
            )
        if not programmed:
            lines.append("  The pod asked for no bitstream: its regions were handed over blank.")
        lines += [
            "  The node advertises what it did before the pod.",
            f"  All of it took {recorder.seconds:.1f} s.",
            "",
            "  Your own pod and bitstreams: fpga-plugin demo --pod FILE --bitstreams DIR",
        ]
        self.output.heading("Done")
        self.output.text(lines)


def _text(error: GRPCError | NoEndpointError) -> str:
    return rpc_error(error) if isinstance(error, GRPCError) else str(error)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
