"""A region, held: what is loaded into it, and how another image comes there.

There is no exclusive open (O_EXCL always fails with EBUSY, and plain opens are not limited). The
caller knows by its tenancies that no other owner uses the region. What excludes others is the mask,
which has to let loads through while the plugin loads. The record that decides is read after PF1 has
the mask again, so a file of another uuid that a holder of the node loaded in that moment is seen.
One of the same uuid is not. Only a process of the owner's own pod can have the node then: between
two owners a reset ends every holder.

No context closes that gap. One that is taken before the load makes the plugin's own load fail with
EBUSY (userpf/xocl_ioctl.c), and for one after it a load that already waits for the driver's lock
comes first.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from fpga_plugin.errors import (
    FpgaPluginError,
    HardwareError,
    ProgrammingError,
    RefusedError,
)
from fpga_plugin.hardware.image import Image, Xclbin, expect
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.hardware.xrt import defs
from fpga_plugin.hardware.xrt.attributes import firewall, loaded, value
from fpga_plugin.hardware.xrt.handles import check_instance, functions_of
from fpga_plugin.hardware.xrt.load import load, opened
from fpga_plugin.hardware.xrt.mask import is_ready, set_mask
from fpga_plugin.ids import AfuId

LATE_REFRESH_SECONDS = 0.5
"""A refresh of PF1 soon after a reset may empty its record of a load that went well (seen with two
cards). So the record is read once more after this time."""

_ATTEMPTS = 2
"""Loads, where the record was emptied in between."""

Loaded = Callable[[Region, Xclbin | None], None]
"""Called with what was loaded into a region; None: nothing that is known."""


class XrtPort:
    """Implements `fpga_plugin.hardware.backend.Port`; a context manager that holds nothing open."""

    def __init__(self, kernel: Kernel, card: Card, region: Region, tell: Loaded) -> None:
        self._kernel = kernel
        self._card = card
        self._region = region
        self._functions = functions_of(region)
        self._tell = tell

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is held open: a reset of the card ends every process with its node."""

    def reset(self) -> None:
        """Make sure that the card answers: another image ends what runs, and a reset of the card.

        Raises:
            HardwareError: it does not.
        """
        try:
            ready = is_ready(self._kernel, self._functions)
        except OSError as error:
            raise self._unreadable(error) from error
        if not ready:
            raise HardwareError(
                f"card {self._card.id} is offline or not ready",
                hint="is it being reset? See the kernel's log",
            )

    def clear_errors(self) -> Mapping[str, int]:
        """What the drivers know of trouble; only a reset of the card clears it.

        Raises:
            HardwareError: it cannot be read.
        """
        try:
            found = errors(self._kernel, self._functions.management, self._functions.user)
        except OSError as error:
            raise self._unreadable(error) from error
        if found:
            found["errors_left"] = sum(found.values())
        return found

    def program(self, image: Image) -> None:
        """Load an xclbin by force, mask all requests, and see that it stayed; up to minutes.

        Raises:
            RefusedError: it is no xclbin, or not for this card's shell.
            PortInUseError: a process has a context of the image that is there.
            ProgrammingError: it failed, or another image was loaded meanwhile.
            HardwareError: the mask cannot be set.
        """
        xclbin = expect(image, Xclbin, self._region.id)
        if xclbin.interface_id != self._card.interface_id:
            raise RefusedError(
                f"an xclbin for the shell {xclbin.interface_id} does not fit region"
                f" {self._region.id}, whose shell is {self._card.interface_id}"
            )
        self._tell(self._region, None)
        for attempt in range(_ATTEMPTS):
            self._load(xclbin)
            found = self._settled(xclbin.uuid)
            if found == xclbin.uuid:
                self._judge()
                self._tell(self._region, xclbin)
                return
            if found != defs.NO_IMAGE or attempt + 1 == _ATTEMPTS:
                raise ProgrammingError(
                    f"region {self._region.id} shows"
                    f" {'nothing' if found == defs.NO_IMAGE else found} where {xclbin.uuid} was"
                    " loaded",
                    hint="somebody else loaded or reset the card meanwhile; see the kernel's log",
                )

    def _load(self, xclbin: Xclbin) -> None:
        """Only loads are let through, and only while the plugin loads."""
        kernel, card, functions = self._kernel, self._card.id, self._functions
        set_mask(kernel, card, functions, defs.MASK_WHILE_LOADING)
        try:
            with opened(kernel, self._region) as handle:
                load(kernel, handle, self._region.id, functions.user, xclbin)
        except BaseException:
            with suppress(FpgaPluginError):  # the first error says why
                set_mask(kernel, card, functions, defs.MASK)
            raise
        set_mask(kernel, card, functions, defs.MASK)

    def _settled(self, wanted: AfuId) -> AfuId:
        """What PF1's record says now that nobody can load, and still says after a late refresh."""
        if (found := self.afu_id()) == wanted:
            time.sleep(LATE_REFRESH_SECONDS)
            found = self.afu_id()
        return found

    def _judge(self) -> None:
        try:
            found = errors(self._kernel, self._functions.management, self._functions.user)
        except OSError as error:
            raise self._unreadable(error) from error
        if found:
            says = ", ".join(f"{name} {number:#x}" for name, number in found.items())
            raise ProgrammingError(
                f"region {self._region.id} is in trouble after it was programmed: {says}",
                hint="a reset of the card ends that; a scrub does it at the allocation's end",
            )

    def leave(self) -> None:
        """Let through what a tenant needs to load what it brings, and nothing else.

        A tenant that may send these requests is trusted with the node: they carry a pointer that
        PF0's driver follows (mgmtpf/mgmt-core.c, XCL_MAILBOX_REQ_LOAD_XCLBIN_KADDR).
        """
        set_mask(self._kernel, self._card.id, self._functions, defs.MASK_WHILE_LOADING)

    def afu_id(self, expected: AfuId | None = None) -> AfuId:  # noqa: ARG002 - there is one
        """The uuid that PF1's driver has on record; see `read_afu_id`."""
        return read_afu_id(self._kernel, self._region)

    def _unreadable(self, error: OSError) -> HardwareError:
        return HardwareError(
            f"card {self._card.id} cannot be read ({error.strerror})", hint="see the kernel's log"
        )


def read_afu_id(kernel: Kernel, region: Region) -> AfuId:
    """The uuid of the xclbin that is loaded; `NO_IMAGE`: none.

    Raises:
        CardGoneError: PF1 or its driver is another one than was scanned.
        HardwareError: it cannot be read.
    """
    try:
        found = loaded(kernel, functions_of(region).user, region.id)
    except HardwareError:
        check_instance(kernel, region)
        raise
    check_instance(kernel, region)  # afterwards: it holds for the time of the read too
    return found


def errors(kernel: Kernel, management: str, user: str) -> dict[str, int]:
    """Trouble that the drivers know of and that only a reset of the card ends, by name.

    Raises:
        HardwareError: nonsense.
        OSError: it cannot be read.
    """
    found = {
        "device_bad_state": value(kernel, f"{user}/device_bad_state"),
        "firewall_level": firewall(kernel, management),
    }
    return {name: number for name, number in found.items() if number}
