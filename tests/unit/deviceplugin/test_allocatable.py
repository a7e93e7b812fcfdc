"""What kubelet knows against what it was sent; and containers that started without PreStart."""

import asyncio
import os
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import structlog
from doubles import LIMIT
from doubles.cards import PREFIX, make_card
from doubles.cards import REGIONS as RESOURCE
from doubles.cards import WHOLE as OTHER
from doubles.journal import NoJournal
from doubles.kubelet import POD as UID
from doubles.kubelet import Kubelet, entry, write_checkpoint, write_text

from fpga_plugin.allocation.journal.records import Change
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.deviceplugin import missed_prestarts
from fpga_plugin.deviceplugin.allocatable import GIVE_UP, LASTING, QUIET, AllocatableCheck
from fpga_plugin.deviceplugin.missed_prestarts import MissedPreStarts
from fpga_plugin.errors import NoSourceError
from fpga_plugin.ids import DeviceId, RegionId
from fpga_plugin.kubernetes.kubelet.podresources import NoListReason, PodResourcesError
from fpga_plugin.kubernetes.names import PodName, PodUid, ResourceName
from fpga_plugin.kubernetes.pod import ContainerState, Phase, Pod

REGION = "0000-10-00.0-p0"
BOTH = frozenset({REGION, "0000-10-00.0-p1"})


# -------------------------------------------------------------------- standing


class Sent:
    """What kubelet was sent, and what it says that it knows."""

    def __init__(self) -> None:
        self.lists = {RESOURCE: BOTH, OTHER: frozenset({"0000-10-00.0"})}
        self.kubelet = Kubelet()
        self.kubelet.known = dict(self.lists)
        self.renewed: list[ResourceName] = []
        self.standing = AllocatableCheck(
            SimpleNamespace(sent=lambda: self.lists, reregister=self.renewed.append),
            self.kubelet,  # type: ignore[arg-type]
        )
        self.standing.new_kubelet()

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            asyncio.run(self.standing.look())


def test_lists_that_do_not_differ_are_not_compared_again():
    sent = Sent()
    sent.look(QUIET)
    assert not sent.standing.due
    sent.standing.changed()
    assert sent.standing.due
    assert sent.renewed == []


def test_a_lasting_difference_is_reported_and_the_resource_registered_anew():
    sent = Sent()
    del sent.kubelet.known[RESOURCE]
    with structlog.testing.capture_logs() as logs:
        sent.look(LASTING)
        assert sent.renewed == [RESOURCE]
        sent.kubelet.known[RESOURCE] = BOTH
        sent.look(QUIET)
    assert [(line["log_level"], line["resource"]) for line in logs] == [
        ("warning", RESOURCE),
        ("info", RESOURCE),
    ]
    assert (logs[0]["missing"], logs[0]["surplus"]) == (2, 0)
    assert not sent.standing.due


def test_a_difference_that_passes_is_not_reported():
    sent = Sent()
    for known in (frozenset(), BOTH) * LASTING:
        sent.kubelet.known[RESOURCE] = known
        sent.look(LASTING - 1 if not known else 1)
    assert sent.renewed == []


def test_a_registration_that_does_not_help_is_repeated_less_and_less_often():
    sent = Sent()
    sent.kubelet.known[RESOURCE] = frozenset({"x"})
    sent.look(LASTING + 2 * LASTING)
    assert len(sent.renewed) == 2
    sent.look(4 * LASTING - 1)
    assert len(sent.renewed) == 2
    sent.look()
    assert len(sent.renewed) == 3
    assert sent.standing.due, "as long as it differs"


def test_a_list_that_was_sent_meanwhile_is_not_compared():
    sent = Sent()
    sent.kubelet.known[RESOURCE] = frozenset()

    def send() -> None:
        sent.lists = sent.lists | {RESOURCE: frozenset({str(sent.kubelet.calls)})}

    sent.kubelet.on_call = send
    sent.look(3 * LASTING)
    assert sent.renewed == []


def test_a_resource_without_a_stream_is_not_compared():
    sent = Sent()
    sent.kubelet.known[RESOURCE] = frozenset()
    sent.look()
    del sent.lists[RESOURCE]
    sent.look(2 * LASTING)
    assert sent.renewed == []
    assert not sent.standing.due


def test_no_answer_is_no_difference_and_is_not_waited_for_forever():
    sent = Sent()
    sent.kubelet.error = PodResourcesError("often", reason=NoListReason.RATE_LIMITED)
    sent.look(GIVE_UP)
    assert not sent.standing.due
    assert sent.renewed == []
    sent.standing.changed()
    assert sent.standing.due


def test_a_kubelet_that_does_not_tell_is_not_asked_again():
    sent = Sent()
    sent.kubelet.error = PodResourcesError("what?", reason=NoListReason.NOT_SERVED)
    sent.look(3)
    sent.standing.changed()
    assert sent.kubelet.calls == 1
    assert not sent.standing.due
    sent.standing.new_kubelet()
    assert sent.standing.due


RATE_LIMITED = PodResourcesError("often", reason=NoListReason.RATE_LIMITED)


def test_a_kubelet_that_the_journal_knows_is_asked_as_soon_as_something_changes():
    """The plugin restarted, kubelet did not: it is notified of no other kubelet."""
    sent = Sent()
    sent.standing = AllocatableCheck(sent.standing._link, sent.standing._podresources)
    assert not sent.standing.due
    sent.kubelet.error = RATE_LIMITED
    sent.look()
    sent.standing.changed()
    assert sent.standing.due


def test_another_kubelet_begins_with_nothing_to_its_account():
    sent = Sent()
    sent.kubelet.known[RESOURCE] = frozenset()
    sent.look(LASTING)
    assert len(sent.renewed) == 1
    sent.look(LASTING - 1)
    sent.kubelet.known[RESOURCE] = BOTH
    sent.standing.new_kubelet()
    assert sent.standing.due
    sent.kubelet.known[RESOURCE] = frozenset()
    sent.look(LASTING - 1)
    assert len(sent.renewed) == 1, "what the one before lacked"
    sent.look()
    assert len(sent.renewed) == 2, "the first try with this one"


@pytest.mark.parametrize("reason", ["a change", "an answer"])
def test_the_looks_without_an_answer_are_counted_anew_after(reason: str):
    sent = Sent()
    sent.kubelet.known[RESOURCE] = frozenset()
    sent.kubelet.error = RATE_LIMITED
    sent.look(GIVE_UP - 1)
    assert sent.standing.due
    if reason == "a change":
        sent.standing.changed()
    else:
        sent.kubelet.error = None
        sent.look()
        sent.kubelet.error = RATE_LIMITED
    sent.look(GIVE_UP - 1)
    assert sent.standing.due
    sent.look()
    assert not sent.standing.due


# -------------------------------------------------------------------- ungated


STARTED = f"container app was started without PreStart after kubelet's restart: {REGION} "


class Directory(PodDirectory):
    """Kubelet's checkpoint, and the world's pod."""

    def __init__(self, world: "World") -> None:
        super().__init__(kubelet_dir=world.directory, prefix=PREFIX)
        self.world = world

    async def pod(self, uid: PodUid, held: frozenset[str]) -> Pod:
        return await self.world.pod(uid, held)


class Recorder(EventRecorder):
    """Keeps what it is told."""

    def __init__(self, world: "World") -> None:
        super().__init__(None, node_name=None, pods=Directory(world), observer=world)
        self.world = world

    def about_pod(self, pod: PodUid, name: PodName, reason: str, note: str) -> None:
        assert (name, reason) == (PodName("tenant", "compress"), "FpgaNotProgrammed")
        self.world.told.append((pod, note))


class World:
    """An allocation from before kubelet's restart, and a pod whose container began at some time."""

    def __init__(self, directory: str) -> None:
        self.ledger = Ledger(prefix=PREFIX, journal=NoJournal(), snapshot=Change(), boot_id="b")
        card = make_card(0, nodes=(0, 1))
        self.ledger.hardware.card_found(card, {}, None)
        self.ledger.reconciled([card.id])
        self.ledger.device_plugin.kubelet_found("k1")
        self.ledger.device_plugin.allocate(RESOURCE, [REGION])
        self.started_allocation()
        self.directory = directory
        self.socket = os.path.join(directory, "kubelet.sock")
        self.started = 0
        self.asked = 0
        self.on_ask: Callable[[], object] = lambda: None
        self.error: NoSourceError | None = None
        self.told: list[tuple[PodUid, str]] = []
        self.checkpoint()
        self.ungated = self.plugin()

    def started_allocation(self) -> None:
        """Its container had a PreStart."""
        allocations = self.ledger.allocations.values()
        self.ledger.device_plugin.prestart_seen([allocation.device for allocation in allocations])
        self.ledger.device_plugin.started(allocations)

    def plugin(self) -> MissedPreStarts:
        return MissedPreStarts(
            ledger=self.ledger,
            pods=Directory(self),
            kubelet_dir=self.directory,
            recorder=Recorder(self),
            looks=(0.0, 0.001),
        )

    def checkpoint(self, *entries: object) -> None:
        write_checkpoint(self.directory, *(entries or [entry(REGION, pod=UID)]))

    def restart_again(self, instance: str, *, opens: float = 5) -> float:
        """The same plugin sees kubelet's next life; returns when that began."""
        os.unlink(self.socket)
        open(self.socket, "w").close()
        self.ledger.device_plugin.kubelet_found(instance)
        self.ungated.new_kubelet()
        birth = os.stat(self.socket).st_ctime
        self.stream_opens(birth + opens)
        return birth

    async def pod(self, uid: PodUid, held: frozenset[str]) -> Pod:
        assert uid == UID
        assert held <= BOTH
        self.asked += 1
        self.on_ask()
        if self.error is not None:
            raise self.error
        state = (
            ContainerState(Phase.RUNNING, started=self.started)
            if self.started
            else ContainerState()
        )
        return Pod(namespace="tenant", name="compress", uid=uid, states={"app": state})

    def restart_kubelet(self, *, instance: str = "k2") -> float:
        """Kubelet's next life, whose streams open some seconds later; returns when it began."""
        open(self.socket, "w").close()
        self.ungated = self.plugin()
        if instance != self.ledger.kubelet_instance:
            self.ledger.device_plugin.kubelet_found(instance)
            self.ungated.new_kubelet()
        birth = os.stat(self.socket).st_ctime
        self.stream_opens(birth + 5)
        return birth

    def stream_opens(self, at: float) -> None:
        with mock.patch.object(missed_prestarts.time, "time", return_value=at):
            self.ungated.stream_opened(RESOURCE)

    def look(self) -> list[dict]:
        async def run() -> None:
            self.ungated.look()
            if self.ungated._task is not None:
                await self.ungated._task

        with structlog.testing.capture_logs() as logs:
            asyncio.run(run())
        return logs


@pytest.fixture
def world(tmp_path) -> World:
    return World(str(tmp_path))


def test_a_container_that_began_before_the_stream_opened_is_reported_once(world: World):
    world.started = int(world.restart_kubelet()) + 2
    (line,) = world.look()
    assert "PreStart" in line["event"]
    assert (line["pod"], line["container"], line["devices"]) == (UID, "app", [REGION])
    assert line["unscrubbed"] == []
    ((pod, note),) = world.told
    assert pod == UID
    assert note == STARTED + "not programmed again; restart the container if that matters"
    assert world.look() == []


def test_a_container_that_began_on_what_an_earlier_pod_left_is_reported_as_such(world: World):
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])  # an implied release
    world.started = int(world.restart_kubelet()) + 2
    world.error = NoSourceError("nobody answers")
    (unknown,) = world.look()
    assert unknown["unscrubbed"] == [REGION], "what may be, where no pod is told"
    world.error = None
    (line,) = world.look()
    assert line["unscrubbed"] == [REGION]
    assert world.told == [(UID, STARTED + "still held what an earlier pod left; delete the pod")]


def test_a_container_that_began_on_a_blank_region_is_not_reported_as_unscrubbed(world: World):
    world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    world.ledger.work.working([RegionId(REGION)])
    world.ledger.work.clean(RegionId(REGION), None, blank=True)
    world.started = int(world.restart_kubelet()) + 2
    (line,) = world.look()
    assert line["unscrubbed"] == []


@pytest.mark.parametrize("seconds", [-1, 0, 7])
def test_a_container_that_began_before_kubelet_or_after_the_stream_is_not_reported(
    world: World, seconds: int
):
    world.started = int(world.restart_kubelet()) + seconds
    assert world.look() == []
    assert world.told == []


def test_no_container_of_a_kubelet_that_did_not_restart_is_reported(world: World):
    """The plugin restarted, and kubelet did not: the life before saw all PreStarts."""
    world.started = int(world.restart_kubelet(instance="k1")) + 2
    world.ledger.activity.clear()
    assert world.look() == []
    assert world.asked == 0


def test_a_container_that_does_not_run_is_not_reported(world: World):
    world.restart_kubelet()
    assert world.look() == []


@pytest.mark.parametrize("call", ["PreStart", "Allocate"])
def test_a_container_that_had_its_prestart_meanwhile_is_not_reported(world: World, call: str):
    world.started = int(world.restart_kubelet()) + 2
    if call == "PreStart":
        world.ledger.device_plugin.prestart_seen([DeviceId(REGION)])
    else:
        world.ledger.device_plugin.allocate(RESOURCE, [REGION])
    assert world.look() == []


def test_a_pod_that_is_not_told_yet_is_asked_for_again_and_then_reported(world: World):
    world.started = int(world.restart_kubelet()) + 2
    world.error = NoSourceError("still starting")
    (line,) = world.look()
    assert world.asked == 2
    assert "still starting" in line["error"]
    world.error = None
    assert len(world.look()) == 1


def test_kubelets_records_that_cannot_be_read_are_told(world: World):
    world.restart_kubelet()
    write_text(world.directory, "{")
    (line,) = world.look()
    assert "is not understood" in line["error"]
    assert world.asked == 0


def test_without_an_allocation_nobody_is_asked(world: World):
    world.ledger.device_plugin.release([REGION])
    world.started = int(world.restart_kubelet()) + 2
    with mock.patch.object(Directory, "checkpoint", side_effect=AssertionError):
        assert world.look() == []
    assert world.asked == 0


def test_nobody_is_asked_of_pods_whose_devices_are_not_ours_or_had_a_prestart(world: World):
    """Each of a node's pods may cost a question to the API server."""
    other = "0000-10-00.0-p1"
    world.ledger.device_plugin.allocate(RESOURCE, [other])
    world.restart_kubelet()
    world.ledger.device_plugin.prestart_seen([REGION])
    world.checkpoint(entry(REGION), entry("dfl-port.0"))
    assert world.look() == []
    assert world.asked == 0
    world.checkpoint(entry(other), entry(REGION))
    assert world.look() == []
    assert world.asked > 0


def test_an_allocation_that_kubelets_records_showed_only_now_may_have_run(world: World):
    world.ledger.device_plugin.release([REGION])
    world.ledger.activity.clear()
    world.started = int(world.restart_kubelet()) + 2
    world.ledger.device_plugin.adopt(RESOURCE, DeviceId(REGION), UID, {})
    assert len(world.look()) == 1


@pytest.mark.parametrize("meanwhile", [[REGION], sorted(BOTH)])
def test_a_container_that_has_its_prestart_while_its_pod_is_asked_for_is_not_reported(
    world: World, meanwhile: list[str]
):
    world.ledger.device_plugin.allocate(RESOURCE, ["0000-10-00.0-p1"])
    world.checkpoint(entry(*BOTH))
    world.started = int(world.restart_kubelet()) + 2
    world.on_ask = lambda: world.ledger.device_plugin.prestart_seen(meanwhile)
    assert world.look() == []
    assert world.told == []


def test_a_whole_card_of_which_one_region_was_not_scrubbed_is_told_as_such(world: World):
    card = DeviceId("0000-10-00.0")
    world.ledger.device_plugin.release([REGION])
    for region in sorted(BOTH):
        world.ledger.work.working([RegionId(region)])
        world.ledger.work.clean(RegionId(region), None, blank=True)
    world.ledger.work.set_memory_clear_pending(card, open_=False)
    world.ledger.device_plugin.allocate(OTHER, [card])
    world.ledger.work.dirty([RegionId(REGION)], "found so")
    world.restart_kubelet()
    assert world.ungated._unscrubbed == {card}


def test_what_began_before_the_stream_is_told_by_the_first_stream_of_this_kubelet(world: World):
    world.restart_kubelet()
    birth = world.restart_again("k3")
    world.stream_opens(birth + 60)  # kubelet asks again for the list; it has our options long since
    world.started = int(birth) + 30
    assert world.look() == []
    birth = world.restart_again("k4", opens=100)
    world.started = int(birth) + 30
    assert len(world.look()) == 1, "the stream of the kubelet before opened earlier"


def test_a_resource_whose_stream_is_not_open_is_looked_at_later(world: World):
    world.started = int(world.restart_kubelet()) + 2
    world.ungated._opened.clear()
    assert world.look() == []
    assert world.told == []


@pytest.mark.parametrize("who", ["new kubelet", "look", "close"])
def test_looks_for_the_kubelet_before_end_with_it(world: World, who: str):
    """Its birth is not the new one's, and two would report everything twice."""
    world.restart_kubelet()
    world.ungated._looks = (0.0, 1000.0)

    async def run() -> None:
        world.ungated.look()
        first = world.ungated._task
        assert first is not None
        async with asyncio.timeout(LIMIT):
            while not world.asked:  # noqa: ASYNC110  # nobody announces it
                await asyncio.sleep(0.001)
            assert not first.done(), "the next look is not now"
            {
                "new kubelet": world.ungated.new_kubelet,
                "look": world.ungated.look,
                "close": world.ungated.close,
            }[who]()
            await asyncio.wait({first})
        assert first.cancelled()
        world.ungated.close()

    asyncio.run(run())


def test_a_kubelet_that_is_gone_again_is_not_looked_at(world: World):
    world.restart_kubelet()
    os.unlink(world.socket)
    assert world.look() == []
    assert world.asked == 0
