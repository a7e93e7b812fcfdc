"""`fpga-plugin devices`: what is on this node, as hardware, store and journal tell.

Only looks, so this works beside a running daemon.
"""

from typing import TypedDict

from fpga_plugin.bitstream.checks import check_trust
from fpga_plugin.bitstream.store import Store
from fpga_plugin.build import is_guarded, open_hardware, open_trust
from fpga_plugin.config.settings import ScrubPolicy, Settings
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.hardware.backend import Backend
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ledger.journal import JournalError
from fpga_plugin.ledger.peek import Peek, peek
from fpga_plugin.ledger.records import Ownership


class RegionRow(TypedDict):
    """One region."""

    region: str
    node: str
    afu_id: str
    ownership: str
    condition: str
    note: str


class CardRow(TypedDict):
    """One card."""

    card: str
    interface_id: str
    numa_node: int | None
    note: str
    regions: list[RegionRow]


class Listing(TypedDict):
    """Everything."""

    cards: list[CardRow]
    problems: list[dict[str, str]]


def list_devices(settings: Settings) -> Listing:
    """Look at the node.

    Raises:
        FpgaPluginError: the hardware cannot be looked at.
    """
    backend = open_hardware(settings, owner=False).backend
    inventory = backend.scan()
    journal: Peek | None = None
    unread = ""
    try:
        journal = peek(settings.state_dir)
    except JournalError as error:
        unread = str(error)
    cards: list[CardRow] = []
    for card in sorted(inventory.cards.values(), key=lambda card: card.address):
        note = "" if settings.cards.selects(card.id) else "left alone (FPGA_PLUGIN_CARDS)"
        cards.append(
            {
                "card": card.id,
                "interface_id": card.interface_id,
                "numa_node": card.numa_node,
                "note": note or unread or _missing(card, settings),
                "regions": [_row(backend, card, region, journal) for region in card.regions],
            }
        )
    return {
        "cards": cards,
        "problems": [
            {"card": problem.address.card_id, "error": problem.message, "hint": problem.hint}
            for problem in inventory.problems.values()
        ],
    }


def _missing(card: Card, settings: Settings) -> str:
    store = Store(settings.bitstream_dir)
    try:
        if (blank := store.blank(card.interface_id)) is not None:
            check_trust(
                store.root,
                store.relative(blank.path),
                open_trust(settings, owner=False),
                guarded=is_guarded(settings),
            )
            return ""
        reason = f"no blank bitstream at {store.blank_path(card.interface_id)}"
    except FpgaPluginError as error:
        reason = str(error)
    if settings.scrub is ScrubPolicy.BEST_EFFORT:
        return f"{reason}; regions are only reset (best-effort)"
    return f"no-blank-image: {reason}; FPGA_PLUGIN_SCRUB=best-effort does without"


def _row(backend: Backend, card: Card, region: Region, journal: Peek | None) -> RegionRow:
    try:
        afu_id: str = backend.afu_id(region)
        note = ""
    except FpgaPluginError as error:
        afu_id, note = "", error.message
    owner, condition, reason = "", "", ""  # not known where the journal cannot be read
    if journal is not None:
        owner = journal.owners.get(region.id) or journal.owners.get(card.id) or Ownership.FREE
        condition, reason = journal.conditions.get(region.id, ("", ""))
    return {
        "region": region.id,
        "node": region.node,
        "afu_id": afu_id,
        "ownership": owner,
        "condition": condition,
        "note": note or reason,
    }


def table(listing: Listing) -> str:
    """The listing for people."""
    lines = []
    for card in listing["cards"]:
        numa = "" if card["numa_node"] is None else f", NUMA node {card['numa_node']}"
        lines.append(f"card {card['card']}  interface {card['interface_id']}{numa}")
        if card["note"]:
            lines.append(f"  ! {card['note']}")
        rows = [("REGION", "NODE", "AFU ID", "OWNER", "CONDITION", "")]
        rows += [
            (
                *(r["region"], r["node"], r["afu_id"]),
                *(r["ownership"] or "-", r["condition"] or "-", r["note"]),
            )
            for r in card["regions"]
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines += [
            "  " + "  ".join([*(row[i].ljust(widths[i]) for i in range(5)), row[5]]).rstrip()
            for row in rows
        ]
    lines += [
        f"card {problem['card']}  skipped: {problem['error']}\n  {problem['hint']}".rstrip()
        for problem in listing["problems"]
    ]
    return "\n".join(lines) if lines else "no FPGA cards on this node"
