"""A wrong RegionConfig is refused when the claim or template is made, by the real API server.

The policy judges as the plugin does: each case here is put to both.
"""

import contextlib
import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, until

from fpga_plugin.dra.regionconfig import parse_config
from fpga_plugin.errors import InvalidRequestError

POLICY = Path(__file__).parents[2] / "deploy/dra/regionconfig-policy.yaml"
DRIVER = "fpga.intel.com"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
TEMPLATES = f"{CLAIMS.removesuffix('s')}templates"
HEAD = {"apiVersion": "fpga.intel.com/v1alpha1", "kind": "RegionConfig"}
AFU = "f7df405cbd7acf7222f144b0b93acd18"


def config(parameters: dict[str, Any], driver: str = DRIVER) -> dict[str, Any]:
    return {"opaque": {"driver": driver, "parameters": parameters}}


def spec(*configs: dict[str, Any]) -> dict[str, Any]:
    request = {"name": "fpga", "exactly": {"deviceClassName": "fpga-region-ce489693"}}
    return {"devices": {"requests": [request], "config": list(configs)}}


def refusal(cluster: Cluster, path: str, asked: dict[str, Any]) -> str:
    """Why such an object is not made; empty: it would be."""
    body = {"metadata": {"generateName": "c-"}, "spec": asked}
    try:
        cluster.call("POST", f"{path}?dryRun=All", body)
    except urllib.error.HTTPError as error:
        with error:
            return str(json.loads(error.read())["message"])
    return ""


@pytest.fixture(scope="module")
def judged(cluster: Cluster) -> Cluster:
    """The cluster, with the policy in force."""
    cluster.apply(POLICY)
    wrong = spec(config({"apiVersion": "v1", "kind": "Nonsense"}))
    until(lambda: refusal(cluster, CLAIMS, wrong), "the policy is in force")
    return cluster


GOOD: list[dict[str, Any]] = [
    {},
    {"bitstream": AFU},
    {"bitstream": AFU.upper()},
    {"bitstream": "f7df405c-bd7a-cf72-22f1-44b0b93acd18"},
    {"bitstream": "583046af95883bdc653bc8fcede570d756ac30d9"},
    {"bitstream": None, "driverParams": None, "bitstreams": None},
    {"driverParams": {}},
    {"driverParams": {"clock": 200, "debug": 1}},
    {"driverParams": {"clock": None, "debug": None}},
    {"driverParams": {"clock": 1_000_000_000}},
]

BAD: list[tuple[dict[str, Any], str]] = [
    ({"apiVersion": "fpga.intel.com/v2"}, "has to be fpga.intel.com/v1alpha1 RegionConfig"),
    ({"kind": "GpuConfig"}, "has to be fpga.intel.com/v1alpha1 RegionConfig"),
    ({"kind": 7}, "has to be fpga.intel.com/v1alpha1 RegionConfig"),
    ({"bitstreem": AFU}, "RegionConfig has no field bitstreem"),
    ({"bitstreams": [AFU]}, "bitstreams belongs into a DeviceClass"),
    ({"bitstream": "nlb0"}, "bitstream has to be an AFU id"),
    ({"bitstream": ""}, "bitstream has to be an AFU id"),
    ({"bitstream": f"{AFU}0"}, "bitstream has to be an AFU id"),
    ({"bitstream": 1}, "bitstream has to be an AFU id"),
    ({"bitstream": [AFU]}, "bitstream has to be an AFU id"),
    ({"driverParams": {"clok": 1}}, "driverParams has the fields clock and debug"),
    ({"driverParams": []}, "driverParams has the fields clock and debug"),
    ({"driverParams": "clock=1"}, "driverParams has the fields clock and debug"),
    ({"driverParams": {"clock": 0}}, "clock has to be a number of MHz"),
    ({"driverParams": {"clock": -5}}, "clock has to be a number of MHz"),
    ({"driverParams": {"clock": 1_000_000_001}}, "clock has to be a number of MHz"),
    ({"driverParams": {"clock": True}}, "clock has to be a number of MHz"),
    ({"driverParams": {"clock": 0.5}}, "clock has to be a number of MHz"),
    ({"driverParams": {"clock": "200"}}, "clock has to be a number of MHz"),
    ({"driverParams": {"debug": 2}}, "debug has to be 0 or 1"),
    ({"driverParams": {"debug": True}}, "debug has to be 0 or 1"),
]


@pytest.mark.parametrize("fields", GOOD)
def test_what_the_plugin_takes_is_made(judged: Cluster, fields: dict[str, Any]) -> None:
    parameters = HEAD | fields
    parse_config(json.dumps(parameters).encode(), from_class=False)
    assert refusal(judged, CLAIMS, spec(config(parameters))) == ""
    assert refusal(judged, TEMPLATES, {"spec": spec(config(parameters))}) == ""


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_what_the_plugin_refuses_is_not_made(
    judged: Cluster, fields: dict[str, Any], message: str
) -> None:
    parameters = HEAD | fields
    with pytest.raises(InvalidRequestError):
        parse_config(json.dumps(parameters).encode(), from_class=False)
    assert message in refusal(judged, CLAIMS, spec(config(parameters)))
    assert message in refusal(judged, TEMPLATES, {"spec": spec(config(parameters))})


def test_one_wrong_entry_among_others_is_found(judged: Cluster) -> None:
    entries = [config(HEAD), config(HEAD | {"bitstream": "nlb0"}), config({}, "gpu.example.com")]
    assert "bitstream has to be" in refusal(judged, CLAIMS, spec(*entries))


def test_claims_of_other_drivers_and_without_config_are_not_judged(judged: Cluster) -> None:
    others = config({"apiVersion": "gpu.example.com/v1", "kind": "GpuConfig"}, "gpu.example.com")
    for asked in (spec(others), spec(), {"devices": {}}):
        assert refusal(judged, CLAIMS, asked) == ""
        assert refusal(judged, TEMPLATES, {"spec": asked}) == ""


def test_a_claim_that_was_there_before_can_be_changed_and_ends(cluster: Cluster) -> None:
    """Whoever keeps a finalizer has to be able to take it away."""
    paths = [
        f"/apis/admissionregistration.k8s.io/v1/{kind}/fpga-plugin-regionconfigs"
        for kind in ("validatingadmissionpolicybindings", "validatingadmissionpolicies")
    ]
    for path in paths:
        with contextlib.suppress(urllib.error.HTTPError):
            cluster.call("DELETE", path)
    wrong = spec(config(HEAD | {"bitstream": "nlb0"}))
    until(lambda: not refusal(cluster, CLAIMS, wrong), "the policy is gone")
    body = {"metadata": {"name": "before", "finalizers": ["example.com/kept"]}, "spec": wrong}
    made = cluster.call("POST", CLAIMS, body)
    cluster.apply(POLICY)
    until(lambda: refusal(cluster, CLAIMS, wrong), "the policy is in force")
    made["metadata"]["finalizers"] = []
    cluster.call("PUT", f"{CLAIMS}/before", made)
    cluster.call("DELETE", f"{CLAIMS}/before")
