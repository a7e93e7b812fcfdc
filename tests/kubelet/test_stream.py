"""Kubelet streams its pods (WatchPods): nothing is polled, and a pod's end is seen at once.

By the gate PodsAPI kubelet 1.36 has it too. What it answers while it does not know its pods yet
differs: 1.36 says that there are none, 1.37 refuses.
"""

import time
from collections.abc import Callable

import grpc
import pytest
from daemon_support import AFU, BLANK, CARD, CARDS, P0, P1, REGIONS, request
from machine import INTERVAL, LIMIT, PODS_API, RELEASE, SCRATCH, until
from node import Node, container

by_itself = pytest.mark.parametrize("make_node", ["pods-api"], indirect=True)
of_an_api_server = pytest.mark.parametrize("make_node", ["api-server"], indirect=True)
refuses_at_first = pytest.mark.skipif(
    RELEASE < (1, 37), reason="before 1.37 kubelet reports no pods while it initialises"
)


def streams() -> int:
    """How many streams kubelet was asked for."""
    return (SCRATCH / "kubelet.log").read_text(errors="replace").count("WatchPods called")


def get_pod(uid: str) -> grpc.StatusCode:
    """How kubelet answers who asks it for a pod."""
    with grpc.insecure_channel(f"unix://{PODS_API}") as channel:
        call = channel.unary_unary("/v1alpha1.Pods/GetPod")
        try:
            # The uid is field 1, a text of less than 128 bytes.
            call(b"\n" + bytes([len(uid)]) + uid.encode(), timeout=LIMIT)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def until_freed(node: Node) -> float:
    """Wait until all that a pod had is to be had again; the seconds."""
    began = time.monotonic()
    node.until_offered(CARDS, [CARD])
    assert node.afu(P0) == BLANK
    node.until_offered(REGIONS, [P0, P1])
    return time.monotonic() - began


@by_itself
def test_nothing_is_polled_while_the_owners_pod_is_told(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2")
    pod = node.pod("asks", container(env=request()))
    pod.until_running()
    until(node.polls_nothing, "kubelet has told the pod, and is not asked")
    assert node.polls_nothing()
    pod.delete()
    until(lambda: not pod.devices(), "PodResources lack the pod")
    seconds = until_freed(node)
    assert seconds < 4 * (3 * INTERVAL + 1), "at once, not when the stream is opened again"
    until(node.polls_nothing, "nothing is owned, and nothing polled")


@by_itself
def test_a_pod_that_ends_by_itself_is_seen_at_once(make_node: Callable[..., Node]) -> None:
    """Its object stays: it is the change of its phase that reports."""
    node = make_node("1x2")
    end = SCRATCH / "end"
    end.unlink(missing_ok=True)
    pod = node.pod(
        "ends",
        container(
            env=request(),
            command="until test -e /end/end; do sleep 0.1; done",
            volumeMounts=[{"name": "end", "mountPath": "/end"}],
        ),
        restartPolicy="Never",
        volumes=[{"name": "end", "hostPath": {"path": str(SCRATCH)}}],
    )
    pod.until_running()
    until(node.polls_nothing, "kubelet has told the pod, and is not asked")
    end.touch()
    try:
        until(lambda: not pod.devices(), "PodResources lack the pod")
        assert until_freed(node) < 4 * (3 * INTERVAL + 1)
        assert pod.until_phase("Succeeded")
    finally:
        end.unlink()


@by_itself
def test_a_stream_that_kubelets_restart_breaks_is_opened_again(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    pod = node.pod("asks", container(env=request()))
    first = pod.until_running()
    until(node.polls_nothing, "kubelet has told the pod, and is not asked")
    before = streams()
    node.kubelet.restart()
    until(lambda: streams() > before, "the stream is opened again")
    until(node.polls_nothing, "kubelet has told the pod, and is not asked")
    assert pod.until_running() == first
    assert node.afu(P0) == AFU
    assert not node.plugin.logged("released")
    pod.delete()
    until(lambda: not pod.devices(), "PodResources lack the pod")
    assert until_freed(node) < 4 * (3 * INTERVAL + 1)


@of_an_api_server
def test_a_kubelet_that_initialises_releases_nothing(make_node: Callable[..., Node]) -> None:
    """Without its API server it does not know its pods, and serves the Pods API all the same."""
    node = make_node("1x2", pods_api=True)
    control_plane = node.kubelet.control_plane
    assert control_plane is not None
    pod = node.pod("asks", container(env=request()))
    first = pod.until_running()
    until(node.polls_nothing, "kubelet has told the pod, and is not asked")
    control_plane.stop()
    try:
        mark = node.plugin.mark
        node.kubelet.restart()
        refusal = "FAILED_PRECONDITION" if RELEASE >= (1, 37) else "NOT_FOUND"
        assert get_pod(pod.uid).name == refusal
        node.plugin.until_logged("kubelet's records read", mark)
        before = node.kubelet.podresources_calls()
        until(lambda: node.kubelet.podresources_calls() > before + 10, "some rounds")
        assert not node.plugin.logged("released")
        assert node.afu(P0) == AFU
    finally:
        control_plane.start()
    until(lambda: get_pod(pod.uid).name == "OK", "kubelet knows its pods")
    assert pod.until_running() == first
    until(node.polls_nothing, "kubelet has told the pod, and is not asked", limit=2 * LIMIT)
    pod.delete()
    pod.until_gone()
    until_freed(node)


@of_an_api_server
@refuses_at_first
def test_a_static_pod_waits_until_kubelet_has_initialised(make_node: Callable[..., Node]) -> None:
    """Kubelet starts it before, and reports nobody what it asks for: nor does the API server."""
    node = make_node("1x2", pods_api=True)
    control_plane = node.kubelet.control_plane
    assert control_plane is not None
    control_plane.stop()
    try:
        node.kubelet.restart()
        pod = node.pod("asks", container(env=request()), static=True)
        message = pod.until_waiting("CreateContainerConfigError")
        assert "is still starting" in message, message
        assert node.afu(P0) == BLANK
    finally:
        control_plane.start()
    pod.until_running()
    assert node.afu(P0) == AFU
