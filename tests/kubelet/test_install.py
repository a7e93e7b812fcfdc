"""The documents' installs, word by word: their own commands on a real cluster, by kubectl and helm.

What is in the documents' blocks is run as it stands there, but for three names (REGISTRY, NODE and
the release's version) and for what builds and pushes the image. There is one kubelet, so a second
node (`OtherNode`) is one by its object alone. `make test-image` runs these.
"""

import sys
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from control_plane import ControlPlane
from daemon_support import CARDS, REGIONS
from machine import PLUGIN_IN_A_POD, Runtime, until
from typed_cluster import (
    KUBECTL,
    TENANT,
    Cluster,
    blocks,
    gone,
    inline,
    looked,
    offers_nothing,
    uninstalled,
)

pytestmark = pytest.mark.skipif(
    not PLUGIN_IN_A_POD or not KUBECTL.exists(),
    reason="needs the image, kubectl and controllers: make test-image",
)


class OtherNode:
    """A second node, without a kubelet: of its pods a thread says that they run, and have ended."""

    NAME = "other"

    def __init__(self, control_plane: ControlPlane) -> None:
        self._call, self._ended = control_plane.call, threading.Event()
        label = "feature.node.kubernetes.io/fpga-dfl.present"
        labels = {"kubernetes.io/os": "linux", "kubernetes.io/hostname": self.NAME, label: "true"}
        self._call("POST", "/api/v1/nodes", {"metadata": {"name": self.NAME, "labels": labels}})
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def pods(self) -> list[dict[str, Any]]:
        listed = self._call("GET", f"/api/v1/pods?fieldSelector=spec.nodeName={self.NAME}")
        return list(listed["items"])

    def _run(self) -> None:
        while not self._ended.wait(0.3):
            # Somebody else may have changed or removed it meanwhile; there is a next time.
            with suppress(OSError):
                self._says_that_it_is_well()
                for pod in self.pods():
                    with suppress(urllib.error.HTTPError):
                        self._plays(pod)

    def _says_that_it_is_well(self) -> None:
        path = f"/api/v1/nodes/{self.NAME}"
        node = self._call("GET", path)
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        ready = {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": now}
        room = {"cpu": "8", "memory": "8Gi", "pods": "16"}
        node["status"] |= {"conditions": [ready], "capacity": room, "allocatable": room}
        self._call("PUT", f"{path}/status", node)

    def _plays(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if "deletionTimestamp" in metadata:
            self._call("DELETE", path, {"gracePeriodSeconds": 0})
        elif pod["status"].get("phase") != "Running":
            ready = [{"type": name, "status": "True"} for name in ("Ready", "ContainersReady")]
            pod["status"] |= {"phase": "Running", "conditions": ready}
            self._call("PUT", f"{path}/status", pod)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._call("DELETE", f"/api/v1/nodes/{self.NAME}")


def observes(pod: dict[str, Any]) -> bool:
    (container,) = pod["spec"]["containers"]
    return {"name": "FPGA_PLUGIN_OBSERVE", "value": "true"} in container["env"]


@pytest.fixture
def other(cluster: Cluster) -> Iterator[OtherNode]:
    made = OtherNode(cluster.control_plane)
    yield made
    made.close()


@pytest.fixture(scope="module", params=["api-server"])
def cluster(runtime: Runtime, control_plane: ControlPlane) -> Iterator[Cluster]:
    made = Cluster(runtime, control_plane)
    yield made
    made.close()


def test_the_ten_minutes_of_the_install(cluster: Cluster) -> None:
    prepare, look, serve, attempt = blocks("install.md", "Install in ten minutes")
    (label,) = inline("install.md", "Install in ten minutes", "kubectl label node")
    cluster.types(prepare)
    cluster.types(label)
    cluster.types(look)
    told = looked(cluster, look)
    assert "would_wipe" in told
    until(lambda: offers_nothing(cluster), "nothing is offered")
    told = cluster.types(serve)
    assert "Phase:          Succeeded" in told
    # Kubelet reports the API server some seconds later, as the document says.
    nodes = next(line for line in serve.splitlines() if line.strip().startswith("kubectl get"))
    until(lambda: f"{REGIONS}:2" in cluster.types(nodes), "the node's regions are told")
    until(lambda: f"{CARDS}:1" in cluster.types(nodes), "the node's card is told")
    start, runs, logs, end = attempt.splitlines()
    assert logs.startswith("kubectl logs")
    # The program of this pod goes on, unlike the tutorial's.
    cluster.types(f"{start}\n{runs.replace('Succeeded', 'Running')}")
    # Of the pods that use FPGAs, one does so only in an init container.
    init = {"name": "init", "image": TENANT, "resources": {"limits": {CARDS: "1"}}}
    cluster.control_plane.create_pod({
        "metadata": {"name": "waits"},
        "spec": {
            "initContainers": [init],
            "containers": [{"name": "app", "image": TENANT}],
            "schedulerName": "nobody",
        },
    })  # fmt: skip
    using, claims, _ = blocks("install.md", "Uninstall")
    cluster.types(claims)
    assert cluster.types(using).split() == ["default/region", "default/waits"]
    cluster.types(f"kubectl delete pod waits\n{end}")
    # The whole fleet at a glance, by the API server's own proxy.
    cluster.types(
        "helm upgrade fpga-plugin deploy/helm/fpga-plugin --namespace fpga-plugin"
        " --reset-then-reuse-values --set settings.FPGA_PLUGIN_STATUS_PAGE=true\n"
        "kubectl --namespace fpga-plugin rollout status daemonset"
        " --selector app.kubernetes.io/part-of=fpga-plugin"
    )

    def node_in_fleet() -> list[str]:
        told = cluster.types(f"{sys.executable} -m fpga_plugin fleet")
        head, line, total = told.splitlines()
        assert head.startswith("NODE")
        assert total.startswith("1 of 1 nodes")
        return line.split()

    # The region of the pod that ended is scrubbed, and nobody's.
    unused = ["node", "fpga-plugin", "ready", "1", "2", "0", "2"]
    until(lambda: node_in_fleet()[:7] == unused, "no region of the node is used")
    uninstalled(cluster)


def test_the_install_without_helm(cluster: Cluster) -> None:
    look, serve = blocks("install.md", "Install without helm")
    (label,) = inline("install.md", "Install in ten minutes", "kubectl label node")
    (remove,) = inline("install.md", "Install without helm", "kubectl delete")
    cluster.types(f"{label} --overwrite")
    cluster.types(look)
    assert "would_wipe" in looked(cluster, look)
    until(lambda: offers_nothing(cluster), "nothing is offered")
    cluster.types(serve)
    until(lambda: cluster.allocatable().get(REGIONS) == "2", "its regions are allocatable")
    cluster.types(remove)
    until(lambda: gone(cluster), "the namespace is gone")


def test_the_migration_of_a_node_leaves_another_that_serves_alone(
    cluster: Cluster, other: OtherNode
) -> None:
    install, look = blocks("migration.md", "Taking over a node")
    cluster.types("kubectl create namespace fpga-plugin")  # as install.md begins
    cluster.types("kubectl label node node feature.node.kubernetes.io/fpga-dfl.present-")
    cluster.types(install)
    (serving,) = until(other.pods, "the node that is done serves")
    assert not observes(serving)
    cordon, label, uncordon = (
        inline("migration.md", "Taking over a node", f"kubectl {word}")[0]
        for word in ("cordon", "label", "uncordon")
    )
    cluster.types(cordon)
    cluster.types(look)
    looked(cluster, look)
    here = "/api/v1/namespaces/fpga-plugin/pods?fieldSelector=spec.nodeName=node"
    assert [observes(one) for one in cluster.control_plane.call("GET", here)["items"]] == [True]
    cluster.types(f"{label}\n{uncordon}")
    rollout = next(line for line in look.splitlines() if " rollout status " in line)
    cluster.types(rollout)
    until(lambda: cluster.allocatable().get(REGIONS) == "2", "its regions are allocatable")
    (still,) = other.pods()
    assert still["metadata"]["uid"] == serving["metadata"]["uid"], "never out of service"
    uninstalled(cluster)
