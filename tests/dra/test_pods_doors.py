"""A node goes from one door to the other and back, as docs/dra.md tells it, under real pods.

Kubelet keeps a device plugin's resources for five minutes after the plugin went. The test waits for
that: until then 1.36 does not start containers by limits whose devices come by the other door.
"""

from collections.abc import Callable

from daemon_support import AFU, BLANK, CARD, CARDS, P0, P1, REGIONS, request
from machine import LIMIT, STAY, until
from node import Pod
from node import container as by_limits
from pods_node import OPENS, Node

FORGETS = 300.0
"""Seconds for which kubelet keeps a device plugin's resources (devicemanager, endpoint.go)."""


ASKING = by_limits(env=request(), command=OPENS + STAY)
"""The container of every pod by limits: what it asks for does not change with the door."""


def door(node: Node, mode: str) -> None:
    """Start the plugin anew, with the other door."""
    assert node.plugin.stop() == 0
    node.settings["FPGA_PLUGIN_MODE"] = mode
    node.start_plugin()


def test_a_node_changes_doors_and_its_pods_stay_as_they_are(
    make_node: Callable[..., Node],
) -> None:
    """There and back: refused while a pod has a device, and done once none has."""
    node = make_node("1x2", mode="device-plugin")
    old = node.pod("old", ASKING)
    refused_to_dra(node, old)
    to_dra(node)
    new = node.pod("new", ASKING)
    refused_to_device_plugin(node, new)
    door(node, "device-plugin")
    node.until_allocatable()
    until(lambda: node.counted("allocatable", REGIONS) == 2, "both by the first door")
    last = node.pod("last", ASKING)
    last.until_running()
    assert last.devices() == {REGIONS: [P0]}
    assert not node.allocated()
    assert (node.afu(P0), node.afu(P1)) == (AFU, BLANK)
    until(lambda: last.output() == "opened", "the container has its port")


def refused_to_dra(node: Node, old: Pod) -> None:
    """A pod has a device by the first door; then it ends."""
    ran = old.until_running()
    assert old.devices() == {REGIONS: [P0]}
    door(node, "dra")
    assert node.plugin.exit_code() == 1
    assert old.uid in node.plugin.text
    assert node.afu(P0) == AFU
    node.settings["FPGA_PLUGIN_MODE"] = "device-plugin"
    node.start_plugin()
    node.until_offered(REGIONS, [P0, P1])
    assert (old.until_running(), node.afu(P0)) == (ran, AFU)
    old.delete()
    old.until_gone()
    node.until_offered(CARDS, [CARD])


def to_dra(node: Node) -> None:
    """Pods by claims start at once, those by limits may when kubelet has forgotten."""
    door(node, "dra")
    until(lambda: node.counted("allocatable", REGIONS) == 0, "none by the first door")
    node.until_allocatable()
    claimed = node.asks("claimed", command=OPENS, bitstream=AFU)
    claimed.until_running()
    assert node.afu(P0) == AFU
    claimed.delete()
    claimed.until_gone()
    node.until_free(P0, P1, CARD)
    until(
        lambda: node.counted("capacity", REGIONS) == 0,
        "kubelet forgot the device plugin",
        limit=FORGETS + LIMIT,
    )


def refused_to_device_plugin(node: Node, new: Pod) -> None:
    """A pod has a device by DRA; then it ends."""
    ran = new.until_running()
    assert list(node.allocated().values()) == [[P0.replace(".", "-")]]
    assert node.afu(P0) == AFU
    until(lambda: new.output() == "opened", "the container has its port")
    door(node, "device-plugin")
    assert node.plugin.exit_code() == 1
    (claim,) = node.cluster.claims()
    assert f"default/{claim}" in node.plugin.text
    node.settings["FPGA_PLUGIN_MODE"] = "dra"
    node.start_plugin()
    node.until_allocatable()
    assert (new.until_running(), node.afu(P0)) == (ran, AFU)
    new.delete()
    new.until_gone()
    node.until_free(P0, P1, CARD)
