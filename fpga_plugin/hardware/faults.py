"""What is wrong with a region's hardware, and what helps."""

import enum
from dataclasses import dataclass


class FaultKind(enum.Enum):
    """What the plugin may do about a fault; each value is the word for it."""

    POISONED = "rebind"
    """A failed PR left the region so that every later one fails. A rebind of the card's driver
    helps, and nothing less. Once the region answers again, somebody did that."""

    TRANSIENT = "retry"
    """It may pass, as heat does. Work that failed under it is tried again when it has passed."""

    CURABLE = "scrub"
    """A tenant's image may have caused it, and a scrub may end it: an accelerator that no longer
    answers behind a port that does. Nobody gets the region meanwhile, but it may be worked on. What
    the region shows after the blank bitstream was programmed decides."""

    LASTING = "none"
    """Only the operator can help. Work that fails under it leaves the region FAULTED."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a region must not be given to any pod.

    Attributes:
        kind: what the plugin may do about it.
        message: what the hardware says, for people (`thermal: AP6 has shut down region ...`).
        hint: what the node's operator can do; empty: docs/runbook.md has it.
    """

    kind: FaultKind
    message: str
    hint: str = ""

    @property
    def told(self) -> str:
        """Message and hint, for the operator."""
        return f"{self.message}; {self.hint}" if self.hint else self.message

    @property
    def stops_work(self) -> bool:
        """Whether it also forbids to scrub and to program; every fault forbids to offer."""
        return self.kind is not FaultKind.CURABLE

    def lifts(self, before: "Fault") -> bool:
        """Whether a region may be worked on now that it has this fault in place of `before`."""
        return before.stops_work and not self.stops_work
