"""Debugging: the region of a container that failed is kept as it is, for its developer to look at.

A pod asks for it by an annotation, where the operator allows it. That is written into the journal
with the start of each of its containers; when the allocation has ended, the pod's status decides. A
region whose container failed is owned by nobody then and given to nobody, until its time is up, the
operator ends it (`fpga-plugin card release`), its hardware goes or the node boots. Then it is
scrubbed as after any owner. Of one node at most one pod's regions are kept at a time, so that
nobody takes all of them by failing.

It only ever delays a scrub. What is not known for certain delays nothing for long: a region whose
pod's status nobody reports is scrubbed.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import DebugHold
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.errors import FpgaPluginError, NoSourceError, quote
from fpga_plugin.ids import CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.names import PodName
from fpga_plugin.kubernetes.pod import Phase, Pod
from fpga_plugin.settings.settings import ServedApi, Settings

log = structlog.get_logger()

EVERY_NAMESPACE: Final = "*"

_SPAN: Final = re.compile(r"([1-9][0-9]{0,5})([smh])", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}

USUAL: Final = 600.0
"""Seconds for `true`: enough for `fpga-plugin card show`, and nobody misses the region for long."""

MOST: Final = 3600.0
"""Seconds that a pod can have: a region that nobody released is lost to others for so long."""

ASK_SECONDS: Final = 4.0
"""In which a source has to tell a pod; a PreStart waits for it.

Longer than kubelet's Pods API may take alone: the API server is asked after it."""

DECIDE_SECONDS: Final = 5.0
"""For which a status that does not show the end of the pod yet is asked for again."""

_PAUSE: Final = 0.2
"""Seconds between a change and the look that it causes: changes come in bursts."""


def boot_clock() -> float:
    """Seconds since the node booted, sleep included: no step of the wall clock moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What the operator allows.

    Attributes:
        annotation: by which a pod asks for it; its prefix is that of our resources.
        namespaces: whose pods may ask; `*`: all.
    """

    annotation: str
    namespaces: frozenset[str]

    @classmethod
    def by(cls, settings: Settings) -> "Allowed | None":
        """What the settings allow; None: no pod is debugged."""
        if settings.debug_namespaces is None:
            return None
        if settings.mode is ServedApi.DRA:
            log.warning(
                "no pod is debugged with FPGA_PLUGIN_MODE=dra",
                namespaces=settings.debug_namespaces,
                hint="the annotation is not read (docs/dra.md); leave FPGA_PLUGIN_DEBUG_NAMESPACES"
                " empty",
            )
            return None
        annotation = f"{settings.resource_prefix}/debug"
        return cls(annotation=annotation, namespaces=frozenset(settings.debug_namespaces))

    def to(self, namespace: str) -> bool:
        """Whether pods of a namespace may ask."""
        return not self.namespaces.isdisjoint({namespace, EVERY_NAMESPACE})

    def seconds(self, namespace: str, text: str) -> float:
        """For how long a pod's region is kept whose annotation says `text`.

        Raises:
            ValueError: the annotation has no effect.
        """
        if not self.to(namespace):
            raise ValueError(f"namespace {namespace} is not in FPGA_PLUGIN_DEBUG_NAMESPACES")
        try:
            return parse_keep(text)
        except ValueError as error:
            raise ValueError(f"its value is {quote(text)}: {error}") from None


class Debugging:
    """Keeps regions of failed containers for their developers.

    Args:
        operations: has the ledger, and whose port errors are logged.
        pods: reports pods' annotations and status.
        recorder: reports to pods.
        queue: where a card is added that may be scrubbed.
        allowed: what the operator allows; None: nothing, and what an earlier run kept ends.
        interval: seconds between two looks.
        clock: seconds since the node booted.
    """

    def __init__(
        self,
        operations: CardOperations,
        pods: PodDirectory,
        recorder: EventRecorder,
        queue: CardQueue,
        *,
        allowed: Allowed | None,
        interval: float,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._operations, self._ledger = operations, operations.ledger
        self._pods, self._recorder = pods, recorder
        self._queue = queue
        self._allowed = allowed
        self._interval, self._clock = interval, clock
        self._something = asyncio.Event()
        self._undecided: dict[RegionId, float] = {}
        if allowed is not None:
            self._ledger.subscribe(self._changed)
            for card in {card_of(region) for region in self._ledger.debug_holds}:
                self._changed(card)

    def _changed(self, card: CardId | None) -> None:
        """Log the port errors of what is debugged, and look whether something ended."""
        mine = [r for r in self._ledger.debug_holds if card_of(r) == card]
        for region in mine:
            if self._ledger.region_allocation(region) is not None:
                self._operations.port_errors_logged.add(region)
            self._something.set()

    def left(self, kept: DebugHold) -> float:
        """For how many seconds more a region is kept."""
        return max(kept.until - self._clock(), 0.0)

    def start(self) -> None:
        """End what an earlier run kept by settings that allowed it.

        Raises:
            JournalError: it cannot be written down.
        """
        if self._allowed is None:
            debug_holds.end(self._ledger, tuple(self._ledger.debug_holds))

    def work(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """What is to be done for as long as the plugin serves, by name."""
        return {} if self._allowed is None else {"debugging": self.run()}

    # ---------------------------------------------------------------- what a pod asks for

    async def requested(self, identity: Identity, devices: Sequence[DeviceId]) -> DebugHold | None:
        """What the pod of a PreStart asks for; None: nothing, or it may not."""
        if (allowed := self._allowed) is None or identity.pod is None:
            return None
        # Of a namespace that is known without asking anybody: its pods pay nothing for debugging.
        if identity.namespace and not allowed.to(identity.namespace):
            return None
        try:
            async with asyncio.timeout(ASK_SECONDS):
                pod = await self._pods.pod(identity.pod, identity.held.union(devices))
        except (NoSourceError, TimeoutError) as error:
            log.warning(
                "whether a pod is to be debugged is not known",
                pod=identity.pod,
                devices=list(devices),
                reason=str(error) or "no answer in time",
            )
            return None
        if (text := pod.annotations.get(allowed.annotation)) is None:
            return None
        try:
            seconds = allowed.seconds(pod.namespace, text)
        except ValueError as error:
            log.warning(
                "a debug annotation has no effect",
                pod=identity.pod,
                devices=list(devices),
                reason=str(error),
            )
            message = f"annotation {allowed.annotation} has no effect: {error}"
            self._recorder.warned(identity, devices, message, reason="FpgaDebugIgnored")
            return None
        log.info("a pod is debugged", pod=identity.pod, devices=list(devices), kept_seconds=seconds)
        return DebugHold(
            region=RegionId(""),  # the ledger's step names each
            pod=identity.pod,
            namespace=pod.namespace,
            name=pod.name,
            containers=tuple(sorted(identity.containers)),
            seconds=seconds,
        )

    # ---------------------------------------------------------------- what became of it

    async def run(self) -> None:
        """Follow the pods that are debugged, and end what has been kept for long enough."""
        pause = self._until_look()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._something.wait()
            await asyncio.sleep(min(_PAUSE, self._interval))
            self._something.clear()
            try:
                await self.look()
                pause = self._until_look()
            except JournalError as error:
                log.warning("debugging waits", error=str(error))
                pause = self._interval

    def _until_look(self) -> float | None:
        """Seconds to the next look, if nothing changes before; None: none is needed."""
        if not (held := self._ledger.debug_holds):
            return None
        ends = (self.left(debug) for debug in held.values() if debug.until)
        return min(self._interval, DECIDE_SECONDS if self._undecided else math.inf, *ends)

    async def look(self) -> None:
        """One look at every region that is debugged.

        Raises:
            JournalError: what follows from it cannot be written; the next look finds it again.
        """
        self._undecided = {
            r: at for r, at in self._undecided.items() if r in self._ledger.debug_holds
        }
        states: dict[tuple[str, tuple[str, ...]], str | None] = {}
        for region, debug in tuple(self._ledger.debug_holds.items()):
            key = debug.pod, debug.containers
            if not debug.until and key not in states:
                states[key] = await self._failure(debug)
            if self._ledger.debug_holds.get(region) is not debug:
                continue  # it changed while a status was read, and is looked at again
            if debug.until:
                self._look_at_kept(debug)
            else:
                self._look_at_owner(region, debug, states[key])

    def _look_at_kept(self, debug: DebugHold) -> None:
        left = self.left(debug)
        if left == 0:
            log.info("region no longer kept for debugging", region=debug.region, pod=debug.pod)
            self._end(debug.region)
        elif left > MOST:  # by a former version, which let the operator allow more
            debug_holds.put(self._ledger, replace(debug, until=self._clock() + MOST))

    async def _failure(self, debug: DebugHold) -> str | None:
        """What failed by the pod's status, empty: nothing; None: it does not say yet."""
        if self._pods.known(debug.pod) is None:
            self._pods.learn(debug.pod, PodName(debug.namespace, debug.name))
        try:
            async with asyncio.timeout(ASK_SECONDS):
                pod = await self._pods.pod(debug.pod, frozenset())
        except (FpgaPluginError, TimeoutError):
            return None
        return failure(pod, debug.containers)

    def _look_at_owner(self, region: RegionId, debug: DebugHold, failed: str | None) -> None:
        """Note what failed while the region has its owner, and decide when it has none."""
        ledger = self._ledger
        if failed is not None:
            debug = replace(debug, failure=failed)
            debug_holds.put(ledger, debug)
        if ledger.region_allocation(region) is not None:
            self._undecided.pop(region, None)
            return
        since = self._undecided.setdefault(region, self._clock())
        if failed is None and self._clock() - since < DECIDE_SECONDS:
            return
        del self._undecided[region]
        if not debug.failure:
            log.info("region not kept: no failure of its container is known", region=region)
            self._end(region)
        elif others := [one for one in debug_holds.all_in_force(ledger) if one.pod != debug.pod]:
            note = f"not kept: the node keeps region {others[0].region} of another pod already"
            self._tell(debug, f"region {region} is {note}", kept=False)
            self._end(region)
        else:
            seconds = min(debug.seconds, MOST)
            debug_holds.put(ledger, replace(debug, until=self._clock() + seconds))
            self._tell(
                debug,
                f"region {region} is kept as it is for {seconds:g} s:"
                f" {debug.failure}; look with `fpga-plugin card show {card_of(region)}`, end it"
                f" with `fpga-plugin card release {card_of(region)}`",
                kept=True,
            )

    def _end(self, region: RegionId) -> None:
        debug_holds.end(self._ledger, [region])
        # Whoever works on the card right now may have looked before.
        self._queue.add(card_of(region))

    def _tell(self, debug: DebugHold, note: str, *, kept: bool) -> None:
        log.warning(
            "region kept for debugging" if kept else "region not kept: another pod's is",
            region=debug.region,
            pod=debug.pod,
            namespace=debug.namespace,
            name=debug.name,
            failure=debug.failure,
        )
        reason = "FpgaRegionKept" if kept else "FpgaRegionNotKept"
        self._recorder.about_pod(debug.pod, PodName(debug.namespace, debug.name), reason, note)


def parse_keep(text: str) -> float:
    """For how many seconds the annotation asks to keep a region; never longer than `MOST`.

    The text is the tenant's: it is read strictly, and never reaches anything but this parser.

    Raises:
        ValueError: it is something else than `true`, `90s`, `15m` or `1h`.
    """
    if text == "true":
        return USUAL
    if (match := _SPAN.fullmatch(text)) is None:
        raise ValueError("write true, or a number with s, m or h behind it, such as 15m")
    return min(float(int(match[1]) * _SECONDS[match[2]]), MOST)


def failure(pod: Pod, containers: Sequence[str]) -> str | None:
    """What failed of a pod's containers; empty: nothing, None: one of them runs or may yet.

    Of a container that is started again, the failure of its last run does not count any more.
    """
    names = [one.name for one in (*pod.init, *pod.containers)]
    mine = [name for name in names if name in containers] or names
    for name in mine:
        state = pod.state(name)
        if state.phase is not Phase.RUNNING and state.ended is not None and state.ended.exit_code:
            return f"container {quote(name)} ended with exit code {state.ended.exit_code}"
    return "" if pod.ended else None
