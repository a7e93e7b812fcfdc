"""The status as text, fitted to the terminal's width.

Names of pods and messages are foreign text: what is not printable is shown as `?`, so that no name
can move the cursor.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, Final

from fpga_plugin.allocation.journal.records import Condition
from fpga_plugin.host.columns import columns, width_of
from fpga_plugin.ids import with_name
from fpga_plugin.observability.schema import (
    CardStateView,
    CardView,
    EventView,
    HistoryView,
    InspectionView,
    MeasureView,
    OwnerView,
    ProblemView,
    ProgrammedView,
    RefusalView,
    RegionView,
    StatusView,
    WhoView,
)
from fpga_plugin.observability.states import STATES
from fpga_plugin.observability.trouble import URGENT, states_of, troubles

MIN_WIDTH: Final = 60
NO_LIMIT: Final = 10_000
"""Where the output is no terminal: nothing is cut."""

_SHORT_AFU = 12
_INDENT = 2  # of a card's regions
_FEW_SENSORS: Final = 3
_NO_BREAK: Final = "\xa0"
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))

_NOT_YET: Final = "not cleared yet"
"""As `allocation.obstacles.exposure.memory_state` says it."""

_CONDITIONS: Final = {condition.value for condition in Condition}

MEANINGS: Final = "\n".join(
    (
        "ownership:",
        "  FREE        nobody has it",
        "  CLAIMED     kubelet gave it to a pod",
        "  STARTED     a container has it",
        "condition:",
        *(
            f"  {state.word.upper():<11} {state.meaning}"
            for state in STATES
            if state.word.upper() in _CONDITIONS
        ),
        "BLANK (memory not cleared yet): the card's memory, which all its regions share,",
        "may hold what an earlier tenant left. It is cleared once no region of the card",
        "is in use, and the whole card is not given out until then.",
        "health:       what kubelet is sent; an Unhealthy region is given to nobody",
    )
)
"""What the words mean, for `--help`."""


def table(status: StatusView, *, width: int = NO_LIMIT, part: bool = False) -> str:
    """The whole status, or a part of it."""
    width = max(width, MIN_WIDTH)
    now = status["time"]
    node = f" on {status['node']}" if status["node"] else ""
    ready = "ready" if status["ready"] else "NOT READY"
    lines = [
        f"fpga-plugin {status['version']}{node}: {ready}, up {span(now - status['started'])}",
        *_trouble(status),
        *_noted([*status["not_ready"], *status["notes"]], width),
    ]
    if status["scrub"] != "required":
        lines += _noted([f"scrubbing is {status['scrub']} (FPGA_PLUGIN_SCRUB)"], width)
    lines += _sandbox(status["sandbox"], width)
    if not part and not status["cards"] and not status["problems"]:
        lines += ["", "no FPGA cards on this node"]
    for card in status["cards"]:
        lines += ["", *_card(card, now, width)]
    for problem in status["problems"]:
        lines += ["", f"card {problem['card']}  skipped"]
        lines += _noted([skipped(problem)], width)
    if status["refusals"]:
        lines += ["", *_refusals(status["refusals"], now, width)]
    if status["warnings"]:
        lines += ["", "served, but perhaps not as meant, the last time of each pod:"]
        for warning in status["warnings"]:
            lines += [*_head(warning, now, width), *_message(warning, width)]
    return "\n".join(printable(line).rstrip() for line in lines)


def _trouble(status: StatusView) -> list[str]:
    """How much of the node needs an operator, in one line; unknown while the plugin starts."""
    words = [one.words for one in troubles(status)]
    if not words and status["ready"]:
        words.append("no trouble")
    return [f"  {', '.join(words)}"] if words else []


def history_table(history: HistoryView, *, width: int = NO_LIMIT) -> str:
    """What happened to the regions, the newest first."""
    if not history["events"]:
        return "nothing happened to these regions, as far back as the history goes"
    width = max(width, MIN_WIDTH)
    rows: list[list[str]] = [["WHEN", "REGION", "WHAT", "POD"]]
    rows += [
        [
            f"{datetime.fromtimestamp(one['at'], UTC):%Y-%m-%d %H:%M:%SZ}",
            one["region"],
            happened(one),
            event_owner(one),
        ]
        for one in history["events"]
    ]
    lines = []
    for row, event in zip(columns(rows), (None, *history["events"]), strict=True):
        lines += _wrapped(printable(row), width, "", "    ")
        if event is not None and event["message"]:
            lines += _wrapped(printable(event["message"]), width, "    ", "    ")
    return "\n".join(lines)


def event_owner(event: EventView) -> str:
    """The former owner, if known."""
    pod = event["pod"] or event["pod_uid"]
    if not event["claim"]:
        return pod or "-"
    return f"claim {event['claim']}" + (f", pod {pod}" if pod else "")


def happened(event: EventView) -> str:
    """What happened, with which bitstream and how long it took, in some words."""
    words = event["event"]
    if event["message"] and words in {"programmed", "scrubbed"}:
        words = f"not {words}"
    if event["afu_id"] and event["event"] == "programmed":
        words += f" {event['bitstream'] or event['afu_id']}"
    if event["seconds"] is None:
        return words
    if event["event"] == "released":
        return f"{words} after {span(event['seconds'])}"
    return f"{words} in {event['seconds']:.3f} s"


def size(count: int) -> str:
    """Bytes, in a unit that shows three digits or four."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def _sandbox(measures: Sequence[MeasureView], width: int) -> list[str]:
    """Which measures of the sandbox hold; notes about those that do not."""
    held = [f"{one['name']} ({one['detail']})" for one in measures if one["holds"]]
    lines = _wrapped(f"confined by {', '.join(held)}", width, "  ", "    ") if held else []
    missing = [f"{one['name']}: {one['detail']}" for one in measures if not one["holds"]]
    return lines + _noted(missing, width)


def span(seconds: float) -> str:
    """A time in its largest unit: `3 min`."""
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{int(seconds // unit)} {name}"
    return "0 s"


def printable(text: str) -> str:
    """Foreign text without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _noted(notes: Iterable[str], width: int) -> list[str]:
    lines: list[str] = []
    for note in notes:
        lines += _wrapped(printable(note), width, "  ! ", "    ")
    return lines


def skipped(problem: ProblemView) -> str:
    """Why a card is skipped, and what helps."""
    return ": ".join(filter(None, (problem["error"], problem["hint"])))


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    """Wrapped text. Readers copy paths and ids, which have hyphens: no line breaks at one."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _card(card: CardView, now: float, width: int) -> list[str]:
    facts = [f"card {card['card']}", card["mode"] if card["present"] else "GONE"]
    facts += filter(None, [card["description"]])
    if card["drained"]:
        facts.append("DRAINED")
    if card["interface_id"]:
        facts.append(f"interface {card.get('interface_alias') or card['interface_id']}")
    if card["numa_node"] is not None:
        facts.append(f"NUMA {card['numa_node']}")
    if card["memory"]:
        facts.append(f"memory: {card['memory']}")
    if untested := card.get("untested"):
        facts.append(untested)
    if card["iommu"]:
        facts.append(f"IOMMU: {card['iommu']}")
    for form, values in (("{:.0f} C", card["temperatures"]), ("{:.1f} W", card["power"])):
        facts += [f"{name} {value}".lstrip() for name, value in measured(form, values)]
    kept = "  ".join(fact.replace(" ", _NO_BREAK) for fact in facts)  # 45 C is one word
    lines = [line.replace(_NO_BREAK, " ") for line in _wrapped(kept, width, "", "     ")]
    lines += _noted([card["note"]] if card["note"] else [], width)
    if passing := card.get("passing"):
        lines += _wrapped(printable(passing), width, "    ", "    ")
    lines += _rows(card["regions"], now, width, memory=card["memory"])
    for region in card["regions"]:
        lines += _said(card, region, width)
    return lines


def reasons(region: RegionView) -> list[str]:
    """Why a region is as it is, and why its owner was refused: each thing once.

    What the hardware said is often where the refusal begins; its rest says what to do.
    """
    refused = f"refused: {region['refused']}" if region["refused"] else ""
    if region["reason"] and region["reason"] in refused:
        return [refused]
    return [one for one in (region["reason"], refused) if one]


def _said(card: CardView, region: RegionView, width: int) -> list[str]:
    """What there is to say of a region besides its row."""
    lines: list[str] = []
    mark = "    " if URGENT.isdisjoint(states_of(card, region)) else "  ! "
    for reason in reasons(region):
        lines += _wrapped(printable(f"{region['region']}: {reason}"), width, mark, "    ")
    if (kept := region["kept"]) is not None:
        left = f"{region['region']}: scrubbed in {span(kept['seconds_left'])}, or by"
        lines += _wrapped(f"{left} `fpga-plugin card release`", width, "    ", "    ")
    if region["clock"] is not None:
        mark = "  ! " if region["clock"]["state"] == "not checked" else "  "
        text = f"{region['region']} clock: {region['clock']['detail']}"
        lines += _wrapped(printable(text), width, mark, "    ")
    return lines


def measured(form: str, values: Mapping[str, float]) -> list[tuple[str, str]]:
    """A card's sensors of one kind, as name and value, few enough to be read at a glance.

    A sensor is named where there is another one. Of a board full of them the highest is shown;
    `--json` and the metrics have all.
    """
    if len(values) > _FEW_SENSORS:
        name, highest = max(values.items(), key=itemgetter(1))
        return [(name, f"{form.format(highest)}, highest of {len(values)}")]
    return [(name if len(values) > 1 else "", form.format(v)) for name, v in values.items()]


def _rows(regions: Sequence[RegionView], now: float, width: int, *, memory: str) -> list[str]:
    if not regions:
        return []
    rows: list[list[str]] = [
        ["REGION", "NODE", "OWNERSHIP", "CONDITION", "BITSTREAM", "HEALTH", "SINCE", "OWNER"]
    ]
    rows += [
        [
            region["region"],
            region["node"],
            region["ownership"],
            _condition(region, memory),
            region["bitstream"] or region["afu_id"] or "-",
            "Healthy" if region["healthy"] else "Unhealthy",
            _since(region["owner"], now),
            _owner(region["owner"]),
        ]
        for region in regions
    ]
    if (
        _INDENT + width_of(rows) > width
    ):  # its beginning distinguishes bitstreams; --json has all of it
        rows = [[*row[:4], row[4][:_SHORT_AFU], *row[5:]] for row in rows]
    if _INDENT + width_of(rows) > width:  # the card is in the line above
        rows = [[row[0].rpartition("-")[2], *row[1:]] for row in rows]
    if _INDENT + width_of(rows) > width:  # `card list` has the nodes
        rows = [[row[0], *row[2:]] for row in rows]
    owners = [""] * len(rows)
    if _INDENT + width_of(rows) > width:  # who has it is what is looked for: a line of its own
        owners = ["", *(_had(region["owner"], now) for region in regions)]
        rows = [row[:-2] for row in rows]
    indent = " " * (4 + max(len(row[0]) for row in rows))
    lines = []
    for row, owner in zip(columns(rows), owners, strict=True):
        lines.append(f"  {row}")
        lines += _wrapped(owner, width, indent, indent)
    return lines


def _condition(region: RegionView, memory: str) -> str:
    """A clean region of a card whose memory is not: the exception stands beside the claim."""
    if memory == _NOT_YET and region["condition"] == "BLANK":
        return f"BLANK (memory {memory})"
    return region["condition"]


def _since(owner: OwnerView | None, now: float) -> str:
    if owner is None or owner["since"] is None:
        return "-"
    return span(now - owner["since"])


def _owner(owner: OwnerView | None) -> str:
    if owner is None:
        return "-"
    whole = " (whole card)" if "-p" not in owner["device"] else ""
    return owned_by(owner) + whole


def _had(owner: OwnerView | None, now: float) -> str:
    """Who has it, and for how long; empty where nobody does."""
    if owner is None:
        return ""
    since = _since(owner, now)
    return _owner(owner) + (f", for {since}" if since != "-" else "")


def owned_by(one: WhoView) -> str:
    """A pod; with DRA a claim, for which of its requests, and its pods."""
    if not one["claim"]:
        return _pod(one["namespace"], one["pod"], one["pod_uid"])
    asked = f" (request {', '.join(one['requests'])})" if one["requests"] else ""
    pods = one["pods"]
    used = f", pod {pods[0]}" if len(pods) == 1 else f", {len(pods)} pods" if pods else ""
    return printable(f"claim {one['namespace']}/{one['claim']}{asked}{used}")


def _pod(namespace: str, name: str, uid: str) -> str:
    if name:
        return printable(f"{namespace}/{name}")
    return printable(f"pod {uid}") if uid else "a pod not known yet"


def _refusals(refusals: Sequence[RefusalView], now: float, width: int) -> list[str]:
    """Those of pods that wait, with why; a line for each other one."""
    waiting = [one for one in refusals if one["open"]]
    over = [one for one in refusals if not one["open"]]
    counts = f"{len(waiting)} now" + (f", {len(over)} over" if over else "")
    lines = [f"refused, the last time of each pod ({counts}):"]
    for one in waiting:
        lines += [*_head(one, now, width), *_message(one, width)]
    if over:
        # Not --history: it has what concerns a region, and the last of each.
        lines += ["  over: `fpga-plugin status --json` has the reasons"]
        lines += [line for one in over for line in _head(one, now, width)]
    return lines


def _message(refusal: RefusalView, width: int) -> list[str]:
    return _wrapped(printable(refusal["message"]), width, "    ", "    ")


def _head(refusal: RefusalView, now: float, width: int) -> list[str]:
    times = f", {refusal['times']} times" if refusal["times"] > 1 else ""
    pod = _pod(refusal["namespace"], refusal["pod"], refusal["pod_uid"])
    if refusal["claim"]:
        known = f", {pod}" if refusal["pod"] or refusal["pod_uid"] else ""
        pod = printable(f"claim {refusal['claim']}{known}")
    elif not refusal["pod"] and not refusal["pod_uid"]:
        pod = f"{pod}, devices {printable(', '.join(refusal['devices']))}"
    head = f"{pod}  {span(now - refusal['at'])} ago{times}  {refusal['method']} {refusal['status']}"
    return _wrapped(head, width, "  ", "    ")


def inspection_table(found: InspectionView, *, now: float, width: int = NO_LIMIT) -> str:
    """A card as its hardware shows it now."""
    width = max(width, MIN_WIDTH)
    lines = [*_card(found["card"], now, width), "", "the hardware says now:"]
    for one in found["regions"]:
        reads = one["afu_id"] + (f" ({one['bitstream']})" if one["bitstream"] else "")
        lines += _wrapped(
            printable(f"{one['region']}  {one['error'] or f'AFU id {reads}'}"), width, "  ", "    "
        )
    raised = [f"{name} {value:#x}" for name, value in found["errors"].items() if value]
    silent = len(found["errors"]) - len(raised)
    said = f"{', '.join(raised) or 'none raised'}; {silent} others are 0"
    lines += _wrapped(printable(f"error registers: {said}"), width, "  ", "    ")
    if found["events"]:
        lines += ["", history_table({"time": now, "events": found["events"]}, width=width)]
    return "\n".join(
        printable(line).rstrip() for part in lines for line in part.splitlines() or [""]
    )


def card_table(state: CardStateView, operation: str) -> str:
    """A card after an operation; after `drain` also how far it is from being pulled."""
    service = "out of service" if state["drained"] else "in service"
    lines = [f"card {state['card']}: {service}{'' if state['present'] else ', not there'}"]
    lines += [
        f"  {holder['device']}  {'in use by' if holder['started'] else 'given to'}"
        f" {owned_by(holder)}{_from(holder['since'])}"
        for holder in state["holders"]
    ]
    lines += [f"  not clean: {printable(words)}" for words in state["not_clean"]]
    if operation != "drain":
        if state["drained"]:
            lines.append("`fpga-plugin card undrain` brings it back into service")
    elif state["may_be_pulled"]:
        lines.append("it may be pulled now")
    else:
        lines.append("it must not be pulled yet:")
        lines += [f"  {printable(words)}" for words in state["waits_for"]]
    return "\n".join(lines)


def functions_table(found: Mapping[str, Any]) -> str:
    """A card's PCI functions."""
    rows = [("FUNCTION", "ROLE", "DRIVER", "IOMMU GROUP")]
    for one in found["functions"]:
        group = "none"
        if one["group"] is not None:
            group = f"{one['group']} ({printable(one['translation']) or 'unknown'})"
        rows.append((one["address"], one["role"], printable(one["driver"]) or "none", group))
    return "\n".join(columns(rows))


def programmed_words(done: ProgrammedView) -> str:
    """What became of a programming by hand."""
    clock = done["clock"]
    said = "" if clock is None else f"{clock['state']}: {clock['detail']}"
    mark = "! " if clock is not None and clock["state"] == "not checked" else ""
    shown = with_name(done["afu_id"], done.get("name") or "")
    lines = [
        f"region {done['region']} is programmed, and reads AFU {shown}",
        *(f"  {name}  {seconds:.3f} s" for name, seconds in done["steps"].items()),
        f"  {mark}clock {said}",
        "`fpga-plugin card undrain` scrubs it",
    ]
    return "\n".join(map(printable, lines))


def _from(since: float | None) -> str:
    """Since when a pod has a device; in UTC, as in the log."""
    if since is None:
        return ""
    return f" since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%SZ}"
