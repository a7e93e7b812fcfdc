"""One root for every error that a user or operator may meet.

Each error carries what happened (`message`, naming the variable, device or file), what the reader
can do about it (`hint`), and the gRPC status with which kubelet hears of it. The gRPC edge sends
`str(e.for_tenant())`, which kubelet shows to the pod's owner; log and status have `str(e)`; the
command line prints message and hint on two lines.
"""

import re
from collections.abc import Callable
from typing import ClassVar, Self

from grpclib.const import Status

MAX_QUOTED = 64
"""Characters of a foreign value that a message quotes."""

MAX_TOLD = 300
"""Characters of what kubelet says of a registration: its own prefix has 60, the reason follows."""

MAX_MESSAGE_BYTES = 1000
"""A message stays under 1 KiB: kubelet puts it into an Event, which caps notes at 1 KiB."""

ASK_THE_OPERATOR = "ask the node's operator"
"""What a pod's owner can do where only root of the node can do anything."""

_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


def quote(value: object, most: int = MAX_QUOTED) -> str:
    """A foreign value for a message: printable ASCII in quotes, cut to so many characters."""
    text = str(value)
    return f"'{printable_ascii(text, most)}'" + ("..." if len(text) > most else "")


def printable_ascii(text: str, most: int = MAX_QUOTED) -> str:
    """A foreign name as it may be shown: printable ASCII, cut to so many characters."""
    cut = text[:most]
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in cut)


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


class FpgaPluginError(Exception):
    """Root of the plugin's errors.

    Attributes:
        status: gRPC status that fits.
        message: what happened, to which device, variable or file.
        hint: what the reader can do; may be empty.
        tenant: what a pod's owner can do, where the hint is for the node's operator; empty: the
            hint is for both.
        why: what the hardware said, for the log alone: a tenant can do nothing with it.
        retry_after: seconds that the refusing side asks to wait; 0: it does not ask.

    Both can always be encoded: names of files may hold bytes that are no UTF-8, which Python has as
    lone surrogates, and gRPC, HTML and the log would each fail with them.
    """

    status: ClassVar[Status] = Status.INTERNAL
    for_tenant_unless_said: ClassVar[str] = ""
    """What `tenant` is, where an error of this kind does not say it."""
    retry_after: float = 0.0

    def __init__(
        self, message: str, *, hint: str = "", why: str = "", tenant: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = _encodable(message)
        self.hint = _encodable(hint)
        self.tenant = self.for_tenant_unless_said if tenant is None else _encodable(tenant)
        self.why = _encodable(why)

    @property
    def kind(self) -> str:
        """The kind of error in a word, for metrics: `port_in_use` of PortInUseError."""
        return _CAPITAL.sub("_", type(self).__name__.removesuffix("Error")).lower()

    def reworded(self, words: Callable[[str], str]) -> Self:
        """The same error with other words for its message and hint."""
        # Not by `copy`: it calls the constructor, which may want more than the message.
        other = type(self).__new__(type(self), *self.args)
        other.__dict__.update(self.__dict__)
        other.message, other.hint = words(self.message), words(self.hint)
        other.tenant = words(self.tenant)
        return other

    def for_tenant(self) -> Self:
        """The same error as a pod's owner reads it: without what only the operator can do."""
        if not self.tenant:
            return self
        told = self.reworded(str)
        told.hint = told.tenant
        return told

    def __str__(self) -> str:
        text = f"{self.message}: {self.hint}" if self.hint else self.message
        encoded = text.encode()
        if len(encoded) <= MAX_MESSAGE_BYTES:
            return text
        return encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."


class InvalidRequestError(FpgaPluginError):
    """A container's FPGA_* variables, or a call of kubelet's, are malformed.

    Attributes:
        asked: by what a bitstream was asked for that is no id and no name of one; it may be a
            title. Empty: that is not what is wrong.
    """

    status = Status.INVALID_ARGUMENT

    def __init__(self, message: str, *, hint: str = "", asked: str = "") -> None:
        super().__init__(message, hint=hint)
        self.asked = asked


class UnknownDeviceError(FpgaPluginError):
    """A call names a device that this plugin does not have."""

    status = Status.NOT_FOUND


class BitstreamNotFoundError(FpgaPluginError):
    """The store has no bitstream of this interface id and bitstream id."""

    status = Status.NOT_FOUND


class BitstreamError(FpgaPluginError):
    """A bitstream file is malformed or is not what its name says; the message says where."""

    status = Status.FAILED_PRECONDITION


class RefusedError(FpgaPluginError):
    """What is asked for cannot be given in the present state: mode, owner, node, port in use."""

    status = Status.FAILED_PRECONDITION


class NotPermittedError(FpgaPluginError):
    """Policy or trust forbids what is asked for; the message names the rule, or what is missing."""

    status = Status.PERMISSION_DENIED


class PortInUseError(RefusedError):
    """Somebody has the port open, or memory of it mapped (`O_EXCL` said EBUSY)."""

    for_tenant_unless_said = ASK_THE_OPERATOR


class SlotUnusableError(PortInUseError):
    """The PCI functions behind a slot cannot be held: a driver, their IOMMU group, the node."""


class CardGoneError(RefusedError):
    """The card, or its port's driver, is no longer there."""


class NotFinishedError(FpgaPluginError):
    """The work goes on beyond the call's time; the same call later finds it done."""

    status = Status.UNAVAILABLE


class StoreUnavailableError(FpgaPluginError):
    """A bitstream cannot be had now: its file system hangs, or there is no room to unpack it."""

    status = Status.UNAVAILABLE


class NoSourceError(FpgaPluginError):
    """Nothing could tell who asks, or for what."""

    status = Status.UNAVAILABLE


class HardwareError(FpgaPluginError):
    """A card failed, or answered nonsense."""

    status = Status.INTERNAL
    for_tenant_unless_said = ASK_THE_OPERATOR


class ProgrammingError(HardwareError):
    """A partial reconfiguration failed. On the real drivers the port is then poisoned.

    After a failed PR later ones return 0 while `afu_id` stays EBUSY, until dfl-pci is rebound
    (Linux 6.1, fpga-region.c and dfl-afu-main.c; seen in a VM).
    """


class WrongImageError(HardwareError):
    """A PR went well, and another AFU id reads back than the bitstream's metadata names.

    The file is mislabelled, or the card's static part is another one: the region itself is sound.
    """

    for_tenant_unless_said = ""


class PortPoisonedError(HardwareError):
    """`afu_id` reads EBUSY outside our own PR: an earlier failed PR left the port disabled."""


class AcceleratorSilentError(HardwareError):
    """The AFU id reads all ones: the accelerator hangs, or the card is off the bus."""


class SettingsError(FpgaPluginError):
    """One or more environment variables have wrong values; the message names them all."""

    status = Status.FAILED_PRECONDITION


class BackgroundFailedError(FpgaPluginError):
    """A defect ended a task that the daemon cannot be without; it stopped in order (exit 1)."""


class LockHeldError(FpgaPluginError):
    """Another plugin runs on this node (exit code 75)."""

    status = Status.UNAVAILABLE
