"""The chart's pod with the door of DRA: its image, its sandbox, its service account and its policy.

`make test-image` runs these. What is not shown anywhere else is that these four go together: the
token that kubelet gives the pod names its node, so that the policy lets it write its slices.
"""

import urllib.error
from collections.abc import Iterator

import pod_plugin
import pytest
from daemon_support import AFU, AFU_2, BLANK, CARD, P0, P1
from machine import PLUGIN_IN_A_POD, Runtime, until
from pods_node import API, Cluster, Node, running

pytestmark = pytest.mark.skipif(
    not PLUGIN_IN_A_POD, reason="needs the image and the chart's pod: make test-image"
)

ID = "ce48969398f05f33946d560708be108a"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"


class ChartCluster(Cluster):
    """Where helm makes the classes, the rights and the policy."""

    def install(self) -> None:
        """Nothing: the chart does."""


@pytest.fixture
def node(runtime: Runtime) -> Iterator[Node]:
    pod_plugin.load_image(runtime)
    cluster = ChartCluster()
    node = Node(runtime, "1x2", cluster)
    node.chart["deviceClasses.interfaceIDs"] = f"{{{ID}}}"
    try:
        yield node.up()
    finally:
        node.close()
        cluster.end()


def test_a_claims_life_by_the_charts_pod(node: Node) -> None:
    cluster = node.cluster
    bindings = cluster.call("GET", f"{ADMISSION}/validatingadmissionpolicybindings")["items"]
    assert {each["metadata"]["name"]: each["spec"]["validationActions"] for each in bindings} == {
        "fpga-plugin-resourceslices": ["Deny"],
        "fpga-plugin-regionconfigs": ["Deny"],
    }
    (role,) = [
        each["rules"]
        for each in cluster.call("GET", f"{RBAC}/clusterroles")["items"]
        if each["metadata"]["name"] == "fpga-plugin"
    ]
    assert not [rule for rule in role if "secrets" in rule["resources"]]
    confined = node.plugin.until_logged("the plugin is confined")
    assert confined["capabilities"] == "none left"

    pod, _ = running(node)
    assert node.afu(P0) == AFU
    assert pod.output() == "opened"

    # Another pod of the plugin: the first container runs on, and a second claim is served.
    life = node.plugin
    assert isinstance(life, pod_plugin.PodPlugin)
    life.delete()
    node.start_plugin()
    node.plugin.until_logged("driver registered with kubelet")
    second, _ = running(node, "second", AFU_2)
    assert (node.afu(P0), node.afu(P1)) == (AFU, AFU_2)
    assert pod.container()["restartCount"] == 0

    for each in (pod, second):
        each.delete()
        each.until_gone()
    node.until_free(P0, P1, CARD)
    assert (node.afu(P0), node.afu(P1)) == (BLANK, BLANK)
    assert not cluster.events("FailedPrepareDynamicResources")

    # The pod's own token names its node; with one that names none nobody may write a slice.
    account = f"/api/v1/namespaces/{pod_plugin.NAMESPACE}/serviceaccounts/fpga-plugin/token"
    token = cluster.call("POST", account, {"spec": {}})["status"]["token"]
    written = cluster.call("GET", f"{API}/resourceslices")["items"][0]
    path = f"{API}/resourceslices/{written['metadata']['name']}"
    refused = until(lambda: refusal(cluster, token, path), "the policy refuses")
    assert "names no node" in refused


def refusal(cluster: Cluster, token: str, path: str) -> str:
    """What the API server says to who deletes something with this token."""
    try:
        cluster.call("DELETE", f"{path}?dryRun=All", token=token)
    except urllib.error.HTTPError as error:
        return error.read().decode()
    return ""
