"""Rows of text in columns, for every table that a command prints."""

from collections.abc import Sequence

GAP = "  "


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row; all rows have as many cells as the first."""
    widths = _widths(rows)
    return [
        GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def width_of(rows: Sequence[Sequence[str]]) -> int:
    """How wide the widest line may be."""
    return sum(len(GAP) + width for width in _widths(rows)) - len(GAP)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]
