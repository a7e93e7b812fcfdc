"""Preprogrammed functions (FPGA_PLUGIN_ADVERTISE=af): handed over as they are, never programmed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    CARDS,
    FACTORY,
    HEALTHY,
    ID,
    NO_REQUEST,
    P0,
    P1,
    REGIONS,
    STORE,
    UNHEALTHY,
    Node,
    Refused,
    command,
    eventually,
    message,
    request,
)
from pods_support import PodsServer, as_kubelet_has_it, logged, on_stock_kubelet

from fpga_plugin.demo.double import KubeletDouble
from fpga_plugin.demo.pod import DemoContainer, DemoPod
from fpga_plugin.ids import AfuId, InterfaceId, Resource, ResourceKind
from fpga_plugin.kubernetes.names import ResourceName

INTEL_ID = "69528db6eb31577a8c3668f9faa081f6"
INTEL_AF = "fpga.intel.com/af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs"
"""What the Intel plugin's end-to-end test expects a node with `arria10.dcp1.2-nlb0` to have."""


def af(afu: str, interface: str = ID) -> str:
    return Resource("fpga.intel.com", ResourceKind.AF, InterfaceId(interface), AfuId(afu)).name


FUNCTION = af(FACTORY)

PLACEHOLDER = "d15ab1ed000000000110000000000000"
"""What a simulated slot's second function shows, whatever the slot holds."""


def put(node: Node, region: str, afu: str) -> None:
    """What another program loads while no plugin runs."""
    path = node.simulated / "state.json"
    state = json.loads(path.read_text())
    state["regions"][region]["afu_id"] = afu
    path.write_text(json.dumps(state))


def programmed(node: Node) -> list[str]:
    """Steps of all lives that programmed anything."""
    return [
        step
        for life in node.lives
        for line in life.lines
        for step in line.get("steps", ())
        if step.startswith("program")
    ]


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(advertise="af") as node:
        yield node.up()
        assert not programmed(node)


def restart(node: Node, **settings: str) -> None:
    node.set(**settings)
    node.again()


# ------------------------------------------------------------------ a pod's life


@pytest.mark.parametrize("kind", ["", "+no-pr"], ids=["PAC A10", "N3000"])
def test_a_pod_of_the_intel_plugins_default_mode_runs_unchanged(kind: str) -> None:
    # Its examples ask for one device of such a resource; its webhook takes FPGA_* variables away.
    with Node(f"1x1{kind}@{INTEL_ID}", advertise="af").up() as node:
        assert list(node.kubelet.endpoints) == [INTEL_AF]
        assert node.kubelet.listed(INTEL_AF) == {P0: HEALTHY}
        answer = node.kubelet.allocate(P0, resource=INTEL_AF)
        assert [d.host_path for d in answer.devices] == ["/dev/dfl-port.0"]
        mark = node.plugin.mark
        node.kubelet.prestart(P0, env=NO_REQUEST, resource=INTEL_AF)
        assert node.afu(P0) == FACTORY
        assert node.steps(P0, mark)[-1] == "verify"
        node.kubelet.poststop(P0, resource=INTEL_AF)
        node.kubelet.deallocate(P0, resource=INTEL_AF)
        scrubbed = node.plugin.until_logged("region scrubbed", mark, region=P0)
        assert list(scrubbed["steps"])[:2] == ["quiesce", "clear errors"]
        assert "stays, reset; its own memory is not cleared" in str(scrubbed["notes"])
        node.kubelet.until(INTEL_AF, {P0: HEALTHY})
        assert node.afu(P0) == FACTORY
        assert not programmed(node)
        assert not node.plugin.logged("blank bitstream missing")


def test_between_two_tenants_the_region_is_reset_and_the_cards_memory_cleared() -> None:
    with Node("1x1", advertise="af").up() as node:
        for _ in range(2):
            node.kubelet.allocate(P0, resource=FUNCTION)
            node.kubelet.prestart(P0, env=NO_REQUEST, resource=FUNCTION)
            mark = node.plugin.mark
            node.kubelet.deallocate(P0, resource=FUNCTION)
            scrubbed = node.plugin.until_logged("region scrubbed", mark, region=P0)
            assert {"quiesce", "clear memory", "verify"} <= scrubbed["steps"].keys()
            assert scrubbed["condition"] == "UNBLANKED"
        assert not programmed(node)


def test_a_container_that_starts_again_gets_its_region_reset(node: Node) -> None:
    node.kubelet.allocate(P0, resource=FUNCTION)
    node.kubelet.prestart(P0, env=NO_REQUEST, resource=FUNCTION)
    mark = node.plugin.mark
    node.kubelet.prestart(P0, env=NO_REQUEST, resource=FUNCTION)
    assert node.steps(P0, mark)[0] == "quiesce"


def test_a_pod_of_the_intel_plugin_lives_on_a_stock_kubelet() -> None:
    # demo/test-fpga-preprogrammed.yaml, as its webhook leaves it: one device, no variables.
    resource = ResourceName(INTEL_AF)

    async def story(node: Node, double: KubeletDouble, server: PodsServer) -> None:
        container = DemoContainer(name="test-container", devices={resource: 1}, env={})
        pod = DemoPod(name="test-fpga-preprogrammed", containers=(container,))
        server.pods[pod.uid] = as_kubelet_has_it(pod)
        await double.admit(pod)
        await double.start_container(pod, "test-container")
        mark = node.plugin.mark
        await double.end_pod(pod)
        await logged(node, "region scrubbed", mark, region=P0, condition="UNBLANKED")
        await double.wait_for(resource, lambda listed: listed.healthy == {P0, P1})
        assert not programmed(node)

    cards = f"1x2+no-pr@{INTEL_ID}"
    on_stock_kubelet(story, resource=resource, advertise="af", simulated_cards=cards)


def test_a_slot_on_vfio_pci_is_handed_over_with_its_function() -> None:
    # The other card's list is what says that kubelet was heard: a slot's function is read only
    # while the plugin holds it.
    with Node("1x1+ofs,1x1", advertise="af").up() as node:
        node.kubelet.until(FUNCTION, {P0: HEALTHY, "0000-11-00.0-p0": HEALTHY})
        answer = node.kubelet.allocate(P0, resource=FUNCTION)
        assert all(d.host_path.startswith("/dev/vfio/") for d in answer.devices)
        node.kubelet.prestart(P0, env=NO_REQUEST, resource=FUNCTION)
        mark = node.plugin.mark
        node.kubelet.deallocate(P0, resource=FUNCTION)
        node.plugin.until_logged("region scrubbed", mark, region=P0, condition="UNBLANKED")
        assert not programmed(node)


# ------------------------------------------------------------------ requests


def test_a_request_that_names_the_function_is_satisfied(node: Node) -> None:
    node.kubelet.allocate(P0, P1, resource=FUNCTION)
    env = request(FACTORY, params="clock=300") | {"FPGA_REGION_2": ID, "FPGA_AFU_2": FACTORY}
    node.kubelet.prestart(P0, P1, env=env, resource=FUNCTION)
    assert node.state()[P0]["clock"] == 300
    assert node.state()[P1]["clock"] != 300
    mark = node.plugin.mark
    node.kubelet.deallocate(P0, P1, resource=FUNCTION)
    node.plugin.until_logged("region scrubbed", mark, region=P0)
    assert node.state()[P0]["clock"] != 300
    node.kubelet.until(FUNCTION, {P0: HEALTHY, P1: HEALTHY})


@pytest.mark.parametrize(
    ("env", "code", "says"),
    [
        (request(AFU), "FAILED_PRECONDITION", f"asks for {AFU}, but the region holds"),
        (
            request(FACTORY) | request(AFU, n="2"),
            "FAILED_PRECONDITION",
            f"FPGA_REGION_2 asks for {AFU}",
        ),
        (request(FACTORY) | request(FACTORY, n="2"), "FAILED_PRECONDITION", "raise the resource"),
        (request(FACTORY, interface="0" * 32), "INVALID_ARGUMENT", f"allocated devices have {ID}"),
        (request(FACTORY, params="clock=5"), "INVALID_ARGUMENT", "outside the limits"),
    ],
)
def test_another_request_is_refused(node: Node, env: dict[str, str], code: str, says: str) -> None:
    node.kubelet.allocate(P0, resource=FUNCTION)
    with pytest.raises(Refused, match=says) as refused:
        node.kubelet.prestart(P0, env=env, resource=FUNCTION)
    assert refused.value.code == code
    assert node.kubelet.listed(FUNCTION) == {P0: HEALTHY, P1: HEALTHY}
    node.kubelet.prestart(P0, env=NO_REQUEST, resource=FUNCTION)


def test_neither_regions_nor_cards_are_given_out_by_another_name(node: Node) -> None:
    assert REGIONS not in node.kubelet.endpoints
    assert CARDS not in node.kubelet.endpoints
    with pytest.raises(Refused, match="has no device") as refused:
        node.kubelet.endpoint(FUNCTION).call(  # what an old registration would still ask
            "Allocate", allocation("0000-10-00.0"), "AllocateResponse"
        )
    assert refused.value.code == "NOT_FOUND"


def allocation(device: str) -> Any:
    container = message("ContainerAllocateRequest")(devices_ids=[device])
    return message("AllocateRequest")(container_requests=[container])


# ------------------------------------------------------------------ what is on the card changes


def test_a_region_whose_function_changes_moves_and_its_owner_keeps_it(node: Node) -> None:
    node.kubelet.allocate(P0, resource=FUNCTION)
    node.kubelet.prestart(P0, env=NO_REQUEST, resource=FUNCTION)
    node.plugin.kill()
    put(node, P0, AFU_2)
    put(node, P1, AFU_2)
    node.restarted()
    node.kubelet.until(FUNCTION, {P0: HEALTHY})
    node.kubelet.until(af(AFU_2), {P1: HEALTHY})
    with pytest.raises(Refused, match=f"holds the function {AFU_2} by now") as refused:
        node.kubelet.prestart(P0, env=NO_REQUEST, resource=FUNCTION)
    assert refused.value.code == "FAILED_PRECONDITION"
    node.kubelet.until(FUNCTION, {P0: HEALTHY})
    node.kubelet.deallocate(P0, resource=FUNCTION)
    node.kubelet.until(af(AFU_2), {P0: HEALTHY, P1: HEALTHY})
    node.kubelet.until(FUNCTION, {})
    node.kubelet.allocate(P0, resource=af(AFU_2))
    node.kubelet.prestart(P0, env=NO_REQUEST, resource=af(AFU_2))


def test_an_idle_region_is_not_reset_again_by_the_next_life(node: Node) -> None:
    node.again()
    node.kubelet.until(FUNCTION, {P0: HEALTHY, P1: HEALTHY})
    assert not node.steps(P0)


def test_killed_with_an_owner_the_region_stays_his_and_is_reset_afterwards(node: Node) -> None:
    node.kubelet.allocate(P0, resource=FUNCTION)
    node.kubelet.prestart(P0, env=NO_REQUEST, resource=FUNCTION)
    node.again()
    node.kubelet.until(FUNCTION, {P0: HEALTHY, P1: HEALTHY})
    assert not node.steps(P0)
    node.kubelet.deallocate(P0, resource=FUNCTION)
    node.plugin.until_logged("region scrubbed", region=P0, condition="UNBLANKED")


def test_a_region_that_fails_is_unhealthy_and_comes_back_reset(node: Node) -> None:
    fault = node.arm(P0, "thermal")
    node.kubelet.until(FUNCTION, {P0: UNHEALTHY, P1: HEALTHY})
    mark = node.plugin.mark
    fault.unlink()
    node.kubelet.until(FUNCTION, {P0: HEALTHY, P1: HEALTHY})
    node.plugin.until_logged("region scrubbed", mark, region=P0)


# ------------------------------------------------------------------ from and to regions


def test_a_former_tenants_image_is_not_advertised_as_a_function() -> None:
    node = Node(scrub="best-effort")
    (node.own_store() / ID / "blank.gbs").unlink()
    with node.up():
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        node.kubelet.deallocate(P0)
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        assert node.afu(P0) == AFU  # only reset
        for _ in range(2):  # and over restarts
            restart(node, advertise="af")
            node.kubelet.until(FUNCTION, {P1: HEALTHY})
            assert af(AFU) not in node.kubelet.endpoints
            node.plugin.until_logged("an earlier tenant's image is no function", regions=[P0])
        # It shows another id now, which any image can: nothing is known of it before a blank.
        node.plugin.kill()
        put(node, P0, AFU_2)
        node.restarted()
        node.kubelet.until(FUNCTION, {P1: HEALTHY})
        assert af(AFU_2) not in node.kubelet.endpoints
        restart(node, advertise="region", bitstream_dir=str(STORE))
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        node.plugin.kill()
        put(node, P0, AFU_2)  # the operator loads a function: that one is
        node.set(advertise="af")
        node.restarted()
        node.kubelet.until(af(AFU_2), {P0: HEALTHY})


def test_a_mislabelled_image_is_no_function_by_the_id_that_it_shows() -> None:
    """A tenant's file says one id, and what it programs shows that of a public function."""
    node = Node(scrub="best-effort")
    store = node.own_store()
    (store / ID / "blank.gbs").unlink()
    theirs = store / ID / f"{AFU_2}.gbs"
    theirs.write_bytes(theirs.read_bytes().replace(bytes.fromhex(AFU_2), bytes.fromhex(FACTORY)))
    with node.up():
        node.kubelet.allocate(P0)
        with pytest.raises(Refused):
            node.kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == FACTORY
        node.kubelet.deallocate(P0)
        restart(node, advertise="af")
        node.plugin.until_logged("an earlier tenant's image is no function", regions=[P0])
        node.kubelet.until(FUNCTION, {P1: HEALTHY})


def test_nor_is_one_that_answers_in_another_function_of_a_slot_than_the_first() -> None:
    functions = "0000:10:00.0=0000:10:00.2+0000:10:00.1"
    node = Node("1x1+ofs,1x1", scrub="best-effort", slot_functions=functions)
    (node.own_store() / ID / "blank.gbs").unlink()
    with node.up():
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        mark = node.plugin.mark
        node.kubelet.deallocate(P0)
        done = node.plugin.until_logged("region scrubbed", mark, region=P0)
        assert (done["afu_id"], node.afu(P0)) == (PLACEHOLDER, AFU)  # only reset
        restart(node, advertise="af")
        node.kubelet.until(FUNCTION, {"0000-11-00.0-p0": HEALTHY})
        node.plugin.until_logged("an earlier tenant's image is no function", regions=[P0])
        assert af(PLACEHOLDER) not in node.kubelet.endpoints
        # Once it was blanked, it is what the first of its functions shows.
        restart(node, advertise="region", bitstream_dir=str(STORE))
        node.kubelet.until(REGIONS, {P0: HEALTHY, "0000-11-00.0-p0": HEALTHY})
        restart(node, advertise="af")
        node.kubelet.until(af(BLANK), {"0000-11-00.0-p0": HEALTHY})
        node.kubelet.until(af(PLACEHOLDER), {P0: HEALTHY})


def test_after_a_journal_was_lost_nothing_that_can_be_programmed_is_a_function() -> None:
    node = Node("1x2,1x1+no-pr", scrub="best-effort")
    (node.own_store() / ID / "blank.gbs").unlink()
    with node.up():
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        node.plugin.kill()
        for file in node.state_dir.glob("journal.sqlite3-*"):
            file.unlink()
        (node.state_dir / "journal.sqlite3").write_bytes(b"no database" * 500)
        node.set(advertise="af")
        node.restarted()
        for _ in range(2):  # and over restarts
            node.kubelet.until(FUNCTION, {"0000-11-00.0-p0": HEALTHY})
            told = node.plugin.until_logged("an earlier tenant's image is no function")
            assert told["regions"] == [P0, P1]
            assert af(AFU) not in node.kubelet.endpoints
            node.again()


def test_a_tenant_of_a_region_keeps_it_when_the_node_switches_and_nobody_gets_his_image() -> None:
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        restart(node, advertise="af")
        node.kubelet.until(REGIONS, {P0: HEALTHY})
        node.kubelet.until(af(BLANK), {P1: HEALTHY})
        # His next container gets what it asks for, as before.
        node.kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == AFU_2
        with pytest.raises(Refused, match="left to the pods that have it"):
            node.kubelet.allocate(P0)
        node.kubelet.deallocate(P0)
        node.kubelet.until(REGIONS, {})
        node.plugin.until_logged("region scrubbed", region=P0, condition="UNBLANKED")
        assert node.kubelet.listed(af(BLANK)) == {P1: HEALTHY}
        assert af(AFU_2) not in node.kubelet.endpoints
        # Back again: it is blanked and given out.
        restart(node, advertise="region")
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        assert node.afu(P0) == BLANK
        restart(node, advertise="af")
        node.kubelet.until(af(BLANK), {P0: HEALTHY, P1: HEALTHY})


def test_a_tenant_of_a_function_keeps_it_when_the_node_switches_to_regions(node: Node) -> None:
    node.kubelet.allocate(P0, resource=FUNCTION)
    node.kubelet.prestart(P0, env=NO_REQUEST, resource=FUNCTION)
    restart(node, advertise="region", scrub="best-effort", bitstream_dir=str(node.folder / "none"))
    node.kubelet.until(FUNCTION, {P0: HEALTHY})
    node.kubelet.until(REGIONS, {P1: HEALTHY})
    node.kubelet.prestart(P0, env=NO_REQUEST, resource=FUNCTION)
    with pytest.raises(Refused, match="asks for"):
        node.kubelet.prestart(P0, env=request(AFU), resource=FUNCTION)
    assert node.afu(P0) == FACTORY
    node.kubelet.deallocate(P0, resource=FUNCTION)
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})


def test_a_card_that_cannot_be_programmed_is_told_so_and_not_advertised_by_region() -> None:
    with Node("1x1+no-pr,1x1") as node:
        node.kubelet.start()
        node.start()
        line = node.plugin.until_logged("card cannot be reprogrammed", card="0000-10-00.0")
        assert "FPGA_PLUGIN_ADVERTISE=af" in line["hint"]
        assert "N3000" in line["description"]
        node.kubelet.until(REGIONS, {"0000-11-00.0-p0": HEALTHY})
        node.kubelet.until(CARDS, {"0000-11-00.0": HEALTHY})
        with pytest.raises(Refused, match="has no device"):
            node.kubelet.allocate(P0)
        assert node.afu(P0) == FACTORY


# ------------------------------------------------------------------ what is shown


def printed(node: Node, *arguments: str) -> Any:
    """What a command prints, once it can: the status' socket comes a moment after the start."""

    def run() -> str:
        done = command(*arguments, "--json", settings=node.settings)
        return "" if done.returncode else done.stdout

    return json.loads(eventually(run, f"an answer of {arguments}"))


def test_commands_say_what_is_kept_and_why_a_card_is_not_served(node: Node) -> None:
    (card,) = printed(node, "devices")["cards"]
    assert card["note"] == ""
    assert [region["condition"] for region in card["regions"]] == ["UNBLANKED", "UNBLANKED"]
    (checked,) = printed(node, "card", "show", "--assumptions")["cards"]
    assert any(FUNCTION in one for one in checked["would"])
    assert any("program nothing" in one for one in checked["would"])
    (shown,) = printed(node, "status")["cards"]
    assert "no-blank-image" not in shown["note"]
    node.plugin.kill()
    node.set(simulated_cards="1x2+no-pr", advertise="both")
    (card,) = printed(node, "devices")["cards"]
    assert "cannot be reprogrammed" in card["note"]
    (checked,) = printed(node, "card", "show", "--assumptions")["cards"]
    assert checked["would"] == ["leave it alone"]
    assert "cannot be reprogrammed" in checked["problem"]
    partial = [one for one in checked["assumptions"] if "partially" in one["says"]]
    assert [one["verdict"] for one in partial] == ["does not hold"]
    node.start().until_logged("serving", resources=[])
    (shown,) = printed(node, "status")["cards"]
    assert "cannot be reprogrammed" in shown["note"]


def test_observing_says_which_functions_would_be_served_and_wipes_nothing() -> None:
    with Node(advertise="af", observe="true") as node:
        node.start()
        would = node.plugin.until_logged("would serve card")
        assert would["resources"] == [FUNCTION]
        assert would["would_wipe"] == []
        assert would["would_reset"] == [P0, P1]
