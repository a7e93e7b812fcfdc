"""`fpga-plugin card list`, once `devices`: prints what is on this node."""

# ruff: noqa: T201  # a command prints

import argparse
import json
import sys
from typing import TypedDict

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.host.columns import columns
from fpga_plugin.observability.client import ask
from fpga_plugin.observability.node_facts import NodeCard, NodeFacts, look
from fpga_plugin.settings.settings import Settings


class RegionRow(TypedDict):
    """One region; `name` is what the store's manifest calls what is on it, empty for nothing."""

    region: str
    node: str
    afu_id: str
    name: str
    ownership: str
    condition: str
    note: str


class CardRow(TypedDict):
    """One card; `interface_alias`, `memory` and `iommu` as in `fpga-plugin status --json`.

    `memory` is `not known` where no plugin has noted anything of the card.
    """

    card: str
    interface_id: str
    interface_alias: str
    numa_node: int | None
    memory: str
    iommu: str
    note: str
    regions: list[RegionRow]


class Listing(TypedDict):
    """Everything."""

    cards: list[CardRow]
    problems: list[dict[str, str]]


def run_list(args: argparse.Namespace, settings: Settings) -> int:
    """Print it.

    Raises:
        FpgaPluginError: the hardware cannot be looked at.
    """
    listing = list_devices(settings)
    print(json.dumps(listing, indent=2) if args.json else table(listing))
    if not listing["cards"] and (hint := cards_elsewhere(settings)):
        print(f"fpga-plugin: {hint}", file=sys.stderr)
    return 0


def cards_elsewhere(settings: Settings) -> str:
    """Why these settings show no cards where the node's plugin has some; empty: it has none."""
    try:
        has_cards = bool(ask(settings.state_dir, "GET", "/status")["cards"])
    except FpgaPluginError:
        return ""
    if not has_cards:
        return ""
    return (
        "the plugin that runs here has cards, and these settings find none: set"
        " FPGA_PLUGIN_BACKEND, FPGA_PLUGIN_SYSFS_ROOT and FPGA_PLUGIN_SIMULATED_DIR as it has them"
    )


def list_devices(settings: Settings) -> Listing:
    """Look at the node.

    Raises:
        FpgaPluginError: the hardware cannot be looked at.
    """
    node = look(settings)
    return {
        "cards": [
            {
                "card": seen.card.id,
                "interface_id": seen.card.interface_id,
                "interface_alias": seen.alias or "",
                "numa_node": seen.card.numa_node,
                "memory": seen.memory,
                "iommu": seen.card.iommu.value,
                "note": _note(node, seen),
                "regions": [
                    {
                        "region": each.region.id,
                        "node": str(each.region.grant),
                        "afu_id": each.afu_id,
                        "name": node.aliases.get((seen.card.interface_id, each.afu_id), ""),
                        "ownership": each.ownership,
                        "condition": each.condition,
                        "note": each.afu_error or each.reason,
                    }
                    for each in seen.regions
                ],
            }
            for seen in node.cards
        ],
        "problems": [
            {"card": problem.address.card_id, "error": problem.message, "hint": problem.hint}
            for problem in node.problems
        ],
    }


def _note(node: NodeFacts, seen: NodeCard) -> str:
    """Why a card, or its regions, are not given out, or are not known; empty where all is well."""
    if seen.left_alone:
        pods = ", ".join(sorted({entry.pod_uid for entry in seen.foreign}))
        return f"left alone: {seen.left_alone}{f': pod {pods}' if pods else ''}"
    if seen.exposed or node.journal_error:
        return seen.exposed or node.journal_error
    return f"no-blank-image: {seen.no_blank}; {seen.without_blank}" if seen.no_blank else ""


def table(listing: Listing) -> str:
    """The listing for people."""
    lines = []
    for card in listing["cards"]:
        numa = "" if card["numa_node"] is None else f", NUMA node {card['numa_node']}"
        exposed = f"  memory: {card['memory']}  IOMMU: {card['iommu']}"
        interface = card["interface_alias"] or card["interface_id"]
        lines.append(f"card {card['card']}  interface {interface}{numa}{exposed}")
        if card["note"]:
            lines.append(f"  ! {card['note']}")
        rows = [("REGION", "NODE", "AFU", "OWNERSHIP", "CONDITION", "")]
        rows += [
            (
                *(r["region"], r["node"], r["name"] or r["afu_id"]),
                *(r["ownership"] or "-", r["condition"] or "-", r["note"]),
            )
            for r in card["regions"]
        ]
        lines += [f"  {line}" for line in columns(rows)]
    lines += [
        f"card {problem['card']}  skipped: {problem['error']}\n  {problem['hint']}".rstrip()
        for problem in listing["problems"]
    ]
    return "\n".join(lines) if lines else "no FPGA cards on this node"
