"""What goes wrong on nodes, and what the plugin makes of it."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    CARD,
    CARD_2,
    CARDS,
    P0,
    REGIONS,
    request,
)
from machine import until
from node import Node, Pod, container
from records import podresources

LATE = "localhost/late:1"
"""An image that the runtime does not have at first."""

FREEZER = Path("/sys/fs/cgroup/freezer").is_dir()

pods_api = pytest.mark.parametrize("make_node", ["pods-api"], indirect=True)
api_server = pytest.mark.parametrize("make_node", ["api-server"], indirect=True)


def forgotten_while_it_runs(node: Node) -> Pod:
    """A pod that was deleted by force, and whose processes do not end."""
    pod = node.pod("asks", container(env=request()))
    pod.until_running()
    node.freeze(pod)
    pod.delete(grace=0)
    pod.until_gone()
    node.plugin.until_logged("scrub waits", region=P0)
    return pod


@api_server  # a pod that is a file cannot be deleted by force
@pytest.mark.skipif(not FREEZER, reason="only cgroup v1 can keep a process from being killed")
def test_a_force_deleted_pods_region_waits_for_its_processes(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x1")
    pod = forgotten_while_it_runs(node)
    assert not podresources(), "kubelet has forgotten it"
    node.until_offered(REGIONS, [])
    assert node.afu(P0) == AFU
    node.freeze(pod, thaw=True)
    node.until_offered(CARDS, [CARD])
    assert node.afu(P0) == BLANK


@pytest.fixture
def leftover_tree() -> Iterator[None]:
    """What another driver, or a kubelet without a cgroup root of its own, would have left."""
    made = [top / "kubepods.slice" for top in Path("/sys/fs/cgroup").iterdir() if top.is_dir()]
    for cgroup in made:
        cgroup.mkdir()
    yield
    for cgroup in made:
        cgroup.rmdir()


@api_server
@pytest.mark.skipif(not FREEZER, reason="only cgroup v1 can keep a process from being killed")
@pytest.mark.usefixtures("leftover_tree")
def test_a_leftover_tree_of_cgroups_does_not_hide_that_a_pod_lives(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x1")
    pod = forgotten_while_it_runs(node)
    assert node.afu(P0) == AFU
    node.freeze(pod, thaw=True)
    node.until_offered(CARDS, [CARD])
    assert node.afu(P0) == BLANK


@api_server
@pytest.mark.skipif(not FREEZER, reason="only cgroup v1 can keep a process from being killed")
def test_a_force_deleted_pod_that_kubelet_may_have_started_unasked_is_waited_for(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x1")
    pod = node.pod("waits", container(env=request(), image="localhost/never-there:1"))
    pod.until_waiting("ErrImageNeverPull")
    node.plugin.until_logged("owner of an allocation found", device=P0, pod=pod.uid)
    node.freeze(pod)
    mark = node.plugin.mark
    node.kubelet.restart()
    node.plugin.until_logged("kubelet's records read", mark)
    pod.delete(grace=0)
    pod.until_gone()
    waits = node.plugin.until_logged("scrub waits", mark, region=P0)
    assert pod.uid in waits["reason"]
    node.until_offered(REGIONS, [])
    assert not node.plugin.logged("region scrubbed", mark)
    node.freeze(pod, thaw=True)
    node.until_offered(CARDS, [CARD])


@pods_api  # a pod that is a file: its uid is in it
@pytest.mark.skipif(not FREEZER, reason="only cgroup v1 can keep a process from being killed")
def test_a_static_pod_that_comes_again_is_waited_for_though_its_first_instance_is_gone(
    make_node: Callable[..., Node],
) -> None:
    """Both have one uid. Of the second one kubelet may have started a container unasked."""
    node = make_node("1x1")
    node.runtime.add_image(LATE)
    try:
        pod = node.pod("asks", container(env=request(), image=LATE))
        pod.until_running()
        pod.delete()
        pod.until_forgotten()
        node.until_offered(CARDS, [CARD])
    finally:
        node.runtime.ctr("images", "remove", LATE)
    mark = node.plugin.mark
    pod.put()
    pod.until_waiting("ErrImageNeverPull")
    node.plugin.until_logged("owner of an allocation found", mark, device=P0, pod=pod.uid)
    node.freeze(pod)
    mark = node.plugin.mark
    node.kubelet.end()
    pod.delete()
    node.kubelet.start()
    waits = node.plugin.until_logged("scrub waits", mark, region=P0)
    assert pod.uid in waits["reason"]
    node.until_offered(REGIONS, [])
    assert not node.plugin.logged("region scrubbed", mark)
    node.freeze(pod, thaw=True)
    node.until_offered(CARDS, [CARD])


@api_server
@pytest.mark.skipif(not FREEZER, reason="only cgroup v1 can keep a process from being killed")
def test_the_next_pods_region_is_blank_as_soon_as_the_last_one_is_gone(
    make_node: Callable[..., Node],
) -> None:
    # The interval is so long that the next Allocate reports the first pod's end.
    node = make_node("1x1", reconcile_interval="600")
    first = node.pod("first", container(env=request()))
    first.until_running()
    node.freeze(first)
    first.delete(grace=0)
    first.until_gone()
    image = "localhost/pulled-for-long:1"
    second = node.pod("second", container(env=request(AFU_2), image=image))
    second.until_waiting("ErrImageNeverPull")
    node.plugin.until_logged("scrub waits", region=P0)
    assert node.afu(P0) == AFU
    node.freeze(first, thaw=True)
    until(lambda: node.afu(P0) == BLANK, "the first pod's image is gone")
    assert not second.container()["state"].get("running")
    node.runtime.add_image(image)
    try:
        second.until_running()
    finally:
        node.runtime.ctr("images", "remove", image)
    assert node.afu(P0) == AFU_2


def test_a_container_that_started_without_prestart_is_reported(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x1")
    pod = node.pod("asks", container(env=request()))
    first = pod.until_running()
    node.kubelet.end()
    node.plugin.stop()
    node.kubelet.start()
    # The plugin reports none that began in the same second as kubelet: a status has whole ones.
    node.kubelet.until_its_first_second_is_over()
    node.runtime.kill(first)
    second = pod.until_running(after=first)
    plugin = node.start_plugin()
    node.until_offered(REGIONS, [P0])
    assert pod.until_running() == second
    # The API server's copy of the pod's status may lag.
    found = plugin.until_logged("container started without PreStart", pod=pod.uid)
    assert (found["container"], found["devices"]) == ("main", [P0])


def test_a_finished_pods_region_is_offered_again(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    pod = node.pod("ends", container(env=request(), command="exit 0"), restartPolicy="Never")
    pod.until_phase("Succeeded")
    node.until_offered(CARDS, [CARD])
    assert node.afu(P0) == BLANK
    node.kubelet.restart()
    # By itself kubelet admits a finished pod again, and refuses it where it does so before the
    # plugin has registered again.
    until(lambda: pod.phase() in {"Succeeded", "Failed"}, "kubelet has it again, as finished")
    node.until_offered(CARDS, [CARD])
    assert node.afu(P0) == BLANK


def test_many_pods_at_once_get_each_their_own(make_node: Callable[..., Node]) -> None:
    node = make_node("4x3")
    for round_ in range(2):
        wanted = [AFU, AFU_2, AFU_3] * 4
        pods = [
            node.pod(f"pod-{round_}-{n}", container(env=request(afu)))
            for n, afu in enumerate(wanted)
        ]
        for pod, afu in zip(pods, wanted, strict=True):
            pod.until_running()
            (region,) = pod.devices()[REGIONS]
            assert node.afu(region) == afu
        node.until_offered(CARDS, [])
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda pod: pod.delete(), pods))
        node.until_offered(CARDS, [f"0000-{n:x}-00.0" for n in range(16, 20)])
        assert {region["afu_id"] for region in node.regions().values()} == {BLANK}


@api_server
def test_a_pod_waits_while_the_api_server_is_away(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    control_plane = node.kubelet.control_plane
    assert control_plane is not None
    pod = node.pod("asks", container(env=request()))
    first = pod.until_running()
    control_plane.stop()
    try:
        node.plugin.kill()
        node.start_plugin()
        node.until_offered(REGIONS, [P0])
        node.runtime.kill(first)
        # Not the pod's status: kubelet, too, has it from the API server.
        refused = node.plugin.until_logged("call not finished", status="UNAVAILABLE")
        assert "the API server cannot be asked" in refused["message"]
    finally:
        control_plane.start()
    pod.until_running(after=first)
    assert node.prepared(P0) == [AFU]


@api_server
def test_a_plugin_without_the_right_to_get_pods_says_so(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1", user="stranger")
    pod = node.pod("asks", container(env=request()))
    assert "does not allow" in pod.until_waiting("CreateContainerConfigError")


def test_after_a_reboot_a_pod_that_came_before_the_plugin_fails_and_its_region_is_clean(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x1")
    pod = node.pod("asks", container(env=request()))
    first = pod.until_running()
    node.plugin.kill()
    node.kubelet.end()
    node.runtime.kill(first)
    node.runtime.restart()
    node.reboot_cards()
    node.kubelet.start()
    assert pod.until_phase("Failed")["status"]["reason"] == "UnexpectedAdmissionError"
    node.start_plugin()
    node.until_offered(CARDS, [CARD])
    assert node.afu(P0) == BLANK
    node.pod("next", container(env=request(AFU_2))).until_running()
    assert node.afu(P0) == AFU_2


@api_server  # a file's pod comes before any plugin, and fails
def test_after_a_reboot_with_other_port_numbers_a_pod_is_to_be_deleted(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("2x1")
    first, second = (f"{card}-p0" for card in (CARD, CARD_2))
    pods = [node.pod(name, container(env=request())) for name in ("one", "two")]
    runs = [pod.until_running() for pod in pods]
    assert {pod.devices()[REGIONS][0] for pod in pods} == {first, second}
    node.plugin.kill()
    node.kubelet.end()
    for container_id in runs:
        node.runtime.kill(container_id)
    node.runtime.restart()
    node.reboot_cards(CARD_2, CARD)
    node.start_plugin()
    node.kubelet.start()
    for pod in pods:
        # Rejected again, if kubelet was quicker than the plugin's registration.
        until(
            lambda pod=pod: pod.status_text("numbering changed", "UnexpectedAdmissionError"),
            "the pod may not run",
        )
        pod.delete()
    node.until_offered(CARDS, [CARD, CARD_2])
    assert {node.afu(first), node.afu(second)} == {BLANK}
    node.pod("next", container(env=request(AFU_2))).until_running()


def test_a_pods_region_waits_for_a_slow_image(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    pod = node.pod("slow", container(env=request(), image=LATE))
    pod.until_waiting("ErrImageNeverPull")
    # Eight looks, or as long as they take: where kubelet streams its pods, nothing is polled.
    calls, enough = node.kubelet.podresources_calls(), time.monotonic() + 20
    until(
        lambda: node.kubelet.podresources_calls() >= calls + 8 or time.monotonic() >= enough,
        "the plugin looks on",
    )
    assert pod.devices() == {REGIONS: [P0]}
    node.until_offered(CARDS, [])
    assert node.afu(P0) == BLANK
    node.runtime.add_image(LATE)
    try:
        pod.until_running()
    finally:
        node.runtime.ctr("images", "remove", LATE)
    assert node.prepared(P0) == [AFU]


@pods_api
def test_a_programming_that_takes_longer_than_a_call_serves_the_next_one(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x1", simulated_pr_seconds="26")
    pod = node.pod("asks", container(env=request()))
    until(pod.container, "its first try", limit=120)
    pod.until_running()
    assert node.prepared(P0) == [AFU]
