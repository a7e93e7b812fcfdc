"""What the operator may do to a card through the local socket, and the answers for JSON."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from fpga_plugin.cards.actions import CardState
from fpga_plugin.cards.byhand import Programmed
from fpga_plugin.errors import FpgaPluginError, InvalidRequestError, UnknownDeviceError, quote
from fpga_plugin.hardware.model import Card, Readings
from fpga_plugin.ids import CardId
from fpga_plugin.observability.device_owners import by_device, who
from fpga_plugin.observability.node_facts import function_view
from fpga_plugin.observability.schema import (
    CardStateView,
    InspectionView,
    ProgrammedView,
    ReadingView,
)
from fpga_plugin.observability.status_context import StatusContext
from fpga_plugin.observability.view import learn_names, view
from fpga_plugin.plugin import Plugin

EVENTS = 20
"""Of a card's history that `card show` has."""


async def operate(context: StatusContext, word: str, card: str) -> Mapping[str, object]:
    """Do to a card what the command line's word says.

    Raises:
        NotFinishedError: the plugin is still starting.
        InvalidRequestError: there is no such operation.
        FpgaPluginError: it is refused, or failed; see `CardActions`.
    """
    plugin = context.running()
    actions = plugin.actions
    services: Mapping[str, Callable[[str], Awaitable[CardState]]] = {
        "drain": actions.drain,
        "undrain": partial(actions.drain, drained=False),
        "retry": actions.retry,
        "release": actions.release,
    }
    if (service := services.get(word)) is not None:
        return {**await _state(plugin, await service(card))}
    match word:
        case "functions-make" | "functions-remove":
            found = await actions.functions(card, make=word == "functions-make")
            return {"card": card, "functions": [function_view(one) for one in found]}
        case "inspect":
            return {**await _inspect(context, plugin, card)}
    raise InvalidRequestError(f"there is no operation {quote(word)}")


async def _state(plugin: Plugin, state: CardState) -> CardStateView:
    """How far a card is from being pulled, and whose devices wait for that."""
    if state.owners:
        await learn_names(plugin.ledger, plugin.node.pods)
    held = by_device(plugin.ledger)
    return {
        "card": state.card,
        "present": state.present,
        "drained": state.drained,
        "may_be_pulled": state.may_be_pulled,
        "holders": [
            {
                **who(holder.device, holder.pod, held, plugin.node.pods.known),
                "device": holder.device,
                "resource": holder.resource,
                "started": holder.used,
                "since": holder.since or None,
            }
            for holder in state.owners
        ],
        "waits_for": list(state.waits_for),
        "not_clean": list(state.not_clean),
    }


async def _inspect(context: StatusContext, plugin: Plugin, wanted: str) -> InspectionView:
    """A card as its hardware shows it now, beside what the plugin knows of it.

    Reads only, and no port is opened for it: a container that has a region does not notice.

    Raises:
        UnknownDeviceError: there is no such card.
    """
    shown = [card for card in (await view(context))["cards"] if card["card"] == wanted]
    if not shown:
        raise UnknownDeviceError(
            f"no card {quote(wanted)} on this node", hint="`fpga-plugin status` lists them"
        )
    card_id = CardId(shown[0]["card"])
    card = plugin.ledger.cards.get(card_id)
    readings = (await context.readings()).get(card_id, Readings())
    return {
        "card": shown[0],
        "errors": dict(readings.errors),
        "regions": [] if card is None else await _afu_ids(context, plugin, card),
        "events": await context.history.events(card_id, most=EVENTS),
    }


async def _afu_ids(context: StatusContext, plugin: Plugin, card: Card) -> list[ReadingView]:
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
            "bitstream": context.catalogue.name(afu_id),
            "error": error,
        }
        for region, (afu_id, error) in zip(card.regions, found, strict=True)
    ]


async def program(context: StatusContext, asked: Mapping[str, str]) -> ProgrammedView:
    """Program a region by hand; `asked` has `id`, `card`, `region` and `bitstream`.

    Raises:
        NotFinishedError: the plugin is still starting.
        FpgaPluginError: it is refused, or failed; see `HandProgrammer`.
    """
    done = await context.running().by_hand.program(
        asked["id"], card=asked["card"], region=asked["region"], bitstream=asked["bitstream"]
    )
    return _programmed(done)


def _programmed(done: Programmed | None) -> ProgrammedView:
    """None: not finished."""
    if done is None:
        return {
            "finished": False,
            "region": "",
            "afu_id": "",
            "name": "",
            "clock": None,
            "steps": {},
        }
    return {
        "finished": True,
        "region": done.region,
        "afu_id": done.afu_id,
        "name": done.name,
        "clock": {"state": done.clock.state.value, "detail": done.clock.detail},
        "steps": {name: round(seconds, 6) for name, seconds in done.steps},
    }
