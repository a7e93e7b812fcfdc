"""Files that are not what their metadata says, and blank bitstreams that come late or wrong."""

from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    HEALTHY,
    ID,
    NO_REQUEST,
    P0,
    P1,
    UNHEALTHY,
    Node,
    Refused,
    request,
)


def mislabel(path: Path) -> None:
    """Another image under the same metadata: a fake card reads its first 16 bytes as AFU id."""
    data = bytearray(path.read_bytes())
    begin = 20 + int.from_bytes(data[16:20], "little")
    data[begin : begin + 16] = bytes.fromhex("5" * 32)
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


def test_a_mislabelled_bitstream_fails_the_start_and_its_region_stays_in_service():
    node = Node()
    mislabel(node.own_store() / ID / f"{AFU}.gbs")
    with node.up():
        node.kubelet.allocate(P0)
        with pytest.raises(Refused, match="mislabelled") as refused:
            node.kubelet.prestart(P0, env=request(AFU))
        assert refused.value.code == "INTERNAL"
        # Owned, and the hardware is sound: it stays as it is on the list.
        assert node.kubelet.listed()[P0] == HEALTHY
        node.kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == AFU_2
        assert "program blank" in node.steps(P0)
        node.give_back(P0)
        assert node.afu(P0) == BLANK


def test_a_mislabelled_blank_takes_regions_out_until_another_is_installed():
    node = Node()
    blank = node.own_store() / ID / "blank.gbs"
    good = blank.read_bytes()
    mislabel(blank)
    with node:
        node.kubelet.start()
        node.start()
        node.plugin.until_logged("region not scrubbed", region=P0, condition="FAULTED")
        node.plugin.until_logged("region not scrubbed", region=P1, condition="FAULTED")
        assert set(node.kubelet.listed().values()) == {UNHEALTHY}
        with pytest.raises(Refused, match="faulted") as refused:
            node.kubelet.allocate(P0)
        assert refused.value.code == "FAILED_PRECONDITION"
        new = blank.with_suffix(".new")
        new.write_bytes(good)
        new.replace(blank)
        node.settled()
        assert node.afu(P0) == BLANK


def test_a_region_without_a_request_is_verified_to_be_blank():
    with Node().up() as node:
        node.kubelet.allocate(P0)
        node.kubelet.prestart(P0, env=NO_REQUEST | {"FPGA_PLUGIN_NOTE": "x"})
        assert node.afu(P0) == BLANK
        assert node.steps(P0)[-1] == "verify"
