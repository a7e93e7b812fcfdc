"""Pods on a stock kubelet: programmed as they ask, scrubbed when they are gone."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    CARD,
    CARDS,
    P0,
    P1,
    REGIONS,
    request,
)
from machine import CGROUP, STAY, until
from node import Node, container, kep_container

from fpga_plugin.kubernetes.cgroup import PodCgroups, PodPresence
from fpga_plugin.kubernetes.names import PodUid


def test_a_pod_is_programmed_with_the_bitstream_of_its_env(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    command = 'echo "node $FPGA_DEVICE_0000_10_00_0_P0"; exec 3<>/dev/dfl-port.0 && echo opened;'
    pod = node.pod("asks", container(env=request(), command=command + STAY))
    pod.until_running()
    assert node.afu(P0) == AFU
    assert pod.devices() == {REGIONS: [P0]}
    until(lambda: pod.output() == "node /dev/dfl-port.0\nopened", "the container has its port")


def test_the_pod_of_the_kep_runs_unchanged(make_node: Callable[..., Node]) -> None:
    """As with the other API: tests/dra/test_pods.py."""
    node = make_node("1x2")
    pod = node.pod("kep", kep_container(f'exec 3<>"$FPGA_DEVICE_1" && echo opened; {STAY}'))
    pod.until_running("intel-fpga-demo-compress")
    assert node.afu(P0) == AFU
    until(lambda: pod.output("intel-fpga-demo-compress") == "opened", "it opens its port")


def test_a_static_pod_is_programmed_as_it_asks(make_node: Callable[..., Node]) -> None:
    """With an API server its mirror reports what it asks for, once kubelet has made one."""
    node = make_node("1x1")
    pod = node.pod("asks", container(env=request()), static=True)
    pod.until_running()
    assert node.afu(P0) == AFU
    if node.kubelet.control_plane is not None:
        (told,) = node.plugin.logged("pod read", pod=pod.uid)
        assert (told["source"], told["name"], told["kept"]) == ("api-server", "asks-node", False)


def test_a_container_without_a_device_has_no_port(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    pod = node.pod(
        "none", container(command=f"test -e /dev/dfl-port.0; echo $?; {STAY}", resources={})
    )
    pod.until_running()
    until(lambda: pod.output() == "1", "the container says whether it sees the port")


def test_a_deleted_pods_region_is_scrubbed_and_offered_again(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    pod = node.pod("asks", container(env=request()))
    pod.until_running()
    node.until_offered(CARDS, [])
    pod.delete()
    until(lambda: not pod.devices(), "PodResources lack the pod")
    node.until_offered(CARDS, [CARD])
    assert node.afu(P0) == BLANK
    node.until_offered(REGIONS, [P0, P1])


def test_nothing_is_polled_while_nothing_is_owned(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    pod = node.pod("asks", container(env=request()))
    pod.until_running()
    pod.delete()
    node.until_offered(CARDS, [CARD])
    until(node.polls_nothing, "the lists' last changes are looked after")
    assert node.polls_nothing()


def test_card_and_region_exclude_each_other_and_both_get_their_turn(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    part = node.pod("part", container(env=request()))
    part.until_running()
    node.until_offered(CARDS, [])
    refused = node.pod("early", container(env=request(), resources={CARDS: 1}))
    assert refused.until_phase("Failed")["status"]["reason"] == "UnexpectedAdmissionError"
    refused.delete()
    part.delete()
    node.until_offered(CARDS, [CARD])

    whole = node.pod("whole", container(env=request(AFU_2), resources={CARDS: 1}))
    whole.until_running()
    assert {node.afu(P0), node.afu(P1)} == {AFU_2, BLANK}
    node.until_offered(REGIONS, [])
    whole.delete()
    node.until_offered(REGIONS, [P0, P1])
    assert {node.afu(P0), node.afu(P1)} == {BLANK}

    again = node.pod("again", container(env=request(AFU_3), resources={REGIONS: 2}))
    again.until_running()
    assert sorted([node.afu(P0), node.afu(P1)]) == sorted([AFU_3, BLANK])


def test_a_crashing_container_is_programmed_at_each_start(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    pod = node.pod("crashes", container(env=request(), command="exit 3"))
    until(lambda: pod.container().get("restartCount", 0) >= 2, "two restarts")
    assert node.prepared(P0)[:3] == [AFU] * 3  # one for each start
    assert pod.devices() == {REGIONS: [P0]}


def test_a_wrong_request_is_told_in_the_pods_status(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    pod = node.pod("wrong", container(env=request("0" * 32)))
    message = pod.until_waiting("CreateContainerConfigError")
    assert "NotFound" in message
    assert "0" * 32 in message
    assert node.afu(P0) == BLANK


def test_the_cgroup_tells_a_sandbox_from_a_container(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    cgroups = PodCgroups("/sys/fs/cgroup")
    image = "localhost/later:1"
    pod = node.pod("later", container(env=request(), image=image))
    pod.until_waiting("ErrImageNeverPull")
    uid = PodUid(pod.uid)
    assert cgroups.state(uid) is PodPresence.ALIVE
    assert not cgroups.may_run_containers(uid)
    node.runtime.add_image(image)
    try:
        pod.until_running()
    finally:
        node.runtime.ctr("images", "remove", image)
    assert cgroups.may_run_containers(uid)


def test_the_cgroup_says_whether_a_pod_keeps_its_sandbox(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    cgroups = PodCgroups("/sys/fs/cgroup")
    command = f"trap 'exit 1' USR1; echo ready; {STAY}"
    pod = node.pod("lives", container(env=request(), command=command))
    uid = PodUid(pod.uid)
    first = pod.until_running()
    # A first process that has no handler yet does not hear the signal.
    until(lambda: "ready" in pod.output(), "the container's command has its trap")
    before = cgroups.containers(uid)
    (sandbox,) = before - {first.removeprefix("containerd://")}

    def kill(container_id: str, number: signal.Signals) -> None:
        group = f"kubepods/*/pod{uid}/{container_id}/cgroup.procs"
        (pids,) = Path("/sys/fs/cgroup/pids", CGROUP).glob(group)
        os.kill(int(pids.read_text().split()[0]), number)

    kill(first.removeprefix("containerd://"), signal.SIGUSR1)
    second = pod.until_running(after=first)
    now = {sandbox, second.removeprefix("containerd://")}
    until(lambda: cgroups.containers(uid) == now, "the sandbox has the new container")
    kill(sandbox, signal.SIGKILL)
    pod.until_running(after=second)
    until(
        lambda: len(found := cgroups.containers(uid)) == 2 and found.isdisjoint(now),
        "it has another sandbox and container",
    )


def test_the_cgroup_says_whether_a_pod_lives(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1")
    cgroups = PodCgroups("/sys/fs/cgroup")
    pod = node.pod("lives", container(env=request()))
    uid = PodUid(pod.uid)
    pod.until_running()
    assert cgroups.expect(uid)
    assert cgroups.state(uid) is PodPresence.ALIVE
    node.kubelet.end()
    assert cgroups.state(uid) is PodPresence.ALIVE, "the kubelet instance is not the pod's"
    node.kubelet.start()
    pod.delete()
    until(lambda: cgroups.state(uid) is PodPresence.GONE, "its cgroup is gone")
    pod.until_gone()
    node.until_offered(REGIONS, [P0])
