"""Memory that is cleared through the blank bitstream stays if that does not reach it.

It does not depend on what this run of the plugin has cleared: the journal says what is clear.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from doubles.alveo import BANK
from doubles.cards import AFU, BLANK, make_card
from doubles.xclbins import ALVEO
from ledger_scene import RememberedImages, Scene, scenes
from ledger_support import listed
from ledger_world import Plugin

from fpga_plugin.allocation.exposure import ExposurePolicy
from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards.blanks import Blanks
from fpga_plugin.hardware.image import Image, MemoryBank, RawImage, Xclbin
from fpga_plugin.ids import AfuId, BitstreamId, InterfaceId
from fpga_plugin.settings.settings import Exposure, ScrubPolicy

REQUIRED = ScrubPolicy.REQUIRED
ALL = 2 * BANK.size
BANKS = (BANK, replace(BANK, base=8 << 20), replace(BANK, base=9 << 20, used=False))
CARD = replace(make_card(), some_memory_stays=True, memory=ALL)
OLD = AfuId("0" * 31 + "7")


class Xclbins(RememberedImages):
    """A store with a blank xclbin, whose banks are these."""

    banks: tuple[MemoryBank, ...] = BANKS
    uuid = BLANK

    async def blank(
        self, interface_id: InterfaceId, takes: type[Image] = RawImage
    ) -> Bitstream | None:
        if await super().blank(interface_id, takes) is None:
            return None
        data = self.uuid.encode()
        image = Xclbin(data, self.uuid, ALVEO, (), False, 4096, self.banks)  # dataflow
        return Bitstream("/x", interface_id, BitstreamId(self.uuid), self.uuid, image)


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Xclbins:
    async def at_once(function: Callable[[], object]) -> object:
        return function()

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    return Xclbins()


def stays(blanks: Blanks, *on_it: AfuId | None) -> bool:
    blanks.forget(None)
    blank = asyncio.run(blanks.afu_id(CARD))
    return blanks.exposed(CARD, on_it, blank).some_memory_stays


@pytest.mark.parametrize(
    ("banks", "expected"), [(BANKS, False), (BANKS[:1], True), (BANKS[1:], True), ((), True)]
)
def test_memory_stays_that_the_blank_does_not_reach(
    images: Xclbins, banks: tuple[MemoryBank, ...], *, expected: bool
):
    images.banks = banks
    for on_it in (None, AFU, BLANK):
        assert stays(Blanks(images, REQUIRED), on_it) is expected


def test_the_blank_that_is_on_a_card_counts_not_the_stores(images: Xclbins):
    """By that one its memory was cleared."""
    blanks = Blanks(images, REQUIRED)
    images.uuid, images.banks = OLD, BANKS[:1]
    assert stays(blanks, OLD)
    images.uuid, images.banks = BLANK, BANKS
    assert stays(blanks, OLD)
    assert stays(blanks, BLANK, OLD), "of one region is enough"
    assert not stays(blanks, BLANK)
    assert not stays(blanks, AFU), "the next scrub takes the store's"


def test_without_a_blank_all_of_it_stays(images: Xclbins):
    images.has_blank = False
    assert stays(Blanks(images, REQUIRED), None)


def test_a_card_that_its_driver_clears_is_as_its_driver_says(images: Xclbins):
    card = make_card(clears_memory=True)
    assert Blanks(images, REQUIRED).exposed(card, (BLANK,), BLANK) is card


class Refusing(Scene):
    """A node that gives out no card whose memory stays, and what its blank reaches."""

    def __init__(self, banks: tuple[MemoryBank, ...] = BANKS) -> None:
        super().__init__(cards=[1], memory=True, resets=True)
        (board,) = self.rack.boards.values()
        board.card = replace(board.card, some_memory_stays=True, memory=ALL)
        self.store = Xclbins()
        self.store.banks = banks

    def power_on(self) -> None:
        self.operations.blanks._store = self.store  # type: ignore[assignment]  # as `Images` is
        self.ledger.obstacles.exposure = ExposurePolicy(uncleared_memory=Exposure.REFUSE)
        super().power_on()

    def begin_again(self) -> None:
        """The plugin's next life."""
        self.journal.dies_in = None
        self.plugin = Plugin(self.rack, self.pods, self.images, self.journal, scrub=REQUIRED)
        self.ledger, self.operations = self.plugin.ledger, self.plugin.operations
        self.power_on()


@pytest.fixture
def make() -> Iterator[Callable[..., Refusing]]:
    with scenes(Refusing) as make:
        yield make


def offered(scene: Scene) -> set[bool]:
    return {
        well for each in listed(scene.ledger, scene.plugin.lists).values() for well in each.values()
    }


def test_a_card_whose_blank_reaches_all_of_its_memory_is_given_out_again_and_again(make):
    scene = make()
    assert offered(scene) == {True}
    (region,) = scene.regions
    for _ in range(2):
        pod = scene.admit(region)
        scene.start(pod, AFU)
        pod.active = False
        scene.plugin.call(lambda pod=pod: scene.plugin.calls.deallocate(pod.resource, pod.devices))
        scene.plugin.work()
        assert ("memory", scene.rack.card_ids()[0]) in scene.rack.done
        assert offered(scene) == {True}


def test_and_by_the_next_life_of_the_plugin_before_it_has_cleared_anything(make):
    scene = make()
    scene.plugin.end()
    programs = scene.rack.programs
    scene.begin_again()
    assert scene.rack.programs == programs, "a clean card is left as it is"
    assert offered(scene) == {True}


def test_a_card_whose_blank_does_not_reach_all_is_given_to_nobody(make):
    scene = make(banks=BANKS[:1])
    assert scene.condition(scene.regions[0]) is Condition.BLANK
    assert offered(scene) == {False}
