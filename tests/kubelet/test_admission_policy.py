"""The policy as a ValidatingAdmissionPolicy, decided by the real API server, and by the plugin."""

import json
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
from control_plane import ControlPlane
from machine import until

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import ResourceName
from fpga_plugin.lifecycle.permission import asks
from fpga_plugin.pods.requests import parse_requests
from fpga_plugin.policy.admission import admission_policy
from fpga_plugin.policy.parse import parse_policy

# Each kubelet has tests of its own; these need the API server only.
pytestmark = pytest.mark.parametrize("source", ["api-server"])

ID, OTHER_ID = "ce48969398f05f33946d560708be108a", "38d782e3b6125343b9342433e348ac4c"
AFU, AFU_2 = "18b79ffa2ee54aa096ef4230dafacb5f", "850adcc26ceb4b229722d43375b61c66"
AFU_3 = "f7df405cbd7acf7222f144b0b93acd18"
AOCX = "ab" * 20
DASHED = "18B79FFA-2EE5-4AA0-96EF-4230DAFACB5F"
NAMESPACES = ("team-a", "team-b-1", "team-b", "lab", "stranger")
POLICY = f"""\
version: 1
default: deny
rules:
- {{name: debug-image, action: deny, namespaces: ["team-*"], bitstreams: [{AFU_2}]}}
- {{name: no-whole, action: deny, namespaces: ["team-*"], devices: [whole]}}
- name: teams
  action: allow
  namespaces: [team-a, "team-b-*"]
  interfaces: [{ID}]
  bitstreams: [{AFU}, {AFU_2}, {AOCX}, blank]
- {{name: team-other, action: allow, namespaces: ["team-a"], interfaces: [{OTHER_ID}]}}
- {{name: lab, action: allow, namespaces: [lab]}}
"""

REGION, WHOLE = f"fpga.intel.com/region-{ID}", f"fpga.intel.com/fpga-{ID}"
OTHER = f"fpga.intel.com/region-{OTHER_ID}"


def env(afu: str = AFU, region: str = ID, n: str = "1", kind: str = "AFU") -> dict[str, str]:
    return {f"FPGA_REGION_{n}": region, f"FPGA_{kind}_{n}": afu}


WRITTEN_OUT = [
    ((REGION,), {}),
    ((REGION,), {"PATH": "/bin", "FPGA_DEVICE": "x"}),
    ((REGION,), env()),
    ((REGION,), env(DASHED, ID.upper())),
    ((REGION,), env(kind="BITSTREAM_ID")),
    ((REGION,), env() | env(kind="BITSTREAM_ID")),
    ((REGION,), env(AFU_2)),
    ((REGION,), env(AFU_3)),
    ((REGION,), env(AOCX.upper())),
    ((REGION,), env() | env(AFU_2, n="2")),
    ((REGION,), env() | env(AFU_3, OTHER_ID, n="a_B")),
    ((WHOLE,), {}),
    ((WHOLE,), env()),
    ((OTHER,), env(AFU_3, OTHER_ID)),
    ((OTHER,), {}),
    ((REGION, OTHER), env() | env(AFU_3, OTHER_ID, n="2")),
]
"""Resources and environments in which nothing is malformed or hidden."""


def container(resources: tuple[str, ...], variables: Any, name: str = "app") -> dict[str, Any]:
    entries = (
        [{"name": key, "value": value} for key, value in variables.items()]
        if isinstance(variables, dict)
        else variables
    )
    limits = dict.fromkeys(resources, "1")
    return {"name": name, "image": "i", "env": entries, "resources": {"limits": limits}}


@pytest.fixture(scope="module")
def server(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    for namespace in NAMESPACES:
        control_plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    root = "/apis/admissionregistration.k8s.io/v1"
    objects = admission_policy(parse_policy(POLICY.encode()), prefix="fpga.intel.com")
    paths = [f"{root}/validatingadmissionpolicies", f"{root}/validatingadmissionpolicybindings"]
    for path, body in zip(paths, objects, strict=True):
        control_plane.call("POST", path, body)
    until(lambda: refusal(control_plane, "stranger", container((REGION,), {})), "it is in force")
    yield control_plane
    for path, body in zip(paths, objects, strict=True):
        control_plane.call("DELETE", f"{path}/{body['metadata']['name']}")
    for namespace in NAMESPACES:
        control_plane.call("DELETE", f"/api/v1/namespaces/{namespace}")


def refusal(
    server: ControlPlane, namespace: str, *containers: dict[str, Any], **spec: Any
) -> str | None:
    """Why the API server refuses a pod; None: it does not."""
    pod = {
        "metadata": {"name": "pod"},
        "spec": {"containers": list(containers)} | spec,
    }
    try:
        server.call("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
    except urllib.error.HTTPError as error:
        told = json.loads(error.read())
        assert told["code"] == 403, told
        return str(told["message"])
    return None


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_it_decides_as_the_plugin_does(source: str, server: ControlPlane, namespace: str) -> None:
    policy = parse_policy(POLICY.encode())
    for resources, variables in WRITTEN_OUT:
        refused = []
        for resource in resources:
            for ask in asks(ResourceName(resource), parse_requests(variables)):
                verdict = policy.judge(namespace, ask)
                if not verdict.allowed:
                    refused.append(verdict.rule)
        told = refusal(server, namespace, container(resources, variables))
        assert (told is None) == (not refused), (resources, variables, told, refused)
        for rule in refused:
            assert (f"rule {rule} denies it" if rule else "the default is deny") in str(told)


HIDDEN_ID = [
    {"name": "FPGA_REGION_1", "value": ID},
    {"name": "FPGA_AFU_1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['a']"}}},
]
EXPANDED = [
    {"name": "A", "value": AFU_3},
    {"name": "FPGA_REGION_1", "value": ID},
    {"name": "FPGA_AFU_1", "value": "$(A)"},
]
TWICE = [
    {"name": "FPGA_REGION_1", "value": ID},
    {"name": "FPGA_AFU_1", "value": AFU_3},
    {"name": "FPGA_AFU_1", "value": AFU},
]


@pytest.mark.parametrize("variables", [HIDDEN_ID, EXPANDED, TWICE])
def test_what_it_cannot_see_is_refused_where_it_matters(
    source: str, server: ControlPlane, variables: Any
) -> None:
    assert refusal(server, "team-a", container((REGION,), variables)) is not None
    assert refusal(server, "lab", container((REGION,), variables)) is None


def test_variables_from_elsewhere_matter_where_env_has_no_request(
    source: str, server: ControlPlane
) -> None:
    elsewhere = {"envFrom": [{"configMapRef": {"name": "x"}}]}
    told = refusal(server, "team-a", container((REGION,), {}) | elsewhere)
    assert told is not None
    assert "does not spell out" in told
    assert refusal(server, "team-a", container((REGION,), env()) | elsewhere) is None


def test_init_containers_count(source: str, server: ControlPlane) -> None:
    bad = container((REGION,), env(AFU_3), "first")
    told = refusal(server, "team-a", container((REGION,), env()), initContainers=[bad])
    assert told is not None
    assert "container first" in told


def test_pods_without_an_fpga_are_none_of_its_business(source: str, server: ControlPlane) -> None:
    assert refusal(server, "stranger", container(("example.com/gpu",), env())) is None
    assert refusal(server, "stranger", {"name": "app", "image": "i"}) is None


@pytest.mark.parametrize("value", ["'; true", "\n", "blank", "?", "*", "../..", "x" * 5000])
def test_values_of_tenants_are_only_compared(source: str, server: ControlPlane, value: str) -> None:
    told = refusal(server, "team-b-1", container((REGION,), env(value)))
    with pytest.raises(FpgaPluginError):  # the plugin refuses it whatever the policy says
        parse_requests(env(value))
    assert told is None or len(told) < 2000


def test_many_variables_only_cost_who_has_them(source: str, server: ControlPlane) -> None:
    many = {f"X{n}": "y" for n in range(1000)}
    assert refusal(server, "team-a", container((REGION,), many | env())) is None
