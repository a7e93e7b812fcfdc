"""How an image comes onto an Alveo card, and that nobody else's does."""

import errno
import struct
from pathlib import Path

import pytest
from doubles.alveo import BANK, CARD, KERNEL, OTHER, Rig, image
from doubles.xclbins import VADD

from fpga_plugin.errors import (
    CardGoneError,
    HardwareError,
    PortInUseError,
    ProgrammingError,
    RefusedError,
)
from fpga_plugin.hardware.backend import DriverSettings
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.hardware.xrt import defs
from fpga_plugin.hardware.xrt.memory import SAMPLE, SAMPLES, _sampled

READ_AXLF = 0xC0286454
MASK, WHILE_LOADING = "0x643a0", "0x4220"


EIO = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig.with_a_clock(tmp_path, monkeypatch)


def test_the_mask_lets_through_loads_alone_and_only_while_the_plugin_loads(rig: Rig):
    masks: list[int] = []
    rig.kernel.before = lambda what: masks.append(rig.board().copy) if "0x" in what[:2] else None
    rig.program()
    assert rig.kernel.written == [
        ("config_mailbox_channel_disable", WHILE_LOADING),
        ("config_mailbox_channel_disable", MASK),
    ]
    assert masks == [0x4220]  # PF1 had heard of it
    assert rig.board().copy == 0x643A0
    with rig.backend.open_port(rig.card(), rig.region()) as port:
        assert port.afu_id() == VADD


def test_every_load_is_forced(rig: Rig):
    rig.program()
    rig.board().put(afu_id=OTHER)  # as PF0 does, behind PF1's back
    rig.program()
    assert rig.board().state.afu_id == VADD


def test_the_driver_is_told_of_kernels_as_the_library_does(rig: Rig):
    rig.program()
    ((request, argument),) = rig.kernel.requests
    assert request == READ_AXLF
    assert len(argument) == 40
    _, size, _, slot_size, bits, flags = struct.unpack("<Qi4xQIII4x", argument)
    assert (slot_size, bits, flags) == (4096, 0b100101, 1)
    assert size == 76 + 76 * len(KERNEL.arguments)


def test_kernels_are_laid_out_as_the_driver_reads_them():
    from fpga_plugin.hardware.xrt.load import _kernel

    packed = _kernel(KERNEL)
    name, registers, arguments, features = struct.unpack_from("<64sIii", packed)
    assert (name.rstrip(b"\0"), registers, arguments, features) == (b"vadd", 0x1000, 1, 1)
    name, offset, size, direction = struct.unpack_from("<64sIII", packed, 76)
    assert (name.rstrip(b"\0"), offset, size, direction) == (b"in", 0x10, 8, 1)


def test_another_familys_image_and_another_shells_are_refused_before_anything_is_touched(rig: Rig):
    with rig.backend.open_port(rig.card(), rig.region()) as port:
        with pytest.raises(RefusedError):
            port.program(RawImage(b"logic"))
        from dataclasses import replace

        with pytest.raises(RefusedError, match="does not fit"):
            port.program(replace(image(), interface_id="c" * 32))
    assert rig.kernel.written == []


@pytest.mark.parametrize("word", ["pr-error", "pr-stuck"])
def test_a_load_that_fails_leaves_the_card_masked_and_says_so(rig: Rig, word: str):
    rig.arm(word)
    with pytest.raises(ProgrammingError, match="ETIMEDOUT"):
        rig.program()
    assert rig.kernel.written[-1] == ("config_mailbox_channel_disable", MASK)
    assert rig.backend.afu_id(rig.region()) == defs.NO_IMAGE
    rig.program()


def test_a_context_makes_it_in_use_and_names_who_has_it(rig: Rig):
    rig.arm("port-open")
    with pytest.raises(PortInUseError, match="4711"):
        rig.program()
    assert rig.board().state.mask == defs.MASK


def test_a_late_refresh_costs_one_more_load(rig: Rig):
    rig.arm("late-refresh")
    rig.program()
    loads = [request for request, _ in rig.kernel.requests if request == READ_AXLF]
    assert len(loads) == 2
    assert rig.backend.afu_id(rig.region()) == VADD


def refreshes(rig: Rig, monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
    """So many of the next loads are emptied from the record, after the first read of it."""
    monkeypatch.setattr("fpga_plugin.hardware.simulated.alveo.board.REFRESH_SECONDS", 0.4)
    left = [times]

    def arm(what: str) -> None:
        if what == hex(READ_AXLF) and left[0]:
            left[0] -= 1
            rig.arm("late-refresh")

    rig.kernel.before = arm


def test_a_refresh_after_the_first_read_is_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    refreshes(rig, monkeypatch, times=1)
    rig.program()
    assert len(rig.kernel.requests) == 2
    rig.clock.sleep(5)
    assert rig.backend.afu_id(rig.region()) == VADD


def test_a_record_that_is_emptied_again_and_again_is_a_failure(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    refreshes(rig, monkeypatch, times=9)
    with pytest.raises(ProgrammingError, match=f"shows nothing where {VADD} was loaded"):
        rig.program()
    assert len(rig.kernel.requests) == 2
    assert rig.board().state.mask == defs.MASK


def test_a_tenants_load_is_seen_though_a_refresh_would_take_it_from_the_record(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fpga_plugin.hardware.simulated.alveo.board.REFRESH_SECONDS", 0.4)

    def intrude(what: str) -> None:
        if what.endswith(f"disable={MASK}"):
            rig.arm("late-refresh")
            rig.board().loads(OTHER, flat=False)

    rig.kernel.before = intrude
    with pytest.raises(ProgrammingError, match=OTHER):
        rig.program()
    assert len(rig.kernel.requests) == 1


def test_a_tenant_that_loads_between_our_load_and_the_mask_is_seen(rig: Rig):
    """Whoever has the node may do that; the record that decides is read under the mask."""

    def intrude(what: str) -> None:
        if what.endswith(f"disable={MASK}"):
            rig.board().loads(OTHER, flat=False)

    rig.kernel.before = intrude
    with pytest.raises(ProgrammingError, match=OTHER):
        rig.program()
    assert len(rig.kernel.requests) == 1  # it is not loaded over: somebody has the node
    assert rig.board().state.mask == defs.MASK


def test_a_mask_that_does_not_arrive_stops_the_load(rig: Rig):
    rig.arm("mute")
    with pytest.raises(HardwareError, match="does not follow"):
        rig.program()
    assert not rig.kernel.requests


def loses_its_management_driver(rig: Rig) -> None:
    """Before the mask is set again."""
    rig.kernel.before = lambda what: (
        rig.kernel.fails.update({("write", "channel_disable"): EIO}) if MASK in what else None
    )


def test_an_image_that_cannot_be_masked_is_not_programmed(rig: Rig):
    loses_its_management_driver(rig)
    with pytest.raises(HardwareError, match=f"cannot be set to {MASK}"):
        rig.program()


def test_of_a_load_and_a_mask_that_fail_the_load_says_why(rig: Rig):
    loses_its_management_driver(rig)
    rig.arm("port-open")
    with pytest.raises(PortInUseError):
        rig.program()


def test_a_card_whose_trouble_cannot_be_read_after_the_load_is_not_programmed(rig: Rig):
    rig.kernel.instead["0.1/device_bad_state"] = EIO
    with pytest.raises(HardwareError, match=r"cannot be read \(Input/output error\)"):
        rig.program()


def test_a_card_that_tells_no_bad_state_is_in_none(rig: Rig):
    rig.kernel.instead["0.1/device_bad_state"] = FileNotFoundError(errno.ENOENT, "none")
    rig.program()
    assert rig.backend.port_errors(rig.region()) == {}


def test_a_card_that_answers_is_quiet(rig: Rig):
    with rig.backend.open_port(rig.card(), rig.region()) as port:
        port.reset()
        assert port.clear_errors() == {}


@pytest.mark.parametrize(
    ("answer", "why"), [("0x0", "is offline or not ready"), (EIO, "cannot be read")]
)
def test_a_card_that_does_not_answer_cannot_be_scrubbed(rig: Rig, answer: str | OSError, why: str):
    with rig.backend.open_port(rig.card(), rig.region()) as port:
        rig.kernel.instead["0.1/ready"] = answer
        with pytest.raises(HardwareError, match=f"card {CARD} {why}"):
            port.reset()


def test_errors_stay_and_are_counted(rig: Rig):
    rig.kernel.instead |= {"0.1/device_bad_state": "1", "firewall.m.4096/level": "3"}
    rig.kernel.listed["0000:10:00.0"] = ["firewall.m.4096"]
    with rig.backend.open_port(rig.card(), rig.region()) as port:
        assert port.clear_errors() == {
            "device_bad_state": 1,
            "firewall_level": 3,
            "errors_left": 4,
        }


def test_errors_that_cannot_be_read_are_an_error(rig: Rig):
    rig.kernel.instead["0.1/device_bad_state"] = EIO
    region = rig.region()
    with rig.backend.open_port(rig.card(), region) as port:
        for ask in (port.clear_errors, lambda: rig.backend.port_errors(region)):
            with pytest.raises(HardwareError, match=r"cannot be read \(Input/output error\)"):
                ask()


def test_a_bad_state_after_the_load_fails_it(rig: Rig):
    rig.kernel.before = lambda what: rig.board().put(bad="bad-state") if MASK in what else None
    with pytest.raises(ProgrammingError, match="device_bad_state 0x1"):
        rig.program()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", defs.NO_IMAGE),
        ("00000000-0000-0000-0000-000000000000", defs.NO_IMAGE),
        ("a7c1e2d3-4b5f-4688-9a0b-1c2d3e4f5061\n", VADD),
    ],
)
def test_the_record_is_read_as_the_driver_writes_it(rig: Rig, text: str, expected: str):
    rig.kernel.instead["/xclbinuuid"] = text
    assert rig.backend.afu_id(rig.region()) == expected


@pytest.mark.parametrize("text", ["nonsense", f"{VADD}\n{OTHER}", "f" * 32])
def test_a_record_that_is_no_image_is_an_error(rig: Rig, text: str):
    rig.kernel.instead["/xclbinuuid"] = text
    with pytest.raises(HardwareError):
        rig.backend.afu_id(rig.region())


def test_a_region_of_before_is_gone(rig: Rig):
    card, region = rig.card(), rig.region()
    rig.board().unbind(user=True)
    rig.board().bind(user=True)
    with pytest.raises(CardGoneError):
        rig.backend.open_port(card, region)
    with pytest.raises(CardGoneError):
        rig.backend.afu_id(region)


def test_a_record_that_is_not_there_since_the_driver_went_says_that_the_region_is_gone(rig: Rig):
    region = rig.region()
    rig.board().unbind(user=True)
    with pytest.raises(CardGoneError):
        rig.backend.afu_id(region)


def test_a_record_that_cannot_be_read_is_an_error_while_the_driver_is_the_same(rig: Rig):
    rig.kernel.instead["0.1/xclbinuuid"] = EIO
    with pytest.raises(HardwareError, match=r"cannot be read: .*xclbinuuid \(Input/output error"):
        rig.backend.afu_id(rig.region())


def test_whether_the_driver_is_the_same_may_be_unknown(rig: Rig):
    region = rig.region()
    rig.kernel.fails["instance", "/shutdown"] = EIO
    with pytest.raises(HardwareError, match="cannot be looked up"):
        rig.backend.afu_id(region)


def test_old_drivers_get_no_request_whatever_sysfs_says(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    inner = rig.kernel.inner.query

    def query(handle: int, request: int, argument: bytes) -> bytes:
        answer = bytearray(inner(handle, request, argument))
        struct.pack_into("<ii", answer, 0, 2, 14)
        return bytes(answer)

    monkeypatch.setattr(rig.kernel.inner, "query", query)
    with pytest.raises(HardwareError, match=r"2\.15 or later"):
        rig.program()
    assert not rig.kernel.requests
    assert rig.board().state.mask == defs.MASK


def test_only_a_clock_is_a_setting_and_there_is_none(rig: Rig):
    card, region = rig.card(), rig.region()
    rig.backend.apply_settings(card, region, DriverSettings())
    rig.backend.apply_settings(card, region, DriverSettings(debug=True))
    with pytest.raises(RefusedError, match="clock"):
        rig.backend.apply_settings(card, region, DriverSettings(clock=100))
    assert rig.backend.clock_limits(card, region) is None


def test_memory_is_cleared_where_the_image_reaches_it(rig: Rig):
    rig.program()
    rig.backend.clear_memory(rig.card())
    assert rig.board().state.zeroed == ((1 << 20, 2 << 20),)


def test_memory_that_keeps_what_it_has_is_told(rig: Rig):
    rig.program()
    rig.arm("memory-stuck")
    with pytest.raises(HardwareError, match=r"HBM\[0\] of card .* is not clear at 0x100000"):
        rig.backend.clear_memory(rig.card())


def test_one_stain_anywhere_at_a_sampled_place_is_found(rig: Rig):
    rig.program()
    last = BANK.base + BANK.size - 1

    def stain(what: str) -> None:
        if what == hex(defs.PREAD_UNMGD):
            rig.board().write_memory(last, memoryview(b"\1"))

    rig.kernel.before = stain
    with pytest.raises(HardwareError, match="is not clear"):
        rig.backend.clear_memory(rig.card())


def test_without_a_load_nobody_knows_which_memory_there_is(rig: Rig):
    with pytest.raises(HardwareError, match="not known"):
        rig.backend.clear_memory(rig.card())
    rig.program()
    rig.backend.reset(rig.card())
    with pytest.raises(HardwareError, match="not known"):
        rig.backend.clear_memory(rig.card())


def test_after_a_load_that_failed_nobody_knows_either(rig: Rig):
    rig.program()
    rig.arm("pr-error")
    with pytest.raises(ProgrammingError):
        rig.program()
    with pytest.raises(HardwareError, match="not known"):
        rig.backend.clear_memory(rig.card())


@pytest.mark.parametrize("size", [1, SAMPLE - 1, SAMPLE, SAMPLE + 1, 3 * SAMPLE, 1 << 20, 1 << 34])
def test_samples_lie_in_the_bank_its_first_and_last_bytes_among_them(size: int):
    offsets = list(_sampled(size))
    assert offsets[0] == 0
    assert offsets[-1] == max(size - SAMPLE, 0)
    assert len(offsets) <= SAMPLES
    assert len(offsets) == SAMPLES or size < SAMPLE + SAMPLES
