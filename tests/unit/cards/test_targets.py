"""What a container's requests mean for its regions, before any of them is touched.

Each of these broke without a fast test noticing (`make mutants`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from doubles.cards import AFU, BLANK, INTERFACE, PREFIX
from ledger_scene import Scene
from ledger_world import AFUS, Pod, env_for

from fpga_plugin.allocation.journal.records import DebugHold
from fpga_plugin.allocation.names import card_of, function_name
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.allocation.requests.parse import FpgaRequest
from fpga_plugin.cards.prepare import Target
from fpga_plugin.cards.targets import Targets
from fpga_plugin.errors import CardGoneError, InvalidRequestError, RefusedError
from fpga_plugin.hardware.backend import ClockLimits, DriverSettings
from fpga_plugin.hardware.image import Xclbin
from fpga_plugin.ids import Alias, BitstreamId, DeviceId, InterfaceId, RegionId
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.settings.settings import Advertise

LIMITS = ClockLimits(100, 400)


@pytest.fixture
def scene(make) -> Scene:
    scene: Scene = make()
    scene.rack.limits = LIMITS
    return scene


def wants_of(scene: Scene) -> Targets:
    return scene.plugin.prestarts._targets


def asks(afu: str = AFU, **settings: int) -> FpgaRequest:
    made = DriverSettings(**settings)  # type: ignore[arg-type]
    return FpgaRequest(
        suffix="0",
        interface_id=InterfaceId(INTERFACE),
        bitstream_id=BitstreamId(afu),
        settings=made,
    )


def exactly(scene: Scene, requests: Mapping[RegionId, FpgaRequest | None]):
    return scene.plugin.begin(wants_of(scene).exactly(requests))


# ------------------------------------------------------------------ limits, before work begins


def _pulled(scene: Scene, region: RegionId) -> None:
    scene.rack.boards[card_of(region)].present = False
    scene.ledger.hardware.card_gone(card_of(region))


def _fewer_regions(scene: Scene, region: RegionId) -> None:
    """The card that came into the slot has no such region."""
    card = scene.ledger.cards[card_of(region)]
    others = tuple(each for each in card.regions if each.id != region)
    observed = {each.id: BLANK for each in others}
    scene.ledger.hardware.card_found(replace(card, regions=others), observed, BLANK)


@pytest.mark.parametrize("settings", [{}, {"clock": 200}], ids=["as it is", "with a clock"])
@pytest.mark.parametrize("goes", [_pulled, _fewer_regions])
def test_a_region_that_goes_while_images_are_read_is_told_as_gone(
    scene: Scene, goes: Callable[[Scene, RegionId], None], settings: dict[str, int]
):
    """Its pod has to be deleted; an error of Python's would say nothing of that."""
    first, gone, second = scene.regions
    requests = {second: asks(), gone: asks(AFUS[1], **settings)}
    load = scene.images.load

    async def load_and_lose(*name):
        scene.images.load = load  # type: ignore[method-assign]
        goes(scene, gone)
        return await load(*name)

    scene.images.load = load_and_lose  # type: ignore[method-assign]
    scene.refused(exactly(scene, requests), CardGoneError, f"{gone} is gone")
    assert first not in scene.touched


def test_a_clock_is_held_against_the_image_before_anything_is_done(scene: Scene):
    region, other, _ = scene.regions
    load = scene.images.load

    async def slow(*name):
        return replace(await load(*name), clock_frequency_high=150)

    scene.images.load = slow  # type: ignore[method-assign]
    scene.refused(exactly(scene, {region: asks(clock=151)}), RefusedError, "built for 150 MHz")
    task = exactly(scene, {region: asks(clock=150), other: None})
    scene.plugin.work()
    wanted = task.result()
    assert wanted[other] is None
    target = wanted[region]
    assert target is not None
    assert target.settings == DriverSettings(clock=150)


def test_the_store_is_asked_for_what_the_cards_driver_reads(scene: Scene):
    region, other, _ = scene.regions
    card = scene.ledger.cards[card_of(region)]
    scene.plugin.call(
        lambda: scene.ledger.hardware.card_found(
            replace(card, takes=Xclbin), {each.id: BLANK for each in card.regions}, BLANK
        )
    )
    load = scene.images.load
    asked = []

    async def of_kind(interface_id, bitstream_id, takes):
        asked.append(takes)
        return await load(interface_id, bitstream_id, takes)

    scene.images.load = of_kind  # type: ignore[method-assign]
    exactly(scene, {other: None, region: asks()})
    scene.plugin.work()
    assert asked == [Xclbin]


def test_a_card_is_asked_for_its_limits_only_for_a_request_with_parameters(scene: Scene):
    """One that does not answer would keep all pods waiting."""
    region = scene.regions[0]
    with mock.patch.object(type(scene.rack), "clock_limits", side_effect=OSError):
        task = exactly(scene, {region: asks()})
        scene.plugin.work()
        assert task.result()[region] is not None


# ------------------------------------------------------------------ preprogrammed functions


def test_a_functions_driver_parameters_hold_and_have_the_cards_limits(make):
    scene: Scene = make(cards=[2], advertise=Advertise.AF)
    scene.rack.limits = LIMITS
    first, other = scene.regions
    card = scene.rack.boards[card_of(first)].card
    resource = function_name(PREFIX, card.interface_id, BLANK)
    devices = (DeviceId(first), DeviceId(other))
    scene.plugin.call(lambda: scene.plugin.calls.allocate(resource, devices))

    def of(request: FpgaRequest):
        task = scene.plugin.begin(wants_of(scene).of(devices, (request,)))
        scene.plugin.work()
        return task

    scene.refused(of(asks(BLANK, clock=401)), InvalidRequestError, "outside the limits")
    assert of(asks(BLANK, clock=400)).result() == {
        first: Target(BLANK, DriverSettings(clock=400)),
        other: Target(BLANK, DriverSettings()),
    }


def test_an_allocation_that_ends_while_names_are_read_ends_the_call_as_any_other(scene: Scene):
    region = scene.regions[0]
    pod = scene.admit(region)

    async def aliases():
        scene.plugin.calls.deallocate(pod.resource, pod.devices)
        return {(InterfaceId(INTERFACE), Alias("filter")): BitstreamId(AFU)}

    scene.images.aliases = aliases
    env = {"FPGA_REGION_0": INTERFACE, "FPGA_BITSTREAM_ID_0": "filter"}
    call = scene.plugin.prestarts.serve(pod.resource, pod.devices, env, 30.0)
    scene.refused(scene.plugin.begin(call), RefusedError, "ended before its container started")


@pytest.mark.parametrize("title", ["hello_afu", "hello"])
def test_who_asks_for_a_title_is_given_the_id(scene: Scene, title: str):
    """Status and lists show titles; some could be names by their form."""

    async def aliases():
        return {}

    scene.images.aliases, scene.images.titles = aliases, {title: AFU}
    pod = scene.admit(scene.regions[0])
    env = {"FPGA_REGION_0": INTERFACE, "FPGA_AFU_0": title}
    call = scene.plugin.prestarts.serve(pod.resource, pod.devices, env, 30.0)
    said = f"FPGA_AFU_0='{title}': .* it is the title of bitstream {AFU}: ask for that"
    scene.refused(scene.plugin.begin(call), InvalidRequestError, said)


# ------------------------------------------------------------------ who is told


def started_with(scene: Scene, pod: Pod, env: Mapping[str, str]) -> None:
    call = scene.plugin.prestarts.serve(pod.resource, pod.devices, env, 30.0)
    task = scene.plugin.begin(call)
    scene.plugin.work()
    task.result()


def test_the_pod_itself_is_told_of_a_variable_that_means_nothing(scene: Scene):
    pod = scene.admit(scene.regions[0])
    with mock.patch.object(EventRecorder, "warned", autospec=True) as warned:
        started_with(scene, pod, env_for([AFU]) | {"FPGA_NONSENSE": "1"})
    ((_, identity, devices, words), _) = warned.call_args
    assert (identity.pod, devices) == (pod.uid, pod.devices)
    assert words.startswith("FPGA_* variables mean nothing: 'FPGA_NONSENSE': "), "and no more"


def test_what_a_pod_asks_for_should_it_fail_is_kept_with_its_start(scene: Scene):
    pod = scene.admit(scene.regions[0])
    asked = DebugHold(RegionId(""), PodUid(pod.uid), "space", "name", ("main",), 60.0)
    questions = []

    async def target(identity, devices):
        questions.append((identity.pod, devices))
        return asked

    prestarts = scene.plugin.prestarts
    prestarts._debugging = SimpleNamespace(requested=target)  # type: ignore[assignment]
    started_with(scene, pod, env_for([AFU]))
    assert questions == [(pod.uid, pod.devices)]
    assert scene.ledger.debug_holds == {
        pod.devices[0]: replace(asked, region=RegionId(pod.devices[0]))
    }
