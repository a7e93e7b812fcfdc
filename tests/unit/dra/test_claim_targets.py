"""What each region of a claim becomes: what was asked for, by whom it was asked, and no more.

Invariant 2.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.cards import AFU, INTERFACE, PREFIX
from ledger_scene import scenes
from structlog.testing import capture_logs
from test_lifecycle import OTHER, A, ClaimScene

from fpga_plugin.allocation.journal.records import ClaimOwner
from fpga_plugin.allocation.names import card_of
from fpga_plugin.dra.claim import Config, ResourceClaim
from fpga_plugin.dra.regionconfig import RegionConfig
from fpga_plugin.errors import (
    FpgaPluginError,
    InvalidRequestError,
    NoSourceError,
    NotPermittedError,
    RefusedError,
)
from fpga_plugin.ids import BitstreamId, CardId, DeviceId, RegionId
from fpga_plugin.kubernetes.apiserver import pods as apiserver
from fpga_plugin.kubernetes.apiserver.pods import ExtendedClaim
from fpga_plugin.kubernetes.names import PodName, PodUid
from fpga_plugin.kubernetes.pod import Container, Pod, Reference, Variable
from fpga_plugin.settings.values import UnknownVariables

POD = PodName("space", "compress"), PodUid("pod-1")


class Server:
    """The API server's word on a pod, as `ApiServer` reports it."""

    pod: Pod
    mapped: ExtendedClaim | None

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def get_extended(self, namespace: str, name: str) -> tuple[Pod, ExtendedClaim | None]:
        assert (namespace, name) == POD[0]
        return Server.pod, Server.mapped


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ClaimScene]]:
    with scenes(functools.partial(ClaimScene, tmp_path)) as make:
        yield make


@pytest.fixture
def scene(make: Callable[..., ClaimScene], monkeypatch: pytest.MonkeyPatch) -> ClaimScene:
    monkeypatch.setattr(apiserver, "ApiServer", Server)
    return make()


def claim_targets(scene: ClaimScene, claim: ResourceClaim) -> dict[RegionId, Any]:
    task = scene.plugin.begin(scene.lifecycle._claim_targets.of(claim))
    scene.plugin.work()
    return task.result()


def images(scene: ClaimScene, claim: ResourceClaim) -> dict[RegionId, str | None]:
    return {
        region: None if one is None else one.bitstream_id
        for region, one in claim_targets(scene, claim).items()
    }


def config(*, of_class: bool = False, requests: tuple[str, ...] = (), **said: Any) -> Config:
    return Config(of_class, frozenset(requests), RegionConfig(**said))


def requested(**devices: RegionId | CardId) -> ClaimOwner:
    """A claim with these devices, by the names of its requests."""
    of = {DeviceId(one): (name,) for name, one in devices.items()}
    return ClaimOwner(A, "space", f"claim-{A[-1]}", tuple(of), of, PREFIX)


def test_each_device_becomes_what_its_request_asks_for(scene: ClaimScene) -> None:
    one, two, other = scene.regions
    claim = ResourceClaim(
        requested(first=one, second=two, third=card_of(other)),
        (
            config(requests=("first", "third"), bitstream=BitstreamId(AFU)),
            config(requests=("third",), bitstream=BitstreamId(OTHER), clock=200),
        ),
    )
    found = claim_targets(scene, claim)
    assert {region: one and one.bitstream_id for region, one in found.items()} == {
        one: AFU,
        two: None,
        other: OTHER,
    }
    assert found[other].settings.clock == 200
    assert found[one].settings.clock is None
    assert found[one].interface_id == INTERFACE


def test_what_a_class_pins_holds_for_the_devices_of_its_request(scene: ClaimScene) -> None:
    one, two = scene.regions[:2]
    claim = replace(
        scene.allocated(A, one, two, wants=None),
        configs=(config(of_class=True, requests=("fpga",), bitstream=BitstreamId(AFU)),),
    )
    assert images(scene, claim) == {one: AFU, two: AFU}
    asked = (*claim.configs, config(bitstream=BitstreamId(OTHER)))
    with pytest.raises(NotPermittedError, match="pins"):
        claim_targets(scene, replace(claim, configs=asked))


def test_parameters_without_a_bitstream_are_refused(scene: ClaimScene) -> None:
    claim = replace(scene.allocated(A, scene.regions[0]), configs=(config(clock=200),))
    with pytest.raises(InvalidRequestError, match="no bitstream"):
        claim_targets(scene, claim)


# ------------------------------------------------------------------ a pod's extended resources


def env(*afus: str, interface: str = INTERFACE) -> tuple[Variable, ...]:
    return tuple(
        Variable(f"FPGA_{kind}_{number}", value)
        for number, afu in enumerate(afus)
        for kind, value in (("REGION", interface), ("BITSTREAM_ID", afu))
    )


def extended(
    scene: ClaimScene,
    devices: Mapping[str, RegionId],
    mapped: tuple[tuple[str, str], ...],
    *containers: Container,
    init: tuple[Container, ...] = (),
) -> ResourceClaim:
    """A pod that asked for extended resources, and the claim that stands for them."""
    claim = replace(
        scene.allocated(A, *devices.values(), wants=None),
        owner=requested(**devices),
        pod=POD,
    )
    Server.pod = Pod(
        namespace="space", name="compress", uid=POD[1], init=init, containers=containers
    )
    Server.mapped = ExtendedClaim(claim.owner.name, mapped)
    return claim


def test_each_container_has_its_own_devices_programmed_as_its_environment_says(
    scene: ClaimScene,
) -> None:
    one, two, other = scene.regions
    claim = extended(
        scene,
        {"r-0": one, "r-1": two, "r-2": other},
        (("main", "r-0"), ("side", "r-1"), ("side", "r-2")),
        Container("main", env(AFU)),
        Container("side", env(OTHER)),
        Container("third", env("f" * 32)),
    )
    assert images(scene, claim) == {one: AFU, two: OTHER, other: None}


def test_containers_that_share_a_device_have_to_ask_for_the_same(scene: ClaimScene) -> None:
    """It is prepared once, before both: the second would run on the first one's image."""
    one = scene.regions[0]
    mapped = (("main", "r-0"), ("first", "r-0"))
    same = extended(
        scene,
        {"r-0": one},
        mapped,
        Container("main", env(AFU)),
        init=(Container("first", env(AFU)),),
    )
    assert images(scene, same) == {one: AFU}
    for asked in (env(OTHER), ()):
        other = extended(
            scene,
            {"r-0": one},
            mapped,
            Container("main", env(AFU)),
            init=(Container("first", asked),),
        )
        with pytest.raises(RefusedError, match="first and main share a device"):
            claim_targets(scene, other)


def test_a_class_bounds_what_a_container_asks_for(scene: ClaimScene) -> None:
    one = scene.regions[0]
    claim = extended(scene, {"r-0": one}, (("main", "r-0"),), Container("main", env(OTHER)))
    pinned = replace(claim, configs=(config(of_class=True, bitstream=BitstreamId(AFU)),))
    with pytest.raises(NotPermittedError, match="pins"):
        claim_targets(scene, pinned)
    of_claim = replace(claim, configs=(config(bitstream=BitstreamId(AFU)),))
    assert images(scene, of_claim) == {one: OTHER}, "such a claim has no config of its own"


@pytest.mark.parametrize("what", ["another uid", "no claim", "another claim"])
def test_a_pod_that_does_not_say_yet_which_container_has_what_is_waited_for(
    scene: ClaimScene, what: str
) -> None:
    claim = extended(
        scene, {"r-0": scene.regions[0]}, (("main", "r-0"),), Container("main", env(AFU))
    )
    match what:
        case "another uid":
            Server.pod = replace(Server.pod, uid=PodUid("pod-2"))
        case "no claim":
            Server.mapped = None
        case _:
            Server.mapped = ExtendedClaim("another", (("main", "r-0"),))
    with pytest.raises(NoSourceError):
        claim_targets(scene, claim)


def test_a_container_whose_variables_make_no_sense_is_refused_if_it_has_a_device(
    scene: ClaimScene,
) -> None:
    wrong = Container("side", (Variable("FPGA_REGION_0", "no interface id"),))
    good = Container("main", env(AFU))
    one = scene.regions[0]
    claim = extended(scene, {"r-0": one}, (("main", "r-0"),), good, wrong)
    assert images(scene, claim) == {one: AFU}
    claim = extended(scene, {"r-0": one}, (("side", "r-0"),), good, wrong)
    with pytest.raises(FpgaPluginError, match="FPGA_REGION_0"):
        claim_targets(scene, claim)


def test_a_variable_that_means_nothing_is_told_of_the_pod_that_has_it(scene: ClaimScene) -> None:
    """As by the other api: its container gets a blank FPGA, which is not what somebody meant."""
    one = scene.regions[0]
    typo = Container("main", (*env(AFU), Variable("FPGA_BITSTREEM_ID_1", OTHER)))
    claim = extended(scene, {"r-0": one}, (("main", "r-0"),), typo)
    with capture_logs() as logged:
        assert images(scene, claim) == {one: AFU}
    (line,) = [each for each in logged if each["event"] == "FPGA_* variables mean nothing"]
    assert (line["pod"], line["container"], line["devices"]) == (POD[1], "main", [one])
    assert "FPGA_BITSTREEM_ID_1" in line["variables"][0]


def test_a_container_with_such_a_variable_is_refused_where_none_may_be(scene: ClaimScene) -> None:
    scene.lifecycle._claim_targets._targets._unknown = UnknownVariables.REFUSE
    typo = Container("side", (Variable("FPGA_BITSTREEM_ID_1", OTHER),))
    good = Container("main", env(AFU))
    one = scene.regions[0]
    claim = extended(scene, {"r-0": one}, (("main", "r-0"),), good, typo)
    assert images(scene, claim) == {one: AFU}, "that container has no FPGA"
    claim = extended(scene, {"r-0": one}, (("side", "r-0"),), good, typo)
    with pytest.raises(InvalidRequestError, match=r"mean nothing.*FPGA_BITSTREEM_ID_1"):
        claim_targets(scene, claim)


def test_a_variable_that_only_the_container_knows_is_refused(scene: ClaimScene) -> None:
    one = scene.regions[0]
    secret = Variable("FPGA_BITSTREAM_ID_0", source=Reference(what="a Secret"))
    container = Container("main", (Variable("FPGA_REGION_0", INTERFACE), secret))
    claim = extended(scene, {"r-0": one}, (("main", "r-0"),), container)
    with pytest.raises(InvalidRequestError, match="a Secret"):
        claim_targets(scene, claim)
