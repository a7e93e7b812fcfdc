"""What is noticed of cards that changed while nobody was told."""

from collections.abc import Callable, Iterator

import pytest
from doubles.cards import AFU, BLANK, REGIONS, WHOLE
from ledger_scene import Scene, scenes
from ledger_support import listed, trouble
from ledger_world import FACTORY

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.allocation.names import card_of
from fpga_plugin.errors import FpgaPluginError


@pytest.fixture
def scene() -> Iterator[Scene]:
    with scenes() as make:
        yield make()


def one(scene: Scene) -> None:
    scene.plugin.begin(scene.plugin.hardware.check(card_of(scene.regions[0])))
    scene.plugin.work()


def every(scene: Scene) -> None:
    scene.plugin.begin(scene.plugin.hardware.check_all())
    scene.plugin.work()


def full_scan(scene: Scene) -> None:
    scene.plugin.call(lambda: scene.plugin.hardware.changed(None))
    scene.plugin.work()


def pass_a_second(scene: Scene) -> None:
    begun = scene.plugin.loop.time()
    while scene.plugin.loop.time() <= begun and scene.plugin.loop.pass_time():
        scene.plugin.work()


LOOKS = pytest.mark.parametrize("look", [one, every, full_scan])


@LOOKS
def test_a_card_that_went_and_came_back_unseen_is_another_card(
    scene: Scene, look: Callable[[Scene], None]
):
    tenants, free, other_card = scene.regions
    scene.start(scene.admit(tenants), AFU)
    scene.swap(card_of(tenants), told=False)
    scene.rack.slot(tenants).afu = AFU
    scene.rack.slot(free).afu = BLANK
    look(scene)
    pass_a_second(scene)
    assert scene.logged.count("card went and came back") == 1
    assert scene.rack.accepted == [card_of(tenants)], "errors are counted from the new card's on"
    assert scene.condition(tenants) is Condition.DIRTY
    assert scene.condition(free) is Condition.BLANK, "scrubbed again"
    assert not scene.rack.slot(free).data
    assert scene.rack.slot(tenants).data, "not touched under its owner"
    assert scene.condition(other_card) is Condition.BLANK
    assert listed(scene.ledger, scene.plugin.lists)[REGIONS][tenants], "an owner keeps his device"
    scene.start(scene.pods[0], AFU)
    assert not scene.rack.slot(tenants).data


@LOOKS
@pytest.mark.parametrize("started", [True, False])
def test_an_owned_region_that_somebody_else_programmed_is_told_and_stays_on_the_list(
    scene: Scene, look: Callable[[Scene], None], *, started: bool
):
    scene.hold_releases()
    region = scene.regions[0]
    pod = scene.admit(region)
    if started:
        scene.start(pod, AFU)
    else:
        scene.prepare(pod, AFU).cancel()
        scene.plugin.work()
    scene.rack.slot(region).afu = FACTORY
    look(scene)
    look(scene)
    assert scene.logged.count("region changed by another process") == 1
    assert scene.condition(region) is Condition.DIRTY
    assert listed(scene.ledger, scene.plugin.lists)[REGIONS][region]
    assert scene.rack.slot(region).afu == FACTORY, "nothing is scrubbed under an owner"
    if not started:
        with pytest.raises(FpgaPluginError, match="changed after it was prepared"):
            scene.start(pod, AFU)
    before = scene.rack.programs
    scene.start(pod, AFU)
    assert scene.rack.programs - before == 2, "scrubbed, then programmed"


@pytest.mark.parametrize("look", [one, every])
def test_an_owned_region_whose_id_cannot_be_read_is_a_matter_of_its_health(
    scene: Scene, look: Callable[[Scene], None]
):
    region = scene.regions[0]
    scene.start(scene.admit(region), AFU)
    scene.rack.slot(region).afu = None
    look(scene)
    assert scene.condition(region) is Condition.PROGRAMMED
    assert trouble(scene.ledger, region).startswith("poisoned")


@pytest.mark.parametrize("look", [one, every])
def test_a_free_region_that_cannot_be_read_was_changed_by_nobody(
    scene: Scene, look: Callable[[Scene], None]
):
    region = scene.regions[0]
    scene.rack.slot(region).afu = None
    look(scene)
    assert "region changed by another process" not in scene.logged
    record = scene.ledger.record(region)
    assert (record.condition, record.afu_id) == (Condition.DIRTY, None), "it is scrubbed, if ever"
    assert "process" not in record.reason


@pytest.mark.parametrize("during", ["health", "afu_id"])
def test_signals_of_a_card_that_was_replaced_while_they_were_read_are_not_its_successors(
    scene: Scene, during: str
):
    region = scene.regions[0]
    card = card_of(region)
    scene.rack.slot(region).failing = "thermal: AP6"
    scene.plugin.begin(scene.plugin.hardware.check(card))
    read = getattr(scene.rack, during)
    last = scene.rack.boards[card].card.regions[-1]

    def replaced(asked):
        found = read(asked)
        if during == "afu_id" and asked != last:
            return found
        setattr(scene.rack, during, read)
        scene.rack.slot(region).failing = ""
        scene.swap(card, told=False)
        scene.plugin.begin(scene.plugin.hardware.look(card))
        scene.until(lambda: "card went and came back" in scene.logged)
        return found

    setattr(scene.rack, during, replaced)
    scene.plugin.work()
    pass_a_second(scene)
    assert not trouble(scene.ledger, region)
    assert "region unhealthy" not in scene.logged
    assert all(scene.condition(r) is Condition.BLANK for r in scene.regions)


def test_a_card_that_flickers_is_looked_at_again_and_is_not_offered_meanwhile(scene: Scene):
    region = scene.regions[0]
    card = card_of(region)
    read = scene.rack.afu_id
    looks: list[float] = []

    def flickers(asked):
        if asked.card == card and len(looks) < 3:
            looks.append(scene.plugin.loop.time())
            scene.swap(card, told=False)
        return read(asked)

    scene.rack.afu_id = flickers
    scene.plugin.call(lambda: scene.plugin.hardware.changed(card))
    scene.plugin.work()
    assert card not in scene.ledger.cards
    assert card not in listed(scene.ledger, scene.plugin.lists)[WHOLE]
    for _ in range(5):
        pass_a_second(scene)
    assert looks == [0.0, 1.0, 2.0]
    assert all(scene.condition(r) is Condition.BLANK for r in scene.regions)
    assert not scene.rack.slot(region).data
