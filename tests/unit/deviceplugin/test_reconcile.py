"""Release without being told: kubelet's Lists and checkpoint against the ledger."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

import pytest
from doubles import LIMIT
from doubles.cards import BLANK, INTERFACE, PREFIX, WHOLE, make_card
from doubles.cards import REGIONS as RESOURCE
from doubles.cards import device as device_of
from doubles.journal import NoJournal
from doubles.kubelet import POD, Kubelet, entry, write_checkpoint
from doubles.loops import beside, until
from ledger_support import scrub, start
from structlog.testing import capture_logs

from fpga_plugin.allocation.journal.journal import JournalError
from fpga_plugin.allocation.journal.records import Change
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.reconcile.owners import Owners
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.deviceplugin import reconcile
from fpga_plugin.deviceplugin.allocatable import AllocatableCheck
from fpga_plugin.deviceplugin.reconcile import Reconciler
from fpga_plugin.errors import NoSourceError, RefusedError
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.hardware.model import Region
from fpga_plugin.ids import Alias, CardId, DeviceId, PciAddress, RegionId
from fpga_plugin.kubernetes.cgroup import PodCgroups, PodPresence
from fpga_plugin.kubernetes.kubelet.checkpoint import Checkpoint
from fpga_plugin.kubernetes.kubelet.podresources import (
    NoListReason,
    PodResourcesError,
)
from fpga_plugin.kubernetes.kubelet.podwatch import PodWatch
from fpga_plugin.kubernetes.names import PodUid, ResourceName

CARD = make_card(0)
REGION, SECOND = (device_of(CARD, port) for port in range(2))
NO_ANSWER = PodResourcesError("no answer", reason=NoListReason.RATE_LIMITED)
NOTHING_IS_RELEASED = "kubelet's records cannot be read: nothing is released"


class Queue:
    """Remembers whether the queue of cards was in step with kubelet."""

    interval = 0.01

    def __init__(self) -> None:
        self.told: list[bool] = []

    def sync(self) -> None:
        self.told.append(True)

    def unsync(self) -> None:
        self.told.append(False)

    def add(self, _card: CardId) -> None:
        """Nothing is scrubbed here."""


class Linked(Kubelet):
    """The link to it, too; it reports nobody what it knows."""

    async def allocatable(self) -> dict[ResourceName, frozenset[str]]:
        raise PodResourcesError("not served", reason=NoListReason.NOT_SERVED)

    def sent(self) -> dict[ResourceName, frozenset[str]]:
        return {}


class Nobody:
    """Takes every word, remembers it, and does nothing."""

    def __init__(self) -> None:
        self.words: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *words: self.words.append((name, *words))


class World:
    def __init__(
        self,
        directory: str,
        *,
        fresh: bool = False,
        polled: bool = True,
        journal: NoJournal | None = None,
        pods_socket: str | None = None,
    ) -> None:
        journal = journal or NoJournal()
        self.ledger = Ledger(prefix=PREFIX, journal=journal, snapshot=Change(), boot_id="b")
        self.ledger.hardware.card_found(CARD, {}, BLANK)
        self.ledger.device_plugin.kubelet_found("k1")
        if not fresh:
            self.ledger.reconciled(self.ledger.cards)
        self.kubelet = Linked(directory)
        self.queue = Queue()
        self.released: list[DeviceId] = []
        self._claimed: set[DeviceId] = set()
        pods = self.pods = PodDirectory(
            kubelet_dir=directory,
            prefix=PREFIX,
            podresources=self.kubelet if polled else None,  # type: ignore[arg-type]
        )
        self.cgroups = PodCgroups(None)
        self.owners = Owners(self.ledger, self.cgroups, pods)
        self.missed = Nobody()
        self.reconciler = Reconciler(
            ledger=self.ledger,
            queue=self.queue,  # type: ignore[arg-type]
            link=self.kubelet,  # type: ignore[arg-type]
            pods=pods,
            owners=self.owners,
            envs=Nobody(),  # type: ignore[arg-type]
            missed=self.missed,  # type: ignore[arg-type]
            pods_socket=pods_socket,
        )
        self.ledger.subscribe(self._note_released)

    def _note_released(self, _card: object) -> None:
        ended = [d for d in self._claimed if d not in self.ledger.allocations]
        self._claimed = set(self.ledger.allocations)
        self.released += ended

    def play(self, until: Callable[[], bool]) -> None:
        async def run() -> None:
            task = asyncio.create_task(self.reconciler.run())
            self.reconciler.stream_opened(RESOURCE)
            async with asyncio.timeout(LIMIT):
                while not until():
                    if task.done():
                        task.result()  # whatever ended it ends the test
                    await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(run())


@pytest.fixture
def directory(tmp_path) -> str:
    return str(tmp_path)


def test_nothing_is_polled_while_nothing_is_owned(directory: str) -> None:
    world = World(directory)
    world.play(lambda: bool(world.queue.told))
    assert world.queue.told == [True]
    assert world.kubelet.calls == 1  # the first answer of this kubelet, and no other


def test_without_podresources_an_open_stream_syncs_the_queue(directory: str) -> None:
    world = World(directory, polled=False)
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.play(lambda: bool(world.queue.told))
    assert world.kubelet.calls == 0
    assert world.released == []


def test_a_device_that_two_lists_and_the_rewritten_checkpoint_lack_is_released(
    directory: str,
) -> None:
    world = World(directory)
    world.kubelet.write([REGION])
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.play(lambda: bool(world.released))
    assert world.released == [REGION]
    assert world.kubelet.calls == 3, "the first answer, and two Lists"
    assert world.kubelet.resends == 1


def test_a_device_in_the_list_is_kept(directory: str) -> None:
    world = World(directory)
    world.kubelet.show(REGION)
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.play(lambda: world.kubelet.calls > 6)
    assert world.released == []
    assert world.kubelet.resends == 0


def test_a_device_that_only_the_checkpoint_has_is_kept(directory: str) -> None:
    """Init containers are in the checkpoint and never in List."""
    world = World(directory)
    world.kubelet.checkpoint = {REGION}
    world.kubelet.write([REGION])
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.play(lambda: world.kubelet.resends > 2)
    assert world.released == []


def test_a_checkpoint_that_is_not_rewritten_releases_nothing(directory: str) -> None:
    world = World(directory)
    world.kubelet.rewrites = False
    world.kubelet.write([])
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.kubelet.error = NO_ANSWER
    world.play(lambda: bool(world.reconciler.problem))
    world.kubelet.error = None
    with capture_logs() as logs:
        world.play(lambda: world.kubelet.resends > 2)
    assert world.released == []
    assert not world.reconciler.problem, "its records can be read again"
    told = [line for line in logs if line["event"].startswith("kubelet has not rewritten")]
    assert [line["devices"] for line in told] == [[REGION]]


def test_an_unreadable_checkpoint_releases_nothing(directory: str) -> None:
    world = World(directory)
    world.play(lambda: bool(world.queue.told))
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    stamps = iter(range(100))

    def garbage() -> None:
        world.kubelet.resends += 1
        with open(world.kubelet.path, "w") as file:
            file.write("{" * (1 + next(stamps)))

    world.kubelet.resend = garbage
    world.play(lambda: world.kubelet.resends > 2)
    assert world.released == []


@pytest.mark.parametrize("when", ["before it is sent again", "after that"])
def test_a_kubelet_directory_that_goes_releases_nothing_and_is_reported(
    directory: str, when: str
) -> None:
    kubelet_dir = os.path.join(directory, "device-plugins")
    os.mkdir(kubelet_dir)
    world = World(kubelet_dir)
    world.kubelet.write([])
    world.play(lambda: bool(world.queue.told))
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])

    def go() -> None:
        if os.path.isdir(kubelet_dir):
            os.rename(kubelet_dir, kubelet_dir + ".gone")

    resend = world.kubelet.resend
    if when == "after that":
        world.kubelet.resend = go
    else:
        world.kubelet.on_call = go
    world.play(lambda: "is not there" in world.reconciler.problem)
    listed = world.kubelet.calls
    world.play(lambda: world.kubelet.calls > listed + 3)  # it goes on
    assert world.released == []
    assert "is not there" in world.reconciler.problem

    os.rename(kubelet_dir + ".gone", kubelet_dir)
    world.kubelet.on_call, world.kubelet.resend = lambda: None, resend
    world.play(lambda: world.released == [REGION])


def test_an_allocation_that_cannot_be_ended_is_tried_again_and_told_once(directory: str) -> None:
    world = World(directory)
    world.kubelet.write([])
    world.play(lambda: bool(world.queue.told))
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    tries = []

    def full(devices: Iterable[DeviceId]) -> tuple[DeviceId, ...]:
        tries.extend(devices)
        raise JournalError("the journal cannot be written (No space left on device)")

    release, world.ledger.device_plugin.release = world.ledger.device_plugin.release, full
    with capture_logs() as logs:
        world.play(lambda: len(tries) > 3)
    told = [line for line in logs if line["event"] == "allocation cannot be ended"]
    assert [line["device"] for line in told] == [REGION]
    assert "No space left" in world.reconciler.problem

    world.ledger.device_plugin.release = release
    world.play(lambda: world.released == [REGION] and not world.reconciler.problem)


def test_what_cannot_be_read_is_told_once_not_each_time(directory: str) -> None:
    world = World(directory)
    world.play(lambda: bool(world.queue.told))
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])

    world.kubelet.resend = world.kubelet.spoil
    with capture_logs() as logs:
        world.play(lambda: world.kubelet.resends > 3)
    told = [line for line in logs if line["log_level"] == "warning"]
    assert [line["event"] for line in told] == [NOTHING_IS_RELEASED]
    assert "is not understood" in told[0]["error"]


@pytest.mark.parametrize("gone", [True, False, None])
def test_where_the_checkpoint_cannot_be_read_a_source_of_pods_decides(
    directory: str, *, gone: bool | None
) -> None:
    world = World(directory)
    asked: list[PodUid] = []

    async def ended(pod: PodUid) -> bool:
        asked.append(pod)
        if gone is None:
            raise NoSourceError("nobody reports pods")
        return gone

    world.pods.ended = ended  # type: ignore[method-assign]
    world.play(lambda: bool(world.queue.told))
    with open(world.kubelet.path, "w") as file:
        file.write('{"Data": {"PodDevice')
    world.kubelet.rewrites = False

    def rewrite() -> None:
        world.kubelet.resends += 1
        os.utime(world.kubelet.path, ns=(world.kubelet.resends, world.kubelet.resends))

    world.kubelet.resend = rewrite
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.play(lambda: world.kubelet.resends > 2)
    assert asked == [], "an allocation without a pod is held"

    world.ledger.device_plugin.bind_pod([DeviceId(REGION)], POD)
    world.kubelet.resends = 10
    world.play(lambda: world.kubelet.resends > 13 or bool(world.released))
    assert set(asked) == {POD}
    assert world.released == ([REGION] if gone else [])
    assert "is not understood" in world.reconciler.problem
    if gone is None:
        assert "nobody reports pods" in world.reconciler.problem


def test_a_new_card_whose_records_cannot_be_read_keeps_no_other_allocation(directory: str) -> None:
    world = World(directory)

    async def ended(_pod: PodUid) -> bool:
        return True

    world.pods.ended = ended  # type: ignore[method-assign]
    world.play(lambda: bool(world.queue.told))
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.ledger.device_plugin.bind_pod([DeviceId(REGION)], POD)
    late = replace(CARD, address=PciAddress.parse("0000:20:00.0"), regions=())
    region = Region(late.id, 0, Grant(("/dev/dfl-port.7",)))
    world.ledger.hardware.card_found(replace(late, regions=(region,)), {}, BLANK)
    world.kubelet.spoil()
    world.kubelet.resend = world.kubelet.spoil
    world.play(lambda: world.released == [REGION])
    assert world.ledger.unreconciled == {late.id}


def test_another_kubelet_does_not_wait_for_what_was_asked_about_the_last_ones_pods(
    directory: str,
) -> None:
    world = World(directory)
    asked: list[PodUid] = []

    async def ended(pod: PodUid) -> bool:
        asked.append(pod)
        world.reconciler.kubelet_found("k2")
        return True

    world.pods.ended = ended  # type: ignore[method-assign]
    world.play(lambda: bool(world.queue.told))
    for number, device in enumerate((REGION, SECOND)):
        world.ledger.device_plugin.allocate(RESOURCE, [device])
        world.ledger.device_plugin.bind_pod([DeviceId(device)], PodUid(f"{POD[:-1]}{number}"))

    world.kubelet.resend = world.kubelet.spoil
    world.play(lambda: False in world.queue.told)
    assert len(asked) == 1
    assert world.released == []


def test_failed_lists_release_nothing(directory: str) -> None:
    world = World(directory)
    world.kubelet.write([])
    world.play(lambda: bool(world.queue.told))
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.kubelet.error = NO_ANSWER
    world.play(lambda: world.kubelet.calls > 6)
    assert world.released == []


def test_lists_of_two_kubelets_do_not_add_up(directory: str) -> None:
    world = World(directory)
    world.kubelet.write([])
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])

    def another() -> None:
        world.kubelet.instance = f"1:{world.kubelet.calls}:1"

    world.kubelet.on_call = another
    world.play(lambda: world.kubelet.calls > 8)
    assert world.released == []


def restart_kubelet(world: World, instance: str) -> None:
    """As the plugin hears of it."""
    world.reconciler.kubelet_found(instance)


def test_another_kubelet_unsyncs_the_queue_until_it_has_answered(directory: str) -> None:
    world = World(directory)
    world.play(lambda: world.queue.told == [True])
    restart_kubelet(world, "k2")
    assert world.queue.told == [True, False]
    world.play(lambda: len(world.queue.told) == 3)
    assert world.queue.told[-1]


@pytest.mark.parametrize("who", ["owners", "envs", "missed", "allocatable"])
def test_all_who_know_something_of_a_kubelet_hear_of_the_next_one(
    directory: str, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    world = World(directory)
    told: list[str] = []
    listener = getattr(world.reconciler, f"_{who}")
    monkeypatch.setattr(listener, "new_kubelet", lambda: told.append(who), raising=False)
    world.reconciler.kubelet_found("k1")
    assert told == [], "it is the same one"
    world.reconciler.kubelet_found("k2")
    assert told == [who]


def test_the_answer_of_the_last_kubelet_does_not_sync_the_queue(directory: str) -> None:
    world = World(directory)

    def restart() -> None:
        if world.ledger.kubelet_instance == "k1":
            restart_kubelet(world, "k2")  # while it answers

    world.kubelet.on_call = restart
    world.play(lambda: world.queue.told == [False])

    async def answer() -> None:
        task = asyncio.create_task(world.reconciler.run())
        for _ in range(20):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(answer())  # no stream of the next one is open
    assert world.queue.told == [False]
    assert not world.reconciler.answered


def test_a_list_that_the_last_kubelet_was_asked_for_does_not_count(directory: str) -> None:
    world = World(directory)
    world.kubelet.write([])
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])

    def once() -> None:
        if world.kubelet.calls == 2:  # the first was the first answer
            restart_kubelet(world, "k2")
            world.reconciler.stream_opened(RESOURCE)
        elif world.kubelet.calls == 5:  # one of k2's was its first answer, one lacked the device
            world.kubelet.show(REGION)

    world.kubelet.on_call = once
    world.play(lambda: world.kubelet.calls > 8)
    assert world.released == []


@pytest.mark.parametrize("call", ["Allocate", "PreStart"])
def test_a_call_while_the_checkpoint_is_rewritten_keeps_the_allocation(
    directory: str, call: str
) -> None:
    world = World(directory)
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])

    resend_as_ever = world.kubelet.resend

    def resend() -> None:
        resend_as_ever()
        if call == "Allocate":
            world.ledger.device_plugin.allocate(RESOURCE, [REGION])
        else:
            world.ledger.device_plugin.prestart_seen([DeviceId(REGION)])
        world.kubelet.show(REGION)

    world.kubelet.resend = resend
    world.play(lambda: world.kubelet.resends > 0 and world.kubelet.calls > 8)
    assert world.released == []


def test_an_allocation_that_ends_while_the_checkpoint_is_rewritten_is_nobodys_to_end(
    directory: str,
) -> None:
    world = World(directory)
    world.kubelet.write([])
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    resend_as_ever = world.kubelet.resend

    def resend() -> None:
        world.kubelet.resend = resend_as_ever  # type: ignore[method-assign]
        resend_as_ever()
        world.ledger.device_plugin.release([DeviceId(REGION)])
        world.ledger.device_plugin.allocate(RESOURCE, [SECOND])

    world.kubelet.resend = resend  # type: ignore[method-assign]
    world.play(lambda: world.released == [REGION, SECOND])
    assert world.reconciler.released == 1


def test_another_kubelet_while_the_checkpoint_is_rewritten_keeps_the_allocation(
    directory: str,
) -> None:
    world = World(directory)
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])

    resend_as_ever = world.kubelet.resend

    def resend() -> None:
        resend_as_ever()
        restart_kubelet(world, "k2")
        world.reconciler.stream_opened(RESOURCE)
        world.kubelet.show(REGION)

    world.kubelet.resend = resend
    world.play(lambda: world.queue.told == [True, False, True])
    assert world.released == []


@pytest.mark.parametrize("call", ["Allocate", "PreStart"])
def test_a_list_begun_before_the_last_call_does_not_count(directory: str, call: str) -> None:
    world = World(directory)
    world.kubelet.write([])
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])

    def active() -> None:
        if call == "Allocate":
            world.ledger.device_plugin.allocate(RESOURCE, [REGION])
        else:
            world.ledger.device_plugin.prestart_seen([DeviceId(REGION)])

    world.kubelet.on_call = active
    world.play(lambda: world.kubelet.calls > 8)
    assert world.released == []


def test_without_a_journal_the_checkpoint_names_the_owners(directory: str) -> None:
    world = World(directory, fresh=True)
    world.kubelet.write([REGION])
    world.kubelet.show(REGION)
    world.play(lambda: bool(world.queue.told))
    allocation = world.ledger.allocations[DeviceId(REGION)]
    assert allocation.missed_prestart
    assert allocation.pod == "0a0a0a0a-0000-4000-8000-000000000001"


def test_an_owner_that_cannot_be_adopted_keeps_its_card_from_being_given_out(
    directory: str,
) -> None:
    """A region that the card does not show, of which kubelet kept no grant."""
    world = World(directory, fresh=True)
    away = f"{CARD.id}-p7"
    world.kubelet.checkpoint = {away}
    world.kubelet.write([away])
    world.play(lambda: world.kubelet.resends > 1)
    assert world.ledger.unreconciled == {CARD.id}
    world.kubelet.checkpoint = set()
    world.play(lambda: not world.ledger.unreconciled)


def test_a_card_that_changes_is_asked_about_though_kubelet_writes_nothing_new(
    directory: str,
) -> None:
    """What could not be adopted of it, perhaps can be now."""
    world = World(directory, fresh=True)
    away = f"{CARD.id}-p7"
    world.kubelet.write([away])
    world.kubelet.show(away)
    world.kubelet.rewrites = False

    async def story() -> None:
        assert world.ledger.unreconciled == {CARD.id}
        region = Region(CARD.id, 7, Grant(("/dev/dfl-port.7",)))
        world.ledger.hardware.card_found(replace(CARD, regions=(*CARD.regions, region)), {}, BLANK)
        await until(lambda: not world.ledger.unreconciled)

    during(world, story)
    assert set(world.ledger.allocations) == {away}


class FullDisk(NoJournal):
    """Takes no more once it is full."""

    def __init__(self) -> None:
        self.full = False
        self.refused = 0

    def write(self, change: Change) -> None:
        if self.full:
            self.refused += 1
            raise JournalError("disk full")


def test_an_owner_that_cannot_be_written_down_is_one_all_the_same(directory: str) -> None:
    """It takes the device from others, in memory at once; the next change writes it too."""
    journal = FullDisk()
    world = World(directory, fresh=True, journal=journal)
    journal.full = True
    world.kubelet.checkpoint = {REGION}
    world.kubelet.write([REGION])
    world.play(lambda: journal.refused > 0)
    assert world.ledger.allocations[DeviceId(REGION)].pod == POD


def test_an_owner_that_cannot_be_written_down_is_a_problem_that_is_told(directory: str) -> None:
    """Beside one that cannot be adopted at all, and is told no more."""
    journal = FullDisk()
    world = World(directory, fresh=True, journal=journal)
    away = f"{CARD.id}-p7"
    world.kubelet.checkpoint = {away}
    world.kubelet.write([away])
    world.play(lambda: world.kubelet.resends > 1)
    assert not world.reconciler.problem
    journal.full = True
    world.kubelet.checkpoint = {away, REGION}
    world.play(lambda: "disk full" in world.reconciler.problem)
    assert world.ledger.allocations[REGION].missed_prestart, (
        "it takes the device from others, written or not"
    )
    assert world.ledger.unreconciled


def test_a_card_that_comes_later_is_asked_about_at_once(directory: str) -> None:
    world = World(directory, fresh=True)
    world.ledger.hardware.card_gone(CARD.id)
    world.ledger.regions.clear()
    world.kubelet.write([])
    world.play(lambda: bool(world.queue.told))
    world.kubelet.write([REGION])
    world.kubelet.show(REGION)
    world.ledger.hardware.card_found(CARD, {}, BLANK)
    world.play(lambda: not world.ledger.unreconciled)
    assert DeviceId(REGION) in world.ledger.allocations
    assert world.kubelet.resends == 0


def test_records_that_another_kubelet_told_meanwhile_name_no_owners(directory: str) -> None:
    world = World(directory, fresh=True)
    world.kubelet.write([REGION])

    def restart() -> None:
        world.kubelet.on_call = lambda: None
        world.ledger.device_plugin.kubelet_found("k2")

    world.kubelet.on_call = restart
    adopted: list[str] = []
    world.ledger.subscribe(lambda _: adopted.append(world.ledger.kubelet_instance))
    world.play(lambda: bool(world.queue.told))
    assert world.ledger.allocations[DeviceId(REGION)].instance == "k2"
    assert world.kubelet.calls > 1


@pytest.mark.parametrize("presence", PodPresence)
def test_what_the_checkpoint_names_is_adopted_whatever_the_journal_knows(
    directory: str, presence: PodPresence
) -> None:
    """Kubelet's checkpoint keeps entries of dead pods: their cgroups are known to be gone."""
    world = World(directory)
    world.cgroups.state = lambda _: presence  # type: ignore[method-assign]
    world.kubelet.write([REGION])
    world.play(lambda: bool(world.queue.told))
    assert bool(world.ledger.allocations) is (presence is not PodPresence.GONE)


def test_an_entry_that_is_older_than_a_deallocate_makes_no_allocation(directory: str) -> None:
    world = World(directory)
    world.kubelet.write([REGION])
    world.owners.answered([DeviceId(REGION)])
    world.play(lambda: bool(world.queue.told))
    assert not world.ledger.allocations
    world.kubelet.write([REGION])
    world.reconciler.kubelet_found("k2")
    world.play(lambda: bool(world.ledger.allocations))


@pytest.mark.parametrize("again", [False, True], ids=["nobody asks", "another pod comes first"])
def test_an_entry_that_outlives_a_deallocate_and_a_restart_ends(
    directory: str, *, again: bool
) -> None:
    """The restarted plugin does not know that it is older than the Deallocate: nobody is hurt."""
    world = World(directory)
    world.kubelet.write([REGION])  # kubelet writes late, and has forgotten the pod by now
    if again:
        world.kubelet.rewrites = False
        world.play(lambda: bool(world.ledger.allocations))
        world.ledger.device_plugin.allocate(RESOURCE, [REGION])
        assert world.ledger.allocations[DeviceId(REGION)].pod is None
    else:
        world.play(lambda: bool(world.released))
        assert not world.ledger.allocations
    (left,) = world.ledger.tenancies.left(RegionId(REGION))
    assert left.pod == POD, "its processes are waited for before the region is scrubbed"


def test_another_pod_than_the_ledgers_is_the_owner_that_the_checkpoint_names(
    directory: str,
) -> None:
    """The state directory was put back from a copy: its owner is not the one that runs."""
    world = World(directory)
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.ledger.device_plugin.bind_pod([DeviceId(REGION)], PodUid("of-the-copy"))
    world.kubelet.write([REGION])
    world.play(lambda: world.ledger.allocations[DeviceId(REGION)].pod == POD)
    assert world.ledger.allocations[DeviceId(REGION)].missed_prestart


@pytest.mark.parametrize("why", ["drained", "renamed", "foreign", "functions"])
@pytest.mark.parametrize("restarted", [False, True])
def test_an_owner_that_ended_is_let_go_though_pods_that_ask_for_its_device_are_refused(
    directory: str, why: str, *, restarted: bool
) -> None:
    """A ReplicaSet replaces a pod that is not admitted at once, so one is always asking."""
    world = World(directory)
    ledger = world.ledger
    world.kubelet.write([REGION])
    scrub(ledger, CARD)
    world.play(lambda: bool(world.queue.told))
    ledger.device_plugin.allocate(RESOURCE, [REGION])
    ledger.device_plugin.bind_pod([DeviceId(REGION)], PodUid("a"))
    start(ledger, DeviceId(REGION))
    if restarted:
        world.reconciler.kubelet_found("another")
    if why == "drained":
        ledger.hardware.set_drained(CARD.id, drained=True)
    elif why == "renamed":
        ledger.naming.call_interfaces({INTERFACE: Alias("now")})
    elif why == "foreign":
        world.owners._look_for_foreign = lambda *_: None  # type: ignore[method-assign]
        ledger.hardware.set_foreign({CARD.id: "pod x holds devices"})
    else:
        ledger.naming.serves_functions = True

    def asks() -> None:
        if DeviceId(REGION) in ledger.allocations and not (restarted and why == "drained"):
            with pytest.raises(RefusedError):
                ledger.device_plugin.allocate(RESOURCE, [REGION])

    world.kubelet.on_call = asks
    world.play(lambda: DeviceId(REGION) not in ledger.allocations)


def test_two_pods_of_one_device_keep_its_card_back(directory: str) -> None:
    world = World(directory)
    write_checkpoint(directory, entry(REGION, pod="a"), entry(REGION, pod="b"))
    world.play(lambda: bool(world.queue.told))
    assert not world.ledger.allocations
    assert world.ledger.unreconciled == {CARD.id}


def test_another_plugins_devices_leave_the_card_alone_until_they_are_gone(directory: str) -> None:
    world = World(directory)
    world.kubelet.checkpoint = {"dfl-fme.0"}
    world.kubelet.write(["dfl-fme.0"])
    world.play(lambda: world.kubelet.resends > 1)
    assert CARD.id in world.ledger.foreign
    world.kubelet.checkpoint = set()
    world.play(lambda: not world.ledger.foreign)


def test_a_card_left_alone_is_told_once_whatever_the_order_of_kubelets_records(
    directory: str,
) -> None:
    world = World(directory)
    of_region = entry("dfl-port.0", pod="a", resource=RESOURCE)
    of_card = entry("dfl-fme.0", pod="b", resource=WHOLE)
    reasons: set[str] = set()
    for entries in ((of_region, of_card), (of_card, of_region)):
        write_checkpoint(directory, *entries)
        asyncio.run(world.owners.read())
        reasons.add(world.ledger.foreign[CARD.id])
    assert len(reasons) == 1


OLD = ResourceName(RESOURCE.replace(PREFIX, "fpga.example.com"))
"""What the plugin called its regions when another prefix was set."""


def test_a_device_that_a_pod_has_under_another_prefix_is_kept(directory: str) -> None:
    world = World(directory)
    world.kubelet.resource = OLD
    world.kubelet.checkpoint = {REGION}
    world.kubelet.write([REGION])
    world.ledger.device_plugin.adopt(OLD, DeviceId(REGION), POD, {})
    world.play(lambda: world.kubelet.resends > 2)
    assert world.released == []
    world.kubelet.checkpoint = set()
    world.play(lambda: world.released == [REGION])


def test_without_a_journal_owners_under_another_prefix_are_learnt(directory: str) -> None:
    world = World(directory, fresh=True)
    world.kubelet.resource = OLD
    world.kubelet.write([REGION])
    world.kubelet.show(REGION)
    world.play(lambda: bool(world.queue.told))
    allocation = world.ledger.allocations[DeviceId(REGION)]
    assert (allocation.resource, allocation.pod) == (OLD, POD)


def test_another_plugins_devices_leave_the_card_alone_whatever_its_prefix(directory: str) -> None:
    world = World(directory)
    world.kubelet.resource = OLD
    world.kubelet.checkpoint = {"intel-fpga-port.0"}
    world.kubelet.write(["intel-fpga-port.0"])
    world.play(lambda: world.kubelet.resends > 1)
    assert f"holds devices of {OLD}" in world.ledger.foreign[CARD.id]


def test_the_queue_is_not_synced_while_kubelet_does_not_answer(directory: str) -> None:
    world = World(directory)
    world.kubelet.error = NO_ANSWER
    world.play(lambda: world.kubelet.calls > 3)
    assert world.queue.told == []


# -------------------------------------------------------------------- kubelet streams its pods


class Watch:
    """A `PodWatch` without a kubelet."""

    def __init__(self, reconciler: Reconciler, *living: PodUid) -> None:
        self.living = set(living)
        self.wanted = False
        self.told_at = 0.0
        self._wake = reconciler._wake
        reconciler.watch = self  # type: ignore[assignment]

    def want(self) -> None:
        self.wanted = True

    def lives(self, pod: PodUid) -> bool:
        return pod in self.living

    def end(self, pod: PodUid) -> None:
        self.living.discard(pod)
        self._wake.set()


def calm(world: World, then: Callable[[], None], until: Callable[[], bool]) -> None:
    """Play until nobody was asked for twenty intervals; `then` on the same loop, `until` holds."""

    async def run() -> None:
        task = asyncio.create_task(world.reconciler.run())
        world.reconciler.stream_opened(RESOURCE)
        async with asyncio.timeout(LIMIT):
            calls = 0
            while not calls or calls != world.kubelet.calls:
                calls = world.kubelet.calls
                await asyncio.sleep(20 * Queue.interval)
            then()
            while not until():  # noqa: ASYNC110  # what is waited for has no event
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def owned(directory: str, *, pod: PodUid | None = POD) -> World:
    world = World(directory)
    world.kubelet.write([] if pod is not POD else [REGION])
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    if pod is not None:
        world.ledger.device_plugin.bind_pod([REGION], pod)
    return world


def test_nothing_is_polled_while_kubelet_tells_that_every_owner_lives(directory: str) -> None:
    world = owned(directory)
    watch = Watch(world.reconciler, POD)
    calm(world, lambda: None, lambda: watch.wanted)
    assert world.kubelet.calls == 1  # the first answer of this kubelet, and no other
    assert world.released == []


def test_changes_in_the_ledger_are_no_reason_to_ask(directory: str) -> None:
    world = owned(directory)
    Watch(world.reconciler, POD)

    def change() -> None:
        for _ in range(5):
            world.ledger.device_plugin.prestart_seen([REGION])

    calm(world, change, lambda: world.reconciler.answered)
    calls = world.kubelet.calls
    calm(world, lambda: None, lambda: True)
    assert world.kubelet.calls == calls


def test_the_end_of_an_owner_is_the_reason_to_ask(directory: str) -> None:
    world = owned(directory)
    watch = Watch(world.reconciler, POD)
    calm(world, lambda: watch.end(POD), lambda: bool(world.released))
    assert world.released == [REGION]
    assert world.kubelet.resends == 1, "the rewritten checkpoint has the last word"
    assert world.kubelet.calls >= 3, "two Lists after the first answer"


def test_what_kubelet_still_lists_is_kept_and_asked_for_again(directory: str) -> None:
    world = owned(directory)
    world.kubelet.show(REGION)
    watch = Watch(world.reconciler, POD)
    calm(world, lambda: watch.end(POD), lambda: world.kubelet.calls > 5)
    assert world.released == []


@pytest.mark.parametrize("pod", [None, PodUid("0f1c2d3e-0000-4000-8000-0000000000ff")])
def test_an_owner_that_kubelet_did_not_tell_is_asked_about_as_ever(
    directory: str, pod: PodUid | None
) -> None:
    world = owned(directory, pod=pod)
    Watch(world.reconciler, POD)
    world.play(lambda: bool(world.released))
    assert world.released == [REGION]


def test_records_that_kubelet_streams_are_as_old_as_the_stream(directory: str) -> None:
    world = owned(directory)
    watch = Watch(world.reconciler, POD)
    calm(world, lambda: None, lambda: watch.wanted)
    read = world.reconciler._last_read
    assert world.reconciler.last_read == read, "the stream was opened before"
    watch.told_at = read + 5.0
    assert world.reconciler.last_read == read + 5.0
    watch.living.clear()
    assert world.reconciler.last_read == read


# -------------------------------------------------------------------- what wakes it, and its end


async def idle(world: World) -> None:
    """Until it has nothing to do: it waits for a word, and asks nobody."""
    calls = -1
    async with asyncio.timeout(LIMIT):
        while calls != world.kubelet.calls:
            calls = world.kubelet.calls
            await asyncio.sleep(10 * Queue.interval)


def during(world: World, story: Callable[[], Awaitable[None]], *, stream: bool = True) -> None:
    """Play a story from its first wait on; what ends the reconciler ends the test.

    `stream`: kubelet has opened one, and has answered.
    """

    async def run() -> None:
        async with beside(world.reconciler.run()):
            await asyncio.sleep(0)
            if stream:
                world.reconciler.stream_opened(RESOURCE)
                await until(lambda: world.queue.told)
            await idle(world)
            await story()

    asyncio.run(run())


@pytest.mark.parametrize("polled", [True, False])
def test_nothing_is_asked_or_scrubbed_before_a_stream_is_open(
    directory: str, *, polled: bool
) -> None:
    world = World(directory, polled=polled)
    assert world.reconciler.last_read == 0

    async def story() -> None:
        assert world.kubelet.calls == 0
        assert world.queue.told == []
        world.reconciler.stream_opened(RESOURCE)
        await until(lambda: world.queue.told)

    during(world, story, stream=False)
    assert world.missed.words[0] == ("stream_opened", RESOURCE)
    assert world.reconciler.last_read > 0


def test_an_allocate_is_reason_to_ask(directory: str) -> None:
    world = World(directory)
    world.kubelet.write([REGION])

    async def story() -> None:
        world.ledger.device_plugin.allocate(RESOURCE, [REGION])
        await until(lambda: world.released)

    during(world, story)
    assert world.released == [REGION]
    assert world.reconciler.released == 1


def test_a_card_that_comes_is_reason_to_ask(directory: str) -> None:
    world = World(directory)
    world.kubelet.write([REGION])
    late = make_card(1, nodes=(7,))

    async def story() -> None:
        world.ledger.hardware.card_found(late, {}, BLANK)
        await until(lambda: not world.ledger.unreconciled)

    during(world, story)


@pytest.mark.parametrize("polled", [True, False])
def test_whatever_changes_has_the_lists_compared_where_kubelet_can_be_asked(
    directory: str, monkeypatch: pytest.MonkeyPatch, *, polled: bool
) -> None:
    world = World(directory, polled=polled)
    looks: list[None] = []

    async def look(check: AllocatableCheck) -> None:
        if check._podresources is not None:
            looks.append(None)

    monkeypatch.setattr(AllocatableCheck, "look", look)

    async def story() -> None:
        for change in (
            lambda: world.reconciler.stream_opened(RESOURCE),
            lambda: world.ledger.hardware.set_foreign({CARD.id: "drain the node"}),
        ):
            world.reconciler._allocatable._left = 0
            await idle(world)
            before = len(looks)
            await idle(world)
            assert len(looks) == before, "nothing has changed"
            change()
            if polled:
                await until(lambda before=before: len(looks) > before)
        await idle(world)

    during(world, story)
    assert bool(looks) is polled


def test_while_nothing_changes_owners_are_asked_about_and_no_lists_compared(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(directory)
    world.kubelet.show(REGION)
    looks: list[None] = []

    async def look(check: AllocatableCheck) -> None:
        check._left = 0
        looks.append(None)

    monkeypatch.setattr(AllocatableCheck, "look", look)
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.play(lambda: world.kubelet.calls > 6)
    assert 0 < len(looks) < 3


def test_the_first_answer_tells_whose_the_allocations_are(directory: str) -> None:
    """Containers may start without a PreStart after kubelet's restart: none would tell it."""
    world = World(directory)
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.kubelet.write([REGION])
    world.kubelet.show(REGION)
    world.play(lambda: bool(world.queue.told))
    assert world.ledger.allocations[DeviceId(REGION)].pod == POD


def test_its_end_is_the_end_of_all_that_it_set_off(directory: str) -> None:
    world = World(directory)

    async def nothing() -> None:
        pass

    during(world, nothing)
    assert world.missed.words[-1] == ("close",)
    world.reconciler._wake.clear()
    world.ledger.hardware.set_foreign({CARD.id: "drain the node"})
    assert not world.reconciler._wake.is_set(), "it hears of no change any more"


def test_containers_without_a_prestart_are_looked_for_where_the_journal_knows_the_allocations(
    directory: str,
) -> None:
    for known in (True, False):
        world = World(directory)
        world.kubelet.write([REGION])
        if known:
            world.ledger.device_plugin.allocate(RESOURCE, [REGION])
        world.play(lambda world=world: bool(world.queue.told))
        assert (("look",) in world.missed.words) is known


def test_kubelets_stream_of_pods_is_used_where_its_socket_is_known(directory: str) -> None:
    assert World(directory).reconciler.watch is None
    watch = World(directory, pods_socket=f"{directory}/pods.sock").reconciler.watch
    assert isinstance(watch, PodWatch)


def test_kubelet_is_not_asked_to_stream_while_nothing_is_owned(directory: str) -> None:
    world = World(directory)
    watch = Watch(world.reconciler)

    async def story() -> None:
        assert not watch.wanted
        assert world.kubelet.calls == 1, "its first answer, and nothing since"
        assert world.kubelet.resends == 0
        world.ledger.device_plugin.allocate(RESOURCE, [REGION])
        await until(lambda: watch.wanted)

    during(world, story)


@pytest.mark.parametrize("polled", [True, False])
def test_kubelet_is_asked_at_intervals_and_not_all_the_time(
    directory: str, *, polled: bool
) -> None:
    """Its API has a limit of its own, and each question costs it a walk over all pods."""
    for fresh, error in [(False, None), (True, None), (True, NO_ANSWER)]:
        world = World(directory, fresh=True, polled=polled)
        world.kubelet.checkpoint = {f"{CARD.id}-p7"} if fresh else set()
        world.kubelet.write(world.kubelet.checkpoint)
        world.kubelet.show(REGION)
        world.kubelet.error = error
        reads = counted(world)

        async def story(world: World = world, reads: list[None] = reads) -> None:
            if not world.ledger.unreconciled:
                world.ledger.device_plugin.allocate(RESOURCE, [REGION])
            begin, before = asyncio.get_running_loop().time(), len(reads) + world.kubelet.calls
            await asyncio.sleep(10 * Queue.interval)
            rounds = (asyncio.get_running_loop().time() - begin) / Queue.interval
            # A round has a List, what is allocatable, and a checkpoint.
            assert len(reads) + world.kubelet.calls - before <= 3 * (rounds + 2)

        asyncio.run(ran_with(world, story))


def counted(world: World) -> list[None]:
    """How often the checkpoint was read."""
    reads: list[None] = []
    read = world.pods.checkpoint

    async def checkpoint() -> Checkpoint:
        reads.append(None)
        return await read()

    world.pods.checkpoint = checkpoint  # type: ignore[method-assign]
    return reads


async def ran_with(world: World, story: Callable[[], Awaitable[None]]) -> None:
    async with beside(world.reconciler.run()):
        world.reconciler.stream_opened(RESOURCE)
        await asyncio.sleep(5 * Queue.interval)
        await story()


def test_without_podresources_what_keeps_a_card_back_is_looked_at_again(directory: str) -> None:
    world = World(directory, fresh=True, polled=False)
    away = f"{CARD.id}-p7"
    world.kubelet.checkpoint = {away}
    world.kubelet.write([away])
    world.play(lambda: world.kubelet.resends > 1)
    assert world.ledger.unreconciled == {CARD.id}
    world.kubelet.checkpoint = set()
    world.play(lambda: not world.ledger.unreconciled)


# -------------------------------------------------------------------- how old the records are


def test_records_are_as_old_as_the_last_answer_wherever_kubelet_does_not_stream(
    directory: str,
) -> None:
    """A node's staleness is a metric, and an alarm."""
    world = owned(directory)
    reconciler = world.reconciler
    watch = Watch(reconciler, POD)
    watch.told_at = 1e10
    assert reconciler.last_read == 0, "nothing was read yet, whatever kubelet streams"
    reconciler._last_read = 100.0
    assert reconciler.last_read == 100.0, "this kubelet has not answered"
    reconciler.answered = True
    assert reconciler.last_read == 1e10
    reconciler.watch = None
    assert reconciler.last_read == 100.0
    reconciler.watch = watch  # type: ignore[assignment]
    reconciler._podresources = None
    assert reconciler.last_read == 100.0
    reconciler._podresources = world.kubelet  # type: ignore[assignment]
    world.ledger.device_plugin.release([DeviceId(REGION)])
    assert reconciler.last_read == 100.0, "with nothing owned nothing is streamed"


# -------------------------------------------------------------------- a node that waits


def test_a_new_cards_records_are_asked_for_until_they_are_told(directory: str) -> None:
    """Nothing else happens on the node, and its regions are wanted."""
    world = World(directory)
    world.kubelet.write([])

    async def story() -> None:
        world.kubelet.error = NO_ANSWER
        world.ledger.hardware.card_found(make_card(1, nodes=(7,)), {}, BLANK)
        begin, before = asyncio.get_running_loop().time(), world.kubelet.calls
        await until(lambda: world.kubelet.calls > before + 3)
        rounds = (asyncio.get_running_loop().time() - begin) / Queue.interval
        assert world.kubelet.calls - before <= rounds + 3
        assert world.reconciler.problem
        world.kubelet.error = None
        await until(lambda: not world.ledger.unreconciled)
        assert not world.reconciler.problem

    during(world, story)


def test_nothing_is_looked_at_while_nothing_happens(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(directory)
    looks: list[None] = []
    compare = world.reconciler._compare_records

    async def counted_look() -> None:
        looks.append(None)
        await compare()

    monkeypatch.setattr(world.reconciler, "_compare_records", counted_look)

    async def story() -> None:
        before = len(looks)
        await idle(world)
        assert len(looks) == before

    during(world, story)


def test_what_keeps_a_card_back_is_asked_for_with_kubelets_lists(directory: str) -> None:
    """They tell how old what is known is, though nobody owns anything."""
    world = World(directory, fresh=True)
    away = f"{CARD.id}-p7"
    world.kubelet.checkpoint = {away}
    world.kubelet.write([away])
    world.play(lambda: world.kubelet.calls > 4)
    assert not world.ledger.allocations


def test_one_owner_whom_kubelet_did_not_tell_is_reason_enough_to_ask(directory: str) -> None:
    world = owned(directory)
    world.kubelet.show(REGION)
    world.kubelet.checkpoint = {REGION}
    world.ledger.device_plugin.allocate(RESOURCE, [SECOND])
    world.ledger.device_plugin.bind_pod([SECOND], PodUid("0f1c2d3e-0000-4000-8000-0000000000ff"))
    Watch(world.reconciler, POD)
    world.play(lambda: bool(world.released))
    assert world.released == [SECOND]


# -------------------------------------------------------------------- what counts, and what is told


def test_lists_with_a_failure_between_them_are_none_in_a_row(directory: str) -> None:
    """Invariant 3: what happened in between, nobody saw."""
    world = World(directory)
    world.kubelet.write([])
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])

    def every_other() -> None:
        world.kubelet.error = NO_ANSWER if world.kubelet.calls % 2 else None

    world.kubelet.calls = 1
    world.kubelet.on_call = every_other
    world.play(lambda: world.kubelet.calls > 12)
    assert world.released == []
    assert world.kubelet.resends == 0


def test_what_was_wrong_is_no_problem_any_more_once_kubelet_answers(directory: str) -> None:
    world = World(directory)
    world.kubelet.show(REGION)
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])

    async def story() -> None:
        for _ in range(2):
            world.kubelet.error = NO_ANSWER
            await until(lambda: world.reconciler.problem)
            read, world.kubelet.error = world.reconciler.last_read, None
            await until(lambda read=read: world.reconciler.last_read > read)
            await until(lambda: not world.reconciler.problem)

    asyncio.run(ran_with(world, story))


def test_that_kubelet_writes_nothing_is_told_once_for_the_same_devices(directory: str) -> None:
    world = World(directory)
    world.kubelet.write([])
    world.kubelet.rewrites = False
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    stamps: list[None] = []
    stamp = world.pods.stamp

    def counted_stamp() -> object:
        stamps.append(None)
        return stamp()

    world.pods.stamp = counted_stamp  # type: ignore[method-assign, assignment]
    with capture_logs() as logs:
        world.play(lambda: world.kubelet.resends > 2)
    looks = reconcile.REWRITE_WAIT / reconcile.REWRITE_POLL
    assert len(stamps) <= (looks + 3) * world.kubelet.resends, "it is not kept busy"
    told = [line for line in logs if "not rewritten its checkpoint" in line["event"]]
    assert [line["devices"] for line in told] == [[REGION]]
    assert world.released == []


def test_a_card_kept_back_by_records_that_cannot_be_read_is_a_problem_that_is_told(
    directory: str,
) -> None:
    world = World(directory, fresh=True)
    away = f"{CARD.id}-p7"
    world.kubelet.checkpoint = {away}
    world.kubelet.write([away])
    world.play(lambda: world.kubelet.resends > 1)
    world.kubelet.resend = world.kubelet.spoil
    with capture_logs() as logs:
        world.play(lambda: "is not understood" in world.reconciler.problem)
    assert [line["event"] for line in logs] == [NOTHING_IS_RELEASED]


def test_that_another_source_decided_is_told_once(directory: str) -> None:
    world = World(directory)

    async def ended(_pod: PodUid) -> bool:
        return True

    world.pods.ended = ended  # type: ignore[method-assign]
    world.play(lambda: bool(world.queue.told))
    world.kubelet.resend = world.kubelet.spoil
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.ledger.device_plugin.bind_pod([DeviceId(REGION)], POD)
    with capture_logs() as logs:
        world.play(lambda: REGION in world.released)
    told = [line for line in logs if line["event"] == "kubelet's checkpoint cannot be read"]
    assert len(told) == 1
    assert "is not understood" in world.reconciler.problem
    assert world.reconciler.released == 1


def test_a_kubelet_that_never_writes_a_checkpoint_has_no_entries(directory: str) -> None:
    world = World(directory)
    world.kubelet.rewrites = False
    world.play(lambda: bool(world.queue.told))
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.play(lambda: world.released == [REGION])


def test_a_checkpoint_that_goes_while_it_is_waited_for_says_nothing(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 3: it is on its way, and may come back with the pod in it."""
    monkeypatch.setattr(reconcile, "REWRITE_WAIT", 0.05)
    world = World(directory)
    world.kubelet.on_call = lambda: world.kubelet.write([REGION])
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    resends: list[None] = []

    def resend() -> None:
        resends.append(None)
        os.unlink(world.kubelet.path)

    world.kubelet.resend = resend  # type: ignore[method-assign]
    world.play(lambda: len(resends) > 3)
    assert world.released == []


def test_records_that_another_kubelet_read_half_way_say_nothing(directory: str) -> None:
    """Neither are they as new as the time at which they were read."""
    world = owned(directory)
    world.reconciler.answered = True
    world.kubelet.on_call = lambda: restart_kubelet(world, "k2")
    assert not asyncio.run(world.reconciler._read_records())
    assert world.reconciler.last_read == 0
    world.kubelet.on_call = lambda: None
    world.reconciler.answered = False
    assert asyncio.run(world.reconciler._read_records())
    assert world.reconciler.last_read > 0


def test_a_list_of_another_kubelet_is_compared_with_nothing(directory: str) -> None:
    world = owned(directory)
    world.kubelet.write([])
    world.kubelet.on_call = lambda: restart_kubelet(world, "k2")
    world.reconciler._lacking = {}
    asyncio.run(world.reconciler._list(world.kubelet))  # type: ignore[arg-type]
    assert world.reconciler._lacking == {}
    assert world.reconciler._lister is None


def test_while_dra_may_have_given_devices_no_card_is_known_by_the_checkpoint(
    directory: str,
) -> None:
    world = World(directory, fresh=True)
    world.kubelet.write([])
    world.ledger.resource_claims_unknown = "DRA served this node"
    assert asyncio.run(world.reconciler._read_records())
    assert world.ledger.unreconciled == {CARD.id}
    world.ledger.resource_claims_unknown = ""
    assert asyncio.run(world.reconciler._read_records())
    assert world.ledger.unreconciled == set()
