"""What each state means, and what to do about it: the words that page and table link to.

The runbook (docs/runbook.md) has a part for each; tests/unit/observability/test_states.py keeps the
two together.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ShownState:
    """A state that an operator may look up.

    Attributes:
        word: as it is shown.
        meaning: what holds then.
        todo: what the operator does; empty where there is nothing to do.
        part: the anchor of its part of docs/runbook.md.
    """

    word: str
    meaning: str
    todo: str
    part: str

    @property
    def anchor(self) -> str:
        """Its id on the page."""
        return f"state-{self.word.replace(' ', '-')}"


STATES: Final = tuple(
    ShownState(*each)
    for each in (
        ("blank", "scrubbed and verified", "", "the-states"),
        ("programmed", "as its owner asked, or as an operator did by hand", "", "the-states"),
        ("scrubbing", "work on it is under way", "", "the-states"),
        (
            "dirty",
            "somebody's image or state may be on it; a scrub follows",
            "If it stays: the reason on the region says what the scrub waits for.",
            "the-states",
        ),
        (
            "unblanked",
            "reset, but the last image is still there",
            "Install the blank bitstream, and set FPGA_PLUGIN_SCRUB=required.",
            "the-states",
        ),
        (
            "faulted",
            "cannot be used until an operator mends it",
            "Do what the reason says; then `fpga-plugin card retry`.",
            "faults",
        ),
        (
            "refused",
            "its pod has it, and its container was not started",
            "The message says what is missing; kubelet tries again by itself.",
            "a-pod-does-not-start",
        ),
        (
            "drained",
            "taken out of service by `fpga-plugin card drain`: no new pod gets it",
            "`fpga-plugin card undrain` brings it back.",
            "take-a-card-out-of-service",
        ),
        (
            "kept",
            "as a container left it that failed, for debugging; nobody owns it, nobody is given it",
            "It is scrubbed when its time is up; `fpga-plugin card release` does it now.",
            "debug-a-pod",
        ),
        (
            "unusable",
            "free and well, but nobody can be given it until an operator acts",
            "The note on its card says what is missing: mostly the blank bitstream in the store.",
            "unusable-regions",
        ),
        (
            "unhealthy",
            "kubelet gives it to nobody",
            "The reason on the region or its card says why.",
            "faults",
        ),
        (
            "never cleared",
            "the card has no way to clear its memory: the next tenant can read the last one's",
            "Give such a card to one tenant only, or have its workloads clear what they used.",
            "the-states",
        ),
    )
)
"""In the order of the page's legend."""

ANCHORS: Final = {state.word: state.anchor for state in STATES}
