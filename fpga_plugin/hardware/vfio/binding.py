"""Gives a function to vfio-pci, and takes it back, by `driver_override`.

A function that has another driver is left alone: who bound it uses it. So is one that an operator
reserved for another driver by that very attribute. What was bound here is written down first
(`notes`), so that a process that dies in between leaves a fact behind.
"""

from fpga_plugin.errors import SlotUnusableError, quote
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.sysfs import optional
from fpga_plugin.hardware.vfio import defs
from fpga_plugin.hardware.vfio.function import Function, driver

DRIVER = f"/sys/bus/pci/drivers/{defs.DRIVER}"


def needs_binding(kernel: Kernel, function: Function) -> bool:
    """Whether a function has no driver yet.

    Raises:
        SlotUnusableError: it has, or is reserved for, another driver than vfio-pci, or cannot be
            looked at.
    """
    try:
        found = driver(kernel, function.address)
        reserved = None if found else _override(kernel, function)
    except OSError as error:
        raise SlotUnusableError(
            f"the driver of function {function.address} cannot be read ({error.strerror})",
            hint="see the kernel's log",
        ) from error
    if reserved not in {None, defs.DRIVER}:
        raise SlotUnusableError(
            f"function {function.address} of the slot is reserved for the driver {quote(reserved)}"
            " (driver_override)",
            hint="if nothing needs that any more, as root on the node: "
            f"echo > {function.sysfs}/driver_override",
        )
    if found is None:
        return True
    if found != defs.DRIVER:
        raise SlotUnusableError(
            f"function {function.address} of the slot has the driver {quote(found)}, so something"
            " else uses it",
            hint="if nothing does, as root on the node: "
            f"echo {function.address} > /sys/bus/pci/drivers/{found}/unbind",
        )
    return False


def bind(kernel: Kernel, function: Function) -> None:
    """Give a function that has no driver to vfio-pci.

    Raises:
        SlotUnusableError: it did not take it.
    """
    try:
        if not kernel.exists(DRIVER):
            raise SlotUnusableError(
                f"function {function.address} cannot be bound: the node has no vfio-pci",
                hint="load the module vfio-pci (/etc/modules-load.d), and restart the plugin",
            )
        kernel.write(f"{function.sysfs}/driver_override", defs.DRIVER)
        kernel.write(f"{DRIVER}/bind", str(function.address))
    except OSError as error:
        raise SlotUnusableError(
            f"function {function.address} cannot be bound to vfio-pci ({error.strerror})",
            hint="see the kernel's log; as root on the node: "
            f"echo vfio-pci > {function.sysfs}/driver_override; "
            f"echo {function.address} > {DRIVER}/bind",
        ) from error


def unbind(kernel: Kernel, function: Function) -> None:
    """Take a function off vfio-pci, if it has it, and forget the override that gave it to it.

    The kernel waits here for descriptors of the function: the caller makes sure that there are
    none.

    Raises:
        SlotUnusableError: it failed.
    """
    try:
        if driver(kernel, function.address) == defs.DRIVER:
            kernel.write(f"{DRIVER}/unbind", str(function.address))
        if _override(kernel, function) == defs.DRIVER:
            kernel.write(f"{function.sysfs}/driver_override", "\n")
    except OSError as error:
        raise SlotUnusableError(
            f"function {function.address} cannot be taken off vfio-pci ({error.strerror})",
            hint="see the kernel's log",
        ) from error


def _override(kernel: Kernel, function: Function) -> str | None:
    """The one driver that may have a function; the kernel writes `(null)` for any.

    Raises:
        OSError: it cannot be read.
    """
    found = optional(kernel, f"{function.sysfs}/driver_override")
    return None if found in {None, "", "(null)"} else found
