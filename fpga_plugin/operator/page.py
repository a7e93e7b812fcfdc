"""The status page: the same view as `fpga-plugin status`, drawn.

One document without external parts, made anew for each request, so it works without a script; the
script only fetches it again while somebody looks. Everything foreign (pods' names, messages) is
escaped, and the content security policy lets nothing run but the two pieces below, by their hash.
States are told by words, and by colour in addition.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

from fpga_plugin.operator.schema import CardView, OwnerView, RefusalView, RegionView, StatusView
from fpga_plugin.operator.style import SCRIPT, STYLE
from fpga_plugin.operator.table import measured, printable, skipped, span


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
                "form-action 'none'",
                "frame-ancestors 'none'",
                f"style-src {_hash(STYLE)}",
                f"script-src {_hash(SCRIPT)}",
            ]
        ),
    ),
    ("Referrer-Policy", "no-referrer"),
)

_LEGEND: Final[Mapping[str, str]] = {
    "BLANK": "scrubbed and verified",
    "PROGRAMMED": "as its owner asked",
    "DIRTY": "somebody's image or state may be on it; a scrub follows",
    "SCRUBBING": "work on it is under way",
    "FAULTED": "cannot be used until an operator mends it",
    "UNBLANKED": "reset, but the last image is still there",
}


def page(status: StatusView) -> str:
    """The document."""
    node = _text(status["node"] or "this node")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>FPGAs of {node}</title>\n"
        f"<style>{STYLE}</style>\n"
        '<noscript><meta http-equiv="refresh" content="15"></noscript>\n'
        "</head>\n<body>\n"
        f'<main id="status">\n{_main(status, node)}\n</main>\n'
        '<p class="away" id="away" role="status" hidden>The plugin does not answer; what is shown'
        " may be out of date.</p>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _main(status: StatusView, node: str) -> str:
    now = status["time"]
    parts = [_header(status, node)]
    if status["scrub"] != "required":
        parts.append(
            f'<p class="note"><strong>Scrubbing is {_text(status["scrub"])}</strong>: a region may'
            " be given out with the last tenant's image in it (FPGA_PLUGIN_SCRUB).</p>"
        )
    if not status["cards"] and not status["problems"]:
        parts.append("<p>There are no FPGA cards on this node.</p>")
    parts += [_card(card, now) for card in status["cards"]]
    parts += [
        f'<section class="card failed"><h2>Card {_text(problem["card"])}</h2>'
        f'<p class="note"><strong>Skipped:</strong> '
        f"{_text(skipped(problem))}</p></section>"
        for problem in status["problems"]
    ]
    parts.append(_refusals(status["refusals"], now))
    parts.append(_resources(status))
    parts.append(_legend())
    return "\n".join(parts)


def _header(status: StatusView, node: str) -> str:
    cards = len(status["cards"])
    regions = [region for card in status["cards"] for region in card["regions"]]
    free = sum(region["owner"] is None and region["healthy"] for region in regions)
    state = "good" if status["ready"] else "bad"
    word = "ready" if status["ready"] else "not ready"
    reasons = "".join(f"<li>{_text(reason)}</li>" for reason in status["not_ready"])
    return (
        f'<header><h1>FPGAs of {node}</h1>\n<p class="summary">'
        f'<span class="badge {state}">{word}</span> '
        f"{cards} {_plural(cards, 'card')}, {len(regions)} {_plural(len(regions), 'region')}, "
        f"{free} free and healthy. fpga-plugin {_text(status['version'])}, up"
        f" {span(status['time'] - status['started'])}.</p>"
        + (f'<ul class="note">{reasons}</ul>' if reasons else "")
        + "</header>"
    )


def _card(card: CardView, now: float) -> str:
    name = _text(card["card"])
    state = card["mode"] if card["present"] else "gone"
    badges = [f'<span class="badge plain">{_text(state)}</span>']
    if card["drained"]:
        badges.append('<span class="badge warn">out of service</span>')
    facts = []
    if card["interface_id"]:
        facts.append(("Interface", f"<code>{_text(card['interface_id'])}</code>"))
    if card["numa_node"] is not None:
        facts.append(("NUMA node", str(card["numa_node"])))
    facts += [(n, _text(v)) for n, v in (("Memory", card["memory"]), ("IOMMU", card["iommu"])) if v]
    for what, form, values in (
        ("Temperature", "{:.0f} °C", card["temperatures"]),
        ("Power", "{:.1f} W", card["power"]),
    ):
        facts += [
            (f"{what} {_text(name)}".rstrip(), value) for name, value in measured(form, values)
        ]
    listed = "".join(f"<div><dt>{term}</dt><dd>{value}</dd></div>" for term, value in facts)
    note = f'<p class="note">{_text(card["note"])}</p>' if card["note"] else ""
    tiles = "".join(_tile(region) for region in card["regions"])
    return (
        f'<section class="card" aria-labelledby="card-{name}">\n'
        f'<h2 id="card-{name}">Card {name} {" ".join(badges)}</h2>\n'
        f'<dl class="facts">{listed}</dl>\n{note}'
        f'<ul class="board" aria-label="Regions of card {name}">{tiles}</ul>\n'
        + "".join(map(_reason, card["regions"]))
        + _scrolled(f"Details of card {name}", _region_table(card, now))
        + "</section>"
    )


def _tile(region: RegionView) -> str:
    """One region of the drawn card."""
    owner = region["owner"]
    who = "free" if owner is None else _owner(owner)
    health = "" if region["healthy"] else '<span class="badge bad">unhealthy</span>'
    return (
        f'<li class="tile {_colour(region)}"><strong>{_short(region["region"])}</strong>'
        f'<span class="state">{_text(region["condition"].lower())}</span>'
        f'<span class="who">{who}</span>{health}</li>'
    )


def _colour(region: RegionView) -> str:
    if region["condition"] == "FAULTED":
        return "failed"
    if region["condition"] in {"DIRTY", "SCRUBBING", "UNBLANKED"}:
        return "busy"
    return "free" if region["owner"] is None else "owned"


def _region_table(card: CardView, now: float) -> str:
    rows = [
        [
            f"<code>{_text(region['region'])}</code>",
            f"<code>{_text(region['node'])}</code>",
            _text(region["ownership"].lower()),
            _text(region["condition"].lower()),
            f"<code>{_text(region['afu_id'])}</code>" if region["afu_id"] else "none",
            "healthy" if region["healthy"] else "unhealthy",
            _since(region["owner"], now) or "none",
            "none" if region["owner"] is None else _owner(region["owner"]),
        ]
        for region in card["regions"]
    ]
    heads = ["Region", "Node", "Ownership", "Condition", "Bitstream", "Health", "For", "Pod"]
    return _table(f"Regions of card {_text(card['card'])}", heads, rows)


def _refusals(refusals: list[RefusalView], now: float) -> str:
    if not refusals:
        return (
            "<section><h2>Refused</h2><p>No pod was refused since the plugin started.</p></section>"
        )
    rows = [
        [
            _refused_pod(one),
            _when(one, now),
            f"{_text(one['method'])}<br>{_text(one['status'])}",
            _text(one["message"]),
        ]
        for one in refusals
    ]
    table = _table("The last refusal of each pod", ["Pod", "When", "Call", "Why"], rows)
    return f"<section><h2>Refused</h2>{_scrolled('Refused pods', table)}</section>"


def _when(one: RefusalView, now: float) -> str:
    times = f", {one['times']} times" if one["times"] > 1 else ""
    return f"{span(now - one['at'])} ago{times}"


def _refused_pod(one: RefusalView) -> str:
    if one["pod"]:
        return f"{_text(one['namespace'])}/<wbr>{_text(one['pod'])}"
    if one["pod_uid"]:
        return f"<code>{_text(one['pod_uid'])}</code>"
    return f"not known, devices <code>{_text(', '.join(one['devices']))}</code>"


def _resources(status: StatusView) -> str:
    rows = [
        [
            f"<code>{_text(one['resource'])}</code>",
            "yes" if one["registered"] and one["streaming"] else "no",
            f"{one['healthy']} of {one['devices']}",
            _text(one["problem"]) or "none",
        ]
        for one in status["resources"]
    ]
    if not rows:
        return ""
    table = _table(
        "Resources on this node", ["Resource", "Registered", "Healthy devices", "Problem"], rows
    )
    return f"<section><h2>Resources</h2>{_scrolled('Resources', table)}</section>"


def _legend() -> str:
    words = "".join(
        f"<div><dt>{word.lower()}</dt><dd>{_text(meaning)}</dd></div>"
        for word, meaning in _LEGEND.items()
    )
    return f'<section><h2>What the states mean</h2><dl class="legend">{words}</dl></section>'


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; each row's first cell is its header.

    On a phone the style sheet makes a block of each row, and each cell shows its column's head. A
    browser then forgets what is a table, so the roles are written down.
    """
    head = "".join(f'<th scope="col" role="columnheader">{word}</th>' for word in heads)
    body = "".join(f'<tr role="row">{_cells(heads, row)}</tr>' for row in rows)
    return (
        f'<table role="table"><caption>{caption}</caption>'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead>'
        f'<tbody role="rowgroup">{body}</tbody></table>'
    )


def _cells(heads: Sequence[str], row: Sequence[str]) -> str:
    first, *others = (
        f'data-head="{head}" class="{head.split()[0].lower()}"><span>{html}</span></'
        for head, html in zip(heads, row, strict=True)
    )
    return f'<th scope="row" role="rowheader" {first}th>' + "".join(
        f'<td role="cell" {one}td>' for one in others
    )


def _scrolled(label: str, table: str) -> str:
    """A wide table in a box of its own, which the keyboard can scroll, too."""
    return f'<div class="scroll" role="region" aria-label="{label}" tabindex="0">{table}</div>\n'


def _reason(region: RegionView) -> str:
    if not region["reason"]:
        return ""
    words = f"<strong>{_short(region['region'])}:</strong> {_text(region['reason'])}"
    return f'<p class="note">{words}</p>\n'


def _owner(owner: OwnerView) -> str:
    if owner["pod"]:
        return f"{_text(owner['namespace'])}/<wbr>{_text(owner['pod'])}"
    return f"<code>{_text(owner['pod_uid'])}</code>" if owner["pod_uid"] else "pod not known yet"


def _since(owner: OwnerView | None, now: float) -> str:
    if owner is None or owner["since"] is None:
        return ""
    return span(now - owner["since"])


def _short(region: str) -> str:
    return f"Region {_text(region.rpartition('-')[2])}"


def _plural(number: int, word: str) -> str:
    return word if number == 1 else f"{word}s"


def _text(foreign: str) -> str:
    return escape(printable(foreign))
