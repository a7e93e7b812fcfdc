"""What one tenant of a card may leave for the next: on-card memory.

On-card memory (DDR, HBM) outlives a partial reconfiguration. Linux clears it for the first revision
of the memory feature alone (drivers/memory/dfl-emif.c, dfl_emif_visible).
"""

import errno
from collections.abc import Iterable

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.dfl.handles import fme_of
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card
from fpga_plugin.hardware.sysfs import children


def memory_clear_knobs(kernel: Kernel, fme: str) -> Iterable[str]:
    """Attributes that clear one bank each of a card's memory, once dfl-emif is bound.

    Raises:
        OSError: sysfs cannot be listed.
    """
    for device in _features(kernel, fme):
        yield from children(kernel, device, r"inf[0-7]_clear")


def some_memory_stays(kernel: Kernel, fme: str) -> bool:
    """Whether a bank of memory that dfl-emif shows has no knob that clears it.

    Raises:
        OSError: sysfs cannot be listed.
    """
    return any(
        not kernel.exists(path.removesuffix("_init_done") + "_clear")
        for device in _features(kernel, fme)
        for path in children(kernel, device, r"inf[0-7]_init_done")
    )


def clear_memory(kernel: Kernel, card: Card) -> None:
    """Clear all banks of a card's memory; dfl-emif waits up to 5 s for each.

    Raises:
        HardwareError: a bank was not cleared, or there is no way to clear any.
    """
    try:
        banks = list(memory_clear_knobs(kernel, fme_of(card).sysfs))
    except OSError as error:
        raise HardwareError(
            f"the memory of card {card.id} cannot be looked up ({error.strerror})",
            hint="see the kernel's log",
        ) from error
    if not banks:
        raise HardwareError(
            f"card {card.id} has no documented way to clear its memory", hint="is dfl-emif loaded?"
        )
    for bank in banks:
        try:
            kernel.write(bank, "1")
        except OSError as error:
            why = "timed out" if error.errno == errno.ETIMEDOUT else f"failed ({error.strerror})"
            raise HardwareError(
                f"clearing memory bank {bank} of card {card.id} {why}",
                hint="what the last user left may still be in it; see the kernel's log",
            ) from error


def _features(kernel: Kernel, fme: str) -> Iterable[str]:
    return children(kernel, fme, r"dfl_dev\.[0-9]{1,9}")
