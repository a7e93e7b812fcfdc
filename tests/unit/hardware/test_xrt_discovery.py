"""Which Alveo cards there are, and why one of them is not served."""

import errno
import math
from pathlib import Path

import pytest
from doubles.alveo import CARD, CARD_2, Rig
from doubles.xclbins import ALVEO

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.image import Xclbin
from fpga_plugin.hardware.model import AssumptionVerdict, Iommu
from fpga_plugin.hardware.xrt import defs, discovery

PF0, PF1 = "/sys/bus/pci/devices/0000:10:00.0", "/sys/bus/pci/devices/0000:10:00.1"
ABSENT = FileNotFoundError(errno.ENOENT, "No such file or directory")
EIO = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_card_is_its_management_function_with_one_region(rig: Rig):
    assert rig.backend.card_ids() == (CARD, CARD_2)
    card = rig.card()
    assert (card.interface_id, card.ports, len(card.regions)) == (ALVEO, 1, 1)
    assert (card.family, card.model) == ("xrt", "AMD Alveo U55C")
    assert card.description == "AMD Alveo U55C (10ee:505c)"
    assert card.firmware == "xilinx_u55c_gen3x16_xdma_base_3"
    assert card.serial.startswith("XFL1")
    assert card.takes is Xclbin
    assert card.resets
    assert card.clears_memory
    assert card.iommu is Iommu.TRANSLATE
    assert card.pcie_root == "pci0000:10"
    (region,) = card.regions
    assert region.id == f"{CARD}-p0"
    assert region.grant.nodes == ("/dev/dri/renderD128",)
    assert region.numbers == {"/dev/dri/renderD128": "226:128"}
    assert region.grant.env == {"FPGA_FUNCTIONS_0000_10_00_0_P0": "0000:10:00.1"}


@pytest.mark.parametrize(
    ("device", "product", "memory"),
    [
        ("5000", "U200", 64),
        ("5004", "U250", 64),
        ("500c", "U280", 40),
        ("5020", "U50", 8),
        ("505c", "U55C", 16),
    ],
)
def test_each_product_is_known_and_how_much_memory_it_has(
    rig: Rig, device: str, product: str, memory: int
):
    rig.kernel.instead["0000:10:00.0/device"] = f"0x{device}"
    card = rig.card()
    assert (card.model, card.memory) == (f"AMD Alveo {product}", memory << 30)
    assert card.some_memory_stays, "unless a blank bitstream is known to reach it"


def test_of_a_card_whose_memory_is_not_known_no_blank_reaches_all(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(defs.ON_BOARD_MEMORY, "505c")
    assert rig.card().memory == math.inf


def test_the_management_node_is_guarded(rig: Rig):
    assert rig.card().guarded == {"237:0"}
    assert rig.card(CARD_2).guarded == {"237:0"}  # 0x1100 and 0x1000 have one minor in this play


def test_nothing_is_read_that_crashes_the_kernel(rig: Rig):
    rig.backend.scan()
    card = rig.card()
    rig.backend.health(card)
    rig.backend.readings(card)
    rig.backend.assumptions(CARD)
    rig.program()
    rig.backend.clear_memory(card)
    rig.backend.reset(card)
    paths = rig.kernel.read_paths
    assert not [path for path in paths if path.endswith("ulp_uuids")]
    assert len(paths) > 100


def test_what_is_read_of_the_user_function_is_read_by_name(rig: Rig):
    rig.backend.scan()
    rig.backend.health(rig.card())
    listed = {p for p in rig.kernel.read_paths if p.startswith(PF1) and p.count("/") < 7}
    attributes = {path.rpartition("/")[2] for path in listed}
    # Its own directory is listed for the names of subdevices; of these rom.u alone is read.
    assert attributes <= {
        *("vendor", "device", "subsystem_vendor", "subsystem_device", "shutdown", "drm", "ready"),
        *("dev_offline", "device_bad_state", "xclbinuuid", "config_mailbox_channel_disable"),
        "0000:10:00.1",
    }


@pytest.mark.parametrize(
    ("attribute", "answer", "why"),
    [
        (f"{PF0}/ready", "0", "not ready"),
        (f"{PF0}/recovery", "1", "golden image"),
        (f"{PF0}/versal", "1", "Versal"),
        (f"{PF0}/config_mailbox_channel_switch", "0x100", "config_mailbox_channel_switch is 0x100"),
        (f"{PF0}/config_xclbin_change", "1", "config_xclbin_change is 0x1"),
        (f"{PF0}/interface_uuids", "", "no interface id"),
        (f"{PF0}/interface_uuids", ABSENT, "shows no interface id"),
        (f"{PF0}/interface_uuids", "0" * 32, "which is no interface id"),
        (f"{PF0}/interface_uuids", "f" * 32, "which is no interface id"),
        (f"{PF0}/interface_uuids", "nonsense", "nonsense"),
        (f"{PF0}/ready", "nonsense", "nonsense"),
        (f"{PF0}/ready", OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (f"{PF1}/shutdown", "1", "is shut down"),
        ("/sys/module/xclmgmt/version", "2.14.354,cafe", "xclmgmt is of XRT 2.14.354"),
        ("/sys/module/xocl/version", "2.14.384", "xocl is of XRT 2.14.384"),
        ("/sys/module/xocl/version", "1.99.0", "xocl is of XRT 1.99.0"),
        ("/sys/module/xocl/version", "", "nothing tells the version of xocl"),
        ("/sys/module/xocl/version", ABSENT, "nothing tells the version of xocl"),
        ("renderD128/dev", "226;128", "no device number"),
        ("renderD128/dev", ABSENT, "no device number"),
    ],
)
def test_a_card_that_cannot_be_served_is_a_problem_with_its_reason(
    rig: Rig, attribute: str, answer: str | OSError, why: str
):
    rig.kernel.instead[attribute] = answer
    problem = rig.problem()
    assert why in problem.message
    assert problem.hint
    assert problem.passing  # no event tells when it has passed
    assert CARD_2 in rig.backend.scan().cards or attribute.startswith("/sys/module")


@pytest.mark.parametrize("version", ["2.15.225,cafe", "2.19.0", "3.0.1"])
def test_drivers_from_2_15_on_are_served(rig: Rig, version: str):
    rig.kernel.instead["/version"] = version
    rig.card()


@pytest.mark.parametrize(("user", "role"), [(False, "management"), (True, "user")])
def test_a_function_without_a_driver_is_a_problem_until_it_has_one(
    rig: Rig, *, user: bool, role: str
):
    rig.board().unbind(user=user)
    assert f"the {role} function" in rig.problem().message
    assert "load the module" in rig.problem().hint
    rig.board().bind(user=user)
    rig.card()


def test_another_driver_is_left_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    inner = rig.kernel.inner.realpath

    def realpath(path: str) -> str:
        return "/sys/bus/pci/drivers/vfio-pci" if path == f"{PF1}/driver" else inner(path)

    monkeypatch.setattr(rig.kernel.inner, "realpath", realpath)
    assert "has the driver 'vfio-pci'" in rig.problem().message


def test_of_a_shell_with_two_stages_the_drivers_own_choice_names_the_resources(rig: Rig):
    base, ours = "a" * 32, "b" * 32
    for lines in ([base, ours, base], [base, ours]):
        rig.kernel.instead[f"{PF0}/interface_uuids"] = "\n".join(lines)
        assert rig.card().interface_id == ours


def test_a_card_knows_what_amds_plugin_calls_it(rig: Rig):
    """Shell and time stamp, as that plugin reads them: of the user function."""
    assert rig.card().vendor_resource == "amd.com/xilinx_u55c_gen3x16_xdma_base_3-0"
    rig.kernel.instead["rom.u.4096/VBNV"] = "xilinx_u200_xdma_201830_2"
    rig.kernel.instead["rom.u.4096/timestamp"] = "1561656294"
    assert rig.card().vendor_resource == "amd.com/xilinx_u200_xdma_201830_2-1561656294"
    rig.kernel.instead["rom.u.4096/timestamp"] = "yesterday/"
    assert rig.card().vendor_resource == ""


def test_a_card_that_amds_plugin_could_not_name_has_no_name_of_its(rig: Rig):
    rig.kernel.instead["rom.u.4096/timestamp"] = ABSENT
    assert rig.card().vendor_resource == ""


@pytest.mark.parametrize("answer", [ABSENT, "", "two words", "-", "x" * 64, "ü"])
def test_a_name_that_is_none_is_left_out(rig: Rig, answer: str | OSError):
    rig.kernel.instead |= {f"{name}": answer for name in ("rom.m.4096/VBNV", "/serial_num")}
    card = rig.card()
    assert (card.firmware, card.serial) == ("", "")


def test_a_card_without_a_user_function_says_so(rig: Rig):
    rig.kernel.gone.add(PF1)
    assert "has no user function 0000:10:00.1" in rig.problem().message


@pytest.mark.parametrize(
    ("names", "told"), [(["card0"], "no"), ([], "no"), (["renderD128", "renderD129"], "2")]
)
def test_a_user_function_has_one_render_node(rig: Rig, names: list[str], told: str):
    rig.kernel.listed[f"{PF1}/drm"] = names
    problem = rig.problem()
    assert f"user function of card 0000:10:00.0 has {told} render nodes" in problem.message


@pytest.mark.parametrize("number", [ABSENT, "237;0", "", "237:0:0"])
def test_a_management_node_without_a_number_cannot_be_guarded(rig: Rig, number: str | OSError):
    rig.kernel.instead[f"{PF0}/xrt_mgmt/xclmgmt4096/dev"] = number
    assert rig.card().guarded == frozenset()


@pytest.mark.parametrize(
    ("answers", "there"),
    [
        ({}, True),
        ({f"{PF0}/vendor": "0x8086"}, False),
        ({f"{PF0}/device": "0x9999"}, True),
        ({f"{PF0}/vendor": "0x8086", f"{PF0}/device": "0x9999"}, False),
        ({f"{PF0}/vendor": EIO}, False),
        ({f"{PF0}/vendor": ABSENT}, False),
    ],
)
def test_a_card_is_amds_and_has_the_driver_or_is_known(
    rig: Rig, answers: dict[str, str | OSError], *, there: bool
):
    rig.kernel.instead |= answers
    assert (CARD in rig.backend.card_ids()) is there
    assert (rig.backend.scan_card(CARD) is not None) is there


@pytest.mark.parametrize(("device", "there"), [("0x505c", True), ("0x9999", False)])
def test_without_its_driver_a_card_is_told_by_its_device_id(rig: Rig, device: str, *, there: bool):
    rig.kernel.instead[f"{PF0}/device"] = device
    rig.board().unbind(user=False)
    assert (CARD in rig.backend.card_ids()) is there


def test_the_user_function_is_no_card(rig: Rig):
    """Though a product's number and the vendor's are what it has, and any driver."""
    rig.kernel.instead[f"{PF1}/device"] = "0x505c"
    assert rig.backend.card_ids() == (CARD, CARD_2)
    assert rig.backend.scan_card("0000-10-00.1") is None


def test_a_machine_without_pci_has_no_cards_and_one_that_cannot_be_listed_is_an_error(rig: Rig):
    rig.kernel.fails["listdir", "/pci/devices"] = ABSENT
    assert rig.backend.card_ids() == ()
    rig.kernel.fails["listdir", "/pci/devices"] = EIO
    with pytest.raises(HardwareError, match=r"cannot be listed \(Input/output error\)"):
        rig.backend.card_ids()


def test_a_life_of_the_user_functions_driver_is_another_region(rig: Rig):
    before = rig.region()
    rig.board().unbind(user=True)
    rig.board().bind(user=True)
    assert rig.region().handle != before.handle


def test_what_a_qdma_shell_has_beside_the_render_node_is_granted(rig: Rig):
    from fpga_plugin.hardware.xrt.discovery import qdma_nodes

    class Listing:
        def listdir(self, path: str) -> list[str]:
            return {
                PF1: ["drm", "dma.qdma.u.4096", "icap.u.4097"],
                f"{PF1}/dma.qdma.u.4096/xrt_user": ["xfpga!dma.qdma.u4097.0"],
            }[path]

    assert qdma_nodes(Listing(), PF1) == ("/dev/xfpga/dma.qdma.u4097.0",)


def test_the_grant_has_them(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(discovery, "qdma_nodes", lambda kernel, user: (f"/dev/{user[-12:]}",))
    assert rig.region().grant.shared == ("/dev/0000:10:00.1",)


def test_assumptions_say_what_holds_and_what_is_on_trust(rig: Rig):
    found = {one.says: one for one in rig.backend.assumptions(CARD)}
    assert found["it is ready"].verdict is AssumptionVerdict.HOLDS
    assert found["it is a card that is known"].verdict is AssumptionVerdict.HOLDS
    assert found["it takes xclbins without a signature"].verdict is AssumptionVerdict.HOLDS
    trust = [one for one in found.values() if one.verdict is AssumptionVerdict.UNKNOWN]
    assert any("untested on hardware" in one.says for one in trust)
    rig.kernel.instead[f"{PF0}/recovery"] = "1"
    rig.kernel.instead[f"{PF0}/config_mailbox_channel_disable"] = "0x100"
    found = {one.says: one for one in rig.backend.assumptions(CARD)}
    assert found["it is ready"].verdict is AssumptionVerdict.FAILS
    assert found["the mask of mailbox requests reaches PF1"].verdict is AssumptionVerdict.FAILS
    rig.kernel.instead["/device"] = "0x9999"
    rig.kernel.instead["/sec_level"] = "1"
    found = {one.says: one for one in rig.backend.assumptions(CARD)}
    assert found["it is a card that is known"].verdict is AssumptionVerdict.FAILS
    assert found["it takes xclbins without a signature"].verdict is AssumptionVerdict.UNKNOWN
    rig.board().unbind(user=True)
    assert rig.backend.assumptions(CARD)
