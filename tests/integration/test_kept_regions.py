"""The region of a failed container is kept as it was, if its pod asks, and given to nobody."""

import asyncio
import contextlib
import time

import pytest
from daemon_support import AFU_2, BLANK, P0, P1, Node, eventually
from dra_support import DraNode
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from pods_support import APP_ENV, REGION, as_kubelet_has_it, fpga, logged, on_stock_kubelet

from fpga_plugin.demo.pod import DemoPod
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.observability.client import ask

DEBUG = "fpga.intel.com/debug"
ALLOWED = {"debug_namespaces": "tenant", "http_address": "127.0.0.1:0"}
CARD = P0.rpartition("-p")[0]


def status(node: Node) -> dict:
    return ask(str(node.told().state_dir), "GET", "/status")


def regions(node: Node) -> dict[str, dict]:
    return {one["region"]: one for card in status(node)["cards"] for one in card["regions"]}


def card(node: Node, operation: str) -> dict:
    body = {"operation": operation, "card": CARD}
    return ask(str(node.told().state_dir), "POST", "/card", body)


def refuses_an_operator(node: Node, region: str) -> None:
    """Neither programs by hand nor changes its functions, until it is released."""
    assert "drained" in card(node, "drain")
    body = {"id": "x" * 32, "card": CARD, "region": region, "bitstream": AFU_2}
    with pytest.raises(FpgaPluginError, match="kept for debugging"):
        ask(str(node.state_dir), "POST", "/program", body)
    with pytest.raises(FpgaPluginError, match="kept for debugging"):
        card(node, "functions-make")
    card(node, "undrain")


async def began(node, double, server, *, value="true", name="compress", ends=3):
    """A pod with the annotation, whose container ran and ended; which region it had."""
    pod = DemoPod(name=name, namespace="tenant", containers=(fpga("app", APP_ENV),))
    known = server.pods[pod.uid] = as_kubelet_has_it(pod)
    known.annotations = {DEBUG: value}
    await double.admit(pod)
    await double.start_container(pod, "app")
    (region,) = double.devices(pod, "app")[REGION]
    assert node.afu(region) == AFU_2
    known.ended("app", ends, started=time.time())
    known.phase = "Failed" if ends else "Succeeded"
    return pod, region


async def left(node, double, server, **kwargs):
    """The same, and kubelet has given its device back."""
    pod, region = await began(node, double, server, **kwargs)
    await double.end_pod(pod)
    return pod, region


async def until(look):
    return await asyncio.to_thread(eventually, look)


async def scrubbed(node, double, region):
    await until(lambda: node.afu(region) == BLANK)
    await double.wait_for(REGION, lambda listed: listed.healthy == {P0, P1})


def kept(node: Node, region: str):
    """For whom it is; None while the plugin does not answer."""
    with contextlib.suppress(FpgaPluginError):
        return regions(node)[region]["kept"]
    return None


def test_the_region_of_a_container_that_failed_is_kept_and_given_to_nobody():
    async def story(node, double, server):
        _, region = await left(node, double, server, value="30m")
        await logged(node, "region kept for debugging", region=region)
        assert node.afu(region) == AFU_2
        told = (await asyncio.to_thread(regions, node))[region]
        assert (told["condition"], told["ownership"], told["failed"]) == ("DIRTY", "FREE", False)
        assert told["owner"] is None
        assert told["kept"]["pod"] == "compress"
        assert told["kept"]["namespace"] == "tenant"
        assert told["kept"]["failure"] == "container 'app' ended with exit code 3"
        assert 0 < told["kept"]["seconds_left"] <= 1800
        assert "kept for debugging" in told["reason"]
        assert (await asyncio.to_thread(status, node))["trouble"]["kept"] == 1
        await double.wait_for(REGION, lambda listed: listed.healthy == {P0, P1} - {region})
        with pytest.raises(GRPCError, match="is kept for debugging") as caught:
            await double.allocate(REGION, [region])
        assert caught.value.status is Status.FAILED_PRECONDITION
        whole = REGION.replace("region-", "fpga-")
        with pytest.raises(GRPCError, match="kept for debugging"):
            await double.allocate(whole, [CARD])
        inspected = await asyncio.to_thread(
            ask, str(node.state_dir), "POST", "/card", {"operation": "inspect", "card": CARD}
        )
        read = {one["region"]: one["afu_id"] for one in inspected["regions"]}
        assert read[region] == AFU_2

        # Neither the plugin's death nor its start ends it.
        await asyncio.to_thread(node.plugin.kill)
        node.start()
        await logged(node, "kubelet's records read")
        again = await until(lambda: kept(node, region))
        assert again["seconds_left"] <= told["kept"]["seconds_left"]
        await double.wait_for(REGION, lambda listed: listed.healthy == {P0, P1} - {region})
        assert node.afu(region) == AFU_2

        await asyncio.to_thread(refuses_an_operator, node, region)
        assert node.afu(region) == AFU_2

        # A neighbour is served meanwhile.
        other = DemoPod(name="other", namespace="tenant", containers=(fpga("app", APP_ENV),))
        server.pods[other.uid] = as_kubelet_has_it(other)
        await double.admit(other)
        await double.start_container(other, "app")
        assert node.afu(region) == AFU_2
        (neighbour,) = double.devices(other, "app")[REGION]
        since = node.plugin.mark
        await double.end_pod(other)
        scrub = await asyncio.to_thread(
            node.plugin.until_logged, "region scrubbed", since, region=neighbour
        )
        assert "clear memory" not in scrub["steps"]

        since = node.plugin.mark
        await asyncio.to_thread(card, node, "release")
        scrub = await asyncio.to_thread(
            node.plugin.until_logged, "region scrubbed", since, region=region
        )
        assert "clear memory" in scrub["steps"]
        await scrubbed(node, double, region)
        await double.wait_for(whole, lambda listed: listed.healthy == {CARD})
        assert (await asyncio.to_thread(regions, node))[region]["kept"] is None

    on_stock_kubelet(story, **ALLOWED)


def test_a_region_is_kept_no_longer_than_it_was_asked_for():
    async def story(node, double, server):
        _, region = await left(node, double, server, value="1s")
        await logged(node, "region kept for debugging", region=region)
        await logged(node, "region no longer kept for debugging", region=region)
        await scrubbed(node, double, region)

    on_stock_kubelet(story, **ALLOWED)


def test_what_was_kept_ends_when_the_operator_no_longer_allows_it():
    async def story(node, double, server):
        _, region = await left(node, double, server)
        await logged(node, "region kept for debugging", region=region)
        await asyncio.to_thread(node.plugin.kill)
        node.set(debug_namespaces="")
        node.start()
        await scrubbed(node, double, region)

    on_stock_kubelet(story, **ALLOWED)


@pytest.mark.parametrize(
    ("value", "namespaces", "ends", "says"),
    [
        ("true", "elsewhere", 3, None),  # its namespace was known: nobody was asked about it
        ("for ever", "*", 3, "a debug annotation has no effect"),
        ("true", "*", 0, "region not kept: no failure of its container is known"),
    ],
)
def test_a_region_is_not_kept(value, namespaces, ends, says):
    async def story(node, double, server):
        _, region = await left(node, double, server, value=value, ends=ends)
        if says is not None:
            await logged(node, says)
        await scrubbed(node, double, region)
        assert not node.plugin.logged("region kept for debugging")
        if says is None:
            assert (await asyncio.to_thread(status, node))["warnings"] == []
        elif "no effect" in says:
            (warning,) = (await asyncio.to_thread(status, node))["warnings"]
            assert "fpga.intel.com/debug has no effect" in warning["message"]

    on_stock_kubelet(story, **(ALLOWED | {"debug_namespaces": namespaces}))


def test_one_pods_regions_are_kept_at_a_time():
    async def story(node, double, server):
        _, first = await left(node, double, server)
        await logged(node, "region kept for debugging", region=first)
        _, second = await left(node, double, server, name="second")
        assert second != first
        await logged(node, "region not kept: another pod's is", region=second)
        await until(lambda: node.afu(second) == BLANK)
        await double.wait_for(REGION, lambda listed: listed.healthy == {second})
        assert node.afu(first) == AFU_2

    on_stock_kubelet(story, **ALLOWED)


def test_a_container_that_starts_again_finds_its_region_programmed_anew():
    async def story(node, double, server):
        pod, region = await began(node, double, server)
        server.pods[pod.uid].phase = "Running"
        scrubs = node.plugin.mark
        await double.start_container(pod, "app")
        await logged(node, "region prepared", scrubs, region=region)
        server.pods[pod.uid].ended("app", 0, started=time.time())
        server.pods[pod.uid].phase = "Succeeded"
        await double.end_pod(pod)
        await logged(node, "region not kept: no failure of its container is known", region=region)
        await double.wait_for(REGION, lambda listed: listed.healthy == {P0, P1})

    on_stock_kubelet(story, **ALLOWED)


def test_port_errors_and_the_accelerator_are_logged_during_the_claim():
    async def story(node, double, server):
        pod, region = await began(node, double, server, ends=0)
        await logged(node, "accelerator of a debugged region", region=region, afu_id=AFU_2)
        await double.end_pod(pod)

    on_stock_kubelet(story, **ALLOWED)


def test_that_nobody_is_debugged_by_dra_is_said() -> None:
    with DraNode(debug_namespaces="team").up() as node:
        node.plugin.until_logged("no pod is debugged with FPGA_PLUGIN_MODE=dra")
