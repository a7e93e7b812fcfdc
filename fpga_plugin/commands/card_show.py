"""`fpga-plugin card show`: a card's functions, what would be done with it, what is assumed of it.

It reads what anybody may read: sysfs, the store, the journal and kubelet's checkpoint. It opens no
device node, writes nothing, and needs no running plugin. Of one card it asks the plugin that runs
here, too, what the hardware says now. Without CARD nothing names a pod: that text may be sent to
others, by owners of cards that nobody has tried.
"""
# ruff: noqa: T201  # a command prints

import argparse
import json
import os
import textwrap
import time
from typing import TypedDict

from fpga_plugin import __version__
from fpga_plugin.build import open_hardware
from fpga_plugin.commands.card_list import cards_elsewhere
from fpga_plugin.errors import FpgaPluginError, RefusedError, UnknownDeviceError, quote
from fpga_plugin.hardware.backend import Backend
from fpga_plugin.hardware.model import AssumptionVerdict, Card, CardProblem
from fpga_plugin.ids import CardId, functions_variable, with_name
from fpga_plugin.observability.client import NoDaemonError, ask
from fpga_plugin.observability.node_facts import NodeCard, NodeFacts, function_view, look, resources
from fpga_plugin.observability.schema import FunctionView, InspectionView
from fpga_plugin.observability.table import functions_table, inspection_table, printable
from fpga_plugin.settings.settings import Advertise, Settings, defaults

_WIDTH = 100
_DECIDE = (
    "FPGA_PLUGIN_MODE",
    "FPGA_PLUGIN_BACKEND",
    "FPGA_PLUGIN_CARDS",
    "FPGA_PLUGIN_ADVERTISE",
    "FPGA_PLUGIN_INTERFACE_ALIASES",
    "FPGA_PLUGIN_SLOT_FUNCTIONS",
    "FPGA_PLUGIN_SLOT_IDENTITY",
    "FPGA_PLUGIN_SCRUB",
    "FPGA_PLUGIN_RECOVERY",
    "FPGA_PLUGIN_TRUST",
    "FPGA_PLUGIN_UNCLEARED_MEMORY",
    "FPGA_PLUGIN_UNTRANSLATED_DMA",
)
"""Settings that say what is done to a card. None of them names a person, a pod or a host."""
_MARKS = {
    AssumptionVerdict.HOLDS: "+",
    AssumptionVerdict.FAILS: "-",
    AssumptionVerdict.UNKNOWN: "?",
}


class AssumptionView(TypedDict):
    """One assumption; `verdict` is `holds`, `does not hold` or `cannot be told`."""

    says: str
    verdict: str
    seen: str


class RegionContents(TypedDict):
    """What a region shows; `name` is what the store's manifest calls it, and may be empty."""

    region: str
    afu_id: str
    name: str
    error: str


class CardShown(TypedDict):
    """One card; `problem` is why it is not served, empty where it is.

    `interface_id` is empty where the card shows none; `interface_alias` is what the store's
    manifest calls it, and may be empty. `holds` is what is on its regions. `assumptions` is empty
    unless they were asked for.
    """

    card: str
    description: str
    interface_id: str
    interface_alias: str
    holds: list[RegionContents]
    problem: str
    functions: list[FunctionView]
    would: list[str]
    assumptions: list[AssumptionView]


class Shown(TypedDict):
    """Everything; `settings` are those that decide what would be done.

    `now` is what the plugin that runs here says of the card that was named; null without one.
    """

    version: str
    kernel: str
    machine: str
    settings: dict[str, str]
    cards: list[CardShown]
    now: InspectionView | None


def run_show(args: argparse.Namespace, settings: Settings) -> int:
    """Print it.

    Raises:
        FpgaPluginError: the hardware cannot be looked at, or there is no such card.
    """
    found = show(settings, args.card, assumptions=args.assumptions)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    print(report(found))
    if found["now"] is not None:
        print(f"\n{inspection_table(found['now'], now=time.time())}")
    elif args.card:
        print("\nno plugin runs here that could say more")
    return 0


def show(settings: Settings, card: str | None, *, assumptions: bool) -> Shown:
    """Look at the node.

    Args:
        settings: the plugin's.
        card: only this one, by its id, and what a running plugin says of it.
        assumptions: what the plugin takes for granted about it, too.

    Raises:
        FpgaPluginError: the hardware cannot be looked at, or there is no such card.
    """
    backend = open_hardware(settings, owner=False).backend
    node = look(settings)
    system = os.uname()
    texts = defaults(settings) | dict(settings.given)
    cards = [
        *(_served(settings, backend, node, seen) for seen in node.cards),
        *(_skipped(problem) for problem in node.problems),
    ]
    if card is not None:
        cards = [one for one in cards if one["card"] == card]
        if not cards:
            elsewhere = "" if node.cards else cards_elsewhere(settings)
            raise UnknownDeviceError(
                f"no card {quote(card)} on this node",
                hint=elsewhere or "`fpga-plugin card list` lists them",
            )
    for one in cards:
        one["functions"] = _pci_functions(backend, CardId(one["card"]))
        one["assumptions"] = _assumptions(backend, CardId(one["card"])) if assumptions else []
    return {
        "version": __version__,
        "kernel": f"{system.sysname} {system.release}",
        "machine": system.machine,
        "settings": {name: texts[name] for name in _DECIDE},
        "cards": cards,
        "now": None if card is None else _now(settings, card),
    }


def _now(settings: Settings, card: str) -> InspectionView | None:
    try:
        found: InspectionView = ask(
            settings.state_dir, "POST", "/card", {"operation": "inspect", "card": card}
        )
    except (NoDaemonError, RefusedError):  # none runs, or it does not serve this card
        return None
    return found


def _pci_functions(backend: Backend, card: CardId) -> list[FunctionView]:
    try:
        return [function_view(one) for one in backend.functions(card)]
    except FpgaPluginError:  # the card went, or is of a kind that lists none
        return []


def _assumptions(backend: Backend, card: CardId) -> list[AssumptionView]:
    return [
        {"says": one.says, "verdict": one.verdict.value, "seen": one.seen}
        for one in backend.assumptions(card)
    ]


def _skipped(problem: CardProblem) -> CardShown:
    card = problem.address.card_id
    return {
        "card": card,
        "description": "",
        "interface_id": "",
        "interface_alias": "",
        "holds": [],
        "problem": ": ".join(filter(None, (problem.message, problem.hint))),
        "functions": [],
        "would": ["leave it alone"],
        "assumptions": [],
    }


def _served(settings: Settings, backend: Backend, node: NodeFacts, seen: NodeCard) -> CardShown:
    card = seen.card
    return {
        "card": card.id,
        "description": card.description,
        "interface_id": card.interface_id,
        "interface_alias": seen.alias or "",
        "holds": [
            {
                "region": each.region.id,
                "afu_id": each.afu_id,
                "name": node.aliases.get((card.interface_id, each.afu_id), ""),
                "error": each.afu_error,
            }
            for each in seen.regions
        ],
        "problem": seen.left_alone,
        "functions": [],
        "would": ["leave it alone"] if seen.left_alone else _would(settings, backend, seen),
        "assumptions": [],
    }


def _would(settings: Settings, backend: Backend, seen: NodeCard) -> list[str]:
    card = seen.card
    names = ", ".join(resources(settings, seen)) or "nothing: no AFU id can be read"
    nodes = ", ".join(f"{region.id} ({region.grant})" for region in card.regions)
    blank = f"{seen.no_blank}: {seen.without_blank}" if seen.no_blank else ""
    free = ", ".join(each.region.id for each in seen.regions if not each.in_use)
    return [
        f"advertise it as {names}, as far as FPGA_PLUGIN_ADVERTISE says",
        f"give a container of a region its node: {nodes}",
        *_functions(backend, card),
        f"reset what nobody has, and program nothing: {free or 'nothing'}"
        if settings.advertise is Advertise.AF
        else blank or f"reset and blank what nobody has: {free or 'nothing'}",
        f"clear its memory: no, it is {seen.memory}"
        if card.never_cleared
        else f"clear its memory whenever nobody has a region of it (now: {seen.memory})",
        *filter(None, [seen.exposed]),
    ]


def _functions(backend: Backend, card: Card) -> list[str]:
    """What becomes of the PCI functions that a container gets in place of a port's node."""
    named = {
        one
        for region in card.regions
        for one in region.grant.env.get(functions_variable(region.id), "").split(",")
    }
    try:
        unbound = [
            str(one.address)
            for one in backend.functions(card.id)
            if str(one.address) in named and not one.driver
        ]
    except FpgaPluginError as error:
        return [f"not know its PCI functions: {error}"]
    if not unbound:
        return []
    return [f"bind to vfio-pci, and unbind when nobody has it: {', '.join(unbound)}"]


def report(found: Shown) -> str:
    """As text to send back."""
    lines = [
        f"fpga-plugin {found['version']}, card show; {found['kernel']}, {found['machine']}",
        "Nothing was opened, written or programmed.",
        *(f"  {name}={value}" for name, value in found["settings"].items()),
    ]
    if not found["cards"]:
        lines += [
            "",
            "no FPGA cards on this node: lspci -k -d ::1200 shows whether their drivers have any",
        ]
    for card in found["cards"]:
        lines += ["", f"card {card['card']}  {card['description']}".rstrip()]
        if card["interface_id"]:
            lines.append(f"  interface {with_name(card['interface_id'], card['interface_alias'])}")
        for held in card["holds"]:
            shown = f"shows {with_name(held['afu_id'], held['name'])}"
            lines.append(f"  {held['region']}: {shown if held['afu_id'] else held['error']}")
        if card["problem"]:
            lines += _item("!", f"not served: {card['problem']}")
        if card["functions"]:
            lines += [f"  {line}" for line in functions_table(card).splitlines()]
        lines.append("  it would")
        for one in card["would"]:
            lines += _item("*", one)
        if card["assumptions"]:
            lines.append("  it assumes (+ holds, - does not hold, ? is taken on trust)")
        for assumed in card["assumptions"]:
            mark = _MARKS[AssumptionVerdict(assumed["verdict"])]
            lines += _item(mark, f"{assumed['says']}: {assumed['seen']}")
    return "\n".join(printable(line) for line in lines)


def _item(mark: str, text: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent=f"    {mark} ",
        subsequent_indent="      ",
        break_on_hyphens=False,
    )
