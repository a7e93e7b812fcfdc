"""What a scrub does not guarantee is said everywhere, and refused where the operator says so."""

import json

from daemon_support import CARD, CARDS, HEALTHY, P0, P1, REGIONS, UNHEALTHY, Node, eventually
from test_devices import devices

from fpga_plugin.observability.client import NoDaemonError, ask


def status(node: Node):
    def answered():
        try:
            return ask(str(node.state_dir), "GET", "/status")["cards"]
        except NoDaemonError:
            return None  # it is starting

    (card,) = eventually(answered)
    return card


def test_an_exposed_card_is_said_to_be_so_and_given_out_by_default():
    with Node("1x2+no-clear+no-iommu").up() as node:
        assert (status(node)["memory"], status(node)["iommu"]) == ("never cleared", "none")
        (listed,) = json.loads(devices(node, "--json").stdout)["cards"]
        assert (listed["memory"], listed["iommu"]) == ("never cleared", "none")
        assert "memory: never cleared  IOMMU: none" in devices(node).stdout
        (line,) = node.plugin.logged("a card's memory is never cleared")
        assert (line["card"], line["level"], "given" in line) == (CARD, "warning", True)
        assert node.plugin.logged("a card's DMA is not limited by an IOMMU")
        node.kubelet.allocate(P0)


def test_a_sound_card_is_said_to_be_so_and_warned_about_by_nothing():
    with Node().up() as node:
        assert (status(node)["memory"], status(node)["iommu"]) == ("cleared", "translate")
        assert not node.plugin.logged("a card's memory is never cleared")
        assert not node.plugin.logged("a card's DMA is not limited by an IOMMU")


def test_such_a_card_is_refused_by_region_and_given_as_a_whole():
    with Node("1x2+no-clear", uncleared_memory="refuse-regions") as node:
        node.kubelet.start()
        node.start()
        node.kubelet.until(REGIONS, {P0: UNHEALTHY, P1: UNHEALTHY})
        node.kubelet.until(CARDS, {CARD: HEALTHY})
        assert "given only as a whole" in status(node)["note"]
        assert "given only as a whole" in devices(node).stdout


def test_observing_says_what_would_be_refused():
    with Node("1x1+no-iommu", untranslated_dma="refuse", observe="true") as node:
        plugin = node.start()
        line = plugin.until_logged("would serve card")
        assert (line["memory"], line["iommu"]) == ("not known", "none")
        assert line["given"].startswith("given to nobody: its IOMMU mode is none")
