"""Whom the real controllers evict for a device's taint: pods by claim, and pods by limits.

Without kubelet: what is deleted has a time of deletion. With it: test_pods_today.py.
"""

import os
import time
from collections.abc import Iterator

import pytest
from cluster import Cluster, until
from doubles.cards import REGIONS, make_card
from test_dra_steps import owner
from test_slices import API, DRIVER, Node, allocated, asking, bound, node

from fpga_plugin.dra.names import parse_device_name
from fpga_plugin.ids import RegionId
from fpga_plugin.kubernetes.names import ClaimUid, PodUid

CARD = make_card(7, nodes=(40, 41))
RELEASE = tuple(map(int, os.environ.get("FPGA_DRA", "1.36").split(".")))
LIMITS_ARE_EVICTED = RELEASE >= (1, 37)
"""kubernetes/kubernetes#141290 is mended in 1.37.2, and not in 1.36.3."""


@pytest.fixture
def here(classes: Cluster) -> Iterator[Node]:
    """A node of one card, both regions given out: to a pod by claim, and to one by limits."""
    with node(classes, (CARD,)) as here:
        limited = {"name": "main", "image": "none", "resources": {"limits": {REGIONS: "1"}}}
        here.cluster.add_pod("by-claim", **asking("region", here))
        until(lambda: bound(classes, "by-claim"), "the pod by claim is bound")
        selector = {"kubernetes.io/hostname": here.name}
        here.cluster.add_pod("by-limits", nodeSelector=selector, containers=[limited])
        until(lambda: bound(classes, "by-limits"), "the pod by limits is bound")
        yield here
        for name in ("by-claim", "by-limits"):
            if classes.pod(name) is not None:
                classes.delete_pod(name)
        until(lambda: not allocated(classes), "the claims are free")


def evicted(cluster: Cluster, name: str) -> bool:
    pod = cluster.pod(name)
    return pod is None or "deletionTimestamp" in pod["metadata"]


def fail_in_prepare(here: Node) -> None:
    """What the plugin does when the PR of each claim's region fails."""
    for claim in here.cluster.claims():
        (result,) = claim["status"]["allocation"]["devices"]["results"]
        one = parse_device_name(result["device"])
        uid = ClaimUid(claim["metadata"]["uid"])
        pod = PodUid(claim["status"]["reservedFor"][0]["uid"])
        here.ledger.dra.take(owner(uid, one), [pod])
        here.ledger.work.working([RegionId(one)])
        here.ledger.work.faulted(RegionId(one), "PR failed")


def test_a_device_that_failed_before_the_pod_started_evicts_it(here: Node) -> None:
    here.do(lambda: fail_in_prepare(here))
    until(lambda: evicted(here.cluster, "by-claim"), "the pod by claim is evicted")
    effects = [one["taints"][0]["effect"] for one in here.devices().values() if "taints" in one]
    assert effects.count("NoExecute") == 2, "of both regions"
    if LIMITS_ARE_EVICTED:
        until(lambda: evicted(here.cluster, "by-limits"), "the pod by limits is evicted")
        return
    time.sleep(3)
    assert not evicted(here.cluster, "by-limits"), "docs/dra.md says otherwise of this version"


@pytest.mark.skipif(RELEASE < (1, 37), reason="resource.k8s.io/v1 has DeviceTaintRules since 1.37")
def test_a_rule_of_the_cluster_evicts_both_and_keeps_others_away(here: Node) -> None:
    """As docs/dra.md tells it: for a node, without a device."""
    rule = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceTaintRule",
        "metadata": {"name": "maintenance"},
        "spec": {
            "deviceSelector": {"driver": DRIVER, "pool": here.name},
            "taint": {"key": "example.com/maintenance", "effect": "NoExecute"},
        },
    }
    cluster = here.cluster
    cluster.call("POST", f"{API}/devicetaintrules", rule)
    try:
        for name in ("by-claim", "by-limits"):
            until(lambda name=name: evicted(cluster, name), f"{name} is evicted")
            cluster.delete_pod(name)
        until(lambda: not allocated(cluster), "the claims are free")
        assert not any("taints" in one for one in here.devices().values()), "the slices say nothing"
        cluster.add_pod("by-claim", **asking("region", here))
        until(lambda: held_back(cluster, "by-claim"), "the scheduler has nothing for it")
    finally:
        cluster.call("DELETE", f"{API}/devicetaintrules/maintenance")
    until(lambda: bound(cluster, "by-claim"), "and now it has")


def held_back(cluster: Cluster, name: str) -> bool:
    """Whether the scheduler has said that it has nothing for a pod."""
    pod = cluster.pod(name)
    conditions = [] if pod is None else pod["status"].get("conditions", [])
    return any(one["reason"] == "Unschedulable" for one in conditions if one["status"] == "False")
