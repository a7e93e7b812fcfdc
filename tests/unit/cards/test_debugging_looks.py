"""What keeps a region for debugging: who is asked for a pod's status, and how often."""

import asyncio
from types import SimpleNamespace

import pytest
from doubles import LIMIT
from doubles.cards import REGIONS, make_card
from ledger_support import found, make_ledger
from structlog.testing import capture_logs
from test_debug_holds import CARD, P0, P1, POD, R0, kept, started
from test_debugging import debugging, look, pod, ran, wish

from fpga_plugin.allocation import debug_holds
from fpga_plugin.allocation.queue import CardQueue, Outcome
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.cards import debugging as debugging_module
from fpga_plugin.cards.debugging import DECIDE_SECONDS, Allowed, Debugging
from fpga_plugin.ids import RegionId
from fpga_plugin.kubernetes.names import PodName
from fpga_plugin.settings.settings import ServedApi


def ids(*devices):
    return [RegionId(device) for device in devices]


def counted(made):
    """How often the pods' status is asked for."""
    asked, tell = [], made._pods.pod

    async def pod(uid, held):
        asked.append(uid)
        return await tell(uid, held)

    made._pods.pod = pod
    return asked


def test_only_an_owner_has_its_port_errors_logged():
    ledger, _ = kept()
    _, _, operations = debugging(ledger)
    assert operations.port_errors_logged == set()
    debug_holds.end(ledger, [R0])
    started(ledger=ledger)
    assert operations.port_errors_logged == {R0}, "as soon as it begins"


def test_only_what_changes_on_its_card_is_a_reason_to_look():
    """On a busy node the API server would be asked about it at each change of any card."""
    ledger, _ = started()
    made, _, _ = debugging(ledger)
    made._something.clear()
    made._changed(None)
    found(ledger, make_card(2, nodes=(2, 3)))
    assert not made._something.is_set()
    ledger.device_plugin.release([P0])
    assert made._something.is_set()


def test_a_pod_is_asked_for_once_a_look_and_all_its_regions_are_kept():
    ledger, _ = started()
    started(at=P1, ledger=ledger)
    made, _, _ = debugging(ledger, pod(ran(3)))
    asked = counted(made)
    look(made)
    assert asked == [POD]
    ledger.device_plugin.release([P0, P1])
    look(made)
    assert [ledger.debug_holds[r].until for r in ids(P0, P1)] == [700.0, 700.0]


@pytest.mark.parametrize("known", [None, PodName("tenant", "compress")])
def test_who_is_asked_knows_what_the_pod_is_called(known):
    """After a restart only the journal reports, and the API server is asked by the name."""
    ledger, _ = started()
    made, _, _ = debugging(ledger, pod(ran(3)))
    learnt = []
    made._pods.known = lambda _: known
    made._pods.learn = lambda *told: learnt.append(told)
    look(made)
    assert learnt == ([] if known else [(POD, PodName("tenant", "compress"))])


def never_answers(made):
    async def pod(_uid, _held):
        await asyncio.sleep(10 * LIMIT)

    made._pods.pod = pod


def test_who_does_not_answer_is_not_waited_for(monkeypatch):
    """A PreStart waits for the answer, and a scrub must not wait for ever (invariant 4)."""
    monkeypatch.setattr(debugging_module, "ASK_SECONDS", 0.01)
    ledger, _ = started()
    made, clock, _ = debugging(ledger)
    never_answers(made)
    identity = Identity(POD, frozenset({"app"}))

    async def scene():
        async with asyncio.timeout(LIMIT):
            assert await made.requested(identity, [P0]) is None
            ledger.device_plugin.release([P0])
            await made.look()
            clock.now += DECIDE_SECONDS
            await made.look()

    asyncio.run(scene())
    assert not ledger.debug_holds


def test_a_pod_that_is_not_known_is_not_debugged():
    ledger, _ = make_ledger(CARD)
    made, _, _ = debugging(ledger, pod(annotations={"fpga.intel.com/debug": "true"}))
    assert asyncio.run(made.requested(Identity(), [P0])) is None


def test_a_value_that_means_nothing_is_told_to_its_pod():
    asked, told = wish({"fpga.intel.com/debug": "for ever"})
    assert asked is None
    ((reason, message),) = told
    assert reason == "FpgaDebugIgnored"
    assert "its value is 'for ever'" in message


@pytest.mark.parametrize("seen", ["free", "owned"])
def test_the_time_in_which_a_status_may_come_begins_anew_with_each_owner(seen):
    """Else the next owner's failure, which its status shows a moment later, would be lost."""
    ledger, _ = started()
    made, clock, _ = debugging(ledger)
    ledger.device_plugin.release([P0])
    look(made)  # nobody reports yet
    ledger.device_plugin.allocate(REGIONS, [P0])
    if seen == "free":
        look(made)
        ledger.device_plugin.release([P0])
    started(ledger=ledger)
    if seen == "owned":
        look(made)
    clock.now += 2 * DECIDE_SECONDS
    ledger.device_plugin.release([P0])
    look(made)
    assert R0 in ledger.debug_holds
    made._pods.answer = pod(ran(3))
    look(made)
    assert debug_holds.in_force(ledger, R0) is not None


def test_a_burst_of_changes_causes_one_look_and_nothing_causes_none(monkeypatch):
    ledger, _ = kept()
    made, _, _ = debugging(ledger)
    made._interval = 3600.0
    looks = []

    async def look():
        looks.append(None)

    async def turns():
        for _ in range(20):
            await asyncio.sleep(0.001)

    async def scene():
        made.look = look
        monkeypatch.setattr(debugging_module, "_PAUSE", LIMIT)
        runs = asyncio.create_task(made.run())
        for _ in range(5):
            made._changed(CARD.id)
            await turns()
        assert not looks, "more of them may come"
        runs.cancel()
        monkeypatch.setattr(debugging_module, "_PAUSE", 0.0)
        runs = asyncio.create_task(made.run())
        async with asyncio.timeout(LIMIT):
            while not looks:  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(0.001)
        await turns()
        assert len(looks) == 1
        runs.cancel()

    asyncio.run(scene())


def test_a_region_that_is_no_longer_kept_is_looked_at_by_who_scrubs():
    """He may have looked before, and seen that it is kept."""
    ledger, _ = kept()
    made, clock, _ = debugging(ledger)
    looked = []

    class Worker:
        async def work(self, card):
            looked.append(card)
            return Outcome.NOTHING

    made._queue.start(Worker())
    made._queue.sync()
    clock.now = 1000.0
    look(made)
    assert looked == [CARD.id]


def not_allowed(ledger):
    operations = SimpleNamespace(ledger=ledger, port_errors_logged=set())
    queue = CardQueue(interval=1.0)
    made = Debugging(operations, None, None, queue, allowed=None, interval=1.0)
    return made, operations


def test_where_nothing_is_allowed_what_an_earlier_run_kept_ends():
    ledger, _ = kept()
    made, _ = not_allowed(ledger)
    made.start()
    assert not ledger.debug_holds
    assert made.work() == {}


def test_where_nothing_is_allowed_no_port_errors_are_logged():
    ledger, _ = started()
    _, operations = not_allowed(ledger)
    assert operations.port_errors_logged == set()


def test_what_is_allowed_still_is_kept_over_a_start_and_followed():
    ledger, _ = kept()
    made, _, _ = debugging(ledger)
    made.start()
    assert set(ledger.debug_holds) == {R0}
    (name,) = work = made.work()
    work[name].close()
    assert name == "debugging"


@pytest.mark.parametrize(
    ("namespaces", "mode", "allows"),
    [
        (None, ServedApi.DEVICE_PLUGIN, False),
        (None, ServedApi.DRA, False),
        (("tenant",), ServedApi.DEVICE_PLUGIN, True),
        (("tenant",), ServedApi.DRA, False),
    ],
)
def test_what_the_settings_allow_and_that_a_setting_without_effect_is_said(
    namespaces, mode, allows
):
    settings = SimpleNamespace(
        debug_namespaces=namespaces, mode=mode, resource_prefix="fpga.intel.com"
    )
    with capture_logs() as lines:
        allowed = Allowed.by(settings)
    assert (allowed is not None) == allows
    if allows:
        annotation = "fpga.intel.com/debug"
        assert allowed == Allowed(annotation=annotation, namespaces=frozenset(namespaces))
    assert len(lines) == (namespaces is not None and not allows)
