"""What is taken for granted about a card is told from sysfs, and nothing is opened or written."""

import errno

import pytest
from doubles.dfl import ADDRESS, CARD, FakeKernel

from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.model import AssumptionVerdict
from fpga_plugin.ids import CardId

PARENT = "/sys/devices/pci0000:3a/0000:3b:00.0"
PORT = f"{PARENT}/fpga_region/region0/dfl-port.0"
FME = f"{PARENT}/fpga_region/region0/dfl-fme.0"
RESOURCE = f"/sys/bus/pci/devices/{ADDRESS}/resource0"


def look(kernel: FakeKernel):
    found = DflBackend(kernel).assumptions(CardId(CARD))
    resource = f"/sys/bus/pci/devices/{ADDRESS}/resource0"
    calls = [f"{call} {resource}" for call in ("open", "map", "unmap", "close")]
    assert {*kernel.log} <= {*calls}, "a node was opened"
    assert not kernel.opened
    assert not kernel.written, "an attribute was written"
    return {one.says: one for one in found}


def sound() -> FakeKernel:
    kernel = FakeKernel()
    kernel.add_card()
    kernel.files[f"{PARENT}/iommu_group/type"] = "DMA"
    kernel.links[f"{FME}/driver"] = "/sys/bus/platform/drivers/dfl-fme"
    kernel.files["/sys/bus/platform/drivers/dfl-fme/module"] = ""
    kernel.files[f"{PORT}/userclk_freqcntrcmd"] = ""
    kernel.files["/sys/bus/pci/drivers/vfio-pci/new_id"] = ""
    kernel.map_errors[RESOURCE] = errno.EINVAL
    return kernel


def fails(kernel: FakeKernel) -> list[str]:
    return [says for says, one in look(kernel).items() if one.verdict is AssumptionVerdict.FAILS]


def test_of_a_sound_card_everything_that_can_be_read_holds_and_the_rest_is_on_trust():
    assert fails(sound()) == []
    unknown = [
        one.says for one in look(sound()).values() if one.verdict is AssumptionVerdict.UNKNOWN
    ]
    assert "the port's AFU id follows the image" in unknown


def on_trust(kernel: FakeKernel) -> str:
    return "; ".join(
        one.says for one in look(kernel).values() if one.verdict is AssumptionVerdict.UNKNOWN
    )


def test_what_is_on_trust_is_of_this_cards_kind():
    ports = on_trust(sound())
    assert "blank image" in ports
    assert "one port leaves" not in ports, "it has one port alone"
    several = sound()
    several.files[f"{FME}/ports_num"] = "2"
    assert "one port leaves the others alone" in on_trust(several)

    slot = sound()
    slot.remove(f"{PORT}/afu_id")
    assert "none of them is a static one" in on_trust(slot)
    assert "interrupts" in on_trust(slot)
    assert "the port's AFU id follows" not in on_trust(slot)

    fixed = sound()
    fixed.files[f"{PARENT}/device"] = "0x0b30"
    assert "what its accelerator does" in on_trust(fixed)
    assert "image runs nothing" not in on_trust(fixed), "nothing is programmed there"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda kernel: None, "behind its ports, reconfigured one by one"),
        (lambda kernel: kernel.remove(f"{PORT}/afu_id"), "a slot that is reconfigured"),
        (lambda kernel: kernel.files.update({f"{PARENT}/device": "0x0b30"}), "as an N3000"),
        (
            lambda kernel: (kernel.remove(f"{PORT}/afu_id"), kernel.remove(f"{FME}/dfl-fme-mgr.0")),
            "`flat`",
        ),
        (lambda kernel: kernel.remove(FME), "not of a kind"),
        (lambda kernel: kernel.remove(PORT), "not of a kind"),
        (lambda kernel: kernel.remove(f"{FME}/dfl-fme-mgr.0"), "not of a kind"),
    ],
)
def test_the_kind_of_card_is_named(change, kind):
    kernel = sound()
    change(kernel)
    assert kind in look(kernel)["it is of a kind that is known"].seen


def test_a_slot_needs_the_driver_that_gives_its_functions_away():
    kernel = sound()
    kernel.remove(f"{PORT}/afu_id")
    says = "vfio-pci is there to have these functions"
    assert look(kernel)[says].verdict is AssumptionVerdict.HOLDS
    kernel.remove("/sys/bus/pci/drivers/vfio-pci")
    assert look(kernel)[says].verdict is AssumptionVerdict.FAILS


def _identity(kernel: FakeKernel) -> None:
    kernel.links[f"{PARENT}/driver"] = "/sys/bus/pci/drivers/vfio-pci"
    kernel.files["/sys/bus/pci/drivers/vfio-pci/module"] = ""


def _virtual(kernel: FakeKernel) -> None:
    virtual = kernel.add_function("0000:3b:00.1", driver="vfio-pci")
    kernel.links[f"{PARENT}/virtfn0"] = virtual
    kernel.files[f"{virtual}/iommu_group/type"] = "DMA"


@pytest.mark.parametrize(
    ("change", "assumption"),
    [
        (_identity, "dfl-pci has it"),
        (_virtual, "nobody but dfl-pci has its virtual functions"),
        (
            lambda kernel: kernel.files.update({f"{PARENT}/iommu_group/type": "identity"}),
            "an IOMMU keeps its DMA from the host's memory, and from other devices",
        ),
        (lambda kernel: kernel.remove(f"{FME}/driver"), "it has one FME, whose driver is dfl-fme"),
        (lambda kernel: kernel.remove(f"{FME}/dfl-fme-mgr.0"), "it can be reconfigured partially"),
        (
            lambda kernel: kernel.remove(f"{FME}/dfl-fme-region.7"),
            "it shows one interface id, and fits every bitstream that has it",
        ),
        (
            lambda kernel: kernel.remove(f"{FME}/dfl_dev.5/inf0_clear"),
            "all of its on-card memory can be cleared",
        ),
        (
            lambda kernel: kernel.remove(
                f"{PORT}/afu_id"
            ),  # an OFS card, of which nothing reports it
            "its AFU is in PCI functions that vfio-pci may have (an OFS slot)",
        ),
        (
            lambda kernel: kernel.files.update({f"{PORT}/afu_id": errno.EBUSY}),
            "dfl-port.0 has its driver and shows the AFU that is on it",
        ),
        (
            lambda kernel: kernel.remove(f"{PORT}/userclk_freqcntrcmd"),
            "the user clock of dfl-port.0 can be measured",
        ),
    ],
)
def test_what_does_not_hold_is_told(change, assumption):
    kernel = sound()
    change(kernel)
    assert fails(kernel) == [assumption]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dfl_dev.8/feature_id", "feature 0x14 has no driver"),
        ("dfl_dev.8/uio/uio4/maps/map0/size", "measured by uio4"),
        ("dfl_dev.9/userclk/frequency", "vendor's driver"),
    ],
)
def test_the_way_to_the_user_clock_is_named(name, says):
    kernel = sound()
    kernel.remove(f"{PORT}/userclk_freqcntrcmd")
    kernel.files[f"{PORT}/dfl_dev.8/feature_id"] = "0x14"
    kernel.files[f"{PORT}/{name}"] = "0x14"
    assert says in look(kernel)["the user clock of dfl-port.0 can be measured"].seen


REGISTERS = "the kernel keeps root in containers from its registers"


def _mappable(kernel: FakeKernel) -> None:
    del kernel.map_errors[RESOURCE]
    kernel.registers[RESOURCE] = {}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (_mappable, AssumptionVerdict.FAILS),
        (lambda kernel: None, AssumptionVerdict.HOLDS),
        (lambda kernel: kernel.map_errors.update({RESOURCE: errno.EPERM}), AssumptionVerdict.HOLDS),
        (
            lambda kernel: kernel.map_errors.update({RESOURCE: errno.ENODEV}),
            AssumptionVerdict.UNKNOWN,
        ),
        (
            lambda kernel: kernel.open_errors.update({RESOURCE: errno.EROFS}),
            AssumptionVerdict.UNKNOWN,
        ),
    ],
)
def test_whether_root_in_a_container_could_map_the_registers_is_tried(change, verdict):
    kernel = sound()
    change(kernel)
    found = look(kernel)[REGISTERS]
    assert found.verdict is verdict
    assert RESOURCE in found.seen
    if verdict is AssumptionVerdict.FAILS:
        assert "iomem=relaxed" in found.seen


def test_who_is_in_the_cards_group_is_named():
    kernel = sound()
    kernel.files[f"{PARENT}/iommu_group/devices/0000:3d:00.0/class"] = ""
    (failed,) = fails(kernel)
    assert "and from other devices" in failed
    assert "0000:3d:00.0" in look(kernel)[failed].seen


def test_what_passes_an_iommu_that_translates_is_on_trust_for_every_card_with_accelerators():
    slot, fixed = sound(), sound()
    slot.remove(f"{PORT}/afu_id")
    fixed.files[f"{PARENT}/device"] = "0x0b30"
    for kernel in (sound(), slot, fixed):
        assert "(ATS)" in on_trust(kernel)
        assert "remaps interrupts" in on_trust(kernel)


def test_what_a_slot_does_not_show_of_its_resets_is_on_trust():
    kernel = sound()
    kernel.remove(f"{PORT}/afu_id")
    assert "killed while it holds the slot" in on_trust(kernel)
    assert "a reset that timed out" in on_trust(kernel)


def test_a_card_that_is_not_there_is_told_and_raises_nothing():
    assert "it is a PCI function that the kernel knows" in fails(FakeKernel())


def test_foreign_text_is_quoted():
    kernel = sound()
    kernel.files[f"{PORT}/afu_id"] = "\x1b[2J" + "x" * 9000
    kernel.files[f"{PORT}/dfl_dev.8/feature_id"] = "\x1b[31m"
    seen = "".join(one.seen for one in look(kernel).values())
    assert "\x1b" not in seen
    assert len(seen) < 4000
    assert "sysfs makes sense" in fails(kernel)
