"""A simulated card: its FPGA, and the part of the kernel's drivers that belongs to it.

What it does follows the real drivers of Linux 6.1 wherever the plugin can see it, as measured with
them in a virtual machine: a failed PR poisons the port, a PR on a poisoned port claims success, a
PR never asks whether the port is in use, and it holds the FME's lock to its end.
"""

import errno
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from fpga_plugin.hardware.simulated.faults import Faults, SimulatedFault
from fpga_plugin.hardware.simulated.numbers import Numbers
from fpga_plugin.hardware.simulated.slots import CardFile, Shape
from fpga_plugin.hardware.simulated.state import (
    CLOCK_HIGH,
    CLOCK_LOW,
    RegionState,
    StateFile,
)
from fpga_plugin.hardware.simulated.tree import failure
from fpga_plugin.ids import AfuId, CardId, PciAddress, RegionId, region_id

AP6_ERROR = 1 << 50
"""PORT_ERROR bit 50, Ap6Event: the card has cut the AFU's power for heat (opae-sdk, fpgad)."""

MMIO_TIMEOUT = 1 << 32
"""PORT_ERROR, MMIOTimedOut: the AFU did not answer a read, and the card did, with all ones."""

PORT_OVERFLOW = 1 << 0
"""PORT_ERROR, TxCh0Overflow: the AFU sent more requests than it had credits for."""

PCIE_FORMAT = 1 << 0
"""PCIE0_ERROR, FormatTypeErr."""

_NONFATAL = {SimulatedFault.PCIE_ERROR: 1 << 2, SimulatedFault.PORT_FATAL: 1 << 3}
"""RAS_NONFAT_ERROR: PcieError, PortFatalErr."""

_SILENT = frozenset({SimulatedFault.AFU_HUNG, SimulatedFault.AFU_DEAD})

ALL_ONES = 0xFFFF_FFFF_FFFF_FFFF
"""What a read from a device that no longer answers gives on PCI Express."""

_INSTANCES = itertools.count(1)

AFU_BYTES = 16
"""How many bytes at the start of an image name its AFU, on every fake card of this project."""


@dataclass(slots=True)
class Binding:
    """One life of the drivers on a card; a rebind makes another, with numbers of its own.

    Attributes:
        fme: N of the FME.
        base: N of the base region, the container of FME and ports.
        nodes: M of each port, by port id.
        regions: N of each port's FPGA region, by port id.
        instance: distinguishes it from any other one of this process.
        manager_state: `state` of the FPGA manager.
        manager_status: `status` of the FPGA manager: errors of the last PR.
        fme_open: descriptors open on the FME's node.
        fme_exclusive: one of them is exclusive.
        exclusive: port ids whose one descriptor is exclusive.
        reconfiguring: the port id of the PR that runs.
    """

    fme: int
    base: int
    nodes: tuple[int, ...]
    regions: tuple[int, ...]
    instance: int
    manager_state: str = "unknown"
    manager_status: str = ""
    fme_open: int = 0
    fme_exclusive: bool = False
    exclusive: frozenset[int] = frozenset()
    reconfiguring: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What all cards share.

    Attributes:
        lock: covers all state; never held while anything waits.
        state: what the FPGAs hold.
        faults: what is armed.
        fmes, ports, regions: the kernel's numbers.
    """

    lock: AbstractContextManager[bool]
    state: StateFile
    faults: Faults
    fmes: Numbers
    ports: Numbers
    regions: Numbers


class Board:
    """One plugged card.

    Attributes:
        card: its id.
        address: its PCI function.
        shape: regions and interface id.
        file: the identity of the file that plugs it.
        fme_lock: the FME's mutex: a PR holds it to its end, opening and closing the FME need it.
            Taken before the machine's lock, never while that is held.
        binding: None while dfl-pci is unbound.
        gone: the card was unplugged; nothing of this object is true any more.
        binds: how often the drivers took the card.
        generation: how often the card's virtual functions were made or removed.
        autoprobe: virtual functions that are made get the driver that is for them, dfl-pci.
    """

    def __init__(self, machine: Machine, card: CardId, shape: Shape, file: CardFile) -> None:
        self.machine = machine
        self.card = card
        self.address = PciAddress.parse(card)
        self.shape = shape
        self.file = file
        self.fme_lock = threading.Lock()
        self.binding: Binding | None = None
        self._half_rate: dict[int, bool] = {}
        self.gone = False
        self.binds = 0
        self.generation = 0
        self.autoprobe = True

    @property
    def ports(self) -> range:
        """Its port ids."""
        return range(self.shape.regions)

    def region(self, port: int) -> RegionId:
        """The id of the region behind a port."""
        return region_id(self.card, port)

    def state(self, port: int) -> RegionState:
        """What a region holds.

        Raises:
            OSError: ENODEV, the card is gone.
        """
        state = self.machine.state.regions.get(self.region(port))
        if not isinstance(state, RegionState) or self.gone:
            raise failure(errno.ENODEV, self.card)
        return state

    def bind(self, *, fme: int | None = None, nodes: dict[int, int] | None = None) -> None:
        """The drivers take the card; numbers that are given are kept where they are free.

        The counter that a failed PR leaked belongs to the driver, so that a port is healthy
        after a rebind, its image still in it; the caller sees to that.
        """
        machine, keep = self.machine, nodes or {}
        self.binds += 1
        self.binding = Binding(
            fme=_number(machine.fmes, fme),
            base=machine.regions.allocate(),
            nodes=tuple(_number(machine.ports, keep.get(port)) for port in self.ports),
            regions=tuple(machine.regions.allocate() for _ in self.ports),
            instance=next(_INSTANCES),
        )
        for port in self.ports:
            state = replace(
                self.state(port), bound=True, node=self.binding.nodes[port], fme=self.binding.fme
            )
            machine.state.put(self.region(port), state)

    def unbind(self) -> None:
        """The drivers let the card go, with nodes and numbers; the FPGA keeps its image."""
        binding, self.binding = self.binding, None
        if binding is None:
            return
        machine = self.machine
        machine.fmes.free(binding.fme)
        for number in binding.nodes:
            machine.ports.free(number)
        for number in (binding.base, *binding.regions):
            machine.regions.free(number)
        for port in self.ports:
            state = replace(
                self.state(port), bound=False, node=None, fme=None, poisoned=False, open=0
            )
            machine.state.put(self.region(port), state)

    # What the ports' attributes show: dfl-afu-main.c, dfl-afu-error.c.

    def afu_id(self, port: int) -> str:
        """`afu_id`: EBUSY while a PR, or the leak of a failed one, holds the port in reset."""
        state = self.state(port)
        busy = self.binding is not None and self.binding.reconfiguring == port
        if busy or state.poisoned:
            raise failure(errno.EBUSY, self.region(port))
        return "f" * 32 if self._fault(port) in {SimulatedFault.FATAL, *_SILENT} else state.afu_id

    def power_state(self, port: int) -> str:
        """`power_state`: 4 bits, 6 in AP6."""
        match self._fault(port):
            case SimulatedFault.THERMAL:
                return "0x6"
            case SimulatedFault.FATAL:
                return "0xf"
            case _:
                return "0x0"

    def event(self, port: int) -> str:
        """`ap1_event`, `ap2_event`: one bit."""
        return "1" if self._fault(port) is SimulatedFault.FATAL else "0"

    def errors(self, port: int) -> str:
        """`errors/errors`: the port's error register."""
        match self._fault(port):
            case SimulatedFault.THERMAL:
                return f"0x{AP6_ERROR:x}"
            case SimulatedFault.FATAL:
                return f"0x{ALL_ONES:x}"
            case SimulatedFault.AFU_HUNG | SimulatedFault.AFU_DEAD:
                return f"0x{MMIO_TIMEOUT:x}"
            case SimulatedFault.PORT_FATAL:
                return f"0x{PORT_OVERFLOW:x}"
            case _:
                return "0x0"

    def reset(self, port: int) -> None:
        """A soft reset: PORT_RESET, the last close, and the beginning of a PR.

        __afu_port_disable (dfl-afu-main.c) counts before it waits for the acknowledgement. One that
        does not come leaves the count behind, and resets of a port so counted touch no register.

        Raises:
            OSError: ETIMEDOUT, not acknowledged: from now on the port is poisoned.
        """
        with self.machine.lock:
            state = self.state(port)
            if state.poisoned or self._fault(port) is not SimulatedFault.PORT_DEAF:
                return
            self.machine.state.commit(self.region(port), replace(state, poisoned=True))
        raise failure(errno.ETIMEDOUT, self.region(port))

    def clear_errors(self, port: int, text: str) -> None:
        """Write `errors/errors`: EBUSY in AP6, else, in reset, the exact value that was read."""
        value = unsigned(text)
        if self._fault(port) is not SimulatedFault.THERMAL:
            self.reset(port)
        match self._fault(port):
            case SimulatedFault.THERMAL:
                raise failure(errno.EBUSY, self.region(port))
            case SimulatedFault.FATAL:  # the port does not leave reset
                raise failure(errno.ETIMEDOUT, self.region(port))
            case SimulatedFault.AFU_HUNG | SimulatedFault.AFU_DEAD if value == MMIO_TIMEOUT:
                pass  # the next read of the AFU sets it again
            case SimulatedFault.PORT_FATAL if value == PORT_OVERFLOW:
                self.machine.faults.use_up(self.region(port))
            case _:
                if value != 0:
                    raise failure(errno.EINVAL, self.region(port))

    def other_register(self, port: int) -> str:
        """A 64-bit register of the port that is 0 while the port answers."""
        return f"0x{ALL_ONES if self._fault(port) is SimulatedFault.FATAL else 0:x}"

    def set_clock(self, port: int, text: str) -> None:
        """Write `userclk/frequency` in kHz; the PLL rounds to whole MHz.

        Raises:
            OSError: EINVAL, no number or outside the limits.
        """
        kilohertz = unsigned(text)
        if not CLOCK_LOW * 1000 <= kilohertz <= CLOCK_HIGH * 1000:
            raise failure(errno.EINVAL, self.region(port))
        self.change(port, lambda state: replace(state, clock=round(kilohertz / 1000)))

    def select_clock(self, port: int, text: str) -> None:
        """Write `userclk_freqcntrcmd`: bit 32 says which clock is counted."""
        self.state(port)
        self._half_rate[port] = not unsigned(text) >> 32 & 1

    def counted_clock(self, port: int) -> str:
        """`userclk_freqcntrsts`: the frequency of the clock that is counted, in 10 kHz."""
        return f"{self.state(port).clock * 100 // (2 if self._half_rate.get(port) else 1):#x}"

    def clear_memory(self, text: str) -> None:
        """Write `inf0_clear`: exactly 1 (dfl-emif.c takes the newline of an `echo`)."""
        if text.removesuffix("\n") != "1":
            raise failure(errno.EINVAL, self.card)
        self.state(0)

    # What the FME's attributes show: dfl-fme-error.c.

    def nonfatal_errors(self) -> str:
        """`errors/nonfatal_errors`: its bits summarise other registers."""
        bits = {_NONFATAL.get(fault, 0) for fault in map(self._fault, self.ports) if fault}
        return f"0x{sum(bits):x}"

    def pcie_errors(self) -> str:
        """`errors/pcie0_errors`."""
        with self.fme_lock:
            return f"0x{PCIE_FORMAT if self._with_pcie_errors() else 0:x}"

    def clear_pcie_errors(self, text: str) -> None:
        """Write `errors/pcie0_errors`: the exact value that was read."""
        with self.fme_lock:
            causes = self._with_pcie_errors()
            if unsigned(text) != (PCIE_FORMAT if causes else 0):
                raise failure(errno.EINVAL, self.card)
            for port in causes:
                self.machine.faults.use_up(self.region(port))

    def _with_pcie_errors(self) -> list[int]:
        return [port for port in self.ports if self._fault(port) is SimulatedFault.PCIE_ERROR]

    def fme_held(self) -> bool:
        """Whether another process has the FME open."""
        return SimulatedFault.FME_OPEN in map(self._fault, self.ports)

    def behind_fme_lock(self, value: str) -> str:
        """An attribute of the FME whose driver takes the FME's mutex, so that a PR delays it."""
        with self.fme_lock:
            return value

    def change(self, port: int, edit: Callable[[RegionState], RegionState]) -> None:
        """Change what a region holds, on disk too.

        Raises:
            OSError: ENODEV, the card is gone; or the state cannot be written.
        """
        with self.machine.lock:
            self.machine.state.commit(self.region(port), edit(self.state(port)))

    def _fault(self, port: int) -> SimulatedFault | None:
        self.state(port)
        return self.machine.faults.armed(self.region(port))


@dataclass(slots=True)
class OpenFile:
    """An open descriptor. `port` is None for the FME."""

    board: Board
    binding: Binding
    port: int | None

    @property
    def alive(self) -> bool:
        """Whether the device that was opened is still there."""
        return not self.board.gone and self.board.binding is self.binding


def image_afu_id(head: bytes) -> AfuId:
    """The AFU id of an image that begins with `head`."""
    return AfuId(head[:AFU_BYTES].ljust(AFU_BYTES, b"\0").hex())


def unsigned(text: str) -> int:
    """A number as `kstrtoull(buf, 0, ...)` reads it.

    Raises:
        OSError: EINVAL, no number.
    """
    try:
        value = int(text.removesuffix("\n"), 0)
    except ValueError:
        value = -1
    if value < 0:
        raise failure(errno.EINVAL)
    return value


def _number(numbers: Numbers, wanted: int | None) -> int:
    if wanted is not None and numbers.take(wanted):
        return wanted
    return numbers.allocate()
