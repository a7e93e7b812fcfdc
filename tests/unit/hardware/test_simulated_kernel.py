"""The simulated kernel answers as the real drivers do (measured in a virtual machine)."""

import ctypes
import errno
import json
import os
import re
import struct
import threading
from pathlib import Path

import pytest
from doubles import LIMIT

from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.simulated.driver import KernelOopsError
from fpga_plugin.hardware.simulated.faults import SimulatedFault
from fpga_plugin.hardware.simulated.kernel import SimulatedKernel
from fpga_plugin.ids import InterfaceId
from fpga_plugin.settings.settings import SimulatedGroup

INTERFACE = InterfaceId("ce48969398f05f33946d560708be108a")
FACTORY = "d8424dc4a4a3c413f89e433683f9040b"
IMAGE = bytes.fromhex("00112233445566778899aabbccddeeff") + b"configuration"
AFU = "00112233445566778899aabbccddeeff"

PORT_RESET, FME_PORT_PR = 0xB640, 0xB680
EXCLUSIVE = os.O_RDWR | os.O_EXCL


class Sleeper:
    """Notes how long PRs take; `during` runs in the middle of each."""

    def __init__(self):
        self.seconds = []
        self.during = lambda: None

    def __call__(self, seconds):
        self.seconds.append(seconds)
        self.during()


@pytest.fixture
def sleeper():
    return Sleeper()


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "simulated"


@pytest.fixture
def kernel(directory, sleeper):
    return make(directory, sleep=sleeper)


def make(directory: Path, *, cards=2, regions=3, **options):
    group = SimulatedGroup(cards, regions, INTERFACE)
    return SimulatedKernel(str(directory), (group,), **options)


def argument(port, image, *, argsz=24, flags=0, size=None):
    """Keeps the image's buffer alive together with the struct that points to it."""
    buffer = ctypes.create_string_buffer(image, len(image))
    packed = struct.pack(
        "<IIIIQ", argsz, flags, port, len(image) if size is None else size, ctypes.addressof(buffer)
    )
    return packed, buffer


def program(kernel, fme, port, image=IMAGE, **options):
    packed, _buffer = argument(port, image, **options)
    handle = kernel.open(fme, os.O_RDWR)
    try:
        return kernel.ioctl(handle, FME_PORT_PR, packed)
    finally:
        kernel.close(handle)


def state(directory, region):
    return json.loads((directory / "state.json").read_text())["regions"][region]


def port_path(kernel, address, port):
    base = f"/sys/bus/pci/devices/{address}/fpga_region"
    (region,) = kernel.listdir(base)
    for name in kernel.listdir(f"{base}/{region}"):
        if name.startswith("dfl-port.") and kernel.read(f"{base}/{region}/{name}/id") == str(port):
            return f"{base}/{region}/{name}"
    raise AssertionError(port)


def fme_path(kernel, address):
    base = f"/sys/bus/pci/devices/{address}/fpga_region"
    (region,) = kernel.listdir(base)
    (fme,) = [name for name in kernel.listdir(f"{base}/{region}") if name.startswith("dfl-fme.")]
    return f"{base}/{region}/{fme}"


def manager(kernel, address):
    path = fme_path(kernel, address)
    number = path.rpartition(".")[2]
    path = f"{path}/dfl-fme-mgr.{number}/fpga_manager/fpga{number}"
    return kernel.read(f"{path}/state"), kernel.read(f"{path}/status")


def fault(directory, region, word):
    (directory / "faults" / region).write_text(word)


def raises(number):
    return pytest.raises(OSError, match=f"Errno {number}]")


CARD = "0000:10:00.0"
REGION = "0000-10-00.0-p1"


def test_it_has_the_interface_of_the_real_kernel(kernel):
    as_kernel: Kernel = kernel
    assert as_kernel.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_boot_id_file_plays_another_boot(kernel, directory):
    (directory / "boot_id").write_text("another\nignored\n")
    assert kernel.boot_id() == "another"


def test_sysfs_has_the_layout_of_the_real_drivers(kernel):
    assert kernel.listdir("/sys/class/fpga_region") == [f"region{n}" for n in range(8)]
    base = kernel.realpath("/sys/class/fpga_region/region0")
    assert base == f"/sys/devices/pci0000:10/{CARD}/fpga_region/region0"
    assert kernel.realpath(f"{base}/device") == f"/sys/devices/pci0000:10/{CARD}"
    assert kernel.realpath(f"{base}/../..") == f"/sys/devices/pci0000:10/{CARD}"
    names = set(kernel.listdir(base))
    assert {"dfl-fme.0", "dfl-port.0", "dfl-port.1", "dfl-port.2", "device"} <= names
    assert kernel.read(f"{base}/dfl-fme.0/ports_num") == "3"
    region = "dfl-fme-region.1/fpga_region/region1"
    assert kernel.read(f"{base}/dfl-fme.0/{region}/compat_id") == INTERFACE
    assert kernel.exists(f"{base}/compat_id")
    with raises(errno.ENOENT):
        kernel.read(f"{base}/compat_id")
    assert kernel.read(f"{base}/device/device") == "0x09c4"
    assert kernel.read("/sys/bus/pci/devices/0000:11:00.0/numa_node") == "1"
    assert kernel.exists(f"{base}/dfl-port.0/driver")
    assert kernel.realpath(f"{base}/device/driver") == "/sys/bus/pci/drivers/dfl-pci"
    assert kernel.exists("/sys/bus/dfl/devices/dfl_dev.1/inf0_clear")
    assert kernel.read("/sys/class/hwmon/hwmon2/name") == "dfl_fme_thermal"


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("/sys/class/fpga_region/region99", errno.ENOENT),
        ("/sys/class/fpga_region/region0", errno.EISDIR),
        ("/sys/bus/dfl/devices/dfl_dev.0/inf0_clear", errno.EACCES),
        ("/sys/bus/dfl/devices/dfl_dev.0/type/deeper", errno.ENOTDIR),
    ],
)
def test_reading_what_is_no_readable_attribute_fails_as_in_sysfs(kernel, path, number):
    with raises(number):
        kernel.read(path)


def test_read_only_attributes_cannot_be_written(kernel):
    with raises(errno.EACCES):
        kernel.write(f"{port_path(kernel, CARD, 0)}/afu_id", FACTORY)
    with raises(errno.EACCES):
        kernel.write(f"{fme_path(kernel, CARD)}/ports_num", "4")


def test_a_card_comes_up_with_the_factory_image(kernel, directory):
    assert kernel.read(f"{port_path(kernel, CARD, 1)}/afu_id") == FACTORY
    assert state(directory, REGION)["afu_id"] == FACTORY
    assert manager(kernel, CARD) == ("unknown", "")


def test_pr_loads_the_image_and_writes_it_down_before_it_returns(kernel, directory, sleeper):
    assert program(kernel, "/dev/dfl-fme.0", 1) == 0
    assert kernel.read(f"{port_path(kernel, CARD, 1)}/afu_id") == AFU
    assert kernel.read(f"{port_path(kernel, CARD, 0)}/afu_id") == FACTORY
    assert state(directory, REGION)["afu_id"] == AFU
    assert manager(kernel, CARD) == ("operating", "")
    assert sleeper.seconds == [0.05]


def test_a_short_image_is_padded_with_zeros(kernel, directory):
    program(kernel, "/dev/dfl-fme.0", 1, b"\xab")
    assert state(directory, REGION)["afu_id"] == "ab" + "0" * 30


def test_pr_is_written_down_when_it_begins_while_the_port_reads_busy(kernel, directory, sleeper):
    seen = {}

    def look():
        seen["state"] = state(directory, REGION)["afu_id"]
        with raises(errno.EBUSY):
            kernel.read(f"{port_path(kernel, CARD, 1)}/afu_id")
        seen["other"] = kernel.read(f"{port_path(kernel, CARD, 0)}/afu_id")
        seen["manager"] = manager(kernel, CARD)[0]

    sleeper.during = look
    program(kernel, "/dev/dfl-fme.0", 1)
    assert seen == {"state": AFU, "other": FACTORY, "manager": "write"}


@pytest.mark.parametrize(
    ("port", "options", "number"),
    [
        (1, {"argsz": 23}, errno.EINVAL),
        (1, {"flags": 1}, errno.EINVAL),
        (3, {}, errno.EINVAL),
        (1, {"size": 0}, errno.ENOMEM),
    ],
)
def test_a_wrong_pr_is_refused_and_changes_nothing(kernel, directory, port, options, number):
    before = (directory / "state.json").read_bytes()
    with raises(number):
        program(kernel, "/dev/dfl-fme.0", port, **options)
    assert (directory / "state.json").read_bytes() == before


def test_pr_without_a_buffer_is_efault(kernel):
    handle = kernel.open("/dev/dfl-fme.0", os.O_RDWR)
    with raises(errno.EFAULT):
        kernel.ioctl(handle, FME_PORT_PR, struct.pack("<IIIIQ", 24, 0, 1, 16, 0))
    with raises(errno.EFAULT):
        kernel.ioctl(handle, FME_PORT_PR, 0)


def test_pr_on_the_port_and_reset_on_the_fme_are_einval(kernel):
    port = kernel.open("/dev/dfl-port.1", os.O_RDWR)
    fme = kernel.open("/dev/dfl-fme.0", os.O_RDWR)
    with raises(errno.EINVAL):
        kernel.ioctl(port, FME_PORT_PR, argument(1, IMAGE)[0])
    with raises(errno.EINVAL):
        kernel.ioctl(fme, PORT_RESET, 0)


def test_pr_never_asks_whether_the_port_is_in_use(kernel, directory):
    kernel.open("/dev/dfl-port.1", os.O_RDWR)
    assert program(kernel, "/dev/dfl-fme.0", 1) == 0
    assert state(directory, REGION)["afu_id"] == AFU


def test_pr_works_while_we_hold_the_port(kernel, directory):
    handle = kernel.open("/dev/dfl-port.1", EXCLUSIVE)
    assert program(kernel, "/dev/dfl-fme.0", 1) == 0
    assert state(directory, REGION) | {"afu_id": AFU, "open": 1} == state(directory, REGION)
    kernel.close(handle)
    assert state(directory, REGION)["open"] == 0


def test_exclusive_open_needs_the_port_alone_and_keeps_it_so(kernel, directory):
    first = kernel.open("/dev/dfl-port.1", os.O_RDWR)
    second = kernel.open("/dev/dfl-port.1", os.O_RDWR)
    assert state(directory, REGION)["open"] == 2
    with raises(errno.EBUSY):
        kernel.open("/dev/dfl-port.1", EXCLUSIVE)
    kernel.close(first)
    with raises(errno.EBUSY):
        kernel.open("/dev/dfl-port.1", EXCLUSIVE)
    kernel.close(second)
    held = kernel.open("/dev/dfl-port.1", EXCLUSIVE)
    for flags in (EXCLUSIVE, os.O_RDWR):
        with raises(errno.EBUSY):
            kernel.open("/dev/dfl-port.1", flags)
    kernel.close(held)
    kernel.close(kernel.open("/dev/dfl-port.1", os.O_RDWR))
    assert state(directory, REGION)["open"] == 0


def test_a_closed_handle_is_ebadf(kernel):
    handle = kernel.open("/dev/dfl-port.1", os.O_RDWR)
    kernel.close(handle)
    with raises(errno.EBADF):
        kernel.close(handle)
    with raises(errno.EBADF):
        kernel.ioctl(handle, PORT_RESET, 0)


@pytest.mark.parametrize("node", ["/dev/dfl-port.6", "/dev/dfl-fme.2"])
def test_a_node_without_a_device_is_enxio(kernel, node):
    with raises(errno.ENXIO):
        kernel.open(node, os.O_RDWR)


def test_port_reset_takes_no_argument(kernel):
    handle = kernel.open("/dev/dfl-port.1", os.O_RDWR)
    assert kernel.ioctl(handle, PORT_RESET, 0) == 0
    with raises(errno.EINVAL):
        kernel.ioctl(handle, PORT_RESET, 1)
    with raises(errno.EINVAL):
        kernel.ioctl(handle, 0xB6FF, 0)


@pytest.mark.parametrize(
    "failure",
    [
        ("pr-error", errno.EIO, 0.05, "reconfig operation error"),
        ("pr-stuck\n", errno.ETIMEDOUT, 8.0, ""),
    ],
)
def test_a_failed_pr_poisons_the_port_and_uses_the_fault_up(kernel, directory, sleeper, failure):
    word, number, seconds, status = failure
    fault(directory, REGION, word)
    with raises(number):
        program(kernel, "/dev/dfl-fme.0", 1)
    assert sleeper.seconds == [seconds]
    assert manager(kernel, CARD) == ("write complete error", status)
    assert not (directory / "faults" / REGION).exists()
    assert state(directory, REGION)["poisoned"] is True
    afu_id = f"{port_path(kernel, CARD, 1)}/afu_id"
    with raises(errno.EBUSY):
        kernel.read(afu_id)
    # The trap of the real kernel: the next PR claims success, and has loaded nothing.
    assert program(kernel, "/dev/dfl-fme.0", 1) == 0
    assert manager(kernel, CARD) == ("operating", "")
    with raises(errno.EBUSY):
        kernel.read(afu_id)
    assert state(directory, REGION)["afu_id"] == FACTORY
    # Neither does a reset help, though it says so.
    handle = kernel.open("/dev/dfl-port.1", EXCLUSIVE)
    assert kernel.ioctl(handle, PORT_RESET, 0) == 0
    kernel.close(handle)
    with raises(errno.EBUSY):
        kernel.read(afu_id)
    assert kernel.read(f"{port_path(kernel, CARD, 0)}/afu_id") == FACTORY


@pytest.mark.parametrize("word", ["afu-hung", "afu-dead"])
def test_a_silent_afu_leaves_its_port_well_and_a_pr_mends_the_one_that_hangs(
    kernel, directory, word: str
):
    port = port_path(kernel, CARD, 1)
    fault(directory, REGION, word)
    assert kernel.read(f"{port}/afu_id") == "f" * 32
    assert kernel.read(f"{port}/power_state") == "0x0"
    assert kernel.read(f"{port}/errors/errors") == "0x100000000"
    with raises(errno.EINVAL):
        kernel.write(f"{port}/errors/errors", "0x1")
    kernel.write(f"{port}/errors/errors", "0x100000000")
    assert kernel.read(f"{port}/errors/errors") == "0x100000000", "it still does not answer"
    handle = kernel.open("/dev/dfl-port.1", os.O_RDWR)
    assert kernel.ioctl(handle, PORT_RESET, 0) == 0
    kernel.close(handle)
    assert kernel.read(f"{port}/afu_id") == "f" * 32, "a reset is not enough"
    assert program(kernel, "/dev/dfl-fme.0", 1) == 0
    mended = word == "afu-hung"
    assert (kernel.read(f"{port}/afu_id") == "f" * 32) != mended
    assert (directory / "faults" / REGION).exists() != mended


@pytest.mark.parametrize("word", ["port-fatal", "pcie-error"])
def test_a_summary_bit_of_the_card_stays_until_its_cause_is_cleared(kernel, directory, word: str):
    port, fme = port_path(kernel, CARD, 1), fme_path(kernel, CARD)
    nonfatal = f"{fme}/errors/nonfatal_errors"
    assert kernel.read(nonfatal) == "0x0"
    fault(directory, REGION, word)
    of_port = word == "port-fatal"
    assert kernel.read(nonfatal) == ("0x8" if of_port else "0x4")
    cause = f"{port}/errors/errors" if of_port else f"{fme}/errors/pcie0_errors"
    assert kernel.read(cause) == "0x1"
    assert program(kernel, "/dev/dfl-fme.0", 1) == 0
    with raises(errno.EINVAL):
        kernel.write(cause, "0x2")
    assert kernel.read(nonfatal) != "0x0"
    kernel.write(cause, "0x1")
    assert kernel.read(cause) == kernel.read(nonfatal) == "0x0"
    assert not (directory / "faults" / REGION).exists()
    with raises(errno.EINVAL):
        kernel.write(cause, "0x1")


def test_a_fault_of_another_region_waits_for_its_own_pr(kernel, directory):
    fault(directory, "0000-10-00.0-p0", "pr-error")
    assert program(kernel, "/dev/dfl-fme.0", 1) == 0
    assert (directory / "faults" / "0000-10-00.0-p0").exists()


@pytest.mark.parametrize("word", ["", "nonsense", "pr-error pr-stuck", "\xff\xfe", "x" * 5000])
def test_an_unknown_word_in_a_fault_file_is_ignored_and_kept(kernel, directory, word):
    fault(directory, REGION, word)
    assert program(kernel, "/dev/dfl-fme.0", 1) == 0
    assert (directory / "faults" / REGION).exists()


def test_a_directory_in_place_of_a_fault_is_ignored(kernel, directory):
    (directory / "faults" / REGION).mkdir()
    assert program(kernel, "/dev/dfl-fme.0", 1) == 0


def closes(kernel):
    kernel.close(kernel.open("/dev/dfl-port.1", os.O_RDWR))


def resets(kernel):
    handle = kernel.open("/dev/dfl-port.1", EXCLUSIVE)
    with raises(errno.ETIMEDOUT):
        kernel.ioctl(handle, PORT_RESET, 0)
    kernel.close(handle)


def programs(kernel):
    with raises(errno.ETIMEDOUT):
        program(kernel, "/dev/dfl-fme.0", 1)


def clears_errors(kernel):
    with raises(errno.ETIMEDOUT):
        kernel.write(f"{port_path(kernel, CARD, 1)}/errors/errors", "0x0")


@pytest.mark.parametrize("way", [closes, resets, programs, clears_errors])
def test_a_reset_that_is_not_acknowledged_poisons_its_port_alone(kernel, directory, sleeper, way):
    fault(directory, REGION, "port-deaf")
    way(kernel)
    assert state(directory, REGION)["poisoned"] is True
    assert state(directory, REGION)["afu_id"] == FACTORY
    assert sleeper.seconds == []
    assert manager(kernel, CARD) == ("unknown", "")  # nothing was streamed
    (directory / "faults" / REGION).unlink()
    with raises(errno.EBUSY):
        kernel.read(f"{port_path(kernel, CARD, 1)}/afu_id")
    assert kernel.read(f"{port_path(kernel, CARD, 0)}/afu_id") == FACTORY


def test_resets_of_a_poisoned_port_ask_nobody(kernel, directory):
    fault(directory, REGION, "port-deaf")
    programs(kernel)
    handle = kernel.open("/dev/dfl-port.1", EXCLUSIVE)
    assert kernel.ioctl(handle, PORT_RESET, 0) == 0
    assert program(kernel, "/dev/dfl-fme.0", 1) == 0
    kernel.close(handle)


def test_port_open_keeps_exclusive_opens_out_while_the_file_is_there(kernel, directory):
    fault(directory, REGION, "port-open")
    with raises(errno.EBUSY):
        kernel.open("/dev/dfl-port.1", EXCLUSIVE)
    kernel.close(kernel.open("/dev/dfl-port.1", os.O_RDWR))
    kernel.close(kernel.open("/dev/dfl-port.0", EXCLUSIVE))
    (directory / "faults" / REGION).unlink()
    kernel.close(kernel.open("/dev/dfl-port.1", EXCLUSIVE))


def test_thermal_shows_ap6_on_its_port_alone(kernel, directory):
    path = port_path(kernel, CARD, 1)
    fault(directory, REGION, "thermal")
    assert int(kernel.read(f"{path}/errors/errors"), 0) == 1 << 50
    assert kernel.read(f"{path}/power_state") == "0x6"
    with raises(errno.EBUSY):
        kernel.write(f"{path}/errors/errors", kernel.read(f"{path}/errors/errors"))
    other = port_path(kernel, CARD, 0)
    assert kernel.read(f"{other}/errors/errors") == "0x0"
    assert kernel.read(f"{other}/power_state") == "0x0"
    assert program(kernel, "/dev/dfl-fme.0", 1) == 0
    (directory / "faults" / REGION).unlink()
    assert kernel.read(f"{path}/power_state") == "0x0"


def test_fatal_reads_all_ones_on_its_port_alone(kernel, directory):
    path = port_path(kernel, CARD, 1)
    fault(directory, REGION, "fatal")
    assert kernel.read(f"{path}/afu_id") == "f" * 32
    for name in ("errors", "first_error", "first_malformed_req"):
        assert kernel.read(f"{path}/errors/{name}") == f"0x{'f' * 16}"
    assert kernel.read(f"{path}/power_state") == "0xf"
    assert kernel.read(f"{path}/ap1_event") == "1"
    assert kernel.read(f"{port_path(kernel, CARD, 0)}/afu_id") == FACTORY
    (directory / "faults" / REGION).unlink()
    assert kernel.read(f"{path}/afu_id") == FACTORY


def test_port_errors_are_cleared_by_the_value_that_was_read(kernel):
    path = f"{port_path(kernel, CARD, 1)}/errors/errors"
    kernel.write(path, kernel.read(path))
    for text in ("0x1", "nonsense", "-1", ""):
        with raises(errno.EINVAL):
            kernel.write(path, text)


def test_memory_is_cleared_by_exactly_one(kernel):
    path = f"{fme_path(kernel, CARD)}/dfl_dev.0/inf0_clear"
    kernel.write(path, "1")
    for text in ("0", "1 ", "01", ""):
        with raises(errno.EINVAL):
            kernel.write(path, text)


def test_user_clock_keeps_its_limits_and_is_written_down_in_mhz(kernel, directory):
    clock = f"{port_path(kernel, CARD, 1)}/userclk"
    assert kernel.read(f"{clock}/frequency") == "200000"
    kernel.write(f"{clock}/frequency", "300000")
    assert kernel.read(f"{clock}/frequency") == "300000"
    assert state(directory, REGION)["clock"] == 300
    for limit in ("10000", "1000000"):
        kernel.write(f"{clock}/frequency", limit)
    for text in ("9999", "1000001", "-1", "fast"):
        with raises(errno.EINVAL):
            kernel.write(f"{clock}/frequency", text)
    assert kernel.read(f"{clock}/frequency") == "1000000"


def test_a_rebind_repairs_a_poisoned_port_and_keeps_image_and_clock(kernel, directory):
    program(kernel, "/dev/dfl-fme.0", 1)
    kernel.write(f"{port_path(kernel, CARD, 1)}/userclk/frequency", "100000")
    fault(directory, REGION, "pr-error")
    with raises(errno.EIO):
        program(kernel, "/dev/dfl-fme.0", 1, b"\x99" * 16)
    told = []
    kernel.subscribe(told.append)
    kernel.write("/sys/bus/pci/drivers/dfl-pci/unbind", f"{CARD}\n")
    function = f"/sys/bus/pci/devices/{CARD}"
    assert kernel.exists(function)
    assert not kernel.exists(f"{function}/driver")
    assert not kernel.exists(f"{function}/fpga_region")
    assert kernel.listdir("/sys/class/fpga_region") == ["region4", "region5", "region6", "region7"]
    with raises(errno.ENXIO):
        kernel.open("/dev/dfl-port.1", os.O_RDWR)
    with raises(errno.ENODEV):
        kernel.write("/sys/bus/pci/drivers/dfl-pci/unbind", CARD)
    kernel.write("/sys/bus/pci/drivers/dfl-pci/bind", CARD)
    with raises(errno.EBUSY):
        kernel.write("/sys/bus/pci/drivers/dfl-pci/bind", CARD)
    assert kernel.read(f"{port_path(kernel, CARD, 1)}/afu_id") == AFU
    assert kernel.read(f"{port_path(kernel, CARD, 1)}/userclk/frequency") == "100000"
    assert program(kernel, "/dev/dfl-fme.0", 1, b"\x77" * 16) == 0
    assert kernel.read(f"{port_path(kernel, CARD, 1)}/afu_id") == "77" * 16
    assert told == ["0000-10-00.0", "0000-10-00.0"]


def test_rebound_cards_take_the_lowest_free_numbers(kernel, directory):
    driver = "/sys/bus/pci/drivers/dfl-pci"
    for address in ("0000:10:00.0", "0000:11:00.0"):
        kernel.write(f"{driver}/unbind", address)
    for address in ("0000:11:00.0", "0000:10:00.0"):
        kernel.write(f"{driver}/bind", address)
    assert fme_path(kernel, "0000:11:00.0").endswith("/dfl-fme.0")
    assert [state(directory, f"0000-11-00.0-p{n}")["node"] for n in range(3)] == [0, 1, 2]
    assert [state(directory, f"0000-10-00.0-p{n}")["node"] for n in range(3)] == [3, 4, 5]


@pytest.mark.parametrize("text", ["0000:12:00.0", "nonsense", ""])
def test_binding_what_is_no_card_is_enodev(kernel, text):
    for name in ("bind", "unbind"):
        with raises(errno.ENODEV):
            kernel.write(f"/sys/bus/pci/drivers/dfl-pci/{name}", text)


@pytest.mark.parametrize("tenant", [True, False])
def test_unbinding_under_an_open_port_is_a_kernel_oops(kernel, directory, tenant):
    if tenant:
        fault(directory, REGION, "port-open")
    else:
        kernel.open("/dev/dfl-port.1", EXCLUSIVE)
    with pytest.raises(KernelOopsError, match=REGION):
        kernel.write("/sys/bus/pci/drivers/dfl-pci/unbind", CARD)
    assert REGION in (directory / "oops").read_text()


def test_the_runbook_has_a_word_for_each_fault():
    text = (Path(__file__).parents[3] / "docs/runbook.md").read_text()
    _, _, section = text.partition("## Rehearse trouble")
    assert set(re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)) == set(SimulatedFault)


@pytest.mark.parametrize("other", [True, False])
def test_unbinding_under_an_open_fme_is_a_kernel_oops(kernel, directory, other):
    if other:
        fault(directory, REGION, "fme-open")
    else:
        kernel.open("/dev/dfl-fme.0", os.O_RDWR)
    with pytest.raises(KernelOopsError, match="FME"):
        kernel.write("/sys/bus/pci/drivers/dfl-pci/unbind", CARD)


def test_prs_of_two_cards_overlap(directory):
    both = threading.Barrier(2)
    kernel = make(directory, sleep=lambda _: both.wait(LIMIT))
    threads = [
        threading.Thread(target=program, args=(kernel, f"/dev/dfl-fme.{n}", 0)) for n in range(2)
    ]
    run(threads)
    assert not both.broken
    assert {state(directory, f"0000-1{n}-00.0-p0")["afu_id"] for n in range(2)} == {AFU}


def test_prs_of_one_card_come_one_after_the_other(kernel, directory, sleeper):
    first = kernel.open("/dev/dfl-fme.0", os.O_RDWR)
    second = kernel.open("/dev/dfl-fme.0", os.O_RDWR)
    packed, _buffer = argument(1, IMAGE)
    other = threading.Thread(target=kernel.ioctl, args=(second, FME_PORT_PR, packed))

    def during():
        sleeper.during = lambda: None
        other.start()
        other.join(0.05)
        assert len(sleeper.seconds) == 1
        assert state(directory, REGION)["afu_id"] == FACTORY

    sleeper.during = during
    mine, _keep = argument(0, IMAGE)
    kernel.ioctl(first, FME_PORT_PR, mine)
    other.join(LIMIT)
    assert len(sleeper.seconds) == 2
    assert state(directory, REGION)["afu_id"] == AFU


def test_opening_closing_and_locked_attributes_of_the_fme_wait_for_a_pr(kernel, sleeper):
    idle = kernel.open("/dev/dfl-fme.0", os.O_RDWR)
    path = fme_path(kernel, CARD)
    done = []
    waiting = [
        threading.Thread(target=lambda: done.append(kernel.open("/dev/dfl-fme.0", os.O_RDWR))),
        threading.Thread(target=lambda: done.append(kernel.close(idle))),
        threading.Thread(target=lambda: done.append(kernel.read(f"{path}/errors/fme_errors"))),
    ]

    def during():
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join(0.02)
        assert done == []
        # Health must not use those, but these, which nothing delays.
        assert kernel.read(f"{path}/errors/catfatal_errors") == "0x0"
        assert kernel.read(f"{path}/bitstream_id")
        kernel.close(kernel.open("/dev/dfl-port.0", os.O_RDWR))

    sleeper.during = during
    program(kernel, "/dev/dfl-fme.0", 1)
    for thread in waiting:
        thread.join(LIMIT)
    assert len(done) == 3


def test_reads_from_many_threads_are_safe_while_cards_come_and_go(kernel, directory):
    stop = threading.Event()
    unexpected = []

    def read():
        while not stop.is_set():
            for name in kernel.listdir("/sys/class/fpga_region"):
                try:
                    kernel.listdir(f"/sys/class/fpga_region/{name}")
                except FileNotFoundError:
                    continue
                except Exception as error:  # noqa: BLE001 - collected for the assertion
                    unexpected.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    card = directory / "cards" / "0000-11-00.0"
    for _ in range(30):
        card.unlink()
        kernel.listdir("/sys/class/fpga_region")
        card.touch()
        program(kernel, "/dev/dfl-fme.0", 0)
    stop.set()
    for thread in threads:
        thread.join(LIMIT)
    assert unexpected == []


def run(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)
