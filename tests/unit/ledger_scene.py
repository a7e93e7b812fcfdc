"""A small node on `ledger_world`, and one instant after the other at which a test may step in."""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar
from unittest import mock

import pytest
import structlog
from doubles.cards import REGIONS, WHOLE
from ledger_support import MemoryJournal
from ledger_world import (
    FACTORY,
    INSTANCES,
    Images,
    Plugin,
    Pod,
    Rack,
    env_for,
    make_boards,
    start_job,
)

from fpga_plugin.allocation.journal.records import CLEAN, Condition
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.hardware.image import Image, RawImage
from fpga_plugin.ids import AfuId, BitstreamId, CardId, DeviceId, InterfaceId, RegionId
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.policy.file import PolicyFile
from fpga_plugin.settings.settings import Advertise, RecoveryPolicy, ScrubPolicy


class RememberedImages(Images):
    """Tells which images somebody still has."""

    def __init__(self) -> None:
        self.loaded: list[weakref.ref[Bitstream]] = []
        self.mislabelled: AfuId | None = None

    async def load(
        self, interface_id: InterfaceId, bitstream_id: BitstreamId, takes: type[Image] = RawImage
    ) -> Bitstream:
        image = await super().load(interface_id, bitstream_id, takes)
        if self.mislabelled is not None:
            image = replace(image, image=RawImage(self.mislabelled.encode()))
        self.loaded.append(weakref.ref(image))
        return image


class Scene:
    """Cards that are all clean, of which nobody has any, and the plugin that serves them.

    Args:
        cards: how many regions each has.
        memory: the first card's can be cleared.
        resets: every card is reset as a whole between two owners.
        owner_loads: a blank region is left to its owner, who loads images himself.
    """

    def __init__(
        self,
        *,
        cards: Sequence[int] = (2, 1),
        memory: bool = False,
        resets: bool = False,
        owner_loads: bool = False,
        policy: PolicyFile | None = None,
        recovery: RecoveryPolicy = RecoveryPolicy.NONE,
        scrub: ScrubPolicy = ScrubPolicy.REQUIRED,
        advertise: Advertise = Advertise.BOTH,
    ) -> None:
        self.pods: list[Pod] = []
        self.touched: list[RegionId] = []
        self.on_touch: Callable[[], object] = lambda: None
        self.images = RememberedImages()
        self.logged: list[str] = []
        boards = make_boards([(n, memory and not number) for number, n in enumerate(cards)])
        for board in boards:
            board.card = replace(board.card, resets=resets, owner_loads=owner_loads)
        self.rack = Rack(boards, self._touch)
        self.journal = MemoryJournal()
        self.plugin = Plugin(
            self.rack,
            self.pods,
            self.images,
            self.journal,
            scrub=scrub,
            policy=policy,
            recovery=recovery,
            advertise=advertise,
        )
        self.ledger, self.operations = self.plugin.ledger, self.plugin.operations

    def _touch(self, region: RegionId) -> None:
        self.touched.append(region)
        self.on_touch()

    def power_on(self) -> None:
        self.plugin.begin(self.plugin.hardware.scan())
        self.plugin.work()
        self.plugin.kubelet_begins("life 1")
        self.plugin.kubelet_answers()
        self.plugin.work()
        assert all(r.condition in CLEAN for r in self.ledger.regions.values())
        self.touched.clear()
        self.rack.done.clear()

    def hold_releases(self) -> None:
        """Nothing is scrubbed in the background from now on: what is left behind can be seen."""
        self.plugin.queue.unsync()

    def admit(self, *ids: RegionId | CardId) -> Pod:
        """Kubelet gives a new pod regions, or one card."""
        resource, devices = (
            WHOLE if ids[0] in self.rack.boards else REGIONS,
            tuple(map(DeviceId, ids)),
        )
        for pod in self.pods:
            pod.active &= not set(pod.devices) & set(devices)
        self.plugin.call(lambda: self.plugin.calls.allocate(resource, devices))
        given = [self.ledger.allocations[device].grants for device in devices]
        nodes = {r: node for each in given for r, one in each.items() for node in one.nodes}
        pod = Pod(PodUid(f"pod-{len(self.pods)}"), resource, devices, nodes)
        self.pods.append(pod)
        return pod

    def prestart(self, pod: Pod, *wants: AfuId):
        return self.plugin.begin(
            self.plugin.prestarts.serve(pod.resource, pod.devices, env_for(wants), 30.0)
        )

    def start(self, pod: Pod, *wants: AfuId) -> None:
        task = self.prestart(pod, *wants)
        self.plugin.work()
        task.result()

    def until(self, done: Callable[[], bool], job: int = 0) -> None:
        """Let threads end, one after the other."""
        while not done():
            assert len(self.plugin.jobs) > job, "nothing goes on, and it has not happened"
            self.plugin.job(job)

    def prepare(self, pod: Pod, *wants: AfuId):
        """A PreStart that waits for nothing but the last look at its regions."""
        before = self.logged.count("prepared")
        task = self.prestart(pod, *wants)
        self.until(lambda: self.logged.count("prepared") > before)
        assert not task.done()
        assert self.plugin.jobs
        return task

    def swap(self, card: CardId, *, told: bool) -> None:
        """Another card comes into the slot, with the same number of everything."""
        board = self.rack.boards[card]
        board.card = replace(
            board.card,
            regions=tuple(replace(r, handle=next(INSTANCES)) for r in board.card.regions),
        )
        for slot in board.slots.values():
            slot.afu, slot.data = FACTORY, {"somebody else"}
        board.memory = {"somebody else"}
        if told:
            waiting = len(self.plugin.jobs)
            self.plugin.call(lambda: self.plugin.hardware.changed(card))
            self.until(lambda: len(self.plugin.jobs) <= waiting, job=waiting)

    def refused(self, task, kind: type[FpgaPluginError], words: str | None = None) -> None:
        """The container does not start, and nothing is left that would let the next one."""
        self.plugin.work()
        with pytest.raises(kind, match=words):
            task.result()
        started = [c.device for c in self.ledger.allocations.values() if c.started]
        assert not started, "a refused container has its region"

    @property
    def regions(self) -> list[RegionId]:
        """All three."""
        return [r.id for board in self.rack.boards.values() for r in board.card.regions]

    def condition(self, region: RegionId) -> Condition:
        return self.ledger.record(region).condition


AScene = TypeVar("AScene", bound=Scene)


@contextmanager
def scenes(kind: type[AScene] = Scene) -> Iterator[Callable[..., AScene]]:
    """Makes scenes, of which the last one's threads run."""
    made: list[AScene] = []

    async def to_thread(function, *args, **kwargs):
        return await start_job(made[-1].plugin, functools.partial(function, *args, **kwargs))

    def logged(_logger, _method, event):
        for scene in made:
            scene.logged.append(event["event"])
        raise structlog.DropEvent

    def make(**options) -> AScene:
        made.append(kind(**options))
        made[-1].power_on()
        return made[-1]

    structlog.configure(processors=[logged], cache_logger_on_first_use=False)
    try:
        with mock.patch("asyncio.to_thread", to_thread):
            yield make
            for scene in made:
                scene.plugin.end()
    finally:
        structlog.reset_defaults()
