"""A region's user clock is measured by whatever its port has, and nothing else is touched."""

import errno

import pytest
from doubles.dfl import FakeKernel, served

from fpga_plugin.hardware.backend import UserClock
from fpga_plugin.hardware.dfl.handles import port_of
from fpga_plugin.hardware.linux import LinuxKernel

HEADER = 3 << 60 | 1 << 12 | 0x14
LOCKED = 1 << 60


def a_card(files=(), **uio):
    kernel = FakeKernel()
    kernel.add_card()
    backend, card = served(kernel)
    (region,) = card.regions
    port = port_of(region).sysfs
    for name, text in dict(files).items():
        kernel.files[f"{port}/{name}"] = text
    return kernel, port, lambda: backend.user_clock(region)


def with_uio(*, offset=0x40, size=0x1000, high=31250, low=15625, header=HEADER, pll=LOCKED):
    """A port whose counter is behind /dev/uio3, as uio_dfl shows it."""
    kernel, port, measured = a_card()
    device = f"{port}/dfl_dev.7"
    kernel.files |= {
        f"{port}/dfl_dev.6/feature_id": "0x10",
        f"{device}/feature_id": "0x14",
        f"{device}/uio/uio3/maps/map0/offset": f"{offset:#x}",
        f"{device}/uio/uio3/maps/map0/size": f"{size:#018x}",
    }
    registers = {offset: header, offset + 0x18: pll}
    kernel.registers["/dev/uio3"] = registers

    def count(node: str, at: int, value: int) -> None:
        assert (node, at) == ("/dev/uio3", offset + 0x10)
        assert value in {0, 1 << 32}
        registers[offset + 0x20] = 0x5 << 54 | (high if value else low)

    kernel.on_register = count
    return kernel, measured


def test_a_port_without_any_counter_says_so():
    _, _, measured = a_card()
    assert measured() == UserClock(None, None, "the port's driver has no counter for it")


@pytest.mark.parametrize("device", ["dfl_dev.4", "dfl-userclk.2.auto"])
def test_the_vendors_driver_tells_low_and_high_in_one_file(device: str):
    _, _, measured = a_card({f"{device}/userclk/frequency": "156250 312500"})
    assert (measured().low, measured().high) == (156.25, 312.5)


def test_the_counter_behind_uio_is_told_which_clock_to_count():
    kernel, measured = with_uio()
    clock = measured()
    assert (clock.high, clock.low) == (312.5, 156.25)
    assert clock.source == "measured (/dev/uio3)"
    assert kernel.log == ["open /dev/uio3", "map /dev/uio3", "close /dev/uio3", "unmap /dev/uio3"]
    assert not kernel.written


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"header": 0x9}, "no user clock"),
        ({"header": (1 << 64) - 1}, "no user clock"),
        ({"pll": 0}, "not locked"),
        ({"high": 0}, "no clock"),
        ({"high": 0x1FFFF, "low": 0}, "312"),
        ({"offset": 0xFF0}, "registers at"),
        ({"offset": 0x44}, "registers at"),
        ({"size": 1 << 40}, "registers at"),
    ],
)
def test_registers_that_make_no_sense_are_no_clock(changes, says):
    _, measured = with_uio(**changes)
    if says == "312":
        assert measured() == UserClock(1310.71, None, "measured (/dev/uio3)")
        return
    assert measured().high is None
    assert says in measured().source


def test_nothing_is_written_to_a_device_that_came_in_the_clocks_place():
    kernel, measured = with_uio()
    uio = next(path for path in kernel.files if path.endswith("map0/size"))
    uio = uio.removesuffix("/maps/map0/size")
    first = kernel.instances.get(uio, 1)

    class Swapping(dict):  # type: ignore[type-arg]  # a dictionary of ints
        def get(self, path, default=1):
            return first + len([line for line in kernel.log if line.startswith("map")])

    kernel.instances = Swapping()
    kernel.on_register = lambda *_: pytest.fail("a foreign device's register was written")
    assert "another device" in measured().source


def test_a_counter_without_its_driver_names_the_module():
    kernel, measured = with_uio()
    for path in [path for path in kernel.files if "/uio/" in path]:
        kernel.remove(path)
    assert "load the module uio_dfl" in measured().source


def test_a_node_that_cannot_be_opened_is_no_clock():
    kernel, measured = with_uio()
    kernel.open_errors["/dev/uio3"] = errno.EPERM
    assert measured().high is None
    assert "Operation not permitted (/dev/uio3)" in measured().source


def test_ports_of_the_first_revision_have_the_two_registers_as_files():
    files = {"userclk_freqcntrcmd": "", "userclk_freqcntrsts": "0x0"}
    kernel, port, measured = a_card(files)
    command, status = f"{port}/userclk_freqcntrcmd", f"{port}/userclk_freqcntrsts"

    def count(text: str) -> None:
        kernel.files[status] = {"0x100000000": "0x4e20", "0x0": "0x2710"}[text]

    kernel.stores[command] = count
    assert measured() == UserClock(200.0, 100.0, f"measured ({status})")
    kernel.stores[command] = lambda text: kernel.files.update({status: "0xffffffffffffffff"})
    assert "all ones" in measured().source
    kernel.stores[command] = lambda text: kernel.files.update({status: "fast"})
    assert measured().high is None
    kernel.stores[command] = lambda text: kernel.files.update({status: errno.EIO})
    assert "Input/output error" in measured().source


def test_real_registers_are_read_and_written_as_64_bits(tmp_path):
    """The mapping of a file stands for that of a device."""
    path = tmp_path / "dev" / "uio0"
    path.parent.mkdir()
    path.write_bytes((0x1122334455667788).to_bytes(8, "little") + bytes(4088))
    kernel = LinuxKernel(str(tmp_path / "sys"), str(tmp_path / "dev"))
    handle = kernel.open("/dev/uio0", 2)
    registers = kernel.map(handle, 4096)
    kernel.close(handle)
    assert registers.read(0) == 0x1122334455667788
    registers.write(16, 1 << 32)
    registers.close()
    assert path.read_bytes()[16:24] == (1 << 32).to_bytes(8, "little")
