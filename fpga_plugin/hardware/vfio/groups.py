"""All IOMMU groups of a slot, held open together: no other process can open one meanwhile.

A held group excludes everybody and touches no hardware; only a function's own descriptor, which is
opened to read what is in the slot, has the kernel reset that function (vfio_pci_core_enable).
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

from fpga_plugin.errors import HardwareError, PortInUseError, SlotUnusableError
from fpga_plugin.hardware.kernel import Handle, Kernel
from fpga_plugin.hardware.vfio import defs
from fpga_plugin.hardware.vfio.function import CLASS, GROUPS, Function, driver
from fpga_plugin.ids import AfuId, PciAddress, parse_afu_id


class Groups:
    """Holds the groups of some functions; closes them all, or none was left open.

    Args:
        kernel: where the nodes are.
        functions: each bound to vfio-pci.

    Raises:
        PortInUseError: another process has one of the groups open.
        SlotUnusableError: one is not there, is not viable, or cannot be given an IOMMU domain.
    """

    def __init__(self, kernel: Kernel, functions: Sequence[Function]) -> None:
        self._kernel = kernel
        self._functions = functions
        self._held: dict[int, Handle] = {}
        try:
            for function in functions:
                if function.group not in self._held:
                    self._held[function.group] = self._open(function)
                    self._check_viable(function)
            with self._domain():
                pass  # a node whose IOMMU cannot serve is refused before anything is programmed
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others open them. May be repeated."""
        while self._held:
            _, handle = self._held.popitem()
            with suppress(OSError):  # after any close the descriptor is gone
                self._kernel.close(handle)

    def afu_ids(self) -> tuple[AfuId, ...]:
        """What each function shows, in their order; one that begins with no AFU is left out.

        Raises:
            HardwareError: a function cannot be read, or does not answer.
        """
        try:
            with self._domain():
                shown = [self._afu_id(function) for function in self._functions]
        except SlotUnusableError as error:
            raise HardwareError(error.message, hint=error.hint) from error
        return tuple(afu for afu in shown if afu is not None)

    def _open(self, function: Function) -> Handle:
        try:
            return self._kernel.open(function.node, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            what = f"{function.node} (function {function.address})"
            if error.errno == errno.EBUSY:
                raise PortInUseError(
                    f"{what} is in use",
                    hint="a process still has it open, such as a container that has not ended or a"
                    f" tool on the node; `fuser -v {function.node}` on the node names it",
                ) from error
            raise SlotUnusableError(
                f"{what} cannot be opened ({error.strerror})", hint=self._hint(function)
            ) from error

    def _hint(self, function: Function) -> str:
        """Why a group has no node although vfio-pci has its function: a kernel from 6.6 on."""
        with suppress(OSError):
            exists = self._kernel.exists
            if exists(f"{function.sysfs}/vfio-dev") and not exists(CLASS):
                return (
                    "the node's kernel was built without CONFIG_VFIO_GROUP, which OPAE and this"
                    " plugin need: take one that has it"
                )
        return "see the kernel's log"

    def _check_viable(self, function: Function) -> None:
        status = defs.GROUP_STATUS.pack(defs.GROUP_STATUS.size, 0)
        try:
            answer = self._kernel.query(self._held[function.group], defs.GROUP_GET_STATUS, status)
            _, flags = defs.GROUP_STATUS.unpack(answer)
        except OSError as error:
            raise SlotUnusableError(
                f"the status of {function.node} cannot be read ({error.strerror})",
                hint="see the kernel's log",
            ) from error
        if not flags & defs.GROUP_VIABLE:
            raise SlotUnusableError(
                f"{function.node} (function {function.address}) cannot be used: another member of"
                f" its IOMMU group has a driver of the host's ({self._members(function)})",
                hint="take that driver off, or put the card into a slot with a group of its own",
            )

    def _members(self, function: Function) -> str:
        """The group's members with their drivers, for people."""
        shown = []
        try:
            for name in sorted(self._kernel.listdir(f"{GROUPS}/{function.group}/devices")):
                address = PciAddress.parse(name)
                has = driver(self._kernel, address)
                if has not in {None, defs.DRIVER}:
                    shown.append(f"{address}: {has}")
        except (OSError, ValueError):
            pass
        return ", ".join(shown[:4]) or "it cannot be told which"

    @contextmanager
    def _domain(self) -> Iterator[None]:
        """All groups in one container of ours, with an IOMMU domain."""
        with ExitStack() as stack:
            try:
                container = self._kernel.open(defs.CONTAINER, os.O_RDWR | os.O_CLOEXEC)
                stack.callback(_quietly, self._kernel.close, container)
                for group in self._held.values():
                    self._kernel.ioctl(
                        group, defs.GROUP_SET_CONTAINER, defs.CONTAINER_FD.pack(container)
                    )
                    stack.callback(
                        _quietly, self._kernel.ioctl, group, defs.GROUP_UNSET_CONTAINER, 0
                    )
                self._kernel.ioctl(container, defs.SET_IOMMU, defs.TYPE1V2_IOMMU)
            except OSError as error:
                hint = "is the module vfio_iommu_type1 loaded? See the kernel's log"
                if error.errno == errno.EPERM:
                    hint = (
                        "the node's IOMMU does not remap interrupts: switch that on in the firmware"
                    )
                raise SlotUnusableError(
                    "VFIO gives the slot of function "
                    f"{self._functions[0].address} no IOMMU domain ({error.strerror})",
                    hint=hint,
                ) from error
            yield

    def _afu_id(self, function: Function) -> AfuId | None:
        name = f"{function.address}\0".encode()
        try:
            device = Handle(
                self._kernel.ioctl(self._held[function.group], defs.GROUP_GET_DEVICE_FD, name)
            )
            try:
                header, low, high = self._header(function, device)
            finally:
                self._kernel.close(device)
        except OSError as error:
            raise HardwareError(
                f"function {function.address} of the slot cannot be read ({error.strerror})",
                hint="see the kernel's log; a function that hangs after its reset needs a power"
                " cycle of the card",
            ) from error
        if defs.ALL_ONES in {header, low, high}:
            raise HardwareError(
                f"function {function.address} of the slot does not answer: it reads all ones",
                hint="see the kernel's log; the card may have dropped off the bus",
            )
        return parse_afu_id(f"{high:016x}{low:016x}") if header >> 60 == defs.DFH_AFU else None

    def _header(self, function: Function, device: Handle) -> tuple[int, int, int]:
        asked = defs.REGION_INFO.pack(defs.REGION_INFO.size, 0, defs.BAR0, 0, 0, 0)
        answer = self._kernel.query(device, defs.DEVICE_GET_REGION_INFO, asked)
        _, flags, _, _, size, offset = defs.REGION_INFO.unpack(answer)
        wanted = defs.REGION_READ | defs.REGION_MMAP
        if flags & wanted != wanted or size < 8 * defs.HEADER_WORDS or offset:
            raise HardwareError(
                f"BAR 0 of function {function.address} cannot be mapped, so what is in the slot"
                " cannot be told",
                hint="FPGA_PLUGIN_SLOT_FUNCTIONS may name a function that is not in the slot",
            )
        with closing(self._kernel.map(device, 8 * defs.HEADER_WORDS)) as registers:
            return registers.read(0), registers.read(8), registers.read(16)


def _quietly(call: Callable[..., object], *arguments: object) -> None:
    """On the way out nothing is gained by an error: what is not given back ends with its fd."""
    with suppress(OSError):
        call(*arguments)
