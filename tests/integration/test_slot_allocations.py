"""An allocation on an OFS card: its AFU is in functions that containers get through VFIO."""

import json
from typing import Any

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    CARD,
    CARDS,
    FACTORY,
    HEALTHY,
    MAIN,
    NO_REQUEST,
    P0,
    REGIONS,
    UNHEALTHY,
    Cgroups,
    Node,
    Refused,
    eventually,
    request,
)
from test_card_show import check

from fpga_plugin.errors import RefusedError
from fpga_plugin.observability.client import NoDaemonError, ask

GROUPS = ["/dev/vfio/256", "/dev/vfio/257"]


def node(**settings: str) -> Node:
    return Node("1x1+ofs", **settings)


def drivers(node: Node) -> list[str]:
    return node.state()[P0]["functions"]


def test_a_slots_allocation_from_allocate_to_deallocate():
    with node().up() as it:
        kubelet = it.kubelet
        kubelet.until(REGIONS, {P0: HEALTHY})
        kubelet.until(CARDS, {CARD: HEALTHY})
        assert it.afu(P0) == BLANK
        eventually(lambda: drivers(it) == ["", ""], "drivers given back after the first scrub")

        answer = kubelet.allocate(P0)
        envs = dict(answer.envs)
        for name in ("FPGA_DEVICE_0000_10_00_0_P0", "FPGA_DEVICE_1"):
            assert envs[name] == ",".join(GROUPS)
        assert envs["FPGA_FUNCTIONS_0000_10_00_0_P0"] == "0000:10:00.1,0000:10:00.2"
        assert [(d.container_path, d.host_path, d.permissions) for d in answer.devices] == [
            (path, path, "rw") for path in ("/dev/vfio/vfio", *GROUPS)
        ]
        assert drivers(it) == ["", ""]  # Allocate touches nothing

        kubelet.prestart(P0, env=request())
        assert it.afu(P0) == AFU
        assert drivers(it) == ["vfio-pci", "vfio-pci"]
        assert it.state()[P0]["open"] == 0  # nothing is held while the tenant runs

        kubelet.prestart(P0, env=request(AFU_2))  # its container restarts with another image
        assert it.afu(P0) == AFU_2

        mark = it.plugin.mark
        kubelet.deallocate(P0)
        kubelet.until(CARDS, {CARD: HEALTHY})
        assert it.afu(P0) == BLANK
        assert it.scrubs(P0, mark) == 1
        eventually(lambda: drivers(it) == ["", ""], "drivers given back")
        assert it.plugin.stop() == 0


def test_a_container_that_asks_for_nothing_gets_a_blank_slot_it_can_open():
    with node().up() as it:
        it.kubelet.allocate(P0)
        it.kubelet.prestart(P0, env=NO_REQUEST)
        assert it.afu(P0) == BLANK
        assert drivers(it) == ["vfio-pci", "vfio-pci"]


def test_a_whole_card_is_granted_with_its_slots_groups():
    with node().up() as it:
        answer = it.kubelet.allocate(CARD, resource=CARDS)
        assert [d.host_path for d in answer.devices] == ["/dev/vfio/vfio", *GROUPS]
        it.kubelet.prestart(CARD, resource=CARDS, env=request())
        assert it.afu(P0) == AFU


def test_a_tenant_that_keeps_a_group_open_past_its_allocation_keeps_the_slot_out_of_service():
    with node().up() as it:
        kubelet = it.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request())
        fault = it.arm(P0, "port-open")
        kubelet.deallocate(P0)
        kubelet.until(REGIONS, {P0: UNHEALTHY})
        waits = it.plugin.until_logged("scrub waits", region=P0)
        assert "/dev/vfio/256 (function 0000:10:00.1) is in use" in waits["reason"]
        assert it.afu(P0) == AFU
        assert drivers(it) == ["vfio-pci", "vfio-pci"]
        fault.unlink()
        kubelet.until(REGIONS, {P0: HEALTHY})
        assert it.afu(P0) == BLANK


def test_a_failed_pr_takes_the_slot_out_of_service_until_the_driver_is_rebound():
    with node().up() as it:
        it.kubelet.allocate(P0)
        it.arm(P0, "pr-error")
        with pytest.raises(Refused, match="INTERNAL"):
            it.kubelet.prestart(P0, env=request())
        it.kubelet.until(REGIONS, {P0: UNHEALTHY})
        it.plugin.until_logged("region failed", region=P0, condition="FAULTED")
        with pytest.raises(Refused, match="FAILED_PRECONDITION"):
            it.kubelet.prestart(P0, env=request())


@pytest.mark.parametrize("owned", [False, True], ids=["free", "owned"])
def test_a_restart_finds_a_slot_as_it_was_left_and_programs_nothing(owned):
    with node().up() as it:
        if owned:
            it.kubelet.allocate(P0)
            it.kubelet.prestart(P0, env=request())
        else:
            eventually(lambda: drivers(it) == ["", ""], "drivers given back")
        before = it.state()
        it.again()
        it.kubelet.until(REGIONS, {P0: HEALTHY})
        assert not it.steps(P0)
        assert it.state() == before


def test_a_card_that_was_swapped_while_the_plugin_was_down_is_scrubbed():
    with node().up() as it:
        it.plugin.kill()
        it.unplug(CARD)
        it.plug(CARD)
        it.restarted()
        it.kubelet.until(REGIONS, {P0: HEALTHY})
        assert it.scrubs(P0) == 1
        assert it.afu(P0) == BLANK


@pytest.mark.parametrize("claimed", [True, False], ids=["in PreStart", "at release"])
def test_killed_in_the_middle_of_a_pr_the_slot_is_scrubbed_before_anybody_gets_it(claimed):
    with node(simulated_pr_seconds="1").up() as it:
        kubelet = it.kubelet
        kubelet.allocate(P0)
        if claimed:
            call = kubelet.begin_prestart(P0, env=request())
            it.until_programming(P0, AFU)
            call.cancel()
        else:
            kubelet.prestart(P0, env=request())
            kubelet.deallocate(P0)
            it.until_programming(P0, BLANK)
        it.plugin.kill()
        it.restarted()
        if claimed:
            assert kubelet.listed(REGIONS) == {P0: HEALTHY}  # its owner keeps it
            kubelet.prestart(P0, env=request())
            assert it.afu(P0) == AFU
            kubelet.deallocate(P0)
        kubelet.until(CARDS, {CARD: HEALTHY})
        assert it.afu(P0) == BLANK
        eventually(lambda: drivers(it) == ["", ""], "drivers given back")


def test_drivers_that_a_dead_plugin_had_bound_are_given_back_by_the_next_one():
    with node().up() as it:
        kubelet = it.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request())
        it.plugin.kill()
        it.restarted()
        assert drivers(it) == ["vfio-pci", "vfio-pci"]
        kubelet.deallocate(P0)
        kubelet.until(CARDS, {CARD: HEALTHY})
        eventually(lambda: drivers(it) == ["", ""], "drivers given back")


def test_virtual_functions_that_are_missing_are_told_with_the_command():
    with Node("1x1+ofs") as it:
        state = {"functions": [], "afu_id": FACTORY}
        it.simulated.mkdir(parents=True)
        (it.simulated / "state.json").write_text(json.dumps({"regions": {P0: state}}))
        plugin = it.start()
        skipped = plugin.until_logged("card skipped", card=CARD)
        assert "has none now" in skipped["error"]
        assert "sriov_numvfs" in skipped["hint"]
        assert plugin.stop() == 0


def test_an_allocation_on_a_card_that_cannot_be_served_hears_why_and_lives_on():
    with node().up() as it:
        kubelet = it.kubelet
        kubelet.allocate(P0)
        for call in (lambda: kubelet.prestart(P0, env=request()), lambda: kubelet.allocate(P0)):
            it.set(slot_functions="0000:10:00.0=0000:10:00.7")
            it.again()
            with pytest.raises(Refused) as refused:
                call()
            assert refused.value.code == "FAILED_PRECONDITION"
            assert "function 0000:10:00.7 of the slot is not there" in refused.value.message
            assert refused.value.message.endswith(", or ask the node's operator")
            told = it.plugin.until_logged("call refused")["message"]
            assert "mend FPGA_PLUGIN_SLOT_FUNCTIONS" in told
            it.set(slot_functions="auto")
            it.again()
            kubelet.prestart(P0, env=request())
            assert it.afu(P0) == AFU


def asked(node: Node, operation: str) -> dict:
    """What the plugin answers once it listens."""

    def answered() -> Any:
        try:
            body = {"operation": operation, "card": CARD}
            return ask(str(node.state_dir), "POST", "/card", body)
        except NoDaemonError:
            return None
        except RefusedError as error:
            if "the plugin is starting" in error.message:
                return None
            raise

    return eventually(answered, "an answer")


def functions(node: Node, word: str) -> dict:
    return asked(node, f"functions{word}")


def test_the_functions_of_a_card_are_shown_with_drivers_and_groups():
    with node().up() as it:
        it.kubelet.allocate(P0)
        it.kubelet.prestart(P0, env=request())
        found = json.loads(check(it, "--json"))["cards"][0]["functions"]
        assert [(f["address"], f["role"], f["driver"]) for f in found] == [
            ("0000:10:00.0", "card", "dfl-pci"),
            ("0000:10:00.1", "virtual", "vfio-pci"),
            ("0000:10:00.2", "virtual", "vfio-pci"),
        ]
        assert [(f["group"], f["translation"]) for f in found[1:]] == [(256, "DMA"), (257, "DMA")]


def test_functions_are_removed_and_made_on_a_card_that_is_out_of_service_and_no_other():
    with node().up() as it:
        kubelet = it.kubelet
        with pytest.raises(RefusedError, match="is in service"):
            functions(it, "-remove")
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request())
        asked(it, "drain")
        with pytest.raises(RefusedError, match="has an owner"):
            functions(it, "-remove")
        fault = it.arm(P0, "port-open")
        kubelet.deallocate(P0)
        with pytest.raises(RefusedError, match="in use"):
            functions(it, "-remove")
        assert len(drivers(it)) == 2
        fault.unlink()
        kubelet.until(REGIONS, {})
        eventually(lambda: it.afu(P0) == BLANK, "the scrub")
        assert [f["role"] for f in functions(it, "-remove")["functions"]] == ["card"]
        it.plugin.until_logged("card skipped", card=CARD)
        assert len(functions(it, "-make")["functions"]) == 3
        asked(it, "undrain")
        kubelet.until(REGIONS, {P0: HEALTHY})
        assert it.scrubs(P0) >= 2  # what the slot holds was not known any more


def test_functions_of_a_card_that_cannot_be_served_are_not_removed_under_their_user(tmp_path):
    cgroups = Cgroups(tmp_path / "cgroup")
    pod = "aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa"
    with node(cgroup_root=str(cgroups.root)).up() as it:
        kubelet = it.kubelet
        cgroups.set(pod, MAIN)
        kubelet.checkpoint((pod, "main", REGIONS, [P0], kubelet.allocate(P0)))
        kubelet.prestart(P0, env=request())
        fault = it.arm(P0, "port-open")
        kubelet.checkpoint()  # it is deleted by force
        kubelet.deallocate(P0)
        it.plugin.until_logged("scrub waits", region=P0)
        it.set(slot_functions="0000:10:00.0=0000:10:00.7")
        it.plugin.stop()
        it.start()
        it.plugin.until_logged("card skipped", card=CARD)
        with pytest.raises(RefusedError, match=f"pod {pod}, .* still runs"):
            functions(it, "-remove")
        cgroups.set(pod)
        with pytest.raises(RefusedError, match=r"256 .* is in use"):  # as a virtual machine has it
            functions(it, "-remove")
        assert drivers(it) == ["vfio-pci", "vfio-pci"]
        fault.unlink()
        assert [f["role"] for f in functions(it, "-remove")["functions"]] == ["card"]
