"""Boards with a management controller: where Linux puts its sensors, and what they say."""

import errno

import pytest
from doubles.dfl import CARD, FakeKernel, served

SPI = "spi_master/spi0/spi0.0"
N6000 = "dfl_dev.8/n6000bmc-hwmon.3.auto/hwmon/hwmon6"
D5005 = f"dfl_dev.8/{SPI}/d5005bmc-hwmon.3.auto/hwmon/hwmon6"
N3000 = f"dfl_dev.8/subdev_spi_altera.1.auto/{SPI}/n3000bmc-hwmon.3.auto/hwmon/hwmon6"

CORE = {
    "temp2_input": "61500\n",
    "temp2_label": "FPGA Core Temperature\n",
    "temp2_max": "95000\n",
    "temp2_crit": "100000\n",
    "temp9_input": errno.ENODATA,  # no module is plugged in
    "temp9_label": "QSFP0 Temperature\n",
    "power1_input": "41234000\n",
    "power1_label": "Board Power\n",
}


def board(place: str = D5005, **changes: str | int):
    """A backend and its card, on a board with these sensors."""
    kernel = FakeKernel()
    fme = kernel.add_card(ports=(0, 1))
    kernel.files |= {f"{fme}/{place}/{name}": value for name, value in (CORE | changes).items()}
    return served(kernel)


@pytest.mark.parametrize("place", [N6000, D5005, N3000])
def test_a_boards_sensors_are_found_wherever_the_board_has_them(place: str):
    backend, card = board(place)
    readings = backend.readings(card)
    assert readings.temperatures == {"fpga_core_temperature": 61.5}
    assert readings.power == {"board_power": 41.234}
    health = backend.health(card)
    assert not health.failed
    assert not health.degraded


def test_at_its_critical_temperature_a_card_has_failed():
    backend, card = board(temp2_input="100000")
    health = backend.health(card)
    assert health.failed.keys() == {region.id for region in card.regions}
    assert {fault.message for fault in health.failed.values()} == {
        f"thermal: fpga_core_temperature of card {CARD} has reached its critical temperature, 100 C"
    }
    assert not health.degraded


def test_below_its_critical_temperature_a_card_is_degraded_and_has_not_failed():
    backend, card = board(temp2_input="95000")
    health = backend.health(card)
    assert not health.failed
    (said,) = health.degraded
    assert said.startswith("thermal: ")
    assert said.endswith("95 C")


def test_a_hot_optical_module_degrades_the_card_and_fails_nothing():
    backend, card = board(temp9_input="90000", temp9_max="70000", temp9_crit="80000")
    health = backend.health(card)
    assert not health.failed
    (said,) = health.degraded
    assert "qsfp0_temperature" in said
    assert said.endswith("80 C")


@pytest.mark.parametrize("name", ["temp2_crit", "temp2_max"])
@pytest.mark.parametrize("limit", ["0", errno.ENODATA])
def test_a_limit_that_is_zero_or_absent_is_no_limit(name: str, limit: str | int):
    backend, card = board(**{name: limit})
    health = backend.health(card)
    assert not health.failed
    assert not health.degraded


@pytest.mark.parametrize("name", ["temp2_input", "temp2_crit", "temp2_label"])
@pytest.mark.parametrize("wrong", [errno.EIO, errno.ETIMEDOUT])
def test_a_controller_that_does_not_answer_degrades_the_card_and_fails_nothing(
    name: str, wrong: int
):
    backend, card = board(**{name: wrong})
    health = backend.health(card)
    assert not health.failed
    (said,) = health.degraded
    assert said.startswith(f"unreadable: the management controller of card {CARD} (")


@pytest.mark.parametrize("nonsense", ["4294966796", "", "-", "warm"])
def test_a_controller_that_answers_nonsense_degrades_the_card_and_fails_nothing(nonsense: str):
    backend, card = board(temp2_input=nonsense)
    assert "fpga_core_temperature" not in backend.readings(card).temperatures
    health = backend.health(card)
    assert not health.failed
    assert len(health.degraded) == 1


def test_a_temperature_below_zero_is_read_and_fails_nothing():
    backend, card = board(temp2_input="-12500", temp2_crit="-1")
    assert backend.readings(card).temperatures == {"fpga_core_temperature": -12.5}
    assert not backend.health(card).failed


@pytest.mark.parametrize("label", [errno.ENOENT, "\N{SNOWMAN}", "\n"])
def test_a_sensor_without_a_name_is_called_by_its_number(label: str | int):
    backend, card = board(temp2_label=label, name="d5005bmc_hwmon")
    assert backend.readings(card).temperatures == {
        "d5005bmc_hwmon_temp2" if isinstance(label, int) else "temp2": 61.5
    }
