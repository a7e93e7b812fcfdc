"""A node goes from one API to the other and back, as docs/dra.md reports it, under real pods.

Kubelet keeps a device plugin's resources for five minutes after the plugin went. The test waits for
that: until then 1.36 does not start containers by limits whose devices come by DRA.
"""

from collections.abc import Callable

from daemon_support import AFU, AFU_2, BLANK, CARD, P0, P1, REGIONS, request
from machine import LIMIT, STAY, until
from node import Pod
from node import container as by_limits
from pods_node import CDI, DRIVER, OPENS, Node, by_claim, container, dns, users
from records import podresources

FORGETS = 300.0
"""Seconds for which kubelet keeps a device plugin's resources (devicemanager, endpoint.go)."""

LOOKS = 30.0
"""Seconds between two looks of the device plugin API at what ResourceClaims have."""

ASKING = by_limits(
    env=request(), command=f'exec 3<>"$FPGA_DEVICE_1" && echo "opened $FPGA_DEVICE_1"; {STAY}'
)
"""The container of every pod by limits: what it asks for does not change with the API."""


def change(node: Node, mode: str) -> None:
    """Start the plugin again, with the other API."""
    assert node.plugin.stop() == 0
    node.settings["FPGA_PLUGIN_MODE"] = mode
    node.start_plugin()


def test_a_node_changes_its_api_and_its_pods_run_on(make_node: Callable[..., Node]) -> None:
    """There and back: what pods have is kept back until they are gone, and the rest is served."""
    node = make_node("1x2", mode="device-plugin")
    old = node.pod("old", ASKING)
    to_dra_under(node, old)
    until(
        lambda: node.counted("capacity", REGIONS) == 0,
        "kubelet forgot the device plugin",
        limit=FORGETS + LIMIT,
    )
    new = node.pod("new", ASKING)
    new.until_running()
    assert list(node.allocated().values()) == [[dns(P0)]]
    ends(node, new)
    to_device_plugin_under_a_shared_claim(node)
    change(node, "device-plugin")
    node.until_allocatable()
    until(lambda: node.counted("allocatable", REGIONS) == 2, "both by the device plugin API")
    last = node.pod("last", ASKING)
    last.until_running()
    assert last.devices() == {REGIONS: [P0]}
    assert not node.allocated()
    assert (node.afu(P0), node.afu(P1)) == (AFU, BLANK)
    until(lambda: last.output() == "opened /dev/dfl-port.0", "the container has its port")


def to_dra_under(node: Node, old: Pod) -> None:
    """A pod has a region by limits: pods by claims get the other one, and this one afterwards."""
    ran = old.until_running()
    assert old.devices() == {REGIONS: [P0]}
    change(node, "dra")
    until(lambda: node.counted("allocatable", REGIONS) == 0, "none by the device plugin API")
    node.until_allocatable()
    held = {("held", "device-plugin")}
    until(lambda: taints(node, P0) == taints(node, CARD) == held, "what the pod has is held back")
    claimed = node.asks("claimed", bitstream=AFU_2)
    claimed.until_running()
    waits = node.asks("waits", bitstream=AFU_2)
    until_unschedulable(node, waits)
    assert list(node.allocated().values()) == [[dns(P1)]]
    assert (old.until_running(), node.afu(P0)) == (ran, AFU)
    assert not node.plugin.logged("region scrubbed", region=P0)
    assert old.output() == "opened /dev/dfl-port.0"
    old.delete()
    old.until_gone()
    podresources()  # kubelet forgets the devices of pods that are gone when it is asked for them
    waits.until_running()
    assert node.plugin.logged("region scrubbed", region=P0)
    assert node.afu(P0) == AFU_2
    ends(node, claimed, waits)


def to_device_plugin_under_a_shared_claim(node: Node) -> None:
    """Two pods share a claim: one ends while the device plugin API serves, the other runs on."""
    claim = node.claim("shared", bitstream=AFU_2)
    first, second = (
        node.pod(name, container(OPENS), resourceClaims=[by_claim(claim)])
        for name in ("first", "second")
    )
    first.until_running()
    ran = second.until_running()
    assert node.allocated() == {claim: [dns(P0)]}
    until(lambda: second.output() == "opened", "the container has its port")
    uid = node.cluster.claims()[claim]["metadata"]["uid"]
    file = CDI / f"k8s.{DRIVER}-claim_{uid}.json"
    change(node, "device-plugin")
    node.until_offered(REGIONS, [P1])
    until(lambda: node.counted("allocatable", REGIONS) == 1, "one by the device plugin API")
    assert users(node) >= {first.uid, second.uid}
    first.delete()
    first.until_gone()
    rest = node.pod("rest", ASKING)
    rest.until_running()
    assert rest.devices() == {REGIONS: [P1]}
    until(lambda: rest.output() == "opened /dev/dfl-port.1", "the container has its port")
    waits = node.pod("waits", ASKING)
    until_unschedulable(node, waits)
    until(
        lambda: first.uid not in users(node),
        "the plugin knows that the first pod is gone",
        limit=LOOKS + LIMIT,
    )
    assert second.uid in users(node)
    assert (second.until_running(), node.afu(P0), file.exists()) == (ran, AFU_2, True)
    assert not node.plugin.logged("region scrubbed", region=P0)
    assert not node.plugin.logged("claim ended without a call")
    node.until_offered(REGIONS, [P1])
    for pod in (waits, rest):
        pod.delete()
        pod.until_gone()
    change(node, "dra")
    node.until_allocatable()
    assert (second.until_running(), node.afu(P0), file.exists()) == (ran, AFU_2, True)
    ends(node, second)
    assert len(node.served("NodeUnprepareResources")) == 1
    assert (node.afu(P0), file.exists()) == (BLANK, False)


def ends(node: Node, *pods: Pod) -> None:
    """Delete the last pods of the node, which is free then."""
    for pod in pods:
        pod.delete()
    for pod in pods:
        pod.until_gone()
    node.until_free(P0, P1, CARD)


def taints(node: Node, device: str) -> set[tuple[str, str]]:
    """Of a device in the slices: keys without their domain, and values."""
    found = node.devices()[dns(device)].get("taints", ())
    return {(one["key"].rpartition("/")[2], one.get("value", "")) for one in found}


def until_unschedulable(node: Node, pod: Pod) -> None:
    """Wait until the scheduler says that the node has nothing for a pod."""
    path = f"/api/v1/namespaces/default/pods/{pod.name}"

    def told() -> bool:
        conditions = node.cluster.call("GET", path)["status"].get("conditions", ())
        return any(one.get("reason") == "Unschedulable" for one in conditions)

    until(told, f"the scheduler has nothing for {pod.name}")
    assert not pod.seen()
