"""An Alveo card's sensors, and what of them counts; the other signals are in `test_xrt_reset`."""

import errno
from pathlib import Path

import pytest
from doubles.alveo import Rig

from fpga_plugin.hardware.faults import FaultKind

ABSENT = FileNotFoundError(errno.ENOENT, "No such file or directory")
EIO = OSError(errno.EIO, "Input/output error")
NONE_NOW = OSError(errno.ENODATA, "No data available")


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig.with_a_clock(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("readings", "failed", "degraded"),
    [
        ({"temp1_crit": "1"}, True, 0),
        ({"temp1_crit": "-1"}, False, 0),
        ({"temp1_crit": ABSENT}, False, 0),
        ({"temp1_input": NONE_NOW}, False, 0),
        ({"temp1_input": "-273000"}, False, 0),
        ({"temp1_input": "90000", "temp1_max": "90000"}, False, 1),
        ({"temp1_input": "97000", "temp1_max": "90000"}, True, 0),
        ({"temp1_input": "97000", "temp1_max": "90000", "temp1_label": "Cage0"}, False, 1),
        ({"power1_input": "97000", "power1_crit": "1", "power1_max": "1"}, False, 0),
    ],
)
def test_a_critical_temperature_of_the_fpga_counts_and_the_rest_is_told(
    rig: Rig, readings: dict[str, str | OSError], *, failed: bool, degraded: int
):
    rig.kernel.instead |= {f"/{name}": text for name, text in readings.items()}
    health = rig.backend.health(rig.card())
    assert bool(health.failed) is failed
    assert len(health.degraded) == degraded


@pytest.mark.parametrize(
    ("answer", "why"), [(EIO, "Input/output error"), ("nonsense", "says 'nonsense'")]
)
def test_sensors_that_cannot_be_read_say_nothing_of_the_fpga(
    rig: Rig, answer: str | OSError, why: str
):
    rig.kernel.instead["/temp1_input"] = answer
    health = rig.backend.health(rig.card())
    assert not health.failed
    (told,) = health.degraded
    assert told.startswith("unreadable: the sensors of card 0000-10-00.0")
    assert why in told


def test_readings_are_in_degrees_and_watts(rig: Rig):
    rig.kernel.instead |= {"/temp1_input": "41503", "/power1_input": "23000001"}
    readings = rig.backend.readings(rig.card())
    assert list(readings.temperatures.values()) == [41.503]
    assert list(readings.power.values()) == [23.000001]


@pytest.mark.parametrize(
    "attribute", ["0.0/config_mailbox_channel_disable", "0.1/config_mailbox_channel_disable"]
)
@pytest.mark.parametrize("answer", [ABSENT, EIO, "nonsense"])
def test_a_mask_that_cannot_be_read_is_not_called_lost(
    rig: Rig, attribute: str, answer: str | OSError
):
    """It is neither there nor gone while a card is reset; what else is wrong tells health."""
    card = rig.card()
    rig.kernel.instead[attribute] = answer
    assert rig.backend.health(card).unguarded == ""


def test_whether_the_driver_is_the_same_cannot_be_read_means_that_the_card_does_not_answer(
    rig: Rig,
):
    card = rig.card()
    rig.kernel.fails["instance", "0.1/shutdown"] = EIO
    (fault,) = rig.backend.health(card).failed.values()
    assert fault.kind is FaultKind.TRANSIENT
    assert "cannot be looked up (Input/output error)" in fault.message
