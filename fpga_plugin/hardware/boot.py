"""Which boot of the node this is."""

from fpga_plugin.errors import HardwareError
from fpga_plugin.hardware.kernel import Kernel


def read_boot_id(kernel: Kernel) -> str:
    """The kernel's boot id.

    Raises:
        HardwareError: it cannot be read from /proc.
    """
    try:
        return kernel.boot_id()
    except OSError as error:
        raise HardwareError(
            f"the kernel's boot id cannot be read ({error.strerror})", hint="is /proc mounted?"
        ) from error
