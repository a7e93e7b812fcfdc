"""Pods that are forced away: their devices are given to others while their processes may run.

Each of these takes a minute, which kubelet lets pass before it looks again.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_support import AFU, AFU_2, BLANK, P0
from machine import until
from pods_node import OPENS, RECORD, Node, running, waiting

FREEZER = Path("/sys/fs/cgroup/freezer").exists()


@pytest.mark.skipif(not FREEZER, reason="only cgroup v1 keeps a process from being killed")
def test_a_region_of_a_pod_that_was_forced_away_waits_for_its_processes(
    make_node: Callable[..., Node],
) -> None:
    """The scheduler gives the device away at once, and its next claim is prepared before.

    The new pod's first attempt fails after the 40 s that Prepare waits.
    """
    node = make_node("1x1")
    old, _ = running(node, "old")
    node.freeze(old)
    old.delete(grace=0)
    new = node.asks("new", command=OPENS, bitstream=AFU_2)
    until(lambda: any(name.startswith("new") for name in node.allocated()), "it is given away")
    until(lambda: RECORD.exists() and new.uid in RECORD.read_text(), "kubelet begins to prepare")
    node.until_refused("is still held by claim")
    assert node.afu(P0) == AFU
    assert not new.container().get("state", {}).get("running")
    before = len(node.plugin.logged("region scrubbed", region=P0))
    node.freeze(old, thaw=True)
    waiting(
        lambda: len(node.plugin.logged("region scrubbed", region=P0)) > before,
        "the old pod has ended, and its region is scrubbed",
    )
    new.delete()
    new.until_gone()
    running(node, "next", AFU_2)
    assert node.afu(P0) == AFU_2


def test_a_pod_that_was_forced_away_while_kubelet_was_away_leaves_its_region_blank(
    make_node: Callable[..., Node],
) -> None:
    """Kubelet kills what still runs, and ends the claim in a round that it makes each minute."""
    node = make_node("1x1")
    pod, _ = running(node)
    node.kubelet.end()
    pod.delete(grace=0)
    until(lambda: not node.allocated(), "the device is the scheduler's again")
    assert node.afu(P0) == AFU
    mark = node.plugin.mark
    node.kubelet.start()
    waiting(lambda: node.afu(P0) == BLANK, "it is scrubbed")
    assert not node.served("NodePrepareResources", mark), "for a pod that is gone"
    assert not node.sandboxes()
    running(node, "next", AFU_2)


def test_a_pod_that_was_forced_away_while_its_region_was_programmed_leaves_it_blank(
    make_node: Callable[..., Node],
) -> None:
    """Kubelet is away meanwhile, and never prepares that pod's claim again."""
    node = make_node("1x1", simulated_pr_seconds="3")
    pod = node.asks("asks", bitstream=AFU)
    until(node.holders, "the region is the claim's")
    node.kubelet.end(signal.SIGKILL)
    pod.delete(grace=0)
    until(lambda: not node.allocated(), "the device is the scheduler's again")
    node.plugin.until_logged("claim prepared")
    assert node.afu(P0) == AFU, "the work goes on without its call"
    mark = node.plugin.mark
    node.kubelet.start()
    waiting(lambda: node.afu(P0) == BLANK, "it is scrubbed")
    assert not node.served("NodePrepareResources", mark), "for a pod that is gone"
    running(node, "next", AFU_2)
