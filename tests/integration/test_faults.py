"""Hardware that fails, heats up, is pulled, comes back, or is renumbered."""

import grpc
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
    P0,
    P1,
    P2,
    REGIONS,
    UNHEALTHY,
    Node,
    Refused,
    eventually,
    request,
)

from fpga_plugin.errors import RefusedError
from fpga_plugin.observability.client import NoDaemonError, ask

Q0 = f"{CARD_2}-p0"

A_MOMENT = "1"
"""Seconds of a PR during which a test does something, on a busy machine too."""


def refused(node: Node, *devices: str, afu: str = AFU) -> Refused:
    with pytest.raises(Refused) as caught:
        node.kubelet.prestart(*devices, env=request(afu))
    return caught.value


def check_faulted(node: Node) -> None:
    """P0 is lost, and given to nobody, now and after a restart; P1 is as good as ever."""
    kubelet = node.kubelet
    kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
    with pytest.raises(Refused, match="faulted") as caught:
        kubelet.allocate(P0)
    assert caught.value.code == "FAILED_PRECONDITION"
    with pytest.raises(Refused, match="FAILED_PRECONDITION"):
        kubelet.allocate(CARD, resource=CARDS)
    kubelet.allocate(P1)
    kubelet.prestart(P1, env=request(AFU_2))
    assert node.afu(P1) == AFU_2
    kubelet.deallocate(P1)


def retry(node: Node) -> None:
    """`fpga-plugin card retry`, as soon as its socket is there."""

    def asked() -> bool:
        try:
            ask(str(node.state_dir), "POST", "/card", {"operation": "retry", "card": CARD})
        except NoDaemonError:
            return False  # it is starting
        except RefusedError as error:
            if "the plugin is starting" not in error.message:
                raise
            return False
        return True

    eventually(asked)


def test_a_failed_pr_takes_the_region_out_of_service_for_good_and_no_other():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        fault = node.arm(P0, "pr-error")
        failed = refused(node, P0)
        assert failed.code == "INTERNAL"
        assert P0 in failed.message
        assert not fault.exists()
        again = refused(node, P0)
        assert again.code == "FAILED_PRECONDITION"
        assert P0 in again.message
        check_faulted(node)
        node.kubelet.deallocate(P0)
        node.kubelet.until(CARDS, {CARD: UNHEALTHY})
        check_faulted(node)
        node.again()
        check_faulted(node)
        # Another card in the same slot is a card that has not failed.
        node.unplug(CARD)
        node.kubelet.until(REGIONS, {})
        node.plug(CARD)
        node.settled()
        assert node.afu(P0) == BLANK


def test_a_failed_pr_at_the_first_scrub_spares_the_other_regions():
    with Node("1x3") as node:
        (node.simulated / "faults").mkdir(parents=True)
        node.arm(P1, "pr-error")
        node.kubelet.start()
        node.start()
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: UNHEALTHY, P2: HEALTHY})
        assert node.kubelet.listed(CARDS) == {CARD: UNHEALTHY}
        assert [node.afu(region) for region in (P0, P1, P2)] == [BLANK, FACTORY, BLANK]


@pytest.mark.parametrize("word", ["pr-error", "port-deaf"])
def test_a_failed_scrub_keeps_the_last_tenants_region_back(word: str):
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        node.arm(P0, word)
        mark = node.plugin.mark
        node.kubelet.deallocate(P0)
        node.plugin.until_logged("region failed", mark, region=P0)
        node.kubelet.until(CARDS, {CARD: UNHEALTHY})
        check_faulted(node)
        assert node.afu(P0) == AFU


def test_one_failed_region_of_a_call_fails_the_call_and_the_others_are_scrubbed_afterwards():
    with Node("1x3").up() as node:
        node.kubelet.allocate(P0, P1)
        node.arm(P1, "pr-error")
        env = request(AFU, n="0") | request(AFU_2, n="1")
        with pytest.raises(Refused, match=P1) as caught:
            node.kubelet.prestart(P0, P1, env=env)
        assert caught.value.code == "INTERNAL"
        node.kubelet.deallocate(P0, P1)
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: UNHEALTHY, P2: HEALTHY})
        eventually(lambda: node.afu(P0) == BLANK)


def test_a_port_that_does_not_acknowledge_its_reset_is_lost_and_no_other():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        fault = node.arm(P0, "port-deaf")
        failed = refused(node, P0)
        assert failed.code == "INTERNAL"
        assert "in time" in failed.message
        fault.unlink()  # too late: the driver has counted it
        check_faulted(node)
        node.kubelet.deallocate(P0)
        node.kubelet.until(CARDS, {CARD: UNHEALTHY})
        node.again()
        check_faulted(node)


def test_an_accelerator_that_hangs_costs_its_owner_a_restart_and_the_node_nothing():
    with Node().up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request())
        fault = node.arm(P0, "afu-hung")
        kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
        kubelet.prestart(P0, env=request())  # the next container has it programmed again
        assert node.afu(P0) == AFU
        assert not fault.exists()
        kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})

        fault = node.arm(P0, "afu-hung")
        kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
        with pytest.raises(Refused, match="FAILED_PRECONDITION"):
            kubelet.allocate(CARD, resource=CARDS)
        kubelet.deallocate(P0)
        node.settled()
        assert node.afu(P0) == BLANK
        assert not fault.exists()


def test_a_region_that_is_silent_with_the_blank_too_is_lost_until_it_is_tried_again():
    with Node().up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request())
        fault = node.arm(P0, "afu-dead")
        kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
        mark = node.plugin.mark
        kubelet.deallocate(P0)
        node.plugin.until_logged("region failed", mark, region=P0, condition="FAULTED")
        kubelet.until(CARDS, {CARD: UNHEALTHY})
        check_faulted(node)
        mark = node.plugin.mark
        retry(node)
        node.plugin.until_logged("region failed", mark, region=P0, condition="FAULTED")
        fault.unlink()
        node.settled()
        assert node.afu(P0) == BLANK


def test_a_tenants_port_errors_take_nothing_from_its_neighbours_and_bar_no_scrub():
    with Node().up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request())
        mark = node.plugin.mark
        fault = node.arm(P0, "port-fatal")
        line = node.plugin.until_logged("card degraded", mark, card=CARD)
        assert "PortFatalErr" in str(line)
        assert kubelet.listed(REGIONS) == {P0: HEALTHY, P1: HEALTHY}
        kubelet.deallocate(P0)
        node.settled()
        eventually(lambda: node.afu(P0) == BLANK)
        assert not fault.exists()


@pytest.mark.parametrize("by", ["its tenant's scrub", "the operator"])
def test_a_pcie_error_keeps_its_card_back_until_it_is_cleared(by: str):
    with Node().up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request())
        fault = node.arm(P0, "pcie-error")
        kubelet.until(REGIONS, {P0: UNHEALTHY, P1: UNHEALTHY})
        if by == "the operator":
            retry(node)
            kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
            assert node.afu(P0) == AFU  # it is owned: nobody touched it
        else:
            kubelet.deallocate(P0)
            node.settled()
            assert node.afu(P0) == BLANK
        assert not fault.exists()


def test_a_port_that_somebody_has_open_is_neither_scrubbed_nor_programmed():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        fault = node.arm(P0, "port-open")
        busy = refused(node, P0)
        assert busy.code == "FAILED_PRECONDITION"
        assert P0 in busy.message
        assert node.afu(P0) == BLANK
        fault.unlink()
        node.kubelet.prestart(P0, env=request())

        fault = node.arm(P0, "port-open")
        mark = node.plugin.mark
        # One for each PreStart: the fork creates a container before it calls.
        node.kubelet.poststop(P0)
        node.kubelet.poststop(P0)
        assert P0 in node.plugin.until_logged("scrub waits", mark, region=P0)["reason"]
        assert node.afu(P0) == AFU
        assert node.kubelet.listed(REGIONS)[P0] == HEALTHY  # it is owned
        fault.unlink()
        node.plugin.until_logged("region scrubbed", mark, region=P0)
        assert node.afu(P0) == BLANK


def test_one_open_port_does_not_keep_the_cards_other_regions_waiting():
    with Node().up() as node:
        node.kubelet.allocate(P0, P1)
        node.kubelet.prestart(P0, P1, env=request(AFU, n="0") | request(AFU, n="1"))
        node.arm(P0, "port-open")
        node.kubelet.deallocate(P0, P1)
        node.kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
        assert (node.afu(P0), node.afu(P1)) == (AFU, BLANK)
        node.plugin.until_logged("scrub waits", region=P0)
        cards = ask(str(node.told().state_dir), "GET", "/status")["cards"]
        (reason,) = (r["reason"] for c in cards for r in c["regions"] if r["region"] == P0)
        assert reason.startswith("its owner left; its scrub waits: ")
        assert P0 in reason.partition("waits: ")[2]
        assert "`fuser -v /dev/dfl-port." in reason, "and what the operator can do"


@pytest.mark.parametrize("word", ["thermal", "fatal"])
def test_a_region_in_trouble_is_unhealthy_as_long_as_that_lasts(word: str):
    with Node("2x2").up() as node:
        kubelet = node.kubelet
        others = {P1: HEALTHY, Q0: HEALTHY, f"{CARD_2}-p1": HEALTHY}
        mark = node.plugin.mark
        fault = node.arm(P0, word)
        kubelet.until(REGIONS, {P0: UNHEALTHY} | others)
        kubelet.until(CARDS, {CARD: UNHEALTHY, CARD_2: HEALTHY})
        with pytest.raises(Refused, match="FAILED_PRECONDITION"):
            kubelet.allocate(P0)
        fault.unlink()
        kubelet.until(REGIONS, {P0: HEALTHY} | others)
        kubelet.until(CARDS, {CARD: HEALTHY, CARD_2: HEALTHY})
        assert node.scrubs(P0, mark) == 1  # what it holds after that is anybody's guess
        assert node.afu(P0) == BLANK


@pytest.mark.parametrize("word", ["thermal", "fatal"])
def test_an_owned_region_in_trouble_keeps_its_owner_and_its_image(word: str):
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        node.caught_up()
        mark = node.plugin.mark
        fault = node.arm(P0, word)
        node.kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
        assert refused(node, P0, afu=AFU_2).code == "FAILED_PRECONDITION"
        fault.unlink()
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        assert node.steps(P0, mark) == []
        assert node.afu(P0) == AFU
        node.kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == AFU_2


def test_trouble_that_is_there_at_start_is_seen_and_overcome():
    with Node() as node:
        (node.simulated / "faults").mkdir(parents=True)
        fault = node.arm(P0, "thermal")
        node.kubelet.start()
        node.start()
        node.kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
        fault.unlink()
        node.settled()
        assert node.afu(P0) == BLANK


def test_a_card_that_goes_and_comes_leaves_and_enters_the_list():
    with Node("2x1").up() as node:
        node.unplug(CARD)
        node.kubelet.until(REGIONS, {Q0: HEALTHY})
        node.kubelet.until(CARDS, {CARD_2: HEALTHY})
        with pytest.raises(Refused, match="NOT_FOUND"):
            node.kubelet.allocate(P0)
        mark = node.plugin.mark
        node.plug(CARD)
        node.kubelet.until(REGIONS, {P0: HEALTHY, Q0: HEALTHY})
        assert node.scrubs(P0, mark) == 1
        assert node.afu(P0) == BLANK


def test_the_last_card_leaves_its_resources_registered_and_empty_over_a_restart_too():
    with Node("1x1").up() as node:
        node.unplug(CARD)
        node.kubelet.until(REGIONS, {})
        node.kubelet.until(CARDS, {})
        node.again()
        assert node.kubelet.has_list(REGIONS)
        assert node.kubelet.endpoints[REGIONS].lists == [{}]
        assert node.kubelet.endpoints[CARDS].lists == [{}]
        node.plug(CARD)
        node.settled()
        assert node.afu(P0) == BLANK


def test_a_card_that_was_never_there_can_be_plugged_in():
    with Node("1x1").up() as node:
        node.plug("0000-ab-00.0")
        node.kubelet.until(REGIONS, {P0: HEALTHY, "0000-ab-00.0-p0": HEALTHY})
        assert node.afu("0000-ab-00.0-p0") == BLANK


def test_a_card_that_is_swapped_in_an_instant_is_scrubbed():
    with Node().up() as node:
        mark = node.plugin.mark
        node.unplug(CARD)
        node.plug(CARD)
        for region in (P0, P1):
            node.plugin.until_logged("region scrubbed", mark, region=region)
        node.settled()
        assert [node.afu(region) for region in (P0, P1)] == [BLANK, BLANK]


def test_what_was_prepared_for_a_card_that_was_swapped_in_an_instant_serves_nobody():
    with Node().up() as node:
        node.set(simulated_pr_seconds=A_MOMENT)
        node.again()
        node.kubelet.allocate(P0)
        call = node.kubelet.begin_prestart(P0, env=request(AFU))
        node.until_programming(P0, AFU)
        call.cancel()
        node.plugin.until_logged("prepared")
        assert node.afu(P0) == AFU
        mark = node.plugin.mark
        node.unplug(CARD)
        node.plug(CARD)
        node.plugin.until_logged("card found", mark)
        assert refused(node, P0).code in {"UNAVAILABLE", "FAILED_PRECONDITION"}
        assert node.afu(P0) != AFU
        node.kubelet.prestart(P0, env=request(AFU))
        assert node.afu(P0) == AFU
        steps = node.steps(P0, mark)
        assert steps.index("program blank") < steps.index("program")


def test_a_card_that_is_swapped_during_its_scrub_is_scrubbed_and_not_faulted():
    with Node("1x3", simulated_pr_seconds="0.2") as node:
        node.kubelet.start()
        node.start()
        node.plugin.until_logged("kubelet's records read")
        eventually(lambda: node.afu(P0) == BLANK)
        node.unplug(CARD)
        node.plugin.until_logged("card gone")
        node.plug(CARD)  # the scrub holds the ports of a card that is no more
        node.settled()
        assert [node.afu(region) for region in (P0, P1, P2)] == [BLANK] * 3


def test_an_allocation_outlives_its_card_and_its_region_is_scrubbed_before_it_starts_again():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        node.unplug(CARD)
        node.kubelet.until(REGIONS, {P0: UNHEALTHY})
        gone = refused(node, P0)
        assert gone.code == "FAILED_PRECONDITION"
        assert "gone" in gone.message
        mark = node.plugin.mark
        node.plug(CARD)
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        assert node.afu(P0) == FACTORY  # its owner may be running
        node.kubelet.prestart(P0, env=request())
        assert (node.scrubs(P0, mark), node.afu(P0)) == (1, AFU)


def test_regions_that_appear_while_their_pod_waits_serve_its_next_call():
    with Node("2x1").up() as node:
        node.kubelet.allocate(P0)
        node.plugin.kill()
        node.unplug(CARD)  # as where the driver is loaded late
        node.again()
        for _ in range(2):  # kubelet tries again and again
            assert refused(node, P0).code == "FAILED_PRECONDITION"
        mark = node.plugin.mark
        node.plug(CARD)
        node.kubelet.until(REGIONS, {P0: HEALTHY, Q0: HEALTHY})
        node.kubelet.prestart(P0, env=request())
        assert (node.scrubs(P0, mark), node.afu(P0)) == (1, AFU)


def test_an_allocation_may_end_while_its_card_is_gone():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        node.unplug(CARD)
        node.kubelet.until(REGIONS, {P0: UNHEALTHY})
        node.kubelet.poststop(P0)
        node.kubelet.deallocate(P0)
        node.kubelet.until(REGIONS, {})
        node.plug(CARD)
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        assert node.afu(P0) == BLANK


def test_a_card_that_is_swapped_unseen_during_its_scrub_is_scrubbed_and_not_faulted():
    with Node("1x3", simulated_pr_seconds="0.2") as node:
        node.kubelet.start()
        node.start()
        node.plugin.until_logged("kubelet's records read")
        eventually(lambda: node.afu(P0) == BLANK)
        new = node.folder / "card"
        new.touch()
        new.replace(node.simulated / "cards" / CARD)  # no look at the cards sees it gone
        node.settled()
        assert [node.afu(region) for region in (P0, P1, P2)] == [BLANK] * 3


@pytest.mark.parametrize("back", ["while it runs", "later"])
def test_a_card_that_is_pulled_during_a_pr_fails_the_call_and_works_again_when_it_is_back(
    back: str,
):
    with Node().up() as node:
        node.set(simulated_pr_seconds=A_MOMENT)
        node.again()
        node.kubelet.allocate(P0)
        call = node.kubelet.begin_prestart(P0, env=request())
        eventually(lambda: node.afu(P0) == AFU)
        mark = node.plugin.mark
        node.unplug(CARD)
        if back == "while it runs":
            node.plugin.until_logged("card gone", mark)
            node.plug(CARD)
        with pytest.raises(grpc.RpcError) as failed:
            call.result()
        assert failed.value.code().name == "FAILED_PRECONDITION"
        assert P0 in (failed.value.details() or "")
        if back == "later":
            node.kubelet.until(REGIONS, {P0: UNHEALTHY})
            node.plug(CARD)
        node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        node.kubelet.prestart(P0, env=request())
        assert (node.scrubs(P0, mark), node.afu(P0), node.afu(P1)) == (1, AFU, BLANK)


def test_a_node_number_that_moved_is_given_to_nobody_while_its_old_owner_lives():
    with Node("2x1").up() as node:
        kubelet = node.kubelet
        answer = kubelet.allocate(P0)
        assert answer.devices[0].host_path == "/dev/dfl-port.0"
        kubelet.prestart(P0, env=request())
        node.unplug(CARD)
        node.unplug(CARD_2)
        kubelet.until(REGIONS, {P0: UNHEALTHY})
        node.plug(CARD_2)
        kubelet.until(REGIONS, {P0: UNHEALTHY, Q0: UNHEALTHY})
        node.plug(CARD)
        eventually(lambda: {P0, Q0} <= node.state().keys())
        assert (node.state()[Q0]["node"], node.state()[P0]["node"]) == (0, 1)
        kubelet.until(REGIONS, {P0: HEALTHY, Q0: UNHEALTHY})

        # /dev/dfl-port.0 is in the hands of the pod that was given the first card's region.
        for device, resource in ((Q0, REGIONS), (CARD_2, CARDS)):
            with pytest.raises(Refused, match=r"dfl-port\.0") as caught:
                kubelet.allocate(device, resource=resource)
            assert caught.value.code == "FAILED_PRECONDITION"
        stale = refused(node, P0)
        assert stale.code == "FAILED_PRECONDITION"
        assert "device numbering changed since the pod was admitted" in stale.message
        assert "delete the pod" in stale.message
        node.again()
        kubelet.until(REGIONS, {P0: HEALTHY, Q0: UNHEALTHY})
        assert "device numbering changed" in refused(node, P0).message

        # Before the plugin is registered again, kubelet starts containers without a PreStart: this
        # one may have come by the other card's region.
        mark = node.plugin.mark
        kubelet.restart()
        node.plugin.until_logged("kubelet's records read", mark)
        kubelet.until(REGIONS, {P0: HEALTHY, Q0: UNHEALTHY})
        mark = node.plugin.mark
        kubelet.deallocate(P0)
        node.plugin.until_logged("region scrubbed", mark, region=Q0)
        node.settled()
        assert kubelet.listed(REGIONS) == {P0: HEALTHY, Q0: HEALTHY}
        assert kubelet.allocate(Q0).devices[0].host_path == "/dev/dfl-port.0"
        kubelet.prestart(Q0, env=request(AFU_3))
        assert (node.afu(P0), node.afu(Q0)) == (BLANK, AFU_3)


def test_garbage_among_faults_and_cards_is_ignored():
    with Node("1x1").up() as node:
        faults, cards = node.simulated / "faults", node.simulated / "cards"
        for word in ("", "no-such-fault", "pr-error thermal", "\0\xff\n" * 99):
            (faults / P0).write_bytes(word.encode("latin-1"))
        (faults / P0).unlink()
        (faults / P0).mkdir()
        (faults / "0000-99-00.0-p0").write_text("fatal")
        (faults / ".swp~").write_text("fatal")
        for name in (
            "README",
            ".hidden",
            "0000:10:00.0",
            "0000-10-00.0-p0",
            "zz",
            "é",
            "0000-1-0.0",
        ):
            (cards / name).write_text("garbage")
        (cards / CARD).write_bytes(b"\0its contents do not matter")
        # An event that does mean something, after all of these.
        node.plug("0000-20-00.0")
        node.kubelet.until(REGIONS, {P0: HEALTHY, "0000-20-00.0-p0": HEALTHY})
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU


def test_a_pr_that_never_ends_fails_in_the_drivers_time_and_takes_the_region_out():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.arm(P0, "pr-stuck")  # the driver gives up after 8 s
        failed = refused(node, P0)
        assert failed.code == "INTERNAL"
        assert P0 in failed.message
        check_faulted(node)
