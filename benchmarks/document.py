"""`make bench BENCH_ARGS=--write`: the measured block of docs/performance.md, made from one run.

All figures are kept as a listing (`measured.txt`) and as data (`measured.json`), so that the next
run says what got slower.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from figures import Figure, number, table
from runtime import ROOT

PAGE = ROOT / "docs" / "performance.md"
KEPT = ROOT / "benchmarks" / "measured.json"
LISTING = ROOT / "benchmarks" / "measured.txt"
BEGIN, END = "<!-- make bench: begin -->\n", "<!-- make bench: end -->\n"

SLOWER = 1.1
"""A figure that is more than this much of the last one's is named."""

Key = tuple[str, str]


def _value(figure: Figure) -> str:
    return number(figure.value)


def _ratio(figure: Figure) -> str:
    return number(figure.value / figure.reference if figure.reference else None)


_START, _CPU = "start to registered, first resource", "CPU of the plugin until then"
_TREND: Sequence[tuple[str, str, Callable[[Figure], str]]] = (
    ("start to registered, first resource, ms", _START, _value),
    ("of a bare start", _START, _ratio),
    ("CPU until then, ms", _CPU, _value),
    ("of the bare stack's", _CPU, _ratio),
    ("highest RSS of a first start, MiB", "highest RSS meanwhile", _value),
    ("RSS at once, MiB", "RSS at once", _value),
    ("idle wake-ups a minute", "idle wake-ups", _value),
    ("Allocate, 1 client, of the bare stack's median", "Allocate, p50, 1 client", _ratio),
    ("Allocate, 16 clients, of the bare stack's median", "Allocate, p50, 16 clients", _ratio),
    ("PreStart with 1 MiB beyond the bare hardware, ms", "PreStart with 1 MiB", _value),
    ("a pod's life beyond the two PRs, ms", "a pod's life", _value),
    ("card plugged in to its list, ms", "card plugged in to its list", _value),
    ("scrape of the metrics, ms", "scrape of the metrics", _value),
)


def around() -> tuple[str, str]:
    """What stands in the page before the block and after it.

    Raises:
        ValueError: the page has no such block.
    """
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        msg = f"{PAGE} has no block between {BEGIN.strip()} and {END.strip()}"
        raise ValueError(msg)
    return before, after


def write(here: Mapping[str, object], figures: Sequence[Figure], day: str) -> None:
    """Replace the block in the page and the listing, and keep the figures for the next run.

    Raises:
        ValueError: the page has no such block.
    """
    before, after = around()
    last = json.loads(KEPT.read_text()) if KEPT.exists() else None
    PAGE.write_text(before + BEGIN + block(here, figures, day, last) + END + after)
    LISTING.write_text(f"{_measured(here, day)}\n{table(figures)}\n")
    kept = {"day": day, "machine": here, "figures": [figure.as_json() for figure in figures]}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


def block(
    here: Mapping[str, object],
    figures: Sequence[Figure],
    day: str,
    last: Mapping[str, object] | None,
) -> str:
    """What stands in the page: the machine, the trend by cards, what got slower."""
    parts = [_measured(here, day), _trend(figures)]
    if last is not None:
        parts.append(_slower(figures, last) if _same(here, last) else _ELSEWHERE.format(**last))
    return "\n" + "\n".join(parts) + "\n"


def _measured(here: Mapping[str, object], day: str) -> str:
    machine = "; ".join(f"{key} {value}" for key, value in here.items())
    return f"Measured on {day}. {machine}.\n"


def _trend(figures: Sequence[Figure]) -> str:
    known = {(figure.cards, figure.name): figure for figure in figures}
    cards = [
        each for each in dict.fromkeys(figure.cards for figure in figures) if "x" in each[1:-1]
    ]
    cards = [each for each in cards if (each, _START) in known]
    lines = [
        f"| cards x regions | {' | '.join(cards)} |",
        "|---" * (len(cards) + 1) + "|",
    ]
    for label, name, shown in _TREND:
        cells = [shown(known[each, name]) if (each, name) in known else "-" for each in cards]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


_ELSEWHERE = "Not held against the figures of {day}: they are of another machine.\n"


def _same(here: Mapping[str, object], last: Mapping[str, object]) -> bool:
    """Whether the last figures are of this machine, whatever else it did then."""
    there = last["machine"]
    assert isinstance(there, Mapping)
    return {**here, "load": None} == {**there, "load": None}


def _slower(figures: Sequence[Figure], last: Mapping[str, object]) -> str:
    """What rose beside its reference, or in MiB: what says something on another day as well."""
    before = {key: value for figure in _kept(last) for key, value in _lasting(figure).items()}
    rows = []
    for figure in figures:
        for key, now in _lasting(figure).items():
            then = before.get(key)
            if then and now > then * SLOWER:
                rows.append(f"| {key[0]}: {key[1]} | {number(then)} | {number(now)} |")
    if not rows:
        return f"Nothing is more than a tenth slower or larger than on {last['day']}.\n"
    return "\n".join([f"| slower or larger | {last['day']} | now |", "|---|---|---|", *rows]) + "\n"


def _kept(last: Mapping[str, object]) -> list[Figure]:
    rows = last["figures"]
    assert isinstance(rows, list)
    return [
        Figure(row["cards"], row["name"], row["value"], row["unit"], reference=row["reference"])
        for row in rows
    ]


def _lasting(figure: Figure) -> dict[Key, float]:
    if figure.unit == "MiB":
        return {(figure.cards, f"{figure.name}, MiB"): figure.value}
    if figure.reference:
        return {(figure.cards, f"{figure.name}, of its reference"): figure.value / figure.reference}
    return {}
