"""What one tenant of a card may leave for the next, or reach of the host: memory and DMA.

On-card memory (DDR, HBM) outlives a partial reconfiguration. Linux clears it for the first revision
of the memory feature alone (drivers/memory/dfl-emif.c, dfl_emif_visible). An AFU reads and writes
the host's memory by the DMA of the card's PCI functions: only an IOMMU that translates limits it.
"""

from collections.abc import Iterable

from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Iommu
from fpga_plugin.hardware.sysfs import children, optional
from fpga_plugin.hardware.vfio.defs import NO_IOMMU_GROUP

_TYPES = {
    "DMA": Iommu.TRANSLATE,
    "DMA-FQ": Iommu.TRANSLATE,
    "unmanaged": Iommu.TRANSLATE,
    "identity": Iommu.IDENTITY,
}
"""Of an IOMMU group's default domain (drivers/iommu/iommu.c, iommu_group_show_type)."""

_WEAKEST_FIRST = (Iommu.NONE, Iommu.IDENTITY, Iommu.UNKNOWN, Iommu.TRANSLATE)


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


def iommu(kernel: Kernel, functions: Iterable[str]) -> Iommu:
    """What limits the DMA of a card whose PCI functions these are: the weakest of them counts."""
    return min((_of_function(kernel, each) for each in functions), key=_WEAKEST_FIRST.index)


def _of_function(kernel: Kernel, function: str) -> Iommu:
    group = f"{function}/iommu_group"
    try:
        if not kernel.exists(group):
            return Iommu.NONE
        if optional(kernel, f"{group}/name") == NO_IOMMU_GROUP:
            return Iommu.NONE
        return _TYPES.get(optional(kernel, f"{group}/type") or "", Iommu.UNKNOWN)
    except OSError:
        return Iommu.UNKNOWN
