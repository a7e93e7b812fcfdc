"""What is taken for granted about an Alveo card: each verdict, and what was seen for it."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from doubles.alveo import CARD, Rig
from doubles.xclbins import ALVEO

from fpga_plugin.hardware.model import Assumption, AssumptionVerdict

PF0, PF1 = "/sys/bus/pci/devices/0000:10:00.0", "/sys/bus/pci/devices/0000:10:00.1"
MASK = "config_mailbox_channel_disable"

KNOWN = "it is a card that is known"
MANAGEMENT = "PF0 has the driver xclmgmt, of XRT 2.15 or later"
USER = "PF1 has the driver xocl, of XRT 2.15 or later"
SHELL = "its shell shows the interface id that a fitting xclbin names"
READY = "it is ready"
NODE = "PF1 has one render node"
MAILBOX = "the mask of mailbox requests reaches PF1"
UNSIGNED = "it takes xclbins without a signature"
DMA = "an IOMMU keeps its DMA from the host's memory"

Change = Callable[[Rig], object]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def look(rig: Rig) -> dict[str, Assumption]:
    found = rig.backend.assumptions(CARD)
    assert not rig.kernel.written, "an attribute was written"
    assert not rig.kernel.requests, "a node was opened"
    return {one.says: one for one in found}


def fails(rig: Rig) -> list[str]:
    return [says for says, one in look(rig).items() if one.verdict is AssumptionVerdict.FAILS]


def answers(path: str, answer: str | OSError) -> Change:
    return lambda rig: rig.kernel.instead.update({path: answer})


def lacks(path: str) -> Change:
    return answers(path, FileNotFoundError(errno.ENOENT, "No such file or directory"))


def lists(path: str, *names: str) -> Change:
    return lambda rig: rig.kernel.listed.update({path: [*names]})


@pytest.mark.parametrize(
    ("says", "seen"),
    [
        (KNOWN, "AMD Alveo U55C; PF0: vendor says '0x10ee', device says '0x505c'"),
        (KNOWN, "serial number 'XFL1"),
        (MANAGEMENT, "driver: 'xclmgmt'; version says '2."),
        (USER, "driver: 'xocl'; version says '2."),
        (SHELL, f"it would be {ALVEO}; PF0: interface_uuids says"),
        (SHELL, "VBNV says 'xilinx_u55c_gen3x16_xdma_base_3'"),
        (READY, "PF0: ready says '1', recovery says '0'"),
        (NODE, "renderD128"),
        (MAILBOX, "PF0: '0x0', PF1's copy: '0x0'"),
        (UNSIGNED, "sec_level says '0'"),
        (DMA, "IOMMU: translate"),
    ],
)
def test_of_a_sound_card_all_that_can_be_read_holds_and_what_was_seen_is_told(
    rig: Rig, says: str, seen: str
):
    found = look(rig)[says]
    assert found.verdict is AssumptionVerdict.HOLDS
    assert seen in found.seen


def test_the_rest_is_on_trust(rig: Rig):
    unknown = {says for says, one in look(rig).items() if one.verdict is AssumptionVerdict.UNKNOWN}
    assert "a hot reset stops the accelerator and its DMA" in unknown
    assert "the blank image runs nothing" in unknown
    assert not fails(rig)


@pytest.mark.parametrize(
    ("change", "says", "seen"),
    [
        (answers(f"{PF0}/device", "0x9999"), KNOWN, "not in the list of cards"),
        (lambda rig: rig.board().unbind(user=False), MANAGEMENT, "driver: 'none'"),
        (lambda rig: rig.board().unbind(user=True), USER, "driver: 'none'"),
        (lacks(f"{PF0}/interface_uuids"), SHELL, "shows no interface id"),
        (answers(f"{PF0}/interface_uuids", "0" * 32), SHELL, "which is no interface id"),
        (lacks(f"{PF0}/ready"), READY, "PF0: ready is not there"),
        (answers(f"{PF0}/ready", "0"), READY, "PF0: ready says '0'"),
        (answers(f"{PF0}/recovery", "1"), READY, "recovery says '1'"),
        (answers(f"{PF0}/versal", "1"), READY, "versal says '1'"),
        (lists(f"{PF1}/drm", "card0"), NODE, "none"),
        (lists(f"{PF1}/drm", "renderD128", "renderD129"), NODE, "renderD128, renderD129"),
        (answers(f"{PF0}/{MASK}", "0x120"), MAILBOX, "PF0: '0x120', PF1's copy: '0x0'"),
        (answers(f"{PF1}/{MASK}", "0x120"), MAILBOX, "PF0: '0x0', PF1's copy: '0x120'"),
        (lacks(f"/{MASK}"), MAILBOX, "PF0: 'not there', PF1's copy: 'not there'"),
        (answers("/iommu_group/type", "identity"), DMA, "IOMMU: "),
    ],
)
def test_what_is_otherwise_fails_and_what_was_seen_is_told(
    rig: Rig, change: Change, says: str, seen: str
):
    change(rig)
    assert says in fails(rig)
    assert seen in look(rig)[says].seen


def test_the_older_cards_have_no_versal_attribute(rig: Rig):
    lacks(f"{PF0}/versal")(rig)
    assert not fails(rig)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (answers("/sec_level", "1"), "sec_level says '1'"),
        (lists(PF0, "rom.m.4096"), "icap shows no sec_level"),
    ],
)
def test_whether_an_xclbin_needs_a_signature_may_not_be_shown(rig: Rig, change: Change, seen: str):
    change(rig)
    assert look(rig)[UNSIGNED].verdict is AssumptionVerdict.UNKNOWN
    assert look(rig)[UNSIGNED].seen == seen


def test_of_several_icaps_one_that_asks_for_no_signature_is_enough(rig: Rig):
    rig.kernel.listed[PF0] = ["icap.m.1", "icap.m.2"]
    rig.kernel.instead |= {"icap.m.1/sec_level": "2", "icap.m.2/sec_level": "0"}
    found = look(rig)[UNSIGNED]
    assert found.verdict is AssumptionVerdict.HOLDS
    assert found.seen == "sec_level says '2'; sec_level says '0'"


def test_an_attribute_that_cannot_be_read_ends_its_part_alone(rig: Rig):
    answers(f"{PF0}/recovery", OSError(errno.EIO, "Input/output error", "recovery"))(rig)
    assert fails(rig) == ["sysfs can be read"]
    assert look(rig)["sysfs can be read"].seen == "Input/output error (recovery)"
    assert look(rig)[DMA].verdict is AssumptionVerdict.HOLDS
