"""The plugin's code for Alveo cards on AMD's own drivers: each promise, and each trap of theirs."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import alveo
import pytest
from alveo import ALIEN, ALL, NO_UUID, A, Alveo, B, fails, holder
from doubles import alveo_files

from fpga_plugin.errors import (
    CardGoneError,
    HardwareError,
    PortInUseError,
    ProgrammingError,
)
from fpga_plugin.hardware.image import MemoryBank, Xclbin
from fpga_plugin.hardware.linux import LinuxKernel
from fpga_plugin.hardware.model import Card, CardProblem
from fpga_plugin.hardware.xrt.backend import XrtBackend
from fpga_plugin.hardware.xrt.defs import NO_IMAGE
from fpga_plugin.ids import AfuId, CardId, InterfaceId

pytestmark = pytest.mark.skipif(not alveo.MODULES, reason="the guest's: make test-alveo")

BANK = MemoryBank(tag="HBM[0]", type="HBM", used=True, on_card=True, base=1 << 20, size=16 << 20)
SECRET = b"\x5a" * alveo_files.CARD_MEMORY


def xclbin(uuid: UUID, *, banks: tuple[MemoryBank, ...] = ()) -> Xclbin:
    interface = alveo_files.OTHER_INTERFACE if uuid == ALIEN else alveo_files.INTERFACE
    return Xclbin(
        data=alveo.image(uuid),
        uuid=AfuId(uuid.hex),
        interface_id=InterfaceId(interface),
        kernels=(),
        dataflow=False,
        slot_size=0x1000,
        banks=banks,
    )


class Rig:
    """Two cards, and the plugin's backend."""

    def __init__(self, cards: list[Alveo]) -> None:
        self.cards = cards
        self.backend = XrtBackend(LinuxKernel("/sys", "/dev"))

    def card(self, number: int = 0) -> Card:
        found = self.backend.scan_card(CardId(self.cards[number].id))
        assert isinstance(found, Card), found
        return found

    def problem(self, number: int = 0) -> CardProblem:
        found = self.backend.scan_card(CardId(self.cards[number].id))
        assert isinstance(found, CardProblem), found
        return found

    def program(self, image: Xclbin, number: int = 0) -> None:
        card = self.card(number)
        with self.backend.open_port(card, card.regions[0]) as port:
            port.reset()
            assert port.clear_errors() == {}
            port.program(image)
            assert port.afu_id() == image.uuid

    def afu_id(self, number: int = 0) -> AfuId:
        return self.backend.afu_id(self.card(number).regions[0])


@pytest.fixture(scope="module")
def plugged() -> Iterator[list[Alveo]]:
    yield alveo.install(cards=2)
    alveo.remove()


@pytest.fixture
def rig(plugged: list[Alveo]) -> Rig:
    for card in plugged:
        card.fresh()
    return Rig(plugged)


@pytest.fixture
def ours(rig: Rig) -> Alveo:
    """The first card, past the plugin."""
    return rig.cards[0]


def test_cards_are_found_with_their_region(rig: Rig):
    found = rig.backend.scan()
    assert not found.problems
    assert list(found.cards) == [card.id for card in rig.cards]
    for card, fake in zip(found.cards.values(), rig.cards, strict=True):
        (region,) = card.regions
        assert card.interface_id == alveo_files.INTERFACE
        assert card.firmware == alveo_files.SHELL
        assert card.vendor_resource == f"amd.com/{alveo_files.SHELL}-0", "as AMD's plugin reads it"
        assert list(region.grant.nodes) == [fake.node]
        assert region.grant.env[f"FPGA_FUNCTIONS_{fake.id.replace('-', '_').replace('.', '_')}_P0"]
        assert rig.backend.numbers(region) == region.numbers
        assert rig.backend.afu_id(region) == A.hex
        health = rig.backend.health(card)
        assert (dict(health.failed), health.degraded) == ({}, ())


def test_an_image_is_programmed_read_back_and_masked(rig: Rig, ours: Alveo):
    rig.program(xclbin(B))
    assert (ours.uuid, ours.image, ours.mask) == (B, B, ALL)
    assert (rig.cards[1].image, rig.cards[1].mask) == (A, 0)
    with fails(110):
        ours.load(A)
    assert ours.image == B


def test_the_same_image_is_streamed_again(rig: Rig, ours: Alveo):
    before = ours.bursts
    rig.program(xclbin(A))
    assert ours.bursts > before


def test_what_pf0_programmed_behind_our_back_is_replaced(rig: Rig, ours: Alveo):
    rig.program(xclbin(A))
    ours.mgmt_load(B)
    assert (rig.afu_id(), ours.image) == (A.hex, B)  # the driver's record, not the fabric's
    rig.program(xclbin(A))
    assert (rig.afu_id(), ours.image) == (A.hex, A)


def test_a_failed_load_poisons_the_region_and_leaves_the_mask(rig: Rig, ours: Alveo):
    ours.set("stuck", 1)
    with pytest.raises(ProgrammingError, match="ETIMEDOUT"):
        rig.program(xclbin(B))
    assert rig.afu_id() == NO_IMAGE
    assert ours.mask == ALL
    ours.set("stuck", 0)
    rig.program(xclbin(B))
    assert (ours.uuid, ours.image) == (B, B)


def test_a_context_of_a_tenant_keeps_the_image(rig: Rig, ours: Alveo):
    with ours.opened() as tenant:
        ours.context(tenant, alveo.OPEN, A)
        with pytest.raises(PortInUseError):
            rig.program(xclbin(B))
        assert (ours.uuid, ours.image, ours.mask) == (A, A, ALL)
        ours.context(tenant, alveo.CLOSE, A)
    rig.program(xclbin(B))


def test_what_a_tenant_loads_once_the_mask_is_lost_is_seen(rig: Rig, ours: Alveo):
    rig.program(xclbin(A))
    ours.unbind("xclmgmt")
    ours.bind("xclmgmt")
    ours.settle()
    assert ours.mask == 0
    card = rig.card()
    ours.load(B)
    assert rig.afu_id() == B.hex
    assert rig.backend.guard(card, left=False)
    assert ours.mask == ALL
    assert rig.backend.guard(card, left=False) == ""


class Watched(LinuxKernel):
    """The guest's kernel; something happens before an attribute is written.

    Attributes:
        before: is called with the attribute and what is about to be written.
    """

    before: Callable[[str, str], None]

    def write(self, path: str, text: str) -> None:
        """As of `LinuxKernel`."""
        self.before(path.rpartition("/")[2], text)
        super().write(path, text)


def test_what_a_tenant_loads_between_our_load_and_the_mask_is_seen(rig: Rig, ours: Alveo):
    """He has the node open past his allocation: loads are let through for that moment."""
    kernel = Watched("/sys", "/dev")
    rig.backend = XrtBackend(kernel)
    loaded: list[int] = []

    def intrude(name: str, text: str) -> None:
        if (name, text) == (alveo.DISABLE, hex(ALL)):
            ours.load(B, force=True)
            loaded.append(1)

    kernel.before = intrude
    with pytest.raises(ProgrammingError, match=B.hex):
        rig.program(xclbin(A))
    assert loaded == [1], "it is not loaded over: somebody has the node"
    assert (ours.uuid, ours.image, ours.mask) == (B, B, ALL)


def test_a_reset_ends_the_tenant_and_the_region_is_the_same(rig: Rig, ours: Alveo):
    rig.program(xclbin(A))
    card, other = rig.card(), rig.card(1)
    before = ours.resets
    with holder(ours) as tenant:
        rig.backend.reset(card)
        assert tenant.wait(alveo.PATIENCE) == -signal.SIGBUS
    assert ours.resets == before + 1
    assert ours.mask == ALL
    assert rig.card().regions == card.regions
    assert rig.card(1).regions == other.regions
    assert rig.afu_id() == NO_IMAGE
    rig.program(xclbin(B))
    assert (ours.uuid, ours.image) == (B, B)


def test_a_reset_waits_for_a_tenant_who_ignores_its_end(rig: Rig, ours: Alveo):
    card, before = rig.card(), ours.resets
    with holder(ours, stubborn=True) as tenant:
        reset = threading.Thread(target=rig.backend.reset, args=[card])
        reset.start()
        time.sleep(5)
        assert reset.is_alive()
        assert ours.resets == before
        assert rig.card() == card  # as it was, for who asks meanwhile
        tenant.kill()
        reset.join(alveo.PATIENCE)
        assert not reset.is_alive()
    assert ours.resets == before + 1
    rig.program(xclbin(B))


def test_both_cards_are_reset_one_after_the_other_and_keep_their_nodes(rig: Rig):
    nodes = [card.node for card in rig.cards]
    resets = [
        threading.Thread(target=rig.backend.reset, args=[rig.card(number)]) for number in (1, 0)
    ]
    for reset in resets:
        reset.start()
    for reset in resets:
        reset.join(2 * alveo.PATIENCE)
        assert not reset.is_alive()
    assert [card.node for card in rig.cards] == nodes
    for number in (0, 1):
        rig.program(xclbin(B), number)
    assert [card.image for card in rig.cards] == [B, B]


def test_a_card_whose_reset_was_interrupted_is_a_problem_until_it_is_put_online(
    rig: Rig, ours: Alveo
):
    ours.shut_down()
    assert "shut down" in rig.problem().message
    rig.backend.bind(CardId(ours.id))
    assert ours.mask == ALL
    rig.program(xclbin(B))
    assert (ours.uuid, ours.image) == (B, B)


def test_the_banks_of_the_image_are_cleared_and_no_others(rig: Rig, ours: Alveo):
    ours.memory.write_bytes(SECRET)
    rig.program(xclbin(B, banks=(BANK,)))
    rig.backend.clear_memory(rig.card())
    held = ours.memory.read_bytes()
    end = BANK.base + BANK.size
    assert held[BANK.base : end].count(0) == BANK.size
    assert held[: BANK.base] == SECRET[: BANK.base]
    assert held[end:] == SECRET[end:]
    assert rig.card().some_memory_stays


def test_memory_that_cannot_be_written_is_not_called_clear(rig: Rig, ours: Alveo):
    rig.program(xclbin(B, banks=(BANK,)))
    ours.set("dma", 1)
    with pytest.raises(HardwareError, match="cannot be written"):
        rig.backend.clear_memory(rig.card())


@pytest.mark.parametrize("driver", ["xocl", "xclmgmt"])
def test_a_card_without_one_of_its_drivers_is_a_problem(rig: Rig, ours: Alveo, driver: str):
    before = rig.card()
    ours.unbind(driver)
    assert "no driver" in rig.problem().message
    if driver == "xocl":
        with pytest.raises(CardGoneError):
            rig.backend.open_port(before, before.regions[0])
    ours.bind(driver)
    ours.settle()
    rig.program(xclbin(B))
    assert rig.card(1)


def test_after_a_new_binding_of_xocl_it_is_another_card(rig: Rig, ours: Alveo):
    before = rig.card()
    ours.unbind("xocl")
    ours.bind("xocl")
    ours.settle()
    with pytest.raises(CardGoneError):
        rig.backend.afu_id(before.regions[0])
    assert rig.card().regions != before.regions


def test_the_drivers_do_not_show_pf0s_own_reset(rig: Rig, ours: Alveo):
    """`dev_offline` of PF0 reads 0 throughout `mgmt_reset`: no look can see it."""
    card, before = rig.card(), ours.resets
    looks: list[bool] = []
    with ThreadPoolExecutor() as pool:
        reset = pool.submit((ours.pf0 / "mgmt_reset").write_text, "1")
        while not reset.done():
            looks.append(bool(rig.backend.health(card).failed))
        reset.result()
    assert ours.resets == before + 1
    assert looks
    assert not any(looks)


def test_readings_and_assumptions_read_nothing_that_hurts_the_driver(rig: Rig, ours: Alveo):
    """`ulp_uuids` with nothing loaded would end the guest."""
    ours.shut_down()
    ours.come_back()
    assert ours.uuid in {None, NO_UUID}
    card = rig.card()
    rig.backend.readings(card)
    rig.backend.assumptions(card.id)
    rig.backend.functions(card.id)
    rig.backend.port_errors(card.regions[0])
