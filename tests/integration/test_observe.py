"""FPGA_PLUGIN_OBSERVE: what is said before anything is touched."""

import socket
from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    CARD,
    CARDS,
    ID,
    P0,
    P1,
    REGIONS,
    Node,
    eventually,
    message,
    sign_manifest,
)

END = "observing only: nothing is registered (FPGA_PLUGIN_OBSERVE)"


def answer():
    return message("ContainerAllocateResponse")()


def observed(node: Node):
    node.set(observe="true")
    plugin = node.start()
    plugin.until_logged(END)
    return plugin


def test_a_region_that_kubelet_has_given_to_a_pod_is_not_among_those_to_be_wiped():
    with Node("2x2") as node:
        node.kubelet.checkpoint(("0" * 8 + "-1", "main", REGIONS, [P0], answer()))
        first, second = observed(node).logged("would serve card")
        assert (first["in_use"], first["would_wipe"]) == ([P0], [P1])
        assert second["in_use"] == []
        assert len(second["would_wipe"]) == 2
        assert first["resources"] == [REGIONS, CARDS]


def test_a_whole_card_in_use_is_all_its_regions():
    with Node("1x2") as node:
        node.kubelet.checkpoint(("0" * 8 + "-1", "main", CARDS, [CARD], answer()))
        (line,) = observed(node).logged("would serve card")
        assert (line["in_use"], line["would_wipe"]) == ([P0, P1], [])


@pytest.mark.parametrize("kill", [False, True])
def test_claims_of_an_earlier_life_are_in_use(*, kill: bool):
    with Node("1x2") as node:
        node.up()
        node.kubelet.allocate(P1)
        node.plugin.kill() if kill else node.plugin.stop()
        (line,) = observed(node).logged("would serve card")
        assert (line["in_use"], line["would_wipe"]) == ([P1], [P0])


def test_a_card_whose_blank_bitstream_is_missing_is_wiped_of_nothing():
    with Node("1x2", bitstream_dir="/nonexistent") as node:
        (line,) = observed(node).logged("would serve card")
        assert line["missing"] == f"no blank bitstream at /nonexistent/{ID}/blank.gbs"
        assert line["would_wipe"] == []
        assert "best-effort" in line["hint"]


def test_devices_of_another_plugin_are_named():
    with Node("1x2") as node:
        node.kubelet.checkpoint(("0" * 8 + "-1", "main", REGIONS, ["dfl-fme.0"], answer()))
        (line,) = observed(node).logged("would leave card alone")
        assert line["foreign"] == ["dfl-fme.0"]
        assert line["pods"] == ["0" * 8 + "-1"]


def test_no_source_of_pod_specs_is_a_warning_and_a_served_socket_is_one():
    with Node("1x1") as node:
        (line,) = observed(node).logged("pod specs: no source answers")
        assert line["level"] == "warning"
        assert "FPGA_PLUGIN_PODS_SOCKET is empty" in line["without"]
        node.plugin.stop()
        path = Path(node.folder, "pods.sock")
        with socket.socket(socket.AF_UNIX) as served:
            served.bind(str(path))
            served.listen()
            node.set(pods_socket=str(path))
            (line,) = observed(node).logged("pod specs")
            assert line["sources"] == ["Pods API"]


def test_observing_writes_nothing_beside_a_plugin_that_serves():
    with Node("1x2") as node:
        node.up()
        node.kubelet.allocate(P0)
        eventually((node.state_dir / "status.sock").exists)  # a moment after the start

        def written() -> dict[Path, int]:
            # Who reads a journal that another one writes takes a lock in its -shm file.
            paths = [path for path in node.state_dir.rglob("*") if not path.name.endswith("-shm")]
            return {path: path.stat().st_mtime_ns for path in paths}

        def unchanged() -> bool:
            before = written()
            observed(node)
            return written() == before

        eventually(unchanged)  # a second after the claim its history is written
        assert AFU not in {each["afu_id"] for each in node.state().values()}


def test_what_people_call_a_cards_interface_id_is_beside_it():
    with Node("1x1") as node:
        node.own_store()
        sign_manifest(node.store, f"--interface-alias={ID}=rack-cards").check_returncode()
        (line,) = observed(node).logged("would serve card")
        assert (line["interface_id"], line["interface_alias"]) == (ID, "rack-cards")
