"""The node's versions, read from the API server: again when kubelet registers, never in the way."""

import asyncio

from daemon_support import AFU, LIMIT, P0, eventually
from doubles.apiserver import ApiServerDouble, Reply
from doubles.loops import beside, until
from dra_support import NODE, DraNode
from test_status import told

from fpga_plugin.api.mirror import Backoff
from fpga_plugin.dra import nodecheck
from fpga_plugin.dra.nodecheck import NodeCheck

NODES = "/api/v1/nodes"


def node(runtime: str, kubelet: str = "v1.36.3"):
    info = {"kubeletVersion": kubelet, "containerRuntimeVersion": runtime}
    return {"metadata": {"name": NODE}, "status": {"nodeInfo": info}}


def checked(tmp_path, story) -> None:
    async def main():
        async with asyncio.timeout(LIMIT), ApiServerDouble() as server:
            server.objects = {NODES: {}}
            warned: list[str] = []
            check = NodeCheck(
                server.kubeconfig(tmp_path),
                NODE,
                warn=warned.append,
                backoff=lambda: Backoff(0.01, 0.05),
            )
            async with beside(check.run()):
                await story(server, check, warned)

    asyncio.run(main())


def test_it_asks_once_a_registration_and_not_again_while_all_is_well(tmp_path) -> None:
    async def story(server, check, warned):
        await server.put(NODES, node("containerd://2.1.4"))
        await asyncio.sleep(0.05)
        assert server.requests == []
        for number in (1, 2):
            check.wake()
            await until(lambda n=number: server.count("GET") == n)
        await asyncio.sleep(0.1)
        assert server.count("GET") == 2
        assert (check.concerns, warned) == ((), [])

    checked(tmp_path, story)


def test_a_concern_is_told_once_and_goes_when_the_node_was_mended(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(nodecheck, "AGAIN_SECONDS", 0.02)

    async def story(server, check, warned):
        await server.put(NODES, node("containerd://1.6.20"))
        check.wake()
        await until(lambda: server.count("GET") >= 3)
        assert len(warned) == 1
        assert check.concerns == tuple(warned)
        await server.put(NODES, node("containerd://2.1.4"))
        await until(lambda: check.concerns == ())
        asked = server.count("GET")
        await asyncio.sleep(0.1)
        assert server.count("GET") == asked

    checked(tmp_path, story)


def test_a_server_that_is_away_or_talks_nonsense_is_asked_again(tmp_path) -> None:
    async def story(server, check, warned):
        server.replies.extend(
            [
                Reply(503),
                Reply(0),
                Reply(404, b"<html>"),
                Reply(200, b"[]"),
                Reply(200, {"status": {"nodeInfo": {"kubeletVersion": 5}}}),
                Reply(200, {"status": {"nodeInfo": {"kubeletVersion": "x" * 2000}}}),
            ]
        )
        await server.put(NODES, node("containerd://1.6.20"))
        check.wake()
        await until(lambda: warned)
        assert not server.replies

    checked(tmp_path, story)


def test_a_runtime_without_cdi_shows_in_status_and_stops_nothing() -> None:
    with DraNode() as here:
        here.api.objects[f"{NODES}/{NODE}"] = node("containerd://1.7.20")
        here.up()
        here.plugin.until_logged("the node may not serve claims")
        (note,) = told(here, "status")["notes"]
        assert "enable_cdi = true" in note
        here.dra.prepare(here.claim("c", P0, bitstream=AFU))
        assert here.afu(P0) == AFU
        # A runtime that was updated takes kubelet's next registration.
        here.api.objects[f"{NODES}/{NODE}"] = node("containerd://2.1.4")
        here.dra.restart()
        here.plugin.until_logged("versions of the node")
        eventually(lambda: told(here, "status")["notes"] == [])


def test_a_kubelet_that_looks_elsewhere_is_what_not_ready_says() -> None:
    with DraNode() as here:
        (here.folder / "plugins_registry").mkdir()
        here.start()  # and no kubelet
        (reason, *_) = eventually(lambda: told(here, "status")["not_ready"])
        assert "not registered with kubelet yet" in reason
        assert f"FPGA_PLUGIN_KUBELET_ROOT is {here.folder}" in reason


def test_a_directory_that_is_not_kubelets_root_is_refused_and_left_as_it_is() -> None:
    with DraNode() as here:
        assert here.start().exit_code() == 1
        assert f"'{here.folder}' is not kubelet's root directory" in here.plugin.text
        assert "FPGA_PLUGIN_KUBELET_ROOT" in here.plugin.text
        assert not (here.folder / "plugins").exists()
