"""Poisoned ports that are recovered by rebinding, where that harms nobody; cards out of service."""

import itertools
from collections.abc import Iterator

import grpc
import pytest
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    CARD,
    CARD_2,
    CARDS,
    HEALTHY,
    NO_REQUEST,
    P0,
    P1,
    REGIONS,
    UNHEALTHY,
    Node,
    Refused,
    eventually,
    request,
)

Q0 = f"{CARD_2}-p0"


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(recovery="rebind") as node:
        yield node.up()
        assert not (node.simulated / "oops").exists(), "the real kernel would have crashed"


def test_the_pod_that_waits_is_programmed_after_a_rebind(node: Node) -> None:
    node.kubelet.allocate(P0)
    node.arm(P0, "pr-error")
    mark = node.plugin.mark
    node.kubelet.prestart(P0, env=request())
    assert node.afu(P0) == AFU
    node.plugin.until_logged("card rebound", mark, card=CARD)
    # The rebind took the neighbour away for a moment: what it holds is not known any more.
    eventually(lambda: node.afu(P1) == BLANK)
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
    node.kubelet.deallocate(P0)
    node.kubelet.until(CARDS, {CARD: HEALTHY})
    assert node.afu(P0) == BLANK


def test_kubelet_is_told_that_the_card_is_unhealthy_before_it_is_rebound(node: Node) -> None:
    node.kubelet.allocate(P0)
    node.arm(P0, "pr-error")
    node.kubelet.prestart(P0, env=request())
    lists = node.kubelet.endpoints[REGIONS].lists
    assert {P0: UNHEALTHY, P1: UNHEALTHY} in lists


def test_a_card_that_nobody_has_is_recovered_in_the_background(node: Node) -> None:
    node.kubelet.allocate(P0)
    node.kubelet.prestart(P0, env=request())
    mark = node.plugin.mark
    node.arm(P0, "pr-error")
    node.kubelet.deallocate(P0)
    node.plugin.until_logged("card rebound", mark, card=CARD)
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
    assert node.afu(P0) == BLANK


def test_a_neighbour_is_never_disturbed_and_the_card_is_recovered_when_it_has_left(
    node: Node,
) -> None:
    kubelet = node.kubelet
    kubelet.allocate(P0)
    kubelet.allocate(P1)
    kubelet.prestart(P1, env=request(AFU_2))
    node.arm(P0, "pr-error")
    mark = node.plugin.mark
    with pytest.raises(Refused) as caught:
        kubelet.prestart(P0, env=request())
    assert caught.value.code == "INTERNAL"
    assert "rebinds the card's driver when nobody else has a region" in caught.value.message
    assert "unbind" in caught.value.message, "the operator's way is named"
    assert f"{P1} has an owner" in node.plugin.until_logged("card not rebound", mark)["reason"]
    assert node.afu(P1) == AFU_2
    kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
    kubelet.deallocate(P0)
    kubelet.deallocate(P1)
    kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
    assert (node.afu(P0), node.afu(P1)) == (BLANK, BLANK)


def test_a_port_that_somebody_has_open_keeps_the_driver_on(node: Node) -> None:
    node.kubelet.allocate(P0)
    node.arm(P0, "pr-error")
    fault = node.arm(P1, "port-open")
    with pytest.raises(Refused, match="INTERNAL"):
        node.kubelet.prestart(P0, env=request())
    assert "in use" in node.plugin.until_logged("card not rebound", card=CARD)["reason"]
    assert node.state()[P0]["poisoned"]
    node.kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
    fault.unlink()


def test_without_the_operators_leave_nothing_is_rebound() -> None:
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.arm(P0, "pr-error")
        with pytest.raises(Refused, match="INTERNAL"):
            node.kubelet.prestart(P0, env=request())
        node.kubelet.deallocate(P0)
        node.kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
        assert node.state()[P0]["poisoned"]
        assert not node.plugin.logged("rebinding the driver of a card")


def test_a_card_that_fails_again_is_not_rebound_again_at_once(node: Node) -> None:
    node.kubelet.allocate(P0)
    node.arm(P0, "pr-error")
    node.kubelet.prestart(P0, env=request())
    node.arm(P0, "pr-error")
    with pytest.raises(Refused, match="INTERNAL"):
        node.kubelet.prestart(P0, env=request())
    with pytest.raises(Refused, match="FAILED_PRECONDITION"):
        node.kubelet.prestart(P0, env=request())
    assert len(node.plugin.logged("card rebound")) == 1


def test_a_whole_card_with_a_poisoned_port_is_recovered_for_its_owner(node: Node) -> None:
    node.kubelet.allocate(CARD, resource=CARDS)
    node.arm(P1, "pr-error")
    node.kubelet.prestart(CARD, env=request(AFU, n="0") | request(AFU_2, n="1"), resource=CARDS)
    assert (node.afu(P0), node.afu(P1)) == (AFU, AFU_2)


def test_a_port_that_was_poisoned_before_the_plugin_started_is_recovered() -> None:
    with Node() as node:
        node.up()
        node.kubelet.allocate(P0)
        node.arm(P0, "pr-error")
        with pytest.raises(Refused, match="INTERNAL"):
            node.kubelet.prestart(P0, env=request())
        node.set(recovery="rebind")
        node.again()
        # Its pod still has it and tries again.
        node.kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU
        node.kubelet.allocate(P1)
        node.kubelet.prestart(P1, env=NO_REQUEST)
        assert node.afu(P1) == BLANK


def test_a_pod_whose_device_node_was_renumbered_by_the_rebind_is_refused() -> None:
    with Node("2x1", recovery="rebind").up() as node:
        node.unplug(CARD)
        node.kubelet.until(REGIONS, {Q0: HEALTHY})
        assert node.kubelet.allocate(Q0).devices[0].host_path == "/dev/dfl-port.1"
        node.arm(Q0, "pr-error")
        mark = node.plugin.mark
        with pytest.raises(Refused, match="device numbering changed") as caught:
            node.kubelet.prestart(Q0, env=request())
        assert caught.value.code == "FAILED_PRECONDITION"
        node.plugin.until_logged("card rebound", mark, card=CARD_2)
        assert node.state()[Q0]["node"] == 0
        assert node.afu(Q0) != AFU, "nothing is programmed for a pod that has another's node"
        node.kubelet.deallocate(Q0)
        node.kubelet.until(REGIONS, {Q0: HEALTHY})
        assert node.kubelet.allocate(Q0).devices[0].host_path == "/dev/dfl-port.0"
        node.kubelet.prestart(Q0, env=request())
        assert node.afu(Q0) == AFU


def test_a_plugin_that_died_between_unbind_and_bind_binds_the_card_when_it_is_back() -> None:
    with Node("2x1").up() as node:
        node.die_between_unbind_and_bind(CARD)
        node.again()
        node.plugin.until_logged("card bound again", card=CARD)
        node.settled()
        assert node.kubelet.listed(REGIONS).keys() == {P0, Q0}
        assert node.afu(P0) == BLANK


@pytest.mark.parametrize("word", ["thermal", "fatal"])
def test_a_signal_that_comes_and_goes_does_not_make_the_list_flap(word: str) -> None:
    with Node(health_interval="0.5").up() as node:
        kubelet = node.kubelet
        for _ in range(3):
            fault = node.arm(P0, word)
            kubelet.until(REGIONS, {P0: UNHEALTHY, P1: HEALTHY})
            fault.unlink()
        kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
        told = [one.get(P0) for one in kubelet.endpoints[REGIONS].lists]
        came_back = sum(a == UNHEALTHY and b == HEALTHY for a, b in itertools.pairwise(told))
        assert came_back == 2  # after the first scrub, and now
        assert len(node.plugin.logged("region recovered", region=P0)) == 1


def test_a_plugin_that_is_killed_during_a_pr_leaves_a_card_that_its_successor_looks_after() -> None:
    with Node().up() as node:
        node.set(simulated_pr_seconds="5")
        node.again()
        node.kubelet.allocate(P0)
        call = node.kubelet.begin_prestart(P0, env=request())
        node.until_programming(P0, AFU)
        node.plugin.kill()  # the real kernel lets it die when the PR is done
        with pytest.raises(grpc.RpcError):
            call.result()
        assert node.afu(P0) == AFU
        node.set(simulated_pr_seconds="0.01")
        node.restarted()
        assert node.kubelet.listed(REGIONS)[P0] == HEALTHY  # it is owned
        node.kubelet.prestart(P0, env=request(AFU_2))
        assert (node.afu(P0), node.afu(P1)) == (AFU_2, BLANK)
        assert node.steps(P0)[0] == "quiesce", "nobody saw how that PR ended"
        node.kubelet.deallocate(P0)
        node.kubelet.until(CARDS, {CARD: HEALTHY})
        assert node.afu(P0) == BLANK
