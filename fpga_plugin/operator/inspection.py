"""`card show`: what a card's hardware says now, beside what the plugin knows of it.

Reads only, and no port is opened for it: a container that has a region does not notice.
"""

from collections.abc import Mapping
from typing import cast

from fpga_plugin.errors import FpgaPluginError, NotFinishedError, UnknownDeviceError, quote
from fpga_plugin.hardware.model import Card, Readings
from fpga_plugin.ids import CardId
from fpga_plugin.operator.schema import InspectionView, ReadingView
from fpga_plugin.operator.survey import Operation, Survey
from fpga_plugin.operator.view import view
from fpga_plugin.plugin import Plugin

EVENTS = 20
"""Of the card's history that are shown."""


def inspection(survey: Survey) -> Operation:
    """The operation, for the local socket."""

    async def operation(card: str) -> Mapping[str, object]:
        return cast("Mapping[str, object]", await _inspect(survey, card))

    return operation


async def _inspect(survey: Survey, wanted: str) -> InspectionView:
    """Look at a card.

    Raises:
        NotFinishedError: the plugin is still starting.
        UnknownDeviceError: there is no such card.
    """
    plugin = survey.plugin
    if plugin is None:
        raise NotFinishedError("the plugin is starting: try again in a moment")
    shown = [card for card in (await view(survey))["cards"] if card["card"] == wanted]
    if not shown:
        raise UnknownDeviceError(
            f"no card {quote(wanted)} on this node", hint="`fpga-plugin status` lists them"
        )
    card_id = CardId(shown[0]["card"])
    card = plugin.ledger.cards.get(card_id)
    readings = (await survey.readings()).get(card_id, Readings())
    return {
        "card": shown[0],
        "errors": dict(readings.errors),
        "regions": [] if card is None else await _afu_ids(survey, plugin, card),
        "events": await survey.past.events(card_id, most=EVENTS),
    }


async def _afu_ids(survey: Survey, plugin: Plugin, card: Card) -> list[ReadingView]:
    """What each region's AFU id reads now."""

    def read() -> list[tuple[str, str]]:
        found = []
        for region in card.regions:
            try:
                found.append((str(plugin.node.backend.afu_id(region)), ""))
            except FpgaPluginError as error:
                found.append(("", str(error)))
        return found

    try:
        found = await plugin.node.reads.run(card.id, read)
    except FpgaPluginError as error:
        found = [("", str(error))] * len(card.regions)
    return [
        {
            "region": region.id,
            "afu_id": afu_id,
            "bitstream": survey.catalogue.name(afu_id),
            "error": error,
        }
        for region, (afu_id, error) in zip(card.regions, found, strict=True)
    ]
