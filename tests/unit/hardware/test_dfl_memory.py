import errno

import pytest
from doubles.dfl import FakeKernel, failure, served

from fpga_plugin.errors import HardwareError, RefusedError
from fpga_plugin.hardware.backend import DriverSettings


def test_no_card_has_a_documented_clock_to_set():
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
