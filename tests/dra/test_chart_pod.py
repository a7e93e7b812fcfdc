"""The chart's pod with the DRA driver: its image, its sandbox, its service account and its policy.

`make test-image` runs these. What is not shown anywhere else is that these four go together: the
token that kubelet gives the pod names its node, so that the policy lets it write its slices.
"""

import os
import subprocess
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pod_plugin
import pytest
from daemon_support import AFU, AFU_2, BLANK, CARD, P0, P1
from machine import KUBELET_DIR, PLUGIN_IN_A_POD, Runtime, until
from pod_plugin import plugin_of
from pods_node import (
    API,
    DRIVER,
    OPENS,
    RECORD,
    Cluster,
    Node,
    by_claim,
    container,
    running,
    users,
)

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
    plugin_of(node).delete()
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


def test_of_kubelets_directory_the_charts_pod_sees_its_record_and_nothing_of_others(
    node: Node,
) -> None:
    claim = node.claim("shared", bitstream=AFU)
    first = node.pod("first", container(OPENS), resourceClaims=[by_claim(claim)])
    first.until_running()
    volume = KUBELET_DIR / "plugins" / "of.another.driver"  # as a driver of volumes has them there
    volume.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "volume", volume], check=True)
    # The next pod of the plugin begins with what is mounted by then.
    plugin_of(node).delete()
    node.start_plugin()
    node.plugin.until_logged("driver registered with kubelet")
    process = Path("/proc", str(plugin_of(node).pid()))
    seen = process / "root" / KUBELET_DIR.relative_to("/")

    for name in ("pods", "pki"):
        assert list((KUBELET_DIR / name).iterdir()), "kubelet has something there"
        assert not list((seen / name).iterdir())
    assert [path.name for path in (seen / "plugins").iterdir()] == [DRIVER]
    with pytest.raises(OSError, match="Read-only file system"):
        (seen / "file").touch()
    with pytest.raises(OSError, match="Read-only file system"):
        (seen / RECORD.name).open("a")

    # A further pod of a prepared claim: kubelet's record alone names it.
    with RECORD.open() as before:
        second = node.pod("second", container(OPENS), resourceClaims=[by_claim(claim)])
        second.until_running()
        assert not os.fstat(before.fileno()).st_nlink, "kubelet replaced it by a rename"
    assert (seen / RECORD.name).read_text() == RECORD.read_text()
    until(lambda: users(node) == {first.uid, second.uid}, "the plugin knows of both pods")

    # What is unmounted on the node does not stay in use by the plugin's pod.
    mounted = process / "mountinfo"
    assert str(volume) in mounted.read_text()
    subprocess.run(["umount", volume], check=True)
    assert str(volume) not in mounted.read_text()
    for pod in (first, second):
        pod.delete()
        pod.until_gone()
    node.until_free(P0, P1, CARD)


def refusal(cluster: Cluster, token: str, path: str) -> str:
    """What the API server says to who deletes something with this token."""
    try:
        cluster.call("DELETE", f"{path}?dryRun=All", token=token)
    except urllib.error.HTTPError as error:
        return error.read().decode()
    return ""
