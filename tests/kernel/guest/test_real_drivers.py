"""What only the real drivers can show."""

import errno
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import rack

from fpga_plugin.errors import (
    CardGoneError,
    HardwareError,
    PortInUseError,
    PortPoisonedError,
    ProgrammingError,
)
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.dfl.handles import fme_of
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.hardware.linux import LinuxKernel
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import CardId

pytestmark = pytest.mark.skipif(not rack.DEBUGFS.exists(), reason="the guest's: make test-kernel")

CARD = CardId(rack.daemon_support.CARD)
AFU = "00112233445566778899aabbccddeeff"
IMAGE = bytes.fromhex(AFU) + bytes(1000)


@pytest.fixture
def backend() -> Iterator[DflBackend]:
    rack.lay_out("2x3")
    yield DflBackend(LinuxKernel("/sys", "/dev"))
    for card in rack.cards():
        rack.unplug(card)


@pytest.fixture
def card(backend: DflBackend) -> Card:
    found = backend.scan_card(CARD)
    assert isinstance(found, Card)
    return found


def test_an_unplugged_card_is_off_the_bus_until_it_is_plugged(backend: DflBackend, card: Card):
    rack.unplug(CARD)
    assert not rack.there(CARD)
    assert CARD not in backend.scan().cards
    rack.power_up(CARD)
    rack.plug(CARD)
    again = backend.scan().cards[CARD]
    assert replace(again, regions=()) == replace(card, regions=())
    for before, after in zip(card.regions, again.regions, strict=True):
        assert after == replace(before, handle=after.handle)
        assert after.handle != before.handle
        with pytest.raises(CardGoneError):
            backend.afu_id(before)


def test_a_card_that_stays_is_the_same_one_whatever_the_kernel_forgets(
    backend: DflBackend, card: Card
):
    Path("/proc/sys/vm/drop_caches").write_text("3")
    assert backend.scan_card(CARD) == card
    rack.unplug(rack.daemon_support.CARD_2)
    assert backend.scan_card(CARD) == card


def test_a_mapping_alone_keeps_the_port_in_use(backend: DflBackend, card: Card):
    with rack.Mapping(card.regions[0].id) as tenant:
        assert tenant.afu_id() == rack.daemon_support.FACTORY
        with pytest.raises(PortInUseError):
            backend.open_port(card, card.regions[0])
    with backend.open_port(card, card.regions[0]):
        pass


@pytest.mark.parametrize(
    ("bit", "says"),
    [
        (0, "reconfig operation error"),
        (1, "reconfig CRC error"),
        (2, "reconfig incompatible image"),
        (3, "reconfig IP protocol error"),
        (4, "reconfig fifo overflow error"),
    ],
)
def test_each_pr_error_is_named(backend: DflBackend, card: Card, bit: int, says: str):
    rack.knob(CARD, "pr_err", 1 << bit)
    with (
        backend.open_port(card, card.regions[0]) as port,
        pytest.raises(ProgrammingError, match="the FPGA reported an error") as failed,
    ):
        port.program(RawImage(IMAGE))
    assert says in failed.value.why


def test_port_errors_are_cleared_and_told(backend: DflBackend, card: Card):
    region = card.regions[1]
    rack.poke(region.id, rack.PORT_ERRORS, 0x8001)
    rack.poke(region.id, rack.PORT_STATUS, 1 << 12)
    assert dict(backend.port_errors(region)) == {"errors": 0x8001}
    with backend.open_port(card, region) as port:
        assert dict(port.clear_errors()) == {"errors": 0x8001, "ap1_event": 1}
        assert dict(port.clear_errors()) == {}
    assert dict(backend.port_errors(region)) == {}


def test_looking_at_the_hardware_does_not_wait_for_a_pr(backend: DflBackend, card: Card):
    rack.knob(CARD, "stall_ms", 3000)
    region = card.regions[0]
    with backend.open_port(card, region) as port:
        before = rack.count(CARD, "prs")
        worker = threading.Thread(target=port.program, args=(RawImage(IMAGE),))
        worker.start()
        while rack.count(CARD, "prs") == before:
            time.sleep(0.001)  # nobody reports
        begin = time.monotonic()
        with pytest.raises(PortPoisonedError):
            backend.afu_id(region)  # which is how it looks meanwhile
        assert isinstance(backend.scan_card(CARD), Card)
        looked = time.monotonic() - begin
        assert worker.is_alive(), f"it took {looked:.3f} s"
        worker.join()
        assert port.afu_id() == AFU


def test_memory_is_cleared_bank_by_bank_and_a_bank_that_hangs_is_an_error(
    backend: DflBackend, card: Card
):
    before = rack.count(CARD, "memory_clears")
    backend.clear_memory(card)
    assert rack.count(CARD, "memory_clears") == before + 2
    rack.knob(CARD, "memory_busy", 0b10)
    with pytest.raises(HardwareError, match="timed out"):
        backend.clear_memory(card)


def test_the_driver_refuses_what_it_documents(backend: DflBackend, card: Card):
    kernel = LinuxKernel("/sys", "/dev")
    handle = kernel.open(fme_of(card).node, os.O_RDWR)
    try:
        for argument in (
            struct.pack("<IIIIQ", 8, 0, 0, 4, 4096),
            struct.pack("<IIIIQ", 24, 1, 0, 4, 4096),
            struct.pack("<IIIIQ", 24, 0, 3, 4, 4096),
        ):
            with pytest.raises(OSError) as caught:  # noqa: PT011  # the errno is looked at
                kernel.ioctl(handle, 0xB680, argument)
            assert caught.value.errno == errno.EINVAL
    finally:
        kernel.close(handle)


def test_device_numbers_are_those_by_which_a_container_opens_its_nodes(
    backend: DflBackend, card: Card
) -> None:
    def number(node: str) -> str:
        made = os.stat(node).st_rdev
        return f"{os.major(made)}:{os.minor(made)}"

    for region in card.regions:
        (node,) = region.grant.nodes
        assert region.numbers == backend.numbers(region) == {node: number(node)}
    assert card.guarded == {number(fme_of(card).node)}
