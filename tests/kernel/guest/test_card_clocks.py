"""A port's user clock by the real driver's registers; what the real kernel says of the IOMMU."""

import pytest
import rack
from daemon_support import P0, Refused, request
from test_clocks_life import AFU, clock, with_image
from test_exposure_policy import status

pytestmark = pytest.mark.skipif(not rack.DEBUGFS.exists(), reason="the guest's: make test-kernel")

COUNTER = 0x68
"""PORT_HDR_USRCLK_STS1 (drivers/fpga/dfl.h): the frequency in 10 kHz, of whichever clock."""


def test_the_measured_clock_decides_whether_an_image_is_programmed():
    with with_image("1x1", high=300) as node:
        rack.poke(P0, COUNTER, 31250)
        node.kubelet.allocate(P0)
        with pytest.raises(Refused, match=r"the user clock runs at 312\.5 MHz") as caught:
            node.kubelet.prestart(P0, env=request(AFU))
        assert caught.value.code == "FAILED_PRECONDITION"
        assert node.afu(P0) != AFU
        rack.poke(P0, COUNTER, 30000)
        node.kubelet.prestart(P0, env=request(AFU))
        assert node.afu(P0) == AFU
        assert clock(node)["state"] == "checked"
        assert "300 MHz, measured" in clock(node)["detail"]


def test_a_counter_that_reads_nothing_stops_no_image_and_is_told():
    with with_image("1x1", high=300) as node:
        rack.poke(P0, COUNTER, 0)
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=request(AFU))
        assert node.afu(P0) == AFU
        assert clock(node)["state"] == "not checked"
        line = node.plugin.until_logged("an image's clock is not checked")
        assert "no clock" in line["clock"]


def test_the_machines_iommu_is_told_to_translate():
    with with_image("1x1", high=300) as node:
        assert status(node)["iommu"] == "translate"
        assert status(node)["memory"] == "cleared"
