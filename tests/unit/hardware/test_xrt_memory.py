"""Clearing an Alveo card's memory: which addresses are written, and what is not believed."""

import errno
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from doubles.alveo import BANK, Rig

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.image import MemoryBank
from fpga_plugin.hardware.xrt.memory import CHUNK, SAMPLE

PWRITE, PREAD = 0xC020644F, 0xC020644E


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig.with_a_clock(tmp_path, monkeypatch)


def moved(rig: Rig, request: int) -> list[tuple[int, int]]:
    """The ranges of addresses that were written, or read back."""
    found = []
    for number, argument in rig.kernel.requests:
        if number == request:
            space, address, size, _ = struct.unpack("<I4xQQQ", argument)
            assert space == 0, "another address space than that of addresses on the card"
            found.append((address, address + size))
    return found


def cleared(rig: Rig, *banks: MemoryBank) -> None:
    rig.program(banks=banks)
    rig.kernel.requests.clear()
    rig.backend.clear_memory(rig.card())
    assert not rig.kernel.held


@pytest.mark.parametrize("size", [1, SAMPLE - 1, SAMPLE, CHUNK, CHUNK + SAMPLE + 1])
def test_all_of_a_bank_is_written_and_nothing_beside_it(rig: Rig, size: int):
    begin, end = BANK.base, BANK.base + size
    cleared(rig, replace(BANK, size=size))
    ranges = moved(rig, PWRITE)
    assert ranges[0][0] == begin
    assert [each[1] for each in ranges[:-1]] == [each[0] for each in ranges[1:]]
    assert ranges[-1][1] == end
    assert rig.board().state.zeroed == ((begin, end),)
    samples = moved(rig, PREAD)
    assert samples[0][0] == begin
    assert samples[-1][1] == end
    assert all(begin <= first < last <= end for first, last in samples)


def test_only_banks_that_the_image_reaches_are_written(rig: Rig):
    cleared(
        rig,
        replace(BANK, base=1 << 30, used=False),
        BANK,
        replace(BANK, base=2 << 30, on_card=False),
        replace(BANK, base=3 << 30, size=0),
    )
    assert moved(rig, PWRITE) == [(BANK.base, BANK.base + BANK.size)]


def test_an_image_without_memory_has_nothing_to_clear(rig: Rig):
    cleared(rig)
    assert not rig.kernel.requests


def test_a_driver_that_answers_and_reads_nothing_is_not_believed(rig: Rig):
    rig.kernel.ignored.add(PREAD)
    with pytest.raises(HardwareError, match="is not clear"):
        cleared(rig, BANK)


@pytest.mark.parametrize(("request_", "what"), [(PWRITE, "written"), (PREAD, "read back")])
def test_memory_that_the_driver_refuses_is_an_error_that_names_the_place(
    rig: Rig, request_: int, what: str
):
    rig.kernel.fails["ioctl", hex(request_)] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(HardwareError, match=rf"HBM\[0\] of card .* be {what} at 0x100000 \(Input"):
        cleared(rig, BANK)
