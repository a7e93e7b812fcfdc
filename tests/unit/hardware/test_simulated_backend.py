"""The code that drives real cards drives simulated ones."""

import dataclasses
import json

import pytest

from fpga_plugin.errors import (
    CardGoneError,
    HardwareError,
    PortInUseError,
    PortPoisonedError,
    ProgrammingError,
    RefusedError,
    SettingsError,
)
from fpga_plugin.hardware.backend import ClockLimits, DriverSettings, UserClock
from fpga_plugin.hardware.dfl.handles import fme_of
from fpga_plugin.hardware.image import RawImage
from fpga_plugin.hardware.model import Card
from fpga_plugin.hardware.simulated.factory import simulated_backend
from fpga_plugin.ids import CardId, InterfaceId
from fpga_plugin.settings.settings import SimulatedGroup, SimulatedKind

INTERFACE = InterfaceId("ce48969398f05f33946d560708be108a")
IMAGE = bytes.fromhex("00112233445566778899aabbccddeeff") + b"\0" * 1000
AFU = "00112233445566778899aabbccddeeff"
CARD = CardId("0000-10-00.0")


@pytest.fixture
def hardware(tmp_path):
    return simulated_backend(
        str(tmp_path), (SimulatedGroup(2, 3, INTERFACE),), pr_seconds=0, owner=True
    )


@pytest.fixture
def backend(hardware):
    return hardware.backend


@pytest.fixture
def card(backend):
    return backend.scan().cards[CARD]


def arm(tmp_path, region, word):
    (tmp_path / "faults" / region.id).write_text(word)


def test_discovery_finds_every_card_with_its_regions(backend):
    found = backend.scan()
    assert not found.problems
    assert list(found.cards) == [CARD, "0000-11-00.0"]
    card = found.cards[CardId("0000-11-00.0")]
    assert card.complete
    assert card.clears_memory
    assert card.interface_id == INTERFACE
    assert (found.cards[CARD].numa_node, card.numa_node) == (0, 1)
    assert fme_of(card).node == "/dev/dfl-fme.1"
    assert [(region.id, str(region.grant)) for region in card.regions] == [
        ("0000-11-00.0-p0", "/dev/dfl-port.3"),
        ("0000-11-00.0-p1", "/dev/dfl-port.4"),
        ("0000-11-00.0-p2", "/dev/dfl-port.5"),
    ]
    assert backend.scan_card(card.id) == card


def test_many_cards_are_all_found(tmp_path):
    groups = (SimulatedGroup(239, 1, INTERFACE), SimulatedGroup(2, 2, INTERFACE))
    found = simulated_backend(str(tmp_path), groups, pr_seconds=0, owner=True).backend.scan()
    assert len(found.cards) == 241
    assert len(found.cards[CardId("0001-10-00.0")].regions) == 2


def test_a_region_is_programmed_and_verified(backend, card, tmp_path):
    region = card.regions[1]
    with backend.open_port(card, region) as port:
        port.reset()
        assert port.clear_errors() == {}
        port.program(RawImage(IMAGE))
        assert port.afu_id() == AFU
    assert backend.afu_id(region) == AFU
    state = json.loads((tmp_path / "state.json").read_text())["regions"]
    assert state[region.id]["afu_id"] == AFU
    assert state[region.id]["open"] == 0


def test_a_healthy_card_has_nothing_to_say(backend, card):
    health = backend.health(card)
    assert not health.failed
    assert health.degraded == ()


@pytest.mark.parametrize("word", ["thermal", "fatal"])
def test_a_fault_fails_only_the_region_that_it_names(backend, card, tmp_path, word):
    region = card.regions[1]
    arm(tmp_path, region, word)
    assert list(backend.health(card).failed) == [region.id]
    (tmp_path / "faults" / region.id).unlink()
    assert not backend.health(card).failed


def test_a_region_in_ap6_cannot_be_scrubbed(backend, card, tmp_path):
    arm(tmp_path, card.regions[1], "thermal")
    with backend.open_port(card, card.regions[1]) as port, pytest.raises(HardwareError):
        port.clear_errors()


def test_a_dead_region_has_no_afu_id(backend, card, tmp_path):
    arm(tmp_path, card.regions[1], "fatal")
    with pytest.raises(HardwareError):
        backend.afu_id(card.regions[1])


def test_a_failed_pr_is_told_and_its_poison_seen_until_a_rebind(hardware, card, tmp_path):
    backend, region = hardware.backend, card.regions[1]
    arm(tmp_path, region, "pr-error")
    with backend.open_port(card, region) as port, pytest.raises(ProgrammingError):
        port.program(RawImage(IMAGE))
    with pytest.raises(PortPoisonedError):
        backend.afu_id(region)
    with backend.open_port(card, region) as port:
        port.program(RawImage(IMAGE))  # the driver claims success
        with pytest.raises(PortPoisonedError):
            port.afu_id()
    assert list(backend.health(card).failed) == [region.id]
    for name in ("unbind", "bind"):
        hardware.kernel.write(f"/sys/bus/pci/drivers/dfl-pci/{name}", str(card.address))
    again = backend.scan_card(CARD)
    assert isinstance(again, Card)
    assert not backend.health(again).failed
    with backend.open_port(again, again.regions[1]) as port:
        port.program(RawImage(IMAGE))
        assert port.afu_id() == AFU


def test_a_port_that_a_tenant_has_open_is_in_use(backend, card, tmp_path):
    arm(tmp_path, card.regions[1], "port-open")
    with pytest.raises(PortInUseError):
        backend.open_port(card, card.regions[1])
    with backend.open_port(card, card.regions[0]), pytest.raises(PortInUseError):
        backend.open_port(card, card.regions[0])


def test_an_fme_that_another_process_has_open_keeps_its_card_from_being_rebound(
    backend, card, tmp_path
):
    arm(tmp_path, card.regions[1], "fme-open")
    with pytest.raises(PortInUseError, match=r"dfl-fme\.0"):
        backend.rebind(card)
    with backend.open_port(card, card.regions[0]) as port:
        port.program(RawImage(IMAGE))  # a PR needs no exclusive open
    (tmp_path / "faults" / card.regions[1].id).unlink()
    backend.rebind(card)


def test_the_clock_is_set_within_its_limits_and_restored(backend, card, tmp_path):
    region = card.regions[1]
    assert backend.clock_limits(card, region) == ClockLimits(10, 1000)

    def clock():
        return json.loads((tmp_path / "state.json").read_text())["regions"][region.id]["clock"]

    backend.apply_settings(card, region, DriverSettings(clock=300))
    assert clock() == 300
    assert backend.user_clock(region) == UserClock(300, 150, backend.user_clock(region).source)
    backend.apply_settings(card, region, DriverSettings())
    assert clock() == 200


def test_a_fixed_clock_is_measured_and_not_set(tmp_path):
    group = SimulatedGroup(1, 1, INTERFACE, frozenset({SimulatedKind.FIXED_CLOCK}))
    backend = simulated_backend(str(tmp_path), (group,), pr_seconds=0, owner=True).backend
    (card,) = backend.scan().cards.values()
    (region,) = card.regions
    assert backend.clock_limits(card, region) is None
    assert backend.user_clock(region).high == 200
    with pytest.raises(RefusedError, match="no documented way"):
        backend.apply_settings(card, region, DriverSettings(clock=100))
    backend.apply_settings(card, region, DriverSettings())


def test_memory_can_be_cleared(backend, card):
    backend.clear_memory(card)


def test_an_unplugged_card_is_gone_and_comes_back(backend, card, tmp_path):
    file = tmp_path / "cards" / CARD
    file.unlink()
    assert backend.scan_card(CARD) is None
    assert list(backend.scan().cards) == ["0000-11-00.0"]
    assert len(backend.health(card).failed) == 3
    with pytest.raises(CardGoneError):
        backend.open_port(card, card.regions[0])
    file.touch()
    again = backend.scan_card(CARD)
    assert [(r.id, r.grant) for r in again.regions] == [(r.id, r.grant) for r in card.regions]
    for before, now in zip(card.regions, again.regions, strict=True):
        assert now != before
        assert backend.afu_id(now)
        with pytest.raises(CardGoneError, match="no longer the port"):
            backend.afu_id(before)


def test_a_reader_sees_what_the_daemon_has(hardware, card, tmp_path):
    with hardware.backend.open_port(card, card.regions[0]) as port:
        port.program(RawImage(IMAGE))
    reader = simulated_backend(
        str(tmp_path), (SimulatedGroup(2, 3, INTERFACE),), pr_seconds=0, owner=False
    )
    seen = reader.backend.scan_card(CARD)
    as_the_daemon_has_it = [
        dataclasses.replace(there, handle=here.handle)
        for here, there in zip(seen.regions, card.regions, strict=True)
    ]
    assert seen == dataclasses.replace(card, regions=tuple(as_the_daemon_has_it))
    assert reader.backend.afu_id(seen.regions[0]) == AFU


def test_a_directory_that_cannot_be_made_names_the_setting(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="FPGA_PLUGIN_SIMULATED_DIR"):
        simulated_backend(
            str(tmp_path / "file"), (SimulatedGroup(1, 1, INTERFACE),), pr_seconds=0, owner=True
        )
