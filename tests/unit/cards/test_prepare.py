"""What a PreStart does to regions, in which order, and at which instants it stops.

What kubelet is notified is in test_prestart.py.
"""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
from doubles.cards import AFU, BLANK, INTERFACE, PREFIX, REGIONS, TOO_HOT
from grpclib.const import Status
from ledger_scene import Scene
from ledger_world import AFUS, Hand, Pod

from fpga_plugin.allocation.journal.records import CLEAN, Change, ClaimOwner, Condition
from fpga_plugin.allocation.names import card_of, function_name
from fpga_plugin.cards.clocks import ClockState
from fpga_plugin.cards.operations import CardOperations, TenancyActiveError
from fpga_plugin.errors import (
    ASK_THE_OPERATOR,
    CardGoneError,
    FpgaPluginError,
    HardwareError,
    NotFinishedError,
    ProgrammingError,
    RefusedError,
    StoreUnavailableError,
)
from fpga_plugin.hardware.backend import ClockLimits, DriverSettings
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import DeviceId, RegionId
from fpga_plugin.kubernetes.names import ClaimUid, PodUid, ResourceName
from fpga_plugin.settings.settings import Advertise, RecoveryPolicy, ScrubPolicy

OTHER_AFU = AFUS[1]
DEFAULTS = DriverSettings()


@pytest.fixture
def scene(make) -> Scene:
    return make()


def call(scene: Scene, pod, env: dict[str, str]):
    """A PreStart with this request, to its end."""
    scene.rack.limits = ClockLimits(100, 400)
    env = {"PATH": "/bin", **env}
    task = scene.plugin.begin(scene.plugin.prestarts.serve(pod.resource, pod.devices, env, 30.0))
    scene.plugin.work()
    return task


def asks(afu: str, **params: int) -> dict[str, str]:
    env = {"FPGA_REGION_0": INTERFACE, "FPGA_BITSTREAM_ID_0": afu}
    if params:
        env["FPGA_DRIVER_PARAMS_0"] = ",".join(f"{k}={v}" for k, v in params.items())
    return env


def dirty(scene: Scene, *regions: RegionId) -> None:
    scene.plugin.call(lambda: scene.ledger.work.dirty(regions, "a pod may have used it"))


# ------------------------------------------------------------------ what ends a plan


def _foreign(scene: Scene, pod) -> None:
    card = card_of(pod.devices[0])
    scene.plugin.call(lambda: scene.ledger.hardware.set_foreign({card: "drain the node"}))


def _ended(scene: Scene, pod) -> None:
    scene.plugin.call(lambda: scene.plugin.calls.deallocate(pod.resource, pod.devices))


def _restarted(scene: Scene, _pod) -> None:
    scene.plugin.call(lambda: scene.plugin.reconciler.kubelet_found("life 2"))


def _hot(scene: Scene, pod) -> None:
    card = card_of(pod.devices[0])
    region = scene.rack.boards[card].card.regions[0].id
    scene.plugin.call(lambda: scene.ledger.hardware.set_failing(card, {region: TOO_HOT}))


def _pulled(scene: Scene, pod) -> None:
    card = card_of(pod.devices[0])
    scene.rack.boards[card].present = False
    scene.plugin.call(lambda: scene.ledger.hardware.card_gone(card))


@pytest.mark.parametrize(
    ("happens", "kind", "instant", "poisoned"),
    [
        (_foreign, RefusedError, 0, False),
        (_foreign, RefusedError, 0, True),
        (_ended, RefusedError, 0, False),
        (_ended, RefusedError, 0, True),
        # Before, no plan was made: it is the new kubelet's.
        (_restarted, NotFinishedError, 2, False),
        (_restarted, NotFinishedError, 2, True),
        (_hot, RefusedError, 0, False),  # a rebind reads the card's signals again
        (_pulled, (RefusedError, CardGoneError), 0, False),
        (_pulled, (RefusedError, CardGoneError), 0, True),
    ],
)
def test_whatever_ends_a_plan_no_further_step_is_begun_for_it(
    make, happens, kind, instant: int, *, poisoned: bool
) -> None:
    """A card that another plugin's pods hold, an ended allocation, another kubelet, a card too hot
    or
    gone: at every instant of the work on a card whose regions are dirty. Only the step that a
    thread has begun ends; what came later would be done to somebody else's region."""
    while True:
        recovery = RecoveryPolicy.REBIND if poisoned else RecoveryPolicy.NONE
        scene = make(cards=[2], memory=True, recovery=recovery)
        scene.hold_releases()
        former = scene.admit(card_of(scene.regions[0]))
        scene.start(former, AFU, AFU)
        _ended(scene, former)
        pod = scene.admit(card_of(scene.regions[0]))
        if poisoned:
            poison(scene, scene.regions[0])
        task = scene.prestart(pod, AFU, OTHER_AFU)
        for _ in range(instant):
            scene.plugin.job(0)
        if task.done():
            break
        begun = len(scene.plugin.jobs)
        happens(scene, pod)
        for _ in range(begun):
            scene.plugin.job(0)
        scene.rack.done.clear()
        opened = scene.rack.open_port = mock.Mock(wraps=scene.rack.open_port)
        scene.refused(task, kind)
        assert not scene.rack.done, f"it went on after instant {instant}"
        assert not opened.called, f"it opened a port after instant {instant}"
        instant += 1
    assert instant > 5


def test_a_card_that_goes_while_a_start_waits_for_its_lock_is_refused_in_words(
    scene: Scene,
) -> None:
    pod = scene.admit(scene.regions[0])
    lock = scene.operations.workers.lock(card_of(scene.regions[0]))
    scene.plugin.begin(lock.__aenter__())
    task = scene.prestart(pod, AFU)
    scene.plugin.work()
    _pulled(scene, pod)
    scene.plugin.begin(lock.__aexit__(None, None, None))
    scene.refused(task, RefusedError)


def test_a_region_whose_node_became_another_ones_is_not_handed_over(scene: Scene) -> None:
    """Invariant 10: kubelet gives the container the node of its admission."""
    scene.hold_releases()
    one, other, _ = scene.regions
    pod = scene.admit(one)
    card = scene.rack.boards[card_of(one)].card
    first, second = card.regions
    swapped = (replace(first, grant=second.grant), replace(second, grant=first.grant))
    moved = scene.rack.boards[card.id].card = replace(card, regions=swapped)
    scene.plugin.call(
        lambda: scene.ledger.hardware.card_found(moved, {one: BLANK, other: BLANK}, BLANK)
    )
    scene.refused(scene.prestart(pod, AFU), RefusedError, "numbering changed")
    assert not scene.rack.done


# ------------------------------------------------------------------ who had it before


def test_a_pod_does_not_wait_for_its_own_containers(scene: Scene) -> None:
    """Its init containers are an allocation of their own, and a sidecar of them runs on."""
    region = scene.regions[0]
    pod = scene.admit(region)
    scene.start(pod, AFU)
    pod.running = True
    scene.plugin.call(lambda: scene.plugin.calls.allocate(REGIONS, pod.devices))
    assert {one.pod for one in scene.ledger.tenancies.left(region)} == {pod.uid}
    scene.start(pod, OTHER_AFU)
    assert scene.rack.slot(region).afu == OTHER_AFU


def test_another_pod_that_had_it_is_waited_for(scene: Scene) -> None:
    region = scene.regions[0]
    former = scene.admit(region)
    scene.start(former, AFU)
    former.running = True
    pod = scene.admit(region)
    scene.rack.done.clear()
    scene.refused(scene.prestart(pod, AFU), TenancyActiveError, former.uid)
    assert not scene.rack.done


# ------------------------------------------------------------------ what is done


def of(region: RegionId, *what: tuple[object, ...]) -> list[tuple[object, ...]]:
    return [(one, region, *rest) for one, *rest in what]


RESET, RESTORED = ("reset",), ("settings", DEFAULTS)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # A clean region needs no reset.
        (None, asks(AFU), [("program", AFU)]),
        (None, asks(AFU, clock=200), [("settings", DriverSettings(200)), ("program", AFU)]),
        (None, {}, []),
        # The next container finds nothing of the one before, nor its clock.
        (asks(AFU), asks(AFU), [RESET, RESTORED, ("program", AFU)]),
        (asks(AFU, clock=200), asks(OTHER_AFU), [RESET, RESTORED, ("program", OTHER_AFU)]),
        (asks(AFU, clock=200), {}, [RESET, RESTORED, ("program", BLANK)]),
        # One that was given it blank may have used it, too.
        ({}, asks(AFU), [RESET, RESTORED, ("program", AFU)]),
        ({}, {}, [RESET, RESTORED, ("program", BLANK)]),
    ],
)
def test_the_next_container_starts_on_exactly_what_it_asked_for(
    scene: Scene, first: dict[str, str] | None, second: dict[str, str], expected
) -> None:
    region = scene.regions[0]
    pod = scene.admit(region)
    if first is not None:
        call(scene, pod, first).result()
    scene.rack.done.clear()
    call(scene, pod, second).result()
    assert scene.rack.done == of(region, *expected)


def test_of_a_card_only_the_region_that_ran_is_reset(make) -> None:
    """`used` is an allocation's: what a neighbour did says nothing of this region."""
    scene = make(cards=[2])
    one, other = scene.regions
    scene.start(scene.admit(one), AFU)
    pod = scene.admit(other)
    scene.rack.done.clear()
    scene.start(pod, AFU)
    assert scene.rack.done == of(other, ("program", AFU))


def test_an_image_that_no_container_started_on_is_reset_before_the_next(scene: Scene) -> None:
    """It is the owner's own, and ran, if only for an instant."""
    region = scene.regions[0]
    pod = scene.admit(region)
    task = scene.prepare(pod, AFU)
    scene.plugin.call(task.cancel)
    assert scene.condition(region) is Condition.PROGRAMMED
    assert not scene.ledger.allocations[pod.devices[0]].used
    scene.rack.done.clear()
    scene.start(pod, OTHER_AFU)
    assert scene.rack.done == of(region, RESET, RESTORED, ("program", OTHER_AFU))


def test_an_owners_image_is_known_for_one_until_a_blank_replaces_it(scene: Scene) -> None:
    """Else it would be advertised as a function that came with the card."""
    region = scene.regions[0]
    pod = scene.admit(region)
    call(scene, pod, asks(AFU)).result()
    assert scene.ledger.images[region] == {AFU}
    call(scene, pod, {}).result()
    assert not scene.ledger.images.get(region)


def test_what_became_of_the_clock_is_that_of_the_last_image(scene: Scene) -> None:
    region = scene.regions[0]
    operations = scene.operations
    pod = scene.admit(region)
    call(scene, pod, asks(AFU, clock=200)).result()
    assert operations.clocks[region].settings == DriverSettings(200)
    call(scene, pod, asks(AFU)).result()
    assert operations.clocks[region].settings == DEFAULTS
    call(scene, pod, {}).result()
    assert region not in operations.clocks


def test_an_image_that_says_what_it_was_built_for_runs_no_faster(scene: Scene) -> None:
    """It would compute wrongly, and nothing would tell."""
    region = scene.regions[0]
    load = scene.images.load

    async def stated(*what):
        return replace(await load(*what), clock_frequency_high=150)

    with mock.patch.object(scene.images, "load", stated):
        call(scene, scene.admit(region), asks(AFU)).result()
    assert scene.rack.done == of(region, ("settings", DriverSettings(150)), ("program", AFU))


def test_port_errors_are_logged_for_a_container_that_asks_for_it_and_for_no_other(
    scene: Scene,
) -> None:
    region = scene.regions[0]
    operations = scene.operations
    pod = scene.admit(region)
    for params, expected in (({"debug": 1}, {region}), ({}, set()), ({"debug": 1}, {region})):
        call(scene, pod, asks(AFU, **params)).result()
        assert operations.port_errors_logged == expected
    _ended(scene, pod)
    scene.plugin.work()
    assert not operations.port_errors_logged


def test_work_is_reported_once_a_region_and_a_refusal_is_no_work(scene: Scene) -> None:
    region = scene.regions[0]
    pod = scene.admit(region)
    with mock.patch.object(CardOperations, "report", autospec=True) as told:
        scene.start(pod, AFU)
        assert [c.args[1].region for c in told.call_args_list] == [region]
        told.reset_mock()
        scene.rack.slot(region).opens.add("a container")
        task = scene.prestart(pod, AFU)
        scene.plugin.work()
        assert task.exception() is not None
        assert not told.called
        scene.rack.slot(region).opens.clear()
        scene.hold_releases()
        scene.images.has_blank = False
        dirty(scene, region)
        task = scene.prestart(pod, AFU)
        scene.plugin.work()
        assert "no-blank-image" in str(task.exception())
        assert not told.called


def test_a_start_whose_blank_is_not_read_in_time_is_one_that_kubelet_tries_again(
    scene: Scene,
) -> None:
    region = scene.regions[0]
    pod = scene.admit(region)
    scene.hold_releases()
    dirty(scene, region)
    with mock.patch.object(scene.images, "blank", side_effect=StoreUnavailableError("it hangs")):
        task = scene.prestart(pod, AFU)
        scene.plugin.work()
    error = task.exception()
    assert isinstance(error, FpgaPluginError)
    assert error.status is Status.UNAVAILABLE
    assert "no-blank-image: it hangs" in str(error)
    assert not scene.rack.done, "an image that was not blanked is not programmed over"
    scene.start(pod, AFU)


def test_a_port_that_cannot_be_opened_fails_the_start_and_leaves_none_open(scene: Scene) -> None:
    card = card_of(scene.regions[0])
    pod = scene.admit(card)
    opens, last = scene.rack.open_port, scene.ledger.cards[card].regions[-1]
    before = [scene.ledger.record(region) for region in scene.regions]

    def fails(of: Card, region: Region) -> object:
        if region == last:
            raise HardwareError("the port cannot be opened (EIO)")
        return opens(of, region)

    with mock.patch.object(scene.rack, "open_port", fails):
        task = scene.prestart(pod, *[AFU] * len(pod.nodes))
        scene.plugin.work()
    error = task.exception()
    assert isinstance(error, HardwareError)
    assert error.status is Status.INTERNAL
    assert "the port cannot be opened (EIO)" in str(error)
    assert not any(slot.held for slot in scene.rack.boards[card].slots.values())
    assert [scene.ledger.record(region) for region in scene.regions] == before
    scene.start(pod, *[AFU] * len(pod.nodes))


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    ("debt", "taken", "clears"),
    [
        (True, "the card", True),
        (False, "the card", False),
        (True, "a region", False),
    ],
)
def test_whoever_gets_a_clean_card_with_a_debt_gets_its_memory_clear(
    make, *, debt: bool, taken: str, clears: bool
) -> None:
    scene = make(cards=[2], memory=True)
    scene.hold_releases()
    region = scene.regions[0]
    card = card_of(region)
    if debt:
        scene.plugin.call(lambda: scene.ledger.work.set_memory_clear_pending(card, open_=True))
        scene.rack.boards[card].memory.add("somebody")
    if taken == "the card":
        pod = scene.admit(card)
        scene.start(pod, AFU, AFU)
    else:
        scene.start(scene.admit(region), AFU)
    assert [("memory", card)] * clears == [d for d in scene.rack.done if d[0] == "memory"]
    if clears:
        assert scene.rack.done[0] == ("memory", card), "before anything of the new owner's is there"
        assert not scene.ledger.memory_clear_pending


@pytest.mark.parametrize("taken", ["the card", "its region"])
def test_a_scrub_at_the_gate_clears_the_memory_that_no_neighbour_uses(make, taken: str) -> None:
    """Of a card of which one region is dirty; the call's other region is no neighbour's."""
    scene = make(cards=[2], memory=True)
    scene.hold_releases()
    region = scene.regions[0]
    card = card_of(region)
    scene.rack.boards[card].memory.add("somebody")
    dirty(scene, region)
    if taken == "the card":
        scene.start(scene.admit(card), AFU, AFU)
    else:
        scene.start(scene.admit(region), AFU)
    assert not scene.rack.boards[card].memory
    assert not scene.ledger.memory_clear_pending


def test_a_scrub_at_the_gate_opens_a_debt_only_where_there_is_memory_to_clear(make) -> None:
    scene = make(cards=[2], memory=False)
    scene.hold_releases()
    dirty(scene, scene.regions[0])
    scene.start(scene.admit(scene.regions[0]), AFU)
    assert not scene.ledger.memory_clear_pending, "nothing could ever pay it"


def test_a_clear_that_fails_is_that_of_the_region_that_was_scrubbed(make) -> None:
    """The other one, which was clean, has no part in it."""
    scene = make(cards=[2], memory=True)
    scene.hold_releases()
    clean, scrubbed = scene.regions
    dirty(scene, scrubbed)
    clear = CardOperations.clear_memory
    with mock.patch.object(
        CardOperations, "clear_memory", autospec=True, side_effect=clear
    ) as cleared:
        scene.start(scene.admit(card_of(clean)), AFU, AFU)
    assert [list(one.args[2]) for one in cleared.call_args_list] == [[scrubbed, clean]]


def test_a_debt_that_no_knob_can_pay_keeps_no_owner_from_the_card(make) -> None:
    """It was noted while the card's driver had the knobs."""
    scene = make(cards=[1], memory=False)
    (region,) = scene.regions
    card = card_of(region)
    scene.plugin.call(lambda: scene.ledger.work.set_memory_clear_pending(card, open_=True))
    scene.start(scene.admit(region), AFU)
    assert scene.rack.slot(region).afu == AFU


# ------------------------------------------------------------------ regions left to their owner


@pytest.mark.parametrize("owner_loads", [False, True])
def test_a_blank_region_is_left_to_an_owner_who_loads_images_himself(
    make, *, owner_loads: bool
) -> None:
    scene = make(cards=[1], owner_loads=owner_loads)
    (region,) = scene.regions
    left = mock.Mock(side_effect=lambda: scene.operations.workers._in_flight)
    leave = Hand.leave

    def watched(hand: Hand) -> None:
        assert not left(), "no PR: a plugin that ends waits for nothing"
        leave(hand)

    with mock.patch.object(Hand, "leave", watched):
        scene.start(scene.admit(region))
    assert scene.rack.done == of(region, *[("leave",)] * owner_loads)
    assert left.call_count == owner_loads


def test_no_further_region_is_left_to_an_owner_once_kubelet_restarted(make) -> None:
    scene = make(cards=[2], owner_loads=True)
    one, _ = scene.regions
    pod = scene.admit(card_of(one))
    scene.on_touch = partial(_restarted, scene, pod)
    scene.refused(scene.prestart(pod), NotFinishedError, "kubelet restarted")
    assert scene.rack.done == of(one, ("leave",))


# ------------------------------------------------------------------ without a blank bitstream


@pytest.mark.parametrize("condition", [Condition.DIRTY, Condition.UNBLANKED])
def test_the_last_image_is_not_handed_over_as_blank(make, condition: Condition) -> None:
    """Best-effort: what an earlier tenant programmed is still there, and this one asks for none."""
    scene = make(cards=[1], scrub=ScrubPolicy.BEST_EFFORT)
    (region,) = scene.regions
    former = scene.admit(region)
    scene.start(former, AFU)
    scene.images.has_blank = False
    if condition is Condition.DIRTY:
        scene.hold_releases()
    _ended(scene, former)
    former.active = False
    scene.plugin.work()
    assert scene.condition(region) is condition
    pod = scene.admit(region)
    task = call(scene, pod, {})
    scene.refused(task, RefusedError, "still hold its last image")
    assert scene.rack.slot(region).afu == AFU
    call(scene, pod, asks(OTHER_AFU)).result()
    assert scene.rack.slot(region).afu == OTHER_AFU


def test_a_region_without_its_blank_is_blanked_as_soon_as_there_is_one(make) -> None:
    scene = make(cards=[1], scrub=ScrubPolicy.BEST_EFFORT)
    (region,) = scene.regions
    former = scene.admit(region)
    scene.start(former, AFU)
    scene.images.has_blank = False
    _ended(scene, former)
    former.active = False
    scene.plugin.work()
    assert scene.condition(region) is Condition.UNBLANKED
    assert scene.rack.done[-2:] == of(region, RESET, RESTORED)
    scene.images.has_blank = True
    pod = scene.admit(region)
    call(scene, pod, {}).result()
    assert scene.rack.slot(region).afu == BLANK


# ------------------------------------------------------------------ preprogrammed functions


def with_functions(make, **more) -> tuple[Scene, RegionId, ResourceName]:
    """A card whose regions are given out with what is on them."""
    scene = make(cards=[2], advertise=Advertise.AF, **more)
    region = scene.regions[0]
    card = scene.rack.boards[card_of(region)].card
    return scene, region, function_name(PREFIX, card.interface_id, BLANK)


def take(scene: Scene, region: RegionId, resource: ResourceName) -> Pod:
    scene.plugin.call(lambda: scene.plugin.calls.allocate(resource, [region]))
    pod = Pod(PodUid("pod-af"), resource, (DeviceId(region),), {})
    scene.pods.append(pod)
    return pod


def test_a_preprogrammed_function_is_reset_confirmed_and_never_programmed(make) -> None:
    """Between two owners too: there is nothing to blank it with, and nothing to bring it back."""
    scene, region, function = with_functions(make)
    scene.images.has_blank = False
    for _ in range(2):
        pod = take(scene, region, function)
        scene.rack.done.clear()
        call(scene, pod, {}).result()
        assert "program" not in {what[0] for what in scene.rack.done}
        assert scene.condition(region) is Condition.PROGRAMMED
        assert not scene.ledger.images.get(region), "it is no tenant's image"
        assert scene.operations.clocks[region].state is ClockState.NOT_STATED
        scene.rack.done.clear()
        _ended(scene, pod)
        pod.active = False
        scene.plugin.work()
        assert scene.rack.done == of(region, RESET, RESTORED)
        assert scene.condition(region) in CLEAN


def test_a_function_that_is_another_by_now_is_not_handed_over(make) -> None:
    scene, region, function = with_functions(make)
    scene.hold_releases()
    pod = take(scene, region, function)
    scene.rack.slot(region).afu = AFU
    error = call(scene, pod, {}).exception()
    assert isinstance(error, RefusedError)
    assert f"holds the function {AFU} by now" in error.message


def test_a_dirty_function_is_reset_at_the_gate_without_any_blank(make) -> None:
    scene, region, function = with_functions(make)
    scene.hold_releases()
    scene.images.has_blank = False
    dirty(scene, region)
    pod = take(scene, region, function)
    call(scene, pod, {}).result()
    assert scene.rack.done == of(region, RESET, RESTORED)


# ------------------------------------------------------------------ poisoned ports


def test_a_port_that_a_pr_poisons_is_recovered_if_the_operator_lets_it(make) -> None:
    scene = make(cards=[1], recovery=RecoveryPolicy.REBIND)
    (region,) = scene.regions
    pod = scene.admit(region)
    scene.rack.bad_prs = ["poison"]
    scene.start(pod, AFU)
    assert scene.rack.slot(region).afu == AFU
    assert scene.plugin.recovery.done == 1


def test_a_port_that_was_poisoned_before_is_recovered_before_its_owner_starts(make) -> None:
    scene = make(cards=[1], recovery=RecoveryPolicy.REBIND)
    (region,) = scene.regions
    pod = scene.admit(region)
    poison(scene, region)
    scene.start(pod, AFU)
    assert scene.rack.slot(region).afu == AFU
    assert scene.plugin.recovery.done == 1


def test_what_else_keeps_a_poisoned_card_from_an_owner_is_said_without_its_advice(make) -> None:
    """No rebind helps against another plugin's pod."""
    scene = make(cards=[2], recovery=RecoveryPolicy.REBIND)
    scene.hold_releases()
    sound, poisoned = scene.regions
    pod = scene.admit(card_of(sound))
    poison(scene, poisoned)
    task = scene.prestart(pod, AFU, AFU)
    _foreign(scene, pod)
    scene.refused(task, RefusedError, "is left alone")
    assert "rebind" not in str(task.exception())


def test_a_poisoned_region_that_a_claim_has_is_not_rebound_for_a_pod(make) -> None:
    """With the device plugin API: the claim's pods may use the card's other regions."""
    scene = make(cards=[1], recovery=RecoveryPolicy.REBIND)
    scene.hold_releases()
    (region,) = scene.regions
    pod = scene.admit(region)
    poison(scene, region)
    device = DeviceId(region)
    claim = ClaimOwner(ClaimUid("a"), "space", "claim", (device,), {device: ("fpga",)})
    scene.plugin.call(lambda: scene.ledger.commit(Change(claim_owners={claim.uid: claim})))
    scene.refused(scene.prestart(pod, AFU), RefusedError, "belongs to ResourceClaim space/claim")
    assert scene.plugin.recovery.done == 0


def test_no_card_is_rebound_for_a_start_that_another_card_refuses(make) -> None:
    """Of two poisoned cards of one pod, one was tried a moment ago."""
    scene = make(cards=[1, 1], recovery=RecoveryPolicy.REBIND)
    scene.hold_releases()
    one, other = scene.regions
    pod = scene.admit(one, other)
    poison(scene, one)
    poison(scene, other)
    recovery = scene.plugin.recovery
    with mock.patch.object(recovery, "may", lambda card: card == card_of(one)):
        scene.refused(scene.prestart(pod, AFU, AFU), RefusedError, "poisoned")
    assert recovery.done == 0


def poison(scene: Scene, region: RegionId) -> None:
    scene.rack.slot(region).afu = None
    card = scene.rack.boards[card_of(region)].card
    failed = scene.rack.health(card).failed
    scene.plugin.call(partial(scene.ledger.hardware.set_failing, card.id, failed))


@pytest.mark.parametrize("when", ["before", "by the PR"])
@pytest.mark.parametrize(
    ("policy", "advice"),
    [
        (RecoveryPolicy.NONE, f"{ASK_THE_OPERATOR}: set FPGA_PLUGIN_RECOVERY=rebind, or,"),
        (
            RecoveryPolicy.REBIND,
            (
                "the plugin rebinds the card's driver when nobody else has a region of it; or"
                f" {ASK_THE_OPERATOR}:"
            ),
        ),
    ],
)
def test_a_poisoned_port_that_is_not_recovered_is_refused_with_what_helps(
    make, policy: RecoveryPolicy, advice: str, when: str
) -> None:
    """A rebind takes the neighbour's region away, too: not while it has an owner."""
    scene = make(cards=[2], recovery=policy)
    region, neighbour = scene.regions
    scene.start(scene.admit(neighbour), AFU)
    pod = scene.admit(region)
    if when == "before":
        poison(scene, region)
    else:
        scene.rack.bad_prs = ["poison"]
    programs = scene.rack.programs
    task = scene.prestart(pod, AFU)
    scene.plugin.work()
    error = task.exception()
    assert isinstance(error, RefusedError if when == "before" else HardwareError)
    card = scene.rack.boards[card_of(region)].card
    assert error.hint == f"{advice} {scene.rack.rebind_advice(card)}"
    assert scene.rack.programs - programs == (when != "before")
    assert scene.plugin.recovery.done == 0
    assert scene.rack.slot(neighbour).afu == AFU


@pytest.mark.parametrize("policy", list(RecoveryPolicy))
def test_what_a_rebind_does_not_mend_is_not_rebound(make, policy: RecoveryPolicy) -> None:
    scene = make(cards=[1], recovery=policy)
    (region,) = scene.regions
    pod = scene.admit(region)
    _hot(scene, pod)
    task = scene.prestart(pod, AFU)
    scene.plugin.work()
    error = task.exception()
    assert isinstance(error, RefusedError)
    assert "faulted" in error.message
    assert "docs/runbook.md" in error.hint
    assert not scene.rack.done
    assert scene.plugin.recovery.done == 0


def test_a_pr_that_failed_is_not_tried_again_within_the_call(make) -> None:
    """Unless it poisoned the port: what the hardware refused is for the operator to see."""
    scene = make(cards=[1], recovery=RecoveryPolicy.REBIND)
    scene.hold_releases()
    pod = scene.admit(scene.regions[0])
    scene.rack.bad_prs = ["error"]
    task = scene.prestart(pod, AFU)
    scene.plugin.work()
    assert isinstance(task.exception(), ProgrammingError)
    assert scene.rack.done == of(scene.regions[0], ("program", AFU))
    assert scene.plugin.recovery.done == 0


# ------------------------------------------------------------------ several cards


def test_what_fails_on_one_card_is_told_when_the_other_is_done(scene: Scene) -> None:
    """An answer while the other card is still worked on would let its region be given away."""
    one, _, other = scene.regions
    pod = scene.admit(one, other)
    scene.rack.slot(one).opens.add("somebody")
    task = scene.prestart(pod, AFU, AFU)
    scene.until(task.done)
    assert isinstance(task.exception(), FpgaPluginError)
    assert scene.rack.slot(other).afu == AFU
    assert scene.condition(other) is Condition.PROGRAMMED


def test_an_allocation_that_ended_while_its_card_was_busy_is_scrubbed_when_the_work_ends(
    scene: Scene,
) -> None:
    """The release found the card locked; whoever holds the lock adds it again."""
    region = scene.regions[0]
    pod = scene.admit(region)
    task = scene.prestart(pod, AFU)
    scene.until(lambda: any(d[0] == "program" for d in scene.rack.done))
    _ended(scene, pod)
    pod.active = False
    scene.refused(task, FpgaPluginError)
    scene.plugin.work()
    assert scene.condition(region) is Condition.BLANK
    assert scene.rack.slot(region).afu == BLANK
