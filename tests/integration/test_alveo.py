"""Alveo cards: the life of a claim on them, and what their reset changes about it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    BLANK,
    CARDS,
    HEALTHY,
    MAIN,
    NO_REQUEST,
    REGIONS,
    ROOT,
    UNHEALTHY,
    Cgroups,
    Node,
    Refused,
    eventually,
    message,
    request,
    sign_manifest,
)
from doubles.xclbins import ALVEO, VADD, axlf, memory, metadata, parts, units, xclbin
from dra_support import DraNode

from fpga_plugin.observability.client import ask as observed

AMDS = "amd.com/xilinx_u55c_gen3x16_xdma_base_3-0"
"""What AMD's plugin calls the cards of the simulation's shell."""

ALVEO_REGIONS, ALVEO_CARDS = f"fpga.amd.com/region-{ALVEO}", f"fpga.amd.com/fpga-{ALVEO}"
OTHER = "b7c1e2d34b5f46889a0b1c2d3e4f5061"
NOTHING = "b1a0" + "0" * 27 + "1"
NONE = "0" * 32
CARD, CARD_2 = "0000-10-00.0", "0000-11-00.0"
P0, P1 = f"{CARD}-p0", f"{CARD_2}-p0"
HBM = 6

MASK = 0x643A0


def blank() -> bytes:
    """A blank: no kernel, and one bank of memory."""
    made = parts(xml=metadata(), layout=units(), banks=memory((HBM, 1, 1 << 10, 0, "HBM[0]")))
    return axlf(made.values(), NOTHING)


def fill(node: Node) -> None:
    """Give a node a store with xclbins."""
    store = node.own_store() / ALVEO
    store.mkdir(exist_ok=True)
    for name, content in {"blank": blank(), VADD: xclbin(VADD), OTHER: xclbin(OTHER)}.items():
        (store / f"{name}.xclbin").write_bytes(content)


class AlveoNode(Node):
    """A node with these cards, and a store with xclbins for Alveo ones."""

    def __init__(self, hardware: str = f"1x1+alveo@{ALVEO}", **settings: str) -> None:
        super().__init__(hardware, **settings)
        fill(self)

    def alveo(self, region: str = P0) -> dict[str, object]:
        return self.state()[region]


class AlveoDraNode(DraNode):
    """The same, where ResourceClaims are served."""

    def __init__(self) -> None:
        super().__init__(f"1x1+alveo@{ALVEO}")
        fill(self)


def ask(uuid: str = VADD) -> dict[str, str]:
    return request(uuid, interface=ALVEO)


def own(node: Node) -> None:
    """A pod has the first card's region, and the accelerator that it asked for."""
    node.kubelet.allocate(P0, resource=ALVEO_REGIONS)
    node.kubelet.prestart(P0, env=ask(), resource=ALVEO_REGIONS)


def test_cards_are_blank_masked_and_cleared_before_they_are_offered():
    with AlveoNode(f"2x1+alveo@{ALVEO}").up() as node:
        assert {r.resource_name for r in node.kubelet.registrations} == {ALVEO_REGIONS, ALVEO_CARDS}
        assert node.kubelet.listed(ALVEO_REGIONS) == {P0: HEALTHY, P1: HEALTHY}
        assert node.kubelet.listed(ALVEO_CARDS) == {CARD: HEALTHY, CARD_2: HEALTHY}
        for region in (P0, P1):
            state = node.alveo(region)
            assert (state["afu_id"], state["record"], state["mask"]) == (NOTHING, NOTHING, MASK)
            assert state["zeroed"] == [[0, 1 << 20]]
        # One after the other, so that each gets its node's number back.
        assert (node.alveo(P0)["minor"], node.alveo(P1)["minor"]) == (128, 129)
        steps = [line["steps"] for line in node.plugin.logged("region scrubbed")]
        assert all(next(iter(each)) == "reset card" for each in steps)


def test_an_allocation_from_allocate_to_deallocate():
    with AlveoNode().up() as node:
        kubelet = node.kubelet
        answer = kubelet.allocate(P0, resource=ALVEO_REGIONS)
        assert dict(answer.envs) == {
            "FPGA_DEVICE_0000_10_00_0_P0": "/dev/dri/renderD128",
            "FPGA_DEVICE_1": "/dev/dri/renderD128",
            "FPGA_DEVICES_REGION_5B1A0D1E": "/dev/dri/renderD128",
            "FPGA_FUNCTIONS_0000_10_00_0_P0": "0000:10:00.1",
        }
        assert [(d.container_path, d.host_path, d.permissions) for d in answer.devices] == [
            ("/dev/dri/renderD128", "/dev/dri/renderD128", "rw")
        ]
        kubelet.until(ALVEO_CARDS, {})

        kubelet.prestart(P0, env=ask(), resource=ALVEO_REGIONS)
        state = node.alveo()
        assert (state["afu_id"], state["record"], state["mask"]) == (VADD, VADD, MASK)

        mark = node.plugin.mark
        kubelet.poststop(P0, resource=ALVEO_REGIONS)
        scrubbed = node.plugin.until_logged("region scrubbed", mark, region=P0)
        assert list(scrubbed["steps"]) == [
            *("quiesce", "clear errors", "restore defaults"),
            *("program blank", "verify", "clear memory"),
        ]  # no reset: the allocation goes on
        assert node.alveo()["afu_id"] == NOTHING

        kubelet.prestart(P0, env=ask(OTHER), resource=ALVEO_REGIONS)
        assert node.alveo()["afu_id"] == OTHER
        kubelet.poststop(P0, resource=ALVEO_REGIONS)
        node.plugin.signal.until(lambda: node.alveo()["afu_id"] == NOTHING, "a scrub")

        mark = node.plugin.mark
        kubelet.deallocate(P0, resource=ALVEO_REGIONS)
        scrubbed = node.plugin.until_logged("region scrubbed", mark, region=P0)
        assert next(iter(scrubbed["steps"])) == "reset card"  # it is due at the allocation's end
        kubelet.until(ALVEO_CARDS, {CARD: HEALTHY})
        assert node.plugin.stop() == 0


def test_a_node_may_have_cards_of_several_families():
    with AlveoNode(f"1x2,1x1+alveo@{ALVEO}").up() as node:
        kubelet = node.kubelet
        assert set(kubelet.endpoints) == {REGIONS, CARDS, ALVEO_REGIONS, ALVEO_CARDS}
        kubelet.allocate(P1, resource=ALVEO_REGIONS)
        kubelet.allocate(f"{CARD}-p0", resource=REGIONS)
        kubelet.prestart(P1, env=ask(), resource=ALVEO_REGIONS)
        kubelet.prestart(f"{CARD}-p0", env=request(), resource=REGIONS)
        assert node.afu(P1) == VADD
        assert node.afu(f"{CARD}-p0") == AFU
        assert node.afu(f"{CARD}-p1") == BLANK


def test_a_bitstream_of_another_family_is_refused_before_anything_is_touched():
    with AlveoNode(f"1x1,1x1+alveo@{ALVEO}").up() as node:
        (node.store / ALVEO / f"{AFU}.gbs").write_bytes(
            next(node.store.glob(f"*/{AFU}.gbs")).read_bytes()
        )
        node.kubelet.allocate(P1, resource=ALVEO_REGIONS)
        mark = node.plugin.mark
        with pytest.raises(Refused):
            node.kubelet.prestart(P1, env=ask(AFU), resource=ALVEO_REGIONS)
        assert node.steps(P1, mark) == []


def test_after_an_implied_release_the_prestart_waits_for_the_reset():
    with AlveoNode().up() as node:
        kubelet = node.kubelet
        own(node)
        mark = node.plugin.mark
        kubelet.allocate(P0, resource=ALVEO_REGIONS)  # to another pod
        kubelet.prestart(P0, env=ask(OTHER), resource=ALVEO_REGIONS)
        steps = node.steps(P0, mark)
        assert steps.index("reset card") < steps.index("program blank") < steps.index("program")
        assert node.alveo()["afu_id"] == OTHER


def test_a_prestart_that_the_reset_outlasts_is_unavailable_and_a_later_one_is_served():
    with AlveoNode().up() as node:
        kubelet = node.kubelet
        own(node)
        kubelet.allocate(P0, resource=ALVEO_REGIONS)
        holder = node.arm(P0, "holder")  # a process that ignores SIGBUS
        with pytest.raises(Refused) as refused:
            kubelet.prestart(P0, env=ask(OTHER), resource=ALVEO_REGIONS, timeout=4)
        assert refused.value.code == "UNAVAILABLE"
        holder.unlink()
        kubelet.prestart(P0, env=ask(OTHER), resource=ALVEO_REGIONS)
        assert node.alveo()["afu_id"] == OTHER


def test_a_region_is_not_given_out_while_its_last_owner_runs():
    with AlveoNode() as node:
        cgroups = Cgroups(node.folder / "cgroup")
        node.set(cgroup_root=str(cgroups.root))
        node.up()
        cgroups.set("uid-1", MAIN)
        answer = node.kubelet.allocate(P0, resource=ALVEO_REGIONS)
        node.kubelet.checkpoint(("uid-1", "main", ALVEO_REGIONS, [P0], answer))
        node.kubelet.prestart(P0, env=ask(), resource=ALVEO_REGIONS)
        node.kubelet.checkpoint()
        node.kubelet.deallocate(P0, resource=ALVEO_REGIONS)
        node.plugin.until_logged("scrub waits", region=P0)
        node.kubelet.until(ALVEO_REGIONS, {P0: UNHEALTHY})
        assert node.alveo()["afu_id"] == VADD
        cgroups.set("uid-1")
        node.kubelet.until(ALVEO_REGIONS, {P0: HEALTHY})
        assert node.alveo()["afu_id"] == NOTHING


def test_a_static_pod_that_comes_again_does_not_reset_the_card_under_its_first_instance():
    """Invariant 7: nothing but the tenancy keeps a reset from a process of the same uid."""
    with AlveoNode() as node:
        cgroups = Cgroups(node.folder / "cgroup")
        node.set(cgroup_root=str(cgroups.root))
        node.up()
        cgroups.set("uid-1", MAIN)
        for _ in range(2):
            answer = node.kubelet.allocate(P0, resource=ALVEO_REGIONS)
            node.kubelet.checkpoint(("uid-1", "main", ALVEO_REGIONS, [P0], answer))
            if node.alveo()["afu_id"] != VADD:
                node.kubelet.prestart(P0, env=ask(), resource=ALVEO_REGIONS)
        with pytest.raises(Refused) as refused:
            node.kubelet.prestart(P0, env=ask(OTHER), resource=ALVEO_REGIONS)
        assert "still runs" in refused.value.message
        assert node.alveo()["afu_id"] == VADD
        cgroups.set("uid-1")
        node.kubelet.prestart(P0, env=ask(OTHER), resource=ALVEO_REGIONS)
        assert node.alveo()["afu_id"] == OTHER


def test_a_node_that_comes_back_under_another_number_is_what_the_next_pod_gets():
    with AlveoNode().up() as node:
        kubelet = node.kubelet
        own(node)
        node.arm(P0, "minor-moves")
        node.give_back(P0, resource=ALVEO_REGIONS)
        answer = kubelet.allocate(P0, resource=ALVEO_REGIONS)
        assert [device.host_path for device in answer.devices] == ["/dev/dri/renderD129"]


def test_a_pod_whose_node_moved_in_the_reset_before_its_start_has_to_be_deleted():
    with AlveoNode().up() as node:
        kubelet = node.kubelet
        own(node)
        node.arm(P0, "minor-moves")
        kubelet.allocate(P0, resource=ALVEO_REGIONS)  # another pod is given the node as it is
        with pytest.raises(Refused) as refused:
            kubelet.prestart(P0, env=ask(), resource=ALVEO_REGIONS)
        assert refused.value.code == "FAILED_PRECONDITION"
        assert "numbering changed" in refused.value.message


def test_a_mask_that_was_lost_is_set_again_at_once_and_a_nodes_event_says_so():
    with AlveoNode().up() as node:
        kubelet = node.kubelet
        own(node)
        assert node.plugin.stop() == 0
        path = node.simulated / "state.json"
        state = json.loads(path.read_text())
        state["regions"][P0]["mask"] = 0
        path.write_text(json.dumps(state))
        plugin = node.restarted()
        line = plugin.until_logged("card was not guarded")
        assert "0x0" in line["missing"]
        assert node.alveo()["mask"] == MASK
        assert node.alveo()["afu_id"] == VADD
        assert kubelet.listed(ALVEO_REGIONS) == {P0: HEALTHY}


def test_a_free_card_whose_mask_does_not_come_back_is_not_offered_until_it_does():
    with AlveoNode().up() as node:
        assert node.plugin.stop() == 0
        path = node.simulated / "state.json"
        state = json.loads(path.read_text())
        state["regions"][P0]["mask"] = 0
        path.write_text(json.dumps(state))
        fault = node.arm(P0, "mute")  # PF1 does not hear of another mask
        plugin = node.restarted()
        line = plugin.until_logged("region unhealthy", region=P0)
        assert "unguarded: the user function of card" in str(line)
        node.kubelet.until(ALVEO_REGIONS, {P0: UNHEALTHY})
        fault.unlink()
        node.kubelet.until(ALVEO_REGIONS, {P0: HEALTHY})
        assert node.alveo()["mask"] == MASK


def test_of_an_owned_card_that_went_and_came_back_the_mask_is_set_again():
    with AlveoNode().up() as node:
        kubelet = node.kubelet
        own(node)
        card = node.simulated / "cards" / CARD
        card.unlink()
        kubelet.until(ALVEO_REGIONS, {P0: UNHEALTHY})
        card.touch()
        node.plugin.until_logged("card was not guarded")
        eventually(lambda: node.alveo()["mask"] == MASK)


@pytest.mark.parametrize("word", ["bad-state", "firewall"])
def test_what_only_a_reset_ends_is_ended_by_the_scrub_after_the_owner(word: str):
    with AlveoNode().up() as node:
        own(node)
        node.arm(P0, word)
        node.plugin.until_logged("region unhealthy", region=P0)
        (node.simulated / "faults" / P0).unlink()
        node.give_back(P0, resource=ALVEO_REGIONS)
        assert node.alveo()["bad"] == ""


def test_a_load_that_fails_fails_the_start_and_the_next_try_is_served():
    with AlveoNode().up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0, resource=ALVEO_REGIONS)
        node.arm(P0, "pr-error")
        with pytest.raises(Refused) as refused:
            kubelet.prestart(P0, env=ask(), resource=ALVEO_REGIONS)
        assert refused.value.code == "INTERNAL"
        # The queue may be resetting the card by now, which no container has used yet.
        eventually(lambda: node.alveo()["mask"] == MASK)
        kubelet.prestart(P0, env=ask(), resource=ALVEO_REGIONS)
        assert node.alveo()["afu_id"] == VADD


def test_memory_that_cannot_be_cleared_keeps_the_card_back():
    with AlveoNode().up() as node:
        kubelet = node.kubelet
        own(node)
        fault = node.arm(P0, "memory-stuck")
        mark = node.plugin.mark
        kubelet.deallocate(P0, resource=ALVEO_REGIONS)
        line = node.plugin.until_logged("region failed", mark, region=P0)
        assert "HBM[0]" in line["error"]
        assert kubelet.listed(ALVEO_REGIONS) == {P0: UNHEALTHY}
        fault.unlink()


@pytest.mark.parametrize("word", ["lost-answer", "late-refresh"])
def test_what_the_drivers_do_at_times_costs_no_region(word: str):
    with AlveoNode().up() as node:
        own(node)
        node.arm(P0, word)
        node.give_back(P0, resource=ALVEO_REGIONS)
        assert not (node.simulated / "faults" / P0).exists()
        assert node.alveo()["record"] == NOTHING


@pytest.mark.parametrize("at", ["reset", "load"])
def test_a_plugin_that_dies_in_a_scrub_finishes_it(at: str):
    with AlveoNode() as node:
        node.set(simulated_pr_seconds="0.3")
        node.up()
        kubelet = node.kubelet
        own(node)
        kubelet.deallocate(P0, resource=ALVEO_REGIONS)
        if at == "reset":
            eventually(lambda: node.alveo()["shutdown"])
        else:
            eventually(lambda: node.alveo()["afu_id"] == NOTHING)
        node.again()
        kubelet.until(ALVEO_REGIONS, {P0: HEALTHY})
        state = node.alveo()
        assert (state["record"], state["mask"], state["shutdown"]) == (NOTHING, MASK, False)


def test_a_reset_that_was_interrupted_is_ended_though_the_journal_is_lost():
    with AlveoNode().up() as node:
        kubelet = node.kubelet
        own(node)
        kubelet.deallocate(P0, resource=ALVEO_REGIONS)
        eventually(lambda: node.alveo()["shutdown"])
        node.plugin.kill()
        for file in node.state_dir.glob("journal.sqlite3*"):
            file.unlink()
        node.start()
        node.plugin.until_logged("card bound again", card=CARD)
        kubelet.until(ALVEO_REGIONS, {P0: HEALTHY})
        state = node.alveo()
        assert (state["record"], state["mask"], state["shutdown"]) == (NOTHING, MASK, False)


def test_a_crash_leaves_an_owned_region_as_it_is():
    with AlveoNode().up() as node:
        kubelet = node.kubelet
        own(node)
        before = node.alveo()
        node.again()
        assert node.alveo() == before
        assert kubelet.listed(ALVEO_REGIONS) == {P0: HEALTHY}


def test_a_container_without_a_request_gets_a_blank_region():
    with AlveoNode().up() as node:
        node.kubelet.allocate(P0, resource=ALVEO_REGIONS)
        node.kubelet.prestart(P0, env=NO_REQUEST, resource=ALVEO_REGIONS)
        assert (node.alveo()["record"], node.alveo()["mask"]) == (NOTHING, MASK)


def test_without_a_blank_the_regions_are_held_back():
    with AlveoNode() as node:
        path = Path(node.store) / ALVEO / "blank.xclbin"
        aside = path.rename(node.folder / "aside")
        node.kubelet.start()
        node.start()
        node.plugin.until_logged("blank bitstream missing")
        node.kubelet.until(ALVEO_REGIONS, {P0: UNHEALTHY})
        os.replace(aside, path)
        node.kubelet.until(ALVEO_REGIONS, {P0: HEALTHY})


@pytest.mark.parametrize("word", ["recovery", "fatal", "thermal"])
def test_a_card_in_trouble_is_not_offered_and_comes_back_by_itself(word: str):
    with AlveoNode().up() as node:
        fault = node.arm(P0, word)
        node.kubelet.until(ALVEO_REGIONS, {P0: UNHEALTHY} if word == "thermal" else {})
        fault.unlink()
        node.kubelet.until(ALVEO_REGIONS, {P0: HEALTHY})


def test_a_card_that_is_pulled_and_put_back_is_another_one():
    with AlveoNode().up() as node:
        kubelet = node.kubelet
        node.unplug(CARD)
        kubelet.until(ALVEO_REGIONS, {})
        node.plug(CARD)
        kubelet.until(ALVEO_REGIONS, {P0: HEALTHY})
        assert node.alveo()["record"] == NOTHING


def test_tenants_may_load_their_own_only_where_the_operator_says_so_and_name_nothing():
    with AlveoNode(xrt_tenant_loads="true").up() as node:
        kubelet = node.kubelet
        assert node.alveo()["mask"] == MASK
        kubelet.allocate(P0, resource=ALVEO_REGIONS)
        kubelet.prestart(P0, env=NO_REQUEST, resource=ALVEO_REGIONS)
        assert (node.alveo()["record"], node.alveo()["mask"]) == (NOTHING, 0x4220)
        looked = node.plugin.mark
        kubelet.poststop(P0, resource=ALVEO_REGIONS)
        node.plugin.until_logged("region scrubbed", looked, region=P0)
        assert node.alveo()["mask"] == MASK
        kubelet.prestart(P0, env=ask(), resource=ALVEO_REGIONS)
        assert (node.alveo()["record"], node.alveo()["mask"]) == (VADD, MASK)
        assert not node.plugin.logged("card was not guarded")


def test_tenants_loads_and_signed_images_exclude_each_other():
    with AlveoNode(xrt_tenant_loads="true", trust="signed") as node:
        node.kubelet.start()
        assert node.start().exit_code() == 2
        assert "XRT_TENANT_LOADS" in node.plugin.text


def test_a_resource_claims_life():
    with AlveoDraNode().up() as node:
        claim = node.claim("c", P0, bitstream=VADD)
        node.dra.prepare(claim)
        assert node.afu(P0) == VADD
        (device,) = node.file(claim)["devices"]
        (path,) = [one["path"] for one in device["containerEdits"]["deviceNodes"]]
        assert path == "/dev/dri/renderD128"
        assert node.env(claim)["FPGA_FUNCTIONS_0000_10_00_0_P0"] == "0000:10:00.1"
        mark = node.plugin.mark
        assert node.dra.unprepare(claim) == ""
        scrubbed = node.plugin.until_logged("region scrubbed", mark, region=P0)
        assert next(iter(scrubbed["steps"])) == "reset card"
        assert node.state()[P0]["record"] == NOTHING
        second = node.claim("d", P0, bitstream=OTHER)
        node.dra.prepare(second)
        assert node.afu(P0) == OTHER


def test_a_claims_prepare_waits_for_the_reset_after_the_last_one():
    with AlveoDraNode().up() as node:
        claim = node.claim("c", P0, bitstream=VADD)
        node.dra.prepare(claim)
        node.again()
        assert node.afu(P0) == VADD
        assert node.dra.unprepare(claim) == ""
        node.dra.prepare(node.claim("d", P0))
        assert node.state()[P0]["record"] == NOTHING


def test_a_card_that_amds_plugin_gave_to_a_pod_is_left_alone_until_that_pod_is_gone():
    with AlveoNode(f"2x1+alveo@{ALVEO}") as node:
        answer = message("ContainerAllocateResponse")()
        node.kubelet.checkpoint(("uid-1", "main", AMDS, ["0000:10:00.1"], answer))
        node.kubelet.start()
        node.start()
        line = node.plugin.until_logged("card left alone", card=CARD)
        assert AMDS in line["reason"]
        node.kubelet.until(ALVEO_REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
        assert (node.alveo()["mask"], node.alveo()["record"]) == (0, NONE)

        def given_back() -> bool:
            node.kubelet.checkpoint()  # as kubelet does whenever a list comes
            return node.kubelet.listed(ALVEO_REGIONS) == {P0: HEALTHY, P1: HEALTHY}

        assert eventually(given_back)
        assert node.alveo()["mask"] == MASK


def test_a_shell_has_a_name_that_pods_ask_for():
    with AlveoNode(interface_aliases="true") as node:
        node.own_store()
        name = "u55c-xdma-base-3"
        sign_manifest(node.store, f"--interface-alias={ALVEO}={name}").check_returncode()
        node.kubelet.start()
        node.start()
        resource = f"fpga.amd.com/region-{name}"
        node.kubelet.until(resource, {P0: HEALTHY})
        node.kubelet.allocate(P0, resource=resource)
        node.kubelet.prestart(P0, env=ask(), resource=resource)
        assert node.state()[P0]["record"] == VADD


def registered(node: Node) -> list[str]:
    return sorted(node.plugin.logged("serving")[0]["resources"])


def test_a_pod_of_amds_plugin_finds_its_resource_and_its_cards():
    """One name for each shell, and no other: what its limits say is all that it has to say."""
    with AlveoNode(f"1x1,2x1+alveo@{ALVEO}", xrt_shell_resources="true") as node:
        answer = message("ContainerAllocateResponse")()
        # A pod of AMD's plugin runs on the second card.
        node.kubelet.checkpoint(("uid-1", "main", AMDS, ["0000:12:00.1"], answer))
        node.kubelet.start()
        node.start()
        first, second = "0000-11-00.0-p0", "0000-12-00.0-p0"
        node.kubelet.until(AMDS, {first: HEALTHY, second: UNHEALTHY})
        assert registered(node) == sorted([AMDS, REGIONS, CARDS]), "DFL cards have their own names"
        shown = fpga_plugin(node, "card", "show")
        assert f"advertise it as {AMDS}, as far as" in " ".join(shown.split())
        assert ALVEO_REGIONS not in shown
        answer = node.kubelet.allocate(first, resource=AMDS)
        assert answer.envs["FPGA_DEVICE_1"] == "/dev/dri/renderD128"
        assert answer.envs["FPGA_DEVICES_REGION_5B1A0D1E"] == "/dev/dri/renderD128"
        node.kubelet.prestart(first, env=NO_REQUEST, resource=AMDS)
        assert node.alveo(first)["record"] == NOTHING, "a pod that names no bitstream"
        node.kubelet.prestart(first, env=ask(), resource=AMDS)
        assert node.alveo(first)["record"] == VADD
        node.kubelet.deallocate(first, resource=AMDS)
        assert eventually(lambda: node.alveo(first)["record"] == NOTHING)


def test_the_names_of_amds_plugin_come_and_go_with_the_setting_and_pods_keep_theirs():
    with AlveoNode(f"2x1+alveo@{ALVEO}") as node:
        node.up()
        own(node)
        node.set(xrt_shell_resources="true", advertise="whole")
        node.again()
        node.kubelet.until(AMDS, {P1: HEALTHY})
        assert registered(node) == sorted([AMDS, ALVEO_REGIONS]), "one of them for the pod"
        node.kubelet.until(ALVEO_REGIONS, {P0: HEALTHY})
        node.kubelet.prestart(P0, env=ask(), resource=ALVEO_REGIONS)
        node.kubelet.allocate(P1, resource=AMDS)
        node.kubelet.deallocate(P0, resource=ALVEO_REGIONS)
        node.kubelet.until(AMDS, {P0: HEALTHY, P1: HEALTHY})
        node.set(xrt_shell_resources="false", advertise="both")
        node.again()
        node.kubelet.until(AMDS, {P1: HEALTHY})
        node.kubelet.until(ALVEO_REGIONS, {P0: HEALTHY})
        node.kubelet.until(ALVEO_CARDS, {CARD: HEALTHY})
        node.kubelet.prestart(P1, env=ask(), resource=AMDS)
        node.kubelet.deallocate(P1, resource=AMDS)
        node.kubelet.until(ALVEO_REGIONS, {P0: HEALTHY, P1: HEALTHY})
        node.again()
        assert registered(node) == sorted([ALVEO_REGIONS, ALVEO_CARDS])


def test_the_sample_store_has_images_for_simulated_cards_without_an_interface_id():
    """`FPGA_PLUGIN_SIMULATED_CARDS=2x1+alveo` is what a reader of the documents tries first."""
    with Node("2x1+alveo") as node:
        node.up()
        regions = f"fpga.amd.com/region-{REGIONS[-32:]}"
        node.kubelet.until(regions, {P0: HEALTHY, P1: HEALTHY})
        node.kubelet.allocate(P0, resource=regions)
        node.kubelet.prestart(P0, env=request(VADD), resource=regions)
        assert node.state()[P0]["record"] == VADD


def fpga_plugin(node: Node, *arguments: str) -> str:
    """A command on the node, as its owner types it."""
    ran = subprocess.run(
        [sys.executable, "-m", "fpga_plugin", *arguments],
        env=os.environ | node.settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout + ran.stderr


def test_the_steps_of_an_owner_of_a_card_do_what_their_page_says():
    """docs/alveo.md, For the owner of a card: step by step, with its words."""
    with AlveoNode(cards="0000:10:00.0") as node:
        node.kubelet.start()
        # 1
        text = " ".join(fpga_plugin(node, "card", "show", "--assumptions").split())
        assert "Nothing was opened, written or programmed" in text
        for held in (
            "PF0 has the driver xclmgmt, of XRT 2.15 or later",
            "its shell shows the interface id",
            "the mask of mailbox requests reaches PF1",
            "PF1 has one render node",
        ):
            assert f" + {held}" in text, held
        assert not (node.state_dir / "simulated" / "state.json").exists(), "nothing was touched"
        # 2
        path = str(node.store / ALVEO / "blank.xclbin")
        assert f"{path}: good" in fpga_plugin(node, "bitstream", "verify")
        assert "a scrub with this file as the blank clears it" in fpga_plugin(
            node, "bitstream", "inspect", path
        )
        # 3
        node.start()
        steps = node.plugin.until_logged("region scrubbed", region=P0)["steps"]
        assert {"reset card", "program blank", "clear memory"} <= steps.keys()
        node.kubelet.until(ALVEO_REGIONS, {P0: HEALTHY})
        status = fpga_plugin(node, "status")
        assert "BLANK" in status
        assert "memory clear untested on hardware" in status
        # 4
        fpga_plugin(node, "card", "drain", CARD)
        fpga_plugin(node, "card", "program", CARD, "0", VADD)
        assert node.alveo()["record"] == VADD
        assert node.alveo()["mask"] == MASK
        assert "PROGRAMMED" in fpga_plugin(node, "status")
        # 5
        fpga_plugin(node, "card", "undrain", CARD)
        node.kubelet.until(ALVEO_REGIONS, {P0: HEALTHY})
        assert node.alveo()["record"] == NOTHING
        assert "BLANK" in fpga_plugin(node, "status")


def test_cards_that_swapped_their_nodes_wait_for_the_pod_that_may_open_them():
    with AlveoNode(f"2x1+alveo@{ALVEO}").up() as node:
        kubelet = node.kubelet
        for region in (P0, P1):
            kubelet.allocate(region, resource=ALVEO_REGIONS)
            kubelet.prestart(region, env=ask(), resource=ALVEO_REGIONS)
        node.plugin.kill()
        file = node.simulated / "state.json"
        state = json.loads(file.read_text())
        one, two = (state["regions"][region] for region in (P0, P1))
        one["minor"], two["minor"] = two["minor"], one["minor"]
        file.write_text(json.dumps(state))
        node.again()
        for region in (P0, P1):
            with pytest.raises(Refused, match="device numbering changed"):
                kubelet.prestart(region, env=ask(), resource=ALVEO_REGIONS)
        kubelet.deallocate(P0, resource=ALVEO_REGIONS)
        kubelet.until_health(P0, UNHEALTHY, ALVEO_REGIONS)

        def reason() -> str:
            cards = observed(str(node.told().state_dir), "GET", "/status")["cards"]
            return next(r["reason"] for c in cards for r in c["regions"] if r["region"] == P0)

        eventually(lambda: f"also open to the pod that was given {P1}" in reason())
        assert node.alveo(P0)["afu_id"] == VADD
        kubelet.deallocate(P1, resource=ALVEO_REGIONS)
        for region in (P0, P1):
            kubelet.until_health(region, HEALTHY, ALVEO_REGIONS)
            assert node.alveo(region)["afu_id"] == NOTHING


def test_a_pod_that_asks_for_two_cards_is_given_neighbours():
    """0 and 1, and 2 and 3, are cabled to each other; by NUMA nodes 0 and 2 would be chosen."""
    cards = [f"0000:1{number}:00.0" for number in range(4)]
    ids = [f"{card.replace(':', '-')}-p0" for card in cards]
    rings = f"{cards[0]}+{cards[1]},{cards[2]}+{cards[3]}"
    with AlveoNode(f"4x1+alveo@{ALVEO}", neighbours=rings) as node:
        node.kubelet.start()
        node.start()
        node.kubelet.until(ALVEO_REGIONS, dict.fromkeys(ids, HEALTHY))
        for free, best in ((ids, (0, 1)), (ids[1:], (2, 3))):
            chosen = node.kubelet.preferred(free, 2, resource=ALVEO_REGIONS)
            assert sorted(chosen) == [ids[number] for number in best]
