"""The life of an allocation, from Allocate to Deallocate, as kubelet and the cards see it."""

import asyncio
from importlib.util import find_spec

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    CARD,
    CARD_2,
    CARDS,
    FACTORY,
    HEALTHY,
    ID,
    NO_REQUEST,
    OTHER_BLANK,
    OTHER_CARDS,
    OTHER_ID,
    OTHER_REGIONS,
    P0,
    P1,
    P2,
    REGIONS,
    UNHEALTHY,
    Node,
    request,
)

from fpga_plugin.demo.double import EXTENDED, FORK, KubeletDouble
from fpga_plugin.demo.pod import DemoContainer, DemoPod
from fpga_plugin.kubernetes.names import ResourceName


def test_every_resource_is_registered_and_every_region_blank_before_it_is_healthy():
    with Node(f"1x2,1x1@{OTHER_ID}") as node:
        node.kubelet.start()
        node.start()
        node.settled()
        assert {r.resource_name for r in node.kubelet.registrations} == {
            REGIONS,
            CARDS,
            OTHER_REGIONS,
            OTHER_CARDS,
        }
        for sent in node.kubelet.registrations:
            assert sent.version == "v1beta1"
            assert "/" not in sent.endpoint
            for options in (sent.options, node.kubelet.options[sent.resource_name]):
                assert options.pre_start_required
                assert options.get_preferred_allocation_available
                assert options.post_stop_required
                assert options.deallocate_required
        assert node.kubelet.listed(REGIONS) == {P0: HEALTHY, P1: HEALTHY}
        assert node.kubelet.listed(CARDS) == {CARD: HEALTHY}
        assert node.kubelet.listed(OTHER_REGIONS) == {f"{CARD_2}-p0": HEALTHY}
        assert node.kubelet.listed(OTHER_CARDS) == {CARD_2: HEALTHY}
        assert {name: node.afu(name) for name in node.state()} == {
            P0: BLANK,
            P1: BLANK,
            f"{CARD_2}-p0": OTHER_BLANK,
        }
        # What comes up with the factory's image is not given out before it is blank.
        assert node.kubelet.endpoints[REGIONS].lists[0] == {P0: UNHEALTHY, P1: UNHEALTHY}
        assert node.kubelet.endpoints[REGIONS].numa == {P0: [0], P1: [0]}


def test_nothing_is_scrubbed_before_kubelet_has_said_what_is_in_use():
    with Node() as node:
        plugin = node.start()
        plugin.until_logged("waiting for kubelet")
        assert {node.afu(region) for region in (P0, P1)} == {FACTORY}
        node.kubelet.start()
        node.settled()
        assert {node.afu(region) for region in (P0, P1)} == {BLANK}


def test_an_allocation_from_allocate_to_deallocate():
    with Node().up() as node:
        kubelet = node.kubelet

        answer = kubelet.allocate(P1)
        assert dict(answer.envs) == {
            "FPGA_DEVICE_0000_10_00_0_P1": "/dev/dfl-port.1",
            "FPGA_DEVICE_1": "/dev/dfl-port.1",
            "FPGA_DEVICES_REGION_CE489693": "/dev/dfl-port.1",
        }
        assert [(d.container_path, d.host_path, d.permissions) for d in answer.devices] == [
            ("/dev/dfl-port.1", "/dev/dfl-port.1", "rw")
        ]
        assert not answer.mounts
        assert not answer.annotations
        assert not answer.cdi_devices
        kubelet.until(CARDS, {})  # the card is partitioned now
        assert kubelet.listed(REGIONS) == {P0: HEALTHY, P1: HEALTHY}
        assert node.afu(P1) == BLANK  # Allocate touches nothing

        kubelet.prestart(P1, env=request())
        assert node.afu(P1) == AFU
        assert node.afu(P0) == BLANK

        mark = node.plugin.mark
        kubelet.poststop(P1)
        scrubbed = node.plugin.until_logged("region scrubbed", mark, region=P1)
        assert list(scrubbed["steps"]) == [
            "quiesce",
            "clear errors",
            "restore defaults",
            "program blank",
            "verify",
            "clear memory",
        ]
        assert node.afu(P1) == BLANK
        assert kubelet.listed(REGIONS) == {P0: HEALTHY, P1: HEALTHY}
        assert kubelet.listed(CARDS) == {}  # the allocation goes on: its container may start again

        kubelet.deallocate(P1)
        kubelet.until(CARDS, {CARD: HEALTHY})
        assert kubelet.listed(REGIONS) == {P0: HEALTHY, P1: HEALTHY}
        assert node.scrubs(P1, mark) == 1  # it was clean already
        assert node.plugin.stop() == 0


@pytest.mark.skipif(
    find_spec("_sha2") is None and find_spec("_sha256") is None,
    reason="this interpreter has no SHA-256 of its own",
)
def test_deallocate_alone_scrubs_and_the_device_is_unhealthy_until_that_is_done():
    with Node().up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request())
        kubelet.until(CARDS, {})
        # The scrub waits as long as somebody has the port open.
        fault = node.arm(P0, "port-open")
        kubelet.deallocate(P0)
        kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
        kubelet.until(CARDS, {CARD: UNHEALTHY})
        assert node.afu(P0) == AFU
        fault.unlink()
        kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        kubelet.until(CARDS, {CARD: HEALTHY})
        assert node.afu(P0) == BLANK


def test_a_whole_card_comes_with_all_its_nodes_and_hides_its_regions():
    with Node("2x3").up() as node:
        kubelet = node.kubelet
        answer = kubelet.allocate(CARD, resource=CARDS)
        nodes = [f"/dev/dfl-port.{port}" for port in range(3)]
        assert dict(answer.envs) == {
            **{f"FPGA_DEVICE_0000_10_00_0_P{port}": node for port, node in enumerate(nodes)},
            **{f"FPGA_DEVICE_{number}": node for number, node in enumerate(nodes, 1)},
            "FPGA_DEVICES_FPGA_CE489693": ",".join(nodes),
        }
        assert [d.host_path for d in answer.devices] == [f"/dev/dfl-port.{n}" for n in range(3)]
        others = {f"{CARD_2}-p{port}": HEALTHY for port in range(3)}
        kubelet.until(REGIONS, others)
        assert kubelet.listed(CARDS) == {CARD: HEALTHY, CARD_2: HEALTHY}

        # Requests go to the regions in order; what is left over is handed over blank.
        env = request(AFU, n="2") | request(AFU_2, n="10")
        kubelet.prestart(CARD, env=env, resource=CARDS)
        assert [node.afu(region) for region in (P0, P1, P2)] == [AFU, AFU_2, BLANK]

        kubelet.poststop(CARD, resource=CARDS)
        kubelet.deallocate(CARD, resource=CARDS)
        kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY, P2: HEALTHY} | others)
        kubelet.until(CARDS, {CARD: HEALTHY, CARD_2: HEALTHY})
        assert {node.afu(region) for region in (P0, P1, P2)} == {BLANK}


def test_several_devices_in_one_call_are_served_in_device_order():
    with Node("2x2").up() as node:
        q0 = f"{CARD_2}-p0"
        answer = node.kubelet.allocate(q0, P1, P0)
        assert dict(answer.envs) == {
            "FPGA_DEVICE_0000_10_00_0_P0": "/dev/dfl-port.0",
            "FPGA_DEVICE_0000_10_00_0_P1": "/dev/dfl-port.1",
            "FPGA_DEVICE_0000_11_00_0_P0": "/dev/dfl-port.2",
            "FPGA_DEVICE_1": "/dev/dfl-port.0",
            "FPGA_DEVICE_2": "/dev/dfl-port.1",
            "FPGA_DEVICE_3": "/dev/dfl-port.2",
            "FPGA_DEVICES_REGION_CE489693": "/dev/dfl-port.0,/dev/dfl-port.1,/dev/dfl-port.2",
        }
        # Suffixes: numbers by value and before other strings.
        env = request(AFU_3, n="b") | request(AFU_2, n="10") | request(AFU, n="9")
        node.kubelet.prestart(q0, P1, P0, env=env)
        assert [node.afu(region) for region in (P0, P1, q0)] == [AFU, AFU_2, AFU_3]
        node.kubelet.until(CARDS, {})
        # One of them goes back; the card stays partitioned for the other.
        node.kubelet.deallocate(P0, q0)
        node.kubelet.until(CARDS, {CARD_2: HEALTHY})
        assert [node.afu(region) for region in (P0, P1, q0)] == [BLANK, AFU_2, BLANK]


def test_a_container_with_two_resources_gets_one_prestart_for_each():
    with Node(f"1x2,1x1@{OTHER_ID}").up() as node:
        q0 = f"{CARD_2}-p0"
        env = request(AFU_3, interface=OTHER_ID, n="0") | request(AFU_2, n="1")
        node.kubelet.allocate(P0)
        node.kubelet.allocate(q0, resource=OTHER_REGIONS)
        node.kubelet.prestart(P0, env=env)
        assert (node.afu(P0), node.afu(q0)) == (AFU_2, OTHER_BLANK)
        node.kubelet.prestart(q0, env=env, resource=OTHER_REGIONS)
        assert (node.afu(P0), node.afu(q0)) == (AFU_2, AFU_3)


def test_a_container_that_starts_again_gets_its_region_programmed_anew():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        mark = node.plugin.mark
        node.kubelet.prestart(P0, env=request())
        steps = node.steps(P0, mark)
        assert steps[0] == "quiesce"  # what its last container left running
        assert "program" in steps
        # The pod's own image needs no scrub before the next.
        node.kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == AFU_2
        assert node.scrubs(P0, mark) == 0


def test_no_request_hands_over_a_blank_region_and_blanks_it_again_for_the_next_container():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        mark = node.plugin.mark
        node.kubelet.prestart(P0, env=NO_REQUEST)
        assert node.afu(P0) == BLANK
        assert node.scrubs(P0, mark) == 0
        node.kubelet.prestart(P0, env=NO_REQUEST)
        assert node.scrubs(P0, mark) == 1
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU
        node.kubelet.prestart(P0, env=NO_REQUEST)
        assert node.afu(P0) == BLANK


def test_driver_parameters_hold_for_the_allocation_and_are_taken_back():
    with Node().up() as node:
        before = node.state()[P0]["clock"]
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(params="clock=1000,debug=1"))
        assert (node.afu(P0), node.state()[P0]["clock"]) == (AFU, 1000)
        assert node.state()[P1]["clock"] == before
        # The next container of the pod asks for the default.
        node.kubelet.prestart(P0, env=request())
        assert node.state()[P0]["clock"] == before
        node.kubelet.prestart(P0, env=request(params="clock=10"))
        assert node.state()[P0]["clock"] == 10
        node.give_back(P0)
        assert node.state()[P0]["clock"] == before


def test_the_next_pod_finds_the_region_scrubbed():
    with Node("1x1").up() as node:
        for afu in (AFU, AFU_2):
            node.kubelet.allocate(P0)
            node.kubelet.prestart(P0, env=request(afu))
            assert node.afu(P0) == afu
            node.give_back(P0)
            assert node.afu(P0) == BLANK


def test_without_a_blank_bitstream_nothing_is_healthy_until_the_file_appears():
    with Node() as node:
        blank = node.own_store() / ID / "blank.gbs"
        image = blank.read_bytes()
        blank.unlink()
        node.kubelet.start()
        plugin = node.start()
        said = plugin.until_logged("blank bitstream missing")
        assert str(blank) in said["reason"]
        null_image, _, without = said["hint"].partition("FPGA_PLUGIN_SCRUB=best-effort")
        assert "null image" in null_image, "the first thing to do"
        assert "the last pod's image still in them" in without
        node.kubelet.until(REGIONS, {P0: UNHEALTHY, P1: UNHEALTHY})
        node.kubelet.until(CARDS, {CARD: UNHEALTHY})
        assert {node.afu(region) for region in (P0, P1)} == {FACTORY}
        new = blank.with_suffix(".new")
        new.write_bytes(image)
        new.rename(blank)
        node.settled()
        assert {node.afu(region) for region in (P0, P1)} == {BLANK}


def test_best_effort_does_without_a_blank_bitstream_but_gives_nobody_the_last_image():
    with Node("1x1", scrub="best-effort") as node:
        (node.own_store() / ID / "blank.gbs").unlink()
        node.up()
        assert node.afu(P0) == FACTORY
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU
        node.give_back(P0)
        assert node.afu(P0) == AFU
        assert node.state()[P0]["open"] == 0


REGIONS_NAME = ResourceName(REGIONS)


def a_pod(**how: object) -> DemoPod:
    devices = {REGIONS_NAME: 1}
    return DemoPod(
        name="p",
        init_containers=(DemoContainer(name="init", devices=devices, env=request(AFU)),),
        containers=(DemoContainer(name="app", devices=devices, env=request(AFU_2)),),
        **how,  # type: ignore[arg-type]
    )


async def through_its_life(double: KubeletDouble, node: Node, pod: DemoPod) -> list[str]:
    """Init container, app container, end; the AFU that each was given."""
    given = []
    await double.wait_for(REGIONS_NAME, lambda listed: len(listed.healthy) == 2)
    await double.admit(pod)
    for name in ("init", "app"):
        await double.start_container(pod, name)
        ((device,),) = double.devices(pod, name).values()
        given.append(f"{device} {node.afu(device)}")
        await double.remove_container(pod, name)
    await double.end_pod(pod)
    await double.wait_for(ResourceName(CARDS), lambda listed: listed.healthy)
    return given


def test_an_init_container_hands_its_region_on_and_each_gets_what_it_asks_for():
    async def story(node: Node) -> None:
        double = KubeletDouble(str(node.kubelet_dir), profile=EXTENDED)
        await double.start()
        assert await through_its_life(double, node, a_pod()) == [f"{P0} {AFU}", f"{P0} {AFU_2}"]
        await double.stop()

    with Node() as node:
        node.start()
        asyncio.run(story(node))
        assert {node.afu(region) for region in (P0, P1)} == {BLANK}


def test_on_the_fork_each_container_has_a_region_of_its_own():
    async def story(node: Node) -> None:
        double = KubeletDouble(str(node.kubelet_dir), profile=FORK)
        await double.start()
        assert await through_its_life(double, node, a_pod()) == [f"{P0} {AFU}", f"{P1} {AFU_2}"]
        await double.stop()

    with Node() as node:
        node.start()
        asyncio.run(story(node))
        assert {node.afu(region) for region in (P0, P1)} == {BLANK}
