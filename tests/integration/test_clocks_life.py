"""An image's user clock over the life of an allocation: set, checked, refused, and told."""

import pytest
from daemon_support import BLANK, ID, P0, Node, Refused, eventually, request
from doubles.bitstreams import document, packed
from test_exposure_policy import status

AFU = "00c10c00" * 4


def with_image(hardware: str, *, high: float | None, low: float | None = None) -> Node:
    """A node with a bitstream that was built for these clocks."""
    node = Node(hardware)
    metadata = document(AFU, interface=ID, high=high, low=low)
    image = packed(metadata, bytes.fromhex(AFU) + bytes(100))
    (node.own_store() / ID / f"{AFU}.gbs").write_bytes(image)
    return node.up()


def clock(node: Node):
    return status(node)["regions"][0]["clock"]


def test_a_clock_that_can_be_set_is_set_to_what_the_image_was_built_for_and_restored():
    with with_image("1x1", high=312.5) as node:
        before = node.state()[P0]["clock"]
        assert clock(node) is None
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        assert (node.afu(P0), node.state()[P0]["clock"]) == (AFU, 312)
        assert clock(node)["state"] == "set"
        line = node.plugin.until_logged("region prepared")
        assert any("312.5 MHz" in note for note in line["notes"])
        node.kubelet.prestart(P0, env=request(AFU, params="clock=100"))  # a restart
        assert node.state()[P0]["clock"] == 100
        assert "as asked" in clock(node)["detail"]
        node.kubelet.deallocate(P0)
        eventually(lambda: node.afu(P0) == BLANK)
        assert node.state()[P0]["clock"] == before
        assert clock(node) is None


def test_a_clock_that_is_above_what_the_image_was_built_for_is_refused_and_nothing_is_touched():
    with with_image("1x1", high=100) as node:
        node.kubelet.allocate(P0)
        with pytest.raises(Refused, match="built for 100 MHz") as caught:
            node.kubelet.prestart(P0, env=request(AFU, params="clock=101"))
        assert caught.value.code == "FAILED_PRECONDITION"
        assert (node.afu(P0), node.state()[P0]["clock"]) == (BLANK, 200)
        node.kubelet.prestart(P0, env=request(AFU, params="clock=100"))


def test_a_measured_clock_that_the_image_bears_is_told():
    with with_image("1x1+fixed-clock", high=200, low=100) as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        assert node.afu(P0) == AFU
        assert clock(node)["state"] == "checked"
        assert "200 MHz, measured" in clock(node)["detail"]


@pytest.mark.parametrize(("high", "low"), [(199 / 1.005, None), (250, 99 / 1.005)])
def test_an_image_that_is_too_slow_for_the_measured_clock_is_never_programmed(high, low):
    with with_image("1x1+fixed-clock", high=high, low=low) as node:
        node.kubelet.allocate(P0)
        for _ in range(2):  # kubelet tries again
            with pytest.raises(Refused, match="user clock runs at") as caught:
                node.kubelet.prestart(P0, env=request(AFU))
            assert caught.value.code == "FAILED_PRECONDITION"
        eventually(lambda: node.afu(P0) == BLANK)
        assert not any("program" in line["steps"] for line in node.plugin.logged("region prepared"))
        node.kubelet.deallocate(P0)
        node.settled()


def test_after_a_restart_of_the_plugin_nothing_is_claimed_about_the_clock():
    with with_image("1x1", high=312.5) as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        node.again()
        assert node.afu(P0) == AFU
        assert clock(node) is None


def test_the_slot_of_an_ofs_card_has_its_ports_clock():
    with with_image("1x1+ofs+fixed-clock", high=200) as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        assert clock(node)["state"] == "checked"
    with with_image("1x1+ofs+fixed-clock", high=150) as node:
        node.kubelet.allocate(P0)
        with pytest.raises(Refused, match="user clock runs at 200 MHz"):
            node.kubelet.prestart(P0, env=request(AFU))
