"""The world outside the plugin, for the state machine of the life of a claim.

Cards that remember whose data is on them, containers that run on them, and an event loop whose
threads and clock move only when the test says so: between any two steps of the plugin anything may
happen, the death of its process included.
"""

import asyncio
import asyncio.base_events
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from doubles.cards import AFU, BLANK, INTERFACE, PREFIX, make_card
from ledger_support import MemoryJournal, ProcessDiedError

from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.bitstreams.id_names import Names
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards.reads import CardReads
from fpga_plugin.cards.reports import Report
from fpga_plugin.cards.workers import CardWorkers
from fpga_plugin.errors import (
    AcceleratorSilentError,
    CardGoneError,
    NoSourceError,
    PortInUseError,
    PortPoisonedError,
    ProgrammingError,
)
from fpga_plugin.hardware.backend import ClockLimits, DriverSettings, UserClock
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.image import Image, RawImage
from fpga_plugin.hardware.model import (
    Card,
    CardHealth,
    CardProblem,
    PciFunction,
    Region,
    ScanResult,
)
from fpga_plugin.ids import (
    AfuId,
    BitstreamId,
    CardId,
    DeviceId,
    InterfaceId,
    RegionId,
    device_variable,
)
from fpga_plugin.kubernetes.cgroup import Cgroup, PodPresence
from fpga_plugin.kubernetes.kubelet.checkpoint import Checkpoint as KubeletsCheckpoint
from fpga_plugin.kubernetes.kubelet.checkpoint import CheckpointEntry
from fpga_plugin.kubernetes.names import PodUid, ResourceName
from fpga_plugin.plugin import NodeParts, open_ledger
from fpga_plugin.plugin import Plugin as _Plugin
from fpga_plugin.policy.file import PolicyFile
from fpga_plugin.settings.settings import Advertise, RecoveryPolicy, ScrubPolicy, Settings

AFUS = (AFU, AfuId("a" * 32))
FACTORY = AfuId("f0" * 16)
INSTANCES = itertools.count(1)


# ------------------------------------------------------------------ time and threads


T = TypeVar("T")


class StillLoop(asyncio.base_events.BaseEventLoop):
    """An event loop without a selector; its clock stands until `pass_time`."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = self
        self.set_exception_handler(lambda *_: None)

    def time(self) -> float:
        return self._now

    def select(self, _timeout: float | None) -> list[object]:
        return []

    def _process_events(self, _events: list[object]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """No thread ever calls."""

    def settle(self) -> None:
        """Run what can run now; a task that calls it, by way of a test, runs on."""
        with self._running():
            while self._ready:
                self._run_once()

    @contextmanager
    def _running(self) -> Iterator[None]:
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)

    def pass_time(self) -> bool:
        """To the next timer; returns whether there was one."""
        times = [handle.when() for handle in self._scheduled if not handle.cancelled()]
        if not times:
            return False
        self._now = max(self._now, min(times))
        with self._running():
            self._run_once()
        self.settle()
        return True


@dataclass(eq=False)
class Job:
    """A call that some thread of the plugin makes."""

    function: Callable[[], object]
    future: asyncio.Future[object]

    def run(self) -> None:
        if self.future.cancelled():
            return
        try:
            result = self.function()
        except Exception as error:  # noqa: BLE001  # as a thread hands it over
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


# ------------------------------------------------------------------ hardware


@dataclass(eq=False)
class Slot:
    """A region of a card, as it really is."""

    id: RegionId
    afu: AfuId | None
    data: set[str] = field(default_factory=set)
    opens: set[str] = field(default_factory=set)
    held: object = None
    failing: str = ""
    silent: str = ""  # its accelerator is "hung", which the next PR mends, or "dead"
    hanging: AfuId | None = None  # an image whose accelerator always hangs

    @property
    def hangs(self) -> bool:
        return bool(self.silent) or self.afu in {self.hanging} - {None}

    def answer(self, afu: AfuId) -> AfuId:
        if self.hangs:
            raise AcceleratorSilentError(f"the accelerator of region {self.id} does not answer")
        return afu


@dataclass(eq=False)
class Board:
    """A card, as it really is."""

    card: Card
    present: bool = True
    unbound: bool = False
    slots: dict[RegionId, Slot] = field(default_factory=dict)
    memory: set[str] = field(default_factory=set)
    pcie_errors: dict[str, int] = field(default_factory=dict)


class Rack:
    """The backend over boards; every method is called by a job.

    Attributes:
        touched: is notified of each region that an operation is about to disturb.
        operations: how many more the process lives for; None: for ever.
        accepted: cards whose errors up to then count as none.
        bad_prs: how the next PRs fail: `error` (nothing written) or `poison`.
        done: what was done to regions, in order: (reset, region), (settings, region, which),
            (program, region, AFU id), (leave, region); and to a card: (memory, card),
            (reset card, card).
        lent: regions for which drivers of the plugin's are bound.
        limits: of every card's user clock.
        resets_move: the nodes of a card that was reset come back under other numbers.
    """

    def __init__(self, boards: Sequence[Board], touched: Callable[[RegionId], None]) -> None:
        self.boards = {board.card.id: board for board in boards}
        self.touched = touched
        self.boot = 1
        self.operations: int | None = None
        self.bad_prs: list[str] = []
        self.accepted: list[CardId] = []
        self.programs = 0
        self.done: list[tuple[object, ...]] = []
        self.lent: set[RegionId] = set()
        self.numbers_now: dict[RegionId, Mapping[str, str]] = {}
        self.limits: ClockLimits | None = None
        self.resets_move = True

    def _operate(self) -> None:
        if self.operations is not None:
            if self.operations == 0:
                raise ProcessDiedError
            self.operations -= 1

    def slot(self, region: RegionId) -> Slot:
        return self.boards[card_of(region)].slots[region]

    def present(self, region: RegionId) -> bool:
        return self.boards[card_of(region)].present

    def find(self, node: str) -> Slot | None:
        """The region that a device node leads to now."""
        for board in self.boards.values():
            for region in board.card.regions if board.present else ():
                if node in region.grant.nodes:
                    return board.slots[region.id]
        return None

    # Backend

    def boot_id(self) -> str:
        return f"boot {self.boot}"

    def card_ids(self) -> list[CardId]:
        return [b.card.id for b in self.boards.values() if b.present]

    def scan(self) -> ScanResult:
        return ScanResult({b.card.id: b.card for b in self.boards.values() if b.present})

    def scan_card(self, card: CardId) -> Card | CardProblem | None:
        board = self.boards[card]
        return board.card if board.present else None

    @contextmanager
    def open_port(self, card: Card, region: Region) -> Iterator["Hand"]:
        self._operate()
        board = self.boards[card.id]
        slot = board.slots[region.id]
        if not board.present or region not in board.card.regions:
            raise CardGoneError(f"port of region {region.id} is gone")
        if slot.opens or slot.held:
            raise PortInUseError(f"{region.grant} of region {region.id} is in use")
        hand = slot.held = Hand(self, board, region, slot)
        try:
            yield hand
        finally:
            if slot.held is hand:
                slot.held = None

    def afu_id(self, region: Region) -> AfuId:
        board = self.boards[region.card]
        if not board.present or region not in board.card.regions:
            raise CardGoneError(f"region {region.id} is gone")
        afu = self.slot(region.id).afu
        if afu is None:
            raise PortPoisonedError(f"region {region.id} is poisoned")
        return self.slot(region.id).answer(afu)

    def functions(self, card: CardId) -> list[PciFunction]:
        return []

    def make_functions(self, card: CardId, *, make: bool) -> None:
        raise AssertionError("nobody asked")

    def numbers(self, region: Region) -> Mapping[str, str]:
        return self.numbers_now.get(region.id, region.numbers)

    def bound_by_plugin(self, region: Region) -> bool:
        return region.id in self.lent

    def give_back(self, card: Card, region: Region) -> None:
        self.lent.remove(region.id)

    def clock_limits(self, card: Card, region: Region) -> ClockLimits | None:
        return self.limits

    def user_clock(self, region: Region) -> UserClock:
        return UserClock(None, None, "nothing measures it")

    def apply_settings(self, card: Card, region: Region, settings: DriverSettings) -> None:
        self._operate()
        self.done.append(("settings", region.id, settings))

    def port_errors(self, region: Region) -> Mapping[str, int]:
        return {}

    def clear_memory(self, card: Card) -> None:
        self._operate()
        board = self.boards[card.id]
        if not board.present:
            raise CardGoneError(f"card {card.id} is gone")
        board.memory.clear()
        self.done.append(("memory", card.id))

    def rebind(self, card: Card) -> None:
        self._operate()
        board = self.boards[card.id]
        if not board.present:
            raise CardGoneError(f"card {card.id} is gone")
        for region in card.regions:
            slot = board.slots[region.id]
            if slot.opens or slot.held:
                raise PortInUseError(f"{region.grant} is in use")  # the kernel would crash
        for region in card.regions:
            self.touched(region.id)
        board.present, board.unbound = False, True
        self._operate()
        self.bind(card.id)
        board.card = replace(
            board.card,
            regions=tuple(replace(r, handle=next(INSTANCES)) for r in board.card.regions),
        )
        for slot in board.slots.values():
            slot.afu = slot.afu or FACTORY

    def bind(self, card: CardId) -> None:
        board = self.boards[card]
        if board.unbound:
            board.present, board.unbound = True, False
        if not board.present:
            raise CardGoneError(f"card {card} is gone")

    def reset(self, card: Card) -> None:
        """Who has a node is gone, and the node may be another one; data stay for the blank."""
        self._operate()
        board = self.boards[card.id]
        if not board.present:
            raise CardGoneError(f"card {card.id} is gone")
        self.done.append(("reset card", card.id))
        for region in board.card.regions:
            self.touched(region.id)
            slot = board.slots[region.id]
            slot.afu = FACTORY
            slot.opens.clear()
        if not self.resets_move:
            return
        board.card = replace(
            board.card,
            regions=tuple(
                replace(r, grant=replace(r.grant, nodes=(f"/dev/moved.{next(INSTANCES)}",)))
                for r in board.card.regions
            ),
        )

    def rebind_advice(self, card: Card) -> str:
        return f"echo {card.address} > unbind; echo {card.address} > bind"

    def health(self, card: Card) -> CardHealth:
        board = self.boards[card.id]
        hung = Fault(FaultKind.CURABLE, "hung: it does not answer")
        pcie = Fault(FaultKind.CURABLE, "pcie: PcieError")
        failed = {s.id: pcie for s in board.slots.values() if board.pcie_errors}
        failed |= {s.id: hung for s in board.slots.values() if s.hangs}
        failed |= {
            s.id: Fault(FaultKind.TRANSIENT, s.failing) for s in board.slots.values() if s.failing
        }
        poisoned = Fault(FaultKind.POISONED, "poisoned: PR failed")
        failed |= {s.id: poisoned for s in board.slots.values() if s.afu is None}
        return CardHealth(failed)

    def accept_errors(self, card: CardId) -> None:
        self.accepted.append(card)

    def clear_errors(self, card: Card) -> Mapping[str, int]:
        board = self.boards[card.id]
        errors, board.pcie_errors = board.pcie_errors, {}
        return errors


@dataclass(eq=False)
class Hand:
    """A port, held exclusively."""

    rack: Rack
    board: Board
    region: Region
    slot: Slot

    def _operate(self) -> None:
        self.rack._operate()
        if not self.board.present or self.region not in self.board.card.regions:
            raise CardGoneError(f"region {self.slot.id} is gone")
        self.rack.touched(self.slot.id)

    def reset(self) -> None:
        self._operate()
        self.rack.done.append(("reset", self.slot.id))

    def clear_errors(self) -> Mapping[str, int]:
        return {}

    def leave(self) -> None:
        self._operate()
        self.rack.done.append(("leave", self.slot.id))

    def program(self, image: Image) -> None:
        self._operate()
        name = bytes(image.data).decode()
        self.rack.programs += 1
        self.rack.done.append(("program", self.slot.id, name))
        how = self.rack.bad_prs.pop(0) if self.rack.bad_prs else ""
        if how == "poison":
            self.slot.afu = None
        if how:
            raise ProgrammingError(f"PR of region {self.slot.id} failed")
        if self.slot.afu is None:
            return  # the kernel reports success on a poisoned port
        self.slot.afu = AfuId(name)
        if self.slot.silent == "hung":
            self.slot.silent = ""
        if self.slot.afu == BLANK:
            self.slot.data.clear()

    def afu_id(self, expected: AfuId | None = None) -> AfuId:
        self.rack._operate()
        if self.slot.afu is None:
            raise PortPoisonedError(f"region {self.slot.id} is poisoned")
        return self.slot.answer(self.slot.afu)


# ------------------------------------------------------------------ kubelet's side


@dataclass(eq=False)
class Pod:
    """A pod, as kubelet and the node have it.

    Attributes:
        active: kubelet holds the devices for it.
        nodes: what Allocate answered, cached for ever.
        running: a container of it runs, as a ghost also after `active` ended.
        known: the plugin heard of its uid.
        attached: regions that its running container can reach.
        owed: containers that were created and whose PostStop may still come.
        unheard: those of them whose PreStart the plugin did not take in.
        call: the PreStart under way, and what it asks for each region.
        mark: of its data; no other pod's, though its uid comes again.
    """

    uid: PodUid
    resource: ResourceName
    devices: tuple[DeviceId, ...]
    nodes: dict[RegionId, str]
    active: bool = True
    running: bool = False
    known: bool = False
    attached: set[RegionId] = field(default_factory=set)
    owed: int = 0
    unheard: int = 0
    call: "asyncio.Task[None] | None" = None
    asked: dict[RegionId, AfuId] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: f"pod {next(INSTANCES)}")


@dataclass(frozen=True)
class KnownIdentity(Identity):
    """An identity that brings kubelet's copy of the grant."""

    nodes: tuple[tuple[str, str], ...] = ()

    def granted_nodes(self) -> dict[str, str]:
        return dict(self.nodes)


class Checkpoint(PodDirectory):
    """`PodDirectory` over the pods."""

    def __init__(self, pods: list[Pod]) -> None:
        super().__init__(kubelet_dir="/nowhere", prefix=PREFIX)
        self._pods = pods

    async def checkpoint(self) -> KubeletsCheckpoint:
        return await asyncio.to_thread(self._read)

    def _read(self) -> KubeletsCheckpoint:
        return KubeletsCheckpoint(
            tuple(
                CheckpointEntry(pod.uid, "main", pod.resource, frozenset(pod.devices))
                for pod in self._pods
                if pod.active and pod.devices
            )
        )

    async def identify(
        self, resource: ResourceName, devices: Sequence[DeviceId], _gone: object
    ) -> Identity:
        return await asyncio.to_thread(self._identify, resource, devices)

    def _identify(self, resource: ResourceName, devices: Sequence[DeviceId]) -> Identity:
        holders = [
            pod
            for pod in self._pods
            if pod.active and pod.resource == resource and set(pod.devices) == set(devices)
        ]
        if len(holders) > 1:
            raise NoSourceError("kubelet's checkpoint names several pods")
        if not holders:
            return Identity()
        (pod,) = holders
        return KnownIdentity(
            pod.uid,
            frozenset({"main"}),
            frozenset({resource}),
            nodes=tuple((device_variable(r), node) for r, node in pod.nodes.items()),
        )


class Cgroups:
    """`PodCgroups` over the pods; each pod has a cgroup of its own, though its uid comes again."""

    def __init__(self, pods: list[Pod]) -> None:
        self._pods = pods

    def state(self, uid: PodUid) -> PodPresence:
        alive = any(pod.running for pod in self._pods if pod.uid == uid)
        return PodPresence.ALIVE if alive else PodPresence.GONE

    def may_live(self, uid: PodUid) -> bool:
        return self.state(uid) is PodPresence.ALIVE

    may_run_containers = may_live

    def instance(self, uid: PodUid) -> tuple[Cgroup, ...]:
        return tuple(
            Cgroup("/cgroup", f"/cgroup/pod{uid}", 1, inode)
            for inode, pod in enumerate(self._pods)
            if pod.uid == uid and (pod.active or pod.running)
        )

    def instance_gone(self, cgroups: Collection[Cgroup]) -> bool:
        pods = [self._pods[one.inode] for one in cgroups]
        return bool(pods) and not any(pod.active or pod.running for pod in pods)

    def expect(self, _uid: PodUid) -> bool:
        return True


class Reads(CardReads):
    """Each read is a job of its own, as all calls in threads are here."""

    async def run(self, card: CardId, function: Callable[[], T]) -> T:
        return await asyncio.to_thread(function)

    async def each(
        self, cards: Iterable[CardId], function: Callable[[CardId], T]
    ) -> tuple[dict[CardId, T], frozenset[CardId]]:
        wanted = tuple(cards)
        return await asyncio.to_thread(lambda: {c: function(c) for c in wanted}), frozenset()


class NoLink:
    """`Link` to a kubelet that has every list at once."""

    def sent(self) -> Mapping[ResourceName, frozenset[str]]:
        return {}

    def resend(self) -> None:
        """It has them."""

    def reregister(self, resource: ResourceName) -> None:
        """It has them."""

    async def announced(self) -> None:
        """It has them."""


class Nobody:
    """`Observer` that looks away."""

    def reported(self, report: Report) -> None:
        """Forget it."""

    def refused(self, *_: object) -> None:
        """Forget it."""

    def warned(self, *_: object) -> None:
        """Forget it."""

    def called(self, *_: object) -> None:
        """Forget it."""


class Images:
    """`StoreReader` with every accelerator and, unless it was taken away, a blank."""

    has_blank = True
    known_names = Names()
    titles: Mapping[str, str] = MappingProxyType({})

    async def titled(self, title: str, interface_id: InterfaceId | None = None) -> str:
        return self.titles.get(title, "")

    async def load(
        self, interface_id: InterfaceId, bitstream_id: BitstreamId, takes: type[Image] = RawImage
    ) -> Bitstream:
        return await asyncio.to_thread(lambda: _bitstream(interface_id, AfuId(bitstream_id)))

    async def blank(
        self, interface_id: InterfaceId, takes: type[Image] = RawImage
    ) -> Bitstream | None:
        return await asyncio.to_thread(
            lambda: _bitstream(interface_id, BLANK) if self.has_blank else None
        )

    def blank_path(self, interface_id: InterfaceId, takes: type[Image] = RawImage) -> str:
        return f"/srv/{interface_id}/blank.gbs"


def _bitstream(interface_id: InterfaceId, afu: AfuId) -> Bitstream:
    return Bitstream("/srv/x.gbs", interface_id, BitstreamId(afu), afu, RawImage(afu.encode()))


# ------------------------------------------------------------------ the plugin


class Plugin:
    """One run of the plugin's process: the real ledger and lifecycle on the world's doubles."""

    def __init__(
        self,
        rack: Rack,
        pods: list[Pod],
        images: Images,
        journal: MemoryJournal,
        *,
        scrub: ScrubPolicy,
        recovery: RecoveryPolicy = RecoveryPolicy.NONE,
        policy: PolicyFile | None = None,
        advertise: Advertise = Advertise.BOTH,
        api: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.rack = rack
        self.loop = StillLoop()
        self.jobs: list[Job] = []
        self.journal = journal
        settings = Settings(
            resource_prefix=PREFIX,
            scrub=scrub,
            recovery=recovery,
            advertise=advertise,
            health_interval=0.0,
            kubelet_dir="/nowhere",
            **api,
        )
        node = NodeParts(
            backend=rack,  # type: ignore[arg-type]
            store=images,  # type: ignore[arg-type]
            pods=Checkpoint(pods),
            cgroups=Cgroups(pods),  # type: ignore[arg-type]
            workers=_Workers(self),
            reads=Reads(),
            policy=policy,
        )
        ledger = self.ledger = open_ledger(settings, journal, rack.boot_id())  # type: ignore[arg-type]
        plugin = _Plugin(settings, node, ledger, NoLink(), Nobody())  # type: ignore[arg-type]
        self.queue, self.hardware, self.recovery = plugin.queue, plugin.inventory, plugin.recovery
        self.actions, self.operations = plugin.actions, plugin.operations
        self.scrubber, self.dra = plugin.scrubber, plugin.dra
        if (api := plugin.device_plugin) is not None:
            self.calls, self.reconciler, self.owners = api, api.reconciler, api.owners
            self.lists, self.prestarts = api.lists, api.prestarts

    def kubelet_begins(self, instance: str) -> None:
        """A kubelet instance was found."""
        steps = self.reconciler if self.dra is None else self.ledger.device_plugin
        self.call(lambda: steps.kubelet_found(instance))

    def kubelet_answers(self) -> None:
        """Kubelet's records were read, and name no owners that the journal lacks."""
        self.call(lambda: self.ledger.reconciled(self.ledger.cards))
        self.call(self.queue.sync)

    def begin(self, work: object) -> "asyncio.Task[None]":
        """Start a coroutine of the plugin."""
        task = self.loop.create_task(work)  # type: ignore[arg-type,var-annotated]
        self.loop.settle()
        return task

    def call(self, function: Callable[[], object]) -> object:
        """Call a handler on the loop; what it raises comes out."""
        outcome: list[object] = []

        def run() -> None:
            try:
                outcome.append(function())
            except BaseException as error:  # noqa: BLE001  # the caller gets it
                outcome.append(error)

        self.loop.call_soon(run)
        self.loop.settle()
        (result,) = outcome
        if isinstance(result, BaseException):
            raise result
        return result

    def job(self, index: int) -> bool:
        """Let one thread finish its call; returns whether there was one."""
        if not self.jobs:
            return False
        self.jobs.pop(index % len(self.jobs)).run()
        self.loop.settle()
        return True

    def work(self) -> None:
        """Let all threads finish."""
        while self.job(0):
            pass

    def end(self) -> None:
        """The process is gone: nothing of it does anything any more."""
        self.journal.dies_in = 0
        for _ in range(100):
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            for job in self.jobs:
                if not job.future.done():
                    job.future.set_exception(RuntimeError("the process is gone"))
            self.jobs.clear()
            self.loop.settle()
            if not asyncio.all_tasks(self.loop):
                break
        else:
            raise AssertionError("a task of the plugin does not end")
        self.loop.close()
        self.journal.dies_in = None
        for board in self.rack.boards.values():
            for slot in board.slots.values():
                slot.held = None  # the kernel closes what the process had open


class _Workers(CardWorkers):
    """The cards' threads, which wait for the test."""

    def __init__(self, plugin: Plugin) -> None:
        super().__init__()
        self._plugin = plugin

    async def _in_thread(self, card, call):  # type: ignore[no-untyped-def]
        return await start_job(self._plugin, call)


async def start_job(plugin: Plugin, function: Callable[[], object]) -> object:
    job = Job(function, plugin.loop.create_future())
    plugin.jobs.append(job)
    return await job.future


def make_boards(cards: Sequence[tuple[int, bool]]) -> list[Board]:
    """Cards of as many regions each, with or without a memory that can be cleared."""
    boards = []
    node = 0
    for number, (regions, clears) in enumerate(cards):
        card = make_card(number, nodes=range(node, node + regions), clears_memory=clears)
        node += regions
        boards.append(Board(card, slots={r.id: Slot(r.id, BLANK) for r in card.regions}))
    return boards


def env_for(wants: Sequence[AfuId]) -> dict[str, str]:
    """A container's environment; never empty, as kubelets with the KEP send it."""
    env = {"PATH": "/bin"}
    for number, afu in enumerate(wants):
        env[f"FPGA_REGION_{number}"] = INTERFACE
        env[f"FPGA_BITSTREAM_ID_{number}"] = afu
    return env
