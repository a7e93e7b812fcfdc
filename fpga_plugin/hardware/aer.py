"""PCI Express errors that the kernel has counted on a card's functions.

The counters (`aer_dev_fatal`, `aer_dev_correctable`: Linux, sysfs-bus-pci-devices-aer_stats) only
grow, and have no times. So the values at the first look at a working card count as healthy, and
higher ones as an error. The error stays until the card is replaced or the operator has looked:
nothing in the counters says that the link is sound again.
"""

import re
from collections.abc import Iterable

from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card
from fpga_plugin.hardware.sysfs import optional
from fpga_plugin.ids import CardId, PciAddress

_TOTAL = re.compile(r"^TOTAL_ERR_[A-Z]{1,16} ([0-9]{1,20})$", re.ASCII | re.MULTILINE)


def fatal_link(card: CardId, count: int) -> tuple[str, str]:
    """Message and hint of a fault: the link had so many fatal errors."""
    return (
        f"fatal: {count} PCI Express errors on card {card} (aer_dev_fatal)",
        f"where it works, `fpga-plugin card retry {card}`",
    )


class AerCounters:
    """What each card's counters said at first; used from several threads."""

    def __init__(self) -> None:
        self._first: dict[tuple[CardId, PciAddress, str], int] = {}

    def fatal(self, kernel: Kernel, card: Card, *others: PciAddress) -> int:
        """Fatal errors since the card was first looked at; `others` are further functions of it."""
        return self._all(kernel, card, others, "aer_dev_fatal")

    def correctable(self, kernel: Kernel, card: Card, *others: PciAddress) -> int:
        """Errors that the link has mended itself, likewise."""
        return self._all(kernel, card, others, "aer_dev_correctable")

    def forget(self, card: CardId) -> None:
        """The counters' values at the next look count as healthy."""
        for key in [key for key in list(self._first) if key[0] == card]:
            self._first.pop(key, None)

    def _all(self, kernel: Kernel, card: Card, others: Iterable[PciAddress], name: str) -> int:
        functions = (card.address, *others)
        return sum(self._risen(kernel, card.id, function, name) for function in functions)

    def _risen(self, kernel: Kernel, card: CardId, function: PciAddress, name: str) -> int:
        try:
            text = optional(kernel, f"/sys/bus/pci/devices/{function}/{name}")
        except OSError:
            text = None
        if text is None or (found := _TOTAL.search(text)) is None:
            return 0  # a kernel without AER; a dying card is seen by its other attributes
        total, key = int(found[1]), (card, function, name)
        first = self._first.setdefault(key, total)
        if total < first:  # another function in the same slot
            self._first[key] = first = total
        return total - first
