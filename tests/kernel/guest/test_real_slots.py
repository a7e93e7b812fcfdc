"""Slots of OFS cards on the real drivers: dfl-pci, dfl-afu, vfio-pci, and an IOMMU."""

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import rack
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    CARD,
    CARDS,
    HEALTHY,
    P0,
    REGIONS,
    UNHEALTHY,
    Node,
    eventually,
    request,
)

from fpga_plugin.errors import (
    CardGoneError,
    HardwareError,
    PortInUseError,
    PortPoisonedError,
    ProgrammingError,
    SlotUnusableError,
)
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.dfl.slot import OfsSlot
from fpga_plugin.hardware.dfl.slot_functions import SlotRule
from fpga_plugin.hardware.faults import FaultKind
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.hardware.linux import LinuxKernel
from fpga_plugin.hardware.model import Card, CardProblem
from fpga_plugin.ids import CardId

pytestmark = pytest.mark.skipif(not rack.DEBUGFS.exists(), reason="the guest's: make test-kernel")

IMAGE_AFU = "00112233445566778899aabbccddeeff"
IMAGE = bytes.fromhex(IMAGE_AFU) + bytes(1000)
PLACEHOLDER = "d15ab1ed000000000110000000000000"


class Rig:
    """An OFS card, and the plugin's code on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def start(self, rule: SlotRule | None = None) -> None:
        kernel = LinuxKernel("/sys", "/dev")
        self.backend = DflBackend(kernel, rule=rule, slots=str(self.folder / "slots"))

    @property
    def card(self) -> Card:
        found = self.backend.scan_card(CardId(CARD))
        assert isinstance(found, Card), found
        return found

    def hold(self) -> OfsSlot:
        card = self.card
        held = self.backend.open_port(card, card.regions[0])
        assert isinstance(held, OfsSlot)
        return held

    def problem(self) -> CardProblem:
        found = self.backend.scan_card(CardId(CARD))
        assert isinstance(found, CardProblem), found
        return found


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rack.lay_out("1x1+ofs")
    yield Rig(tmp_path)
    rack.free_functions()
    for card in rack.cards():
        rack.take_driver_off(card)


class Tenant:
    """What a container does with what it was given, as OPAE does it."""

    def __init__(self, function: str) -> None:
        self.group = os.open(rack.group(function), os.O_RDWR)
        self.container = os.open("/dev/vfio/vfio", os.O_RDWR)
        fcntl.ioctl(self.group, 0x3B68, struct.pack("<i", self.container))
        fcntl.ioctl(self.container, 0x3B66, 3)
        self.device = fcntl.ioctl(self.group, 0x3B6A, bytearray(f"{function}\0".encode()), True)

    def close(self) -> None:
        for descriptor in (self.device, self.group, self.container):
            os.close(descriptor)


def test_the_port_of_an_ofs_card_has_no_afu_id_and_its_slot_is_found(rig: Rig):
    (port,) = (rack.PCI / rack.address(CARD) / "fpga_region").glob("region*/dfl-port.*")
    assert not (port / "afu_id").exists()
    assert (port / "errors/errors").exists()
    (region,) = rig.card.regions
    assert list(region.grant.nodes) == [rack.group(function) for function in rack.FUNCTIONS]
    assert region.grant.env == {"FPGA_FUNCTIONS_0000_10_00_0_P0": ",".join(rack.FUNCTIONS)}
    assert not rig.backend.health(rig.card).failed
    assert rack.drivers() == ["", ""]


def test_a_slot_is_programmed_and_read_through_vfio_while_nobody_else_can_open_it(rig: Rig):
    with rig.hold() as port:
        assert rack.drivers() == ["vfio-pci", "vfio-pci"]
        port.reset()
        assert not port.clear_errors()
        port.program(RawImage(IMAGE))
        assert port.afu_id(IMAGE_AFU) == IMAGE_AFU
        assert port.afu_id(PLACEHOLDER) == PLACEHOLDER
        assert port.afu_id() == IMAGE_AFU
        for path in (rack.node(P0), *map(rack.group, rack.FUNCTIONS)):
            with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
                os.open(path, os.O_RDWR)
    card = rig.card
    assert rig.backend.afu_id(card.regions[0]) == IMAGE_AFU
    for function in rack.FUNCTIONS:
        Tenant(function).close()
    rig.backend.give_back(card, card.regions[0])
    assert rack.drivers() == ["", ""]
    assert rig.card == card  # binding and unbinding its functions makes no other card of it


def test_iommu_groups_change_their_device_numbers_between_two_bindings(rig: Rig):
    """A living container's number may be another group's then: the plugin compares both."""
    card = rig.card
    (region,) = card.regions
    assert not region.numbers
    with rig.hold():
        before = rig.backend.numbers(region)
        for node, number in before.items():
            made = os.stat(node).st_rdev
            assert number == f"{os.major(made)}:{os.minor(made)}"
    rig.backend.give_back(card, region)
    assert not rig.backend.numbers(region)
    for function in reversed(rack.FUNCTIONS):  # somebody else, in another order
        (rack.PCI / function / "driver_override").write_text("vfio-pci")
        (rack.VFIO / "bind").write_text(function)
    after = rig.backend.numbers(region)
    assert before.keys() == after.keys() == set(region.grant.nodes)
    assert sorted(before.values()) == sorted(after.values())
    assert before != after


def test_a_group_that_a_tenant_keeps_open_is_in_use_and_stays_bound(rig: Rig):
    with rig.hold():
        pass
    card = rig.card
    tenant = Tenant(rack.FUNCTIONS[1])
    with pytest.raises(PortInUseError, match="in use"):
        rig.hold()
    with pytest.raises(PortInUseError, match="in use"):
        rig.backend.give_back(card, card.regions[0])
    assert rack.drivers() == ["vfio-pci", "vfio-pci"]
    tenant.close()
    with rig.hold():
        pass


def test_after_a_failed_pr_the_slot_is_poisoned_until_the_cards_driver_is_rebound(rig: Rig):
    with rig.hold() as port:
        rack.knob(CARD, "pr_err", 1)
        with pytest.raises(ProgrammingError):
            port.program(RawImage(IMAGE))
        port.program(RawImage(IMAGE))  # the kernel says that it succeeded
    with pytest.raises(PortPoisonedError):
        rig.backend.afu_id(rig.card.regions[0])
    (fault,) = rig.backend.health(rig.card).failed.values()
    assert fault.kind is FaultKind.POISONED
    rack.take_driver_off(CARD)
    rack.plug(CARD)
    assert not rig.backend.health(rig.card).failed
    with rig.hold() as port:
        port.program(RawImage(IMAGE))
        assert port.afu_id() == IMAGE_AFU


def test_what_was_read_outlives_the_process_and_not_the_drivers(rig: Rig):
    with rig.hold() as port:
        port.program(RawImage(IMAGE))
        port.afu_id()
    rig.start()
    assert rig.backend.afu_id(rig.card.regions[0]) == IMAGE_AFU
    before = rig.card.regions[0]
    rack.take_driver_off(CARD)
    rack.plug(CARD)
    with pytest.raises(CardGoneError):
        rig.backend.afu_id(before)
    with pytest.raises(HardwareError, match="not known"):
        rig.backend.afu_id(rig.card.regions[0])


def test_a_function_with_another_driver_is_left_to_it(rig: Rig):
    card = rig.card
    function = rack.FUNCTIONS[1]
    (rack.PCI / function / "driver_override").write_text("pci-stub")
    stub = rack.PCI.parent / "drivers/pci-stub"
    (stub / "bind").write_text(function)
    try:
        with pytest.raises(SlotUnusableError, match=f"{function} .* has the driver 'pci-stub'"):
            rig.hold()
        assert rack.drivers() == ["", "pci-stub"]
        assert rig.card == card
    finally:
        (stub / "unbind").write_text(function)
        (rack.PCI / function / "driver_override").write_text("\n")
    with rig.hold():
        pass


def test_dfl_pci_takes_no_function_that_begins_with_an_afu_and_the_slot_is_served(rig: Rig):
    """Linux' own driver; the vendor's takes such functions, and has to be unbound first."""
    function = rack.FUNCTIONS[0]
    (rack.PCI / function / "driver_override").write_text("dfl-pci")
    try:
        with contextlib.suppress(OSError):  # ENODEV
            (rack.PCI.parent / "drivers/dfl-pci/bind").write_text(function)
        assert rack.drivers() == ["", ""]
    finally:
        (rack.PCI / function / "driver_override").write_text("\n")
    with rig.hold() as port:
        port.program(RawImage(IMAGE))
        assert port.afu_id(IMAGE_AFU) == IMAGE_AFU


def test_an_identity_domain_is_refused_unless_the_card_is_named(rig: Rig):
    number = (rack.PCI / rack.FUNCTIONS[0] / "iommu_group").resolve()
    before = (number / "type").read_text()
    (number / "type").write_text("identity")
    try:
        problem = rig.problem()
        assert f"does not translate for its function {rack.FUNCTIONS[0]}" in problem.message
        rig.start(SlotRule(identity=frozenset({CardId(CARD)})))
        with rig.hold() as port:
            port.program(RawImage(IMAGE))
            assert port.afu_id() == IMAGE_AFU  # VFIO has a domain of its own
        rig.backend.give_back(rig.card, rig.card.regions[0])
    finally:
        rack.free_functions()
        (number / "type").write_text(before)
    assert rig.card


# The daemon.


def test_a_slots_allocation_on_the_real_drivers():
    with Node("1x1+ofs").up() as node:
        kubelet = node.kubelet
        assert kubelet.listed(REGIONS) == {P0: HEALTHY}
        assert node.afu(P0) == BLANK
        answer = kubelet.allocate(P0)
        groups = [rack.group(function) for function in rack.FUNCTIONS]
        assert [d.host_path for d in answer.devices] == ["/dev/vfio/vfio", *groups]
        kubelet.prestart(P0, env=request())
        assert node.afu(P0) == AFU
        tenant = Tenant(rack.FUNCTIONS[0])
        tenant.close()
        kubelet.prestart(P0, env=request(AFU_2))
        assert node.afu(P0) == AFU_2
        kubelet.deallocate(P0)
        kubelet.until(CARDS, {CARD: HEALTHY})
        assert node.afu(P0) == BLANK
        eventually(lambda: rack.drivers() == ["", ""], "drivers given back")
        assert node.plugin.stop() == 0


def test_a_tenant_that_keeps_a_group_open_past_its_allocation_keeps_the_slot_out_of_service():
    with Node("1x1+ofs").up() as node:
        kubelet = node.kubelet
        kubelet.allocate(P0)
        kubelet.prestart(P0, env=request())
        tenant = Tenant(rack.FUNCTIONS[0])
        kubelet.deallocate(P0)
        kubelet.until(REGIONS, {P0: UNHEALTHY})
        assert "is in use" in node.plugin.until_logged("scrub waits", region=P0)["reason"]
        assert node.afu(P0) == AFU
        tenant.close()
        kubelet.until(REGIONS, {P0: HEALTHY})
        assert node.afu(P0) == BLANK


def in_a_pr(node: Node) -> None:
    node.kubelet.allocate(P0)
    call = node.kubelet.begin_prestart(P0, env=request())
    eventually(lambda: rack.openers("/dev/dfl-fme.0"), "a PR")
    call.cancel()


def started(node: Node) -> None:
    node.kubelet.allocate(P0)
    node.kubelet.prestart(P0, env=request())


def in_the_scrub(node: Node) -> None:
    started(node)
    node.kubelet.deallocate(P0)
    eventually(lambda: rack.openers("/dev/dfl-fme.0"), "a PR")


@pytest.mark.parametrize("reach", [in_a_pr, started, in_the_scrub], ids=lambda f: f.__name__)
def test_killed_at_each_step_the_slot_goes_to_its_owner_or_is_clean(reach):
    with Node("1x1+ofs", simulated_pr_seconds="0.3").up() as node:
        reach(node)
        node.plugin.kill()
        node.restarted()
        kubelet = node.kubelet
        if reach is not in_the_scrub:
            assert kubelet.listed(REGIONS) == {P0: HEALTHY}  # its owner keeps it
            kubelet.prestart(P0, env=request(AFU_2))
            assert node.afu(P0) == AFU_2
            kubelet.deallocate(P0)
        kubelet.until(CARDS, {CARD: HEALTHY})
        assert node.afu(P0) == BLANK
        eventually(lambda: rack.drivers() == ["", ""], "drivers given back")
