"""Kubernetes Events on the real API server, by the rights of deploy/ and no others.

As a pod of the chart (`make test-image`) the plugin has the chart's service account anyway. As a
process it is given a token of the service account that the kustomization makes, with its role.
"""

import urllib.error
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from control_plane import ControlPlane
from daemon_support import AFU_2, CARD, P0, REGIONS, request
from machine import PLUGIN_IN_A_POD, until
from namespace import ROOT
from node import Node, container

api_server = pytest.mark.parametrize("make_node", ["api-server"], indirect=True)

KUSTOMIZE = ROOT / "deploy/kustomize"
NAMESPACE = "fpga-plugin"
ABSENT = "d" * 32
RBAC = "/apis/rbac.authorization.k8s.io/v1"
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts",
    "ClusterRole": f"{RBAC}/clusterroles",
    "ClusterRoleBinding": f"{RBAC}/clusterrolebindings",
}


def with_events_role() -> list[dict[str, Any]]:
    """What the kustomization with its component `events` grants."""
    objects = list(yaml.safe_load_all((KUSTOMIZE / "base/rbac.yaml").read_text()))
    component = yaml.safe_load((KUSTOMIZE / "components/events/kustomization.yaml").read_text())
    (patch,) = (p for p in component["patches"] if p.get("target", {}).get("kind") == "ClusterRole")
    (added,) = yaml.safe_load(patch["patch"])
    assert (added["op"], added["path"]) == ("add", "/rules/-")
    (role,) = (each for each in objects if each["kind"] == "ClusterRole")
    role["rules"].append(added["value"])
    return [{"kind": "Namespace", "metadata": {"name": NAMESPACE}}, *objects]


def service_account(control_plane: ControlPlane) -> str:
    """Credentials of the plugin's service account."""
    for each in with_events_role():
        name = each["metadata"]["name"]
        try:
            control_plane.call("POST", PATHS[each["kind"]], each)
        except urllib.error.HTTPError as error:
            if error.code != 409:  # of the test before
                raise
            control_plane.call("GET", f"{PATHS[each['kind']]}/{name}")
    asked = {"spec": {"audiences": ["https://kubernetes.default.svc"]}}
    path = f"{PATHS['ServiceAccount']}/{NAMESPACE}/token"
    token = control_plane.call("POST", path, asked)["status"]["token"]
    return control_plane.kubeconfig(token, name="service-account")


def posted(control_plane: ControlPlane, *, uid: str) -> list[dict[str, Any]]:
    """The plugin's Events about an object, as `kubectl describe` reads them."""
    items = control_plane.call("GET", "/api/v1/events")["items"]
    return [
        event
        for event in items
        if event["involvedObject"].get("uid") == uid
        and event.get("reportingComponent") == "fpga.intel.com/fpga-plugin"
    ]


@pytest.fixture
def node(make_node: Callable[..., Node], control_plane: ControlPlane) -> Node:
    """A node whose plugin posts Events, and knows which node it is on."""
    if PLUGIN_IN_A_POD:
        return make_node("1x1", events="true", health_interval="0.05")
    credentials = service_account(control_plane)
    node = make_node("1x1", events="true", health_interval="0.05", kubeconfig=credentials)
    node.plugin.stop()
    node.settings["NODE_NAME"] = "node"
    node.start_plugin()
    node.until_allocatable()
    return node


@api_server
def test_a_refused_pod_has_an_event_that_says_what_kubelet_was_told(
    node: Node, control_plane: ControlPlane
) -> None:
    pod = node.pod("asks", container(env=request(ABSENT)))
    (event,) = until(lambda: posted(control_plane, uid=pod.uid), "an Event of the pod")
    about = event["involvedObject"]
    assert {key: about[key] for key in ("kind", "namespace", "name", "uid")} == {
        "kind": "Pod", "namespace": "default", "name": "asks", "uid": pod.uid,
    }  # fmt: skip
    assert (event["reason"], event["type"]) == ("FpgaProgrammingRefused", "Warning")
    assert event["metadata"]["namespace"] == "default"
    assert ABSENT in event["message"]
    told = node.plugin.until_logged("call refused", method="PreStartContainer", status="NOT_FOUND")
    assert event["message"] == told["message"]
    assert not node.plugin.logged("events cannot be posted")


@api_server
def test_a_failed_card_is_news_of_the_node(node: Node, control_plane: ControlPlane) -> None:
    faults = node.state / "simulated/faults"
    faults.mkdir(exist_ok=True)
    (faults / P0).write_text("thermal")
    node.until_offered(REGIONS, [])

    def told(reason: str) -> list[dict[str, Any]]:
        return [e for e in posted(control_plane, uid="node") if e["reason"] == reason]

    (event,) = until(lambda: told("FpgaCardFailed"), "an Event of the node")
    assert event["involvedObject"]["kind"] == "Node"
    assert event["involvedObject"]["name"] == "node"
    assert event["metadata"]["namespace"] == "default"
    assert CARD in event["message"]
    (faults / P0).unlink()
    node.until_offered(REGIONS, [P0])
    assert until(lambda: told("FpgaCardRecovered"), "another when it recovered")
    node.pod("next", container(env=request(AFU_2))).until_running()


@api_server
@pytest.mark.skipif(PLUGIN_IN_A_POD, reason="the chart grants what it switches on")
def test_without_the_right_pods_are_served_and_the_log_says_what_is_missing(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x1", events="true")  # as a user who may get pods, and nothing else
    node.pod("refused", container(env=request(ABSENT)))
    line = node.plugin.until_logged("events cannot be posted")
    assert "403" in line["error"]
    assert "create and patch on events.k8s.io" in line["hint"]


@pytest.mark.parametrize(
    ("verb", "group", "resource", "allowed"),
    [
        # The ids say on which of the nodes of `make test-kubelet` this runs.
        pytest.param(*row, id=f"api-server-{row[0]}-{row[2]}")
        for row in (
            ("create", "events.k8s.io", "events", True),
            ("patch", "events.k8s.io", "events", True),
            ("get", "", "pods", True),
            ("list", "", "pods", False),
            ("delete", "", "pods", False),
            ("get", "", "secrets", False),
            ("patch", "", "nodes", False),
        )
    ],
)
def test_the_role_allows_what_the_plugin_does_and_no_more(
    control_plane: ControlPlane, *, verb: str, group: str, resource: str, allowed: bool
) -> None:
    service_account(control_plane)
    answer = control_plane.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {
        "spec": {
            "user": f"system:serviceaccount:{NAMESPACE}:fpga-plugin",
            "resourceAttributes": {
                "namespace": "default", "verb": verb, "group": group, "resource": resource,
            },
        },
    })  # fmt: skip
    assert answer["status"]["allowed"] is allowed
