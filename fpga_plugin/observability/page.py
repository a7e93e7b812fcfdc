"""The status page: the same view as `fpga-plugin status`, drawn (`templates`).

It works without a script; the script only fetches the page again while somebody looks. Everything
foreign (pods' names, messages) is escaped, and the content security policy lets nothing run but the
page's own style sheet and script, by their hash.

Importing it takes Jinja2 and reads the templates: 60 ms, in a thread and when a page is first asked
for.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from fpga_plugin.observability.schema import CardView, EventView, OwnerView, RegionView, StatusView
from fpga_plugin.observability.selection import MAX_WORDS, selected
from fpga_plugin.observability.states import ANCHORS, STATES
from fpga_plugin.observability.table import (
    event_owner,
    happened,
    measured,
    owned_by,
    printable,
    reasons,
    size,
    skipped,
    span,
)
from fpga_plugin.observability.trouble import URGENT, states_of, troubled, troubles

_TEMPLATES: Final = Path(__file__).parent / "templates"
STYLE: Final = (_TEMPLATES / "style.css").read_text()
SCRIPT: Final = (_TEMPLATES / "refresh.js").read_text()


def _hash(code: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"


HEADERS: Final = (
    (
        "Content-Security-Policy",
        "; ".join(
            [
                "default-src 'none'",
                "connect-src 'self'",
                "base-uri 'none'",
                "form-action 'self'",
                "frame-ancestors 'none'",
                f"style-src {_hash(STYLE)}",
                f"script-src {_hash(SCRIPT)}",
            ]
        ),
    ),
    ("Referrer-Policy", "no-referrer"),
)

_QUOTED: Final = re.compile("`([^`]+)`")


def page(
    status: StatusView,
    events: Sequence[EventView] = (),
    *,
    words: str = "",
) -> str:
    """The document.

    Args:
        status: all of it.
        events: what happened last, the newest first.
        words: only what has these is shown (`selection`).
    """
    now = status["time"]
    shown = selected(status, words)
    regions = [region for card in status["cards"] for region in card["regions"]]
    found = troubles(status)

    def since(owner: OwnerView | None) -> str:
        if owner is None or owner["since"] is None:
            return ""
        return span(now - owner["since"])

    def where(state: str) -> str:
        return _first(state, shown) or ANCHORS[state]

    def ago(at: float) -> str:
        return f"{span(now - at)} ago"

    return _PAGE.render(
        status=status,
        node=status["node"] or "this node",
        now=now,
        words=words[:MAX_WORDS],
        shown=shown,
        cards=sorted(shown["cards"], key=troubled, reverse=True),
        shown_regions=[region for card in shown["cards"] for region in card["regions"]],
        regions=regions,
        free=sum(region["owner"] is None and region["healthy"] for region in regions),
        troubles=found,
        urgent=sum(one.count for one in found if one.urgent) + (not status["ready"]),
        events=events,
        since=since,
        where=where,
        ago=ago,
        when=lambda one: ago(one["at"]) + (f", {one['times']} times" if one["times"] > 1 else ""),
    )


def _first(state: str, shown: StatusView) -> str:
    """The id of the first card or tile that is in a state; empty where none is shown."""
    for card in shown["cards"]:
        gone = state == "faulted" and not card["present"]
        if gone or state == card["memory"] or (state == "drained" and card["drained"]):
            return f"card-{card['card']}"
        for region in card["regions"]:
            if state in states_of(card, region):
                return f"region-{region['region']}"
    if state == "faulted" and shown["problems"]:
        return f"card-{shown['problems'][0]['card']}"
    return ""


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _sensors(card: CardView) -> list[tuple[str, str]]:
    kinds = (
        ("Temperature", "{:.0f} °C", card["temperatures"]),
        ("Power", "{:.1f} W", card["power"]),
    )
    return [
        (f"{what} {name}".rstrip(), value)
        for what, form, values in kinds
        for name, value in measured(form, values)
    ]


def _marks(card: CardView, region: RegionView) -> list[tuple[str, str]]:
    """What else is to be known of a region, with its colour; FAULTED is its condition."""
    marks = [
        (state, "bad" if state in URGENT else "warn")
        for state in states_of(card, region)
        if state != "faulted"
    ]
    # That a drained card's free regions, and kept ones, are not offered is what that means.
    known = region["kept"] is not None or bool(region["unusable"])
    if not region["healthy"] and not known and not (card["drained"] and region["owner"] is None):
        marks.append(("unhealthy", "bad"))
    return marks


def _colour(card: CardView, region: RegionView) -> str:
    states = states_of(card, region)
    if not URGENT.isdisjoint(states):
        return "failed"
    if (chosen := next((one for one in ("drained", "kept") if one in states), None)) is not None:
        return chosen
    if region["condition"] in {"DIRTY", "SCRUBBING", "UNBLANKED"}:
        return "busy"
    if region["owner"] is not None:
        return "owned"
    return "free" if region["healthy"] else "busy"


def _commands(words: str) -> Markup:
    """Text with commands between backquotes; foreign text gets no other markup."""
    escaped = str(escape(printable(words)))  # of a Markup, `sub` would escape what it puts in
    return Markup(_QUOTED.sub(r"<code>\1</code>", escaped))  # noqa: S704  # escaped before


def _breaks(words: str) -> Markup:
    """A name that may be broken after each slash."""
    return escape(printable(words)).replace("/", Markup("/<wbr>"))


def _printable(value: Any) -> Any:
    """Foreign text without control characters: the last step before a value is escaped."""
    return printable(value) if type(value) is str else value


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {"commands": _commands, "breaks": _breaks}
    made.globals |= {
        "anchors": ANCHORS,
        "states": STATES,
        "urgent_region": lambda card, region: not URGENT.isdisjoint(states_of(card, region)),
        "style": Markup(STYLE),  # noqa: S704  # our own
        "script": Markup(SCRIPT),  # noqa: S704  # our own
        "max_words": MAX_WORDS,
        "colour": _colour,
        "counted": _counted,
        "event_owner": event_owner,
        "happened": happened,
        "marks": _marks,
        "owned_by": owned_by,
        "reasons": reasons,
        "sensors": _sensors,
        "size": size,
        "skipped": skipped,
        "span": span,
    }
    return made


_PAGE: Final = _environment().get_template("page.html")
