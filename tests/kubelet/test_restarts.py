"""Kubelet, plugin, containerd and containers end and begin again, alone and together."""

import signal
from collections.abc import Callable

import pytest
from daemon_support import AFU, AFU_2, BLANK, CARD, CARDS, P0, P1, REGIONS, request
from machine import until
from node import Node, Pod, container


def running(node: Node, name: str = "asks") -> tuple[Pod, str]:
    pod = node.pod(name, container(env=request()))
    return pod, pod.until_running()


def undisturbed(node: Node, pod: Pod, container_id: str) -> None:
    """Same container, same device, still programmed, and the other region is to be had."""
    node.until_offered(REGIONS, [P0, P1])
    assert pod.until_running() == container_id
    assert pod.container()["restartCount"] == 0
    assert pod.devices() == {REGIONS: [P0]}
    assert node.afu(P0) == AFU
    other, _ = running(node, "other")
    assert other.devices() == {REGIONS: [P1]}
    assert pod.until_running() == container_id
    assert not node.plugin.logged("container started without PreStart")


def test_a_container_that_restarts_keeps_its_device_and_is_programmed_anew(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    pod, first = running(node)
    mark = node.plugin.mark
    node.runtime.kill(first)
    pod.until_running(after=first)
    assert pod.devices() == {REGIONS: [P0]}
    assert node.prepared(P0, mark) == [AFU]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_kubelet_restarts(make_node: Callable[..., Node], number: signal.Signals) -> None:
    node = make_node("1x2")
    pod, first = running(node)
    node.kubelet.end(number)
    node.kubelet.start()
    undisturbed(node, pod, first)


@pytest.mark.parametrize("make_node", ["api-server"], indirect=True)
def test_a_kubelet_that_restarts_without_its_api_server_releases_nothing(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    control_plane = node.kubelet.control_plane
    assert control_plane is not None
    pod, first = running(node)
    control_plane.stop()
    try:
        mark = node.plugin.mark
        node.kubelet.restart()
        assert not pod.seen(), "it does not know its pods yet"
        node.plugin.until_logged("kubelet's records read", mark)
        before = node.kubelet.podresources_calls()
        until(lambda: node.kubelet.podresources_calls() > before + 10, "some rounds")
        assert not node.plugin.logged("released")
        assert node.afu(P0) == AFU
    finally:
        control_plane.start()
    undisturbed(node, pod, first)


@pytest.mark.parametrize("kill", [False, True])
def test_the_plugin_restarts(make_node: Callable[..., Node], *, kill: bool) -> None:
    node = make_node("1x2")
    pod, first = running(node)
    if kill:
        node.plugin.kill()
    else:
        assert node.plugin.stop() == 0
    node.start_plugin()
    undisturbed(node, pod, first)


def test_kubelet_and_plugin_restart(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2")
    pod, first = running(node)
    node.kubelet.end()
    node.plugin.kill()
    node.start_plugin()
    node.kubelet.start()
    undisturbed(node, pod, first)


def test_containerd_restarts(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2")
    pod, first = running(node)
    node.runtime.restart()
    undisturbed(node, pod, first)


def test_a_pod_and_kubelet_restart(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2")
    pod, first = running(node)
    node.kubelet.end()
    node.runtime.kill(first)
    mark = node.plugin.mark
    node.kubelet.start()
    # Kubelet admits a pod again that has no running container, and refuses it where it comes to
    # that before the plugin has registered with it: either is in order.
    until(lambda: pod.phase() == "Failed" or pod.runs(after=first), "the pod runs, or is refused")
    if pod.phase() == "Failed":
        assert pod.seen()["status"]["reason"] == "UnexpectedAdmissionError"
        node.until_offered(CARDS, [CARD])
        assert node.afu(P0) == BLANK
        return
    assert pod.devices() == {REGIONS: [P0]}
    assert node.afu(P0) == AFU
    assert set(node.prepared(P0, mark)) <= {AFU}


def test_a_container_restarts_only_when_the_plugin_is_back(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    pod, first = running(node)
    node.plugin.stop()
    node.runtime.kill(first)
    assert "stopped" in pod.until_waiting("CreateContainerConfigError")
    node.start_plugin()
    pod.until_running(after=first)
    assert node.prepared(P0) == [AFU]


def test_a_pod_deleted_while_kubelet_is_down_loses_its_region(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x1")
    pod, _ = running(node)
    node.kubelet.end()
    pod.delete()
    node.kubelet.start()
    node.until_offered(CARDS, [CARD])
    assert node.afu(P0) == BLANK


def test_a_pod_deleted_while_the_plugin_is_down_loses_its_region(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x1")
    pod, _ = running(node)
    node.plugin.kill()
    pod.delete()
    pod.until_gone()
    node.start_plugin()
    node.until_offered(CARDS, [CARD])
    assert node.afu(P0) == BLANK


def test_the_resource_stays_known_while_the_plugin_is_away(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    pod, _ = running(node)
    node.plugin.stop()
    node.until_offered(REGIONS, [])
    assert pod.devices() == {REGIONS: [P0]}
    refused = node.pod("late", container(env=request()))
    assert refused.until_phase("Failed")["status"]["reason"] == "UnexpectedAdmissionError"
    node.start_plugin()
    node.until_offered(REGIONS, [P0])
    until(lambda: pod.devices() == {REGIONS: [P0]}, "the pod keeps its region")


@pytest.mark.parametrize("make_node", ["api-server"], indirect=True)  # who alone remembers it
def test_a_finished_pod_stays_finished_when_kubelet_restarts_without_the_plugin(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    pod = node.pod("ends", container(env=request(), command="exit 0"), restartPolicy="Never")
    pod.until_phase("Succeeded")
    node.until_offered(CARDS, [CARD])
    node.plugin.stop()
    node.until_offered(REGIONS, [])
    node.kubelet.restart()
    late = node.pod("late", container(env=request()))
    assert late.until_phase("Failed")["status"]["reason"] == "UnexpectedAdmissionError"
    assert pod.phase() == "Succeeded"
    late.delete()
    node.start_plugin()
    node.until_offered(REGIONS, [P0, P1])
    running(node, "next")
    assert pod.phase() == "Succeeded"


def test_everything_restarts_in_the_middle_of_a_programming(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2", simulated_pr_seconds="2")
    pod, first = running(node)
    waiting = node.pod("waits", container(env=request(AFU_2)))
    node.plugin.until_logged("pod read", pod=waiting.uid)  # PreStart has begun
    control_plane = node.kubelet.control_plane
    node.kubelet.end(signal.SIGKILL)
    node.plugin.kill()
    node.runtime.process.end(signal.SIGKILL)
    if control_plane is not None:
        control_plane.stop()
        control_plane.start()
    node.runtime.start()
    node.start_plugin()
    node.kubelet.start()
    if (
        until(lambda: waiting.phase() in {"Running", "Failed"} and waiting.phase(), "a phase")
        == "Failed"
    ):
        # Kubelet admits again what does not run yet, and may be quicker than the registration.
        assert waiting.seen()["status"]["reason"] == "UnexpectedAdmissionError"
        waiting.delete()
        node.until_offered(REGIONS, [P0, P1])
        waiting = node.pod("again", container(env=request(AFU_2)))
    waiting.until_running()
    assert waiting.devices() == {REGIONS: [P1]}
    assert node.afu(P1) == AFU_2
    assert pod.until_running() == first
    assert node.afu(P0) == AFU
    for each in (pod, waiting):
        each.delete()
    node.until_offered(CARDS, [CARD])
    assert {node.afu(P0), node.afu(P1)} == {BLANK}
