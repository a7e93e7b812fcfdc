"""What on a node needs an operator: the same words in table, page and exit code."""

from dataclasses import dataclass
from typing import Final

from fpga_plugin.observability.schema import CardView, RegionView, StatusView


@dataclass(frozen=True, slots=True)
class Trouble:
    """One kind of trouble.

    Attributes:
        count: how much of it there is.
        kind: what it is, and where that is known why.
        state: which state of `states` says what to do about it.
        urgent: pods do not get what they could have; else it is only to be known.
    """

    count: int
    kind: str
    state: str
    urgent: bool

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.count} {self.kind}"


def troubles(status: StatusView) -> list[Trouble]:
    """Those that there are, what is urgent first."""
    counts = status["trouble"]
    kinds = [
        (counts["failed"], "failed", "faulted", True),
        *(
            (count, f"unusable: {why}", "unusable", True)
            for why, count in sorted(counts["unusable"].items())
        ),
        (counts["refused"], "refused", "refused", True),
        (counts["drained"], "drained", "drained", False),
        (counts["kept"], "kept for debugging", "kept", False),
        (counts["never_cleared"], "never cleared", "never cleared", False),
    ]
    return [Trouble(*one) for one in kinds if one[0]]


def needs_somebody(status: StatusView) -> bool:
    """Whether pods lack devices that they could have if an operator acted."""
    return not status["ready"] or any(one.urgent for one in troubles(status))


URGENT: Final = frozenset({"faulted", "refused", "unusable"})
"""States of a region that need an operator."""


def states_of(card: CardView, region: RegionView) -> list[str]:
    """Which states of `states` that say more than its condition hold of a region."""
    found = {
        "faulted": region["failed"],
        "refused": bool(region["refused"]),
        "drained": card["drained"],
        "kept": region["kept"] is not None,
        "unusable": bool(region["unusable"]),
    }
    return [state for state, holds in found.items() if holds]


def troubled(card: CardView) -> bool:
    """Whether the card, or a region of it, is among what is urgent."""
    return not card["present"] or any(
        not URGENT.isdisjoint(states_of(card, one)) for one in card["regions"]
    )


def problems(status: StatusView) -> StatusView:
    """The status without what is well: other cards, pods that do not wait any more, warnings."""
    return {
        **status,
        "cards": [card for card in status["cards"] if troubled(card)],
        "refusals": [one for one in status["refusals"] if one["open"]],
        "warnings": [],
    }
