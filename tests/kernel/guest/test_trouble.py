"""The daemon on cards in trouble of kinds that simulated cards do not have."""

import pytest
import rack
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    CARD,
    CARD_2,
    CARDS,
    HEALTHY,
    P0,
    P1,
    P2,
    REGIONS,
    UNHEALTHY,
    Node,
    Refused,
    request,
)

from fpga_plugin.observability.client import ask

pytestmark = pytest.mark.skipif(not rack.DEBUGFS.exists(), reason="the guest's: make test-kernel")

Q0, Q1, Q2 = (f"{CARD_2}-p{port}" for port in range(3))

PR_ERRORS = {
    P0: "reconfig operation error",
    P1: "reconfig CRC error",
    P2: "reconfig incompatible image",
    Q0: "reconfig IP protocol error",
    Q1: "reconfig fifo overflow error",
}
"""In the order of the bits of FME_PR_ERR (dfl-fme-mgr.c), each for a region of its own."""


def works(node: Node, region: str) -> None:
    node.kubelet.allocate(region)
    node.kubelet.prestart(region, env=request(AFU_2))
    assert node.afu(region) == AFU_2
    node.kubelet.deallocate(region)


def test_each_pr_error_is_told_to_its_pod_and_takes_no_more_than_its_region():
    with Node("2x3").up() as node:
        kubelet = node.kubelet
        for bit, (region, says) in enumerate(PR_ERRORS.items()):
            kubelet.allocate(region)
            rack.knob(region, "pr_ports", 0xFF)
            rack.knob(region, "pr_err", 1 << bit)
            with pytest.raises(Refused, match="the FPGA reported an error") as refused:
                kubelet.prestart(region, env=request(AFU))
            assert says in node.plugin.until_logged("region failed", region=region)["why"]
            assert refused.value.code == "INTERNAL"
            assert region in refused.value.message
            # At once and for good: nobody asks the driver again.
            with pytest.raises(Refused, match="FAILED_PRECONDITION"):
                kubelet.prestart(region, env=request(AFU))
            kubelet.until_health(region, UNHEALTHY)
        kubelet.until(REGIONS, dict.fromkeys(PR_ERRORS, UNHEALTHY) | {Q2: HEALTHY})
        works(node, Q2)
        kubelet.deallocate(*PR_ERRORS)
        kubelet.until(CARDS, {CARD: UNHEALTHY, CARD_2: UNHEALTHY})
        for region in PR_ERRORS:
            with pytest.raises(Refused, match="FAILED_PRECONDITION"):
                kubelet.allocate(region)


def test_a_pr_that_is_not_begun_is_told_in_the_drivers_time_and_spares_the_rest():
    with Node("2x2").up() as node:
        node.kubelet.allocate(P0)
        rack.knob(CARD, "pr_deaf", 1)
        call = node.kubelet.begin_prestart(P0, env=request(AFU))
        works(node, Q0)
        failed = Refused(call.exception())
        assert failed.code == "INTERNAL"
        assert "in time" in failed.message
        rack.knob(CARD, "pr_deaf", 0)
        node.kubelet.until_health(P0, UNHEALTHY)
        works(node, P1)


def test_a_mapping_of_its_registers_alone_keeps_a_region_from_being_scrubbed():
    with Node().up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request(AFU))
        with rack.Mapping(P0) as tenant:
            mark = node.plugin.mark
            kubelet.deallocate(P0)
            node.plugin.until_logged("scrub waits", mark, region=P0)
            kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
            kubelet.allocate(P0)
            with pytest.raises(Refused, match=r"FAILED_PRECONDITION.* in use"):
                kubelet.prestart(P0, env=request(AFU_2))
            works(node, P1)
            assert node.afu(P0) == tenant.afu_id() == AFU
        mark = node.plugin.mark
        kubelet.deallocate(P0)
        node.plugin.until_logged("region scrubbed", mark, region=P0)
        kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        assert node.afu(P0) == BLANK


def test_memory_that_cannot_be_cleared_keeps_its_card_back_until_retried():
    with Node("2x1").up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request(AFU))
        rack.knob(CARD, "memory_busy", 0b10)
        mark = node.plugin.mark
        kubelet.deallocate(P0)
        node.plugin.until_logged("scrub failed", mark, card=CARD)
        kubelet.until(REGIONS, {P0: UNHEALTHY, Q0: HEALTHY})
        works(node, Q0)
        rack.knob(CARD, "memory_busy", 0)
        ask(str(node.state_dir), "POST", "/card", {"operation": "retry", "card": CARD})
        kubelet.until(REGIONS, {P0: HEALTHY, Q0: HEALTHY})


@pytest.mark.parametrize(
    ("register", "well", "ill", "says"),
    [
        (rack.CATFATAL, 0, 1 << 9, "CrcCatastErr"),
        (rack.NONFATAL, 0, 1 << 9, "TempThreshAP6"),
        (rack.THERMAL_THRESHOLDS, rack.THERMAL_WELL, 1 << 33, "critical temperature"),
        (rack.MEMORY_STATUS, rack.MEMORY_WELL, 1 << 8, "calibration"),
    ],
)
def test_a_card_in_trouble_is_unhealthy_as_a_whole_and_alone(
    register: int, well: int, ill: int, says: str
):
    with Node("2x2").up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request(AFU))
        mark = node.plugin.mark
        rack.poke_card(CARD, register, well | ill)
        kubelet.until(REGIONS, {P0: UNHEALTHY, P1: UNHEALTHY, Q0: HEALTHY, Q1: HEALTHY})
        assert says in str(node.plugin.lines[mark:])
        with pytest.raises(Refused, match="FAILED_PRECONDITION"):
            kubelet.allocate(P1)
        works(node, Q0)
        rack.poke_card(CARD, register, well)
        kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY, Q0: HEALTHY, Q1: HEALTHY})
        assert node.afu(P0) == AFU  # it is owned: nobody touched it
        works(node, P1)


def test_a_board_is_judged_by_its_management_controller():
    core = 0x110
    node = Node("2x2")
    rack.unplug(CARD)
    rack.power_up(CARD, 2, board=True)
    rack.plug(CARD)
    with node.up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request(AFU))
        cards = ask(str(node.state_dir), "GET", "/status")["cards"]
        assert [card["temperatures"].get("fpga_core_temperature") for card in cards] == [61, None]

        mark = node.plugin.mark
        rack.measure(CARD, core, 2 * 100)
        kubelet.until(REGIONS, {P0: UNHEALTHY, P1: UNHEALTHY, Q0: HEALTHY, Q1: HEALTHY})
        assert "fpga_core_temperature" in str(node.plugin.lines[mark:])
        mark = node.plugin.mark
        rack.measure(CARD, core, 2 * 97)
        line = node.plugin.until_logged("card degraded", mark, card=CARD)
        assert "highest temperature" in str(line)
        kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY, Q0: HEALTHY, Q1: HEALTHY})
        assert node.afu(P0) == AFU  # it is owned: nobody touched it

        mark = node.plugin.mark
        rack.measure(CARD, core, rack.NO_ANSWER)
        line = node.plugin.until_logged("card degraded", mark, card=CARD)
        assert "management controller" in str(line)
        works(node, P1)
        kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY, Q0: HEALTHY, Q1: HEALTHY})


def test_what_one_tenants_image_did_to_its_card_ends_with_its_scrub():
    """It overflowed its channel, sent malformed requests, and no longer answers, all at once."""
    with Node("1x2").up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request(AFU))
        for offset in (rack.AFU + 8, rack.AFU + 16):
            rack.poke(P0, offset, rack.ALL_ONES)
        rack.poke(P0, rack.PORT_ERRORS, rack.MMIO_TIMEOUT | 1)
        rack.poke_card(CARD, rack.PCIE0_ERRORS, 0x21)
        rack.poke_card(CARD, rack.NONFATAL, rack.NONFATAL_PCIE | rack.NONFATAL_PORT)
        kubelet.until(REGIONS, {P0: UNHEALTHY, P1: UNHEALTHY})
        kubelet.deallocate(P0)
        kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        assert node.afu(P0) == BLANK
        works(node, P0)
        works(node, P1)
