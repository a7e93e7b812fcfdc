"""Errors of the FME that stay set until they are cleared, and fail the card as long as they are."""

import structlog

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.dfl import defs
from fpga_plugin.hardware.dfl.handles import fme_of
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card
from fpga_plugin.hardware.sysfs import number, optional

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def clear_pcie_errors(kernel: Kernel, card: Card) -> dict[str, int]:
    """Returns those that were cleared; waits for a PR of the card, which holds the FME's lock.

    What cannot be cleared is logged and stays: the card's health reports it.
    """
    found: dict[str, int] = {}
    for name in defs.PCIE_ERRORS:
        path = f"{fme_of(card).sysfs}/errors/{name}"
        try:
            text = optional(kernel, path)
            value = 0 if text is None else number(path, text)
            if value not in {0, defs.ALL_ONES_64}:
                kernel.write(path, f"0x{value:x}")
                found[name] = value
        except (HardwareError, OSError) as error:
            log.warning("card errors not cleared", card=card.id, path=path, error=str(error))
    return found
