"""Memory that is cleared through the blank bitstream stays if that does not reach it.

It does not depend on what this run of the plugin has cleared: the journal says what is clear.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from doubles.alveo import BANK
from doubles.cards import AFU, BLANK, INTERFACE, make_card
from doubles.xclbins import ALVEO
from ledger_scene import RememberedImages, Scene, scenes
from ledger_support import listed
from ledger_world import Plugin, Pod

from fpga_plugin.allocation.exposure import ExposurePolicy
from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards.blanks import Blanks
from fpga_plugin.hardware.image import Image, MemoryBank, RawImage, Xclbin
from fpga_plugin.ids import AfuId, BitstreamId, CardId, InterfaceId
from fpga_plugin.settings.settings import Advertise, Exposure, ScrubPolicy

REQUIRED = ScrubPolicy.REQUIRED
ALL = 2 * BANK.size
BANKS = (BANK, replace(BANK, base=8 << 20), replace(BANK, base=9 << 20, used=False))
CARD = replace(make_card(), some_memory_stays=True, memory=ALL)
OLD = AfuId("0" * 31 + "7")
NEW = AfuId("0" * 31 + "8")


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

    def __init__(
        self,
        banks: tuple[MemoryBank, ...] = BANKS,
        *,
        has_blank: bool = True,
        scrub: ScrubPolicy = REQUIRED,
        advertise: Advertise = Advertise.BOTH,
    ) -> None:
        super().__init__(cards=[1], memory=True, resets=True, scrub=scrub, advertise=advertise)
        (board,) = self.rack.boards.values()
        board.card = replace(board.card, some_memory_stays=True, memory=ALL)
        self.store = Xclbins()
        self.store.banks, self.store.has_blank = banks, has_blank

    def install(self, uuid: AfuId, banks: tuple[MemoryBank, ...] = BANKS) -> None:
        """The operator installs another blank."""
        self.store.uuid, self.store.banks, self.store.has_blank = uuid, banks, True
        self.plugin.loop.call_soon(self.plugin.scrubber.blank_changed, INTERFACE)

    def go_on(self) -> None:
        self.plugin.loop.settle()
        self.plugin.work()
        for _ in range(20):
            self.plugin.loop.pass_time()
            self.plugin.work()

    def leave(self, pod: Pod) -> None:
        pod.active = False
        self.plugin.call(lambda: self.plugin.calls.deallocate(pod.resource, pod.devices))

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
        scene.leave(pod)
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


@pytest.mark.parametrize("has_blank", [True, False])
def test_until_a_better_blank_is_installed(make, *, has_blank: bool):
    scene = make(banks=BANKS[:1], has_blank=has_blank, scrub=ScrubPolicy.BEST_EFFORT)
    assert offered(scene) == {False}
    scene.install(NEW)
    scene.go_on()
    assert scene.ledger.record(scene.regions[0]).afu_id == NEW
    assert offered(scene) == {True}


def test_another_blank_that_does_not_reach_all_either_is_tried_once(make):
    scene = make(banks=BANKS[:1])
    programs = scene.rack.programs
    scene.install(NEW, BANKS[:1])
    scene.go_on()
    scene.plugin.begin(scene.plugin.hardware.scan())
    scene.go_on()
    assert scene.rack.programs == programs + 1
    assert offered(scene) == {False}


def test_a_region_that_is_out_of_service_is_not_scrubbed_for_it_at_each_look(make):
    scene = make(banks=BANKS[:1])
    (region,) = scene.regions
    scene.plugin.call(lambda: scene.ledger.work.faulted(region, "it does not answer"))
    programs = scene.rack.programs
    scene.plugin.begin(scene.plugin.hardware.scan())
    scene.plugin.loop.call_soon(scene.plugin.queue.add, scene.rack.card_ids()[0])
    scene.go_on()
    assert scene.condition(region) is Condition.FAULTED
    assert scene.rack.programs == programs


def test_a_clean_card_whose_blank_reached_all_is_left_as_it_is(make):
    scene = make()
    programs = scene.rack.programs
    scene.install(NEW, BANKS[:1])
    scene.go_on()
    assert scene.rack.programs == programs
    assert offered(scene) == {True}


def test_a_card_that_keeps_its_function_is_left_as_it_is(make):
    scene = make(advertise=Advertise.AF)
    scene.install(NEW)
    scene.go_on()
    assert scene.rack.programs == 0
    assert not scene.rack.done


def test_an_owned_card_is_left_as_it_is_until_it_is_free(make):
    """Its pod has not begun."""
    scene = make()
    pod = scene.admit(scene.regions[0])
    scene.install(BLANK, BANKS[:1])
    scene.go_on()
    scene.plugin.begin(scene.plugin.hardware.scan())
    scene.go_on()
    (card,) = scene.ledger.cards.values()
    assert card.some_memory_stays
    programs = scene.rack.programs
    scene.install(NEW)
    scene.go_on()
    assert scene.rack.programs == programs
    scene.leave(pod)
    scene.go_on()
    assert scene.rack.programs == programs + 1
    assert offered(scene) == {True}


@pytest.mark.parametrize(
    ("first", "then"), [((OLD, BANKS[:1]), (NEW, BANKS)), ((OLD, BANKS), (NEW, BANKS[:1]))]
)
def test_the_blank_that_cleared_a_card_counts_not_one_that_was_installed_meanwhile(
    make, first: tuple[AfuId, tuple[MemoryBank, ...]], then: tuple[AfuId, tuple[MemoryBank, ...]]
):
    scene = make()
    (region,) = scene.regions
    pod = scene.admit(region)
    scene.start(pod, AFU)
    scene.install(*first)
    scene.go_on()
    seen: dict[AfuId | None, set[bool]] = {}

    def installed_during_the_reset() -> None:
        scene.on_touch = lambda: None
        scene.install(*then)

    def note(_card: CardId | None) -> None:
        if scene.condition(region) is Condition.BLANK:
            seen.setdefault(scene.ledger.record(region).afu_id, set()).update(offered(scene))

    scene.on_touch = installed_during_the_reset
    scene.ledger.subscribe(note)
    scene.leave(pod)
    scene.go_on()
    assert seen.pop(OLD) == {first[1] is BANKS}
    # A card that its blank cleared is not programmed again; else the better one clears it at once.
    assert seen == ({} if first[1] is BANKS else {NEW: {True}})
    assert offered(scene) == {True}
