"""A hot reset of a card, which ends everybody who has its node.

PF1 is shut down, which resets the card through PF0, and put online again (the library's
`pci::shutdown`, core/pcie/linux/pcidev.cpp; userpf/xocl_drv.c, xocl_hot_reset). Seen with the
drivers of 2.25:

- a process that has the render node gets SIGBUS; one that ignores it keeps the reset waiting,
  without an error, until it ends;
- DRM nodes and most attributes vanish meanwhile, and the node may come back under another minor;
- `shutdown` reads 1 before PF0 has finished: PF1 put online then would find a card in reset;
- PF0's answer may be lost: PF1 waits 20 s, comes online by itself, and `shutdown` reads 1;
- while `shutdown` reads 1 another 1 is ignored;
- bit 5 of the mask forbids it.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from fpga_plugin.errors import ASK_THE_OPERATOR, CardGoneError, HardwareError, PortInUseError
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.sysfs import children
from fpga_plugin.hardware.xrt import defs
from fpga_plugin.hardware.xrt.attributes import is_offline, value
from fpga_plugin.hardware.xrt.handles import Functions
from fpga_plugin.hardware.xrt.load import holders
from fpga_plugin.hardware.xrt.mask import is_ready, set_mask
from fpga_plugin.hardware.xrt.waiting import holds, until
from fpga_plugin.ids import CardId, PciAddress

DOWN_SECONDS = 90.0
"""As long as the library waits for PF1 to be down and PF0 to be back (DEV_TIMEOUT)."""

UP_SECONDS = 60.0
"""Until PF1 is ready again; it was after 0.1 to 0.5 s."""

_BEGINS_SECONDS = 3.0
"""Until PF0 shows that it is offline: a reset that it has not begun by then is over."""

_HOLDER: Final = (
    "a process that ignores SIGBUS keeps it; `fuser -v /dev/dri/renderD*` on the node names it. The"
    " reset goes on once it ends"
)


def hot_reset(kernel: Kernel, card: CardId, functions: Functions) -> None:
    """Reset a card that nobody uses; seconds, and nothing can interrupt it.

    Raises:
        PortInUseError: a process has the node and does not end; the reset goes on once it does.
        CardGoneError: a function or its driver is gone.
        HardwareError: it failed, or the card did not come back.
    """
    if not holds(lambda: _is_down(kernel, functions)):
        set_mask(kernel, card, functions, defs.MASK_WHILE_RESETTING)
        # It came online by itself; now 1 again would be ignored.
        if holds(lambda: _is_shut_down(kernel, functions)):
            _write(kernel, card, functions, "0")
            _wait_until_up(kernel, card, functions)
        who = holders(kernel, functions.user)
        _write(kernel, card, functions, "1")
        _wait_until_down(kernel, card, functions, who)
    put_online(kernel, card, functions)


def finish(kernel: Kernel, card: CardId, functions: Functions) -> None:
    """Finish a reset that was interrupted or failed; a card that is up is left as it is.

    It begins no reset.

    Raises:
        CardGoneError: a function or its driver is gone.
        HardwareError: the card did not come back, or its reset has not ended yet.
        OSError: what it does cannot be read.
    """
    if value(kernel, f"{functions.user}/shutdown"):
        put_online(kernel, card, functions)
    elif not holds(partial(_is_up, kernel, functions)):
        raise HardwareError(
            f"card {card} is not back from its reset: its user function is not ready",
            hint=_HOLDER,
        )


def put_online(kernel: Kernel, card: CardId, functions: Functions) -> None:
    """Bring a card that was shut down back, and mask it again.

    Raises:
        CardGoneError: a function or its driver is gone.
        HardwareError: it did not come back.
    """
    _wait_for_management(kernel, card, functions)
    _write(kernel, card, functions, "0")
    _wait_until_up(kernel, card, functions)
    set_mask(kernel, card, functions, defs.MASK)


def _write(kernel: Kernel, card: CardId, functions: Functions, text: str) -> None:
    path = f"{functions.user}/shutdown"
    try:
        kernel.write(path, text)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CardGoneError(
            f"card {card} cannot be reset: {path} is not there",
            hint="is xocl bound?",
            tenant=ASK_THE_OPERATOR,
        ) from error
    except OSError as error:
        raise HardwareError(
            f"card {card} cannot be reset: writing {text} to {path} failed ({error.strerror})",
            hint="see the kernel's log",
        ) from error


def _is_shut_down(kernel: Kernel, functions: Functions) -> bool:
    return value(kernel, f"{functions.user}/shutdown") == 1


def _has_nodes(kernel: Kernel, functions: Functions) -> bool:
    return any(children(kernel, f"{functions.user}/drm", r"renderD[0-9]{1,9}"))


def _is_down(kernel: Kernel, functions: Functions) -> bool:
    """Whether PF1 is shut down already, as after an interrupted reset."""
    return _is_shut_down(kernel, functions) and not _has_nodes(kernel, functions)


def _is_up(kernel: Kernel, functions: Functions) -> bool:
    return (
        value(kernel, f"{functions.user}/shutdown") == 0
        and is_ready(kernel, functions)
        and _has_nodes(kernel, functions)
        and kernel.exists(f"{functions.user}/xclbinuuid")
    )


def _comes(
    kernel: Kernel,
    card: CardId,
    functions: Functions,
    condition: Callable[[], bool],
    seconds: float,
) -> bool:
    """Look until something is so; returns whether it is within the time.

    Raises:
        CardGoneError: a function or its driver is gone.
    """

    def look() -> bool:
        _check_there(kernel, card, functions)
        return holds(condition)

    return until(look, seconds)


def _wait_until_down(kernel: Kernel, card: CardId, functions: Functions, who: str) -> None:
    is_down = partial(_is_shut_down, kernel, functions)
    if not _comes(kernel, card, functions, is_down, DOWN_SECONDS):
        raise PortInUseError(
            f"card {card} is not reset after {DOWN_SECONDS:.0f} s: somebody who has its node"
            f" does not end ({who})",
            hint=_HOLDER,
        )


def _wait_for_management(kernel: Kernel, card: CardId, functions: Functions) -> None:
    """Until PF0 has gone offline, if it does, and is back."""

    def offline() -> bool:
        return is_offline(kernel, functions.management)

    _comes(
        kernel,
        card,
        functions,
        lambda: offline() or _has_nodes(kernel, functions),
        _BEGINS_SECONDS,
    )
    if not _comes(kernel, card, functions, lambda: not offline(), DOWN_SECONDS):
        raise HardwareError(
            f"card {card} did not come back from its reset: its management function is offline",
            hint="see the kernel's log; the node may need a power cycle",
        )


def _wait_until_up(kernel: Kernel, card: CardId, functions: Functions) -> None:
    if not _comes(kernel, card, functions, partial(_is_up, kernel, functions), UP_SECONDS):
        raise HardwareError(
            f"card {card} did not come back from its reset: its user function is not ready",
            hint="see the kernel's log; `xrt-smi reset` or a power cycle may help",
        )


def _check_there(kernel: Kernel, card: CardId, functions: Functions) -> None:
    for function in (functions.management, functions.user):
        if not holds(partial(kernel.exists, f"{function}/driver")):
            raise CardGoneError(
                f"card {card} went while it was reset: {function} has no driver",
                hint="see the kernel's log",
                tenant=ASK_THE_OPERATOR,
            )


def advice(address: PciAddress) -> str:
    """The operator's way to reset a card."""
    return (
        "when no container and no process on the node uses this card, run as root:"
        f" {defs.reset_command(address)}"
    )
