"""A region, held exclusively: reset it, clear its errors, program it, ask what is in it.

What the driver does behind each call is in drivers/fpga/dfl-afu-main.c, dfl-afu-error.c and
dfl-fme-pr.c. The kernel checks nothing of an image, and reports success on a poisoned port: after
`program` only the AFU id reports what happened.
"""

import ctypes
import errno
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import structlog

from fpga_plugin.errors import (
    ASK_THE_OPERATOR,
    AcceleratorSilentError,
    CardGoneError,
    HardwareError,
    NotFinishedError,
    PortInUseError,
    PortPoisonedError,
    ProgrammingError,
    quote,
)
from fpga_plugin.hardware.dfl import defs
from fpga_plugin.hardware.dfl.handles import fme_of, port_of
from fpga_plugin.hardware.image import Image, RawImage, expect
from fpga_plugin.hardware.kernel import Handle, Kernel
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.hardware.sysfs import bare_hex, children, number, optional
from fpga_plugin.hardware.vfio.notes import PoisonMark
from fpga_plugin.ids import AfuId, PciAddress, parse_afu_id

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

GONE = frozenset({errno.ENOENT, errno.ENXIO, errno.ENODEV})
"""What opening a node says when its device is not, or no longer, there."""

_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What opening a node says when the process or the node is out of descriptors or memory."""

_CLEAR_ATTEMPTS = 3
"""New errors may be set between reading and clearing; the old image still runs at that time."""

_AFTER_FAILED_PR = (
    "the port may now stay in reset until the card's driver is rebound; the plugin checks that"
)

_PR_FAILURES = {
    errno.EIO: ("the FPGA reported an error while it was reconfigured", _AFTER_FAILED_PR),
    errno.ETIMEDOUT: (
        "the FPGA did not answer in time (port reset 1 ms, PR reset, credits or completion 8 s)",
        _AFTER_FAILED_PR,
    ),
    errno.EINVAL: (
        "the driver refused the request: the port does not exist or the card is going away",
        "see `fpga-plugin card list`",
    ),
    errno.ENOENT: ("the driver of the ports is not loaded", "load the module dfl-afu"),
    errno.ENOMEM: ("the kernel had no memory for a copy of the image", "free memory on the node"),
    errno.EFAULT: (
        "the kernel could not read the image",
        "see the kernel's log: does the disk of FPGA_PLUGIN_STATE_DIR have errors?",
    ),
    errno.EBUSY: (
        "another process is reconfiguring the card",
        "stop fpgad, fpgaconf and other tools that program this card",
    ),
}
"""What the errno of DFL_FPGA_FME_PORT_PR means and what helps (dfl-fme-pr.c, dfl-fme-mgr.c)."""


def open_port(
    kernel: Kernel, card: Card, region: Region, mark: PoisonMark | None = None
) -> "DflPort":
    """Open a port exclusively, and make sure that it is still the one that `region` names.

    The driver refuses O_EXCL while any descriptor or mapping of the port is alive.

    `mark` remembers failed PRs of a port that does not show them.

    Raises:
        PortInUseError: a process has it open, or memory of it mapped.
        CardGoneError: the node is not there, or is another port's by now.
        NotFinishedError: the plugin or the node is out of descriptors or memory.
        HardwareError: it cannot be opened for another reason.
    """
    node = port_of(region).node
    try:
        handle = kernel.open(node, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise PortInUseError(
                f"{node} (region {region.id}) is in use",
                hint="a process still has it open or mapped, such as a container that has not "
                f"ended or a tool on the node; `fuser -v {node}` on the node names it",
            ) from error
        if error.errno in GONE:
            raise CardGoneError(
                f"{node} (region {region.id}) is not there: the card was removed, or its driver "
                "unbound",
                hint="see `fpga-plugin card list` and the kernel's log",
                tenant=ASK_THE_OPERATOR,
            ) from error
        what = f"{node} (region {region.id}) cannot be opened"
        if error.errno in _SHORT:
            raise NotFinishedError(
                f"{what} ({_reason(error)})",
                hint="it is tried again; the node, or the plugin, is out of file descriptors or"
                " memory",
                tenant=ASK_THE_OPERATOR,
            ) from error
        raise _failure(what, error) from error
    port = DflPort(kernel, card, region, handle, mark)
    try:
        # The node's number may have gone to another card's port since the last scan, or to a port
        # of the card that is in this slot now. While its directory is the one that was scanned,
        # dfl-port.N is this port: the kernel gives each N once.
        check_instance(kernel, region)
    except BaseException:
        port.close()
        raise
    return port


class DflPort:
    """Implements `fpga_plugin.hardware.backend.Port`; a context manager that closes the port."""

    def __init__(
        self,
        kernel: Kernel,
        card: Card,
        region: Region,
        handle: Handle,
        mark: PoisonMark | None = None,
    ) -> None:
        self._kernel = kernel
        self._card = card
        self._region = region
        self._fme = fme_of(card)
        self._port = port_of(region)
        self._handle: Handle | None = handle
        self._mark = mark

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let others open the port again; the driver resets it once more. May be repeated."""
        if self._handle is not None:
            _close(self._kernel, self._handle, self._port.node)
        self._handle = None

    def reset(self) -> None:
        """Soft-reset the AFU; the driver waits until its outstanding requests have drained.

        Raises:
            HardwareError: the port did not acknowledge.
        """
        assert self._handle is not None, "the port is closed"
        try:
            self._kernel.ioctl(self._handle, defs.PORT_RESET, 0)
        except OSError as error:
            raise _failure(
                f"region {self._region.id} ({self._port.node}) did not acknowledge its reset",
                error,
                hint="requests of the last image may still be under way; "
                + rebind_hint(self._card.address),
            ) from error

    def clear_errors(self) -> Mapping[str, int]:
        """Clear the port's error registers; returns those that were set, by attribute.

        `errors` holds all bits seen. Bits that come back at once are the running image's doing:
        they do not fail the call, and are returned as `errors_left`. Without the port error feature
        there is nothing to clear.

        Raises:
            HardwareError: an error cannot be read or cleared (AP6: the card has shut the port).
        """
        found: dict[str, int] = {}
        self._clear_error_register(found)
        for name in ("ap1_event", "ap2_event"):
            path = f"{self._port.sysfs}/{name}"
            try:
                text = optional(self._kernel, path)
                if text is not None and (value := bare_hex(path, text)):
                    found[name] = value
                    self._kernel.write(path, "1")
            except OSError as error:
                raise _failure(f"{path} cannot be cleared", error) from error
        return found

    def _clear_error_register(self, found: dict[str, int]) -> None:
        path = f"{self._port.sysfs}/errors/errors"
        for _ in range(_CLEAR_ATTEMPTS):
            if not (value := self._error_bits(path)):
                return
            found["errors"] = found.get("errors", 0) | value
            try:
                self._kernel.write(path, f"0x{value:x}")
            except OSError as error:
                if error.errno == errno.EINVAL:
                    continue  # other bits are set by now than those that we read
                if error.errno == errno.EBUSY:
                    raise self._shut_down(value) from error
                raise _failure(f"{path} cannot be cleared (0x{value:x})", error) from error
        if left := self._error_bits(path):
            if left & defs.PORT_AP6_EVENT:
                raise self._shut_down(left)
            found["errors_left"] = left

    def _error_bits(self, path: str) -> int:
        try:
            text = optional(self._kernel, path)
        except OSError as error:
            raise _failure(f"{path} cannot be read", error) from error
        value = 0 if text is None else number(path, text)
        if value == defs.ALL_ONES_64:
            raise HardwareError(
                f"card {self._card.id} does not answer: {path} reads all ones",
                hint="see the kernel's log; the node may need a power cycle",
            )
        return value

    def _shut_down(self, value: int) -> HardwareError:
        return HardwareError(
            f"region {self._region.id} is shut down (AP6, port errors 0x{value:x})",
            hint="the card was too hot or drew too much power; let it cool, then power-cycle it",
        )

    def program(self, image: Image) -> None:
        """Stream a raw image into the region; seconds, and nothing can interrupt it.

        Args:
            image: raw; bytes, or writable memory that nobody writes to, such as a private mapping.

        Raises:
            RefusedError: it is no raw image.
            ProgrammingError: nothing was written or it failed, the message says which.
        """
        data = expect(image, RawImage, self._region.id).data
        if not 0 < len(data) <= defs.MAX_IMAGE_BYTES:
            raise ProgrammingError(
                f"an image of {len(data)} bytes cannot be programmed into {self._region.id}",
                hint="the file has no configuration data, or more than the driver takes (4 GiB)",
            )
        handle = self._open_fme()
        try:
            self._stream(handle, data)
        except ProgrammingError as error:
            if self._mark is not None and leaves_in_reset(error):
                self._mark.set()
            raise
        finally:
            _close(self._kernel, handle, self._fme.node)
        self._judge_manager()

    def _open_fme(self) -> Handle:
        """The FME's node, opened only for the time of one PR; blocks while another PR runs."""
        node = self._fme.node
        try:
            handle = self._kernel.open(node, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            hint = "see the kernel's log"
            if error.errno == errno.EBUSY:
                hint = "stop fpgad, fpgaconf and other tools that program this card"
            raise ProgrammingError(
                f"region {self._region.id} was not programmed: {node} cannot be opened "
                f"({_reason(error)})",
                hint=hint,
            ) from error
        try:
            # Its node may have gone to another card's FME, or to that of the card in this slot now.
            check_instance(self._kernel, self._region)
            there = self._kernel.exists(self._fme.sysfs)
        except (OSError, CardGoneError, HardwareError):
            there = False
        if not there:
            _close(self._kernel, handle, node)
            raise ProgrammingError(
                f"region {self._region.id} was not programmed: {node} is no longer the FME of card "
                f"{self._card.id}",
                hint="the card was removed or its driver rebound; delete the pod",
                tenant="",
            )
        return handle

    def _stream(self, handle: Handle, image: bytes | memoryview) -> None:
        keep: ctypes.c_char_p | ctypes.c_char  # holds the image where it is while the kernel reads
        if isinstance(image, bytes):
            keep = ctypes.c_char_p(image)
            address = ctypes.cast(keep, ctypes.c_void_p).value
        else:
            keep = ctypes.c_char.from_buffer(image)
            address = ctypes.addressof(keep)
        assert address is not None, "c_char_p of bytes is never null"
        argument = defs.PORT_PR.pack(
            defs.PORT_PR.size, 0, self._region.port_id, len(image), address
        )
        try:
            result = self._kernel.ioctl(handle, defs.FME_PORT_PR, argument)
        except OSError as error:
            what, hint = _PR_FAILURES.get(
                error.errno or 0, (error.strerror or "unknown error", _AFTER_FAILED_PR)
            )
            try:
                status = ", ".join(self._manager_says()) if error.errno == errno.EIO else ""
            except OSError:
                status = ""  # the ioctl's own error is what matters
            raise ProgrammingError(
                f"programming region {self._region.id} failed: {what}",
                hint=hint,
                why=f"{_reason(error)}, from {self._fme.node}"
                + (f"; FPGA manager: {status}" if status else ""),
            ) from error
        if result != 0:
            raise ProgrammingError(
                f"programming region {self._region.id} through {self._fme.node} gave "
                f"{result} where the driver gives 0",
                hint="the driver is not the one that this plugin knows",
            )

    def _judge_manager(self) -> None:
        """The manager's state after a PR of our own; at other times it is another region's past."""
        try:
            says = self._manager_says()
        except OSError as error:
            raise ProgrammingError(
                f"the FPGA manager of card {self._card.id} cannot be read after programming region "
                f"{self._region.id} ({_reason(error)})",
                hint="see the kernel's log",
            ) from error
        if says:
            raise ProgrammingError(
                f"programming region {self._region.id} ended with an error of the FPGA manager: "
                f"{', '.join(says)}",
                hint=_AFTER_FAILED_PR,
            )

    def _manager_says(self) -> list[str]:
        """Lines of the manager's `state` and `status` that report an error (fpga-mgr.c)."""
        says: list[str] = []
        for platform in children(self._kernel, self._fme.sysfs, r"dfl-fme-mgr\.[0-9]{1,9}"):
            for manager in children(self._kernel, f"{platform}/fpga_manager", r"fpga[0-9]{1,9}"):
                state = optional(self._kernel, f"{manager}/state") or ""
                if state.endswith("error"):
                    says.append(quote(state))
                status = optional(self._kernel, f"{manager}/status") or ""
                says += [quote(line) for line in status.splitlines() if line.strip()]
        return says

    def leave(self) -> None:
        """Does nothing: the region's node does not let its holder program it."""

    def afu_id(self, expected: AfuId | None = None) -> AfuId:  # noqa: ARG002 - there is one
        """The id of the accelerator in the region; see `read_afu_id`."""
        return read_afu_id(self._kernel, self._region, self._mark)


def leaves_in_reset(error: HardwareError) -> bool:
    """Whether the driver may keep the port in reset after what failed with this error.

    It counts who wants the port in reset (dfl-afu-main.c, __afu_port_disable). A PR that fails on
    its way (fpga-region.c, fpga_region_program_fpga), and a reset that is not acknowledged, leave
    the count behind. A time-out of the way out of reset (__afu_port_enable) leaves none and looks
    the same: it is taken for the former.
    """
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in {errno.EIO, errno.ETIMEDOUT}


def poisoned(region: Region) -> PortPoisonedError:
    """The error for a port that is held in reset."""
    return PortPoisonedError(
        f"region {region.id} ({port_of(region).node}) is held in reset, as after a failed"
        " programming",
        hint=rebind_hint(PciAddress.parse(region.card)),
    )


def read_errors(kernel: Kernel, region: Region) -> dict[str, int]:
    """Error registers of a port that are set (drivers/fpga/dfl-afu-error.c); reading clears none.

    Raises:
        HardwareError: one is there and cannot be read.
    """
    found: dict[str, int] = {}
    for name in ("errors", "first_error", "first_malformed_req"):
        path = f"{port_of(region).sysfs}/errors/{name}"
        try:
            text = optional(kernel, path)
            value = 0 if text is None else int(text, 16)
        except OSError as error:
            raise _failure(f"{path} cannot be read", error) from error
        except ValueError as error:
            raise HardwareError(f"{path} reads {quote(text)}, which is no number") from error
        if value:
            found[name] = value
    return found


def read_afu_id(kernel: Kernel, region: Region, mark: PoisonMark | None = None) -> AfuId:
    """The id of the accelerator in a region, whether or not its port is open.

    Raises:
        PortPoisonedError: the port is held in reset; outside a PR that is what a failed PR leaves.
        CardGoneError: the port is gone, or is another instance than `region` by now.
        AcceleratorSilentError: it reads all ones.
        HardwareError: it cannot be read, or is no id.
    """
    path = f"{port_of(region).sysfs}/afu_id"
    try:
        text = kernel.read(path).strip()
    except OSError as error:
        check_instance(kernel, region)
        if error.errno == errno.EBUSY:
            raise poisoned(region) from error
        raise _failure(f"the AFU id of region {region.id} cannot be read", error) from error
    check_instance(kernel, region)  # afterwards: it holds for the time of the read too
    if mark is not None and mark.stands():
        raise poisoned(region)
    try:
        found = parse_afu_id(text)
    except ValueError as error:
        raise HardwareError(f"{path} says {quote(text)}: {error}") from error
    if found == defs.ALL_ONES_ID:
        raise AcceleratorSilentError(
            f"the accelerator of region {region.id} does not answer: {path} reads all ones",
            hint="a scrub replaces an accelerator that hangs; if the port's other registers do not"
            " answer either, the card may have dropped off the bus",
        )
    return found


def check_instance(kernel: Kernel, region: Region) -> None:
    """Make sure that a region's directory is the one that was scanned.

    Raises:
        CardGoneError: it is not.
        HardwareError: that is unknown.
    """
    port = port_of(region)
    try:
        instance = kernel.instance(port.sysfs)
    except (FileNotFoundError, NotADirectoryError):
        instance = None
    except OSError as error:
        raise _failure(f"{port.sysfs} cannot be looked up", error) from error
    if instance != port.instance:
        raise CardGoneError(
            f"{port.node} is no longer the port of region {region.id}",
            hint="the card was removed or its driver rebound; delete the pod",
        )


def rebind_hint(address: PciAddress) -> str:
    """What un-poisons a port, and when it is safe."""
    return (
        "when no container and no process on the node uses any region of this card, and it has no "
        f"virtual functions, run as root: {defs.rebind_command(address)}"
    )


def _close(kernel: Kernel, handle: Handle, node: str) -> None:
    """The drivers' release functions cannot fail; after any close the descriptor is gone."""
    try:
        kernel.close(handle)
    except OSError as error:
        log.warning("closing a device node failed", node=node, error=_reason(error))


def _reason(error: OSError) -> str:
    """`EIO, Input/output error`."""
    name = errno.errorcode.get(error.errno or 0, "unknown errno")
    return f"{name}, {error.strerror}"


def _failure(what: str, error: OSError, *, hint: str = "see the kernel's log") -> HardwareError:
    return HardwareError(f"{what} ({_reason(error)})", hint=hint)
