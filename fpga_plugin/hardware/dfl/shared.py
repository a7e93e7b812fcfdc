"""What one tenant of a card may leave for the next: on-card memory.

On-card memory (DDR, HBM) outlives a partial reconfiguration. Linux clears it for the first revision
of the memory feature alone (drivers/memory/dfl-emif.c, dfl_emif_visible).
"""

from collections.abc import Iterable

from fpga_plugin.hardware.kernel import Kernel
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


def _features(kernel: Kernel, fme: str) -> Iterable[str]:
    return children(kernel, fme, r"dfl_dev\.[0-9]{1,9}")
