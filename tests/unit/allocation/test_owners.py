"""Whose allocations these are, learnt from kubelet's checkpoint as soon as it shows it."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from doubles.cards import BLANK, PREFIX, REGIONS, WHOLE, device, make_card
from doubles.kubelet import entry, write_checkpoint
from doubles.loops import beside, until
from ledger_support import MemoryJournal, start
from structlog.testing import capture_logs

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.obstacles import Stops
from fpga_plugin.allocation.reconcile import owners
from fpga_plugin.allocation.reconcile.owners import Owners
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.cgroup import PodCgroups, PodPresence
from fpga_plugin.kubernetes.kubelet.checkpoint import FILE_NAME
from fpga_plugin.kubernetes.names import PodUid, ResourceName

A = PodUid("0a0a0a0a-0000-4000-8000-000000000001")
B = PodUid("0b0b0b0b-0000-4000-8000-000000000002")
CARD = make_card(1)
P0, P1 = device(CARD, 0), device(CARD, 1)
BOARD = DeviceId(CARD.id)


class World:
    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self.journal = MemoryJournal()
        self.begin()

    def begin(self) -> None:
        """The plugin's first life, or its next."""
        self.ledger = Ledger(
            prefix=PREFIX, journal=self.journal, snapshot=self.journal.snapshot, boot_id=""
        )
        self.ledger.hardware.card_found(CARD, {r.id: BLANK for r in CARD.regions}, BLANK)
        self.ledger.reconciled([CARD.id])
        pods = PodDirectory(kubelet_dir=str(self.path.parent), prefix=PREFIX)
        self.owners = Owners(self.ledger, PodCgroups(None), pods)

    def write(self, *entries: tuple[str, DeviceId], resource: ResourceName = REGIONS) -> None:
        """As kubelet writes it: pods and their devices."""
        write_checkpoint(
            self.path.parent, *(entry(name, pod=pod, resource=resource) for pod, name in entries)
        )

    def allocate(self, name: DeviceId = P0, resource: ResourceName = REGIONS) -> None:
        self.ledger.device_plugin.allocate(resource, [name])
        self.owners.answered([name])

    def look(self) -> None:
        asyncio.run(self.owners._look())

    def during(self, happens: Callable[[], object]) -> None:
        """Look, and something happens after the file was read."""
        read = self.owners._pods.checkpoint

        async def then() -> object:
            checkpoint = await read()
            happens()
            return checkpoint

        with mock.patch.object(self.owners._pods, "checkpoint", then):
            self.look()

    def pod(self, name: DeviceId = P0) -> PodUid | None:
        return self.ledger.allocations[name].pod


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_pod_is_learnt_once_kubelet_has_written_it_down(world: World) -> None:
    world.allocate()
    world.look()
    assert world.pod() is None
    world.write((A, P0))
    world.look()
    assert world.pod() == A


def test_the_pod_of_a_whole_card_is_learnt_once_kubelet_has_written_it_down(world: World) -> None:
    world.allocate(BOARD, WHOLE)
    world.write((A, BOARD), resource=WHOLE)
    world.look()
    assert world.pod(BOARD) == A


def test_an_entry_that_was_written_before_the_allocate_does_not_name_the_pod(world: World) -> None:
    world.write((A, P0))  # it ended, and kubelet has not written since
    world.allocate()
    world.look()
    assert world.pod() is None
    world.write((B, P0))
    world.look()
    assert world.pod() == B


def test_an_allocate_while_the_file_is_read_is_not_about_what_was_read(world: World) -> None:
    world.allocate()
    world.write((A, P0))
    world.during(world.allocate)  # a's pod failed, this is another's
    assert world.pod() is None


def test_an_allocate_of_what_nobody_began_to_use_forgets_whose_it_was(world: World) -> None:
    world.allocate()
    world.write((A, P0))
    world.look()
    world.allocate()
    assert world.pod() is None
    world.look()
    assert world.pod() is None
    world.write((B, P0))
    world.look()
    assert world.pod() == B


@pytest.mark.parametrize("entries", [[(A, P1)], [(A, P0), (B, P0)], []])
def test_a_file_that_does_not_name_one_pod_names_none(world: World, entries) -> None:
    world.allocate()
    world.write(*entries)
    world.look()
    assert world.pod() is None


def test_an_entry_of_another_resource_names_none(world: World) -> None:
    world.allocate()
    world.write((A, P0), resource=ResourceName(f"{PREFIX}/region-{'0' * 32}"))
    world.look()
    assert world.pod() is None


def test_after_the_plugins_restart_the_file_as_it_is_counts(world: World) -> None:
    world.allocate()
    world.write((A, P0))
    world.begin()
    world.look()
    assert world.pod() == A


def test_where_the_file_could_not_be_seen_at_allocate_the_next_writing_counts(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "away")
    world.allocate()
    world.path.parent.mkdir()
    world.write((A, P0))
    world.look()
    assert world.pod() is None, "it may be from before"
    world.write((B, P0))
    world.look()
    assert world.pod() == B


def test_what_cannot_be_read_or_written_down_is_said_once_and_tried_again(world: World) -> None:
    world.allocate()
    world.path.write_text("{")
    with capture_logs() as logs:
        world.look()
        world.look()
        world.write((A, P0))
        world.journal.failing = 1
        world.look()
    assert [line["event"] for line in logs] == ["the owners of allocations cannot be read"] * 2
    assert world.pod() == A, "to know it takes trust away: its processes have to end"
    assert world.journal.snapshot.allocations[P0].pod is None
    world.ledger.work.set_memory_clear_pending(card_of(P0), open_=True)
    assert world.journal.snapshot.allocations[P0].pod == A, "it is written with the next change"


def test_an_allocation_that_ended_while_the_file_was_read_is_nobodys(world: World) -> None:
    world.allocate()
    world.write((A, P0))
    world.during(lambda: world.ledger.device_plugin.release([P0]))
    assert not world.ledger.allocations


def test_a_pod_that_a_prestart_told_while_the_file_was_read_stays(world: World) -> None:
    """To bind another one ends the allocation: its container would run on nobody's region."""
    world.allocate()
    world.write((A, P0))

    def prestart() -> None:
        world.ledger.device_plugin.prestart_seen([P0])
        world.ledger.device_plugin.bind_pod([P0], B)

    world.during(prestart)
    assert world.pod() == B


def test_what_could_be_read_again_is_said_again_when_it_cannot(world: World) -> None:
    world.allocate()
    with capture_logs() as logs:
        for text in ("{", None, "{"):
            if text is None:
                world.write()
            else:
                world.path.write_text(text)
            world.look()
    assert len(logs) == 2


def test_what_was_answered_is_forgotten_once_kubelet_has_written(world: World) -> None:
    world.allocate()
    world.write((A, P0))
    world.look()
    assert not world.owners._answered


def compare(world: World) -> None:
    """As the reconciler does."""
    world.look()
    world.ledger.reconciled(world.owners.settled)


@pytest.mark.parametrize("how", ["deallocated", "deallocated and gone", "released"])
def test_the_end_of_one_of_two_pods_gives_the_other_ones_region_to_nobody(
    world: World, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it scrubbed: the record is older than that end, and still says that two had it."""
    world.allocate()
    world.write((A, P0))
    compare(world)
    start(world.ledger, P0)
    world.write((A, P0), (B, P0))
    compare(world)
    assert world.pod() == A
    world.ledger.device_plugin.release([P0])
    if how != "released":
        world.owners.answered([P0])
    if how == "deallocated and gone":
        states = {A: PodPresence.GONE, B: PodPresence.ALIVE}
        monkeypatch.setattr(world.owners._cgroups, "state", states.__getitem__)
    for _ in range(2):
        compare(world)
        assert world.ledger.unreconciled == {CARD.id}
        assert world.ledger.obstacles.first(P0, Stops.SCRUB)
        assert not world.ledger.allocations
    world.write((B, P0))
    compare(world)
    assert world.pod() == B
    assert world.ledger.allocations[P0].used
    assert world.ledger.unreconciled == set()


@pytest.mark.parametrize("entries", [[(A, P0)], [(A, P0), (B, P0)]])
def test_an_older_record_of_a_pod_that_ended_keeps_nothing_back(
    world: World, entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names that pod alone, or others that are gone."""
    world.allocate()
    world.write((A, P0))
    compare(world)
    world.write(*entries)
    world.ledger.device_plugin.release([P0])
    world.owners.answered([P0])
    if len(entries) > 1:
        monkeypatch.setattr(world.owners._cgroups, "state", lambda _: PodPresence.GONE)
    compare(world)
    assert not world.ledger.allocations
    assert world.ledger.unreconciled == set()


# ------------------------------------------------------------------ when it looks


def play(world: World, story: Callable[[], object]) -> None:
    async def run() -> None:
        async with beside(world.owners.run()):
            await story()  # type: ignore[misc]

    asyncio.run(run())


def test_it_looks_again_and_again_until_every_pod_is_known(world: World, monkeypatch) -> None:
    monkeypatch.setattr(owners, "FIRST_LOOK", 0.001)
    monkeypatch.setattr(owners, "LONGEST_WAIT", 0.004)

    async def story() -> None:
        world.allocate(P0)
        world.allocate(P1)
        world.write((A, P0))
        await until(lambda: world.pod(P0) == A)
        assert world.pod(P1) is None
        world.write((A, P0), (B, P1))
        await until(lambda: world.pod(P1) == B)

    play(world, story)


def test_another_kubelet_is_reason_to_look_at_once(world: World, monkeypatch) -> None:
    monkeypatch.setattr(owners, "FIRST_LOOK", 1000.0)

    async def story() -> None:
        world.allocate()
        world.write((A, P0))
        await asyncio.sleep(0)
        world.ledger.device_plugin.kubelet_found("life 2")
        world.owners.new_kubelet()
        await until(lambda: world.pod() == A)

    play(world, story)


def counted_reads(world: World, monkeypatch) -> list[None]:
    reads: list[None] = []

    async def read() -> object:
        reads.append(None)
        return await PodDirectory.checkpoint(world.owners._pods)

    monkeypatch.setattr(world.owners._pods, "checkpoint", read)
    return reads


async def spin() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_only_another_kubelet_is_such_a_reason_and_only_once(world: World, monkeypatch) -> None:
    """Kubelet writes its file after Allocate was answered: at once there is nothing to see."""
    monkeypatch.setattr(owners, "FIRST_LOOK", 1000.0)
    reads = counted_reads(world, monkeypatch)

    async def story() -> None:
        world.owners.new_kubelet()
        await spin()
        assert len(reads) == 0, "every pod is known"
        world.allocate()
        await spin()
        assert len(reads) == 0
        world.owners.new_kubelet()
        await until(lambda: reads)
        world.allocate(P1)
        await spin()
        assert len(reads) == 1

    play(world, story)


def test_it_looks_ever_less_often_until_an_allocate(world: World, monkeypatch) -> None:
    """A node with a pod that cannot be known is not kept busy."""
    waits: list[float | None] = []

    def noted(seconds: float | None):
        waits.append(seconds)
        return asyncio.timeout(None if seconds is None else 0)

    async def story() -> None:
        await until(lambda: waits)
        await spin()
        assert waits == [None], "nothing is owned: nothing wakes it"
        world.allocate()
        await until(lambda: len(waits) > 13)
        expected = [0.05 * 2**n for n in range(10)] + [30.0, 30.0]
        assert waits[1:13] == [pytest.approx(each, rel=0.25) for each in expected]
        world.allocate(P1)
        before = len(waits)
        await until(lambda: len(waits) > before + 2)
        assert min(filter(None, waits[before:])) < 0.07, "it begins again"

    monkeypatch.setattr(
        owners,
        "asyncio",
        SimpleNamespace(
            timeout=noted,
            to_thread=asyncio.to_thread,
            get_running_loop=asyncio.get_running_loop,
        ),
    )
    play(world, story)


def test_with_every_pod_known_nothing_is_read(world: World, monkeypatch) -> None:
    monkeypatch.setattr(owners, "FIRST_LOOK", 0.0)
    monkeypatch.setattr(owners, "LONGEST_WAIT", 0.0)
    reads = 0

    async def read() -> object:
        nonlocal reads
        reads += 1
        return await PodDirectory.checkpoint(world.owners._pods)

    monkeypatch.setattr(world.owners._pods, "checkpoint", read)

    async def story() -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        assert reads == 0, "nothing is owned"
        world.allocate()
        world.write((A, P0))
        await until(lambda: world.pod() == A)
        before = reads
        for _ in range(50):
            await asyncio.sleep(0)
        assert reads == before

    play(world, story)
    assert os.path.exists(world.path)
