"""A load: the node that it goes to, what the driver is asked, and what its answers mean."""

import ctypes
import errno
import mmap
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.alveo import KERNEL, Rig, image
from doubles.xclbins import VADD

from fpga_plugin.errors import (
    CardGoneError,
    FpgaPluginError,
    HardwareError,
    PortInUseError,
    ProgrammingError,
)
from fpga_plugin.hardware.image import Xclbin
from fpga_plugin.hardware.xrt import defs
from fpga_plugin.hardware.xrt.load import _FAILURES, _kernel, holders

PF1 = "/sys/bus/pci/devices/0000:10:00.1"
NODE = "renderD128"
ABSENT = FileNotFoundError(errno.ENOENT, "No such file or directory")


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig.with_a_clock(tmp_path, monkeypatch)


def program(rig: Rig, what: Xclbin) -> None:
    with rig.backend.open_port(rig.card(), rig.region()) as port:
        port.program(what)


def refused(rig: Rig, kind: type[FpgaPluginError], match: str) -> FpgaPluginError:
    """A load is, before the driver got a request that changes something; nothing stays open."""
    with pytest.raises(kind, match=match) as caught:
        rig.program()
    assert not rig.kernel.requests
    assert not rig.kernel.held
    assert rig.board().state.mask == defs.MASK
    return caught.value


def test_the_node_is_closed_when_it_is_loaded(rig: Rig):
    rig.program()
    assert not rig.kernel.held


def test_a_driver_that_was_bound_again_meanwhile_gets_nothing_though_its_node_has_the_same_name(
    rig: Rig,
):
    def bind_again() -> None:
        rig.board().unbind(user=True)
        rig.board().bind(user=True)

    rig.kernel.before = lambda what: bind_again() if what.endswith("disable=0x4220") else None
    refused(rig, CardGoneError, "is no longer the user function")


def test_a_node_that_moved_while_it_was_opened_is_not_used(rig: Rig):
    """What has its name now may be another card's."""

    def move(what: str) -> None:
        if what.startswith("open"):
            rig.kernel.listed[f"{PF1}/drm"] = ["renderD130"]

    rig.kernel.instead["renderD130/dev"] = "226:130"
    rig.kernel.before = move
    refused(rig, CardGoneError, "renderD128 is no longer the node of region")


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENXIO, errno.ENODEV])
def test_a_node_that_is_not_there_means_that_the_card_is_gone(rig: Rig, code: int):
    rig.kernel.fails["open", NODE] = OSError(code, "not there")
    assert refused(rig, CardGoneError, "is being reset").for_tenant()


def test_a_node_that_cannot_be_opened_is_an_error(rig: Rig):
    rig.kernel.fails["open", NODE] = OSError(errno.EACCES, "Permission denied")
    refused(rig, HardwareError, r"cannot be opened \(Permission denied\)")


def test_a_node_that_cannot_be_looked_up_is_an_error(rig: Rig):
    card, region = rig.card(), rig.region()
    rig.kernel.fails["listdir", f"{PF1}/drm"] = OSError(errno.EIO, "Input/output error")
    with (
        rig.backend.open_port(card, region) as port,
        pytest.raises(HardwareError, match=r"cannot be looked up \(Input/output error\)"),
    ):
        port.program(image())
    assert not rig.kernel.requests


def test_a_node_that_does_not_tell_its_driver_is_not_used(rig: Rig):
    rig.kernel.fails["query", hex(defs.DRM_VERSION)] = OSError(errno.EACCES, "Permission denied")
    refused(rig, HardwareError, "does not tell its driver")


def answering(name: bytes, major: int, minor: int) -> Callable[..., bytes]:
    """A node's driver that says who it is, by the layout of struct drm_version (drm.h)."""

    def query(handle: int, request: int, argument: bytes) -> bytes:
        room, address = struct.unpack_from("<16xQQ", argument)
        assert argument[:16] == bytes(16)
        assert argument[32:] == bytes(32), "room for a date, or a description"
        ctypes.memmove(address, name, min(len(name), room))
        answer = bytearray(argument)
        struct.pack_into("<iiiiQ", answer, 0, major, minor, 0, 0, len(name))
        return bytes(answer)

    return query


@pytest.mark.parametrize(
    ("name", "version", "why"),
    [
        (b"amdgpu", (3, 54), "but of amdgpu 3.54"),
        (b"xocl\0\0", (2, 25), "but of another driver 2.25"),
        (b"x" * 200, (2, 25), "but of x{64} 2.25"),
        (b"xocl", (2, 14), "but of xocl 2.14"),
        (b"xocl", (1, 99), "but of xocl 1.99"),
    ],
)
def test_another_driver_or_one_that_is_too_old_gets_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, name: bytes, version: tuple[int, int], why: str
):
    monkeypatch.setattr(rig.kernel.inner, "query", answering(name, *version))
    refused(rig, HardwareError, why)


@pytest.mark.parametrize(("major", "minor"), [(2, 15), (2, 19), (3, 0)])
def test_the_oldest_driver_that_understands_is_served_and_later_ones(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, major: int, minor: int
):
    monkeypatch.setattr(rig.kernel.inner, "query", answering(b"xocl", major, minor))
    rig.program()
    assert rig.backend.afu_id(rig.region()) == VADD


@pytest.mark.parametrize(("dataflow", "expected"), [(True, 0b100101), (False, 0b101)])
def test_the_driver_is_told_whether_a_kernel_works_in_dataflow_mode(
    rig: Rig, *, dataflow: bool, expected: int
):
    program(rig, replace(image(), dataflow=dataflow))
    ((_, argument),) = rig.kernel.requests
    assert struct.unpack("<Qi4xQIII4x", argument)[4] == expected


@pytest.mark.parametrize(("software_reset", "features"), [(True, 1), (False, 0)])
def test_the_driver_is_told_whether_a_kernel_can_be_reset(*, software_reset: bool, features: int):
    packed = _kernel(replace(KERNEL, software_reset=software_reset, arguments=()))
    assert struct.unpack("<64sIii", packed)[1:] == (0x1000, 0, features)


def test_an_image_without_kernels_is_loaded(rig: Rig):
    program(rig, replace(image(), kernels=()))
    ((_, argument),) = rig.kernel.requests
    assert struct.unpack("<Qi4xQIII4x", argument)[1] == 0
    assert rig.backend.afu_id(rig.region()) == VADD


def mapped(rig: Rig, data: bytes) -> mmap.mmap:
    """A file as the store has it: a private mapping."""
    path = rig.directory / "file.xclbin"
    path.write_bytes(data)
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


@pytest.mark.parametrize("fails", [True, False])
def test_a_mapped_file_is_loaded_from_where_it_is_and_is_free_afterwards(rig: Rig, *, fails: bool):
    mapping = mapped(rig, bytes(image().data))
    view = memoryview(mapping)
    xclbin = replace(image(), data=view)
    caught: Any = None
    if fails:
        rig.kernel.fails["ioctl", hex(defs.READ_AXLF)] = OSError(errno.EINVAL, "Invalid argument")
        with pytest.raises(ProgrammingError) as caught:
            program(rig, xclbin)
    else:
        program(rig, xclbin)
        assert rig.backend.afu_id(rig.region()) == VADD
    view.release()
    mapping.close()  # raises if it is in use, be it by the traceback of the error
    del caught


@pytest.mark.parametrize("code", _FAILURES)
def test_what_an_errno_of_a_load_means_is_told(rig: Rig, code: int):
    rig.kernel.fails["ioctl", hex(defs.READ_AXLF)] = OSError(code, "as the kernel calls it")
    with pytest.raises(ProgrammingError) as caught:
        rig.program()
    what, hint = _FAILURES[code]
    assert f"failed ({errno.errorcode[code]}): {what}" in caught.value.message
    assert caught.value.hint == hint
    assert not rig.kernel.held


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (errno.EIO, "failed (EIO): Input/output error"),
        (523, "failed (errno 523): Unknown error 523"),
    ],
)
def test_an_errno_without_a_known_meaning_is_told_as_it_is(rig: Rig, code: int, told: str):
    rig.kernel.fails["ioctl", hex(defs.READ_AXLF)] = OSError(code, "as the kernel calls it")
    with pytest.raises(ProgrammingError) as caught:
        rig.program()
    assert told in caught.value.message
    assert "kernel's log" in (caught.value.hint or "")


def test_a_card_in_use_is_no_failure_of_the_image(rig: Rig):
    rig.kernel.fails["ioctl", hex(defs.READ_AXLF)] = OSError(errno.EBUSY, "busy")
    with pytest.raises(PortInUseError, match="a process has a context"):
        rig.program()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("contexts: 2\nclient pid:\n\t4711\n\t4712\n", "process 4711, 4712 has a context"),
        ("client pid:\n\t4711 (gone)\n", "process 4711 has a context"),
        ("contexts: 3\n", "a process has a context"),
        ("", "a process has a context"),
        (ABSENT, "a process has a context"),
        (OSError(errno.EIO, "Input/output error"), "a process has a context"),
        (
            "client pid: " + " ".join(map(str, range(10, 20))),
            "process 10, 11, 12, 13, 14, 15, 16, 17 has a context",
        ),
    ],
)
def test_who_has_a_context_is_named_as_far_as_the_driver_tells(
    rig: Rig, text: str | OSError, told: str
):
    rig.kernel.instead["/kdsstat"] = text
    assert holders(rig.kernel, PF1) == told
