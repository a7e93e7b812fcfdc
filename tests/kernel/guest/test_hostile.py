"""What a careless operator and an unlucky moment do, on the real drivers, below the daemon."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import rack
from daemon_support import CARD

from fpga_plugin.errors import PortInUseError, PortPoisonedError, SlotUnusableError
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.dfl.handles import fme_of, port_of
from fpga_plugin.hardware.faults import FaultKind
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.hardware.linux import LinuxKernel
from fpga_plugin.hardware.model import AssumptionVerdict, Card, CardProblem
from fpga_plugin.ids import CardId

IMAGE = RawImage(bytes.fromhex("00112233445566778899aabbccddeeff") + bytes(1000))
ID = CardId(CARD)


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "slots"
    rack.knob(CARD, "port_deaf", 0)
    for card in rack.cards():
        rack.take_driver_off(card)
    rack.free_functions()


def laid_out(spec: str, slots: Path) -> tuple[DflBackend, Card]:
    rack.lay_out(spec)
    backend = DflBackend(LinuxKernel("/sys", "/dev"), slots=str(slots))
    found = backend.scan_card(ID)
    assert isinstance(found, Card), found
    return backend, found


def test_a_card_is_not_rebound_while_a_process_has_its_fme_open(slots):
    backend, card = laid_out("1x2", slots)
    descriptor = os.open(fme_of(card).node, os.O_RDWR)
    try:
        with pytest.raises(PortInUseError, match="dfl-fme"):
            backend.rebind(card)
        assert backend.scan_card(ID) == card, "its driver was not touched"
    finally:
        os.close(descriptor)
    backend.rebind(card)
    assert isinstance(backend.scan_card(ID), Card)


def test_a_function_that_is_reserved_for_another_driver_stays_so(slots):
    backend, card = laid_out("1x1+ofs", slots)
    (region,) = card.regions
    override = rack.PCI / rack.FUNCTIONS[0] / "driver_override"
    override.write_text("pci-stub")
    with pytest.raises(SlotUnusableError, match="pci-stub"):
        backend.open_port(card, region)
    assert override.read_text().strip() == "pci-stub"
    assert rack.drivers() == ["", ""]
    override.write_text("\n")
    with backend.open_port(card, region):
        assert rack.drivers() == ["vfio-pci", "vfio-pci"]
    backend.give_back(card, region)
    assert rack.drivers() == ["", ""]
    assert override.read_text().strip() == "(null)"


def test_a_reset_that_times_out_when_a_slot_is_closed_is_noted(slots):
    backend, card = laid_out("1x1+ofs", slots)
    (region,) = card.regions
    port = backend.open_port(card, region)
    port.reset()
    port.program(IMAGE)
    port.afu_id()
    rack.knob(CARD, "port_deaf", 1)
    port.close()
    rack.knob(CARD, "port_deaf", 0)
    (fault,) = backend.health(card).failed.values()
    assert fault.kind is FaultKind.POISONED
    with backend.open_port(card, region) as again:
        again.reset()
        again.program(IMAGE)  # the driver says that all went well
        with pytest.raises(PortPoisonedError):
            again.afu_id()
    rack.take_driver_off(CARD)
    rack.plug(CARD)
    found = backend.scan_card(ID)
    assert isinstance(found, Card)
    assert not backend.health(found).failed


def test_a_card_whose_driver_comes_and_goes_is_never_taken_for_a_slot(slots):
    backend, card = laid_out("1x1", slots)
    name = os.path.basename(port_of(card.regions[0]).sysfs)
    driver = Path("/sys/bus/platform/drivers/dfl-port")
    over = threading.Event()

    def toggle() -> None:
        while not over.is_set():
            for file in ("unbind", "bind"):
                with suppress(OSError):
                    (driver / file).write_text(name)

    thread = threading.Thread(target=toggle)
    thread.start()
    seen = []
    try:
        end = time.monotonic() + 15
        while time.monotonic() < end:
            found = backend.scan_card(ID)
            if isinstance(found, CardProblem):
                seen.append(found.message)
            elif found is not None:
                seen.append(type(found.regions[0].handle).__name__)
    finally:
        over.set()
        thread.join()
    assert "PortDevice" in seen
    assert not [one for one in seen if "slot" in one.lower() or "behind" in one], set(seen)


def test_what_is_assumed_of_dma_and_registers_is_read_from_the_real_kernel(slots):
    backend, card = laid_out("1x2", slots)
    assumed = {one.says: one for one in backend.assumptions(card.id)}
    found = assumed["the kernel keeps root in containers from its registers"]
    # The fake card's file has the size of the BAR that its device had at first.
    assert found.verdict is AssumptionVerdict.UNKNOWN, found.seen
    assert "No such device or address" in found.seen
    shared = assumed["an IOMMU keeps its DMA from the host's memory, and from other devices"]
    assert shared.verdict is AssumptionVerdict.HOLDS, shared.seen
