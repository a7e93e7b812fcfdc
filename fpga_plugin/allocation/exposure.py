"""What a card exposes in spite of a scrub, and whether the operator gives it out nevertheless.

A scrub cannot clear memory that has no knob, and nothing but an IOMMU keeps an accelerator from the
host's memory. The operator says whether such a card is given out. Present owners keep theirs.
"""

from dataclasses import dataclass

from fpga_plugin.hardware.model import Card, Iommu
from fpga_plugin.settings.settings import Exposure

NEVER_CLEARED = "never cleared"
"""What the memory of a card is called that has no knob for it, wherever its state is shown."""


@dataclass(frozen=True, slots=True)
class ExposurePolicy:
    """What the operator allows.

    Attributes:
        uncleared_memory: of cards whose memory is never cleared.
        untranslated_dma: of cards whose DMA reaches all of the host's memory, or may, or reaches
            other devices.
    """

    uncleared_memory: Exposure = Exposure.ALLOW
    untranslated_dma: Exposure = Exposure.ALLOW

    def refusal(self, card: Card, *, whole: bool) -> str:
        """Why no new owner gets the card as a whole, or a region of it; empty: one may."""
        reasons = []
        if card.never_cleared and _refuses(self.uncleared_memory, whole=whole):
            setting = f"FPGA_PLUGIN_UNCLEARED_MEMORY={self.uncleared_memory.value}"
            reasons.append(f"its memory is {NEVER_CLEARED} ({setting})")
        if card.iommu is not Iommu.TRANSLATE and _refuses(self.untranslated_dma, whole=whole):
            setting = f"FPGA_PLUGIN_UNTRANSLATED_DMA={self.untranslated_dma.value}"
            reasons.append(f"its IOMMU mode is {card.iommu.value} ({setting})")
        return ", and ".join(reasons)

    def note(self, card: Card) -> str:
        """What the policy refuses of a card, and why; empty: nothing."""
        if why := self.refusal(card, whole=True):
            return f"given to nobody: {why}"
        if why := self.refusal(card, whole=False):
            return f"given only as a whole: {why}"
        return ""


def _refuses(exposure: Exposure, *, whole: bool) -> bool:
    return exposure is Exposure.REFUSE or (exposure is Exposure.REFUSE_REGIONS and not whole)


def memory_state(card: Card, *, pending: bool) -> str:
    """Whether a card's memory may still hold what earlier tenants left."""
    if card.never_cleared:
        return NEVER_CLEARED
    return "not cleared yet" if pending else "cleared"
