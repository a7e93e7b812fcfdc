"""The policy as a ValidatingAdmissionPolicy, decided by the real API server, and by the plugin."""

import json
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
from control_plane import ControlPlane
from machine import until

from fpga_plugin.allocation.permission import asks
from fpga_plugin.allocation.requests.parse import parse_requests
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.ids import Resource
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
    # The API server notices a moment later, and would refuse the pods of the next tests until then.
    asks_a_region = container((REGION,), {})
    until(
        lambda: refusal(control_plane, "stranger", asks_a_region) is None, "it is in force no more"
    )
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
def test_the_admission_policy_decides_as_the_plugin_does(
    source: str, server: ControlPlane, namespace: str
) -> None:
    policy = parse_policy(POLICY.encode())
    for resources, variables in WRITTEN_OUT:
        refused = []
        for resource in resources:
            for ask in asks(Resource.parse(resource), parse_requests(variables)):
                verdict = policy.judge(namespace, ask)
                if not verdict.allowed:
                    refused.append(verdict.rule)
        told = refusal(server, namespace, container(resources, variables))
        assert (told is None) == (not refused), (resources, variables, told, refused)
        for rule in refused:
            assert (f"rule {rule} denies it" if rule else "the default is deny") in str(told)


def hidden_id(**source: Any) -> list[dict[str, Any]]:
    return [
        {"name": "FPGA_REGION_1", "value": ID},
        {"name": "FPGA_AFU_1", "valueFrom": source},
    ]


KEY = {"name": "x", "key": "k"}
FIELD = hidden_id(fieldRef={"fieldPath": "metadata.annotations['a']"})
OPTIONAL = hidden_id(configMapKeyRef=KEY | {"optional": True})
CONFIG_MAP, SECRET = hidden_id(configMapKeyRef=KEY), hidden_id(secretKeyRef=KEY)
RESOURCE = hidden_id(resourceFieldRef={"resource": "limits.cpu", "divisor": "1m"})
REGION_HIDDEN = [
    {"name": "FPGA_REGION_1", "valueFrom": {"configMapKeyRef": KEY}},
    {"name": "FPGA_AFU_1", "value": AFU},
]
SECOND_HIDDEN = [
    *({"name": name, "value": value} for name, value in env().items()),
    {"name": "FPGA_REGION_2", "value": ID},
    {"name": "FPGA_BITSTREAM_ID_2", "valueFrom": {"secretKeyRef": KEY}},
]
OF_HIDDEN = [
    {"name": "A", "valueFrom": {"secretKeyRef": KEY}},
    {"name": "FPGA_REGION_1", "value": ID},
    {"name": "FPGA_AFU_1", "value": "$(A)"},
]
EMPTY = [
    {"name": "FPGA_REGION_1", "value": ID},
    {"name": "FPGA_AFU_1", "value": "", "valueFrom": {"secretKeyRef": KEY}},
]
EXPANDED = [
    {"name": "A", "value": AFU_3},
    {"name": "FPGA_REGION_1", "value": ID},
    {"name": "FPGA_AFU_1", "value": "$(A)"},
]
NAMED = [
    {"name": "FPGA_REGION_1", "value": ID},
    {"name": "FPGA_AFU_1", "value": "compress"},
]
TWICE = [
    {"name": "FPGA_REGION_1", "value": ID},
    {"name": "FPGA_AFU_1", "value": AFU_3},
    {"name": "FPGA_AFU_1", "value": AFU},
]


@pytest.mark.parametrize(
    "variables",
    [
        FIELD, CONFIG_MAP, OPTIONAL, SECRET, RESOURCE, REGION_HIDDEN, SECOND_HIDDEN, EMPTY,
        OF_HIDDEN, EXPANDED, NAMED, TWICE,
    ],
)  # fmt: skip
def test_a_hidden_request_is_refused_where_it_matters(
    source: str, server: ControlPlane, variables: Any
) -> None:
    assert refusal(server, "team-a", container((REGION,), variables)) is not None
    assert refusal(server, "lab", container((REGION,), variables)) is None


def test_a_bitstream_by_its_name_is_a_hidden_one(source: str, server: ControlPlane) -> None:
    told = refusal(server, "team-a", container((REGION,), NAMED))
    assert told is not None
    assert "does not spell out: rule debug-image denies it" in told


def test_a_request_made_of_a_file_is_refused(source: str, server: ControlPlane) -> None:
    variables = hidden_id(fileKeyRef={"volumeName": "v", "path": "f", "key": "k"})
    spec = {"volumes": [{"name": "v", "emptyDir": {}}]}
    told = refusal(server, "team-a", container((REGION,), variables), **spec)
    assert told is not None
    assert "does not spell out" in told
    assert refusal(server, "lab", container((REGION,), variables), **spec) is None


ELSEWHERE = [
    {"configMapRef": {"name": "x"}},
    {"configMapRef": {"name": "x", "optional": True}},
    {"secretRef": {"name": "x"}},
    {"prefix": "", "secretRef": {"name": "x"}},
    {"prefix": "F", "configMapRef": {"name": "x"}},
    {"prefix": "FPGA_", "configMapRef": {"name": "x"}},
    {"prefix": "FPGA_REGION_", "configMapRef": {"name": "x"}},
    {"prefix": "FPGA_AFU_2", "secretRef": {"name": "x"}},
    {"prefix": "FPGA_BITSTREAM_ID_2_", "secretRef": {"name": "x"}},
]
REGION_ONLY = {"FPGA_REGION_1": ID}


@pytest.mark.parametrize("elsewhere", ELSEWHERE, ids=str)
@pytest.mark.parametrize("variables", [{}, env(), REGION_ONLY, {"PATH": "/bin"}])
def test_variables_from_elsewhere_are_refused_whatever_env_names(
    source: str, server: ControlPlane, elsewhere: Any, variables: Any
) -> None:
    harmless = {"prefix": "APP_", "configMapRef": {"name": "y"}}
    both = container((REGION,), variables) | {"envFrom": [harmless, elsewhere]}
    told = refusal(server, "team-a", both)
    assert told is not None
    assert "does not spell out" in told
    assert refusal(server, "lab", both) is None  # every bitstream is allowed there
    assert refusal(server, "stranger", both) is not None


@pytest.mark.parametrize("prefix", ["APP_", "FPGA_DEVICE_", "FPGA_DRIVER_PARAMS_", "fpga_region_"])
def test_variables_that_cannot_be_requests_may_come_from_elsewhere(
    source: str, server: ControlPlane, prefix: str
) -> None:
    elsewhere = {"envFrom": [{"prefix": prefix, "secretRef": {"name": "x"}}]}
    assert refusal(server, "team-a", container((REGION,), env()) | elsewhere) is None
    assert refusal(server, "team-a", container((REGION,), env(AFU_3)) | elsewhere) is not None


def test_hidden_requests_of_containers_without_a_device_are_admitted(
    source: str, server: ControlPlane
) -> None:
    plain = {"name": "side", "image": "i", "envFrom": [{"secretRef": {"name": "x"}}]}
    assert refusal(server, "team-a", container((REGION,), env()), plain) is None


def test_kubernetes_gives_an_ephemeral_container_no_device(
    source: str, server: ControlPlane
) -> None:
    pods = "/api/v1/namespaces/team-a/pods"
    pod = {
        "metadata": {"name": "debugged"},
        "spec": {"containers": [container((REGION,), env())], "nodeName": "nobody"},
    }
    server.call("POST", pods, pod)
    debug = container((REGION,), env(AFU_3), "debug") | {"envFrom": [{"secretRef": {"name": "x"}}]}
    there = server.call("GET", f"{pods}/debugged")
    there["spec"]["ephemeralContainers"] = [debug]
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.call("PUT", f"{pods}/debugged/ephemeralcontainers", there)
    assert caught.value.code == 422
    assert "ephemeralContainers[0].resources: Forbidden" in caught.value.read().decode()
    server.call("DELETE", f"{pods}/debugged?gracePeriodSeconds=0")


def test_init_containers_count(source: str, server: ControlPlane) -> None:
    bad = container((REGION,), env(AFU_3), "first")
    told = refusal(server, "team-a", container((REGION,), env()), initContainers=[bad])
    assert told is not None
    assert "container first" in told
    for more in ({}, {"restartPolicy": "Always"}):
        hides = container((REGION,), env(), "first") | more | {"envFrom": [ELSEWHERE[0]]}
        told = refusal(server, "team-a", container((REGION,), env()), initContainers=[hides])
        assert told is not None
        assert "container first: " in told
        assert "does not spell out" in told


def test_pods_without_an_fpga_are_admitted(source: str, server: ControlPlane) -> None:
    assert refusal(server, "stranger", container(("example.com/gpu",), env())) is None
    assert refusal(server, "stranger", {"name": "app", "image": "i"}) is None


@pytest.mark.parametrize("value", ["'; true", "\n", "blank", "?", "*", "../..", "x" * 5000])
def test_values_of_tenants_are_only_compared(source: str, server: ControlPlane, value: str) -> None:
    told = refusal(server, "team-b-1", container((REGION,), env(value)))
    with pytest.raises(FpgaPluginError):  # the plugin refuses it whatever the policy says
        parse_requests(env(value))
    assert told is None or len(told) < 2000


def test_a_pod_with_many_variables_is_judged_like_others(source: str, server: ControlPlane) -> None:
    many = {f"X{n}": "y" for n in range(1000)}
    assert refusal(server, "team-a", container((REGION,), many | env())) is None
