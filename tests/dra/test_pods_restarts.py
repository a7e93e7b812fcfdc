"""Kubelet, plugin, node and pods' objects end and begin again under claims, in odd orders."""

import shutil
import signal
from collections.abc import Callable

import pytest
from daemon_support import AFU, AFU_2, BLANK, CARD, P0
from machine import SCRATCH, until
from node import Pod
from pods_node import (
    CDI,
    OPENS,
    RECORD,
    Node,
    by_claim,
    container,
    health,
    running,
    waiting,
)


def undisturbed(node: Node, pod: Pod, container_id: str) -> None:
    """Same container, still programmed, and the region ends as it should."""
    assert pod.until_running() == container_id
    assert pod.container()["restartCount"] == 0
    assert node.afu(P0) == AFU
    pod.delete()
    pod.until_gone()
    node.until_free(P0, CARD)
    assert node.afu(P0) == BLANK


def kill_sandbox(node: Node) -> None:
    """The only one."""
    (sandbox,) = node.sandboxes()
    node.runtime.kill(sandbox)


def kubelet_says(text: str) -> None:
    log = SCRATCH / "kubelet.log"
    until(lambda: text in log.read_text(errors="replace"), f"kubelet says: {text}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_kubelet_restarts_under_a_pod(
    make_node: Callable[..., Node], number: signal.Signals
) -> None:
    """It deletes the slices as it starts; the driver is registered again, and they come back."""
    node = make_node("1x2")
    pod, first = running(node)
    mark = node.plugin.mark
    node.kubelet.end(number)
    node.kubelet.start()
    node.plugin.until_logged("driver registered with kubelet", mark)
    until(lambda: len(node.devices()) == 3, "all devices are in the slices")
    assert not node.prepared(P0, mark)
    undisturbed(node, pod, first)


@pytest.mark.parametrize("kill", [False, True])
def test_the_plugin_restarts_under_a_pod(make_node: Callable[..., Node], *, kill: bool) -> None:
    node = make_node("1x2")
    pod, first = running(node)
    if kill:
        node.plugin.kill()
    else:
        assert node.plugin.stop() == 0
    node.start_plugin()
    node.plugin.until_logged("driver registered with kubelet")
    assert len(node.devices()) == 3, "kubelet keeps the slices for 30 s"
    assert not node.prepared(P0)
    undisturbed(node, pod, first)


def test_a_kubelet_that_forgot_what_is_prepared_does_not_touch_the_hardware(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    pod, first = running(node)
    kill_sandbox(node)
    second = pod.until_running(after=first)
    assert len(node.served("NodePrepareResources")) == 1, "kubelet remembers"
    node.kubelet.restart()
    kill_sandbox(node)
    third = pod.until_running(after=second)
    assert len(node.served("NodePrepareResources")) == 2, "kubelet has forgotten"
    assert node.prepared(P0) == [AFU]
    kubelet_keeps = 2  # of the outputs of a container, the last ones
    until(lambda: pod.output().count("opened") == kubelet_keeps, "it has its port each time")
    assert node.afu(P0) == AFU
    assert pod.until_running() == third


def test_after_a_reboot_the_region_is_programmed_anew(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2")
    pod, first = running(node)
    node.kubelet.end()
    node.plugin.kill()
    node.runtime.remove_pods()
    shutil.rmtree(CDI)
    node.reboot_cards()
    node.start_plugin()
    node.kubelet.start()
    pod.until_running(after=first)
    assert node.prepared(P0) == [AFU]
    assert node.afu(P0) == AFU
    until(lambda: pod.output().count("opened") == 2, "it has its port again")


def test_a_pod_that_was_made_while_kubelet_was_away_starts(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    node.kubelet.end()
    pod = node.asks("asks", bitstream=AFU)
    until(node.allocated, "the scheduler gives it a region")
    node.kubelet.start()
    pod.until_running()
    assert node.afu(P0) == AFU


def test_kubelet_is_killed_while_a_region_is_programmed(make_node: Callable[..., Node]) -> None:
    """The work goes on without its call, and serves the next one."""
    node = make_node("1x1", simulated_pr_seconds="3")
    pod = node.asks("asks", bitstream=AFU)
    until(node.holders, "the region is the claim's")
    node.kubelet.end(signal.SIGKILL)
    node.kubelet.start()
    pod.until_running()
    assert node.prepared(P0) == [AFU]


def test_kubelet_is_killed_while_a_region_is_scrubbed(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1", simulated_pr_seconds="3")
    pod, _ = running(node)
    pod.delete()
    node.plugin.until_logged("claim ended")
    node.kubelet.end(signal.SIGKILL)
    node.kubelet.start()
    waiting(lambda: not pod.seen(), "the pod is gone")
    node.until_free(P0)
    assert node.afu(P0) == BLANK


def test_the_plugin_is_away_when_a_pod_ends(make_node: Callable[..., Node]) -> None:
    """The pod is Terminating until the plugin is back: nothing is free before it was scrubbed."""
    node = make_node("1x1")
    pod, _ = running(node)
    node.plugin.kill()
    pod.delete()
    kubelet_says("not registered")
    assert pod.seen()
    assert node.allocated()
    node.start_plugin()
    pod.until_gone()
    node.until_free(P0)
    assert node.afu(P0) == BLANK


def test_a_claim_that_was_deleted_early_ends_with_its_pod(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    claim = node.claim("early", bitstream=AFU)
    pod = node.pod("asks", container(OPENS), resourceClaims=[by_claim(claim)])
    first = pod.until_running()
    node.cluster.release(claim)
    assert pod.until_running() == first
    assert node.afu(P0) == AFU
    pod.delete()
    pod.until_gone()
    node.until_free(P0)
    assert node.afu(P0) == BLANK


def test_a_record_that_kubelet_lost_ends_no_pods_claim_and_keeps_none_for_ever(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x1")
    old, first = running(node, "old")
    node.kubelet.end()
    RECORD.unlink()
    node.kubelet.start()
    assert old.until_running() == first
    assert node.afu(P0) == AFU
    old.delete()
    old.until_gone()
    new, _ = running(node, "new", AFU_2)
    assert node.afu(P0) == AFU_2
    new.delete()
    new.until_gone()
    node.until_free(P0)
    assert node.afu(P0) == BLANK


def test_slices_of_a_plugin_that_stays_away_are_deleted_and_come_back_with_it(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    pod, first = running(node)
    until(lambda: health(pod) == ["Healthy"], "it is well")
    node.plugin.kill()
    waiting(lambda: not node.devices(), "kubelet deletes the slices after 30 s")
    node.start_plugin()
    until(lambda: len(node.devices()) == 3, "all devices are in the slices")
    waiting(lambda: health(pod) == ["Healthy"], "it is well, or again")
    assert not node.prepared(P0)
    undisturbed(node, pod, first)
