"""Figures: what was measured, what it should be, and what the Go peer needs for the same."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is held against, in the figure's unit; None where there is nothing.

    Attributes:
        target: what the project wants at most.
        go: what the Go peer, the Intel FPGA plugin, was measured at with cards of one region.
    """

    target: float | None = None
    go: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure.

    Attributes:
        cards: the simulated cards, as FPGA_PLUGIN_SIMULATED_CARDS says it.
        name: what was measured.
        value: the figure.
        unit: of `value` and `goal`.
        goal: what it is held against.
        reference: the same of what the plugin is made of, from the same run; None: there is none.
        samples: how many measurements it is made of.
        note: what a reader has to know of it.
    """

    cards: str
    name: str
    value: float
    unit: str
    goal: Goal = Goal()
    reference: float | None = None
    samples: int = 1
    note: str = ""

    def as_json(self) -> dict[str, object]:
        """For machines."""
        return asdict(self)


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which `percent` of the values lie."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def table(figures: Sequence[Figure]) -> str:
    """For people; figures come in groups of the same cards."""
    head = ("", "measured", "reference", "ratio", "target", "Go peer", "n", "")
    rows: list[tuple[str, ...]] = []
    group = ""
    for figure in figures:
        if figure.cards != group:
            group = figure.cards
            rows += [("",) * len(head), (group, *("",) * (len(head) - 1))]
        rows.append(
            (
                f"  {figure.name}",
                f"{number(figure.value)} {figure.unit}",
                number(figure.reference),
                number(figure.value / figure.reference if figure.reference else None),
                number(figure.goal.target),
                number(figure.goal.go),
                str(figure.samples),
                figure.note,
            )
        )
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(_line(row, widths) for row in (head, *rows))


def _line(row: tuple[str, ...], widths: Sequence[int]) -> str:
    name, *numbers, note = row
    cells = [name.ljust(widths[0])]
    cells += [text.rjust(width) for text, width in zip(numbers, widths[1:-1], strict=True)]
    return "  ".join([*cells, note]).rstrip()


def number(value: float | None) -> str:
    """For people; `-` where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"  # noqa: PLR2004
