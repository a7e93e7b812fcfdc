"""Release without being told, by the daemon as a process: how soon, and what is asked for it."""

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from daemon_support import AFU_2, BLANK, CARDS, P0, P1
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from pods_support import APP_ENV, REGION, as_kubelet_has_it, fpga, logged, on_stock_kubelet

from fpga_plugin.demo.double import EXTENDED
from fpga_plugin.demo.pod import DemoPod
from fpga_plugin.deviceplugin.allocatable import QUIET
from fpga_plugin.kubernetes.names import ResourceName

CARD_RESOURCE = ResourceName(CARDS)
INTERVAL = 0.02


async def running(double, server) -> DemoPod:
    """A pod whose one container runs on P0."""
    pod = DemoPod(name="compress", containers=(fpga("app", APP_ENV),))
    server.pods[pod.uid] = as_kubelet_has_it(pod)
    await double.admit(pod)
    await double.start_container(pod, "app")
    return pod


async def all_free(double) -> None:
    await double.wait_for(CARD_RESOURCE, lambda listed: len(listed.healthy) == 1)
    await double.wait_for(REGION, lambda listed: listed.healthy == {P0, P1})


async def quiet(double) -> Counter[str]:
    """Let some intervals go by without a call; that there is none can only be waited for."""
    while True:
        before = double.podresources_calls.copy()
        await intervals(double, QUIET + 2)
        if double.podresources_calls == before:
            return before


async def intervals(double, times: int) -> None:
    """Let intervals go by; in each the plugin answers a call, so that what was due has begun."""
    for _ in range(times):
        await asyncio.sleep(INTERVAL)
        await double.preferred(REGION, [], [], 0)


def test_a_region_is_clean_and_offered_after_at_most_three_lists_without_its_pod():
    async def story(node, double, server):
        pod = await running(double, server)
        assert node.afu(P0) == AFU_2
        before = double.podresources_calls["List"]
        await double.end_pod(pod)
        await all_free(double)
        assert node.afu(P0) == BLANK
        assert double.podresources_calls["List"] - before <= 3

    on_stock_kubelet(story, reconcile_interval="0.1")


async def listed_again(double, times: int) -> None:
    """Until the plugin has asked for so many Lists more."""
    before = double.podresources_calls["List"]
    while double.podresources_calls["List"] < before + times:  # noqa: ASYNC110  # no event
        await asyncio.sleep(INTERVAL)


def write_half_a_checkpoint(node) -> None:
    (node.kubelet_dir / "new").write_text('{"Data": {"PodDevice')
    (node.kubelet_dir / "new").replace(node.kubelet_dir / "kubelet_internal_checkpoint")


def test_nothing_is_asked_while_nothing_is_owned():
    async def story(node, double, server):
        await quiet(double)
        pod = await running(double, server)
        await double.end_pod(pod)
        await all_free(double)
        before = await quiet(double)
        await intervals(double, 20)
        assert double.podresources_calls == before

    on_stock_kubelet(story)


def test_kubelets_own_records_are_asked_again_once_a_device_is_owned():
    async def story(node, double, server):
        await quiet(double)
        await running(double, server)
        await listed_again(double, 3)

    on_stock_kubelet(story)


def test_while_podresources_fails_nothing_is_released_and_then_it_is():
    async def story(node, double, server):
        pod = await running(double, server)
        double.podresources_error = GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        await double.end_pod(pod)
        await logged(node, "kubelet's records cannot be read: nothing is released")
        await listed_again(double, 5)
        assert node.afu(P0) == AFU_2
        double.podresources_error = None
        await all_free(double)
        assert node.afu(P0) == BLANK

    on_stock_kubelet(story)


@pytest.mark.parametrize("checkpoint", ["readable", "not readable"])
def test_a_kubelet_that_restarts_and_does_not_know_its_pods_yet_releases_nothing(checkpoint):
    """Without its API server it lists none, and the Pods API of 1.36 says that there is none."""

    async def story(node, double, server):
        pod = await running(double, server)
        pods, free_inactive = dict(double.pods), double.free_inactive

        async def sources_not_ready() -> None:
            """Devices of pods that it does not know yet stay with them."""

        double.free_inactive = sources_not_ready
        double.pods.clear()
        server.pods.clear()
        if checkpoint == "not readable":
            await double.stop()
            await logged(node, "waiting for kubelet")
            spoil = partial(write_half_a_checkpoint, node)
            before, double.write_checkpoint = double.write_checkpoint, spoil
            await double.start()
            await double.wait_for(REGION, lambda listed: P0 in listed.ids)
            # Nothing is scrubbed before it can be read: let it be that once.
            double.write_checkpoint = before
            before()
            await logged(node, "kubelet's records read", node.plugin.mark)
            double.write_checkpoint = spoil
        else:
            await double.restart()
        await listed_again(double, 10)
        assert node.afu(P0) == AFU_2
        assert node.plugin.logged("released") == []
        assert P0 in double.lists[REGION].healthy

        # Its API server is back: so are its pods, and this one ends as any other.
        double.pods.update(pods)
        server.pods[pod.uid] = as_kubelet_has_it(pod)
        double.free_inactive = free_inactive
        if checkpoint == "not readable":
            double.write_checkpoint = before
        await double.end_pod(pod)
        await all_free(double)
        assert node.afu(P0) == BLANK

    on_stock_kubelet(story)


def test_where_the_checkpoint_cannot_be_read_the_pods_api_ends_an_allocation():
    async def story(node, double, server):
        pod = await running(double, server)
        double.write_checkpoint = partial(write_half_a_checkpoint, node)
        double.write_checkpoint()
        await double.end_pod(pod)
        await listed_again(double, 6)
        assert node.afu(P0) == AFU_2, "the Pods API still has the pod"
        del server.pods[pod.uid]
        await all_free(double)
        assert node.afu(P0) == BLANK

    on_stock_kubelet(story)


def test_on_an_extended_kubelet_a_deallocate_that_was_missed_is_caught():
    async def story(node, double, server):
        pod = await running(double, server)
        assert node.afu(P0) == AFU_2
        await asyncio.to_thread(node.plugin.kill)
        while not double.connections[REGION].stopped:  # noqa: ASYNC110  # no event
            await asyncio.sleep(INTERVAL)
        await double.end_pod(pod)  # and its Deallocate goes nowhere
        node.start()
        await all_free(double)
        assert node.afu(P0) == BLANK

    on_stock_kubelet(story, profile=EXTENDED)


def test_a_kubelet_that_lost_the_devices_is_registered_with_anew():
    async def story(node, double, server):
        await quiet(double)
        registered = len(double.requests)
        listed = double.lists[REGION]
        # It is asked only while something may have changed: here a pod comes.
        await running(double, server)
        double.lists[REGION] = replace(listed, healthy=frozenset())
        await logged(node, "kubelet has lost the resource's devices: registering again")
        await double.wait_for(REGION, lambda now: now.healthy == {P0, P1})
        assert len(double.requests) == registered + 1
        await logged(node, "kubelet has the resource's devices again")
        assert node.afu(P0) == AFU_2, "whoever runs is not disturbed"

    on_stock_kubelet(story)


def test_a_pod_keeps_its_device_when_the_operator_changes_the_prefix():
    """Cgroups are not seen here: kubelet's records are all that keeps the region from a scrub."""
    old, new = REGION, ResourceName(REGION.replace("fpga.intel.com", "fpga.example.com"))

    async def story(node, double, server):
        pod = await running(double, server)
        await asyncio.to_thread(node.plugin.kill)
        node.set(resource_prefix="fpga.example.com")
        node.start()
        await logged(node, "kubelet's records read")
        await double.wait_for(new, lambda listed: listed.healthy == {P1})
        await listed_again(double, 6)
        assert node.afu(P0) == AFU_2
        await double.wait_for(old, lambda listed: listed.healthy == {P0})
        await double.start_container(pod, "app")  # again
        assert node.afu(P0) == AFU_2
        await double.end_pod(pod)
        await double.wait_for(new, lambda listed: listed.healthy == {P0, P1})
        await double.wait_for(old, lambda listed: not listed.healthy)
        assert node.afu(P0) == BLANK

    on_stock_kubelet(story)


@pytest.mark.parametrize("again", [True, False])
def test_a_static_pod_that_comes_back_on_another_region_does_not_hold_up_its_first(tmp_path, again):
    """It has its uid again. Where its cgroup is still the old one, the first may still run."""
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text("pids\n")

    async def story(node, double, server):
        pod = DemoPod(name="compress", containers=(fpga("app", APP_ENV),))
        cgroup = root / f"kubepods/pod{pod.uid}"

        def populate() -> None:
            cgroup.mkdir(parents=True)
            (cgroup / "cgroup.events").write_text("populated 1\n")

        async def runs_on(region: str) -> None:
            server.pods[pod.uid] = as_kubelet_has_it(pod)
            await double.admit(pod)
            (held,) = double.held.values()
            assert held.devices == {0: (region,)}
            await double.start_container(pod, "app")
            assert node.afu(region) == AFU_2

        populate()
        await runs_on(P0)
        await double.end_pod(pod)
        await logged(node, "scrub waits")
        if again:
            cgroup.rename(tmp_path / "gone")
            populate()
        await runs_on(P1)  # P0 is not clean
        if again:
            await double.wait_for(REGION, lambda listed: listed.healthy == {P0, P1})
            assert node.afu(P0) == BLANK
        else:
            await listed_again(double, 10)
            assert node.afu(P0) == AFU_2

    on_stock_kubelet(story, cgroup_root=str(root))
