"""Operations on a card: what preparation and scrubbing share when they work on its regions.

Both take a card's regions, hold their ports exclusively, bring them into a known condition, and
write every step into the ledger before it begins. A region that fails is taken out of service.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import structlog

from fpga_plugin.allocation.journal.records import Condition, Tenancy
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.obstacles import PROCESSES
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards import steps
from fpga_plugin.cards.blanks import Blanks
from fpga_plugin.cards.clocks import ClockPlan, ClockState, plan_clock
from fpga_plugin.cards.reports import Report, ReportObserver
from fpga_plugin.cards.workers import CardWorkers
from fpga_plugin.errors import (
    CardGoneError,
    FpgaPluginError,
    HardwareError,
    NotFinishedError,
    ProgrammingError,
    RefusedError,
    WrongImageError,
)
from fpga_plugin.hardware.backend import Backend, DriverSettings, Port
from fpga_plugin.hardware.faults import FaultKind
from fpga_plugin.hardware.grant import DeviceNumber, Path
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import AfuId, CardId, RegionId
from fpga_plugin.kubernetes.cgroup import Cgroup, PodCgroups
from fpga_plugin.kubernetes.names import PodUid

log = structlog.get_logger()


class TenancyActiveError(RefusedError):
    """A pod that had a region before still has processes."""


@dataclass(frozen=True, slots=True)
class CardOperations:
    """The parts that work on cards, and the operations that preparation and scrub share.

    Attributes:
        observer: called after each scrub and preparation.
        port_errors_logged: regions whose owner asked for `debug=1`, or whose pod is debugged.
        returns: how often its card had come back when the work on each region began.
        clocks: the clock state of the image that is on a region.
        doubted: regions whose last work failed although the card's signals are well.
    """

    ledger: Ledger
    backend: Backend
    blanks: Blanks
    workers: CardWorkers
    cgroups: PodCgroups
    observer: ReportObserver
    port_errors_logged: set[RegionId] = field(default_factory=set, init=False)
    clocks: dict[RegionId, ClockPlan] = field(default_factory=dict, init=False)
    returns: dict[RegionId, int] = field(default_factory=dict, init=False)
    doubted: set[RegionId] = field(default_factory=set, init=False)

    async def living(self, tenancies: Iterable[Tenancy]) -> Tenancy | None:
        """The first of these whose processes run, or may run; None: all of them are gone.

        This is the one place that decides whether a tenancy is gone. It needs both kubelet's word
        and a cgroup that is empty or gone. Either alone is not enough: between two containers of a
        pod the cgroup may be empty, and kubelet loses sight of pods that are deleted by force. If
        no pod's cgroup can be seen, or the pod was never known, kubelet's word counts alone
        (invariant 7).
        """
        for one in sorted(tenancies, key=lambda each: each.pod or ""):
            if not one.used:
                continue
            if not one.left:
                return one
            if one.pod is not None and await asyncio.to_thread(
                self._may_live, one.pod, one.cgroups
            ):
                return one
        return None

    async def check_gone(self, tenancies: Iterable[Tenancy]) -> None:
        """Check that no processes of these tenancies run (`living`).

        Raises:
            TenancyActiveError: some may.
        """
        if (one := await self.living(tenancies)) is not None:
            raise TenancyActiveError(
                f"pod {one.pod}, which had {one.region}, still runs",
                hint=f"try again once that pod has ended, as kubelet does; {PROCESSES}",
            )

    def check_drained(self, card_id: CardId) -> None:
        """Check that a card is out of service.

        Raises:
            RefusedError: it is not.
        """
        if card_id not in self.ledger.drained:
            raise RefusedError(
                f"card {card_id} is in service",
                hint=f"run `fpga-plugin card drain {card_id}` first",
            )

    def former(self, region: RegionId) -> frozenset[PodUid]:
        """Pods that had a region since it was last scrubbed, for reports."""
        return frozenset(
            one.pod for one in self.ledger.tenancies.left(region) if one.pod is not None
        )

    def owner(self, region: RegionId) -> Mapping[str, PodUid]:
        """The region's owner if known: a value of a log line."""
        allocation = self.ledger.region_allocation(region)
        return {} if allocation is None or allocation.pod is None else {"pod": allocation.pod}

    def _may_live(self, pod: PodUid, cgroups: Collection[Cgroup]) -> bool:
        return not self.cgroups.instance_gone(cgroups) and self.cgroups.may_live(pod)

    @asynccontextmanager
    async def ports(
        self, card: Card, regions: Sequence[Region]
    ) -> AsyncIterator[Mapping[RegionId, Port]]:
        """Hold ports exclusively; all of them, or none.

        Raises:
            PortInUseError: another process has one open.
            CardGoneError: one is gone.
            HardwareError: one cannot be opened, or its device number not be read.
            NotFinishedError: the node lacks what it takes, such as threads; or the plugin ends.
            JournalError: the device numbers cannot be written.
        """
        stack = ExitStack()
        numbers: dict[RegionId, Mapping[Path, DeviceNumber]] = {}

        def open_all() -> dict[RegionId, Port]:
            ports = {
                region.id: stack.enter_context(self.backend.open_port(card, region))
                for region in regions
            }
            numbers.update((region.id, self.backend.numbers(region)) for region in regions)
            return ports

        # Before they are opened: a card that goes meanwhile makes these ports another card's.
        self.begin(card, [region.id for region in regions])
        try:
            # Inside: a caller that is cancelled meanwhile learns so once they are open.
            ports = await self.workers.run(card.id, open_all)
            if not any(self._went(card, region.id) for region in regions):
                self.ledger.hardware.numbered(numbers)
            yield ports
        finally:
            try:
                await self.workers.finish(card.id, stack.close)
            except NotFinishedError:
                # No thread can be started. The close resets a port, which takes milliseconds, and
                # no work runs that it would wait for. Else the region is in use until we end.
                stack.close()

    @asynccontextmanager
    async def work(
        self,
        card: Card,
        regions: Sequence[Region],
        check: Callable[[], object],
        pod: PodUid | None = None,
    ) -> AsyncIterator["Work"]:
        """Hold regions' ports, for an owner's `pod` or the operator; report the work at the end.

        Raises:
            FpgaPluginError: a port cannot be held (`ports`), or the work must not begin (`check`).
        """
        check()
        reports = {
            region.id: Report(region.id, pod=pod, former=self.former(region.id))
            for region in regions
        }
        async with self.ports(card, regions) as ports:
            try:
                yield Work(self, card, ports, reports, check)
            finally:
                self.settle(reports)
                for report in reports.values():
                    if report.steps:
                        self.report(report)

    def begin(self, card: Card, regions: Iterable[RegionId]) -> None:
        """Bind the work on these regions to the card that is present now, not a later one."""
        for region in regions:
            if self.returns.get(region) != (returns := self.ledger.returns[card.id]):
                self.doubted.discard(region)
            self.returns[region] = returns

    async def step(
        self,
        card: Card,
        report: Report,
        function: Callable[[], None],
        *,
        pr: bool,
        blank: bool = False,
    ) -> None:
        """One blocking step on a region that the ledger has as SCRUBBING.

        `pr`: a partial reconfiguration is part of it; `blank`: it is the blank bitstream's.

        After any failure the ledger has the condition: FAULTED if only an operator or a rebind can
        mend it, DIRTY if a later scrub may.

        Raises:
            FpgaPluginError: it failed.
        """
        region = report.region
        try:
            with self.workers.in_flight(region) if pr else nullcontext():
                await self.workers.run(card.id, function)
            # A check before the step would protect nothing more: while the card's lock is held, no
            # container starts on whatever card is there by now.
            self._check_still_there(card, region)
            if pr:
                self.doubted.discard(region)
        except FpgaPluginError as error:
            await self.failed(card, report, error, blank=blank)
            if isinstance(error, HardwareError):
                self._check_still_there(card, region)
            raise
        except Exception as error:
            report.failed(error)
            self.ledger.work.dirty([region], "an unexpected error; see the log")
            log.exception("unexpected error", region=region, **report.concerned())
            raise

    async def failed(
        self, card: Card, report: Report, error: FpgaPluginError, *, blank: bool = False
    ) -> None:
        """Work on a region failed: decide its condition, as `step` says."""
        region = report.region
        report.failed(error)
        match error:
            case WrongImageError() if blank:
                # A tenant's file may be mislabelled; a blank's wrong AFU id shows a fault.
                self.ledger.work.faulted(region, error.message)
            case HardwareError() if not (
                isinstance(error, WrongImageError) or self._went(card, region)
            ):
                await self._judge(card, report, error)
            case _:
                self.ledger.work.dirty([region], error.message)

    def _went(self, card: Card, region: RegionId) -> bool:
        """Whether the card went since `begin`, even if it came back."""
        return self.returns[region] != self.ledger.returns[card.id]

    def _check_still_there(self, card: Card, region: RegionId) -> None:
        if self._went(card, region):
            raise CardGoneError(
                f"card {card.id} was removed while region {region} was worked on",
                hint="the next try works on what is there now",
            )

    async def _judge(self, card: Card, report: Report, error: HardwareError) -> None:
        """Decide whether the hardware reports trouble that may pass, or the region is lost.

        A PR that failed before anything was written leaves a port that still answers; one that
        failed on the way leaves it poisoned, which reads as such. Any other failure of which the
        card's own signals know nothing may be that of a card that was swapped between two looks:
        with its ports opened again it gets one more try. So does an accelerator that hangs.
        """
        region = report.region
        try:
            health = await self.workers.finish(card.id, self.backend.health, card)
        except NotFinishedError:  # no thread: nothing is known of the card
            self.ledger.work.dirty([region], error.message)
            return
        except FpgaPluginError:
            health = None
        fault = None if health is None else health.failed.get(region)
        passing = fault is not None and fault.kind is FaultKind.TRANSIENT
        sound = health is not None and (fault is None or not fault.stops_work)
        again = sound and (isinstance(error, ProgrammingError) or region not in self.doubted)
        if passing or again:
            self.doubted.add(region)
            self.ledger.work.dirty([region], error.message)
        else:
            self.ledger.work.faulted(region, error.message)
        if health is not None:
            self.ledger.hardware.set_failing(card.id, health.failed)
        log.error(
            "region failed",
            region=region,
            error=str(error),
            why=error.why or None,
            condition=str(self.ledger.record(region).condition),
            **report.concerned(),
        )

    async def clear_memory(self, card: Card, reports: Mapping[RegionId, Report]) -> None:
        """Clear the card's memory, unless another region may still use it: then it stays pending.

        The knobs belong to the card: they would wipe a neighbour's memory too. While another region
        is not clean, its image may write the memory again. So the clear is done only once all
        regions are clean.

        Raises:
            FpgaPluginError: it failed; none of `reports`' regions may be given out.
        """
        if not card.clears_memory:
            return
        if (former := await self.living(self.ledger.left_on(card.id, but=reports))) is not None:
            log.info(
                "memory is not cleared while an earlier tenant runs",
                card=card.id,
                pod=former.pod,
                regions=list(reports),
            )
            return
        if self.ledger.others_owned(card.id, reports):
            return
        first, *others = reports.values()
        try:
            await self.step(
                card, first, lambda: steps.clear_memory(self.backend, card, first), pr=False
            )
        except FpgaPluginError as error:
            # One card, one memory: the conclusion for the first region holds for all.
            lost = self.ledger.record(first.region).condition is Condition.FAULTED
            for report in others:
                report.failed(error)
                if lost:
                    self.ledger.work.faulted(report.region, error.message)
                else:
                    self.ledger.work.dirty([report.region], error.message)
            raise
        for report in others:
            report.steps.append(first.steps[-1])
        if self.ledger.others_clean(card, reports):
            self.ledger.work.set_memory_clear_pending(card.id, open_=False)

    def report(self, report: Report) -> None:
        """Log the work on a region, and call the observer."""
        fields: dict[str, object] = {
            "region": report.region,
            "steps": {step.name: round(step.seconds, 6) for step in report.steps},
            "notes": [step.note for step in report.steps if step.note not in {"", report.error}],
            "afu_id": report.afu_id,
            "error": report.error or None,
            "condition": str(self.ledger.record(report.region).condition),
            **report.concerned(),
        }
        if report.error:
            log.warning(
                "region not scrubbed" if report.scrubbed else "region not prepared", **fields
            )
        else:
            log.info("region scrubbed" if report.scrubbed else "region prepared", **fields)
        self.observer.reported(report)

    def settle(self, regions: Iterable[RegionId]) -> None:
        """Mark regions DIRTY that are still SCRUBBING although the work has ended."""
        left = [r for r in regions if self.ledger.record(r).condition is Condition.SCRUBBING]
        if left:  # else nothing that could not be written before is tried again here
            self.ledger.work.dirty(left, "the work on it was not finished")


@dataclass(frozen=True, slots=True)
class Work:
    """Work for one owner, or for the operator, on regions whose ports are held.

    Attributes:
        operations: shared by all work.
        card: with its lock held.
        ports: of the regions.
        reports: of the regions.
        check: called before each step; raises if the work must not go on.
    """

    operations: CardOperations
    card: Card
    ports: Mapping[RegionId, Port]
    reports: Mapping[RegionId, Report]
    check: Callable[[], object]

    async def scrub(
        self,
        regions: Sequence[Region],
        blank: Bitstream | None,
        keeping: Collection[RegionId] = (),
    ) -> None:
        """Scrub regions but for the card's memory, whose clear is pending from now on.

        `keeping`: regions whose function stays (`Naming.keeps`).

        Raises:
            FpgaPluginError: one failed, and the ledger knows.
        """
        operations = self.operations
        self.check()
        operations.ledger.work.working([region.id for region in regions])
        if self.card.clears_memory:
            operations.ledger.work.set_memory_clear_pending(self.card.id, open_=True)
        for region in regions:
            self.check()
            operations.port_errors_logged.discard(region.id)
            operations.clocks.pop(region.id, None)
            port, report = self.ports[region.id], self.reports[region.id]
            keep = region.id in keeping
            scrub = partial(
                steps.scrub, operations.backend, self.card, region, port, blank, report, keep=keep
            )
            await operations.step(self.card, report, scrub, pr=not keep, blank=True)

    async def program(
        self,
        region: Region,
        image: Bitstream | AfuId,
        settings: DriverSettings,
        *,
        quiesce: bool = False,
    ) -> ClockPlan:
        """Bring a clean region, or its owner's own, to an image; or confirm that it has a function.

        `quiesce`: its present image may have run. The region stays SCRUBBING.

        Raises:
            FpgaPluginError: it failed, and the ledger knows.
        """
        operations, card = self.operations, self.card
        port, report = self.ports[region.id], self.reports[region.id]
        clock = await self._plan_clock(region, image, settings)
        self.check()  # the clock was read meanwhile
        # The ledger remembers an image until a blank replaces it: it never counts as a function.
        tenant = image.afu_id if isinstance(image, Bitstream) else None
        operations.ledger.work.working([region.id], image=tenant)

        def program() -> None:
            if quiesce:
                steps.quiesce(operations.backend, card, region, port, report)
            steps.set_parameters(operations.backend, card, region, clock, report)
            if isinstance(image, Bitstream):
                steps.program(port, image, report, name="program")
            else:
                steps.verify(port, image, report, function=True)

        operations.port_errors_logged.discard(region.id)
        await operations.step(card, report, program, pr=isinstance(image, Bitstream))
        if settings.debug:
            operations.port_errors_logged.add(region.id)
        operations.clocks[region.id] = clock
        return clock

    async def _plan_clock(
        self, region: Region, image: Bitstream | AfuId, settings: DriverSettings
    ) -> ClockPlan:
        """Plan an image's clock; before the PR, and after a scrub restored the default.

        Raises:
            FpgaPluginError: the image would run too fast, or the card's values make no sense; the
                region is unchanged.
        """
        report, backend = self.reports[region.id], self.operations.backend
        try:
            made = await self.operations.workers.run(
                self.card.id, plan_clock, backend, self.card, region, image, settings
            )
        except FpgaPluginError as error:
            report.failed(error)
            raise
        if made.state is ClockState.NOT_CHECKED:
            log.warning(
                "an image's clock is not checked",
                region=region.id,
                clock=made.detail,
                hint="above the frequency that it was built for it computes wrongly",
                **report.concerned(),
            )
        return made
