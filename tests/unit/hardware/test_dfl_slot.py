"""Slots of OFS cards: which functions they are, how they are held, and what is refused."""

import errno
import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fpga_plugin.errors import (
    CardGoneError,
    HardwareError,
    PortInUseError,
    PortPoisonedError,
    ProgrammingError,
    RefusedError,
    SlotUnusableError,
)
from fpga_plugin.hardware.dfl.slot_functions import SlotRule
from fpga_plugin.hardware.faults import FaultKind
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.hardware.model import Card, CardProblem
from fpga_plugin.hardware.simulated.driver import KernelOopsError
from fpga_plugin.hardware.simulated.factory import simulated_backend
from fpga_plugin.hardware.simulated.tree import Attribute, Fixed, Symlink
from fpga_plugin.ids import CardId, InterfaceId, PciAddress
from fpga_plugin.settings.settings import SimulatedGroup, SimulatedKind

INTERFACE = InterfaceId("ce48969398f05f33946d560708be108a")
AFU, AFU_2 = "00112233445566778899aabbccddeeff", "11112222333344445555666677778888"
PLACEHOLDER = "d15ab1ed000000000110000000000000"
CARD = CardId("0000-10-00.0")
PF, VF, VF_2 = (PciAddress(0, 0x10, 0, number) for number in range(3))
PCI = "/sys/bus/pci/devices"
GROUPS = ["/dev/vfio/256", "/dev/vfio/257"]


def image(afu: str) -> bytes:
    return bytes.fromhex(afu) + bytes(1000)


class Rig:
    """One simulated OFS card, and the plugin's code on it."""

    def __init__(self, path, rule=None):
        self.path = path
        self.rule = rule
        self.start()

    def start(self):
        group = SimulatedGroup(1, 1, INTERFACE, frozenset({SimulatedKind.OFS}))
        hardware = simulated_backend(
            str(self.path / "cards"),
            (group,),
            pr_seconds=0,
            owner=True,
            slots=str(self.path / "slots"),
            rule=self.rule,
        )
        self.kernel, self.backend = hardware.kernel, hardware.backend

    @property
    def card(self) -> Card:
        found = self.backend.scan_card(CARD)
        assert isinstance(found, Card), found
        return found

    @property
    def problem(self) -> CardProblem:
        found = self.backend.scan_card(CARD)
        assert isinstance(found, CardProblem), found
        return found

    def hold(self):
        card = self.card
        return self.backend.open_port(card, card.regions[0])

    def afu_id(self):
        return self.backend.afu_id(self.card.regions[0])

    def drivers(self):
        return self.state()["functions"]

    def state(self):
        text = (self.path / "cards/state.json").read_text()
        return json.loads(text)["regions"][f"{CARD}-p0"]

    def note(self):
        return json.loads((self.path / "slots" / f"{CARD}-p0").read_text())

    def arm(self, word):
        (self.path / "cards/faults" / f"{CARD}-p0").write_text(word)

    def tenant(self):
        """What a container does with what it was given: a group, a container, a function."""
        group = self.kernel.open(GROUPS[0], os.O_RDWR)
        container = self.kernel.open("/dev/vfio/vfio", os.O_RDWR)
        self.kernel.ioctl(group, 0x3B68, struct.pack("<i", container))
        self.kernel.ioctl(container, 0x3B66, 3)
        device = self.kernel.ioctl(group, 0x3B6A, f"{VF}\0".encode())
        return [device, group, container]


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def test_a_slot_is_found_with_all_of_its_functions(rig):
    (region,) = rig.card.regions
    assert rig.card.complete
    assert "OFS" in rig.card.description
    assert list(region.grant.nodes) == GROUPS
    assert region.grant.shared == ("/dev/vfio/vfio",)
    assert region.grant.env == {"FPGA_FUNCTIONS_0000_10_00_0_P0": "0000:10:00.1,0000:10:00.2"}
    assert str(region.grant) == ",".join(GROUPS)


def test_finding_a_slot_touches_nothing_and_knows_nothing_of_what_is_in_it(rig):
    before = rig.state()
    health = rig.backend.health(rig.card)
    with pytest.raises(HardwareError, match="not known"):
        rig.afu_id()
    assert not health.failed
    assert rig.state() == before
    assert not (rig.path / "slots").exists()


def test_a_slot_is_held_programmed_and_read_through_its_functions(rig):
    with rig.hold() as port:
        assert rig.drivers() == ["vfio-pci", "vfio-pci"]
        assert rig.state()["open"] == 1
        port.reset()
        assert not port.clear_errors()
        port.program(RawImage(image(AFU)))
        assert port.afu_id(AFU) == AFU
        assert port.afu_id() == AFU  # it may be read again
    assert rig.state()["open"] == 0
    assert rig.afu_id() == AFU
    for handle in rig.tenant():
        rig.kernel.close(handle)


def test_any_function_may_show_the_expected_afu_and_only_that_one_counts(rig):
    with rig.hold() as port:
        port.program(RawImage(image(AFU)))
        assert port.afu_id(PLACEHOLDER) == PLACEHOLDER
        assert port.afu_id(AFU_2) == AFU


def test_drivers_that_the_plugin_bound_are_given_back_and_others_are_not(rig):
    rig.kernel.write(f"{PCI}/{VF_2}/driver_override", "vfio-pci")
    rig.kernel.write("/sys/bus/pci/drivers/vfio-pci/bind", str(VF_2))
    card = rig.card
    assert not rig.backend.bound_by_plugin(card.regions[0])
    with rig.hold():
        pass
    assert rig.backend.bound_by_plugin(card.regions[0])
    rig.backend.give_back(card, card.regions[0])
    assert rig.drivers() == ["", "vfio-pci"]
    assert rig.kernel.read(f"{PCI}/{VF}/driver_override") == "(null)"
    assert not rig.backend.bound_by_plugin(card.regions[0])
    rig.backend.give_back(card, card.regions[0])
    assert rig.drivers() == ["", "vfio-pci"]


def test_that_a_function_was_bound_is_written_before_it_is_bound(rig, monkeypatch):
    card = rig.card
    write, seen = rig.kernel.write, []

    def die(path, text):
        seen.append(path)
        if path.endswith("/bind"):
            assert [address for address, _ in rig.note()["bound"]] == [str(VF), str(VF_2)]
            write(path, text)
            raise KeyboardInterrupt
        write(path, text)

    monkeypatch.setattr(rig.kernel, "write", die)
    with pytest.raises(KeyboardInterrupt):
        rig.hold()
    assert seen
    rig.start()  # the process died
    assert rig.drivers() == ["vfio-pci", ""]
    assert rig.backend.bound_by_plugin(rig.card.regions[0])
    rig.backend.give_back(card, rig.card.regions[0])
    assert rig.drivers() == ["", ""]


def test_nothing_is_bound_where_that_cannot_be_written_down(rig):
    (rig.path / "slots").write_text("in the way")
    for _ in range(2):  # kubelet asks again
        with pytest.raises(HardwareError, match="cannot be written"):
            rig.hold()
        assert rig.drivers() == ["", ""]
    (rig.path / "slots").unlink()
    with rig.hold():
        assert len(rig.note()["bound"]) == 2


def test_a_group_that_a_tenant_holds_past_its_allocation_is_in_use_and_its_driver_stays(rig):
    with rig.hold():
        pass
    card = rig.card
    handles = rig.tenant()
    with pytest.raises(PortInUseError, match=r"256 .* is in use"):
        rig.hold()
    with pytest.raises(PortInUseError, match="in use"):
        rig.backend.give_back(card, card.regions[0])
    assert rig.drivers() == ["vfio-pci", "vfio-pci"]
    assert rig.state()["open"] == 0  # nothing else stays held
    for handle in handles:
        rig.kernel.close(handle)
    with rig.hold():
        pass


def test_while_a_slot_is_held_nobody_else_opens_a_group_or_the_port(rig):
    with rig.hold():
        for node in (*GROUPS, "/dev/dfl-port.0"):
            with pytest.raises(OSError, match=f"Errno {errno.EBUSY}]"):
                rig.kernel.open(node, os.O_RDWR)


def test_the_simulated_kernel_does_not_survive_an_unbinding_under_a_tenant(rig):
    with rig.hold():
        pass
    rig.tenant()
    with pytest.raises(KernelOopsError):
        rig.kernel.write("/sys/bus/pci/drivers/vfio-pci/unbind", str(VF))


def test_what_was_read_outlives_the_process_and_not_the_card(rig):
    with rig.hold() as port:
        port.program(RawImage(image(AFU)))
        port.afu_id(AFU)
    rig.start()
    assert rig.afu_id() == AFU
    plug = rig.path / "cards/cards" / CARD
    plug.unlink()
    assert rig.backend.scan_card(CARD) is None
    plug.touch()
    with pytest.raises(HardwareError, match="not known"):
        rig.afu_id()
    rig.start()
    with pytest.raises(HardwareError, match="not known"):
        rig.afu_id()


def test_from_the_first_word_of_a_pr_until_it_is_read_nothing_is_known(rig):
    with rig.hold() as port:
        port.program(RawImage(image(AFU)))
        port.afu_id(AFU)
        port.program(RawImage(image(AFU_2)))
    with pytest.raises(HardwareError, match="not known"):
        rig.afu_id()
    rig.start()
    with pytest.raises(HardwareError, match="not known"):
        rig.afu_id()


@pytest.mark.parametrize("text", ["", "[]", '{"boot_id": 1}', "\0", '{"bound": 3}', "[" * 9999])
def test_a_note_that_makes_no_sense_says_nothing(rig, text):
    with rig.hold() as port:
        port.program(RawImage(image(AFU)))
        port.afu_id(AFU)
    (rig.path / "slots" / f"{CARD}-p0").write_text(text)
    rig.start()
    with pytest.raises(HardwareError, match="not known"):
        rig.afu_id()


@pytest.mark.parametrize("bound", [[["x", float("inf")]], [["x", "y"]], [["x"]], 3, {"x": 1}])
def test_a_note_whose_functions_make_no_sense_says_nothing(rig, bound):
    with rig.hold() as port:
        port.program(RawImage(image(AFU)))
        port.afu_id(AFU)
    (rig.path / "slots" / f"{CARD}-p0").write_text(json.dumps(rig.note() | {"bound": bound}))
    rig.start()
    assert not rig.backend.bound_by_plugin(rig.card.regions[0])
    with pytest.raises(HardwareError, match="not known"):
        rig.afu_id()


def test_what_was_bound_is_told_without_waiting_for_the_disk(rig):
    with rig.hold():
        pass
    rig.start()
    (region,) = rig.card.regions
    (rig.path / "slots" / f"{CARD}-p0").unlink()
    with ThreadPoolExecutor() as pool, rig.backend._notes._lock:  # as while another is written
        assert pool.submit(rig.backend.bound_by_plugin, region).result(timeout=30)


def test_a_note_of_another_boot_says_nothing(rig):
    with rig.hold() as port:
        port.program(RawImage(image(AFU)))
        port.afu_id(AFU)
    (rig.path / "cards/boot_id").write_text("another")
    rig.start()
    assert not rig.backend.bound_by_plugin(rig.card.regions[0])
    with pytest.raises(HardwareError, match="not known"):
        rig.afu_id()


@pytest.mark.parametrize("word", ["pr-error", "port-deaf"])
def test_after_a_failed_pr_the_slot_counts_as_poisoned_until_the_driver_is_rebound(rig, word):
    card = rig.card
    with rig.hold() as port:
        rig.arm(word)
        with pytest.raises(HardwareError) as caught:
            port.program(RawImage(image(AFU)))
    assert isinstance(caught.value, ProgrammingError)
    (rig.path / "cards/faults" / f"{CARD}-p0").unlink(missing_ok=True)
    rig.start()  # it outlives the process
    with pytest.raises(PortPoisonedError, match="held in reset"):
        rig.afu_id()
    (fault,) = rig.backend.health(rig.card).failed.values()
    assert fault.kind is FaultKind.POISONED
    with pytest.raises(RefusedError, match="virtual functions"):
        rig.backend.rebind(card)
    for text in ("unbind", "bind"):
        rig.kernel.write(f"/sys/bus/pci/drivers/dfl-pci/{text}", str(PF))
    assert not rig.backend.health(rig.card).failed
    with pytest.raises(HardwareError, match="not known"):
        rig.afu_id()


def test_a_reset_that_times_out_when_the_slot_is_closed_counts_as_poison(rig):
    port = rig.hold()
    port.program(RawImage(image(AFU)))
    assert port.afu_id(AFU) == AFU
    rig.arm("port-deaf")
    port.close()
    (rig.path / "cards/faults" / f"{CARD}-p0").unlink()
    assert rig.state()["open"] == 0
    (fault,) = rig.backend.health(rig.card).failed.values()
    assert fault.kind is FaultKind.POISONED
    with rig.hold() as again:
        again.reset()
        again.program(RawImage(image(AFU)))  # succeeds, with the accelerator in reset
        with pytest.raises(PortPoisonedError):
            again.afu_id(AFU)


def test_a_slot_that_does_not_answer_is_no_success(rig):
    with rig.hold() as port:
        rig.arm("fatal")
        with pytest.raises(HardwareError, match="all ones"):
            port.afu_id()


def test_other_virtual_functions_are_another_slot(rig):
    card = rig.card
    for make in (False, True):
        rig.backend.make_functions(CARD, make=make)
    for ask in (
        lambda: rig.backend.open_port(card, card.regions[0]),
        lambda: rig.backend.afu_id(card.regions[0]),
    ):
        with pytest.raises(CardGoneError, match=r"function 0000:10:00\.1 changed"):
            ask()
    assert rig.card.regions != card.regions
    assert rig.drivers() == ["", ""]


@pytest.mark.parametrize("function", [PF, VF, VF_2])
def test_errors_of_the_link_count_on_each_function_of_a_slot(rig, function):
    assert not rig.backend.health(rig.card).failed
    real = rig.kernel.realpath(f"{PCI}/{function}")
    for total, failed in ((2, False), (3, True), (3, True)):
        counted = {"aer_dev_fatal": f"DLP 1\nTOTAL_ERR_FATAL {total}"}
        for path in (f"{PCI}/{function}", real):
            edit(rig, path, counted)
        if not failed:
            rig.backend.accept_errors(CARD)
        assert bool(rig.backend.health(rig.card).failed) is failed
    rig.backend.accept_errors(CARD)
    assert not rig.backend.health(rig.card).failed


# What is refused, with the reason and what to do.


def edit(rig, path, change):
    """Put something else in the place of an entry of the simulated sysfs."""
    resolve = rig.kernel._resolve

    def resolved(wanted):
        for name, node in change.items():
            target = f"{path}/{name}"
            if wanted == target or wanted.startswith(f"{target}/"):
                if node is None:
                    raise FileNotFoundError(errno.ENOENT, "gone", wanted)
                if isinstance(node, Symlink):
                    return resolve(node.target + wanted.removeprefix(target))
                return wanted, node
        return resolve(wanted)

    rig.kernel._resolve = resolved


def test_without_virtual_functions_the_command_that_makes_them_is_told(rig):
    rig.kernel.write(f"{PCI}/{PF}/sriov_numvfs", "0")
    assert "has none now" in rig.problem.message
    _, _, commands = rig.problem.hint.partition("as root on the node: ")
    for command in commands.split("; "):
        text, _, path = command.removeprefix("echo ").partition(" > ")
        rig.kernel.write(path, text)
    with rig.hold():
        assert rig.drivers() == ["vfio-pci", "vfio-pci"]


def test_functions_that_dfl_pci_took_are_told_with_the_command(rig):
    """As the kernel does unless it is told not to: these were made by hand."""
    for number in ("0", "2"):
        rig.kernel.write(f"{PCI}/{PF}/sriov_numvfs", number)
    assert rig.drivers() == ["dfl-pci", "dfl-pci"]
    for function in (VF, VF_2):
        with pytest.raises(SlotUnusableError, match=f"{function} .* 'dfl-pci'") as caught:
            rig.hold()
        assert f"echo {function} > /sys/bus/pci/drivers/dfl-pci/unbind" in caught.value.hint
        assert "/sys" not in str(caught.value.for_tenant())
        rig.kernel.write("/sys/bus/pci/drivers/dfl-pci/unbind", str(function))
    with rig.hold():
        pass


def test_functions_that_are_made_have_no_driver_and_can_be_held(rig):
    rig.backend.make_functions(CARD, make=False)
    rig.backend.make_functions(CARD, make=True)
    assert rig.drivers() == ["", ""]
    with rig.hold():
        pass


@pytest.mark.parametrize("was", ["0", "1"])
@pytest.mark.parametrize("goes_well", [False, True])
def test_what_is_probed_is_the_operators_again_once_functions_were_made(rig, was, goes_well):
    switch = f"{PCI}/{PF}/sriov_drivers_autoprobe"
    rig.backend.make_functions(CARD, make=False)
    rig.kernel.write(switch, was)
    write = rig.kernel.write

    def refuse(path, text):
        if path.endswith("sriov_numvfs"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        write(path, text)

    if goes_well:
        rig.backend.make_functions(CARD, make=True)
    else:
        rig.kernel.write = refuse
        with pytest.raises(RefusedError):
            rig.backend.make_functions(CARD, make=True)
    assert rig.kernel.read(switch) == was


def test_the_functions_of_a_card_whose_ports_they_have_keep_their_driver(rig):
    """No slot: as Linux' own dfl-pci makes them, whose port was released before."""
    rig.backend.make_functions(CARD, make=False)
    lister = rig.kernel.listdir
    rig.kernel.listdir = lambda path: [n for n in lister(path) if not n.startswith("dfl-port")]
    rig.backend.make_functions(CARD, make=True)
    assert rig.drivers() == ["dfl-pci", "dfl-pci"]


def test_a_card_that_can_have_no_virtual_functions_is_told_so(rig):
    edit(rig, f"{PCI}/{PF}", {"sriov_totalvfs": "0"})
    with pytest.raises(RefusedError, match="can have no virtual functions"):
        rig.backend.make_functions(CARD, make=True)


def test_a_driver_that_makes_no_virtual_functions_is_told_with_the_reason(rig, monkeypatch):
    def refuse(path, text):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(rig.kernel, "write", refuse)
    with pytest.raises(RefusedError, match="cannot be made") as caught:
        rig.backend.make_functions(CARD, make=True)
    assert "vendor's driver" in caught.value.hint


def test_functions_that_somebody_has_open_are_not_removed_from_under_him(rig):
    with rig.hold():
        pass
    handles = rig.tenant()
    edit(rig, "/sys/kernel/iommu_groups/257", {"type": "identity"})
    assert rig.problem  # the card cannot be served, and nobody looks at its ports
    with pytest.raises(PortInUseError, match=f"256 .*{VF}.* is in use"):
        rig.backend.make_functions(CARD, make=False)
    assert rig.drivers() == ["vfio-pci", "vfio-pci"]
    for handle in handles:
        rig.kernel.close(handle)
    rig.backend.make_functions(CARD, make=False)
    assert rig.drivers() == []


def test_functions_with_somebody_elses_driver_are_not_removed(rig):
    edit(rig, "/sys/bus/pci/drivers", {"uio": Fixed({})})
    edit(rig, f"{PCI}/{VF_2}", {"driver": Symlink("/sys/bus/pci/drivers/uio")})
    with pytest.raises(RefusedError, match=f"{VF_2} has the driver 'uio'"):
        rig.backend.make_functions(CARD, make=False)
    assert rig.drivers() == ["", ""]


def test_functions_with_an_open_port_are_not_removed(rig):
    """As Linux' own dfl-pci has them: the port is a virtual function's."""
    port = Symlink(f"{PCI}/{PF}/fpga_region/region0/dfl-port.0")
    edit(
        rig,
        f"{PCI}/{VF}",
        {
            "fpga_region/region1/dfl-port.0": port,
            "fpga_region/region1": Fixed({"dfl-port.0": port}),
            "fpga_region": Fixed({"region1": Fixed({})}),
            "driver": Symlink("/sys/bus/pci/drivers/dfl-pci"),
        },
    )
    handle = rig.kernel.open("/dev/dfl-port.0", os.O_RDWR)
    with pytest.raises(PortInUseError, match=f"dfl-port.0 .*{VF}.* is in use"):
        rig.backend.make_functions(CARD, make=False)
    assert rig.drivers() == ["", ""]
    rig.kernel.close(handle)
    rig.backend.make_functions(CARD, make=False)
    assert rig.drivers() == []


def test_a_card_whose_port_was_released_for_its_functions_is_refused_with_the_reason(rig):
    lister = rig.kernel.listdir
    rig.kernel.listdir = lambda path: [n for n in lister(path) if not n.startswith("dfl-port")]
    assert "its port was released to make virtual functions" in rig.problem.message
    assert "linux-dfl-backport" in rig.problem.hint


def test_without_an_iommu_the_card_is_left_alone(rig):
    edit(rig, f"{PCI}/{VF_2}", {"iommu_group": None})
    assert f"{VF_2} of the slot is behind no IOMMU" in rig.problem.message
    assert "intel_iommu=on" in rig.problem.hint


@pytest.mark.parametrize("allowed", [False, True])
def test_a_group_that_vfio_made_up_is_no_iommu_and_no_name_allows_it(tmp_path, allowed):
    rig = Rig(tmp_path, SlotRule(identity=frozenset({CARD} if allowed else ())))
    edit(rig, "/sys/kernel/iommu_groups/257", {"name": "vfio-noiommu"})
    assert f"{VF_2} of the slot is behind no IOMMU" in rig.problem.message


@pytest.mark.parametrize("allowed", [False, True])
def test_an_iommu_that_does_not_translate_is_allowed_by_name_only(tmp_path, allowed):
    rig = Rig(tmp_path, SlotRule(identity=frozenset({CARD} if allowed else {"0000-11-00.0"})))
    edit(rig, "/sys/kernel/iommu_groups/257", {"type": "identity"})
    if allowed:
        assert rig.card
    else:
        assert f"does not translate for its function {VF_2}" in rig.problem.message
        assert "FPGA_PLUGIN_SLOT_IDENTITY" in rig.problem.hint


def test_a_group_with_a_stranger_is_not_given_away_and_a_bridge_is_none(rig):
    function = Symlink(f"{PCI}/{PF}")
    members = {"0000:10:00.2": function, "0000:00:01.0": function}
    edit(rig, "/sys/kernel/iommu_groups/257", {"devices": Fixed(members)})
    assert "shares IOMMU group 257 with 0000:00:01.0" in rig.problem.message
    edit(rig, f"{PCI}/0000:00:01.0", {"class": "0x060400"})
    assert rig.card


def test_a_function_with_another_driver_is_left_to_it(rig):
    card = rig.card
    edit(rig, f"{PCI}/{VF_2}", {"driver": Symlink("/sys/bus/pci/drivers/dfl-pci")})
    with pytest.raises(SlotUnusableError, match=f"{VF_2} of the slot has the driver 'dfl-pci'"):
        rig.backend.open_port(card, card.regions[0])
    assert rig.drivers() == ["", ""]


def test_a_function_that_is_reserved_for_another_driver_is_left_to_it(rig):
    override = f"{PCI}/{VF_2}/driver_override"
    rig.kernel.write(override, "pci-stub")
    with pytest.raises(SlotUnusableError, match=f"{VF_2} .* 'pci-stub'") as caught:
        rig.hold()
    assert rig.drivers() == ["", ""]
    assert rig.kernel.read(override) == "pci-stub"
    assert not rig.backend.bound_by_plugin(rig.card.regions[0])
    _, _, command = caught.value.hint.partition("as root on the node: echo > ")
    rig.kernel.write(command, "\n")
    with rig.hold():
        pass


def test_a_reservation_that_was_made_meanwhile_outlives_the_giving_back(rig):
    with rig.hold():
        pass
    rig.kernel.write(f"{PCI}/{VF_2}/driver_override", "pci-stub")
    rig.backend.give_back(rig.card, rig.card.regions[0])
    assert rig.drivers() == ["", ""]
    assert rig.kernel.read(f"{PCI}/{VF_2}/driver_override") == "pci-stub"
    assert rig.kernel.read(f"{PCI}/{VF}/driver_override") == "(null)"


def test_a_kernel_without_vfios_groups_is_named(rig):
    card = rig.card
    edit(rig, "/sys/class", {"vfio": None})
    for function in (VF, VF_2):
        edit(rig, f"{PCI}/{function}", {"vfio-dev": Fixed({})})
    opens = rig.kernel.open

    def no_group(node, flags):
        if node in GROUPS:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), node)
        return opens(node, flags)

    rig.kernel.open = no_group
    with pytest.raises(SlotUnusableError) as caught:
        rig.backend.open_port(card, card.regions[0])
    assert "CONFIG_VFIO_GROUP" in caught.value.hint


def test_without_vfio_pci_nothing_is_bound(rig):
    card = rig.card
    edit(rig, "/sys/bus/pci/drivers", {"vfio-pci": None})
    with pytest.raises(SlotUnusableError, match="the node has no vfio-pci") as caught:
        rig.backend.open_port(card, card.regions[0])
    assert "load the module" in caught.value.hint
    assert rig.drivers() == ["", ""]


def test_a_group_that_is_not_viable_names_the_member_with_a_driver(rig, monkeypatch):
    card = rig.card
    query = rig.kernel.query
    monkeypatch.setattr(
        rig.kernel,
        "query",
        lambda handle, request, argument: (
            struct.pack("<II", 8, 0) if request == 0x3B67 else query(handle, request, argument)
        ),
    )
    members = {"0000:10:00.1": "", "0000:10:00.0": ""}
    edit(rig, "/sys/kernel/iommu_groups/256", {"devices": Fixed(members)})
    with pytest.raises(SlotUnusableError, match=r"0000:10:00\.0: dfl-pci"):
        rig.backend.open_port(card, card.regions[0])


def test_a_node_that_remaps_no_interrupts_is_refused_before_anything_is_programmed(
    rig, monkeypatch
):
    ioctl = rig.kernel.ioctl

    def refuse(handle, request, argument):
        if request == 0x3B66:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return ioctl(handle, request, argument)

    monkeypatch.setattr(rig.kernel, "ioctl", refuse)
    with pytest.raises(SlotUnusableError) as caught:
        rig.hold()
    assert "does not remap interrupts" in caught.value.hint
    assert rig.state()["open"] == 0
    monkeypatch.undo()
    with rig.hold():
        pass


# The rule.


def also_there(rig, *names):
    """PCI functions beside the card's."""
    lister = rig.kernel.listdir
    rig.kernel.listdir = lambda path: [*lister(path), *(names if path == PCI else ())]


def test_a_static_function_is_never_taken_for_the_slots(rig):
    """PF0 could have virtual functions and has none: PF1 is another's, whatever it is."""
    rig.kernel.write(f"{PCI}/{PF}/sriov_numvfs", "0")
    lister = rig.kernel.listdir
    rig.kernel.listdir = lambda path: (
        [*lister(path), "0000:10:00.1"] if path == PCI else lister(path)
    )
    assert "has none now" in rig.problem.message


def second_function(rig, *others):
    """The card of a FIM of two physical functions: the first one has no virtual functions."""
    rig.kernel.write(f"{PCI}/{PF}/sriov_numvfs", "0")
    groups = "/sys/kernel/iommu_groups"
    group = {"9/type": "DMA-FQ", "9/name": None, "9/devices": Fixed({str(VF): ""})}
    edit(rig, groups, {**group, "9": Fixed({})})
    function = {
        f"{VF}/iommu_group": Symlink(f"{groups}/9"),
        f"{VF}/vendor": "0x8086",
        f"{VF}/physfn": None,
    }
    edit(rig, PCI, {**function, str(VF): Fixed({})})
    edit(rig, rig.kernel.realpath(f"{PCI}/{PF}"), {"sriov_totalvfs": None})
    also_there(rig, str(VF), *others)


def test_a_second_physical_function_may_be_static_and_is_taken_only_if_it_is_named(rig):
    second_function(rig)
    assert "does not say which PCI functions are behind its slot" in rig.problem.message
    assert f"FPGA_PLUGIN_SLOT_FUNCTIONS={PF}={VF} of a FIM of two" in rig.problem.hint
    assert rig.drivers() == []


def test_a_second_physical_function_that_is_named_is_the_slots(tmp_path):
    rig = Rig(tmp_path, SlotRule({CARD: (VF,)}))
    second_function(rig)
    (region,) = rig.card.regions
    assert region.grant.nodes == ("/dev/vfio/9",)
    assert region.grant.env == {"FPGA_FUNCTIONS_0000_10_00_0_P0": str(VF)}


def test_a_card_of_more_physical_functions_has_to_be_named(rig):
    second_function(rig, "0000:10:00.3")
    assert "does not say which PCI functions are behind its slot" in rig.problem.message
    assert "FPGA_PLUGIN_SLOT_FUNCTIONS=0000:10:00.0=" in rig.problem.hint


def test_only_functions_that_the_setting_names_are_bound_opened_and_given(tmp_path):
    rig = Rig(tmp_path, SlotRule({CARD: (VF,)}))
    (region,) = rig.card.regions
    assert region.grant.nodes == ("/dev/vfio/256",)
    with rig.hold() as port:
        port.program(RawImage(image(AFU)))
        assert port.afu_id(AFU) == AFU
        assert rig.drivers() == ["vfio-pci", ""]
    rig.backend.give_back(rig.card, region)
    assert rig.drivers() == ["", ""]


@pytest.mark.parametrize("address", ["0000:11:00.1", "0000:10:00.0"])
def test_a_slip_in_the_setting_gives_no_other_device_away(tmp_path, address):
    rig = Rig(tmp_path, SlotRule({CARD: (VF, PciAddress.parse(address))}))
    assert f"names {address} for card" in rig.problem.message


def test_a_named_function_that_is_not_there_is_told(tmp_path):
    rig = Rig(tmp_path, SlotRule({CARD: (VF, replace(VF, function=7))}))
    assert "0000:10:00.7 of the slot is not there" in rig.problem.message


def test_a_port_that_shows_an_afu_is_no_slot(rig):
    card = rig.card
    base = rig.kernel.realpath(f"{PCI}/{PF}/fpga_region/region0/dfl-port.0")
    edit(rig, base, {"afu_id": Attribute(lambda: AFU)})
    with pytest.raises(CardGoneError, match="its port changed"):
        rig.backend.open_port(card, card.regions[0])
