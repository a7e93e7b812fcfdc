"""The mask of mailbox requests: what PF1, and so every holder of its node, may ask of PF0.

PF0 has the mask (`config_mailbox_channel_disable`), PF1 a copy that arrives 0.1 to 0.2 s later. PF1
refuses what its copy forbids at once. With a copy that lags, PF0 drops the request, and who sent it
waits for 52 s. The mask outlives a reset of the card and a rebind of PF1's driver, and is 0 once
PF0's driver is bound again.
"""

import errno

from fpga_plugin.errors import ASK_THE_OPERATOR, CardGoneError, HardwareError
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.xrt.attributes import is_offline, value
from fpga_plugin.hardware.xrt.handles import Functions
from fpga_plugin.hardware.xrt.waiting import until
from fpga_plugin.ids import CardId

ATTRIBUTE = "config_mailbox_channel_disable"

_COPY_SECONDS = 15.0
"""Until PF1 has its copy, and is ready again: it reconnects meanwhile (mailbox.c)."""


def masked(kernel: Kernel, functions: Functions) -> tuple[int | None, int | None]:
    """The mask of PF0, and PF1's copy; None where one is not there.

    Raises:
        HardwareError: nonsense.
        OSError: one cannot be read.
    """
    return (
        value(kernel, f"{functions.management}/{ATTRIBUTE}"),
        value(kernel, f"{functions.user}/{ATTRIBUTE}"),
    )


def set_mask(kernel: Kernel, card: CardId, functions: Functions, mask: int) -> None:
    """Set the mask, and wait until PF1 has it and is ready.

    Raises:
        CardGoneError: PF0's driver is not there.
        HardwareError: it cannot be written, or PF1 does not follow.
    """
    path = f"{functions.management}/{ATTRIBUTE}"
    try:
        kernel.write(path, f"{mask:#x}")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CardGoneError(
            f"card {card} has lost its management driver: {path} is not there",
            hint="is xclmgmt bound? See `fpga-plugin card list`",
            tenant=ASK_THE_OPERATOR,
        ) from error
    except OSError as error:
        writable = error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}
        raise HardwareError(
            f"{path} cannot be set to {mask:#x} ({error.strerror})",
            hint="the plugin has to run as root, with the node's /sys writable"
            if writable
            else "see the kernel's log",
        ) from error
    if not until(lambda: _state(kernel, functions) == (mask, mask, True), _COPY_SECONDS):
        of_management, of_user, ready = _state(kernel, functions)
        raise HardwareError(
            f"the user function of card {card} does not follow: the mask is"
            f" {_shown(of_management)}, its copy {_shown(of_user)} where {mask:#x} was set, and"
            f" it is {'' if ready else 'not '}ready",
            hint="see the kernel's log; is the mailbox of the shell stuck?",
        )


def _shown(mask: int | None) -> str:
    return "not there" if mask is None else f"{mask:#x}"


def _state(kernel: Kernel, functions: Functions) -> tuple[int | None, int | None, bool]:
    """The mask, its copy, and whether PF1 is ready; attributes come and go while it reconnects."""
    try:
        return *masked(kernel, functions), is_ready(kernel, functions)
    except OSError:
        return None, None, False


def is_ready(kernel: Kernel, functions: Functions) -> bool:
    """Whether PF1 is connected to PF0 and not offline.

    Raises:
        HardwareError: nonsense.
        OSError: it cannot be read.
    """
    ready = value(kernel, f"{functions.user}/ready")
    return ready == 1 and not is_offline(kernel, functions.user)
