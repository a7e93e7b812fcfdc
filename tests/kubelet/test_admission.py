"""A stock kubelet admits pods and asks the plugin; nobody reports the plugin what they want yet."""

from collections.abc import Callable

from daemon_support import CARD, CARDS, P0, P1, REGIONS, request
from node import Node, container


def test_kubelet_knows_regions_and_cards(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2")
    node.until_offered(REGIONS, {P0, P1})
    node.until_offered(CARDS, {CARD})


def test_without_a_source_a_pod_waits_and_is_told_why(make_node: Callable[..., Node]) -> None:
    node = make_node("1x1", pods_socket="", kubeconfig="")
    pod = node.pod("asks", container(env=request()))
    message = pod.until_waiting("CreateContainerConfigError")
    assert "Unavailable" in message
    assert pod.devices() == {REGIONS: [P0]}
