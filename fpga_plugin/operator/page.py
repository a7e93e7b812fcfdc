"""The status page: the same view as `fpga-plugin status`, drawn.

One document without external parts, made anew for each request, so it works without a script; the
script only fetches it again while somebody looks. Everything foreign (pods' names, messages) is
escaped, and the content security policy lets nothing run but the two pieces below, by their hash.
States are told by words, and by colour in addition.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from fpga_plugin.operator.schema import (
    BitstreamView,
    CardView,
    EventView,
    OwnerView,
    RefusalView,
    RegionView,
    StatusView,
)
from fpga_plugin.operator.selection import MAX_WORDS, selected
from fpga_plugin.operator.states import ANCHORS, STATES
from fpga_plugin.operator.style import SCRIPT, STYLE
from fpga_plugin.operator.table import (
    event_owner,
    happened,
    measured,
    owned_by,
    printable,
    size,
    skipped,
    span,
)
from fpga_plugin.operator.trouble import troubles


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

_DRAINED: Final = (
    "an operator took it out of service with `fpga-plugin card drain`. No new pod gets it, and pods"
    " that have it keep it. `fpga-plugin card undrain` brings it back."
)


def page(
    status: StatusView,
    events: Sequence[EventView] = (),
    *,
    words: str = "",
    runbook: str | None = None,
) -> str:
    """The document.

    Args:
        status: all of it.
        events: what happened last, the newest first.
        words: only what has these is shown (`selection`).
        runbook: where docs/runbook.md can be read; None: only its name is shown.
    """
    node = _text(status["node"] or "this node")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>FPGAs of {node}</title>\n"
        f"<style>{STYLE}</style>\n"
        '<noscript><meta http-equiv="refresh" content="15"></noscript>\n'
        "</head>\n<body>\n"
        f'<form class="find" role="search">{_find(words)}</form>\n'
        f'<main id="status">\n{_main(status, events, node, words)}\n{_legend(runbook)}\n</main>\n'
        '<p class="away" id="away" role="status" hidden>The plugin does not answer; what is shown'
        " may be out of date.</p>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _find(words: str) -> str:
    return (
        '<label for="find">Pod, card or region</label> '
        f'<input id="find" name="find" type="search" maxlength="{MAX_WORDS}"'
        f' value="{_text(words[:MAX_WORDS])}"> <button>Show</button>'
    )


def _main(status: StatusView, events: Sequence[EventView], node: str, words: str) -> str:
    now = status["time"]
    shown = selected(status, words)
    parts = [_header(status, node)]
    if status["scrub"] != "required":
        parts.append(
            f'<p class="note"><strong>Scrubbing is {_text(status["scrub"])}</strong>: a region may'
            " be given out with the last tenant's image in it (FPGA_PLUGIN_SCRUB).</p>"
        )
    if words.strip():
        parts.append(
            f"<p>Only what has <strong>{_text(words[:MAX_WORDS])}</strong> in its name is shown"
            f"{'' if shown['cards'] else ': no card or region'}."
            ' <a href="?">Show everything</a></p>'
        )
    elif not status["cards"] and not status["problems"]:
        parts.append("<p>There are no FPGA cards on this node.</p>")
    parts += [_card(card, now) for card in shown["cards"]]
    parts += [
        f'<section class="card failed"><h2>Card {_text(problem["card"])}</h2>'
        f'<p class="note"><strong>Skipped:</strong> '
        f"{_text(skipped(problem))}</p></section>"
        for problem in shown["problems"]
    ]
    parts.append(_refusals(shown["refusals"], now))
    parts.append(_warnings(shown["warnings"], now))
    parts.append(_region_table(shown["cards"], now))
    parts.append(_history(events, now))
    parts.append(_bitstreams(status["bitstreams"], now))
    parts.append(_resources(status))
    return "\n".join(filter(None, parts))


def _header(status: StatusView, node: str) -> str:
    cards = len(status["cards"])
    regions = [region for card in status["cards"] for region in card["regions"]]
    free = sum(region["owner"] is None and region["healthy"] for region in regions)
    state = "good" if status["ready"] else "bad"
    word = "ready" if status["ready"] else "not ready"
    reasons = "".join(
        f"<li>{_text(reason)}</li>" for reason in [*status["not_ready"], *status["notes"]]
    )
    return (
        f'<header><h1>FPGAs of {node}</h1>\n<p class="summary">'
        f'<span class="badge {state}">{word}</span> {_trouble(status)} '
        f"{cards} {_plural(cards, 'card')}, {len(regions)} {_plural(len(regions), 'region')}, "
        f"{free} free and healthy. fpga-plugin {_text(status['version'])}, up"
        f" {span(status['time'] - status['started'])}.</p>"
        + (f'<ul class="note">{reasons}</ul>' if reasons else "")
        + "</header>"
    )


def _trouble(status: StatusView) -> str:
    """A badge for each kind of trouble that there is; they lead to what to do."""
    badges = [
        f'<a class="badge {"bad" if one.urgent else "warn"}" href="#{ANCHORS[one.state]}">'
        f"{_text(one.words)}</a>"
        for one in troubles(status)
    ]
    if not badges and status["ready"]:
        badges.append('<span class="badge plain">no trouble</span>')
    return " ".join(badges)


def _interface(one: CardView | BitstreamView) -> str:
    """What people call an interface id, else the id."""
    return f"<code>{_text(one.get('interface_alias') or one['interface_id'])}</code>"


def _card(card: CardView, now: float) -> str:
    name = _text(card["card"])
    state = card["mode"] if card["present"] else "gone"
    badges = [f'<span class="badge plain">{_text(state)}</span>']
    if card["drained"]:
        badges.append(f'<a class="badge warn" href="#{ANCHORS["drained"]}">drained</a>')
    facts = []
    if card["interface_id"]:
        facts.append(("Interface", _interface(card)))
    if card["numa_node"] is not None:
        facts.append(("NUMA node", str(card["numa_node"])))
    exposed = (("Memory", card["memory"]), ("IOMMU", card["iommu"]))
    facts += [(name, _state(word)) for name, word in exposed if word]
    for what, form, values in (
        ("Temperature", "{:.0f} °C", card["temperatures"]),
        ("Power", "{:.1f} W", card["power"]),
    ):
        facts += [
            (f"{what} {_text(name)}".rstrip(), value) for name, value in measured(form, values)
        ]
    listed = "".join(f"<div><dt>{term}</dt><dd>{value}</dd></div>" for term, value in facts)
    note = f'<p class="note">{_text(card["note"])}</p>' if card["note"] else ""
    if card["drained"]:
        note += f'<p class="note"><strong>Drained:</strong> {_code(_DRAINED)}</p>'
    tiles = "".join(_tile(card, region, now) for region in card["regions"])
    return (
        f'<section class="card" aria-labelledby="card-{name}">\n'
        f'<h2 id="card-{name}">Card {name} {" ".join(badges)}</h2>\n'
        f'<dl class="facts">{listed}</dl>\n{note}'
        f'<ul class="board" aria-label="Regions of card {name}">{tiles}</ul>\n'
        + "".join(map(_reason, card["regions"]))
        + "</section>"
    )


def _tile(card: CardView, region: RegionView, now: float) -> str:
    """One region of the drawn card."""
    owner = region["owner"]
    lines = [f'<span class="state">{_state(region["condition"].lower())}</span>']
    if region["condition"] == "PROGRAMMED":
        lines.append(f'<span class="what">{_bitstream(region)}</span>')
    age = _since(owner, now)
    kept = region["kept"]
    who = (
        f"{_text(kept['namespace'])}/<wbr>{_text(kept['pod'])} had it,"
        f' <span class="for">{span(kept["seconds_left"])} left</span>'
        if kept is not None
        else "free"
        if owner is None
        else _owner(owner) + (f', <span class="for">for {age}</span>' if age else "")
    )
    lines.append(f'<span class="who">{who}</span>')
    lines += [
        f'<span class="badge {colour}">{_state(word)}</span>'
        for word, colour in _marks(card, region)
    ]
    if card["drained"]:
        lines.append(f'<span class="why-drained">by {_code("`fpga-plugin card drain`")}</span>')
    return (
        f'<li class="tile {_colour(card, region)}"><strong>{_short(region["region"])}</strong>'
        f"{''.join(lines)}</li>"
    )


def _marks(card: CardView, region: RegionView) -> list[tuple[str, str]]:
    """What else is to be known of a region, with its colour."""
    marks = []
    if region["refused"]:
        marks.append(("refused", "bad"))
    if card["drained"]:
        marks.append(("drained", "warn"))
    if region["kept"] is not None:
        marks.append(("kept", "warn"))
    elif region["unusable"]:
        marks.append(("unusable", "bad"))
    # That a drained card's free regions, and kept ones, are not offered is what that means.
    elif not region["healthy"] and not (card["drained"] and region["owner"] is None):
        marks.append(("unhealthy", "bad"))
    return marks


def _colour(card: CardView, region: RegionView) -> str:
    if region["failed"] or region["unusable"] or region["refused"]:
        return "failed"
    if card["drained"]:
        return "drained"
    if region["kept"] is not None:
        return "kept"
    if region["condition"] in {"DIRTY", "SCRUBBING", "UNBLANKED"}:
        return "busy"
    if region["owner"] is not None:
        return "owned"
    return "free" if region["healthy"] else "busy"


def _state(word: str) -> str:
    """A state's word, which leads to what it means and what to do."""
    anchor = ANCHORS.get(word)
    return _text(word) if anchor is None else f'<a href="#{anchor}">{_text(word)}</a>'


def _bitstream(region: RegionView) -> str:
    if region["bitstream"]:
        return _text(region["bitstream"])
    return f"<code>{_text(region['afu_id'])}</code>" if region["afu_id"] else "none"


def _region_table(cards: Iterable[CardView], now: float) -> str:
    rows = [
        [
            f"<code>{_text(region['region'])}</code>",
            f"<code>{_text(region['node'])}</code>",
            _text(region["ownership"].lower()),
            _state(region["condition"].lower()),
            _bitstream(region),
            "healthy" if region["healthy"] else "unhealthy",
            _since(region["owner"], now) or "none",
            "none" if region["owner"] is None else _owner(region["owner"]),
        ]
        for card in cards
        for region in card["regions"]
    ]
    if not rows:
        return ""
    heads = ["Region", "Node", "Ownership", "Condition", "Bitstream", "Health", "For", "Pod"]
    table = _table("All regions", heads, rows)
    return f"<section><h2>Regions</h2>{_scrolled('Regions', table)}</section>"


def _history(events: Iterable[EventView], now: float) -> str:
    rows = [
        [
            f"<code>{_text(one['region'])}</code>",
            f"{span(now - one['at'])} ago",
            _text(happened(one)),
            _event_owner(one),
            _text(one["message"]),
        ]
        for one in events
    ]
    if not rows:
        return ""
    table = _table("What happened last", ["Region", "When", "What", "Pod", "Why"], rows)
    return f"<section><h2>History</h2>{_scrolled('History', table)}</section>"


def _event_owner(one: EventView) -> str:
    if one["claim"]:
        return _text(event_owner(one))
    return _text(one["pod"]) or f"<code>{_text(one['pod_uid'])}</code>"


def _bitstreams(bitstreams: Iterable[BitstreamView], now: float) -> str:
    rows = [
        [
            _text(one["name"]) or "none",
            f"<code>{_text(one['bitstream_id'] or one['afu_id'])}</code>",
            _interface(one),
            "unknown" if one["size"] is None else size(one["size"]),
            "-" if one["last_used"] is None else f"{span(now - one['last_used'])} ago",
            _text(one["trust"]) + (f": {_text(one['problem'])}" if one["problem"] else ""),
        ]
        for one in bitstreams
    ]
    if not rows:
        return ""
    table = _table(
        "Bitstreams in the store",
        ["Name", "Bitstream", "Interface", "Size", "Used", "Trust"],
        rows,
    )
    return f"<section><h2>Bitstreams</h2>{_scrolled('Bitstreams', table)}</section>"


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
            _code(one["message"]),
        ]
        for one in refusals
    ]
    table = _table("The last refusal of each pod", ["Pod", "When", "Call", "Why"], rows)
    return f"<section><h2>Refused</h2>{_scrolled('Refused pods', table)}</section>"


def _warnings(warnings: list[RefusalView], now: float) -> str:
    if not warnings:
        return ""
    rows = [[_refused_pod(one), _when(one, now), _text(one["message"])] for one in warnings]
    table = _table("The last warning about each pod", ["Pod", "When", "What"], rows)
    return (
        "<section><h2>Served, but perhaps not as meant</h2>"
        f"{_scrolled('Pods that were warned of', table)}</section>"
    )


def _when(one: RefusalView, now: float) -> str:
    times = f", {one['times']} times" if one["times"] > 1 else ""
    return f"{span(now - one['at'])} ago{times}"


def _refused_pod(one: RefusalView) -> str:
    if one["claim"]:
        return f"claim {_text(one['claim'])}"
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


def _legend(runbook: str | None) -> str:
    words = "".join(
        f'<div id="{state.anchor}"><dt>{state.word}</dt><dd>{_code(state.meaning)}.'
        f" {_code(state.todo)} <small>{_runbook(runbook, state.part)}</small></dd></div>"
        for state in STATES
    )
    return f'<section><h2>What the states mean</h2><dl class="legend">{words}</dl></section>'


def _runbook(runbook: str | None, part: str) -> str:
    """The part of the runbook about a state: a link, where somebody said where it can be read."""
    if runbook is None:
        return f"docs/runbook.md#{part}"
    return f'<a href="{_text(runbook)}#{part}">Runbook: {part.replace("-", " ")}</a>'


def _code(words: str) -> str:
    """Words with commands between backquotes; whoever else writes some gets no more than that."""
    return _QUOTED.sub(r"<code>\1</code>", _text(words))


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
    reasons = [region["reason"]]
    if region["refused"]:
        # What the hardware said is often where the refusal begins; its rest says what to do.
        if region["refused"].startswith(region["reason"]):
            reasons.clear()
        reasons.append(f"refused: {region['refused']}")
    return "".join(
        f'<p class="note"><strong>{_short(region["region"])}:</strong> {_code(reason)}</p>\n'
        for reason in reasons
        if reason
    )


def _owner(owner: OwnerView) -> str:
    if owner["claim"]:
        return _text(owned_by(owner)).replace("/", "/<wbr>")
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
