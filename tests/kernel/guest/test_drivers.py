"""What a driver does, as the DFL code sees it: the real one and the one that simulated cards play.

On the host (`make test`) these are simulated cards, in the guest (`make test-kernel`) the real
drivers'. Where the two differ, the simulation is wrong.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import rack

from fpga_plugin.errors import (
    CardGoneError,
    HardwareError,
    PortInUseError,
    PortPoisonedError,
    ProgrammingError,
)
from fpga_plugin.hardware.backend import Backend, EventSource
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.dfl.handles import fme_of, port_of
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.linux import LinuxKernel
from fpga_plugin.hardware.model import Card
from fpga_plugin.hardware.simulated.kernel import SimulatedKernel
from fpga_plugin.hardware.simulated.uevents import SimulatedEvents
from fpga_plugin.hardware.udev import UdevEvents
from fpga_plugin.ids import CardId, InterfaceId
from fpga_plugin.settings.settings import SimulatedGroup

INTERFACE = InterfaceId(rack.daemon_support.ID)
CARD, OTHER = CardId(rack.daemon_support.CARD), CardId(rack.daemon_support.CARD_2)
AFU = "00112233445566778899aabbccddeeff"
AFU_BYTES = len(AFU) // 2
FACTORY = rack.daemon_support.FACTORY
DFL_PCI = "/sys/bus/pci/drivers/dfl-pci"


def image(size: int = 1000) -> bytes:
    return bytes.fromhex(AFU) + bytes(size - AFU_BYTES)


@dataclass
class Rig:
    """Two cards of three ports.

    Attributes:
        arm: cause trouble (words of the simulated cards); returns what ends it.
    """

    backend: Backend
    kernel: Kernel
    events: EventSource
    arm: Callable[[str, str], Callable[[], None]]

    def card(self, card: CardId = CARD) -> Card:
        found = self.backend.scan_card(card)
        assert isinstance(found, Card), found
        return found

    def unbind(self, card: CardId = CARD) -> None:
        self.kernel.write(f"{DFL_PCI}/unbind", rack.address(card))

    def bind(self, card: CardId = CARD) -> None:
        self.kernel.write(f"{DFL_PCI}/bind", rack.address(card))


def simulated(folder: Path) -> Rig:
    cards = (SimulatedGroup(2, 3, INTERFACE),)
    kernel = SimulatedKernel(str(folder), cards, pr_seconds=0, stuck_seconds=0.01)

    def arm(region: str, word: str) -> Callable[[], None]:
        file = folder / "faults" / region
        file.write_text(word)
        return file.unlink

    return Rig(DflBackend(kernel), kernel, SimulatedEvents(kernel), arm)


def real(_folder: Path) -> Rig:
    rack.lay_out("2x3")
    kernel = LinuxKernel("/sys", "/dev")

    def arm(region: str, word: str) -> Callable[[], None]:
        fault = rack.Fault(region, word)
        fault.arm()
        return fault.unlink

    return Rig(DflBackend(kernel), kernel, UdevEvents("/sys"), arm)


RIGS = {"real": real} if rack.DEBUGFS.exists() else {"simulated": simulated}
FIRMWARE = "0x120000177" if rack.DEBUGFS.exists() else "0x23000110010309"


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    yield RIGS[request.param](tmp_path)
    if request.param == "real":
        for card in rack.cards():
            rack.unplug(card)


def test_cards_are_found_with_their_regions(rig: Rig):
    found = rig.backend.scan()
    assert not found.problems
    assert list(found.cards) == [CARD, OTHER]
    for number, card in enumerate(found.cards.values()):
        assert (card.interface_id, card.numa_node) == (INTERFACE, number)
        assert (card.ports, card.complete, card.clears_memory) == (3, True, True)
        assert card.firmware == FIRMWARE
        assert fme_of(card).node == f"/dev/dfl-fme.{number}"
        assert [(region.id, str(region.grant)) for region in card.regions] == [
            (f"{card.id}-p{port}", f"/dev/dfl-port.{3 * number + port}") for port in range(3)
        ]
        assert {rig.backend.afu_id(region) for region in card.regions} == {FACTORY}
        assert rig.backend.scan_card(card.id) == card
        health = rig.backend.health(card)
        assert (dict(health.failed), health.degraded) == ({}, ())


@pytest.mark.parametrize("size", [1, 3, 16, 17, 4096, 2**20 + 1, 2**23, 2**25])
def test_an_image_of_any_size_is_streamed_and_seen(rig: Rig, size: int):
    card = rig.card()
    region = card.regions[2]
    with rig.backend.open_port(card, region) as port:
        port.reset()
        assert port.clear_errors() == {}
        sent = image(max(size, AFU_BYTES))[:size]
        port.program(sent)
        # Of a shorter image the card has what it was sent.
        seen = sent[:AFU_BYTES].ljust(AFU_BYTES, b"\0").hex()
        assert port.afu_id() == seen
    assert rig.backend.afu_id(region) == seen
    assert {rig.backend.afu_id(other) for other in card.regions[:2]} == {FACTORY}


def test_an_empty_image_never_reaches_the_driver(rig: Rig):
    card = rig.card()
    with rig.backend.open_port(card, card.regions[0]) as port, pytest.raises(ProgrammingError):
        port.program(b"")


def test_an_exclusive_port_is_nobody_elses(rig: Rig):
    card = rig.card()
    with rig.backend.open_port(card, card.regions[0]):
        with pytest.raises(PortInUseError):
            rig.backend.open_port(card, card.regions[0])
        with rig.backend.open_port(card, card.regions[1]):
            pass  # the others are free
    with rig.backend.open_port(card, card.regions[0]):
        pass  # it is free again


def test_a_port_that_a_tenant_has_open_is_in_use_until_it_is_closed(rig: Rig):
    card = rig.card()
    end = rig.arm(card.regions[1].id, "port-open")
    with pytest.raises(PortInUseError):
        rig.backend.open_port(card, card.regions[1])
    end()
    with rig.backend.open_port(card, card.regions[1]):
        pass


@pytest.mark.parametrize("word", ["pr-error", "pr-stuck"])
def test_a_failed_pr_poisons_its_port_until_a_rebind_and_no_other(rig: Rig, word: str):
    card = rig.card()
    region, other = card.regions[1], card.regions[0]
    rig.arm(region.id, word)
    with rig.backend.open_port(card, region) as port, pytest.raises(ProgrammingError):
        port.program(image())
    with pytest.raises(PortPoisonedError):
        rig.backend.afu_id(region)
    with rig.backend.open_port(card, region) as port:
        port.reset()  # the driver claims success
        port.program(image())  # here too
        with pytest.raises(PortPoisonedError):
            port.afu_id()
    assert list(rig.backend.health(card).failed) == [region.id]
    with rig.backend.open_port(card, other) as port:
        port.program(image())
        assert port.afu_id() == AFU
    rig.unbind()
    assert rig.backend.scan_card(CARD) is None
    with pytest.raises(CardGoneError):
        rig.backend.open_port(card, other)
    rig.bind()
    again = rig.card()
    assert not rig.backend.health(again).failed
    assert rig.backend.afu_id(again.regions[0]) == AFU  # a rebind loads nothing
    with rig.backend.open_port(again, again.regions[1]) as port:
        port.program(image())
        assert port.afu_id() == AFU


def test_a_reset_that_is_not_acknowledged_poisons_its_port_and_no_other(rig: Rig):
    card = rig.card()
    region = card.regions[1]
    end = rig.arm(region.id, "port-deaf")
    with rig.backend.open_port(card, region) as port:
        with pytest.raises(HardwareError, match="did not acknowledge"):
            port.reset()
        end()
        # The driver counts one reset too many from now on, and says that all is well.
        port.reset()
        port.program(image())
        with pytest.raises(PortPoisonedError):
            port.afu_id()
    assert list(rig.backend.health(card).failed) == [region.id]
    with rig.backend.open_port(card, card.regions[0]) as port:
        port.program(image())
        assert port.afu_id() == AFU
    rig.unbind()
    rig.bind()
    again = rig.card()
    assert not rig.backend.health(again).failed
    with rig.backend.open_port(again, again.regions[1]) as port:
        port.program(image())
        assert port.afu_id() == AFU


def test_a_pr_whose_port_does_not_acknowledge_streams_nothing_and_poisons_it(rig: Rig):
    card = rig.card()
    region = card.regions[1]
    with rig.backend.open_port(card, region) as port:
        end = rig.arm(region.id, "port-deaf")
        with pytest.raises(ProgrammingError, match="in time"):
            port.program(image())
        end()
    with pytest.raises(PortPoisonedError):
        rig.backend.afu_id(region)
    rig.unbind()
    rig.bind()
    assert rig.backend.afu_id(rig.card().regions[1]) == FACTORY


def test_closing_a_port_that_does_not_acknowledge_poisons_it(rig: Rig):
    card = rig.card()
    region = card.regions[1]
    with rig.backend.open_port(card, region):
        end = rig.arm(region.id, "port-deaf")
    end()
    with pytest.raises(PortPoisonedError):
        rig.backend.afu_id(region)


def test_a_region_in_ap6_has_failed_and_cannot_be_scrubbed_meanwhile(rig: Rig):
    card = rig.card()
    region = card.regions[1]
    end = rig.arm(region.id, "thermal")
    assert list(rig.backend.health(card).failed) == [region.id]
    with rig.backend.open_port(card, region) as port, pytest.raises(HardwareError, match="AP6"):
        port.clear_errors()
    end()
    assert not rig.backend.health(card).failed
    with rig.backend.open_port(card, region) as port:
        assert port.clear_errors() == {}


def test_a_dead_region_has_no_afu_id(rig: Rig):
    card = rig.card()
    end = rig.arm(card.regions[1].id, "fatal")
    assert list(rig.backend.health(card).failed) == [card.regions[1].id]
    with pytest.raises(HardwareError):
        rig.backend.afu_id(card.regions[1])
    end()
    assert not rig.backend.health(card).failed
    assert rig.backend.afu_id(card.regions[1]) == FACTORY


def test_node_numbers_are_the_lowest_that_are_free(rig: Rig):
    rig.unbind(CARD)
    rig.unbind(OTHER)
    assert not rig.backend.scan().cards
    rig.bind(OTHER)
    rig.bind(CARD)
    nodes = [[str(r.grant) for r in card.regions] for card in (rig.card(OTHER), rig.card(CARD))]
    assert nodes == [[f"/dev/dfl-port.{n + 3 * card}" for n in range(3)] for card in range(2)]


def test_a_card_that_goes_and_comes_is_told(rig: Rig):
    async def changes(do: Callable[[CardId], None]) -> None:
        told: asyncio.Queue[CardId | None] = asyncio.Queue()
        rig.events.start(told.put_nowait)
        try:
            await asyncio.to_thread(do, OTHER)
            assert await asyncio.wait_for(told.get(), 60) in {OTHER, None}
        finally:
            rig.events.close()

    asyncio.run(changes(rig.unbind))
    assert list(rig.backend.scan().cards) == [CARD]
    asyncio.run(changes(rig.bind))
    assert list(rig.backend.scan().cards) == [CARD, OTHER]


def test_a_card_that_went_and_came_back_is_another_one_under_the_same_numbers(rig: Rig):
    before = rig.card()
    region = before.regions[0]
    assert rig.card() == before
    rig.unbind()
    rig.bind()
    after = rig.card()
    for old, new in zip(before.regions, after.regions, strict=True):
        assert replace(port_of(new), instance=0) == replace(port_of(old), instance=0)
        assert new != old
    assert rig.backend.afu_id(after.regions[0]) == FACTORY
    with pytest.raises(CardGoneError):
        rig.backend.afu_id(region)
    with pytest.raises(CardGoneError):
        rig.backend.open_port(before, region)
    with rig.backend.open_port(after, after.regions[0]) as port:
        port.program(image())
        assert port.afu_id() == AFU


def test_memory_can_be_cleared(rig: Rig):
    rig.backend.clear_memory(rig.card())
