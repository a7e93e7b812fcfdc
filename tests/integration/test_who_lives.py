"""Whom a release waits for: pods that kubelet lost sight of, as their cgroups tell."""

import contextlib
from collections.abc import Iterator

import pytest
from daemon_support import (
    AFU,
    BLANK,
    CARD,
    CARDS,
    HEALTHY,
    MAIN,
    P0,
    PAUSE,
    REGIONS,
    UNHEALTHY,
    Cgroups,
    Node,
    eventually,
    request,
)

A = "11111111-1111-4111-8111-111111111111"
B = "22222222-2222-4222-8222-222222222222"


@contextlib.contextmanager
def node_with_cgroups(
    tree: str = "kubepods", hardware: str = "1x2"
) -> Iterator[tuple[Node, Cgroups]]:
    with Node(hardware) as node:
        cgroups = Cgroups(node.folder / "cgroup", tree)
        node.set(cgroup_root=str(node.folder / "cgroup"))
        node.up()
        yield node, cgroups


def admit(node: Node, uid: str, device: str = P0, resource: str = REGIONS) -> None:
    answer = node.kubelet.allocate(device, resource=resource)
    node.kubelet.checkpoint((uid, "main", resource, [device], answer))


def delete_by_force(node: Node, device: str = P0, resource: str = REGIONS) -> None:
    node.kubelet.checkpoint()
    node.kubelet.deallocate(device, resource=resource)


def restart_kubelet(node: Node) -> None:
    mark = node.plugin.mark
    node.kubelet.restart()
    node.kubelet.signal.until(
        lambda: node.kubelet.has_list(REGIONS) and node.kubelet.has_list(CARDS), "lists"
    )
    node.plugin.until_logged("kubelet's records read", mark)


def held_until_it_ends(node: Node, cgroups: Cgroups, uid: str, held: str) -> None:
    """Nothing is done to the region while the pod lives; then it is scrubbed."""
    line = node.plugin.until_logged("scrub waits", region=P0)
    assert uid in line["reason"]
    node.kubelet.until_health(P0, UNHEALTHY)
    assert node.afu(P0) == held
    cgroups.remove(uid)
    node.kubelet.until_health(P0, HEALTHY)
    assert node.afu(P0) == BLANK


@pytest.mark.parametrize(
    "tree", ["kubelet.slice/kubelet-kubepods.slice", "kubelet/kubepods", "a/b/c/kubepods"]
)
def test_a_leftover_tree_of_cgroups_does_not_make_a_running_pod_look_gone(tree):
    with node_with_cgroups(tree) as (node, cgroups):
        (node.folder / "cgroup" / "kubepods.slice").mkdir()
        admit(node, A)
        cgroups.set(A, PAUSE, MAIN)
        node.kubelet.prestart(P0, env=request())
        delete_by_force(node)
        held_until_it_ends(node, cgroups, A, AFU)


def test_a_pod_whose_cgroup_is_not_found_is_waited_for_while_any_pod_is_seen_to_live():
    with node_with_cgroups() as (node, cgroups):
        admit(node, A)
        cgroups.set(B, PAUSE)
        node.kubelet.prestart(P0, env=request())
        delete_by_force(node)
        node.plugin.until_logged("cgroups do not say whether a pod still runs", pod=A)
        node.plugin.until_logged("scrub waits", region=P0)
        node.kubelet.until_health(P0, UNHEALTHY)
        assert node.afu(P0) == AFU
        cgroups.remove(B)  # no pod has a cgroup, it seems
        node.kubelet.until_health(P0, HEALTHY)
        assert node.afu(P0) == BLANK


def test_after_an_implied_release_a_container_that_starts_unasked_finds_nothing_of_the_last():
    with node_with_cgroups() as (node, cgroups):
        admit(node, A)
        cgroups.set(A, PAUSE, MAIN)
        node.kubelet.prestart(P0, env=request())
        admit(node, B)  # whose image is pulled for long
        cgroups.set(B, PAUSE)
        node.plugin.until_logged("scrub waits", region=P0)
        assert node.afu(P0) == AFU, "a still runs"
        cgroups.remove(A)
        eventually(lambda: node.afu(P0) == BLANK)
        restart_kubelet(node)
        assert node.kubelet.listed()[P0] == HEALTHY, "an owned device stays on the list"
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU


@pytest.mark.parametrize("asked", [False, True], ids=["without PreStart", "after PreStart"])
@pytest.mark.parametrize(
    ("device", "resource"), [(P0, REGIONS), (CARD, CARDS)], ids=["region", "card"]
)
def test_a_force_deleted_pod_that_may_have_started_unasked_is_waited_for(asked, device, resource):
    with node_with_cgroups(hardware="1x1") as (node, cgroups):
        admit(node, A, device, resource)
        cgroups.set(A, PAUSE, MAIN)
        if asked:
            node.kubelet.prestart(device, env=request(), resource=resource)
        restart_kubelet(node)
        delete_by_force(node, device, resource)
        held_until_it_ends(node, cgroups, A, AFU if asked else BLANK)


def test_the_pod_is_learnt_right_after_allocate_and_is_never_the_last_one():
    with node_with_cgroups() as (node, cgroups):
        admit(node, A)
        node.plugin.until_logged("owner of an allocation found", device=P0, pod=A)
        cgroups.set(A, PAUSE, MAIN)
        node.kubelet.prestart(P0, env=request())
        mark = node.plugin.mark
        answer = node.kubelet.allocate(P0)  # for b: kubelet's file is still about a
        cgroups.remove(A)
        node.plugin.until_logged("region scrubbed", mark, region=P0)
        node.kubelet.checkpoint((B, "main", REGIONS, [P0], answer))
        node.plugin.until_logged("owner of an allocation found", mark, device=P0, pod=B)
        assert not node.plugin.logged("owner of an allocation found", mark, pod=A)


def test_a_pod_that_a_restarted_plugin_finds_in_kubelets_records_is_waited_for():
    with node_with_cgroups() as (node, cgroups):
        answer = node.kubelet.allocate(P0)
        node.plugin.kill()  # before kubelet wrote whose it is
        node.kubelet.checkpoint((A, "main", REGIONS, [P0], answer))
        cgroups.set(A, PAUSE, MAIN)
        node.kubelet.restart()
        node.restarted()
        delete_by_force(node)
        held_until_it_ends(node, cgroups, A, BLANK)


def test_the_end_of_one_container_told_twice_leaves_its_successor_alone():
    with node_with_cgroups() as (node, cgroups):
        kubelet = node.kubelet
        admit(node, A)
        cgroups.set(A, PAUSE, MAIN)
        kubelet.prestart(P0, env=request())
        kubelet.prestart(P0, env=request())  # its next container
        mark = node.plugin.mark
        kubelet.poststop(P0)
        kubelet.poststop(P0)
        node.plugin.until_logged("scrub waits", mark, region=P0)
        assert node.afu(P0) == AFU
        cgroups.set(A, PAUSE)
        node.plugin.until_logged("region scrubbed", mark, region=P0)
        assert node.afu(P0) == BLANK
