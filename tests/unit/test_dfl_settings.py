import errno

import pytest
from doubles.dfl import FakeKernel, failure, served

from fpga_plugin.errors import HardwareError, RefusedError
from fpga_plugin.hardware.backend import ClockLimits, DriverSettings
from fpga_plugin.hardware.dfl.handles import port_of


def card_with_clock(**kilohertz: int):
    kernel = FakeKernel()
    kernel.add_card()
    backend, card = served(kernel)
    (region,) = card.regions
    values = {
        "frequency": 200000,
        "frequency_min": 9500,
        "frequency_max": 600900,
        "frequency_default": 200000,
        **kilohertz,
    }
    for name, value in values.items():
        kernel.files[f"{port_of(region).sysfs}/userclk/{name}"] = str(value)
    path = f"{port_of(region).sysfs}/userclk/frequency"
    kernel.stores[path] = lambda text: kernel.files.update({path: text})
    return kernel, backend, card, region


def test_limits_are_the_whole_megahertz_within_the_ports():
    _, backend, card, region = card_with_clock()
    assert backend.clock_limits(card, region) == ClockLimits(10, 600)


@pytest.mark.parametrize(
    "kilohertz", [{"frequency_min": 700000}, {"frequency_min": 0}, {"frequency_max": 100}]
)
def test_limits_that_make_no_sense_are_an_error(kilohertz: dict[str, int]):
    _, backend, card, region = card_with_clock(**kilohertz)
    with pytest.raises(HardwareError):
        backend.clock_limits(card, region)


def test_a_clock_is_set_in_kilohertz_and_restored_to_its_default():
    kernel, backend, card, region = card_with_clock()
    backend.apply_settings(card, region, DriverSettings(clock=250, debug=True))
    backend.apply_settings(card, region, DriverSettings())
    backend.apply_settings(card, region, DriverSettings())
    assert [text for _, text in kernel.written] == ["250000", "200000"]


def test_a_clock_beyond_the_limits_is_refused_with_them():
    kernel, backend, card, region = card_with_clock()
    for clock in (9, 601):
        with pytest.raises(RefusedError) as caught:
            backend.apply_settings(card, region, DriverSettings(clock=clock))
        assert "10 to 600" in caught.value.hint
    assert not kernel.written


def test_a_clock_that_the_driver_did_not_set_is_an_error():
    kernel, backend, card, region = card_with_clock()
    path = f"{port_of(region).sysfs}/userclk/frequency"
    kernel.stores[path] = lambda text: None
    with pytest.raises(HardwareError, match="but is 200000 kHz"):
        backend.apply_settings(card, region, DriverSettings(clock=250))

    def refuse(text: str) -> None:
        raise failure(errno.EINVAL)

    kernel.stores[path] = refuse
    with pytest.raises(HardwareError, match="cannot be set"):
        backend.apply_settings(card, region, DriverSettings(clock=250))


def test_a_clock_may_be_a_fraction_of_a_megahertz_off():
    kernel, backend, card, region = card_with_clock()
    path = f"{port_of(region).sysfs}/userclk/frequency"
    kernel.stores[path] = lambda text: kernel.files.update({path: "249990"})
    backend.apply_settings(card, region, DriverSettings(clock=250))


def test_a_card_without_a_documented_clock_has_defaults_and_nothing_else():
    kernel = FakeKernel()
    kernel.add_card()
    backend, card = served(kernel)
    (region,) = card.regions
    assert backend.clock_limits(card, region) is None
    backend.apply_settings(card, region, DriverSettings())
    backend.apply_settings(card, region, DriverSettings(debug=True))
    with pytest.raises(RefusedError, match="no documented way"):
        backend.apply_settings(card, region, DriverSettings(clock=100))
    assert not kernel.written


def test_every_bank_of_memory_is_cleared():
    kernel = FakeKernel()
    fme = kernel.add_card()
    backend, card = served(kernel)
    kernel.files[f"{fme}/dfl_dev.5/inf3_clear"] = ""
    kernel.files[f"{fme}/dfl_dev.12/inf0_clear"] = ""
    backend.clear_memory(card)
    assert kernel.written == [
        (f"{fme}/dfl_dev.5/inf0_clear", "1"),
        (f"{fme}/dfl_dev.5/inf3_clear", "1"),
        (f"{fme}/dfl_dev.12/inf0_clear", "1"),
    ]


@pytest.mark.parametrize(
    ("number", "says"), [(errno.ETIMEDOUT, "timed out"), (errno.ENODEV, "failed")]
)
def test_a_bank_that_was_not_cleared_is_named(number: int, says: str):
    kernel = FakeKernel()
    fme = kernel.add_card()
    backend, card = served(kernel)

    def refuse(text: str) -> None:
        raise failure(number)

    kernel.stores[f"{fme}/dfl_dev.5/inf0_clear"] = refuse
    with pytest.raises(HardwareError, match="inf0_clear") as caught:
        backend.clear_memory(card)
    assert says in caught.value.message


def test_memory_without_knobs_is_never_said_to_be_cleared():
    kernel = FakeKernel()
    fme = kernel.add_card()
    backend, card = served(kernel)
    kernel.remove(f"{fme}/dfl_dev.5")
    with pytest.raises(HardwareError, match="no documented way"):
        backend.clear_memory(card)


def test_the_boot_id_comes_from_the_kernel():
    class NoProc(FakeKernel):
        def boot_id(self) -> str:
            raise failure(errno.ENOENT)

    kernel = FakeKernel()
    kernel.add_card()
    backend, _ = served(kernel)
    assert backend.boot_id() == kernel.boot_id()
    kernel = NoProc()
    kernel.add_card()
    backend, _ = served(kernel)
    with pytest.raises(HardwareError, match="/proc"):
        backend.boot_id()
