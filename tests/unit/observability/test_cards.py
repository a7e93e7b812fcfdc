"""The cards as status, page and metrics show them (`observability/cards.py`)."""

import re
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import cast

import pytest
from doubles.cards import BLANK, REGIONS, WHOLE
from ledger_support import make_ledger
from ledger_world import Cgroups, Checkpoint, Images, Nobody, NoLink, Rack, Reads
from obstacle_reasons import BOARD, CARD, D0, D1, R0, R1, REASONS, tenancy

from fpga_plugin.allocation.exposure import ExposurePolicy
from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.obstacles import Obstacle, ObstacleKind, Stops
from fpga_plugin.cards.workers import CardWorkers
from fpga_plugin.deviceplugin.link import KubeletLink
from fpga_plugin.hardware.model import Iommu
from fpga_plugin.observability.cards import look
from fpga_plugin.observability.schema import CardView
from fpga_plugin.observability.status_context import StatusContext
from fpga_plugin.observability.table import reasons
from fpga_plugin.plugin import NodeParts, Plugin
from fpga_plugin.settings.settings import Advertise, Exposure, Settings


class Link(NoLink):
    """Kubelet has both resources."""

    status = MappingProxyType({REGIONS: "registered", WHOLE: "registered"})


def plugin_on(ledger: Ledger, advertise: Advertise = Advertise.BOTH) -> Plugin:
    settings = Settings(advertise=advertise, kubelet_dir="/nowhere")
    node = NodeParts(
        backend=Rack([], lambda _: None),  # type: ignore[arg-type]
        store=Images(),  # type: ignore[arg-type]
        pods=Checkpoint([]),
        cgroups=Cgroups([]),  # type: ignore[arg-type]
        workers=CardWorkers(lambda _: None),
        reads=Reads(),
    )
    return Plugin(settings, node, ledger, cast(KubeletLink, Link()), Nobody())


def shown(plugin: Plugin) -> CardView:
    (card,) = look(StatusContext(plugin.settings), plugin, {})
    return card


def untranslated(ledger: Ledger) -> None:
    ledger.obstacles.exposure = ExposurePolicy(untranslated_dma=Exposure.REFUSE)
    ledger.show(replace(CARD, iommu=Iommu.NONE))
    ledger.notify([CARD.id])


def half(ledger: Ledger) -> None:
    ledger.hardware.card_found(replace(CARD, regions=CARD.regions[:1]), {R0: BLANK}, BLANK)


def stranger(ledger: Ledger) -> None:
    """A pod that has the other region was given this one's node, before the numbers changed."""
    ledger.commit(tenancy(R1, *CARD.regions[0].grant.nodes, left=False))


CAUSES: list[tuple[ObstacleKind, Callable[[Ledger], object]]] = [
    *REASONS.items(),
    (ObstacleKind.EXPOSED, untranslated),
    (ObstacleKind.INCOMPLETE, half),
    (ObstacleKind.MEMORY, lambda one: one.work.set_memory_clear_pending(CARD.id, open_=True)),
    (ObstacleKind.STRANGER, stranger),
]
UNHEALTHY = [case for case in CAUSES if case[0].stops & (Stops.OFFER | Stops.OWNER)]
WORDS = {
    ObstacleKind.EXPOSED: "its IOMMU mode is ",
    ObstacleKind.MEMORY: "memory is not cleared yet",
}
"""Of what the card's row says in words of its own."""


def why(one: Obstacle) -> str:
    """What an obstacle says of its subject, which ends with the name of a card or region."""
    return re.split(rf"{CARD.id}\S* ", one.message, maxsplit=1)[1]


def test_each_kind_that_makes_a_device_unhealthy_is_among_the_cases():
    stopping = {kind for kind in ObstacleKind if kind.stops & (Stops.OFFER | Stops.OWNER)}
    assert stopping == {kind for kind, _ in UNHEALTHY}


@pytest.mark.parametrize(
    ("advertise", "owned"),
    [
        (Advertise.BOTH, None),
        (Advertise.BOTH, D0),
        (Advertise.BOTH, BOARD),
        (Advertise.WHOLE, None),
        (Advertise.WHOLE, BOARD),
    ],
)
@pytest.mark.parametrize(("kind", "cause"), UNHEALTHY)
def test_no_region_is_unhealthy_without_a_word_why(kind, cause, owned, advertise):
    ledger, _ = make_ledger(CARD)
    plugin = plugin_on(ledger, advertise)
    assert [one["healthy"] for one in shown(plugin)["regions"]] == [True, True]
    if owned is not None and kind is not ObstacleKind.RESOURCE_CLAIM:
        ledger.device_plugin.allocate(WHOLE if owned == BOARD else REGIONS, [owned])
    cause(ledger)
    for card in look(StatusContext(plugin.settings), plugin, {}):
        for region in card["regions"]:
            said = "; ".join((card["note"], card["passing"], *reasons(region)))
            stops = Stops.OFFER if region["owner"] is None else Stops.OWNER
            devices = (region["region"], BOARD)
            against = {each for one in devices for each in ledger.obstacles.of(one)}
            if not region["healthy"]:
                assert any(
                    (one.cause or WORDS.get(one.kind, why(one))) in said
                    or (one.kind is ObstacleKind.NOT_CLEAN and region["condition"] == "DIRTY")
                    for one in against
                ), said
            if any(one.kind is kind for one in ledger.obstacles.against(stops, region["region"])):
                assert not region["healthy"]


def test_what_the_cards_row_says_is_not_said_of_each_region_again():
    for cause in (
        half,
        untranslated,
        REASONS[ObstacleKind.FOREIGN],
        REASONS[ObstacleKind.UNRECONCILED],
    ):
        ledger, _ = make_ledger(CARD)
        cause(ledger)
        card = shown(plugin_on(ledger))
        assert card["note"] or card["passing"]
        assert {one["reason"] for one in card["regions"]} == {""}


def test_an_owned_region_that_is_gone_from_its_card_is_shown_with_the_reason():
    ledger, _ = make_ledger(CARD)
    ledger.device_plugin.allocate(REGIONS, [D1])
    half(ledger)
    first, second = shown(plugin_on(ledger))["regions"]
    assert (first["region"], first["reason"]) == (R0, "")
    assert (second["region"], second["healthy"]) == (R1, False)
    assert f"region {R1} is gone from its card" in second["reason"]


def test_of_whole_cards_alone_a_region_is_as_healthy_as_its_card():
    ledger, _ = make_ledger(CARD)
    plugin = plugin_on(ledger, Advertise.WHOLE)
    assert [one["healthy"] for one in shown(plugin)["regions"]] == [True, True]
    ledger.work.dirty([R0], "so")
    assert [(one["healthy"], one["reason"]) for one in shown(plugin)["regions"]] == [
        (False, "so"),
        (False, f"region {R0} is not clean yet: so"),
    ]


def test_what_a_scrub_waits_for_is_said_with_what_to_do():
    ledger, _ = make_ledger(CARD)
    ledger.work.dirty([R0], "its owner left")
    ledger.keep_back([CARD.id])
    reason, other = (one["reason"] for one in shown(plugin_on(ledger))["regions"])
    assert reason.startswith(
        f"its owner left; its scrub waits: who has card {CARD.id} is not known"
    )
    assert reason.endswith("(the plugin's log says what keeps it from reading them)")
    assert other == ""
