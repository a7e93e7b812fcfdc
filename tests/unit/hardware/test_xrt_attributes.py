"""What an Alveo card's attributes say, where one of them is absent or has several lines."""

import errno
from pathlib import Path

import pytest
from doubles.alveo import CARD, Rig
from doubles.xclbins import VADD

from fpga_plugin.hardware.xrt import attributes
from fpga_plugin.ids import RegionId

PF0, PF1 = "/sys/bus/pci/devices/0000:10:00.0", "/sys/bus/pci/devices/0000:10:00.1"
ABSENT = FileNotFoundError(errno.ENOENT, "No such file or directory")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.mark.parametrize(
    ("levels", "highest"),
    [({}, 0), ({1: "0", 2: "0"}, 0), ({1: "3", 2: "0"}, 3), ({1: ABSENT, 2: "2"}, 2)],
)
def test_the_highest_level_of_the_firewalls_counts(
    rig: Rig, levels: dict[int, str | OSError], highest: int
):
    rig.kernel.listed[PF0] = [f"firewall.m.{each}" for each in levels]
    rig.kernel.instead |= {f"firewall.m.{each}/level": text for each, text in levels.items()}
    assert attributes.firewall(rig.kernel, PF0) == highest


@pytest.mark.parametrize(
    ("answer", "offline"), [("0", False), ("1", True), ("-19", True), (ABSENT, True)]
)
def test_a_function_is_offline_unless_its_driver_says_that_it_is_not(
    rig: Rig, answer: str | OSError, *, offline: bool
):
    rig.kernel.instead[f"{PF0}/dev_offline"] = answer
    assert attributes.is_offline(rig.kernel, PF0) is offline


def test_blank_lines_around_a_uuid_say_nothing(rig: Rig):
    rig.kernel.instead[f"{PF1}/xclbinuuid"] = f"\n{VADD}\n\n"
    assert attributes.loaded(rig.kernel, PF1, RegionId(f"{CARD}-p0")) == VADD
