"""A slot, held: its port and the IOMMU groups of all of its functions at once.

Its AFU answers in PCI functions that containers use through vfio-pci (OFS). Reset, errors and
programming go through the port and the FME as with any card; what is in the slot is read in the
functions. That takes a function's own descriptor, so between two times of holding the slot nothing
can be read: what was seen last is in a note (`vfio/notes.py`).
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import structlog

from fpga_plugin.errors import (
    CardGoneError,
    HardwareError,
    ProgrammingError,
)
from fpga_plugin.hardware.dfl.handles import SlotDevice
from fpga_plugin.hardware.dfl.port import (
    DflPort,
    check_instance,
    leaves_in_reset,
    open_port,
    poisoned,
)
from fpga_plugin.hardware.image import Image, RawImage, expect
from fpga_plugin.hardware.kernel import Kernel
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.hardware.vfio import binding
from fpga_plugin.hardware.vfio.function import is_there
from fpga_plugin.hardware.vfio.groups import Groups
from fpga_plugin.hardware.vfio.notes import PoisonMark, SlotNotes
from fpga_plugin.ids import AfuId

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def open_slot(
    kernel: Kernel, notes: SlotNotes, card: Card, region: Region, slot: SlotDevice
) -> "OfsSlot":
    """Hold a slot, its functions bound to vfio-pci if they had no driver.

    Raises:
        PortInUseError: its port or one of its groups is open elsewhere, or (`SlotUnusableError`)
            its functions cannot be had.
        CardGoneError: it is gone, or another one.
        HardwareError: the note of it cannot be written.
    """
    _check_slot(kernel, region, slot)
    unbound = [f for f in slot.functions if binding.needs_binding(kernel, f)]
    if unbound:
        notes.bind(region.id, slot.instance, unbound)
        for function in unbound:
            binding.bind(kernel, function)
    groups = Groups(kernel, slot.functions)
    try:
        port = open_port(kernel, card, region)
        try:
            _check_slot(kernel, region, slot)  # they are held now: they stay what they are
        except BaseException:
            port.close()
            raise
    except BaseException:
        groups.close()
        raise
    return OfsSlot(notes, region, slot, port, groups)


def read_note(kernel: Kernel, notes: SlotNotes, region: Region, slot: SlotDevice) -> AfuId:
    """What was read in a slot when it was held last.

    Raises:
        PortPoisonedError: a PR of it failed since its driver was bound.
        CardGoneError: it is gone, or another one.
        HardwareError: it is not known.
    """
    _check_slot(kernel, region, slot)
    note = notes.of(region.id, slot.instance)
    if note.failed:
        raise poisoned(region)
    if note.afu_id is None:
        raise HardwareError(
            f"what is in the slot {region.id} is not known: it was not read since it may have"
            " changed",
            hint="the next scrub reads it",
        )
    return note.afu_id


def give_back(kernel: Kernel, notes: SlotNotes, region: Region, slot: SlotDevice) -> None:
    """Take functions that the plugin bound off vfio-pci again.

    Raises:
        PortInUseError: a process has a group open, or the driver cannot be taken off.
        CardGoneError: it is gone, or another one.
    """
    ours = notes.bound(region.id, slot.functions)
    if not ours:
        return
    _check_slot(kernel, region, slot)
    still = [f for f in ours if not binding.needs_binding(kernel, f)]
    if still:
        # The kernel would wait for the process that has it open, and this thread with it.
        Groups(kernel, still).close()
    for function in ours:
        binding.unbind(kernel, function)
    notes.unbound(region.id, slot.instance)


class OfsSlot:
    """Implements `fpga_plugin.hardware.backend.Port`; a context manager that closes the slot."""

    def __init__(
        self, notes: SlotNotes, region: Region, slot: SlotDevice, port: DflPort, groups: Groups
    ) -> None:
        self._notes = notes
        self._region = region
        self._life = slot.instance
        self._mark = PoisonMark(notes, region.id, slot.instance)
        self._open = True
        self._port = port
        self._groups = groups

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
        """Let others open it again, the port first: its close resets the slot. May be repeated.

        The driver does not report how that reset ended, so it is asked for one before.
        """
        if self._open:
            self._open = False
            try:
                self.reset()
            except HardwareError as error:
                log.warning("slot not reset at its close", region=self._region.id, error=str(error))
        self._port.close()
        self._groups.close()

    def reset(self) -> None:
        """Soft-reset the whole slot.

        Raises:
            HardwareError: the port did not acknowledge.
        """
        try:
            self._port.reset()
        except HardwareError as error:
            self._judge(error)
            raise

    def clear_errors(self) -> Mapping[str, int]:
        """Clear the port's error registers; as `DflPort.clear_errors`, which resets the port."""
        try:
            return self._port.clear_errors()
        except HardwareError as error:
            self._judge(error)
            raise

    def program(self, image: Image) -> None:
        """Stream a raw image into the slot, behind all of its functions at once.

        Raises:
            RefusedError, ProgrammingError: as `DflPort.program`.
        """
        expect(image, RawImage, self._region.id)  # nothing is forgotten for one that is refused
        self._notes.shows(self._region.id, self._life, None)
        try:
            self._port.program(image)
        except ProgrammingError as error:
            self._judge(error)
            raise

    def leave(self) -> None:
        """Does nothing: the region's nodes do not let their holder program it."""

    def afu_id(self, expected: AfuId | None = None) -> AfuId:
        """What the slot's functions show: `expected` if one of them does, else the first one's.

        Functions that an image does not use show a placeholder of its own.

        Raises:
            PortPoisonedError: a PR or a reset of it failed since its driver was bound.
            HardwareError: a function cannot be read, does not answer, or none shows an AFU.
        """
        if self._mark.stands():
            raise poisoned(self._region)
        self._notes.shows(self._region.id, self._life, None)
        found = self._groups.afu_ids()
        if not found:
            raise HardwareError(
                f"no function of region {self._region.id} shows an AFU",
                hint="FPGA_PLUGIN_SLOT_FUNCTIONS may name functions that are not in the slot",
            )
        shown = expected if expected is not None and expected in found else found[0]
        self._notes.shows(self._region.id, self._life, shown)
        return shown

    def _judge(self, error: HardwareError) -> None:
        if leaves_in_reset(error):
            self._mark.set()


def _check_slot(kernel: Kernel, region: Region, slot: SlotDevice) -> None:
    """Make sure that port and functions are those that were scanned.

    Raises:
        CardGoneError: they are not.
        HardwareError: that is unknown.
    """
    check_instance(kernel, region)
    try:
        changed = [f for f in slot.functions if not is_there(kernel, f)]
        behind_port = kernel.exists(f"{slot.sysfs}/afu_id")
    except OSError as error:
        raise HardwareError(
            f"the functions of region {region.id} cannot be looked up ({error.strerror})",
            hint="see the kernel's log",
        ) from error
    if changed or behind_port:
        what = f"function {changed[0].address}" if changed else "its port"
        raise CardGoneError(
            f"region {region.id} is no longer the slot that was found: {what} changed",
            hint="virtual functions were removed or made, or the card was replaced; delete the pod",
        )
