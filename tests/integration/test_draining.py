"""Cards out of service: nobody new gets them, over restarts too; who has something keeps it."""

from collections.abc import Iterator
from typing import Any

import pytest
from daemon_support import (
    AFU,
    BLANK,
    CARD,
    CARDS,
    HEALTHY,
    P0,
    P1,
    REGIONS,
    Node,
    eventually,
    request,
)

from fpga_plugin.errors import RefusedError
from fpga_plugin.observability.client import NoDaemonError, ask


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node.up()


def card(node: Node, operation: str) -> Any:
    """What `fpga-plugin card` does and says, said again while the plugin happens to be at work."""

    def answered() -> Any:
        try:
            state = ask(
                str(node.state_dir), "POST", "/card", {"operation": operation, "card": CARD}
            )
            return None if "work on it is under way" in state["waits_for"] else state
        except NoDaemonError:
            return None  # it is starting
        except RefusedError as error:
            if "the plugin is starting" in error.message:
                return None
            raise

    return eventually(answered)


def test_a_drained_card_is_off_the_list_after_a_restart_too(node: Node) -> None:
    state = card(node, "drain")
    assert state["may_be_pulled"], state
    node.kubelet.until(REGIONS, {})
    node.kubelet.until(CARDS, {})
    node.plugin.kill()
    node.again()
    for resource in (REGIONS, CARDS):
        node.plugin.until_logged("registered with kubelet", resource=resource)
        node.plugin.until_logged("device list sent", resource=resource)
    assert (node.kubelet.listed(REGIONS), node.kubelet.listed(CARDS)) == ({}, {})
    card(node, "undrain")
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})
    node.kubelet.until(CARDS, {CARD: HEALTHY})


def test_who_has_a_region_of_a_drained_card_keeps_it_and_may_start_again(node: Node) -> None:
    node.kubelet.allocate(P0)
    node.kubelet.prestart(P0, env=request())
    state = card(node, "drain")
    (holder,) = state["holders"]
    assert (holder["device"], holder["started"]) == (P0, True)
    assert holder["since"]
    assert state["waits_for"] == [f"{P0} has an owner"]
    node.kubelet.until(REGIONS, {P0: HEALTHY})
    node.again()
    node.kubelet.until(REGIONS, {P0: HEALTHY})
    assert node.afu(P0) == AFU
    node.kubelet.prestart(P0, env=request())
    node.kubelet.deallocate(P0)
    node.kubelet.until(REGIONS, {})
    eventually(lambda: node.afu(P0) == BLANK)
    eventually(lambda: card(node, "drain")["may_be_pulled"])


def test_a_port_that_somebody_has_open_is_said(node: Node) -> None:
    fault = node.arm(P1, "port-open")
    state = card(node, "drain")
    assert not state["may_be_pulled"]
    assert any(P1 in words for words in state["waits_for"])
    fault.unlink()
    eventually(lambda: card(node, "drain")["may_be_pulled"])


def test_a_drained_card_that_was_pulled_comes_back_drained(node: Node) -> None:
    card(node, "drain")
    node.kubelet.until(REGIONS, {})
    node.unplug(CARD)
    eventually(lambda: not card(node, "drain")["present"])
    node.plug(CARD)
    eventually(lambda: card(node, "drain")["present"])
    assert node.kubelet.listed(REGIONS) == {}
    card(node, "undrain")
    node.kubelet.until(REGIONS, {P0: HEALTHY, P1: HEALTHY})


def test_a_drained_card_that_may_be_pulled_is_rebound_only_when_asked() -> None:
    with Node(recovery="rebind").up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request())
        card(node, "drain")
        node.arm(P0, "pr-error")
        node.kubelet.deallocate(P0)
        state = eventually(lambda: (s := card(node, "drain"))["may_be_pulled"] and s)
        assert any(words.startswith(f"{P0} is FAULTED") for words in state["not_clean"]), state
        assert not node.plugin.logged("rebinding the driver of a card")
        card(node, "retry")
        node.plugin.until_logged("card rebound", card=CARD)
        eventually(lambda: card(node, "drain")["may_be_pulled"])
        assert node.afu(P0) == BLANK


def test_a_card_whose_driver_cannot_be_put_on_again_is_said_to_who_asks() -> None:
    with Node("2x1").up() as node:
        node.die_between_unbind_and_bind(CARD)
        node.unplug(CARD)
        node.again()
        with pytest.raises(RefusedError, match="is gone"):
            card(node, "retry")
