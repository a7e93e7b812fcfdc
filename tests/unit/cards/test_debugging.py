"""What keeps a region for debugging, and what ends it: the look at pods."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from doubles.cards import REGIONS
from ledger_support import hold, make_ledger
from test_debug_holds import ASKED, CARD, P0, P1, POD, R0, kept, started

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.queue import CardQueue
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.cards import debugging as debugging_module
from fpga_plugin.cards.debugging import (
    ASK_SECONDS,
    DECIDE_SECONDS,
    Allowed,
    Debugging,
    failure,
    parse_keep,
)
from fpga_plugin.errors import NoSourceError
from fpga_plugin.ids import RegionId
from fpga_plugin.kubernetes.kubelet import podsapi
from fpga_plugin.kubernetes.names import PodName, PodUid
from fpga_plugin.kubernetes.pod import Container, ContainerState, Phase, Pod, Run


def pod(*runs, ended=True, annotations=None, names=("app",)):
    states = {name: run for name, run in zip(names, runs, strict=False) if run is not None}
    return Pod(
        namespace="tenant",
        name="compress",
        uid=POD,
        annotations=annotations or {},
        containers=tuple(map(Container, names)),
        states=states,
        ended=ended,
    )


def ran(code):
    return ContainerState(Phase.TERMINATED, ended=Run(code, 1))


class Pods:
    """Tells one pod, or nothing."""

    def __init__(self, answer=None):
        self.answer = answer

    def known(self, _):
        return None

    def learn(self, *_):
        pass

    async def pod(self, _uid, _held):
        if self.answer is None:
            raise NoSourceError("nobody reports")
        return self.answer


class Recorder:
    def __init__(self):
        self.told = []

    def warned(self, _identity, _devices, message, *, reason):
        self.told.append((reason, message))

    def about_pod(self, _pod, _name, reason, note):
        self.told.append((reason, note))


def debugging(ledger, answer=None, *, namespaces=("tenant",)):
    clock = SimpleNamespace(now=100.0)
    operations = SimpleNamespace(ledger=ledger, port_errors_logged=set())
    allowed = Allowed(annotation="fpga.intel.com/debug", namespaces=frozenset(namespaces))
    made = Debugging(
        operations,
        Pods(answer),
        Recorder(),
        CardQueue(interval=1.0),
        allowed=allowed,
        interval=1.0,
        clock=lambda: clock.now,
    )
    return made, clock, operations


def look(made):
    asyncio.run(made.look())


def test_the_region_of_a_container_that_failed_is_kept_for_its_time():
    ledger, _ = started()
    made, clock, operations = debugging(ledger, pod(ran(3)))
    assert operations.port_errors_logged == {R0}
    look(made)
    assert debug_holds.in_force(ledger, R0) is None  # its pod has it
    ledger.device_plugin.release([P0])
    look(made)
    assert ledger.debug_holds[R0].until == 700.0
    assert made._recorder.told[-1][0] == "FpgaRegionKept"
    clock.now = 699.0
    look(made)
    assert debug_holds.in_force(ledger, R0) is not None
    clock.now = 700.0
    look(made)
    assert not ledger.debug_holds


def test_what_a_former_version_keeps_for_longer_is_kept_for_an_hour():
    ledger, _ = kept(until=100.0 + 86400.0)
    made, clock, _ = debugging(ledger)
    look(made)
    clock.now = 3699.0
    look(made)
    assert debug_holds.in_force(ledger, R0) is not None
    clock.now = 3700.0
    look(made)
    assert not ledger.debug_holds


def test_what_was_seen_to_fail_counts_when_nobody_tells_any_more():
    ledger, _ = started()
    made, clock, _ = debugging(ledger, pod(ran(3), ended=False))
    look(made)
    ledger.device_plugin.release([P0])
    made._pods.answer = None
    look(made)
    assert not ledger.debug_holds[R0].until  # the status may come yet
    clock.now += DECIDE_SECONDS
    look(made)
    assert debug_holds.in_force(ledger, R0) is not None


@pytest.mark.parametrize(
    "answer",
    [None, pod(ContainerState(Phase.RUNNING), ended=False), pod(ended=False)],
    ids=["nobody reports", "it runs", "it waits"],
)
def test_without_a_failure_it_is_scrubbed_soon(answer):
    ledger, _ = started()
    made, clock, _ = debugging(ledger, answer)
    ledger.device_plugin.release([P0])
    look(made)
    assert R0 in ledger.debug_holds
    clock.now += DECIDE_SECONDS
    look(made)
    assert not ledger.debug_holds


def test_a_pod_that_ended_well_leaves_nothing():
    ledger, _ = started()
    made, _, _ = debugging(ledger, pod(ran(0)))
    ledger.device_plugin.release([P0])
    look(made)
    assert not ledger.debug_holds


def test_a_second_pods_region_is_not_kept():
    ledger, _ = started()
    other = PodUid("0f1c2d3e-0000-4000-8000-000000000002")
    started(at=P1, uid=other, ledger=ledger)
    made, _, _ = debugging(ledger, pod(ran(3)))
    ledger.device_plugin.release([P0])
    look(made)
    ledger.device_plugin.release([P1])
    look(made)
    assert [one.pod for one in ledger.debug_holds.values()] == [POD]
    assert made._recorder.told[-1][0] == "FpgaRegionNotKept"


def test_an_owner_that_came_while_the_status_was_read_is_left_alone():
    ledger, _ = started()
    made, _, _ = debugging(ledger, pod(ran(3)))
    ledger.device_plugin.release([P0])
    tell = made._pods.pod

    async def pod_then(uid, held):
        ledger.device_plugin.allocate(REGIONS, [P0])
        return await tell(uid, held)

    made._pods.pod = pod_then
    look(made)
    assert not ledger.debug_holds


@pytest.mark.parametrize("then", ["released", "another pod's", "another container's"])
def test_what_changes_while_a_status_is_read_is_left_to_the_next_look(then):
    ledger, _ = started()  # its status is read first
    other = PodUid("0f1c2d3e-0000-4000-8000-000000000002")
    started(at=P1, uid=other, ledger=ledger)
    r1 = RegionId(P1)
    if then != "another container's":
        ledger.device_plugin.release([P1])
        hold(ledger, r1, until=1e9)  # the setting was made shorter since
    made, _, _ = debugging(ledger, pod(ran(3)))
    tell = made._pods.pod

    async def pod_then(uid, held):
        made._pods.pod = tell
        if then == "another container's":
            ledger.device_plugin.started(
                [ledger.allocations[P0]], replace(ASKED, containers=("log",))
            )
        else:
            debug_holds.end(ledger, [r1])
            if then == "another pod's":
                ledger.device_plugin.allocate(REGIONS, [P1])
                ledger.device_plugin.started([ledger.allocations[P1]], replace(ASKED, pod=POD))
                ledger.device_plugin.release([P1])
                hold(ledger, r1, until=300.0)
        return await tell(uid, held)

    made._pods.pod = pod_then
    look(made)
    if then == "another container's":
        assert not ledger.debug_holds[R0].failure
    elif then == "another pod's":
        assert (ledger.debug_holds[r1].pod, ledger.debug_holds[r1].until) == (POD, 300.0)
    else:
        assert r1 not in ledger.debug_holds


def test_the_next_look_is_when_a_time_is_up_however_long_the_interval():
    ledger, _ = started(replace(ASKED, seconds=60.0))
    made, clock, _ = debugging(ledger)
    made._interval = 3600.0
    assert made._until_look() == 3600.0  # its pod has it
    made._pods.answer = pod(ran(3), ended=False)
    look(made)
    ledger.device_plugin.release([P0])
    made._pods.answer = None
    look(made)
    assert made._until_look() == DECIDE_SECONDS
    clock.now += DECIDE_SECONDS
    look(made)
    assert made._until_look() == 60.0
    clock.now += 50.0
    assert made._until_look() == 10.0
    clock.now += 10.0
    look(made)
    assert made._until_look() is None


def test_a_keep_ends_in_time_and_a_failing_journal_is_not_asked_without_a_pause(monkeypatch):
    monkeypatch.setattr(debugging_module, "_PAUSE", 0.0)
    ledger, journal = kept(until=100.0)  # it is over, and nothing changes
    made, _, _ = debugging(ledger)
    made._something.clear()
    made._interval = 3600.0
    journal.failing = 1000

    async def scene():
        runs = asyncio.create_task(made.run())
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert journal.failing == 999
        runs.cancel()
        journal.failing = 0
        async with asyncio.timeout(10.0):
            runs = asyncio.create_task(made.run())
            while ledger.debug_holds:  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(0.001)
        runs.cancel()

    asyncio.run(scene())


def test_however_much_changes_one_look_is_waited_for(monkeypatch):
    monkeypatch.setattr(debugging_module, "_PAUSE", 0.0)
    ledger, _ = kept()
    made, _, _ = debugging(ledger)
    made._interval = 3600.0
    looked = asyncio.Event()

    async def look():
        looked.set()

    async def scene():
        armed = 0
        made.look = look
        runs = asyncio.create_task(made.run())
        for _ in range(20):
            looked.clear()
            made._changed(CARD.id)
            await looked.wait()
            await asyncio.sleep(0)
            timers = asyncio.get_running_loop()._scheduled
            armed = sum(not timer.cancelled() for timer in timers)
        runs.cancel()
        return armed

    assert asyncio.run(scene()) <= 1


def wish(annotations, **allowed):
    ledger, _ = make_ledger(CARD)
    made, _, _ = debugging(ledger, pod(annotations=annotations), **allowed)
    identity = Identity(POD, frozenset({"app"}))
    return asyncio.run(made.requested(identity, [P0])), made._recorder.told


@pytest.mark.parametrize(
    ("text", "seconds"), [("true", 600), ("90s", 90), ("1h", 3600), ("9h", 3600)]
)
def test_what_an_annotation_asks_for(text, seconds):
    asked, told = wish({"fpga.intel.com/debug": text})
    assert asked is not None
    assert (asked.seconds, asked.containers, told) == (seconds, ("app",), [])


def test_an_annotation_of_another_namespace_has_no_effect():
    asked, told = wish({"fpga.intel.com/debug": "true"}, namespaces=("other",))
    assert asked is None
    ((reason, message),) = told
    assert reason == "FpgaDebugIgnored"
    assert message.endswith("namespace tenant is not in FPGA_PLUGIN_DEBUG_NAMESPACES")
    assert wish({})[0] is None


def test_a_pod_of_a_namespace_that_is_not_allowed_pays_nothing():
    ledger, _ = make_ledger(CARD)
    asked = {"fpga.intel.com/debug": "true"}
    made, _, _ = debugging(ledger, pod(annotations=asked), namespaces=("tenant",))
    of = Identity(POD, name=PodName("tenant", "compress"))
    assert asyncio.run(made.requested(of, [P0])) is not None
    made._pods = None  # nobody to ask
    of = Identity(POD, name=PodName("other", "compress"))
    assert asyncio.run(made.requested(of, [P0])) is None


def test_there_is_time_for_the_api_server_after_a_kubelet_that_does_not_answer():
    assert ASK_SECONDS > podsapi.CALL_SECONDS


@pytest.mark.parametrize(
    "text", ["", "0s", "-1m", "1d", "true ", "TRUE", "1 m", "٣m", "9999999s", "1.5h", "inf", "1m\n"]
)
def test_any_other_value_is_none(text):
    with pytest.raises(ValueError, match="true, or a number"):
        parse_keep(text)


def test_which_containers_count():
    both = pod(ran(0), ran(7), names=("app", "log"))
    assert failure(both, ["app"]) == ""
    assert failure(both, ["log"]) == "container 'log' ended with exit code 7"
    assert failure(both, []) == "container 'log' ended with exit code 7"
    again = pod(ContainerState(Phase.RUNNING, ended=Run(3, 1)), ended=False)
    assert failure(again, ["app"]) is None
