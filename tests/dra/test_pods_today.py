"""What Kubernetes 1.36 and 1.37 brought: evictions, restarts of whole pods, device metadata."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from daemon_support import AFU, AFU_2, BLANK, CARD, P0, request
from machine import LIMIT, RELEASE, STAY, until
from namespace import BUILT
from node import container as by_limits
from pods_node import (
    API,
    DRIVER,
    OPENS,
    Node,
    by_claim,
    by_template,
    container,
    dns,
    waiting,
)
from test_pods import arm

RULES = f"{API}/devicetaintrules"

READER = [{"name": "reader", "hostPath": {"path": str(BUILT / "containerd")}}]
READS = [{"name": "reader", "mountPath": "/reader", "readOnly": True}]


def test_who_asks_by_limits_is_evicted_from_broken_hardware_or_hears_that_nobody_does(
    make_node: Callable[..., Node],
) -> None:
    """By claim, every version that has device taints evicts: `test_pods.py`."""
    node = make_node("1x1")
    arm(node, "pr-stuck")
    pod = node.pod("asks", by_limits(env=request(), command=STAY))
    node.until_refused("PR")
    if RELEASE >= (1, 37):  # 1.37.2; of 1.36 the newest that is built here is 1.36.3
        pod.until_gone()
        assert not node.plugin.logged("pod not evicted")
        return
    (told,) = waiting(lambda: node.plugin.logged("pod not evicted"), "kubelet asks again")
    assert "evicts no pod that asks by limits" in str(told["reason"])
    (taint,) = node.devices()[dns(P0)]["taints"]
    assert (taint["key"], taint["effect"]) == (f"{DRIVER}/faulted", "NoExecute")
    assert node.phase(pod) == "Pending"


@pytest.mark.skipif(RELEASE < (1, 37), reason="resource.k8s.io/v1 has DeviceTaintRules since 1.37")
@pytest.mark.parametrize("by", ["claim", "limits"])
def test_a_rule_of_the_cluster_drains_a_device(make_node: Callable[..., Node], by: str) -> None:
    """Its pod goes, its region is scrubbed and given to nobody, until the rule is deleted."""
    node = make_node("1x1")
    if by == "claim":
        pod = node.asks("asks", command=OPENS, bitstream=AFU)
    else:
        pod = node.pod("asks", by_limits(env=request(), command=OPENS + STAY))
    pod.until_running()
    taint = {"key": "example.com/maintenance", "effect": "NoExecute"}
    of_card = {"driver": DRIVER, "pool": "node", "device": dns(P0)}
    rule = {
        "metadata": {"name": "maintenance"},
        "spec": {"deviceSelector": of_card, "taint": taint},
    }
    node.cluster.call("POST", RULES, rule)
    try:
        pod.until_gone()
        until(lambda: node.afu(P0) == BLANK and not node.allocated(), "its region is scrubbed")
        until(lambda: dns(P0) in node.free(), "the driver has nothing against it")
        waits = node.asks("waits", bitstream=AFU_2)
        until(lambda: node.cluster.events("FailedScheduling"), "the scheduler has nothing for it")
        assert not waits.seen(), "kubelet does not hear of it"
        assert node.afu(P0) == BLANK
    finally:
        node.cluster.call("DELETE", f"{RULES}/maintenance")
    waits.until_running()
    assert node.afu(P0) == AFU_2


def test_a_pod_that_restarts_all_containers_runs_its_init_container_again_without_a_call(
    make_node: Callable[..., Node],
) -> None:
    """RestartAllContainers (KEP-5532): both find what was prepared, as it was left."""
    node = make_node("1x1")
    template = node.template("one", bitstream=AFU)
    shared = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
    init = container("echo run >>/shared/runs; exit 0;", name="init", **shared)
    fails = '[ "$(wc -l </shared/runs)" = 1 ] && exit 42; echo "runs again";'
    rule = {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}
    main = container(OPENS + fails, **shared) | {
        "restartPolicy": "Never",
        "restartPolicyRules": [rule],
    }
    pod = node.pod(
        "asks",
        main,
        initContainers=[init],
        volumes=[{"name": "shared", "emptyDir": {}}],
        resourceClaims=[by_template(template)],
        restartPolicy="Never",
    )
    until(lambda: pod.output().endswith("runs again"), "the pod runs again", limit=2 * LIMIT)
    assert len(node.served("NodePrepareResources")) == 1
    assert len(node.prepared(P0)) == 1, "and nothing is programmed"
    assert node.afu(P0) == AFU
    pod.delete()
    pod.until_gone()
    node.until_free(P0, CARD)
    assert node.afu(P0) == BLANK


def test_an_init_container_that_needs_another_image_is_refused(
    make_node: Callable[..., Node],
) -> None:
    """By limits both have one request: a pod that restarts whole could have one image only."""
    node = make_node("1x1")
    other = by_limits("init", env=request(afu=AFU_2), command="exit 0;")
    pod = node.pod("asks", by_limits(env=request(), command=STAY), initContainers=[other])
    node.until_refused("share a device and ask for different bitstreams")
    assert (node.phase(pod), node.afu(P0)) == ("Pending", BLANK)


def read(pod: Any) -> dict[str, Any]:
    """What upstream's package read in a container."""
    until(pod.output, "the reader has said something")
    found: dict[str, Any] = json.loads(pod.output().splitlines()[0])
    return found


@pytest.mark.parametrize("kind", ["claim", "template"])
def test_upstreams_own_package_reads_the_metadata_of_a_slots_claim(
    make_node: Callable[..., Node], kind: str
) -> None:
    """By the path that a container knows: what its pod calls the claim, or the claim's name."""
    function = "0000:10:00.1"
    node = make_node("1x1+ofs", slot_functions=f"{CARD}={function}")
    if kind == "claim":
        name, of_pod = (made := node.claim("mine", bitstream=AFU)), by_claim(made)
    else:
        name, of_pod = "fpga", by_template(node.template("one", bitstream=AFU))
    command = f"/reader/read-metadata {kind} {name} fpga;"
    main = container(command, volumeMounts=READS)
    pod = node.pod("asks", main, resourceClaims=[of_pod], volumes=READER)
    pod.until_running()
    told = read(pod)
    (asked,) = told["Requests"]
    (device,) = asked["Devices"]
    assert (asked["Name"], device["Driver"], device["Pool"]) == ("fpga", DRIVER, "node")
    assert device["Name"] == dns(P0)
    assert device["Attributes"]["resource.kubernetes.io/pciBusID"] == {"string": function}
    assert device["Attributes"]["type"] == {"string": "region"}


def test_a_request_of_two_devices_is_read_by_upstreams_own_package(
    make_node: Callable[..., Node],
) -> None:
    """The runtime gets the mount with each of them, and mounts it once."""
    node = make_node("1x2")
    spec = {"requests": [{"name": "fpga", "exactly": {
        "deviceClassName": "fpga-region-ce489693", "count": 2}}]}  # fmt: skip
    path = f"{API}/namespaces/default/resourceclaims"
    node.cluster.call("POST", path, {"metadata": {"name": "both"}, "spec": {"devices": spec}})
    main = container("/reader/read-metadata claim both fpga;", volumeMounts=READS)
    claims = [by_claim("both")]
    pod = node.pod("asks", main, resourceClaims=claims, volumes=READER)
    pod.until_running()
    (devices,) = [asked["Devices"] for asked in read(pod)["Requests"]]
    assert [one["Name"] for one in devices] == [dns(P0), dns(f"{CARD}-p1")]
    assert all("resource.kubernetes.io/pciBusID" not in one["Attributes"] for one in devices)
