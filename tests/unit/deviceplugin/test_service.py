"""Kubelet's calls around the gate (test_prestart.py): what each reports the rest of the plugin.

Each of these broke without a fast test noticing (`make mutants`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from doubles.cards import AFU, BLANK, INTERFACE, REGIONS, WHOLE, make_card
from ledger_scene import Scene, scenes
from ledger_world import AFUS, Cgroups, env_for

from fpga_plugin.allocation.calls import AllocateAnswer, Caller
from fpga_plugin.allocation.journal.records import Condition, Ownership
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.cards import targets as wants
from fpga_plugin.cards.prepare import Preparer
from fpga_plugin.cards.reads import SilentCardError
from fpga_plugin.deviceplugin import prestart
from fpga_plugin.deviceplugin.prestart import answer_within
from fpga_plugin.errors import (
    FpgaPluginError,
    InvalidRequestError,
    NotFinishedError,
    ProgrammingError,
    RefusedError,
)
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.grant import Grant, Mount
from fpga_plugin.ids import Alias, BitstreamId, DeviceId, InterfaceId, Resource
from fpga_plugin.kubernetes.cgroup import Cgroup
from fpga_plugin.kubernetes.names import PodName, PodUid
from fpga_plugin.settings.values import CdiDevices, UnknownVariables

OTHER_AFU = AFUS[1]
NOT_A_REQUEST = {"FPGA_NONSENSE": "1"}


@pytest.fixture
def scene() -> Iterator[Scene]:
    with scenes() as make:
        yield make()


def call(scene: Scene, pod, env: Mapping[str, str], caller: Caller | None = None):
    return scene.plugin.begin(
        scene.plugin.prestarts.serve(pod.resource, pod.devices, env, 30.0, caller)
    )


class Envs:
    """`EnvSource` that knows one environment, and remembers what it was told."""

    def __init__(self, env: Mapping[str, str], meanwhile: Callable[[], object] = bool) -> None:
        self.env = env
        self.meanwhile = meanwhile
        self.told: list[tuple] = []

    async def ask(self, identity, devices, *, fresh):
        self.told.append(("asked", identity.pod, tuple(devices), fresh))
        self.meanwhile()
        return replace(identity, container="chosen"), self.env

    def started(self, identity, devices):
        self.told.append(("started", identity.container, tuple(devices)))

    def refused(self, identity, devices, words):
        self.told.append(("refused", identity.container, tuple(devices), words))


def with_envs(scene: Scene, envs: Envs) -> Envs:
    scene.plugin.prestarts._envs = envs
    return envs


# ------------------------------------------------------------------ what is answered and logged


def test_the_answer_has_what_every_regions_grant_says():
    grants = {
        region.id: Grant(
            (f"/dev/vfio/{region.port_id}",),
            shared=("/dev/vfio/vfio",),
            mounts=(Mount("/srv/shared", "/shared"), Mount(f"/srv/{n}", f"/own/{n}")),
            env={f"FPGA_FUNCTIONS_{n}": "0000:3b:00.1"},
        )
        for n, region in enumerate(make_card(nodes=(0, 1)).regions)
    }
    answer = AllocateAnswer.of(Resource.parse(REGIONS), grants)
    assert answer.nodes == ("/dev/vfio/vfio", "/dev/vfio/0", "/dev/vfio/1")
    assert [mount.container_path for mount in answer.mounts] == ["/shared", "/own/0", "/own/1"]
    assert answer.envs[Resource.parse(REGIONS).variable] == "/dev/vfio/0,/dev/vfio/1"
    assert {"FPGA_FUNCTIONS_0", "FPGA_FUNCTIONS_1", "FPGA_DEVICE_1", "FPGA_DEVICE_2"} <= set(
        answer.envs
    )


def test_a_log_line_has_what_is_known_of_the_caller_and_nothing_empty():
    assert Caller().known() == {}
    named = Identity(PodUid("a"), name=PodName("space", "pod"), container="main")
    assert Caller(named).known() == {
        "pod": "a",
        "namespace": "space",
        "name": "pod",
        "container": "main",
    }


# ------------------------------------------------------------------ how long a PreStart may take


@pytest.mark.parametrize(
    ("time_left", "seconds"),
    [
        (None, 25.0),
        (100.0, 25.0),
        (30.0, 25.0),
        (20.0, 17.0),
        (8.0, 5.0),
        (6.0, 3.0),
        (5.0, 2.5),
        (1.0, 0.5),
        (-1.0, 0.0),
    ],
)
def test_a_prestart_is_answered_before_kubelet_gives_up(time_left: float | None, seconds: float):
    assert answer_within(time_left) == seconds


# ------------------------------------------------------------------ the quick calls


def test_allocate_says_that_kubelets_records_are_about_others_by_now(scene: Scene):
    """Else a successor's allocation gets its predecessor's pod."""
    told: list[DeviceId] = []
    owners = SimpleNamespace(answered=told.extend)
    scene.plugin.calls = replace(scene.plugin.calls, owners=owners)
    region = scene.regions[0]
    scene.admit(region)
    assert told == [region]


def test_allocate_adds_the_cdi_devices_of_its_resource_and_nothing_else(scene: Scene):
    allocations, region = scene.plugin.calls, scene.regions[0]
    bare = scene.plugin.call(lambda: allocations.allocate(REGIONS, [region]))
    assert bare.cdi_devices == ()
    added = CdiDevices(((REGIONS, "vendor.com/opencl=board"), (WHOLE, "other/a=b")))
    allocations = replace(allocations, cdi_devices=added)
    with_more = scene.plugin.call(lambda: allocations.allocate(REGIONS, [region]))
    assert with_more == replace(bare, cdi_devices=("vendor.com/opencl=board",))


def test_a_poststop_for_another_resource_is_not_one_of_the_allocations(scene: Scene):
    """Invariant 7: PostStops that balance the PreStarts let the region be scrubbed."""
    region = scene.regions[0]
    scene.start(scene.admit(region), AFU)
    scene.plugin.call(lambda: scene.plugin.calls.poststop(WHOLE, [region]))
    scene.plugin.work()
    assert scene.condition(region) is Condition.PROGRAMMED


def test_the_last_poststop_has_the_region_scrubbed(scene: Scene):
    region = scene.regions[0]
    scene.start(scene.admit(region), AFU)
    scene.plugin.call(lambda: scene.plugin.calls.poststop(REGIONS, [region]))
    scene.plugin.work()
    assert scene.rack.slot(region).afu == BLANK
    assert scene.condition(region) is Condition.BLANK
    assert scene.ledger.ownership(region) is not Ownership.FREE


def test_a_poststop_is_seen_though_its_card_is_being_looked_at(scene: Scene):
    """What works on a card hears of no change: without more the region would stay as it is."""
    first, other, _ = scene.regions
    pod = scene.admit(other)
    scene.start(pod, AFU)
    scene.rack.lent = {first}
    scene.plugin.call(lambda: scene.plugin.queue.add(card_of(first)))
    assert scene.plugin.queue.busy(card_of(first)), "drivers are given back"
    scene.plugin.call(lambda: scene.plugin.calls.poststop(REGIONS, [other]))
    scene.plugin.work()
    assert scene.rack.slot(other).afu == BLANK


# ------------------------------------------------------------------ who asks, and for what


def test_a_stock_kubelets_container_gets_what_its_pods_spec_asks_for(scene: Scene):
    envs = with_envs(scene, Envs(env_for([AFU])))
    region = scene.regions[0]
    pod = scene.admit(region)
    caller = Caller()
    task = call(scene, pod, {}, caller)
    scene.plugin.work()
    task.result()
    assert scene.rack.slot(region).afu == AFU
    assert envs.told == [("asked", pod.uid, (region,), True), ("started", "chosen", (region,))]
    assert caller.identity.container == "chosen"
    assert not scene.ledger.device_plugin.sends_env


def test_once_kubelet_sends_environments_an_empty_one_means_no_request(scene: Scene):
    first, other, _ = scene.regions
    scene.start(scene.admit(first), AFU)
    envs = with_envs(scene, Envs(env_for([AFU])))
    task = call(scene, scene.admit(other), {})
    scene.plugin.work()
    task.result()
    assert scene.rack.slot(other).afu == BLANK
    assert [kind for kind, *_ in envs.told] == ["started"]


def test_a_refusal_is_told_to_whoever_asks_next_and_to_the_pod(scene: Scene):
    envs = with_envs(scene, Envs({"FPGA_REGION_0": "nonsense"}))
    recorder = scene.plugin.prestarts._recorder = mock.Mock()
    region = scene.regions[0]
    scene.refused(call(scene, scene.admit(region), {}), InvalidRequestError)
    (_, (kind, container, devices, words)) = envs.told
    assert (kind, container, devices) == ("refused", "chosen", (region,))
    assert "FPGA_REGION_0" in words
    ((identity, devices, error), _) = recorder.refused.call_args
    assert (identity.container, devices) == ("chosen", (region,))
    assert isinstance(error, InvalidRequestError)


def test_an_allocation_that_ends_while_the_pods_spec_is_read_ends_the_call(scene: Scene):
    region = scene.regions[0]

    def deallocate() -> None:
        scene.plugin.calls.deallocate(REGIONS, [region])

    with_envs(scene, Envs(env_for([AFU]), deallocate))
    scene.refused(call(scene, scene.admit(region), {}), RefusedError, "ended before its container")


def test_a_successor_that_comes_while_the_pods_spec_is_read_ends_the_call(scene: Scene):
    """What the spec says is the predecessor's: nothing is done for it any more."""
    region = scene.regions[0]

    def another_owner() -> None:
        scene.ledger.device_plugin.release([DeviceId(region)])
        scene.ledger.device_plugin.allocate(REGIONS, [region])

    with_envs(scene, Envs(env_for([AFU]), another_owner))
    scene.refused(call(scene, scene.admit(region), {}), NotFinishedError, "got another owner while")
    assert not scene.rack.slot(region).data
    assert ("program", region, AFU) not in scene.rack.done


def test_an_allocation_of_which_one_region_was_used_is_not_the_pods_first(scene: Scene):
    """An init container had the first; who comes first now is not known by that."""
    first, other, _ = scene.regions
    envs = with_envs(scene, Envs(env_for([AFU])))
    pod = scene.admit(first)
    scene.plugin.call(lambda: scene.plugin.calls.allocate(REGIONS, [first, other]))
    for devices, fresh in [((first,), True), ((first, other), False)]:
        pod.devices = tuple(map(DeviceId, devices))
        envs.told.clear()
        task = call(scene, pod, {})
        scene.plugin.work()
        task.result()
        assert envs.told[0] == ("asked", pod.uid, devices, fresh)


def test_an_allocation_that_kubelets_records_show_and_the_ledger_lacks_is_made(scene: Scene):
    region = scene.regions[0]
    pod = scene.admit(region)
    scene.plugin.call(lambda: scene.plugin.calls.deallocate(REGIONS, [region]))
    scene.plugin.work()
    pod.active = True
    scene.start(pod, AFU)
    allocation = scene.ledger.allocations[DeviceId(region)]
    assert allocation.pod == pod.uid
    assert allocation.prestarts == 2, "this one, and one that nobody saw"
    assert scene.rack.slot(region).afu == AFU


def test_a_device_that_nobody_is_known_to_have_is_handed_to_nobody(scene: Scene):
    """Neither the ledger nor kubelet's records show an allocation: the caller is anybody."""
    region = scene.regions[0]
    pod = scene.admit(region)
    scene.plugin.call(lambda: scene.plugin.calls.deallocate(REGIONS, [region]))
    scene.plugin.work()
    pod.active = False
    scene.refused(scene.prestart(pod, AFU), RefusedError, "no allocation is known")
    assert scene.rack.slot(region).afu == BLANK
    assert not scene.ledger.allocations


def test_a_pod_that_kubelets_records_do_not_show_starts_on_its_own_allocation(scene: Scene):
    pod = scene.admit(scene.regions[0])
    pod.active = False
    scene.start(pod, AFU)
    assert scene.ledger.allocations[pod.devices[0]].pod is None


CGROUP = Cgroup("/t", "/t/pod", 1, 2)


def test_whoever_starts_is_looked_for_among_the_cgroups(scene: Scene):
    """Invariant 7: where its cgroup is not seen now, its absence later says nothing."""
    pod = scene.admit(scene.regions[0])
    with (
        mock.patch.object(Cgroups, "expect", autospec=True) as expect,
        mock.patch.object(Cgroups, "instance", return_value=(CGROUP,)),
    ):
        scene.start(pod, AFU)
    expect.assert_called_once_with(mock.ANY, pod.uid)
    (one,) = scene.ledger.tenancies.values()
    assert (one.pod, one.cgroups, one.used) == (pod.uid, (CGROUP,), True)


# ------------------------------------------------------------------ preparations


def test_what_failed_is_told_though_the_card_cannot_be_read_any_more(scene: Scene):
    scene.hold_releases()
    region = scene.regions[0]
    pod = scene.admit(region)
    program = scene.rack.programs

    def broken(*_) -> None:
        scene.rack.boards[card_of(region)].present = False
        raise ProgrammingError("PR failed")

    silent = SilentCardError(f"card {card_of(region)} does not answer")
    with (
        mock.patch("ledger_world.Hand.program", broken),
        mock.patch.object(Preparer, "read_back", side_effect=silent),
    ):
        task = scene.prestart(pod, AFU)
        scene.refused(task, ProgrammingError, "PR failed")
    assert scene.rack.programs == program


def test_the_image_of_a_preparation_that_waits_is_not_read_again(scene: Scene):
    pod = scene.admit(scene.regions[0])
    scene.prepare(pod, AFU).cancel()
    scene.plugin.work()
    scene.start(pod, AFU)
    assert len(scene.images.loaded) == 1


def test_a_faulted_region_is_refused_before_anything_is_done_to_another(scene: Scene):
    first, _, second = scene.regions
    pod = scene.admit(first, second)
    card = card_of(second)
    fault = Fault(FaultKind.LASTING, "no more")
    scene.plugin.call(lambda: scene.ledger.hardware.set_failing(card, {second: fault}))
    scene.touched.clear()
    scene.refused(scene.prestart(pod, AFU, AFU), RefusedError, "is faulted: no more")
    assert scene.touched == []


def test_what_goes_wrong_unexpectedly_is_told_as_such_and_not_kept(scene: Scene):
    region = scene.regions[0]
    pod = scene.admit(region)
    prepare = "fpga_plugin.cards.prepare.Preparer.prepare"
    with mock.patch(prepare, side_effect=ZeroDivisionError):
        task = scene.prestart(pod, AFU)
        scene.plugin.work()
    error = task.exception()
    assert isinstance(error, FpgaPluginError)
    assert error.message == "preparation failed for an unexpected reason"
    scene.start(pod, AFU)
    assert scene.rack.slot(region).afu == AFU


def test_to_close_is_to_wait_for_the_preparations_that_run(scene: Scene):
    """Invariant 9: a PR that has begun is brought to its end, and journalled."""
    region = scene.regions[0]
    task = scene.prestart(scene.admit(region), AFU)
    scene.until(lambda: scene.condition(region) is Condition.SCRUBBING)
    closing = scene.plugin.begin(scene.plugin.prestarts.close())
    assert not closing.done()
    scene.plugin.work()
    assert closing.done()
    assert scene.condition(region) is Condition.PROGRAMMED
    task.cancel()
    assert scene.plugin.prestarts._tasks == set()
    assert scene.plugin.prestarts._preparations == {}


def test_to_close_is_nothing_where_nothing_runs(scene: Scene):
    closing = scene.plugin.begin(scene.plugin.prestarts.close())
    assert closing.done()
    closing.result()


def test_a_preparation_that_nobody_wants_any_more_does_not_expire_its_successors(scene: Scene):
    """The time that a result is kept counts from its own end."""
    region, loop = scene.regions[0], scene.plugin.loop
    task = scene.prestart(scene.admit(region), AFU)
    scene.until(lambda: scene.condition(region) is Condition.SCRUBBING)
    scene.plugin.call(lambda: scene.plugin.calls.deallocate(REGIONS, [region]))
    scene.refused(task, RefusedError)
    loop._now += prestart.UNCLAIMED_FOR / 2
    begun = loop.time()
    scene.prepare(scene.admit(region), AFU).cancel()
    scene.plugin.work()
    while "a preparation expired unused" not in scene.logged:
        assert loop.pass_time()
    assert loop.time() >= begun + prestart.UNCLAIMED_FOR


def test_an_expired_result_leaves_alone_what_changed_since(scene: Scene):
    scene.hold_releases()
    first, other, _ = scene.regions
    scene.prepare(scene.admit(first, other), AFU, AFU).cancel()
    scene.plugin.work()
    scene.plugin.call(lambda: scene.ledger.work.faulted(first, "broken since"))
    end = scene.plugin.loop.time() + prestart.UNCLAIMED_FOR
    while scene.plugin.loop.time() < end and scene.plugin.loop.pass_time():
        pass
    assert "a preparation expired unused" in scene.logged
    assert scene.condition(first) is Condition.FAULTED
    assert scene.condition(other) is Condition.DIRTY


def test_what_was_prepared_for_an_ended_allocation_does_not_expire(scene: Scene):
    region = scene.regions[0]
    task = scene.prestart(scene.admit(region), AFU)
    scene.until(lambda: scene.condition(region) is Condition.SCRUBBING)
    scene.plugin.call(lambda: scene.plugin.calls.deallocate(REGIONS, [region]))
    scene.refused(task, RefusedError)
    while scene.plugin.loop.pass_time():
        pass
    assert "a preparation expired unused" not in scene.logged


# ------------------------------------------------------------------ what the requests mean


def test_variables_that_mean_nothing_are_told_and_refused_if_the_operator_says_so(scene: Scene):
    recorder = scene.plugin.prestarts._targets._recorder = mock.Mock()
    region = scene.regions[0]
    pod = scene.admit(region)
    scene.start(pod, AFU)
    recorder.warned.assert_not_called()
    assert "FPGA_* variables mean nothing" not in scene.logged

    task = call(scene, pod, env_for([AFU]) | NOT_A_REQUEST)
    scene.plugin.work()
    task.result()
    ((identity, devices, words), _) = recorder.warned.call_args
    assert (identity.pod, devices) == (pod.uid, (region,))
    assert "FPGA_NONSENSE" in words

    scene.plugin.prestarts._targets._unknown = UnknownVariables.REFUSE
    task = call(scene, pod, env_for([AFU]) | NOT_A_REQUEST)
    scene.plugin.work()
    assert isinstance(task.exception(), InvalidRequestError)


def test_a_tenant_with_many_variables_does_not_stop_the_loop(scene: Scene):
    """Invariant 8."""
    many = {f"V_{number}": "" for number in range(wants._MAX_AT_ONCE + 1)}
    region = scene.regions[0]
    task = call(scene, scene.admit(region), env_for([AFU]) | many)
    scene.plugin.job(0)  # kubelet's records
    with (
        mock.patch.object(wants, "unknown_variables", wraps=wants.unknown_variables) as unknown,
        mock.patch.object(wants, "requests_in", wraps=wants.requests_in) as parse,
    ):
        scene.plugin.job(0)  # the cgroup
        for function in (unknown, parse):
            function.assert_not_called()
            assert len(scene.plugin.jobs) == 1
            scene.plugin.job(0)
            function.assert_called_once()
    scene.plugin.work()
    task.result()
    assert scene.rack.slot(region).afu == AFU


def test_a_few_variables_are_parsed_at_once(scene: Scene):
    """A thread costs more than they do."""
    task = call(scene, scene.admit(scene.regions[0]), env_for([AFU]))
    scene.plugin.job(0)
    with mock.patch.object(wants, "requests_in", wraps=wants.requests_in) as parse:
        scene.plugin.job(0)
        parse.assert_called_once()
    scene.plugin.work()
    task.result()


def test_a_bitstream_is_asked_for_by_its_name(scene: Scene):
    names = {(InterfaceId(INTERFACE), Alias("filter")): BitstreamId(AFU)}

    async def aliases():
        return names

    scene.images.aliases = aliases
    region = scene.regions[0]
    env = {"FPGA_REGION_0": INTERFACE, "FPGA_BITSTREAM_ID_0": "filter"}
    task = call(scene, scene.admit(region), env)
    scene.plugin.work()
    task.result()
    assert scene.rack.slot(region).afu == AFU


def test_a_clock_that_a_card_does_not_have_is_refused(scene: Scene):
    env = env_for([AFU]) | {"FPGA_DRIVER_PARAMS_0": "clock=100"}
    region = scene.regions[0]
    scene.refused(call(scene, scene.admit(region), env), RefusedError, "clock")
    assert scene.rack.slot(region).afu == BLANK


def test_an_image_for_two_regions_is_read_once(scene: Scene):
    first, other, _ = scene.regions
    scene.start(scene.admit(first, other), AFU, AFU)
    assert len(scene.images.loaded) == 1
    scene.start(scene.pods[-1], AFU, OTHER_AFU)
    assert [scene.rack.slot(r).afu for r in (first, other)] == [AFU, OTHER_AFU]
